"""The manifest, a JSON file that describes a corpus."""

import dataclasses
import hashlib
import io
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
from etils import epath

from pipeline.corpus.stored.directory import (
    LENGTHS,
    MANIFEST,
    PART_NAME,
    PARTS,
    SCHEMA_VERSION,
    damage,
    read_entries,
    require_sizes,
    write_entries,
)
from pipeline.corpus.stored.parts import Part, PartFile, PartTable, read_content, read_part
from pipeline.corpus.tasks import TASKS
from pipeline.errors import InvalidValue, Missing
from pipeline.fs.atomic import atomic_write, is_local
from pipeline.planning import lengths as lengths_module
from pipeline.text.features import OF_TOKENS, TOKENS, WEIGHTS, Feature, check_features

# The entries of an origin. Corpora are interchangeable if these agree.
ORIGINS = "source", "tokenizer", "field", "template", "features", "on_error"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """The content of `corpus.json`, which describes a corpus from its beginning.

    While the corpus is written, its parts are in records (`pipeline.corpus.stored.log`). Once it is
    finished, they are in a table beside the manifest, `parts.arrow`.

    Attributes:
        task: one of `TASKS`, by name.
        origin: a fingerprint, or None, for each of `ORIGINS`; for features that were added to a
            corpus, the digest `of` its tokens.
        vocab_size: token ids are below this; None if unknown.
        tokenizer: the argument of `tokenizers.load`; None if there is none.
        source: the source in words; None if there is none.
        features: the features of the examples, by name.
        parts: the `PartTable` of its files, given as that or as a list; none before it is finished.
        lengths_digest, lengths_bytes: the digest of the lengths, and the size of their file; None
            before it is finished, and for added features.
    """

    schema_version: int = SCHEMA_VERSION
    task: str
    origin: dict[str, str | None]
    vocab_size: int | None = None
    tokenizer: dict[str, Any] | None = None
    source: str | None = None
    features: dict[str, Feature] = dataclasses.field(default_factory=dict)
    parts: Any = ()
    lengths_digest: str | None = None
    lengths_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise InvalidValue(f"its task is {self.task!r}; it must be one of {', '.join(TASKS)}")
        if not isinstance(self.origin, dict):
            raise InvalidValue(f"its origin is {self.origin!r}, not a dict")
        if not isinstance(self.parts, PartTable):
            object.__setattr__(self, "parts", PartTable(self.parts))
        before = (-1, -1)
        for file in self.parts.strings("file"):
            name = PART_NAME.fullmatch(file)
            if not name or (key := (int(name[1]), int(name[2]))) <= before:
                raise InvalidValue(f"a part is {file!r}, which is no part, or out of order")
            before = key
        features = {
            name: feature if isinstance(feature, Feature) else Feature(**feature)
            for name, feature in self.features.items()
        }
        object.__setattr__(self, "features", check_features(features))
        if len(np.unique(self.parts.numbers("weighted"))) > 1:
            raise InvalidValue("some of its parts have weights and others have none")

    @property
    def finished(self) -> bool:
        """Whether all parts of the corpus are known."""
        return self.lengths_digest is not None

    @property
    def weighted(self) -> bool:
        """Whether tokens have weights."""
        return bool(self.parts.numbers("weighted")[0])

    @property
    def of_tokens(self) -> dict[str, Feature]:
        """The columns of tokens, if there are any, and of their weights, as features."""
        names = (TOKENS, WEIGHTS) if self.weighted else (TOKENS,) * TASKS[self.task].has_tokens
        return {name: OF_TOKENS[name] for name in names}

    @property
    def digest(self) -> str:
        """A short hash of all that the parts hold: tokens, ends of examples, weights, features."""
        return hashlib.sha256("".join(self.parts.strings("sha256")).encode()).hexdigest()[:12]

    @classmethod
    def read(cls, path: epath.Path) -> "Manifest":
        """The manifest in a file, with the table of parts beside it, if there is one yet."""
        entries, table = read_entries(path, path.read_bytes()), path.parent / PARTS
        parts = PartTable(())
        try:
            if (digest := entries.pop("parts")) is not None:
                content = read_content(table)
                if hashlib.sha256(content).hexdigest() != digest:
                    raise InvalidValue("its digest differs")
                if not (parts := PartTable.read(content)):
                    raise InvalidValue("it has no parts")
        except (ValueError, KeyError, pa.ArrowException) as error:
            raise damage(table, str(error).replace(f"{os.fspath(table)} ", "it ")) from error
        try:
            return cls(**entries, parts=parts)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise damage(path, str(error)) from error

    @classmethod
    def find(cls, directory: epath.Path) -> "Manifest | None":
        """The manifest in `directory`, finished or not; None if no corpus was begun there."""
        try:
            return cls.read(directory / MANIFEST)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except IsADirectoryError as error:
            raise damage(directory / MANIFEST, "it is a directory") from error

    @classmethod
    def of(cls, directory: epath.Path) -> "Manifest":
        """The manifest of the finished corpus in `directory`; refuses files of other sizes."""
        path, manifest = os.fspath(directory), cls.find(directory)
        if manifest is None:
            directory.exists()  # which names a bucket that is missing
            raise Missing(
                f"there is no corpus in {path} (no {MANIFEST}); prepare one there, or check the "
                "path"
            )
        if not manifest.finished:
            raise InvalidValue(
                f"the corpus in {path} is not finished. Prepare it again with the same source and "
                "tokenizer, which continues where it stopped, or finish its pipeline.Writer"
            )
        files, sizes = manifest.parts.strings("file"), manifest.parts.numbers("bytes").tolist()
        due = {LENGTHS: manifest.lengths_bytes or 0, **dict(zip(files, sizes, strict=True))}
        require_sizes(directory, due)
        return manifest

    def write(self, path: epath.Path, *, once: bool = False) -> None:
        """Writes the table of parts, if they are known, and then the manifest.

        With `once`, it raises a `FileExistsError` if there is a manifest.
        """
        entries, digest = dict(vars(self)), None
        if self.parts:
            content = self.parts.write()
            digest = hashlib.sha256(content).hexdigest()
            with atomic_write(path.parent / PARTS) as file:
                file.write(content)
        features = {name: feature.as_json for name, feature in self.features.items()}
        entries |= {"features": features, "parts": digest}
        write_entries(path, entries, once=once)


def is_finished(directory: epath.Path) -> bool:
    """Whether there is a finished corpus in `directory`."""
    return (manifest := Manifest.find(directory)) is not None and manifest.finished


def require_same_origin(directory: epath.Path, stored: Mapping, wanted: Mapping) -> None:
    """Refuses a corpus, finished or half-written, that was made from something else."""
    for key in ORIGINS:
        if stored.get(key) != wanted.get(key):
            name = "field of the records" if key == "field" else key
            raise InvalidValue(
                f"{os.fspath(directory)} holds a corpus made with another {name}: there "
                f"{stored.get(key)}, now {wanted.get(key)}. Prepare with that, or into another "
                "directory (for a run, another --workdir); delete this one only if nothing needs it"
            )


def open_part(directory: epath.Path, part: Part, *, verify: bool = False) -> PartFile:
    """The file of a part; refuses a header, or with `verify` a digest, that is not as recorded."""
    path = directory / part.file
    try:
        file = read_part(path)
        for name, recorded in vars(part).items():
            if (seen := getattr(file.part, name)) != recorded:
                raise InvalidValue(f"its {name} is {seen}, but {MANIFEST} says {recorded}")
        if verify:
            file.verify()
    except ValueError as error:
        raise damage(path, str(error)) from error
    return file


def read_lengths(path: epath.Path, manifest: Manifest) -> np.ndarray:
    """The lengths of a corpus, from the file beside its manifest, mapped if it is local: uint32.

    Their digest is checked: one flipped bit could make an example so long that planning takes all
    memory.
    """
    try:
        if is_local(path):
            lengths = np.asarray(np.load(os.fspath(path), mmap_mode="r"))
        else:
            lengths = np.load(io.BytesIO(path.read_bytes()))
    except OSError:
        raise
    except Exception as error:  # NumPy parses a header as Python, with any of its errors
        raise damage(path, f"it is not an array: {error}") from error
    shape = (manifest.parts.total("examples"),)
    if lengths.shape != shape or lengths.dtype != np.dtype("<u4"):
        seen = f"it has shape {lengths.shape} and dtype {lengths.dtype}"
        raise damage(path, f"{seen}, not {shape} and uint32")
    if lengths_module.digest(lengths) != manifest.lengths_digest:
        raise damage(path, "its digest differs")
    return lengths
