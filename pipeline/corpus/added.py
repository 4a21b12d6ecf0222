"""Features that were added to a finished corpus: files of their own, beside its parts."""

import os
import pathlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from etils import epath

from pipeline.corpus.interface import SingleCorpus
from pipeline.corpus.stored.cache import PartCache
from pipeline.corpus.stored.directory import damage
from pipeline.corpus.stored.manifest import Manifest, open_part
from pipeline.corpus.stored.parts import write_part
from pipeline.corpus.stored.reader import Reader
from pipeline.corpus.tasks import TASKS
from pipeline.errors import InvalidValue, suggest_option
from pipeline.fs.atomic import directory_lock
from pipeline.text.features import Feature, check_features, zip_columns
from pipeline.text.ragged import Buffer, Ragged

# The directory of added features beside a corpus, and the name of each manifest in it.
FEATURES, NAME = "features", "features.json"


class AddedFeatures(SingleCorpus):
    """Features that were added to a finished corpus, in files of their own beside its parts.

    Args:
        directory: of their parts, which have the same examples as those of the corpus.
        manifest: that of the parts.
        lengths: those of the corpus.
        cache: a directory for copies of parts; None: they are read where they are.
        cache_bytes: the most bytes of these; None: the default of `PartCache`.

    Attributes:
        manifest: as given.
        fingerprint: a short hash of the features.
    """

    def __init__(
        self,
        directory: epath.Path,
        manifest: Manifest,
        lengths: np.ndarray,
        cache: pathlib.Path | None,
        cache_bytes: int | None,
    ):
        self.directory, self.manifest, self.lengths = directory, manifest, lengths
        self.task, self.features = TASKS[manifest.task], manifest.features
        self.files = examples = manifest.parts.numbers("examples")
        self.identity, self.fingerprint = {"features": manifest.digest}, manifest.digest
        store = PartCache.find(directory, manifest, cache, cache_bytes)
        self.caches = store.caches
        self.reader = Reader(self.task, lengths, examples, self.features, [store])

    def verify(self) -> None:
        """Reads all parts, and refuses the first whose content is not what was written."""
        for part in self.manifest.parts:
            open_part(self.directory, part, verify=True)

    def __repr__(self) -> str:
        return f"features {', '.join(self.features)} in {os.fspath(self.directory)}"


def find_added(
    directory: epath.Path, names: Iterable[str], digest: str
) -> list[tuple[epath.Path, Manifest]]:
    """The directories of the added features `names` of the corpus in `directory`, of this `digest`.

    Each with its manifest.
    """
    folders, added = _find_folders(directory), dict[epath.Path, Manifest]()
    for name in names:
        if (folder := folders.get(name)) is None:
            raise InvalidValue(
                f"no features were added to {os.fspath(directory)} as "
                f"{suggest_option(str(name), sorted(folders))}"
            )
        added[folder] = manifest = Manifest.read(folder / NAME)
        if manifest.origin != {"of": digest}:
            raise damage(folder / NAME, "it is of another corpus")
    return list(added.items())


def _find_folders(directory: epath.Path) -> dict[str, epath.Path]:
    """The directory of each feature that was added to the corpus in `directory`, by its name."""
    paths = (directory / FEATURES).glob(f"*/{NAME}") if (directory / FEATURES).exists() else ()
    return {name: path.parent for path in paths for name in path.parent.name.split("+")}


def add_features(
    directory: epath.Path,
    manifest: Manifest,
    counts: Iterable[np.ndarray],
    columns: Mapping[str, Iterable[Any]],
    features: Mapping[str, Feature],
) -> None:
    """Writes features beside the corpus in a directory; those that are there must be the same.

    `counts` are the tokens of each example, part by part; columns have an entry for each example.
    """
    schemas = check_features(features)
    if not schemas or {*columns} != {*schemas}:
        raise InvalidValue(
            f"columns are {', '.join(map(str, columns)) or 'none'}, but features are "
            f"{', '.join(schemas) or 'none'}; give a column and a pipeline.Feature for each name"
        )
    folder, folders = directory / FEATURES / "+".join(sorted(schemas)), _find_folders(directory)
    for name in schemas:
        if folders.get(name, folder) != folder:
            raise InvalidValue(
                f"{os.fspath(folders[name])} has a feature {name!r} already; open the corpus with "
                f"features=[{name!r}], or use another name"
            )
    with directory_lock(folder, "adding features"):
        stored = Manifest.read(folder / NAME).parts if (folder / NAME).exists() else None
        parts = []
        values = _make_parts(counts, columns, schemas)
        for number, (part, examples) in enumerate(zip(manifest.parts, values, strict=True)):
            if stored is None:
                parts.append(write_part(folder / part.file, examples).part)
            elif examples.digest != stored[number].sha256:
                raise InvalidValue(
                    f"{os.fspath(folder)} holds other values of {', '.join(schemas)}; add them "
                    "under another name, or delete that directory"
                )
        if stored is None:
            origin: dict[str, str | None] = {"of": manifest.digest}
            task = manifest.task
            Manifest(task=task, origin=origin, features=schemas, parts=parts).write(folder / NAME)


def _make_parts(
    counts: Iterable[np.ndarray], columns: Mapping[str, Iterable[Any]], schemas: dict[str, Feature]
) -> Iterator[Ragged]:
    """The features of each part, checked; those without a dtype get that of their first entry."""
    buffer, rows, number = Buffer(schemas, None), zip_columns(columns), 0
    for of_part in counts:
        for tokens in of_part.tolist():
            if (row := next(rows, None)) is None:
                raise InvalidValue(
                    f"the columns have {number:,} entries, but the corpus has more examples; give "
                    "an entry for each"
                )
            buffer.add(row[1], number, tokens)
            number += 1
        schemas |= buffer.features
        yield buffer.take()
    if next(rows, None) is not None:
        raise InvalidValue(
            f"the columns have more than {number:,} entries, one for each example; remove the rest"
        )
