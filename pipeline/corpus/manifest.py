"""The manifest, a JSON file that says what a corpus is."""

import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from etils import epath

from pipeline.corpus.parts import Part, PartFile, json_digest, read_part
from pipeline.corpus.tasks import TASKS
from pipeline.errors import InvalidValue, Missing
from pipeline.fs import objects
from pipeline.fs.atomic import atomic_write
from pipeline.planning import lengths as lengths_module
from pipeline.text import tokenizers
from pipeline.text.features import WEIGHTS, Feature, check_features
from pipeline.text.tokenizers import Tokenizer

SCHEMA_VERSION = 4
MANIFEST = "corpus.json"
LENGTHS = "lengths.npy"
RANGES, LOG = "ranges", "log"
PART_NAME = re.compile(r"part-\d{5,}\.arrow")
# Temporary names of files of a corpus; see `pipeline.fs.atomic.atomic_write`.
TEMPORARY = re.compile(
    rf"\.({PART_NAME.pattern}|{re.escape(LENGTHS)}|{re.escape(MANIFEST)})\.[0-9a-f]+\.tmp"
)

# The things a corpus is made from. Corpora are interchangeable when these agree.
ORIGINS = "source", "tokenizer", "field", "template", "features", "on_error"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """The content of `corpus.json`, which has a digest of it as well.

    Attributes:
        task: one of `TASKS`, by name.
        origin: a fingerprint, or None, for each of `ORIGINS`.
        examples, empty: how many there are, and how many of them have length 0.
        tokens, num_tokens: how many there are, and the sum of the lengths.
        learnt: positions that carry loss, whose weight is not 0.
        text_bytes: UTF-8 bytes of the text that is learnt; None if no text is known.
        lengths_bytes: the size of the file of lengths.
        vocab_size: token ids are below this; None if nobody said.
        tokenizer: the argument of `tokenizers.load`; None if there is none.
        source: the source in words; None if there is none.
        features: the arguments of each `Feature` of the examples, by name.
    """

    schema_version: int = SCHEMA_VERSION
    task: str
    origin: dict[str, str | None]
    examples: int
    empty: int
    tokens: int
    num_tokens: int
    learnt: int
    text_bytes: int | None
    tokens_digest: str
    lengths_digest: str
    lengths_bytes: int
    vocab_size: int | None
    tokenizer: dict[str, Any] | None
    source: str | None
    features: dict[str, dict[str, Any]]
    parts: list[Part]

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise InvalidValue(f"its task is {self.task!r}; it is one of {', '.join(TASKS)}")
        for number, part in enumerate(self.parts):
            if part.file != part_name(number):
                raise InvalidValue(f"part {number} is {part.file!r}, not {part_name(number)!r}")
        require_columns(self.parts, read_features(self.features))
        for name, value in {
            "examples": sum(part.examples for part in self.parts),
            "tokens": sum(part.tokens for part in self.parts),
            "tokens_digest": tokens_digest(self.parts),
        }.items():
            if getattr(self, name) != value:
                raise InvalidValue(
                    f"its {name} is {getattr(self, name)!r}, and its parts say {value!r}"
                )

    @property
    def bytes(self) -> int:
        """The size of all parts."""
        return sum(part.bytes for part in self.parts)

    @classmethod
    def read(cls, directory: epath.Path) -> "Manifest":
        """The manifest of the corpus in `directory`, if that is whole."""
        place = os.fspath(directory)
        try:
            entries = json.loads((directory / MANIFEST).read_text())
            version = entries["schema_version"]
            if version == SCHEMA_VERSION:
                require_digest(entries)
                return cls(**{**entries, "parts": [Part(**part) for part in entries["parts"]]})
        except FileNotFoundError:
            if (directory / LOG).exists():
                raise InvalidValue(
                    f"the corpus in {place} is half-written: it grows, or its writer was killed. "
                    "Read what is sealed with follow=True; or let what writes it, prepare or a "
                    "pipeline.Writer, finish it"
                ) from None
            if any(any(directory.glob(each)) for each in ("part-*.arrow", RANGES)):
                raise InvalidValue(
                    f"the corpus in {place} is half-written: it has parts but no {MANIFEST}. "
                    "Prepare it again with the same source and tokenizer to finish it"
                ) from None
            raise Missing(
                f"there is no corpus in {place} (no {MANIFEST}); prepare one there, or check the "
                "path"
            ) from None
        except IsADirectoryError as error:
            raise damage(directory / MANIFEST, "it is a directory") from error
        except InvalidValue as error:
            raise damage(directory / MANIFEST, str(error)) from error
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise damage(directory / MANIFEST, f"it cannot be read: {error!r}") from error
        raise InvalidValue(
            f"the corpus in {place} has schema version {version}, and this version of Lockstep "
            f"reads version {SCHEMA_VERSION}: prepare it again in another directory, or use "
            "the version that wrote it"
        )

    def require_files(self, directory: epath.Path) -> None:
        """Refuses a directory in which a file is missing or of another size than recorded."""
        sizes = {LENGTHS: self.lengths_bytes} | {part.file: part.bytes for part in self.parts}
        require_sizes(directory, sizes, damage)

    def write(self, directory: epath.Path) -> None:
        """Writes it as the last file of a corpus."""
        write_entries(directory / MANIFEST, dataclasses.asdict(self))


def require_sizes(
    directory: epath.Path, sizes: Mapping[str, int], error: Callable[[epath.Path, str], Exception]
) -> None:
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
    content = {**entries, "digest": json_digest(entries)}
    with atomic_write(path, once=once) as file:
        file.write((json.dumps(content, indent=1) + "\n").encode())


def require_digest(entries: dict[str, Any]) -> None:
    """Takes the digest out of what `write_entries` wrote, and refuses one of other entries."""
    if entries.pop("digest") != json_digest(entries):
        raise InvalidValue("its entries are not those that its digest was made of")


def read_features(entries: Mapping[str, Mapping[str, Any]]) -> dict[str, Feature]:
    """The features of an entry of a manifest."""
    return check_features({name: Feature(**each) for name, each in entries.items()})


def require_columns(parts: Sequence[Part], features: Mapping[str, Feature]) -> None:
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


def part_name(number: int) -> str:
    """The file of the part with this number."""
    return f"part-{number:05d}.arrow"


def tokens_digest(parts: Sequence[Part]) -> str:
    """A short hash of all tokens and of where examples end."""
    return hashlib.sha256("".join(part.sha256 for part in parts).encode()).hexdigest()[:12]


def require_same_origin(directory: epath.Path, there: Mapping, asked: Mapping) -> None:
    """Refuses to take a corpus, whole or half-written, for one made from something else."""
    for key in ORIGINS:
        if there.get(key) != asked.get(key):
            name = "field of the records" if key == "field" else key
            raise InvalidValue(
                f"{os.fspath(directory)} holds a corpus made with another {name}: there "
                f"{there.get(key)}, now {asked.get(key)}. Give back what it was made with, or "
                "prepare into another directory (for a run, another --workdir); delete this one "
                "only if nothing needs it any more"
            )


def summarise(lengths: np.ndarray, metadata: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The entries of a manifest that follow from the lengths and the metadata of each part."""
    texts = [each["text_bytes"] for each in metadata if each["text_bytes"] is not None]
    return {
        "examples": len(lengths),
        "empty": int((lengths == 0).sum()),
        "num_tokens": int(lengths.sum(dtype=np.int64)),
        "learnt": sum(each["learnt"] for each in metadata),
        "text_bytes": sum(texts) if texts else None,
        "lengths_digest": lengths_module.digest(lengths),
    }


def damage(path: epath.Path, seen: str) -> ValueError:
    """The error to raise for a damaged file of a corpus."""
    return InvalidValue(
        f"the corpus is damaged at {os.fspath(path)}: {seen}. Restore that file from a copy, or "
        f"delete {MANIFEST} and prepare again, which redoes what is not whole"
    )


def open_part(
    directory: epath.Path, part: Part, content: pa.Buffer | None = None, *, verify: bool = False
) -> PartFile:
    """The file of a part; refused if its header, or on demand its digest, is not as recorded.

    Its `content` is given where that was read.
    """
    path = directory / part.file
    try:
        file = read_part(path) if content is None else PartFile(part.file, content)
        expected, found = ({**vars(each), **each.columns} for each in (part, file.part))
        del expected["columns"]
        for name, said in expected.items():
            if (seen := found.get(name)) != said:
                raise InvalidValue(f"its {name} is {seen}, and {MANIFEST} says {said}")
        if verify:
            file.verify()
    except ValueError as error:
        raise damage(path, str(error)) from error
    return file


def load_tokenizer(
    description: dict[str, Any] | None, directory: epath.Path, fingerprint: str | None
) -> Tokenizer | None:
    """The tokenizer of a corpus, of which a description was recorded."""
    if description is None:
        return None
    try:
        loaded = tokenizers.load(description, directory)
        if loaded.fingerprint != fingerprint:
            raise InvalidValue(f"it is {loaded.fingerprint}")
        return loaded
    except (KeyError, TypeError, ValueError) as error:
        seen = f"its tokenizer, {fingerprint}, cannot be loaded: {error}"
        raise damage(directory / MANIFEST, seen) from error


def read_lengths(path: epath.Path, manifest: Manifest, memory_map: bool) -> np.ndarray:
    """The lengths of a corpus, from the file beside its manifest: uint32 [examples], read-only.

    Their digest is compared: one changed bit could make an example so long that planning takes all
    memory.
    """
    try:
        if memory_map:
            lengths = np.asarray(np.load(os.fspath(path), mmap_mode="r"))
        else:
            with path.open("rb") as file:
                lengths = np.load(file)
            lengths.flags.writeable = False
    except OSError:
        raise
    except Exception as error:  # a header is Python, and fails in as many ways
        raise damage(path, f"it is not an array: {error}") from error
    if lengths.shape != (manifest.examples,) or lengths.dtype != np.dtype("<u4"):
        seen = f"it has shape {lengths.shape} and dtype {lengths.dtype}"
        raise damage(path, f"{seen}, not ({manifest.examples},) and uint32")
    if lengths_module.digest(lengths) != manifest.lengths_digest:
        raise damage(path, "its digest differs")
    return lengths
