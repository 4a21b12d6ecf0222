"""The writer of a corpus: adds parts in order, and goes on where a killed one stopped."""

import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from etils import epath

from pipeline.atomic import atomic_write
from pipeline.planning import lengths as lengths_module
from pipeline.ragged import Ragged
from pipeline.storage.parts import Part, read_part, write_part
from pipeline.tasks import Task

SCHEMA_VERSION = 1
MANIFEST = "corpus.json"
LENGTHS = "lengths.npy"

# What a corpus is made from. Two corpora may stand for each other when these agree.
ORIGINS = {
    "source": "source",
    "tokenizer": "tokenizer",
    "field": "field of the records",
    "template": "template",
}


# Names that a writer makes; see `pipeline.atomic.atomic_write` for the second.
PART = re.compile(r"part-\d{5,}\.arrow")
TEMPORARY = re.compile(rf"\.({PART.pattern}|{re.escape(LENGTHS)}|{re.escape(MANIFEST)})\.\d+\.tmp")


def part_name(number: int) -> str:
    """The file of the part with this number."""
    return f"part-{number:05d}.arrow"


def require_same_origin(directory: epath.Path, there: Mapping, asked: Mapping) -> None:
    """Refuses to take a corpus, whole or half-written, for one made from something else.

    Raises:
        ValueError: the source or the tokenizer differs; names which, and both values.
    """
    for key, name in ORIGINS.items():
        if there.get(key) != asked.get(key):
            raise ValueError(
                f"{os.fspath(directory)} holds a corpus made with another {name}: there "
                f"{there.get(key)}, now {asked.get(key)}. Give back what it was made with, or "
                "prepare into another directory (for a run, another --workdir); delete this one "
                "only if nothing goes on from it"
            )


class Writer:
    """Parts of one corpus, appended in order; `finish` writes the lengths and, last, the manifest.

    It starts with the whole parts that an interrupted writer of the same origin left, and removes
    those from the first missing or damaged one on; without `resume`, all of them. It removes no
    file that is not a part of this corpus.

    Raises:
        ValueError: the directory has files that could be taken for parts and are not, or parts of
            another origin.
    """

    def __init__(
        self, directory: epath.Path, task: Task, origin: Mapping[str, Any], *, resume: bool = True
    ):
        self.directory, self.task, self.origin = directory, task, dict(origin)
        self.parts: list[Part] = []
        self._counts: list[np.ndarray] = []
        self._text_bytes: list[int | None] = []
        self._keep_whole_parts(resume)

    @property
    def examples(self) -> int:
        """How many examples are on disk."""
        return sum(part.examples for part in self.parts)

    @property
    def tokens(self) -> int:
        """How many tokens are on disk."""
        return sum(part.tokens for part in self.parts)

    def _keep_whole_parts(self, resume: bool) -> None:
        there = self._own_parts()
        for number, (path, read) in enumerate(there.items()):
            if path.name != part_name(number) or read is None or not resume:
                break
            part, counts, metadata = read
            if part.sha256 != metadata["sha256"]:
                break
            self._kept(part, counts, metadata["text_bytes"])
        for path in list(there)[len(self.parts) :]:
            path.unlink()
        for path in self.directory.glob(".*.tmp"):
            if TEMPORARY.fullmatch(path.name):
                path.unlink()

    def _own_parts(self) -> dict[epath.Path, tuple[Part, np.ndarray, dict] | None]:
        """The parts in the directory, in order; None for what is damaged.

        What cannot be read is a damaged part only where another file is a part of this corpus.
        """
        found: dict[epath.Path, tuple[Part, np.ndarray, dict] | None] = {}
        for path in sorted(self.directory.glob("part-*.arrow")):
            try:
                found[path] = read_part(path) if PART.fullmatch(path.name) else None
            except ValueError:
                found[path] = None
        known = [read[2] for read in found.values() if read is not None]
        for metadata in known:
            require_same_origin(self.directory, metadata.get("origin", {}), self.origin)
        for path, read in found.items():
            if read is None and not (known and PART.fullmatch(path.name)):
                raise ValueError(
                    f"{os.fspath(path)} is not a part of a corpus, and would be in its way. "
                    "Prepare into a directory of its own, or move that file"
                )
        return found

    def _kept(self, part: Part, counts: np.ndarray, text_bytes: int | None) -> None:
        self.parts.append(part)
        self._counts.append(counts.astype(np.uint32))
        self._text_bytes.append(text_bytes)

    def add(self, chunk: Ragged) -> None:
        """Writes the next part."""
        text = None if chunk.text_bytes is None else int(chunk.text_bytes.sum())
        metadata = {
            "origin": self.origin,
            "sha256": chunk.digest,
            "text_bytes": text,
        }
        path = self.directory / part_name(len(self.parts))
        self._kept(write_part(path, chunk, metadata), chunk.counts, text)

    @property
    def text_bytes(self) -> int | None:
        """UTF-8 bytes of the text so far that is learnt; None if no text is known."""
        texts = [text for text in self._text_bytes if text is not None]
        return sum(texts) if texts else None

    def finish(self, **about: Any) -> None:
        """Writes the lengths and the manifest; `about` is recorded in the manifest as it is."""
        lengths = self.task.lengths(np.concatenate(self._counts))
        with atomic_write(self.directory / LENGTHS) as file:
            np.save(file, lengths)
            size = file.tell()
        manifest = {
            "schema_version": SCHEMA_VERSION,
            "task": self.task.name,
            "origin": self.origin,
            "examples": len(lengths),
            "empty": int((lengths == 0).sum()),
            "tokens": self.tokens,
            "num_tokens": int(lengths.sum(dtype=np.int64)),
            "text_bytes": self.text_bytes,
            "tokens_digest": tokens_digest(self.parts),
            "lengths_digest": lengths_module.digest(lengths),
            "lengths_bytes": size,
            **about,
            "parts": [dataclasses.asdict(part) for part in self.parts],
        }
        with atomic_write(self.directory / MANIFEST) as file:
            file.write((json.dumps(manifest, indent=1) + "\n").encode())


def tokens_digest(parts: list[Part]) -> str:
    """A short hash of all tokens and of where examples end."""
    return hashlib.sha256("".join(part.sha256 for part in parts).encode()).hexdigest()[:12]
