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


def differences(then: Any, now: Any) -> list[str]:
    """Each part that differs between two identities, which are JSON, in words.

    >>> differences({"seed": 3, "corpora": {"text": {"lengths": "a"}}}, {"seed": 4})
    ['seed was 3 and is now 4', 'lengths of text was a and is now not given']
    """
    old, new = (dict(flatten(identity)) for identity in (then, now))

    def named(name: str) -> str:
        digests = {f"{values.get(name)}".partition(" without ")[0] for values in (old, new)}
        excludes = name.startswith("lengths") and len(digests) == 1  # see `Lengths.digest`
        return f"exclude differs: {name}" if excludes else name

    return [
        f"{named(name)} was {old.get(name, 'not given')} and is now {new.get(name, 'not given')}"
        for name in dict.fromkeys([*old, *new])
        if old.get(name) != new.get(name)
    ]


def difference(before: Any, now: Any) -> Any:
    """What `apply` adds to some JSON to make other JSON: the values that differ, inside dicts.

    >>> difference({"seed": 3, "corpora": {"a": {"weight": 1}, "b": {}}}, {"seed": 3, "corpora":
    ... {"a": {"weight": 2}, "b": {}}})
    {'corpora': {'a': {'weight': 2}}}
    """
    if not (isinstance(before, dict) and isinstance(now, dict)):
        return now
    new = {n: difference(before.get(n), v) for n, v in now.items() if before.get(n, ...) != v}
    gone = [name for name in before if name not in now]
    return new | ({"": gone} if gone else {})  # no key of an identity is empty


def apply(changes: Any, before: Any) -> Any:
    """The JSON that has these `difference`s from the JSON `before`."""
    if not (isinstance(before, dict) and isinstance(changes, dict)):
        return changes
    gone = changes.get("", ())
    new = {name: apply(value, before.get(name)) for name, value in changes.items() if name}
    return {name: value for name, value in before.items() if name not in gone} | new


def _is_stage(value: Any) -> bool:
    return isinstance(value, dict) and type(value.get("from", 0)) is int
