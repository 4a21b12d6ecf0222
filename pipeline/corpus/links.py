"""Links: a directory that stands for token files of another program, which stay where they are."""

import ast
import inspect
import json
import os
from collections.abc import Mapping
from typing import Any

from etils import epath

from pipeline.corpus.in_place import InPlace
from pipeline.corpus.manifest import MANIFEST
from pipeline.corpus.tasks import TASKS
from pipeline.errors import InvalidValue, require_one_of
from pipeline.fs.atomic import as_path, atomic_write, is_local, make_directory
from pipeline.text import tokenizers
from pipeline.text.features import Feature
from pipeline.text.sources import files

# The file that makes a directory a link, and the class methods of `InPlace` that it may name.
LINK = "in_place.json"
FORMATS = "arrow", "parquet", "npy", "megatron", "flat", "datatrove", "mds", "levanter"


def open_tokens(form: str, paths: files.Paths, options: Mapping[str, Any]) -> InPlace:
    """The corpus of the class method of `InPlace` that `form` names; options of None are left out.

    A single path may be in a list.

    >>> open_tokens("flat", "train.bin", {"dtype": "uint16", "end": 50256})  # doctest: +SKIP
    """
    require_one_of("format", form, FORMATS)
    make: Any = getattr(InPlace, form)
    given = {name: value for name, value in options.items() if value is not None}
    if not isinstance(paths, str | os.PathLike) and len(paths) == 1:
        (paths,) = paths
    try:
        inspect.signature(make).bind(paths, **given)
    except TypeError as error:
        raise InvalidValue(f"the format {form!r} does not fit its options: {error}") from error
    return make(paths, **given)


def parse_options(texts: list[str]) -> dict[str, Any]:
    """Options as `NAME=VALUE`, whose values are Python's, or else strings.

    >>> parse_options(["dtype=uint16", "end=50256", "weights=()"])
    {'dtype': 'uint16', 'end': 50256, 'weights': ()}
    """
    options: dict[str, Any] = {}
    for name, sign, value in (text.partition("=") for text in texts):
        if not sign:
            raise InvalidValue(f"{name!r} is no option; give NAME=VALUE, such as dtype=uint16")
        try:
            options[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            options[name] = value
    return options


def link(corpus: InPlace, directory: epath.PathLike) -> InPlace:
    """Makes `directory` stand for a corpus in place, so that it can be opened like any other.

    Raises:
        ValueError: the directory holds another corpus.
    """
    form, paths, given = corpus.call
    place = make_directory(as_path(directory))
    options = {name: value for name, value in given.items() if name not in ("task", "tokenizer")}
    options["features"] = {name: each.as_json for name, each in corpus.features.items()}
    for name in {"npy": ["offsets"], "flat": ["weights"]}.get(form, []):
        options[name] = _absolute(options[name])
    content = {
        "format": form,
        "paths": _absolute(paths),
        "options": {name: value for name, value in options.items() if value not in (None, {})},
        "identity": dict(corpus.identity),
    }
    content = json.loads(json.dumps(content))
    there = json.loads((place / LINK).read_bytes()) if (place / LINK).exists() else content
    if (place / MANIFEST).exists() or there | content != there:
        raise InvalidValue(
            f"{os.fspath(place)} holds another corpus, or the token files have changed; choose "
            "another directory, or delete this one"
        )
    content["tokenizer"] = None if corpus.tokenizer is None else corpus.tokenizer.save(place)
    with atomic_write(place / LINK, shared=True) as file:
        file.write(json.dumps(content, indent=1).encode())
    return open_link(place)


def _absolute(paths: files.Paths | None) -> list[str] | None:
    if paths is None:
        return None
    named = [paths] if isinstance(paths, str | os.PathLike) else paths
    return [os.path.abspath(each) if is_local(each) else os.fspath(each) for each in named]


def open_link(directory: epath.Path) -> InPlace:
    """The corpus that a directory stands for.

    Raises:
        ValueError: the link is damaged, or its token files have changed.
    """
    try:
        content = json.loads((directory / LINK).read_bytes())
        options: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in content["options"].items()
        }
        features = {name: Feature(**each) for name, each in options.pop("features", {}).items()}
        if content["tokenizer"] is not None:
            options["tokenizer"] = tokenizers.load(content["tokenizer"], directory)
        form, paths, identity = content["format"], content["paths"], content["identity"]
        options |= {"features": features or None, "task": TASKS[identity["task"]]}
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise InvalidValue(
            f"{os.fspath(directory / LINK)} is damaged: {error!r}; delete it, and link again"
        ) from error
    if form == "npy":
        (options["offsets"],) = options["offsets"]
    corpus = open_tokens(form, paths, options)
    if corpus.identity != identity:
        raise InvalidValue(
            f"the files that {os.fspath(directory)} stands for have changed; put them back, or "
            "delete that directory and link again"
        )
    corpus.directory = directory
    return corpus


def guess(path: epath.PathLike) -> str:
    """The format of the token files that a path names; "" if they do not seem to be any."""
    place, name = as_path(path), os.fspath(path)
    if any(each in name for each in "*?["):
        return guess(found[0]) if (found := files.find(name)) else ""
    if place.is_dir():
        signs = {"state.json": "arrow", "dataset_dict.json": "arrow", "index.json": "mds"}
        signs["shard_ledger.json"] = "levanter"
        found = [form for sign, form in signs.items() if (place / sign).exists()]
        return found[0] if found else "datatrove" * any(True for _ in place.glob("*.ds"))
    if as_path(f"{name.removesuffix('.bin').removesuffix('.idx')}.idx").exists():
        return "megatron"
    endings = {".bin": "flat", ".ds": "datatrove", ".npy": "npy"}
    return endings.get(place.suffix, "") if place.exists() else ""


def call_for(path: epath.PathLike, form: str) -> str:
    """How to open token files, as the end of a sentence."""
    more = {"flat": ", dtype='uint16', end=50256", "npy": ", 'offsets.npy'"}.get(form, "")
    return (
        f"holds tokens, which need no preparing: pipeline.InPlace.{form}({os.fspath(path)!r}{more}"
        f") opens them, and commands take --tokens {form}"
    )
