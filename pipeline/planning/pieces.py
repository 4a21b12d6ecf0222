"""Pieces: the units of packing. A piece is an example, or a part of an overlong one.

An overlong example is longer than the longest bucket. This is the only module with the overflow
rule, which decides the pieces of such examples and the positions that they lose.
"""

import functools
from typing import Any, Literal, get_args

import numpy as np

from pipeline.errors import InvalidValue, counted
from pipeline.planning import lengths as lengths_lib

Overflow = Literal["split", "truncate", "drop", "error"]
OVERFLOWS: tuple[Overflow, ...] = get_args(Overflow)


class Pieces:
    """The pieces of some examples, in the order of the examples; each has a size, a whole number.

    The size of a piece is its length; for pairs it is the number of a line in a table of lengths.
    Later parts of split examples come after their first part. Sizes of examples are not copied.

    Args:
        stored: the size of each example.
        overlong: int64, the examples that the longest bucket does not hold, ascending.
        lost: positions of these examples that are in no piece.
        clip: `(limit, replacement)`: first pieces of examples larger than `limit` have the size
            `replacement`. None: sizes are unchanged.
        later: int64 [3, n], the example, the first position and the size of each later piece.
        longest: the largest size; computed if it is not given.
        table: for pairs int64 [longest + 1, 2], inputs and targets of each size.
        trees: as for `lengths.Corpus`, if some examples are groups, which are never cut.
    """

    def __init__(
        self,
        stored: np.ndarray,
        overlong: np.ndarray = lengths_lib.NO_EXAMPLES,
        lost: int = 0,
        *,
        clip: tuple[int, int] | None = None,
        later: np.ndarray | None = None,
        table: np.ndarray | None = None,
        longest: int | None = None,
        trees: np.ndarray | None = None,
    ):
        self._stored, self.overlong, self.lost = stored, overlong, lost
        self._clip, self.table, self.trees = clip, table, trees
        self._later = np.zeros((3, 0), np.int64) if later is None else later
        # Later piece number `j`, of example `e`, is piece number `e + j + 1`.
        self._later_pieces = self._later[0] + np.arange(self._later.shape[1]) + 1
        if longest is None:
            chunks = lengths_lib.chunks(stored)
            longest = max((int(self._clipped(chunk).max()) for chunk in chunks), default=0)
        self.longest = longest
        first = self.longest if table is None else int(table.max())
        if trees is not None:  # the positions of a group are those of its longest path
            sizes = self._clipped(stored)
            paths = np.where(trees[:, 1] > 0, trees[:, 0] * (sizes > 0), sizes)
            first = int(paths.max(initial=0))
        # Positions of a later piece continue those of the one before.
        last = int((self._later[1] + self._later[2]).max(initial=0))
        self.max_position = max(first, last) - 1

    def _clipped(self, sizes: np.ndarray) -> np.ndarray:
        return (
            sizes if self._clip is None else np.where(sizes > self._clip[0], self._clip[1], sizes)
        )

    def __len__(self) -> int:
        return len(self._stored) + self.num_later

    @property
    def num_later(self) -> int:
        """The number of later pieces of split examples."""
        return len(self._later_pieces)

    def sizes(self, begin: int, end: int) -> np.ndarray:
        """The sizes of the pieces `begin` to `end`; may share memory with the examples' sizes."""
        first, last = self._later_pieces.searchsorted((begin, end)).tolist()
        sizes = self._clipped(self._stored[begin - first : end - last])
        if first == last:
            return sizes
        found = np.empty(end - begin, np.int64)
        is_later = np.zeros(end - begin, bool)
        is_later[self._later_pieces[first:last] - begin] = True
        found[is_later], found[~is_later] = self._later[2, first:last], sizes
        return found

    def count(self) -> np.ndarray:
        """The number of pieces of each size: int64 [longest + 1]; 0 for size 0, never packed."""
        counts = np.zeros(self.longest + 1, np.int64)
        for begin in range(0, len(self), lengths_lib.CHUNK):
            sizes = self.sizes(begin, min(begin + lengths_lib.CHUNK, len(self)))
            counts += np.bincount(sizes, minlength=len(counts))
        counts[0] = 0
        return counts

    def first_pieces(self, examples: np.ndarray) -> np.ndarray:
        """The number of the first piece of each of `examples`: int64."""
        return examples + self._later[0].searchsorted(examples)

    def locate(self, pieces: np.ndarray) -> tuple[np.ndarray, np.ndarray | int]:
        """The example and the first position of each of `pieces`."""
        if not len(self._later_pieces):
            return pieces, 0
        before = self._later_pieces.searchsorted(pieces, side="right")
        example, start = pieces - before, np.zeros(len(pieces), np.int64)
        later = np.flatnonzero(self._later_pieces[np.maximum(before, 1) - 1] == pieces)
        number = before[later] - 1
        example[later], start[later] = self._later[0, number], self._later[1, number]
        return example, start

    def positions(self, sizes: np.ndarray) -> np.ndarray:
        """The positions of pieces of some sizes: int64 [len(sizes), 1], for pairs [len, 2]."""
        return sizes[:, None] if self.table is None else self.table[sizes]

    def costs(self, sizes: np.ndarray) -> np.ndarray:
        """The cost that pieces of some sizes add to the attention of a row: int64 [len(sizes)]."""
        return (self.positions(sizes).astype(np.int64) ** 2).sum(axis=1)

    def costs_of(self, pieces: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        """As `costs`, for pieces by their numbers, if some examples are groups."""
        assert self.trees is not None, "without groups, sizes say what pieces cost"
        _, branches, costs = self.trees[self.locate(pieces)[0]].T
        return np.where(branches > 0, costs, self.costs(sizes))

    @functools.cached_property
    def most_continuations(self) -> np.ndarray | None:
        """The most continuations of a piece of each size: int64 [longest + 1], or None."""
        if self.trees is None:
            return None
        found = np.zeros(self.longest + 1, np.int64)
        np.maximum.at(found, self._clipped(self._stored), self.trees[:, 1])
        return found

    def positions_of(self, pieces: np.ndarray) -> np.ndarray:
        """The positions of some pieces, by their numbers: int64 [len(pieces), 1 or 2]."""
        examples, starts = self.locate(pieces)
        sizes = self._clipped(self._stored[examples]).astype(np.int64)
        if len(self._later_pieces):
            later = np.flatnonzero(starts)
            sizes[later] = self._later[2, self._later_pieces.searchsorted(pieces[later])]
        return self.positions(sizes)

    def positions_per_example(self) -> np.ndarray:
        """The positions of each example that are in a piece: int64 [examples, 1 or 2]."""
        found = self.positions(self._clipped(self._stored).astype(np.int64))
        np.add.at(found, self._later[0], self._later[2][:, None])
        return found


def cut(
    lengths: np.ndarray,
    room: tuple[int, ...],
    overflow: Overflow | None,
    trees: np.ndarray | None = None,
) -> Pieces:
    """The pieces of all examples; no piece is longer than `room`.

    >>> pieces = cut(np.array([3, 10]), (4,), "split")
    >>> pieces.sizes(0, len(pieces)).tolist()
    [3, 4, 4, 2]
    >>> [part.tolist() for part in pieces.locate(np.arange(4))]
    [[0, 1, 1, 1], [0, 0, 4, 8]]

    "split" makes several pieces and loses nothing (not for pairs), "truncate" keeps the first
    positions, "drop" loses the example, "error" raises an error. Groups (see `trees`) are never
    cut: for these the first two raise an error, too.
    """
    if lengths.ndim == 2:
        return _cut_pairs(lengths, room, overflow)
    (limit,) = room
    longest = int(lengths.max(initial=0))
    if longest <= limit:
        return Pieces(lengths, longest=longest, trees=trees)
    found = [
        np.flatnonzero(chunk > limit) + number * lengths_lib.CHUNK
        for number, chunk in enumerate(lengths_lib.chunks(lengths))
    ]
    overlong = np.concatenate(found)
    if overflow == "error":
        raise _overlong_error(lengths, overlong, room)
    if trees is not None and overflow != "drop" and (trees[overlong, 1] > 0).any():
        raise _overlong_group_error(lengths, overlong[trees[overlong, 1] > 0], limit)
    sizes = lengths[overlong].astype(np.int64)
    if overflow != "split":
        replacement = limit if overflow == "truncate" else 0
        lost = int((sizes - replacement).sum())
        return Pieces(lengths, overlong, lost, clip=(limit, replacement), trees=trees)
    times = -(-sizes // limit) - 1
    example = np.repeat(overlong, times)
    number = np.arange(len(example)) - np.repeat(np.cumsum(times) - times, times) + 1
    start = number * limit
    later = np.stack([example, start, np.minimum(np.repeat(sizes, times) - start, limit)])
    return Pieces(lengths, overlong, clip=(limit, limit), later=later, trees=trees)


def _cut_pairs(lengths: np.ndarray, room: tuple[int, ...], overflow: Overflow | None) -> Pieces:
    """The pieces of pairs, one for each pair.

    Sizes ascend by the share of a row of the longest bucket. Size 0 is for pairs with nothing to
    train on: pairs without targets, and pairs that are dropped.

    >>> pieces = _cut_pairs(np.array([[3, 1], [9, 9], [2, 4], [3, 1], [5, 0]]), (8, 4), "drop")
    >>> pieces.table.tolist(), pieces.sizes(0, 5).tolist()
    ([[0, 0], [3, 1], [2, 4]], [1, 0, 2, 1, 0])
    """
    empty = lengths[:, 1] == 0
    over = (lengths > room).any(axis=1) & ~empty
    overlong = np.flatnonzero(over)
    if len(overlong) and overflow == "error":
        raise _overlong_error(lengths, overlong, room)
    clipped = np.minimum(lengths, room).astype(np.int64)
    if overflow == "drop":
        clipped[over] = 0
    lost = int((lengths[over] - clipped[over]).sum()) if len(overlong) else 0
    clipped[empty] = 0
    share = clipped[:, 0] * room[1] + clipped[:, 1] * room[0]
    order = np.lexsort((clipped[:, 0], share))  # share and inputs determine the targets
    ordered = np.pad(clipped[order], ((1, 0), (0, 0)))  # size 0 always exists
    new = (ordered[1:] != ordered[:-1]).any(axis=1)
    numbers = np.empty(len(lengths), np.uint32)
    numbers[order] = np.cumsum(new)
    return Pieces(numbers, overlong, lost, table=ordered[np.append(True, new)])


def _overlong_error(lengths: np.ndarray, overlong: np.ndarray, room: tuple[int, ...]) -> ValueError:
    seen, most = (
        " and ".join(f"{n:,}" for n in np.ravel(each)) for each in (lengths[overlong[0]], room)
    )
    thing = "example" if lengths.ndim == 1 else "pair"
    others = "'split', 'truncate' or 'drop'" if lengths.ndim == 1 else "'truncate' or 'drop'"
    return InvalidValue(
        f"example {overlong[0]:,} has {seen} positions, longer than the longest bucket's {most} "
        f"(too long: {len(overlong):,} of {counted(len(lengths), thing)}); give a longer bucket, "
        f"or overflow={others}"
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
    of positions; for pairs, of inputs and of targets. The rest of an epoch is planned from spans.
    Joined spans let longer buckets hold examples that shorter buckets had split.

    >>> merge_spans(np.array([[0, 7, 8, 2], [0, 3, 0, 5], [0, 7, 4, 4]])).tolist()
    [[0, 3, 0, 5], [0, 7, 4, 6]]
    """
    epoch, example = np.diff(spans[:, 0]), np.diff(spans[:, 1])
    if ((epoch > 0) | (example > 0)).all() and (epoch >= 0).all():
        return spans
    spans = spans[np.lexsort(spans.T[2::-1])]
    if spans.shape[1] == 5:  # pairs are never split
        return spans
    adjacent = (np.diff(spans[:, :2], axis=0) == 0).all(axis=1)
    adjacent &= spans[:-1, 2] + spans[:-1, 3] == spans[1:, 2]
    first = np.flatnonzero(np.append(True, ~adjacent))
    sizes = np.add.reduceat(spans[:, 3], first)
    return np.column_stack([spans[first, :3], sizes])


def trainable_positions(lengths: np.ndarray) -> np.ndarray:
    """The positions of each example to train on, int64 [n, 1 or 2]; 0 for pairs without targets."""
    sizes = lengths.astype(np.int64)
    sizes = sizes if sizes.ndim == 2 else sizes[:, None]
    return np.where(sizes[:, -1:] > 0, sizes, 0)


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
