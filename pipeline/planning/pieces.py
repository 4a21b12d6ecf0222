"""Pieces: the units of packing. A piece is an example, or a part of an overlong one.

An overlong example is longer than the longest bucket. This is the only module with the overflow
rule, which decides the pieces of such examples and the positions that they lose.
"""

import functools
import math
from collections.abc import Iterator
from typing import Any, Literal, get_args

import numpy as np

from pipeline.errors import InvalidValue, counted
from pipeline.planning import lengths as lengths_lib

Overflow = Literal["split", "truncate", "drop", "error"]
OVERFLOWS: tuple[Overflow, ...] = get_args(Overflow)

# The share that a piece takes of a row is counted in up to this many parts of each side.
SHARES = 1 << 40


class Pieces:
    """The pieces of some examples, in the order of the examples; none is longer than `room`.

    Each piece has a *size*: its positions on each side; and a *key*, a whole number. Packing sees
    only keys: pieces with the same key take the same columns of a row. For one side, the key is the
    number of units of `align` columns; for several, it is the number of a line in a table of units.
    Key 0 is for pieces that are in no row: of examples whose lengths are all 0.

    >>> pieces = Pieces(np.array([3, 10]), (4,), "split")
    >>> pieces.keys(0, len(pieces)).tolist()
    [3, 4, 4, 2]
    >>> [part.tolist() for part in pieces.locate(np.arange(4))]
    [[0, 1, 1, 1], [0, 0, 4, 8], [[3], [4], [4], [2]]]
    >>> pieces = Pieces(np.array([[3, 1], [9, 9], [2, 4], [3, 1], [0, 0]]), (8, 4), "drop")
    >>> pieces.table.tolist(), pieces.keys(0, 5).tolist()
    ([[0, 0], [3, 1], [2, 4]], [1, 0, 2, 1, 0])

    Later parts of split examples come after their first part. Lengths of examples are not copied.

    `overflow`, `align` and `costs` are as for `Plan`; `room` has the lengths of the longest bucket.

    Attributes:
        overlong: int64, the overlong examples, ascending.
        lost: positions of these that are in no piece; those of a side count with its cost.
        table: the units of each key, int64 [keys, sides]; ascending by the share of a row.
        max_position: the largest position of a piece in its example; -1 if there is none.
    """

    def __init__(
        self,
        lengths: lengths_lib.AnyLengths | lengths_lib.Lengths,
        room: tuple[int, ...],
        overflow: Overflow | None,
        *,
        align: tuple[int, ...] | None = None,
        costs: tuple[float, ...] | None = None,
    ):
        self._lengths = lengths = lengths_lib.Lengths.of(lengths)
        self._align = (1,) * len(room) if align is None else align
        self._costs = (1,) * len(room) if costs is None else costs
        self._room, self._drops = np.array(room), overflow == "drop"
        dtype = lengths.array.dtype
        self._most = np.minimum(room, np.iinfo(dtype).max).astype(dtype)  # of a first piece
        self.overlong = lengths_lib.NO_EXAMPLES
        self._times = lengths_lib.NO_EXAMPLES  # the later pieces of each overlong example
        self.lost = 0
        longest = lengths.array.max(axis=0, initial=0)
        if np.any(longest > self._room):
            self._set_overlong(room, overflow)
            longest = np.minimum(longest, self._most)
        if lengths.num_excluded or self._drops:
            longest = np.max([0 * longest, *(s.max(axis=0) for _, s in self._chunks())], axis=0)
        self._numbers: np.ndarray | None = None  # with several sides, the key of each example
        self.table = np.arange(int(self._as_units(longest)[0]) + 1)[:, None]
        if len(room) > 1:
            sizes = self._first_sizes(0, len(lengths)).astype(np.int64)
            self._numbers, self.table = _number(self._as_units(sizes), room)
        most = longest.max()
        if lengths.has_groups:  # the positions of a group are those of its longest path
            sizes = self._first_sizes(0, len(lengths)).max(axis=1)
            paths = np.where(lengths.indivisible, lengths.paths * (sizes > 0), sizes)
            most = paths.max(initial=0)
        # Positions of a later piece continue those of the one before.
        last = lengths.array[self.overlong].max() if len(self._times) else 0
        self.max_position = max(int(most), int(last)) - 1

    def _set_overlong(self, room: tuple[int, ...], overflow: Overflow | None) -> None:
        lengths = self._lengths
        of_chunks = [
            np.flatnonzero((chunk > self._most).any(axis=1)) + number * lengths_lib.CHUNK
            for number, chunk in enumerate(lengths_lib.chunks(lengths.array))
        ]
        overlong = np.concatenate(of_chunks)
        self.overlong = overlong = overlong[lengths.stays[overlong]]
        if not len(overlong):
            return
        if overflow == "error" and not lengths.indivisible[overlong].any():
            raise _overlong_error(lengths.array, overlong, room)
        if not self._drops and lengths.indivisible[overlong].any():
            groups = overlong[lengths.indivisible[overlong]]
            raise _overlong_group_error(lengths.array[:, 0], groups, room[0])
        sizes = lengths.array[overlong].astype(np.int64)
        stay = np.minimum(sizes, room) * (not self._drops)
        if overflow == "split":  # of one side
            self._times = -(-sizes[:, 0] // room[0]) - 1
        else:
            self.lost = round(lengths_lib.weigh((sizes - stay).sum(axis=0), self._costs))

    @functools.cached_property
    def _later(self) -> np.ndarray:
        """The example, first position and size of each later piece: int64 [3, later pieces]."""
        examples, times = self.overlong, self._times
        if not len(times):
            return np.zeros((3, 0), np.int64)
        number = np.arange(times.sum()) - np.repeat(np.cumsum(times) - times, times) + 1
        start = number * self._room[0]
        lengths = self._lengths.array[examples, 0].astype(np.int64)
        size = np.minimum(np.repeat(lengths, times) - start, self._room[0])
        return np.stack([np.repeat(examples, times), start, size])

    @functools.cached_property
    def _later_pieces(self) -> np.ndarray:
        """The number of each later piece: that of number `j`, of example `e`, is `e + j + 1`."""
        return self._later[0] + np.arange(self._later.shape[1]) + 1

    def __len__(self) -> int:
        return len(self._lengths) + self.num_later

    @property
    def num_later(self) -> int:
        """The number of later pieces of split examples."""
        return int(self._times.sum())

    @property
    def keys_are_sizes(self) -> bool:
        """Whether the key of a piece is the number of its positions."""
        return self._align == (1,)

    def _first_sizes(self, begin: int, end: int) -> np.ndarray:
        """The sizes of the first pieces of the examples `begin` to `end`; may share their memory.

        A size is 0 if the example is in no batch: left out, or dropped.
        """
        sizes, stays = self._lengths.array[begin:end], self._lengths.stays[begin:end]
        overlong = self.overlong[slice(*self.overlong.searchsorted((begin, end)).tolist())]
        if len(overlong) and self._drops:
            stays = stays.copy()
            stays[overlong - begin] = False
        elif len(overlong):
            sizes = np.minimum(sizes, self._most)
        if not stays.all():
            sizes = np.array(sizes)
            sizes[~stays] = 0
        return sizes

    def _chunks(self) -> Iterator[tuple[int, np.ndarray]]:
        """The first example and the sizes of the first pieces of all examples, chunk by chunk."""
        for begin in range(0, len(self._lengths), lengths_lib.CHUNK):
            yield begin, self._first_sizes(begin, begin + lengths_lib.CHUNK)

    def _as_units(self, sizes: np.ndarray) -> np.ndarray:
        """The units of `align` columns of sizes [..., sides]."""
        if max(self._align) == 1:
            return sizes
        return -(-sizes.astype(np.int64) // self._align)

    def _as_keys(self, sizes: np.ndarray, begin: int) -> np.ndarray:
        """The keys of the first pieces of examples from `begin` on, which have these sizes."""
        if self._numbers is not None:
            return self._numbers[begin : begin + len(sizes)]
        return self._as_units(sizes)[:, 0]

    def keys(self, begin: int, end: int) -> np.ndarray:
        """The keys of the pieces `begin` to `end`; may share memory with the examples' lengths."""
        first, last = self._later_pieces.searchsorted((begin, end)).tolist()
        keys = self._as_keys(self._first_sizes(begin - first, end - last), begin - first)
        if first == last:
            return keys
        merged = np.empty(end - begin, np.int64)
        is_later = np.zeros(end - begin, bool)
        is_later[self._later_pieces[first:last] - begin] = True
        merged[is_later] = self._as_units(self._later[2, first:last, None])[:, 0]
        merged[~is_later] = keys
        return merged

    def count(self) -> np.ndarray:
        """The number of pieces of each key: int64 [keys]; 0 for key 0, which is never packed."""
        counts = np.zeros(len(self.table), np.int64)
        for begin, sizes in self._chunks():
            counts += np.bincount(self._as_keys(sizes, begin), minlength=len(counts))
        if len(self._times):  # all later pieces but the last of each example are full
            last = self._lengths.array[self.overlong] - self._times[:, None] * self._room
            counts[self._as_units(self._room)[0]] += (self._times - 1).sum()
            np.add.at(counts, self._as_units(last)[:, 0], 1)
        counts[0] = 0
        return counts

    @functools.cached_property
    def positions(self) -> np.ndarray:
        """The positions of all pieces on each side: int64 [sides]."""
        total = np.zeros(len(self._room), np.int64)
        for _, sizes in self._chunks():
            total += sizes.sum(axis=0, dtype=np.int64)
        total[0] += self._later[2].sum()
        return total

    @functools.cached_property
    def mean_positions(self) -> np.ndarray:
        """The mean positions of pieces of each key: float64 [keys, sides]."""
        total = np.zeros(self.table.shape)
        np.add.at(total[:, 0], self._as_units(self._later[2, :, None])[:, 0], self._later[2])
        for begin, sizes in self._chunks():
            keys = self._as_keys(sizes, begin)
            for side, positions in enumerate(sizes.T):
                total[:, side] += np.bincount(keys, positions, len(self.table))
        return total / np.maximum(self.count(), 1)[:, None]

    @functools.cached_property
    def most_continuations(self) -> np.ndarray:
        """The most continuations of a piece of each key: int64 [keys]."""
        most = np.zeros(len(self.table), np.int64)
        if self._lengths.has_groups:
            keys = self._as_keys(self._first_sizes(0, len(self._lengths)), 0)
            np.maximum.at(most, keys, self._lengths.continuations)
        return most

    def first_pieces(self, examples: np.ndarray) -> np.ndarray:
        """The number of the first piece of each of `examples`: int64."""
        return examples + self._later[0].searchsorted(examples)

    def locate(self, pieces: np.ndarray) -> tuple[np.ndarray, np.ndarray | int, np.ndarray]:
        """The example, the first position and the size of each of `pieces`, which are in a row.

        Sizes are int64 [len(pieces), sides].
        """
        if not len(self._times):
            return pieces, 0, self._sizes_of(pieces)
        before = self._later_pieces.searchsorted(pieces, side="right")
        example, start = pieces - before, np.zeros(len(pieces), np.int64)
        later = np.flatnonzero(self._later_pieces[np.maximum(before, 1) - 1] == pieces)
        example[later], start[later], size = self._later[:, before[later] - 1]
        sizes = self._sizes_of(example)
        sizes[later, 0] = size
        return example, start, sizes

    def _sizes_of(self, examples: np.ndarray) -> np.ndarray:
        """The sizes of the first pieces of `examples`, none of which is dropped."""
        sizes = self._lengths.array.take(examples, axis=0)
        if len(self.overlong):
            sizes = np.minimum(sizes, self._most)
        return sizes.astype(np.int64)

    def costs(self, pieces: np.ndarray, parts: np.ndarray | None = None) -> np.ndarray:
        """The cost that `pieces` add to the attention of a row: int64 [len(pieces)].

        `parts` has their sizes, if only parts of them are in the row.
        """
        examples, _, sizes = self.locate(pieces)
        sizes = sizes if parts is None else parts
        costs = lengths_lib.weigh(sizes * sizes, self._costs).astype(np.int64)
        if not self._lengths.has_groups:
            return costs
        return np.where(self._lengths.indivisible[examples], self._lengths.work[examples], costs)

    def positions_per_example(self) -> np.ndarray:
        """The positions of each example that are in a piece: int64 [examples, sides]."""
        positions = self._first_sizes(0, len(self._lengths)).astype(np.int64)
        np.add.at(positions, self._later[0], self._later[2][:, None])
        return positions


def _number(units: np.ndarray, room: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """The number of each line of `units`, and the lines, which ascend by their share of a row."""
    share = units @ (min(math.lcm(*room), SHARES) // np.array(room))
    order = np.lexsort((*units.T[::-1], share))
    ordered = np.pad(units[order], ((1, 0), (0, 0)))  # key 0 always exists
    new = (ordered[1:] != ordered[:-1]).any(axis=1)
    numbers = np.empty(len(units), np.uint32)
    numbers[order] = np.cumsum(new)
    return numbers, ordered[np.append(True, new)]


def _overlong_error(lengths: np.ndarray, overlong: np.ndarray, room: tuple[int, ...]) -> ValueError:
    seen, most = (
        " and ".join(f"{n:,}" for n in np.ravel(sizes)) for sizes in (lengths[overlong[0]], room)
    )
    others = "'split', 'truncate' or 'drop'" if len(room) == 1 else "'truncate' or 'drop'"
    return InvalidValue(
        f"example {overlong[0]:,} has {seen} positions, longer than the longest bucket's {most} "
        f"(too long: {len(overlong):,} of {counted(len(lengths), 'example')}); give a longer "
        f"bucket, or overflow={others}"
    )


def _overlong_group_error(lengths: np.ndarray, groups: np.ndarray, limit: int) -> ValueError:
    return InvalidValue(
        f"example {groups[0]:,} is a group of {lengths[groups[0]]:,} columns, longer than the "
        f"longest bucket's {limit:,} (too long: {counted(len(groups), 'group')} of "
        f"{counted(len(lengths), 'example')}); a group is never split: give a longer bucket, "
        f"overflow='drop' or exclude=, or groups that were cut before, groups.truncate({limit})"
    )


def merge_spans(spans: np.ndarray) -> np.ndarray:
    """Spans sorted by epoch, example and start, with adjacent ones joined.

    A span is a range of consecutive positions in an example: epoch, example, first position, number
    of positions on each side. The rest of an epoch is planned from spans.
    Joined spans let longer buckets hold examples that shorter buckets had split.

    >>> merge_spans(np.array([[0, 7, 8, 2], [0, 3, 0, 5], [0, 7, 4, 4]])).tolist()
    [[0, 3, 0, 5], [0, 7, 4, 6]]
    """
    epoch, example = np.diff(spans[:, 0]), np.diff(spans[:, 1])
    if ((epoch > 0) | (example > 0)).all() and (epoch >= 0).all():
        return spans
    spans = spans[np.lexsort(spans.T[2::-1])]
    if spans.shape[1] > 4:  # examples of several sides are never split
        return spans
    adjacent = (np.diff(spans[:, :2], axis=0) == 0).all(axis=1)
    adjacent &= spans[:-1, 2] + spans[:-1, 3] == spans[1:, 2]
    first = np.flatnonzero(np.append(True, ~adjacent))
    sizes = np.add.reduceat(spans[:, 3], first)
    return np.column_stack([spans[first, :3], sizes])


def as_spans(epochs: Any, examples: np.ndarray, starts: Any, sizes: np.ndarray) -> np.ndarray:
    """Spans as for `merge_spans`; an epoch or a start may be one number for all."""
    spans = np.empty((len(examples), 3 + sizes.shape[1]), np.int64)
    spans[:, 0], spans[:, 1], spans[:, 2], spans[:, 3:] = epochs, examples, starts, sizes
    return spans


def file_runs(spans: np.ndarray, files: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The file of each run of spans in one file, and the number of spans in the run.

    `files` has the examples of each file.
    """
    of_span = np.searchsorted(np.cumsum(files), spans[:, 1], side="right")
    starts = np.flatnonzero(np.diff(of_span, prepend=-1))
    return of_span[starts], np.diff(starts, append=len(spans))
