"""Manifest: the small JSON file that says what a corpus is and where its tokens are."""

import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath

from pipeline.corpus.parts import Part, read_part
from pipeline.corpus.tasks import TASKS
from pipeline.errors import InvalidValue, Missing
from pipeline.fs import objects
from pipeline.fs.atomic import atomic_write
from pipeline.planning import lengths as lengths_module

# Corpora of version 1, which had no digest, are read too.
SCHEMA_VERSION = 2
MANIFEST = "corpus.json"
LENGTHS = "lengths.npy"
RANGES = "ranges"
PART_NAME = re.compile(r"part-\d{5,}\.arrow")

# The things a corpus is made from, in words. Corpora are interchangeable when these agree.
ORIGINS = {
    "source": "source",
    "tokenizer": "tokenizer",
    "field": "field of the records",
    "template": "template",
    "on_error": "on_error",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """The content of `corpus.json`, which has a digest of it as well.

    Attributes:
        task: the name of one of `pipeline.corpus.tasks.TASKS`.
        origin: a fingerprint, or None, for each of `ORIGINS`.
        examples, empty: how many there are, and how many of them have length 0.
        tokens, num_tokens: how many there are, and the sum of the lengths.
        text_bytes: UTF-8 bytes of the text that is learnt; None if no text is known.
        lengths_bytes: the size of the file of lengths.
        vocab_size: token ids are below this; None if nobody said.
        tokenizer: the argument of `tokenizers.load`; None if there is none.
        source: the source in words; None if there is none.

    Raises:
        ValueError: an entry is of another type, or entries contradict each other.
    """

    schema_version: int = SCHEMA_VERSION
    task: str
    origin: dict[str, str | None]
    examples: int
    empty: int
    tokens: int
    num_tokens: int
    text_bytes: int | None
    tokens_digest: str
    lengths_digest: str
    lengths_bytes: int
    vocab_size: int | None
    tokenizer: dict[str, Any] | None
    source: str | None
    parts: list[Part]

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise InvalidValue(f"its task is {self.task!r}; it is one of {', '.join(TASKS)}")
        if not isinstance(self.origin, dict) or "tokenizer" not in self.origin:
            raise InvalidValue(
                f"its origin is {self.origin!r:.80}, and does not name the tokenizer"
            )
        if not isinstance(self.tokenizer, dict | None):
            raise InvalidValue(f"its tokenizer is {self.tokenizer!r:.80}; it is an object or null")
        for name in ("empty", "num_tokens", "lengths_bytes", "text_bytes", "vocab_size"):
            number = getattr(self, name)
            optional = name in ("text_bytes", "vocab_size")
            if not (number is None and optional) and (type(number) is not int or number < 0):
                raise InvalidValue(f"its {name} is {number!r}; it is an integer from 0 up")
        for number, part in enumerate(self.parts):
            if part.file != part_name(number):
                raise InvalidValue(f"part {number} is {part.file!r}, not {part_name(number)!r}")
        if len({part.weights_at is None for part in self.parts}) > 1:
            raise InvalidValue("some of its parts have weights and others have none")
        for name, value in {
            "examples": sum(part.examples for part in self.parts),
            "tokens": sum(part.tokens for part in self.parts),
            "tokens_digest": tokens_digest(self.parts),
        }.items():
            if getattr(self, name) != value:
                raise InvalidValue(
                    f"its {name} is {getattr(self, name)!r}, and its parts say {value!r}"
                )
        if not self.examples:
            raise InvalidValue("it has no examples")

    @classmethod
    def read(cls, directory: epath.Path) -> "Manifest":
        """The manifest of the corpus in `directory`.

        Raises:
            FileNotFoundError: there is none.
            ValueError: the corpus is half-written, damaged, or of another schema version.
        """
        place = os.fspath(directory)
        try:
            entries = json.loads((directory / MANIFEST).read_text())
            version = entries["schema_version"]
        except FileNotFoundError:
            if any(any(directory.glob(each)) for each in ("part-*.arrow", RANGES)):
                raise InvalidValue(
                    f"the corpus in {place} is half-written: it has parts but no {MANIFEST}. "
                    "Prepare it again with the same source and tokenizer, and it goes on from there"
                ) from None
            raise Missing(
                f"there is no corpus in {place} (no {MANIFEST}); prepare one there, or check the "
                "path"
            ) from None
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise damage(directory / MANIFEST, f"it cannot be read: {error}") from error
        if version not in range(1, SCHEMA_VERSION + 1):
            raise InvalidValue(
                f"the corpus in {place} has schema version {version}, and this version of Lockstep "
                f"reads up to {SCHEMA_VERSION}: prepare it anew in another directory, or use the "
                "version that wrote it"
            )
        try:
            if version > 1 and entries.pop("digest") != json_digest(entries):
                raise InvalidValue("its entries are not those that its digest was made of")
            return cls(**{**entries, "parts": [Part(**part) for part in entries["parts"]]})
        except (KeyError, TypeError) as error:
            seen = f"it does not have what it should: {error!r}"
            raise damage(directory / MANIFEST, seen) from error
        except ValueError as error:
            raise damage(directory / MANIFEST, str(error)) from error

    def require_files(self, directory: epath.Path) -> None:
        """Refuses a directory in which a file is missing or of another size than recorded.

        Raises:
            ValueError: names the file.
        """
        sizes = {LENGTHS: self.lengths_bytes} | {part.file: part.bytes for part in self.parts}
        here: Mapping[str, objects.Head] | None = None
        if isinstance(directory, objects.ObjectPath):  # which lists all sizes at once
            here = objects.children(directory)[0]
        for name, size in sizes.items():
            path = directory / name
            try:
                seen = path.stat().length if here is None else here[name].size
            except (FileNotFoundError, KeyError):
                raise damage(path, "it is missing") from None
            if seen != size:
                raise damage(path, f"it has {seen:,} bytes instead of {size:,}")

    def verify_parts(self, directory: epath.Path) -> tuple[np.ndarray, list[int | None]]:
        """Reads all parts and compares them with their digests.

        Returns:
            The lengths by the tokens, uint32 [examples], and the bytes of text of each part.

        Raises:
            ValueError: names the first part that is not what was written.
        """
        lengths, texts = [], []
        for part in self.parts:
            path = directory / part.file
            try:
                file = read_part(path)
                require_same_origin(directory, self.origin, file.metadata["origin"])
                lengths.append(TASKS[self.task].lengths(file.verify().counts))
                texts.append(file.metadata["text_bytes"])
                require_same_part(part, file.part)
            except (ValueError, LookupError) as error:
                raise damage(path, str(error)) from error
        return np.concatenate(lengths), texts

    def write(self, directory: epath.Path) -> None:
        """Writes it as the last file of a corpus."""
        with atomic_write(directory / MANIFEST) as file:
            entries = dataclasses.asdict(self)
            entries["digest"] = json_digest(entries)
            file.write((json.dumps(entries, indent=1) + "\n").encode())


def json_digest(document: Any) -> str:
    """A short hash of a JSON document, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()[:12]


def part_name(number: int) -> str:
    """The file of the part with this number."""
    return f"part-{number:05d}.arrow"


def tokens_digest(parts: list[Part]) -> str:
    """A short hash of all tokens and of where examples end."""
    return hashlib.sha256("".join(part.sha256 for part in parts).encode()).hexdigest()[:12]


def require_same_origin(directory: epath.Path, there: Mapping, asked: Mapping) -> None:
    """Refuses to take a corpus, whole or half-written, for one made from something else.

    Raises:
        ValueError: the source or the tokenizer differs; names which, and both values.
    """
    for key, name in ORIGINS.items():
        if there.get(key) != asked.get(key):
            raise InvalidValue(
                f"{os.fspath(directory)} holds a corpus made with another {name}: there "
                f"{there.get(key)}, now {asked.get(key)}. Give back what it was made with, or "
                "prepare into another directory (for a run, another --workdir); delete this one "
                "only if nothing goes on from it"
            )


def require_same_part(said: Part, seen: Part) -> None:
    """Refuses, with a `ValueError`, a file whose header contradicts the manifest."""
    for field in dataclasses.fields(Part):
        one, other = getattr(said, field.name), getattr(seen, field.name)
        if one != other:
            raise InvalidValue(f"its {field.name} is {other}, and {MANIFEST} says {one}")


def summarise(lengths: np.ndarray, text_bytes: Sequence[int | None]) -> dict[str, Any]:
    """The entries of a manifest that follow from the lengths and from the text of each part."""
    texts = [text for text in text_bytes if text is not None]
    return {
        "examples": len(lengths),
        "empty": int((lengths == 0).sum()),
        "num_tokens": int(lengths.sum(dtype=np.int64)),
        "text_bytes": sum(texts) if texts else None,
        "lengths_digest": lengths_module.digest(lengths),
    }


def damage(path: epath.Path, seen: str) -> ValueError:
    """The error to raise for a damaged file of a corpus."""
    return InvalidValue(
        f"the corpus is damaged at {os.fspath(path)}: {seen}. Restore that file from a copy, or "
        f"delete {MANIFEST} and prepare again, which redoes what is not whole"
    )


def read_lengths(path: epath.Path, manifest: Manifest, memory_map: bool) -> np.ndarray:
    """The lengths of a corpus, from the file beside its manifest: uint32 [examples], read-only.

    Raises:
        ValueError: they are damaged. One changed bit changes their sum, and could make one example
            so long that planning takes all memory.
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
    if (total := int(lengths.sum(dtype=np.int64))) != manifest.num_tokens:
        raise damage(path, f"they sum to {total:,}, not {manifest.num_tokens:,}")
    return lengths
