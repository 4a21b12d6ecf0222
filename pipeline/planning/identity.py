"""Identities: everything that batches depend on, as JSON, to be compared part by part."""

import hashlib
import json
from collections.abc import Iterator
from typing import Any


def fingerprint_of(identity: Any) -> str:
    """A short digest of JSON."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]


def flatten(identity: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The values in some JSON, each with a name made of its keys, the innermost first.

    >>> dict(flatten({"seed": 3, "corpora": {"code": {"lengths": "5e1f"}}}))
    {'seed': 3, 'lengths of code': '5e1f'}
    >>> dict(flatten({"seed": [{"from": 3}, 4]}))  # none that a plan has
    {'seed': [{'from': 3}, 4]}
    """
    if isinstance(identity, dict) and identity:
        for key, value in identity.items():
            yield from flatten(value, key if name in ("", "corpora") else f"{key} of {name}")
    elif isinstance(identity, list) and identity and all(map(_is_stage, identity)):
        for value in identity:
            yield from flatten(value, f"step {value.get('from', 0):,}")
    else:
        yield name, identity


def _is_stage(value: Any) -> bool:
    return isinstance(value, dict) and type(value.get("from", 0)) is int
