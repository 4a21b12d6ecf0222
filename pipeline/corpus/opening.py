"""Opening: the corpus that a directory holds, whatever its kind."""

import os
from collections.abc import Sequence
from typing import Any, Unpack

from etils import epath

from pipeline.corpus.corpus import Corpus, OpenOptions, WithFeatures
from pipeline.corpus.description import DESCRIPTION, read_description
from pipeline.corpus.interface import AnyCorpus, read_as
from pipeline.corpus.links import Linked, open_link
from pipeline.corpus.pairs import Pairs, as_sides
from pipeline.corpus.sides import read_sides
from pipeline.corpus.stored.directory import MANIFEST
from pipeline.corpus.tasks import TARGETS
from pipeline.corpus.token_formats import describe_use, recognise
from pipeline.errors import InvalidValue, Missing, require_whole
from pipeline.fs.atomic import as_path


def open_each(
    directory: epath.Path, names: Sequence[str], **options: Unpack[OpenOptions]
) -> dict[str, AnyCorpus]:
    """The corpus of each side, with an equal share of `cache_bytes`."""
    if (room := options.get("cache_bytes")) is not None:
        options["cache_bytes"] = require_whole("cache_bytes", room, len(names)) // len(names)
    return {name: _open_one(directory / name, **options) for name in names}


def _open_one(directory: epath.Path, **options: Unpack[OpenOptions]) -> AnyCorpus:
    """The corpus of one side in a directory."""
    if (read_description(directory) or {}).get("kind") == Linked.kind:
        return open_link(directory)
    cached: Any = {name: value for name, value in options.items() if name != "features"}
    features = [*options.get("features", ())]
    corpus: AnyCorpus = (
        WithFeatures(directory, features, **cached) if features else Corpus(directory, **cached)
    )
    return read_as(corpus)


def open_corpus(directory: epath.PathLike, **options: Unpack[OpenOptions]) -> AnyCorpus:
    """The corpus in `directory`, of any kind: `Corpus.open` with its options."""
    path, missing = as_path(directory), None
    try:
        if (recorded := read_sides(path)) is not None:
            names, loss = recorded
            return as_sides(open_each(path, names, **options), loss)
        whole = any((path / name).exists() for name in (MANIFEST, DESCRIPTION))
        if not whole and any((path / TARGETS.name / n).exists() for n in (MANIFEST, DESCRIPTION)):
            return Pairs.open(path, **options)
        if whole or not path.is_file():
            return _open_one(path, **options)
    except Missing as error:
        missing = error
    if kind := recognise(directory):
        raise InvalidValue(f"{os.fspath(directory)} {describe_use(directory, kind)}")
    raise missing or InvalidValue(
        f"{os.fspath(path)} is a file; give the directory of a corpus (to make one from text: "
        "lockstep prepare 'data/*.txt' --into corpus), or for ids in an Arrow file --tokens arrow "
        "column=NAME"
    )
