"""Features that were added to a finished corpus: files of their own, beside its parts."""

import dataclasses
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath

from pipeline.corpus.manifest import (
    SCHEMA_VERSION,
    damage,
    part_name,
    read_features,
    require_columns,
    require_digest,
    tokens_digest,
    write_entries,
)
from pipeline.corpus.parts import Part, write_features
from pipeline.errors import InvalidValue, suggest_option
from pipeline.fs.atomic import directory_lock
from pipeline.text.features import Column, Feature, check_features, zip_columns
from pipeline.text.ragged import Ragged

# The directory of all of them beside a corpus, and in it, by their names, what says what they are.
FEATURES, MANIFEST = "features", "features.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Added:
    """Some features that were added at once, in a directory of their own.

    Attributes:
        directory: where their parts are, divided as those of the corpus.
        of: the digest of the tokens of the corpus.
        features: by name.
        parts: their files.
    """

    directory: epath.Path
    of: str
    features: Mapping[str, Feature]
    parts: Sequence[Part]

    @property
    def digest(self) -> str:
        """A short hash of all values."""
        return tokens_digest([*self.parts])

    @property
    def bytes(self) -> int:
        """The size of their files."""
        return sum(part.bytes for part in self.parts)

    @classmethod
    def read(cls, directory: epath.Path) -> "Added":
        """Those in a directory, if they are whole."""
        path = directory / MANIFEST
        try:
            entries = json.loads(path.read_text())
            require_digest(entries)
            parts = [Part(**part) for part in entries["parts"]]
            features = read_features(entries["features"])
            require_columns(parts, features)
            return cls(directory=directory, of=entries["of"], features=features, parts=parts)
        except OSError:
            raise
        except Exception as error:  # of JSON, or of entries that are not as expected
            raise damage(path, str(error)) from error

    def write(self) -> None:
        """Writes what they are, as the last file."""
        entries = {
            "schema_version": SCHEMA_VERSION,
            "of": self.of,
            "features": {name: feature.as_json for name, feature in self.features.items()},
            "parts": [dataclasses.asdict(part) for part in self.parts],
        }
        write_entries(self.directory / MANIFEST, entries)


def find_added(directory: epath.Path, names: Iterable[str], of: str) -> list[Added]:
    """Those of the features `names` beside the corpus in `directory`, whose digest is `of`."""
    there = (directory / FEATURES).glob(f"*/{MANIFEST}") if (directory / FEATURES).exists() else ()
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
        added = Added.read(places[0])
        if added.of != of:
            raise damage(places[0] / MANIFEST, "it is of another corpus")
        found[places[0].name] = added
    return list(found.values())


def add_features(
    directory: epath.Path,
    of: str,
    counts: Iterable[np.ndarray],
    columns: Mapping[str, Iterable[Any]],
    features: Mapping[str, Feature],
) -> Added:
    """Writes features of a corpus beside it; what is there already must be the same.

    Args:
        directory: of the corpus.
        of: the digest of its tokens.
        counts: the tokens of each example, part by part.
        columns: the values, by name, an entry for each example.
        features: by the same names.
    """
    known = check_features(features)
    if not known or {*columns} != {*known}:
        raise InvalidValue(
            f"columns are {', '.join(map(str, columns)) or 'none'}, and features are "
            f"{', '.join(known) or 'none'}; give a column and a pipeline.Feature for each name"
        )
    place = directory / FEATURES / "+".join(sorted(known))
    with directory_lock(place, "adding features"):
        there = Added.read(place) if (place / MANIFEST).exists() else None
        parts: list[Part] = []
        for number, examples in enumerate(_make_parts(counts, columns, known)):
            if there is not None:
                if examples.features_digest != there.parts[number].sha256:
                    raise InvalidValue(
                        f"{os.fspath(place)} holds other values of {', '.join(known)}; add them "
                        "under another name, or delete that directory"
                    )
                continue
            path = place / part_name(number)
            parts.append(write_features(path, examples).part)
        if there is not None:
            return there
        added = Added(directory=place, of=of, features=known, parts=parts)
        added.write()
        return added


def _make_parts(
    counts: Iterable[np.ndarray], columns: Mapping[str, Iterable[Any]], known: dict[str, Feature]
) -> Iterator[Ragged]:
    """The features of each part, checked; those without a dtype get that of their first entry."""
    entries, number = zip_columns(columns), 0
    for of_part in counts:
        held: dict[str, list[np.ndarray]] = {name: [] for name in known}
        for tokens in of_part.tolist():
            try:
                _, example = next(entries)
            except StopIteration:
                raise InvalidValue(
                    f"the columns have {number:,} entries, and the corpus has more examples; give "
                    "an entry for each"
                ) from None
            for name, entry in example.items():
                what = f"{name} of example {number}"
                feature = known[name] = known[name].infer(entry, what)
                held[name].append(feature.convert(entry, what, tokens))
            number += 1
        made = {name: Column(each, each.join(held[name])) for name, each in known.items()}
        yield Ragged(np.zeros(0, np.int32), of_part, None, made)
    if next(entries, None) is not None:
        raise InvalidValue(
            f"the columns have more than {number:,} entries, and the corpus has as many examples"
        )
