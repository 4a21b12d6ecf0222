"""Features that were added to a finished corpus: files of their own, beside its parts."""

import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from etils import epath

from pipeline.corpus.stored.directory import damage
from pipeline.corpus.stored.manifest import Manifest
from pipeline.corpus.stored.parts import write_part
from pipeline.errors import InvalidValue, suggest_option
from pipeline.fs.atomic import directory_lock
from pipeline.text.features import Feature, check_features, zip_columns
from pipeline.text.ragged import Buffer, Ragged

# The directory of added features beside a corpus, and the name of each manifest in it.
FEATURES, NAME = "features", "features.json"


class Added(NamedTuple):
    """A directory of parts, and their manifest: of features added to a corpus, or of the corpus.

    The parts of features have the same examples as those of the corpus.
    """

    directory: epath.Path
    manifest: Manifest


def find_added(directory: epath.Path, names: Iterable[str], of: str) -> list[Added]:
    """The added features `names` of the corpus in `directory`, of digest `of`."""
    there = (directory / FEATURES).glob(f"*/{NAME}") if (directory / FEATURES).exists() else ()
    every = {path.parent: path.parent.name for path in there}
    found: dict[str, Added] = {}
    for name in names:
        places = [place for place, label in every.items() if name in label.split("+")]
        if not places:
            known = sorted({each for label in every.values() for each in label.split("+")})
            raise InvalidValue(
                f"no features were added to {os.fspath(directory)} as "
                f"{suggest_option(str(name), known)}"
            )
        manifest = Manifest.read(places[0] / NAME)
        if manifest.origin != {"of": of}:
            raise damage(places[0] / NAME, "it is of another corpus")
        found[places[0].name] = Added(places[0], manifest)
    return list(found.values())


def add_features(
    corpus: Added,
    counts: Iterable[np.ndarray],
    columns: Mapping[str, Iterable[Any]],
    features: Mapping[str, Feature],
) -> None:
    """Writes features beside their corpus; those that are there already must be the same.

    `counts` are the tokens of each example, part by part; columns have an entry for each example.
    """
    known = check_features(features)
    if not known or {*columns} != {*known}:
        raise InvalidValue(
            f"columns are {', '.join(map(str, columns)) or 'none'}, but features are "
            f"{', '.join(known) or 'none'}; give a column and a pipeline.Feature for each name"
        )
    place = corpus.directory / FEATURES / "+".join(sorted(known))
    with directory_lock(place, "adding features"):
        there = Manifest.read(place / NAME).parts if (place / NAME).exists() else None
        parts = []
        made = _make_parts(counts, columns, known)
        for number, (part, examples) in enumerate(zip(corpus.manifest.parts, made, strict=True)):
            if there is None:
                parts.append(write_part(place / part.file, examples).part)
            elif examples.digest != there[number].sha256:
                raise InvalidValue(
                    f"{os.fspath(place)} holds other values of {', '.join(known)}; add them "
                    "under another name, or delete that directory"
                )
        if there is None:
            origin: dict[str, str | None] = {"of": corpus.manifest.digest}
            task = corpus.manifest.task
            Manifest(task=task, origin=origin, features=known, parts=parts).write(place / NAME)


def _make_parts(
    counts: Iterable[np.ndarray], columns: Mapping[str, Iterable[Any]], known: dict[str, Feature]
) -> Iterator[Ragged]:
    """The features of each part, checked; those without a dtype get that of their first entry."""
    buffer, rows, number = Buffer(known, None), zip_columns(columns), 0
    for of_part in counts:
        for tokens in of_part.tolist():
            if (row := next(rows, None)) is None:
                raise InvalidValue(
                    f"the columns have {number:,} entries, but the corpus has more examples; give "
                    "an entry for each"
                )
            buffer.add(row[1], number, tokens)
            number += 1
        known |= buffer.features
        yield buffer.take()
    if next(rows, None) is not None:
        raise InvalidValue(
            f"the columns have more than {number:,} entries, one for each example; remove the rest"
        )
