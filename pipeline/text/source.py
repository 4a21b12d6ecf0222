"""Sources: records by number, or in shards, which are read in blocks.

A shard is found without reading what is in it, and one worker reads it once, in order. The sizes of
shards and blocks decide where a corpus is divided into parts, and so its fingerprint.
"""

import abc
import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from pipeline.errors import InvalidValue
from pipeline.fs.atomic import as_path
from pipeline.text.content import count_lines
from pipeline.text.values import as_text, name_fields

# A shard has `SHARE` of the bytes of its source, but at least `LEAST` and at most `MOST`.
SHARE, LEAST, MOST = 2048, 1 << 22, 1 << 30
# Bytes of text of a block, at least, and records that are requested at once, at most.
BLOCK, REQUEST = 1 << 20, 512
# The size of shards of numbers comes from this many records, spread evenly.
SIZED = 64


class Source(Protocol):
    """Records by number; it behaves the same in every process it is pickled to.

    A source may also have `__getitems__(indices) -> list`, which reads many records at once.
    """

    @property
    def fingerprint(self) -> str:
        """A string that is the same on every host with the same content, and differs otherwise.

        It is read before and after all records; if it differs, the source was edited meanwhile.
        """
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Mapping[str, Any]: ...


@dataclass(frozen=True)
class Shard:
    """A share of a source.

    Attributes:
        spans: where its records are, in a form that its source understands; it pickles.
        bytes: about their size, for a progress bar.
        block: the bytes of text of its blocks, at least, the same for all who read it.
    """

    spans: Any
    bytes: int
    block: int = dataclasses.field(default_factory=lambda: BLOCK)


@dataclass(frozen=True)
class Block:
    """Consecutive records of a shard.

    Attributes:
        records: a dict for each record, or the error of one that cannot be read.
        places: the file of each record ("" if it has none), and its first byte, or its number.
        unit: what counts within a file: "byte", "row", "record", or "" if a file is a record.
        next: where the shard continues after them, any JSON; None at its end.
    """

    records: list[Any]
    places: list[tuple[str, int]]
    unit: str
    next: Any

    def place(self, number: int) -> dict[str, Any]:
        """The place of a record, as JSON."""
        file, offset = self.places[number]
        return ({"file": file} if file else {}) | ({self.unit: offset} if self.unit else {})

    def where(self, number: int, *, count: bool = True) -> str:
        """The place of a record, for messages; the lines before it are counted now, if wanted."""
        file, offset = self.places[number]
        if self.unit == "byte" and count:
            return f"{file}, line {count_lines(as_path(file), offset) + 1:,} (byte {offset:,})"
        return ", ".join(filter(None, [file, self.unit and f"{self.unit} {offset:,}"]))


class Doubted(dict[str, Any]):
    """A record that may not be what the file means; `prepare` counts these.

    Attributes:
        doubt: why, after "5 of 20 records".
    """

    def __init__(self, record: Mapping[str, Any], doubt: str):
        super().__init__(record)
        self.doubt = doubt


class Piece(NamedTuple):
    """Consecutive records of a span: their file, places, size, and where the span continues."""

    file: str
    records: Sequence[Any]
    at: Sequence[int]
    bytes: int
    next: Any  # JSON; None at the end of the span


class Sharded(abc.ABC):
    """A source that is cut into shards; the base of one class for each kind.

    Attributes:
        unit: see `Block`.
        in_place: the format of tokens that reads token ids in such files where they are; "" if none
            does; see `pipeline.registry`.
    """

    unit = "byte"
    in_place = ""

    def names(self) -> set[str]:
        """The names of the columns that any file has, of files that tell them; else none."""
        return set()

    @property
    @abc.abstractmethod
    def fingerprint(self) -> str:
        """See `Source`."""

    @abc.abstractmethod
    def shards(self) -> list[Shard]:
        """All records, each in one shard, in order."""

    @abc.abstractmethod
    def _read_span(self, span: Any, start: Any, size: int) -> Iterator[Piece]:
        """The records of a span, about `size` bytes at once, from the `next` of a piece on."""

    def read(self, shard: Shard, start: Any = None) -> Iterator[Block]:
        """The records of a shard in order, from its beginning, or from the `next` of a block.

        The blocks from a `next` on are the same whether or not the ones before it are read. The
        last one has the `next` None.
        """
        first, at = start or (0, None)
        block, size = Block([], [], self.unit, None), 0
        for number in range(first, len(shard.spans)):
            for piece in self._read_span(shard.spans[number], at, shard.block):
                block.records.extend(piece.records)
                block.places.extend(zip(itertools.repeat(piece.file), piece.at, strict=False))
                size += piece.bytes
                ended, after = piece.next is None, piece.next
                del piece  # its records are in the block alone
                if size >= shard.block and not (ended and number == len(shard.spans) - 1):
                    following = [number + 1, None] if ended else [number, after]
                    yield dataclasses.replace(block, next=following)
                    block, size = Block([], [], self.unit, None), 0
            at = None
        yield block

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        """All records in order; the error of one that cannot be read is raised."""
        for block in itertools.chain.from_iterable(map(self.read, self.shards())):
            for number, record in enumerate(block.records):
                if isinstance(record, Exception):
                    raise with_place(record, block.where(number))
                yield record


def with_place(error: Exception, place: str) -> Exception:
    """An error that says which record it is about."""
    if isinstance(error, InvalidValue):
        placed = InvalidValue(f"{place}: {error}")
        placed.__cause__ = error
        return placed
    error.add_note(f"This was {place}.")
    return error


def sharded(source: "Source | Sharded") -> Sharded:
    """Any source, cut into shards."""
    return source if isinstance(source, Sharded) else Numbered(source)


def shard_bytes(total: int) -> int:
    """The bytes of each shard of a source that has so many."""
    return min(max(total // SHARE, LEAST), MOST)


class Numbered(Sharded):
    """A source that reads records by number, cut into shards of consecutive numbers."""

    unit = "record"

    def __init__(self, source: Source):
        self.source = source

    @property
    def fingerprint(self) -> str:
        """See `Source`."""
        return self.source.fingerprint

    def shards(self) -> list[Shard]:
        """See `Sharded`; the sizes of some records decide how many numbers a shard has."""
        total = len(self.source)
        samples = [at * total // SIZED for at in range(SIZED)] if total > SIZED else range(total)
        sampled = sum(_size(record) for number in samples for record in self._read([number]))
        mean = max(sampled / max(len(samples), 1), 1)
        step = max(int(shard_bytes(int(mean * total)) / mean), 1)
        at_once = min(max(int(BLOCK / mean), 1), REQUEST)
        firsts = range(0, total, step)
        spans = [(first, min(first + step, total), at_once) for first in firsts]
        return [Shard([span], int(mean * (span[1] - span[0]))) for span in spans]

    def _read_span(self, span: Any, start: Any, size: int) -> Iterator[Piece]:
        first, end, count = span
        for at in range(first if start is None else start, end, count):
            numbers = range(at, min(at + count, end))
            records = self._read(numbers)
            following = numbers.stop if numbers.stop < end else None
            yield Piece("", records, numbers, sum(map(_size, records)), following)

    def _read(self, numbers: Sequence[int]) -> list[Any]:
        """The records with these numbers, or for each that cannot be read its error."""
        try:
            return list(read_records(self.source, numbers))
        except OSError:  # not the fault of a record
            raise
        except Exception as error:
            if len(numbers) == 1:
                return [error]
            return [record for number in numbers for record in self._read([number])]

    def __str__(self) -> str:
        return str(self.source)


def _size(value: Any) -> int:
    """About the bytes of the text in a record."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(_size, value.values()))
    return sum(map(_size, value)) if isinstance(value, list | tuple) else 8


def read_records(source: Source, indices: Sequence[int]) -> Sequence[Mapping[str, Any]]:
    """The records with these numbers, in one request if the source has `__getitems__`."""
    if batched := getattr(source, "__getitems__", None):
        return batched(indices)
    return [source[index] for index in indices]


def text_of(record: Mapping[str, Any], field: str) -> str:
    """The text in a field of a record.

    >>> text_of({"text": b"caf\\xc3\\xa9"}, "text")
    'café'
    """
    if field not in record:
        raise InvalidValue(
            f"it has no field {field!r} (its fields: {name_fields(record)}); name the field "
            "that holds the text with field="
        )
    return as_text(record[field], f"its field {field!r}")
