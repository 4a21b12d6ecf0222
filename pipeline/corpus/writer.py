"""The writer of a corpus: adds parts in order, and goes on where a killed one stopped."""

import os
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from etils import epath

from pipeline.corpus.manifest import (
    LENGTHS,
    MANIFEST,
    PART_NAME,
    Manifest,
    part_name,
    require_same_origin,
    summarise,
    tokens_digest,
)
from pipeline.corpus.parts import Part, PartFile, read_part, write_part
from pipeline.corpus.tasks import Task
from pipeline.errors import InvalidValue
from pipeline.fs.atomic import atomic_write
from pipeline.text.ragged import Ragged

# Temporary names of files of a corpus; see `pipeline.fs.atomic.atomic_write`.
TEMPORARY = re.compile(
    rf"\.({PART_NAME.pattern}|{re.escape(LENGTHS)}|{re.escape(MANIFEST)})\.[0-9a-f]+\.tmp"
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
        #: UTF-8 bytes of the learnt text of each part; None if no text is known.
        self.text_bytes: list[int | None] = []
        self._keep_whole_parts(resume)

    @property
    def examples(self) -> int:
        """How many examples are on disk."""
        return sum(part.examples for part in self.parts)

    @property
    def tokens(self) -> int:
        """How many tokens are on disk."""
        return sum(part.tokens for part in self.parts)

    def find_empty(self) -> np.ndarray:
        """The numbers of the examples on disk that have no tokens: int64."""
        return np.flatnonzero(np.concatenate(self._counts) == 0)

    def _keep_whole_parts(self, resume: bool) -> None:
        files = self._find_parts()
        for number, (path, file) in enumerate(files.items()):
            if path.name != part_name(number) or file is None or not resume:
                break
            try:
                counts = file.verify().counts
            except ValueError:
                break
            self.append(file.part, counts, file.metadata["text_bytes"])
        for path in list(files)[len(self.parts) :]:
            path.unlink()
        for path in self.directory.glob(".*.tmp"):
            if TEMPORARY.fullmatch(path.name):
                path.unlink()

    def _find_parts(self) -> dict[epath.Path, PartFile | None]:
        """The parts in the directory, in order; None for one that is damaged.

        A file that cannot be read is a damaged part only beside a part of this corpus.
        """
        files: dict[epath.Path, PartFile | None] = {}
        for path in sorted(self.directory.glob("part-*.arrow")):
            try:
                files[path] = read_part(path) if PART_NAME.fullmatch(path.name) else None
            except ValueError:
                files[path] = None
        sound = [file for file in files.values() if file is not None]
        for file in sound:
            require_same_origin(self.directory, file.metadata.get("origin", {}), self.origin)
        for path, read in files.items():
            if read is None and not (sound and PART_NAME.fullmatch(path.name)):
                raise InvalidValue(
                    f"{os.fspath(path)} is not a part of a corpus, and would be in its way. "
                    "Prepare into a directory of its own, or move that file"
                )
        return files

    def append(self, part: Part, counts: np.ndarray, text_bytes: int | None) -> None:
        """Takes over the next part, which is on disk."""
        self.parts.append(part)
        self._counts.append(counts.astype(np.uint32))
        self.text_bytes.append(text_bytes)

    def add(self, examples: Ragged) -> None:
        """Writes the next part."""
        path = self.directory / part_name(len(self.parts))
        part, text_bytes = write_examples(path, examples, self.origin)
        self.append(part, examples.counts, text_bytes)

    def discard(self) -> None:
        """Removes the parts."""
        for part in self.parts:
            (self.directory / part.file).unlink()
        self.parts, self._counts, self.text_bytes = [], [], []

    def finish(
        self, *, vocab_size: int | None, tokenizer: dict[str, Any] | None, source: str | None
    ) -> None:
        """Writes the lengths and, last, the manifest; the arguments are entries of `Manifest`."""
        lengths = self.task.lengths(np.concatenate(self._counts))
        with atomic_write(self.directory / LENGTHS) as file:
            np.save(file, lengths)
            size = file.tell()
        Manifest(
            task=self.task.name,
            origin=self.origin,
            tokens=self.tokens,
            tokens_digest=tokens_digest(self.parts),
            lengths_bytes=size,
            vocab_size=vocab_size,
            tokenizer=tokenizer,
            source=source,
            parts=self.parts,
            **summarise(lengths, self.text_bytes),
        ).write(self.directory)


def write_examples(
    path: epath.Path, examples: Ragged, origin: Mapping[str, Any]
) -> tuple[Part, int | None]:
    """Writes a part; returns what it is, and the UTF-8 bytes of its learnt text."""
    text = None if examples.text_bytes is None else int(examples.text_bytes.sum())
    metadata = {"origin": dict(origin), "sha256": examples.digest, "text_bytes": text}
    return write_part(path, examples, metadata), text
