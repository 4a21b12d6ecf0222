"""Windows: which pieces are planned together, and in what order they take their slots.

A corpus no larger than a window is planned whole. A larger one is partitioned once: each length is
dealt evenly over the main windows, so that all of them have one histogram and share one pattern
search; each holds whole batches only. What is left over, remainders and the last batch of each
window, makes the tail window. So every epoch has the same number of batches, and which window a
step falls into is arithmetic.
"""

import dataclasses
import functools

import numpy as np

from pipeline import lengths as lengths_lib
from pipeline.balance import balanced
from pipeline.bucket import Bucket
from pipeline.packing import Packed, pack
from pipeline.shuffle import Purpose, permutation, random_bits, sort_by_group


class Table:
    """A packed histogram laid out for dealing: rows → patterns → slots, all as arrays.

    Row `r` of a bucket is copy `r − row_start[p]` of its pattern `p`. Pieces sorted by length are
    dealt to slots in runs: the slot's first copy takes piece `slot_piece`, the next copy the next.
    """

    def __init__(self, packed: Packed):
        self.packed = packed
        self.batches = [packed.batches(index) for index in range(len(packed.buckets))]
        self.steps = sum(self.batches)
        after = np.cumsum(packed.counts)
        taken = (after - packed.counts).tolist()  # the next piece of each length
        # For each bucket: the first row of each pattern, the first slot of each pattern, the piece
        # and the length of each slot.
        self.row_start: list[np.ndarray] = []
        self.slot_start: list[np.ndarray] = []
        self.slot_piece: list[np.ndarray] = []
        self.slot_length: list[np.ndarray] = []
        self.cost: list[
            np.ndarray
        ] = []  # of a row of each pattern: the sum of its segments' squared lengths
        for patterns in packed.patterns:
            rows, starts, pieces, sizes = [0], [0], [], []
            self.cost.append(
                np.array([sum(n * n * k for n, k in p.pieces) for p in patterns], np.int64)
            )
            for pattern in patterns:
                for length, times in pattern.pieces:
                    for _ in range(times):
                        pieces.append(taken[length])
                        taken[length] += pattern.rows
                        sizes.append(length)
                rows.append(rows[-1] + pattern.rows)
                starts.append(len(pieces))
            for table, values in zip(
                (self.row_start, self.slot_start, self.slot_piece, self.slot_length),
                (rows, starts, pieces, sizes),
                strict=True,
            ):
                table.append(np.array(values, np.int64))
        assert taken == after.tolist(), "every piece has a slot"

    def pattern(self, index: int, rows: np.ndarray) -> np.ndarray:
        """The pattern of each of `rows` of bucket number `index`."""
        return np.searchsorted(self.row_start[index], rows, side="right") - 1

    def first_piece(self, index: int) -> np.ndarray:
        """The piece in the first slot of every row of bucket number `index`."""
        rows = np.arange(self.packed.rows(index))
        pattern = self.pattern(index, rows)
        slot = self.slot_start[index][pattern]
        return self.slot_piece[index][slot] + rows - self.row_start[index][pattern]

    def batch(self, index: int, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Row in the batch, piece and length of every slot of `rows`, in row order."""
        cost = self.cost[index][self.pattern(index, rows)]
        rows, places = balanced(rows, cost, self.packed.buckets[index].rows)
        pattern = self.pattern(index, rows)
        first = self.slot_start[index][pattern]
        times = self.slot_start[index][pattern + 1] - first
        before = np.cumsum(times) - times
        slot = np.repeat(first - before, times) + np.arange(int(times.sum()))
        copy = np.repeat(rows - self.row_start[index][pattern], times)
        pieces = self.slot_piece[index][slot] + copy
        return np.repeat(places, times), pieces, self.slot_length[index][slot]


@dataclasses.dataclass(frozen=True)
class Dealt:
    """One window of one epoch: every slot has its piece, every batch its rows.

    Attributes:
        table: the rows and their slots.
        pieces: the pieces in the order in which slots count them, int64.
        rows: for each bucket, its rows in the order in which batches take them, int64.
        bucket: for each step of the window, the number of its bucket.
        batch: for each step, which batch of that bucket it is.
    """

    table: Table
    pieces: np.ndarray
    rows: list[np.ndarray]
    bucket: np.ndarray
    batch: np.ndarray

    def segments(self, step: int) -> tuple[Bucket, np.ndarray, np.ndarray, np.ndarray]:
        """The bucket of the window's step, and row, piece and length of each segment."""
        index, batch = self.bucket[step], self.batch[step]
        bucket = self.table.packed.buckets[index]
        rows = self.rows[index][batch * bucket.rows : (batch + 1) * bucket.rows]
        row, slots, sizes = self.table.batch(index, rows)
        return bucket, row, self.pieces[slots], sizes


class Windows:
    """The partition of the pieces into windows, and the deal of each window in each epoch."""

    def __init__(
        self,
        lengths: np.ndarray,
        buckets: tuple[Bucket, ...],
        *,
        seed: int,
        shuffle: bool,
        packing: str,
        max_segments: int | None,
        window: int,
    ):
        self._lengths, self._seed, self._shuffle = lengths, seed, shuffle
        counts = lengths_lib.histogram(lengths)
        search = functools.partial(
            pack, buckets=buckets, packing=packing, max_segments=max_segments
        )
        number = -(-len(lengths) // window) if len(lengths) > window else 0
        self._first = np.cumsum(counts) - counts  # of each length, in the partition's order
        self._share = np.zeros_like(counts)  # pieces of each length in one main window
        if number:
            main = search(counts // number, whole=True)
            number = number if main.counts.any() else 0
        self.number = number
        if number:
            self._share = main.counts
            self.main = Table(main)
        self._rest = counts - number * self._share
        self.tail = Table(search(self._rest))
        self.steps = self.tail.steps + (number * self.main.steps if number else 0)

    def tables(self) -> list[tuple[int, Table]]:
        """Each kind of window and how many of it an epoch has."""
        main = [(self.number, self.main)] if self.number else []
        return [*main, (1, self.tail)]

    def find(self, epoch: int, step: int) -> tuple[int, int]:
        """The place in the epoch's order of windows, and the step in that window."""
        before = self._tail_place(epoch)
        main = self.main.steps if self.number else 0
        if step < before * main:
            return divmod(step, main)
        step -= before * main
        if step < self.tail.steps:
            return before, step
        place, step = divmod(step - self.tail.steps, main)
        return before + 1 + place, step

    def deal(self, epoch: int, place: int) -> Dealt:
        """Deals the window at `place` of the epoch's order: a pure function."""
        before = self._tail_place(epoch)
        if place == before:
            window, table = self.number, self.tail
        else:
            order = np.arange(self.number)
            if self._shuffle:
                order = permutation(
                    random_bits(self._seed, Purpose.WINDOWS, self.number, epoch=epoch)
                )
            window, table = int(order[place - (place > before)]), self.main
        random = functools.partial(random_bits, self._seed, epoch=epoch, window=window)
        members, sizes = self._members(window)
        bits = random(Purpose.EXAMPLES, len(sizes)) if self._shuffle else None
        order = sort_by_group(sizes, bits)
        order = order[np.count_nonzero(sizes == 0) :]  # length 0 is in no batch
        pieces = order if members is None else members[order]
        rows, bucket, batch, when = [], [], [], []
        for index, number in enumerate(table.batches):
            count = table.packed.rows(index)
            if self._shuffle:
                order = permutation(random(Purpose.ROWS, count, bucket=index))
                phase = int(random(Purpose.PHASE, 1, bucket=index)[0] >> np.uint64(40))
            else:
                order = sort_by_group(pieces[table.first_piece(index)], None)
                phase = 1 << 23
            rows.append(order)
            bucket.append(np.full(number, index))
            batch.append(np.arange(number))
            # Batch k of n falls at (k + phase) / n of the window, with a phase from 0 to 1.
            when.append((((np.arange(number) << 24) + phase) << 14) // max(number, 1))
        turn = np.argsort(np.concatenate(when), kind="stable")
        return Dealt(table, pieces, rows, np.concatenate(bucket)[turn], np.concatenate(batch)[turn])

    def _tail_place(self, epoch: int) -> int:
        if not (self._shuffle and self.number):
            return self.number
        bits = random_bits(self._seed, Purpose.WINDOWS, 1, epoch=epoch, window=1)
        return int(bits[0] % np.uint64(self.number + 1))

    @functools.cached_property
    def _partition(self) -> np.ndarray:
        """All pieces by length, in the seed's order inside each length."""
        bits = None
        if self._shuffle:
            bits = random_bits(self._seed, Purpose.PARTITION, len(self._lengths))
        return sort_by_group(self._lengths, bits)

    def _members(self, window: int) -> tuple[np.ndarray | None, np.ndarray]:
        """The pieces of a window (None for all of them) and their lengths."""
        if self.number == 0:
            return None, self._lengths
        share = self._share if window < self.number else self._rest
        first = self._first + window * self._share
        before = np.cumsum(share) - share
        index = np.repeat(first - before, share) + np.arange(int(share.sum()))
        return self._partition[index], np.repeat(np.arange(len(share)), share)
