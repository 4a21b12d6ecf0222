"""Work: from a shard of a source to parts of a corpus, each with a record beside it.

Whatever does the work, and however often, the parts are the same: the end of a block ends a part,
and the record of a part says where its shard continues.
"""

import contextlib
import dataclasses
import functools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from etils import epath

from pipeline.corpus.log import (
    Damaged,
    Log,
    damaged,
    list_records,
    read_record,
    read_records,
    record_path,
    write_record,
)
from pipeline.corpus.manifest import (
    Manifest,
    is_finished,
    part_name,
    require_same_origin,
)
from pipeline.corpus.parts import json_digest, write_part
from pipeline.corpus.tokenisation import Job, Notes, add_notes
from pipeline.corpus.writer import begin, refuse_others
from pipeline.errors import InvalidState, InvalidValue
from pipeline.fs.atomic import atomic_write, make_directory
from pipeline.text import ragged
from pipeline.text.ragged import Ragged
from pipeline.text.sources.source import Block, Shard

# What follows a part must be this fraction of one, or it joins the part.
REST = 4


class Piece(NamedTuple):
    """Consecutive examples of a shard: of a block, or of a part.

    Attributes:
        examples: the examples; None if there are none.
        failed: a description of each record that failed, as JSON, with its `example` among these.
        next: where the shard continues; None at its end.
        notes: of its records.
    """

    examples: Ragged | None
    failed: list[dict[str, Any]]
    next: Any
    notes: Notes


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
        return json_digest([self.job.origin, self.job.stored_task.name])

    def declare(self) -> Manifest:
        """Says what corpus the directory will hold, or refuses one that was begun otherwise."""
        job = self.job
        manifest = Manifest(
            task=job.stored_task.name,
            origin=job.origin,
            vocab_size=job.tokenizer.vocab_size,
            source=str(job.source),
            features=job.columns,
        )
        make_directory(self.directory)
        if (begun := Manifest.find(self.directory)) is None:
            refuse_others(self.directory)
        elif (
            begun.finished
            or (begun.origin, begun.task) == (manifest.origin, manifest.task)
            or list_records(self.directory)
        ):
            require_same_origin(self.directory, begun.origin, job.origin)
            if begun.task != manifest.task:
                raise InvalidValue(
                    f"{os.fspath(self.directory)} holds a corpus of the task {begun.task!r}, not "
                    f"{manifest.task!r}; give that, or another directory"
                )
            return begun
        tokenizer = job.tokenizer.save(self.directory)
        manifest = dataclasses.replace(manifest, tokenizer=tokenizer)
        try:
            begin(self.directory, manifest, once=begun is None)
        except FileExistsError:  # another process began it meanwhile, and may have finished it
            return self.declare()
        return manifest

    def read_all(self, shards: Iterable[int]) -> dict[int, tuple[list[dict[str, Any]], bool]]:
        """For each shard its records, in order, and whether it is done."""
        there = read_records(self.directory)
        return {shard: self._follow(shard, lambda *key: there.get(key)) for shard in shards}

    def _follow(
        self, shard: int, read: Callable[[int, int], dict[str, Any] | None]
    ) -> tuple[list[dict[str, Any]], bool]:
        """The records of a shard, in order, and whether it is done."""
        records: list[dict[str, Any]] = []
        while record := read(shard, len(records)):
            if record["origin"] != self.origin:
                path = record_path(self.directory, shard, record["number"])
                raise damaged(path, "it was made from something else")
            records.append(record)
            if record["next"] is None:
                return records, True
        return records, False

    def __call__(self, numbered: tuple[int, Shard]) -> tuple[int, int]:
        """Makes the parts of a shard that are missing; returns its number and their tokens."""
        number, shard = numbered
        tokens = 0
        try:
            records, done = self._follow(number, functools.partial(read_record, self.directory))
            start, part = records[-1]["next"] if records else None, len(records)
            blocks = () if done else self.job.records.read(shard, start)
            for piece in divide(self.job, blocks, self.most):
                tokens += self._write(number, part, piece)
                part += 1
        except (OSError, Damaged):
            if not is_finished(self.directory):
                raise
        if is_finished(self.directory):  # others did this shard, and finished
            Log(self.directory).remove()
        return number, tokens

    def _write(self, shard: int, number: int, piece: Piece) -> int:
        """Writes a part and then its record, unless others have written the same."""
        job, parts = self.job, []
        if piece.examples is not None:
            path = self.directory / part_name(shard, number)
            size, task = job.tokenizer.vocab_size, job.stored_task
            kind: Any = {"task": task, "origin": job.origin, "vocab_size": size}
            parts = [write_part(path, piece.examples, **kind).part]
        if piece.failed:
            lines = (json.dumps(each, ensure_ascii=False) + "\n" for each in piece.failed)
            path = failures_path(self.directory, shard, number)
            with atomic_write(path) as file:
                file.write("".join(lines).encode(errors="backslashreplace"))
        rest: Any = {"next": piece.next, "failed": len(piece.failed), "origin": self.origin}
        rest["notes"] = piece.notes
        with contextlib.suppress(FileExistsError):
            write_record(self.directory, shard, number, parts=parts, **rest)
            return sum(part.tokens for part in parts)
        there = read_record(self.directory, shard, number)
        if there and [each["sha256"] for each in there["parts"]] != [p.sha256 for p in parts]:
            raise InvalidState(
                f"another process made other examples of shard {shard}, part {number}, of "
                f"{job.source}: the source or a function gives different results each time. Delete "
                "the directory, correct that, and prepare again"
            )
        return 0


def failures_path(directory: epath.Path, shard: int, number: int) -> epath.Path:
    """The file that lists the records that failed, beside the record of a part."""
    return record_path(directory, shard, number).with_suffix(".jsonl")


def divide(job: Job, blocks: Iterable[Block], most: tuple[int, int]) -> Iterator[Piece]:
    """The parts of a shard: each ends with the block that makes it full.

    If less than a fraction of a part follows, that joins the part. So a part is known when enough
    of the next one is.
    """
    held: list[Piece] = []  # one of each block that is in no part yet
    full = 0  # how many of them make a full part
    for number, block in enumerate(blocks):
        held.append(_work(job, block, compare=number == 0))
        if full and _reaches(held[full:], most, REST):
            yield _join(held[:full])
            held, full = held[full:], 0
        if not full and _reaches(held, most) and block.next is not None:
            full = len(held)
    if held:
        yield _join(held)


def _work(job: Job, block: Block, compare: bool) -> Piece:
    """The examples of a block; see `Job.run`."""
    if not block.records:
        return Piece(None, [], block.next, {})
    examples, errors, notes = job.run(block, compare=compare)
    nodes, failed = len(examples.counts) // len(block.records), []
    for number, error in errors.items():
        named = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        reason = {"example": number * nodes, "reason": f"{named}{error}"}
        failed.append(block.place(number) | reason)
    return Piece(examples, failed, block.next, notes)


def _reaches(pieces: Sequence[Piece], most: tuple[int, int], fraction: int = 1) -> bool:
    """Whether pieces have one part in `fraction` of a full part's examples or tokens."""
    counts = [piece.examples.counts for piece in pieces if piece.examples is not None]
    examples, tokens = sum(map(len, counts)), sum(int(each.sum()) for each in counts)
    return fraction * examples >= most[0] or fraction * tokens >= most[1]


def _join(pieces: Sequence[Piece]) -> Piece:
    """Consecutive pieces as one."""
    chunks, failed, before = list[Ragged](), list[dict[str, Any]](), 0
    for piece in pieces:
        failed += [each | {"example": each["example"] + before} for each in piece.failed]
        if piece.examples is not None:
            chunks.append(piece.examples)
            before += len(piece.examples.counts)
    notes: Notes = functools.reduce(add_notes, (piece.notes for piece in pieces), {})
    examples = Ragged.concatenate(chunks) if chunks else None
    return Piece(examples, failed, pieces[-1].next, notes)
