"""Work: from a shard of a source to parts of a corpus, each with a record beside it.

Each side of the examples is a corpus of its own, with as many parts, which hold the same examples.
The last side is the last to be written and finished: where it has a record, or a manifest, the
others have theirs.

Whatever does the work, and however often, the parts are the same: the end of a block ends a part,
and the record of a part says where its shard continues.
"""

import dataclasses
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from etils import epath

from pipeline.corpus.preparing.block import Encoded, Notes, add_notes, encode_block
from pipeline.corpus.preparing.job import Job
from pipeline.corpus.sides import read_sides, record_sides
from pipeline.corpus.stored.directory import Damaged, damage, part_name
from pipeline.corpus.stored.log import (
    begin,
    list_records,
    read_record,
    read_records,
    record_path,
    refuse_others,
    remove_log,
    write_record,
)
from pipeline.corpus.stored.manifest import Manifest, is_finished, require_same_origin
from pipeline.corpus.stored.parts import Part, json_digest, write_part
from pipeline.errors import InvalidState, InvalidValue
from pipeline.fs.atomic import make_directory
from pipeline.text import ragged
from pipeline.text.ragged import Ragged
from pipeline.text.source import Block, Shard

# The rest of a shard is a part of its own if it has 1/REST of the examples or tokens of a full
# part; a smaller one joins the part before it.
REST = 4


@dataclasses.dataclass(frozen=True)
class Work:
    """Makes the parts of shards; workers get a copy of it, and call it with a shard.

    Attributes:
        job: the recipe.
        directory: that of the corpus.
        most: the examples and tokens of a full part, the same for all workers.
    """

    job: Job
    directory: epath.Path
    most: tuple[int, int] = dataclasses.field(
        default_factory=lambda: (ragged.EXAMPLES_PER_PART, ragged.TOKENS_PER_PART)
    )

    @functools.cached_property
    def origin(self) -> str:
        """A digest of all that decides the parts."""
        return json_digest([self.job.origin, [task.name for task in self.job.tasks]])

    @functools.cached_property
    def directories(self) -> dict[str, epath.Path]:
        """The directory of each side: that of the corpus itself if it is single, or one in it."""
        if self.job.is_single:
            return dict.fromkeys(self.job.sides, self.directory)
        return {side: self.directory / side for side in self.job.sides}

    @property
    def last(self) -> epath.Path:
        """The directory of the last side."""
        return [*self.directories.values()][-1]

    @property
    def finished(self) -> bool:
        """Whether the corpus is finished."""
        return is_finished(self.last)

    def declare(self) -> dict[str, Manifest]:
        """Says what corpus the directory will hold, or refuses one that was begun otherwise."""
        if not self.job.is_single:
            record_sides(self.directory, [*self.directories], self.job.loss)
        elif read_sides(self.directory) is not None:
            raise InvalidValue(
                f"{os.fspath(self.directory)} holds a corpus of several sides; prepare with their "
                "features, or choose another directory"
            )
        return {side: self._declare(side, path) for side, path in self.directories.items()}

    def _declare(self, side: str, directory: epath.Path) -> Manifest:
        job, task = self.job, self.job.side_tasks[side]
        tokenizer = job.tokenizer if task.has_tokens else None
        manifest = Manifest(
            task=task.name,
            origin=job.origin,
            vocab_size=None if tokenizer is None else tokenizer.vocab_size,
            source=str(job.source),
            features=job.sides[side],
        )
        make_directory(directory)
        if (begun := Manifest.find(directory)) is None:
            refuse_others(directory)
        elif (
            begun.finished
            or (begun.origin, begun.task) == (manifest.origin, manifest.task)
            or list_records(directory)
        ):
            require_same_origin(directory, begun.origin, job.origin)
            if begun.task != manifest.task:
                raise InvalidValue(
                    f"{os.fspath(directory)} holds a corpus of the task {begun.task!r}, not "
                    f"{manifest.task!r}; give that, or another directory"
                )
            return begun
        saved = None if tokenizer is None else tokenizer.save(directory)
        manifest = dataclasses.replace(manifest, tokenizer=saved)
        try:
            begin(directory, manifest, once=begun is None)
        except FileExistsError:  # another process began it meanwhile, and may have finished it
            return self._declare(side, directory)
        return manifest

    def remove_logs(self) -> None:
        """Removes the records of all sides."""
        for directory in self.directories.values():
            remove_log(directory)

    def read_all(
        self, shards: Iterable[int], directory: epath.Path
    ) -> dict[int, tuple[list[dict[str, Any]], bool]]:
        """For each shard its records in a directory, in order, and whether it is done."""
        records = read_records(directory)
        return {shard: self._follow(shard, lambda *key: records.get(key)) for shard in shards}

    def _follow(
        self, shard: int, read: Callable[[int, int], dict[str, Any] | None]
    ) -> tuple[list[dict[str, Any]], bool]:
        """The records of a shard, in order, and whether it is done."""
        records: list[dict[str, Any]] = []
        while record := read(shard, len(records)):
            if record["origin"] != self.origin:
                path = record_path(self.last, shard, record["number"])
                raise damage(path, "it was made from something else")
            records.append(record)
            if record["next"] is None:
                return records, True
        return records, False

    def __call__(self, numbered: tuple[int, Shard]) -> tuple[int, int]:
        """Makes the parts of a shard that are missing; returns its number and their tokens."""
        number, shard = numbered
        tokens = 0
        try:
            records, done = self._follow(number, functools.partial(read_record, self.last))
            start, part_number = records[-1]["next"] if records else None, len(records)
            blocks = () if done else self.job.records.read(shard, start)
            for encoded in divide(self.job, blocks, self.most):
                tokens += self._write(number, part_number, encoded)
                part_number += 1
        except (OSError, Damaged):
            if not self.finished:
                raise
        if self.finished:  # others did this shard, and finished
            self.remove_logs()
        return number, tokens

    def _write(self, shard: int, number: int, encoded: Encoded) -> int:
        """Writes a part of each side and then its record, unless others have written the same."""
        job, tokens, failed, notes = self.job, 0, encoded.failed, encoded.notes
        for side, directory in self.directories.items():
            parts = []
            if encoded.examples:
                path, examples = directory / part_name(shard, number), encoded.examples[side]
                task, size = job.side_tasks[side], None
                if task.has_tokens and job.tokenizer is not None:
                    size = job.tokenizer.vocab_size
                kind: Any = {"task": task, "origin": job.origin, "vocab_size": size}
                parts = [write_part(path, examples, **kind).part]
            entries: Any = {"next": encoded.next, "failed": failed, "origin": self.origin}
            try:
                write_record(directory, shard, number, parts=parts, notes=notes, **entries)
                tokens += sum(part.tokens for part in parts)
            except FileExistsError:
                self._require_same(directory, shard, number, parts)
            failed, notes = [], {}  # the first side has those of all
        return tokens

    def _require_same(
        self, directory: epath.Path, shard: int, number: int, parts: Sequence[Part]
    ) -> None:
        record = read_record(directory, shard, number)
        if record and [entry["sha256"] for entry in record["parts"]] != [p.sha256 for p in parts]:
            raise InvalidState(
                f"another process made other examples of shard {shard}, part {number}, of "
                f"{self.job.source}: the source or a function gives different results each time. "
                "Delete the directory, correct that, and prepare again"
            )


def divide(job: Job, blocks: Iterable[Block], most: tuple[int, int]) -> Iterator[Encoded]:
    """The parts of a shard: each ends with the block that makes it full.

    If less than a fraction of a part follows, that joins the part. So a part is known when enough
    of the next one is.
    """
    pending: list[Encoded] = []  # one of each block that is in no part yet
    full = 0  # how many of them make a full part
    for block in blocks:
        pending.append(encode_block(job, block))
        block.records.clear()  # a text may be very long
        if full and _reaches(pending[full:], most, REST):
            yield _join(pending[:full])
            pending, full = pending[full:], 0
        if not full and _reaches(pending, most) and block.next is not None:
            full = len(pending)
    if pending:
        yield _join(pending)


def _reaches(encodings: Sequence[Encoded], most: tuple[int, int], fraction: int = 1) -> bool:
    """Whether encodings have one part in `fraction` of a full part's examples or tokens."""
    examples = sum(encoded.num_examples for encoded in encodings)
    size = sum(chunk.size for encoded in encodings for chunk in encoded.examples.values())
    return fraction * examples >= most[0] or fraction * size >= most[1]


def _join(encodings: Sequence[Encoded]) -> Encoded:
    """Consecutive encodings as one."""
    chunks, failed, before = dict[str, list[Ragged]](), list[dict[str, Any]](), 0
    for encoded in encodings:
        failed += [failure | {"example": failure["example"] + before} for failure in encoded.failed]
        for side, examples in encoded.examples.items():
            chunks.setdefault(side, []).append(examples)
        before += encoded.num_examples
    notes: Notes = functools.reduce(add_notes, (encoded.notes for encoded in encodings), {})
    merged = {side: Ragged.concatenate(several) for side, several in chunks.items()}
    return Encoded(merged, failed, encodings[-1].next, notes)
