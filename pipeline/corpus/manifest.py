"""The manifest, a JSON file that describes a corpus."""

import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
from etils import epath

from pipeline.corpus.parts import Part, PartFile, json_digest, read_part
from pipeline.corpus.tasks import TASKS
from pipeline.errors import InvalidValue, Missing
from pipeline.fs import objects
from pipeline.fs.atomic import atomic_write
from pipeline.planning import lengths as lengths_module
from pipeline.text.features import WEIGHTS, Feature, check_features

SCHEMA_VERSION = 6
MANIFEST = "corpus.json"
LENGTHS = "lengths.npy"
# The folder of what is known of a corpus until there is a manifest; and what failed, a line each.
SHARDS, SKIPPED = "shards", "skipped.jsonl"
PART_NAME = re.compile(r"part-(\d{6,})-(\d{5,})\.arrow")
# Temporary names of files of a corpus; see `pipeline.fs.atomic.atomic_write`.
TEMPORARY = re.compile(
    rf"\.({PART_NAME.pattern}|{'|'.join(map(re.escape, (LENGTHS, SKIPPED, MANIFEST)))})"
    r"\.[0-9a-f]+\.tmp"
)

# Makes the error for a file, from a description of the damage.
MakeError: TypeAlias = Callable[[epath.Path, str], Exception]

# The entries of an origin. Corpora are interchangeable if these agree.
ORIGINS = "source", "tokenizer", "field", "template", "features", "on_error"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """The content of `corpus.json`, which describes a corpus.

    Attributes:
        task: one of `TASKS`, by name.
        origin: a fingerprint, or None, for each of `ORIGINS`; for features that were added to a
            corpus, the digest `of` its tokens.
        vocab_size: token ids are below this; None if unknown.
        tokenizer: the argument of `tokenizers.load`; None if there is none.
        source: the source in words; None if there is none.
        features: the features of the examples, by name.
        parts: its files, in order.
        lengths_digest, lengths_bytes: the digest of the lengths, and the size of their file; None
            if there is no such file.
    """

    schema_version: int = SCHEMA_VERSION
    task: str
    origin: dict[str, str | None]
    vocab_size: int | None = None
    tokenizer: dict[str, Any] | None = None
    source: str | None = None
    features: dict[str, Feature] = dataclasses.field(default_factory=dict)
    parts: list[Part] = dataclasses.field(default_factory=list)
    lengths_digest: str | None = None
    lengths_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise InvalidValue(f"its task is {self.task!r}; it must be one of {', '.join(TASKS)}")
        if not isinstance(self.origin, dict):
            raise InvalidValue(f"its origin is {self.origin!r}, not a dict")
        names = [PART_NAME.fullmatch(part.file) for part in self.parts]
        places = [tuple(map(int, name.groups())) if name else (-1, -1) for name in names]
        for part, before, place in zip(self.parts, [(-1, -1), *places], places, strict=False):
            if place <= before:
                raise InvalidValue(f"a part is {part.file!r}, which is no part, or out of order")
        features = {
            name: each if isinstance(each, Feature) else Feature(**each)
            for name, each in self.features.items()
        }
        object.__setattr__(self, "features", check_features(features))
        _require_columns(self.parts, features)

    @property
    def examples(self) -> int:
        """The number of examples."""
        return sum(part.examples for part in self.parts)

    @property
    def bytes(self) -> int:
        """The size of all parts."""
        return sum(part.bytes for part in self.parts)

    @property
    def learnt(self) -> int:
        """Positions that carry loss."""
        return sum(part.learnt for part in self.parts)

    @property
    def text_bytes(self) -> int | None:
        """UTF-8 bytes of the text that is learnt; None if no text is known."""
        texts = [part.text_bytes for part in self.parts if part.text_bytes is not None]
        return sum(texts) if texts else None

    @property
    def weighted(self) -> bool:
        """Whether tokens have weights."""
        return WEIGHTS in self.parts[0].columns

    @property
    def digest(self) -> str:
        """A short hash of all that the parts hold: tokens, ends of examples, weights, features."""
        return hashlib.sha256("".join(part.sha256 for part in self.parts).encode()).hexdigest()[:12]

    @classmethod
    def read(cls, path: epath.Path, damaged: MakeError | None = None) -> "Manifest":
        """The manifest in a file; `damaged`, by default `damage`, makes errors about the file."""
        entries = read_entries(path, path.read_bytes(), damaged or damage)
        try:
            if not entries["parts"]:
                raise InvalidValue("it has no parts")
            return cls.parse(entries)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise (damaged or damage)(path, str(error)) from error

    @classmethod
    def parse(cls, entries: Mapping[str, Any]) -> "Manifest":
        """The manifest with these entries, as in `as_json`."""
        return cls(**{**entries, "parts": [Part(**part) for part in entries["parts"]]})

    @property
    def as_json(self) -> dict[str, Any]:
        """Its entries, as JSON."""
        features = {name: feature.as_json for name, feature in self.features.items()}
        return dataclasses.asdict(self) | {"features": features}

    @classmethod
    def of(cls, directory: epath.Path) -> "Manifest":
        """The manifest of the finished corpus in `directory`; refuses files of other sizes."""
        place = os.fspath(directory)
        try:
            manifest = cls.read(directory / MANIFEST)
        except IsADirectoryError as error:
            raise damage(directory / MANIFEST, "it is a directory") from error
        except FileNotFoundError:
            if any(any(directory.glob(each)) for each in ("part-*.arrow", SHARDS)):
                raise InvalidValue(
                    f"the corpus in {place} is half-written: it has parts but no {MANIFEST}. "
                    "Prepare it again with the same source and tokenizer to finish it, or continue "
                    "its pipeline.Writer; what is done can be read with follow=True"
                ) from None
            raise Missing(
                f"there is no corpus in {place} (no {MANIFEST}); prepare one there, or check the "
                "path"
            ) from None
        sizes = {part.file: part.bytes for part in manifest.parts}
        require_sizes(directory, {LENGTHS: manifest.lengths_bytes or 0, **sizes}, damage)
        return manifest

    def write(self, path: epath.Path) -> None:
        """Writes the manifest, which is the last file of a corpus."""
        write_entries(path, self.as_json)


def require_sizes(directory: epath.Path, sizes: Mapping[str, int], error: MakeError) -> None:
    """Refuses a directory in which a file is missing or of another size than recorded."""
    here: Mapping[str, int] | None = None
    if isinstance(directory, objects.ObjectPath) and len(sizes) > 1:  # which lists all at once
        here = objects.children(directory)[0]
    for name, size in sizes.items():
        path = directory / name
        try:
            seen = path.stat().length if here is None else here[name]
        except (FileNotFoundError, KeyError):
            raise error(path, "it is missing") from None
        if seen != size:
            raise error(path, f"it has {seen:,} bytes instead of {size:,}")


def write_entries(path: epath.Path, entries: Mapping[str, Any], *, once: bool = False) -> None:
    """Writes JSON to a file, with a digest of it among its entries; see `atomic_write`."""
    content = {"schema_version": SCHEMA_VERSION, **entries}
    content |= {"digest": json_digest(content)}
    with atomic_write(path, once=once) as file:
        file.write((json.dumps(content, indent=1) + "\n").encode())


def read_entries(path: epath.Path, content: bytes, damaged: MakeError) -> dict[str, Any]:
    """The entries that `write_entries` wrote; `damaged` makes the error for anything else."""
    try:
        entries = json.loads(content)
        if (version := entries["schema_version"]) == SCHEMA_VERSION:
            digest = entries.pop("digest")
            if digest != json_digest(entries):
                raise InvalidValue("its entries do not match its digest")
            return entries
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise damaged(path, f"it is half-written or changed: {error!r}") from error
    raise InvalidValue(
        f"{os.fspath(path)} has schema version {version}, but this version of Lockstep reads "
        f"version {SCHEMA_VERSION}; write the corpus again in another directory, or use the "
        "version that wrote it"
    )


def _require_columns(parts: Sequence[Part], features: Mapping[str, Feature]) -> None:
    """Refuses parts that do not all have the same columns: those of `features`, and of tokens."""
    kinds = {"offsets": ("int64",), "tokens": ("int32",), WEIGHTS: ("float32", "bool")}
    kinds |= {name: (feature.dtype.name,) for name, feature in features.items()}
    for part in parts:
        for name in {*parts[0].columns, *part.columns, *features}:
            if name not in part.columns or name not in parts[0].columns:
                raise InvalidValue(f"some of its parts have {name} and others have none")
            place, due = part.columns[name], part.columns[name].count
            if name in features:
                per_example = features[name].per_example
                due = features[name].size * (part.examples if per_example else part.tokens)
            if name not in kinds or place.dtype not in kinds[name] or place.count != due:
                raise InvalidValue(
                    f"{name} of {part.file} are {place.count:,} {place.dtype}, not {due:,} "
                    f"{' or '.join(kinds.get(name, ()))}"
                )


def part_name(shard: int, number: int) -> str:
    """The file of a part of a shard."""
    return f"part-{shard:06d}-{number:05d}.arrow"


def require_same_origin(directory: epath.Path, there: Mapping, asked: Mapping) -> None:
    """Refuses a corpus, finished or half-written, that was made from something else."""
    for key in ORIGINS:
        if there.get(key) != asked.get(key):
            name = "field of the records" if key == "field" else key
            raise InvalidValue(
                f"{os.fspath(directory)} holds a corpus made with another {name}: there "
                f"{there.get(key)}, now {asked.get(key)}. Prepare with that, or into another "
                "directory (for a run, another --workdir); delete this one only if nothing needs it"
            )


def damage(path: epath.Path, seen: str) -> ValueError:
    """The error to raise for a damaged file of a corpus."""
    return InvalidValue(
        f"the corpus is damaged at {os.fspath(path)}: {seen}. Restore that file from a copy, or "
        "delete the directory and prepare again"
    )


def open_part(
    directory: epath.Path, part: Part, content: pa.Buffer | None = None, *, verify: bool = False
) -> PartFile:
    """The file of a part; refuses a header, or with `verify` a digest, that is not as recorded.

    `content` is that of the file, if it was read already.
    """
    path = directory / part.file
    try:
        file = read_part(path) if content is None else PartFile(part.file, content)
        expected, found = ({**vars(each), **each.columns} for each in (part, file.part))
        del expected["columns"]
        for name, said in expected.items():
            if (seen := found.get(name)) != said:
                raise InvalidValue(f"its {name} is {seen}, but {MANIFEST} says {said}")
        if verify:
            file.verify()
    except ValueError as error:
        raise damage(path, str(error)) from error
    return file


def read_lengths(path: epath.Path, manifest: Manifest, memory_map: bool) -> np.ndarray:
    """The lengths of a corpus, from the file beside its manifest: uint32 [examples], read-only."""
    count, due = manifest.examples, manifest.lengths_digest
    return read_array(path, due, damage, count=count, memory_map=memory_map)


def read_array(
    path: epath.Path,
    digest: str | None,
    damaged: MakeError,
    *,
    count: int | None = None,
    memory_map: bool = False,
) -> np.ndarray:
    """The numbers in a file, one for each of `count` examples: uint32 [examples], read-only.

    Their digest is checked: one flipped bit could make an example so long that planning takes all
    memory. Without `count`, any number of examples is right.
    """
    try:
        if memory_map:
            numbers = np.asarray(np.load(os.fspath(path), mmap_mode="r"))
        else:
            with path.open("rb") as file:
                numbers = np.load(file)
            numbers.flags.writeable = False
    except OSError:
        raise
    except Exception as error:  # NumPy parses a header as Python, with any of its errors
        raise damaged(path, f"it is not an array: {error}") from error
    due = (len(numbers) if count is None else count,)
    if numbers.shape != due or numbers.dtype != np.dtype("<u4"):
        seen = f"it has shape {numbers.shape} and dtype {numbers.dtype}"
        raise damaged(path, f"{seen}, not {due} and uint32")
    if lengths_module.digest(numbers) != digest:
        raise damaged(path, "its digest differs")
    return numbers
