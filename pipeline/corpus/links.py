"""Links: a directory that stands for token files of another program, which stay where they are."""

import json
import os
from typing import Any

import numpy as np
from etils import epath

from pipeline.corpus.in_place import InPlace
from pipeline.corpus.stored.directory import MANIFEST
from pipeline.corpus.tasks import TASKS
from pipeline.errors import InvalidValue
from pipeline.fs.atomic import as_path, atomic_write, is_local, make_directory
from pipeline.text import tokenizers
from pipeline.text.features import Feature
from pipeline.text.sources import files

# The file that makes a directory a link.
LINK = "in_place.json"


def link(corpus: InPlace, directory: epath.PathLike) -> InPlace:
    """Makes `directory` stand for a corpus in place, so that it can be opened like any other.

    Raises:
        ValueError: the directory holds another corpus.
    """
    place, options = make_directory(as_path(directory)), dict(corpus.options)
    features = {name: each.as_json for name, each in corpus.features.items()}
    for name in ("task", "tokenizer", "features"):
        options.pop(name, None)
    if corpus.format == "flat" and options.get("weights"):
        options["weights"] = _absolute(options["weights"])
    content: dict[str, Any] = {"format": corpus.format, "paths": _absolute(corpus.paths)}
    content |= {"options": options, "features": features, "identity": corpus.identity}
    content = json.loads(json.dumps(content, default=lambda each: np.dtype(each).name))
    there = json.loads((place / LINK).read_bytes()) if (place / LINK).exists() else content
    if (place / MANIFEST).exists() or there | content != there:
        raise InvalidValue(
            f"{os.fspath(place)} holds another corpus, or the token files have changed; choose "
            "another directory, or delete this one"
        )
    content["tokenizer"] = None if corpus.tokenizer is None else corpus.tokenizer.save(place)
    with atomic_write(place / LINK) as file:
        file.write(json.dumps(content, indent=1).encode())
    return open_link(place)


def _absolute(paths: files.Paths) -> list[str]:
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
        options["features"] = {name: Feature(**each) for name, each in content["features"].items()}
        if content["tokenizer"] is not None:
            options["tokenizer"] = tokenizers.load(content["tokenizer"], directory)
        format, paths, identity = content["format"], content["paths"], content["identity"]
        options["task"] = TASKS[identity["task"]]
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise InvalidValue(
            f"{os.fspath(directory / LINK)} is damaged: {error!r}; delete it, and link again"
        ) from error
    corpus = InPlace(format, paths, **{name: each for name, each in options.items() if each != {}})
    if corpus.identity != identity:
        raise InvalidValue(
            f"the files that {os.fspath(directory)} stands for have changed; put them back, or "
            "delete that directory and link again"
        )
    corpus.directory = directory
    return corpus
