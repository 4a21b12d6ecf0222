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
from pipeline.corpus.manifest import MANIFEST, damage
from pipeline.corpus.token_files import NPY, index_of, is_llm_c, table_of
from pipeline.errors import InvalidValue
from pipeline.fs.atomic import as_path, make_directory
from pipeline.text import sources, tokenizers
from pipeline.text.sources import files
from pipeline.text.sources.content import read_head
from pipeline.text.sources.tables import is_saved


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
    place, arguments = as_path(directory), InPlace.arguments(corpus)
    arguments.pop("tokenizer", None)
    content = {"kind": Linked.kind, "of": as_json(arguments), "identity": corpus.identity}
    there = read_description(place) or content
    if (place / MANIFEST).exists() or there | content != there:
        raise InvalidValue(
            f"{os.fspath(place)} holds another corpus, or the token files have changed; choose "
            "another directory, or delete this one"
        )
    make_directory(place)
    saved = None if corpus.tokenizer is None else corpus.tokenizer.save(place)
    write_description(place, content | {"tokenizer": saved})
    return open_link(place)


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


def guess(path: epath.PathLike) -> str:
    """The format of the token files that a path names; "" if they do not seem to be any."""
    place, name = as_path(path), os.fspath(path)
    if any(each in name for each in "*?["):
        return guess(found[0]) if (found := files.find(name)) else ""
    if place.is_dir():
        if not is_saved(path):
            return ""
        splits = [place / "state.json", *place.glob("*/state.json")]
        folder = next((each.parent for each in splits if each.exists()), place)
        return "arrow" * ("input_ids" in sources.ArrowFiles(folder).names())
    if as_path(index_of(path)).exists():
        return "megatron"
    if place.suffix == ".npy" and place.exists():
        return "npy" if read_head(place).startswith(NPY) else "flat"
    return "flat" * (place.suffix == ".bin" and place.exists())


def call_for(path: epath.PathLike, format: str) -> str:
    """How to open token files of a format, as the end of a sentence."""
    more, flags = "", ""
    if format == "flat" and not is_llm_c(read_head(first := files.find(path)[0])):
        more, flags = ", dtype='uint16', end=50256", " dtype=uint16 end=50256"
        if table_of(first).exists():
            more, flags = ", dtype='uint16'", " dtype=uint16"
    more = ", 'offsets.npy'" if format == "npy" else more
    return (
        f"holds tokens, which need no preparing: pipeline.InPlace.{format}"
        f"({os.fspath(path)!r}{more}) opens them, and commands take --tokens {format}{flags}"
    )
