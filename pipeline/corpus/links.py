"""Links: a directory that stands for token files of another program, which stay where they are."""

import os
from typing import Any

from etils import epath

from pipeline.corpus.description import (
    DESCRIPTION,
    as_json,
    from_json,
    read_description,
    write_description,
)
from pipeline.corpus.in_place import InPlace
from pipeline.corpus.stored.directory import MANIFEST, damage
from pipeline.errors import InvalidValue
from pipeline.fs.atomic import as_path, make_directory
from pipeline.text import tokenizers


class Linked(InPlace):
    """Tokens in place that a directory stands for; `open_link` makes it."""

    kind = "linked"

    def arguments(self) -> dict[str, Any]:
        """See `AnyCorpus`."""
        return {"directory": os.fspath(self.directory)}

    @classmethod
    def make(cls, **arguments: Any) -> "Linked":
        """See `AnyCorpus`."""
        return open_link(as_path(arguments["directory"]))


def link(corpus: InPlace, directory: epath.PathLike) -> InPlace:
    """Makes `directory` stand for a corpus in place, so that it can be opened like any other.

    Raises:
        ValueError: the directory holds another corpus.
    """
    directory, arguments = as_path(directory), InPlace.arguments(corpus)
    arguments.pop("tokenizer", None)
    content = {"kind": Linked.kind, "of": as_json(arguments), "identity": corpus.identity}
    stored = read_description(directory) or content
    if (directory / MANIFEST).exists() or stored | content != stored:
        raise InvalidValue(
            f"{os.fspath(directory)} holds another corpus, or the token files have changed; choose "
            "another directory, or delete this one"
        )
    make_directory(directory)
    saved = None if corpus.tokenizer is None else corpus.tokenizer.save(directory)
    write_description(directory, content | {"tokenizer": saved})
    return open_link(directory)


def open_link(directory: epath.Path) -> Linked:
    """The corpus that a directory stands for.

    Raises:
        ValueError: the link is damaged, or its token files have changed.
    """
    entries: Any = read_description(directory)
    try:
        arguments, identity = from_json(entries["of"]), entries["identity"]
        if entries["tokenizer"] is not None:
            arguments["tokenizer"] = tokenizers.load(entries["tokenizer"], directory)
        corpus = Linked(**arguments)
    except (KeyError, TypeError, AttributeError) as error:
        raise damage(directory / DESCRIPTION, f"{error!r}") from error
    if corpus.identity != identity:
        raise InvalidValue(
            f"the files that {os.fspath(directory)} stands for have changed; put them back, or "
            "delete that directory and link again"
        )
    corpus.directory = directory
    return corpus
