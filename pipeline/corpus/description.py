"""Descriptions: a corpus of any kind as JSON, and the corpus that is made of it again.

A description has the `kind` of a class and its `arguments`, members among them. A pickle of a
corpus has the same arguments, as objects, so that arrays of all examples travel to no worker.
"""

import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from etils import epath

from pipeline import registry
from pipeline.corpus.interface import CLASSES, AnyCorpus
from pipeline.corpus.stored.directory import damage, read_entries, write_entries
from pipeline.corpus.tasks import TASKS, Task
from pipeline.errors import InvalidValue, suggest_option
from pipeline.fs.atomic import absolute, as_path, make_directory
from pipeline.text.features import Feature
from pipeline.text.fingerprints import fingerprint

# The file that says which corpus a directory stands for, if its manifest does not.
DESCRIPTION = "description.json"

# How other values than corpora are made again, by the `kind` of their JSON.
VALUES: dict[str, Callable[..., Any]] = {
    "feature": Feature,
    "task": lambda name: TASKS[name],
    "dtype": np.dtype,
}


def describe(corpus: AnyCorpus, root: epath.PathLike | None = None) -> dict[str, Any]:
    """The corpus as JSON, of which `make_corpus` makes it again.

    >>> describe(Corpus.open("corpus").split(0.1)[0])  # doctest: +SKIP
    {'kind': 'split', 'corpus': {'kind': 'stored', 'directory': '/data/corpus'},
    'hold_out': 0.1, 'held_out': False}

    Directories inside `root` are relative to it. It does not say where parts are cached.

    Raises:
        ValueError: a part of the corpus, or its tokenizer, is in memory.
    """
    return as_json(corpus, "" if root is None else os.path.join(absolute(root), ""))


def make_corpus(description: Mapping[str, Any], root: epath.PathLike = ".") -> AnyCorpus:
    """The corpus with a description, whose relative directories are inside `root`.

    Raises:
        ValueError: it describes no corpus, or that has changed.
    """
    corpus = from_json(description, root)
    if not isinstance(corpus, AnyCorpus):
        raise InvalidValue(f"{description!r:.80} describes no corpus; it must have a 'kind'")
    return corpus


def as_json(value: Any, root: str = "", name: str = "") -> Any:
    """An argument of a corpus as JSON; `root` is the beginning of directories that is left out."""
    if isinstance(value, AnyCorpus):
        if not value.kind:
            raise InvalidValue(
                f"the corpus is {value!r:.80}, which has no directory, so it cannot be opened "
                "again; write it with Corpus.from_arrays"
            )
        arguments = value.arguments().items()
        portable = {name: argument for name, argument in arguments if name not in value.of_machine}
        return {"kind": value.kind} | as_json(portable, root)
    if isinstance(value, Feature):
        return {"kind": "feature", **value.as_json}
    if isinstance(value, Task):
        return {"kind": "task", "name": value.name}
    if isinstance(value, Mapping):
        return {name: as_json(entry, root, name) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(item, root) for item in value]
    if name == "directory":
        return absolute(value).removeprefix(root)
    if name == "dtype":
        return {"kind": "dtype", "dtype": np.dtype(value).name}
    if callable(value):
        return fingerprint(value)
    if value is None or isinstance(value, str | int | float):
        return value
    raise InvalidValue(
        f"{name} is {value!r:.80}, which has no directory; make one stand for the corpus: lockstep "
        "prepare … --tokens … --into DIRECTORY"
    )


def from_json(value: Any, root: epath.PathLike = ".") -> Any:
    """The argument that `as_json` gave as JSON; lists become tuples."""
    if isinstance(value, list):
        return tuple(from_json(item, root) for item in value)
    if not isinstance(value, Mapping):
        return value
    entries = {name: from_json(entry, root) for name, entry in value.items()}
    if not isinstance(kind := entries.get("kind"), str):
        return entries
    del entries["kind"]
    if "directory" in entries:
        entries["directory"] = as_path(root) / entries["directory"]
    if make := VALUES.get(kind):
        return make(**entries)
    if (corpus_class := _find(kind)) is None:
        raise InvalidValue(f"there is no kind of corpus {suggest_option(kind, [*CLASSES])}")
    return corpus_class.make(**entries)


def _find(kind: Any) -> type[AnyCorpus] | None:
    """The class of corpora of a kind, which may be a view of another package."""
    if kind not in CLASSES and kind in registry.names("views"):
        registry.find("views", kind)  # a class is in CLASSES once it is imported
    return CLASSES.get(kind)


def read_description(directory: epath.Path) -> dict[str, Any] | None:
    """The entries of the description in a directory; None if there is none.

    Raises:
        ValueError: it is damaged.
    """
    path = directory / DESCRIPTION
    try:
        entries = read_entries(path, path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    del entries["schema_version"]
    if _find(entries.get("kind")) is None:
        raise damage(path, f"its kind is {entries.get('kind')!r}")
    return entries


def write_description(directory: epath.Path, entries: Mapping[str, Any]) -> None:
    """Writes the description of a directory."""
    write_entries(make_directory(directory) / DESCRIPTION, entries)
