"""Windows: which pieces are planned together, and in what order they take their slots.

A corpus no larger than a window is planned whole. A larger one is partitioned once: each length is
dealt evenly over the main windows, so that all of them have one histogram and share one pattern
search; each holds whole batches only. What is left over, remainders and the last batch of each
window, is dealt over windows in the same way, until it fits into one. So every epoch has the same
number of batches, and which window a step falls into is arithmetic.
"""

import dataclasses
import functools
from collections.abc import Callable

import numpy as np

from pipeline.planning import lengths as lengths_lib
from pipeline.planning.balance import balanced
from pipeline.planning.bucket import Bucket
from pipeline.planning.overflow import Pieces
from pipeline.planning.packing import Packed
from pipeline.planning.pair_pieces import PairPieces
from pipeline.planning.partition import Partition
from pipeline.planning.shuffle import Purpose, permutation, random_bits, sort_by_group


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
        # Of a row of each pattern, the sum of its segments' squared lengths.
        self.cost: list[np.ndarray] = []
        for patterns in packed.patterns:
            rows, starts, pieces, sizes = [0], [0], [], []
            self.cost.append(np.array([pattern.squares for pattern in patterns], np.int64))
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
        times, pieces, sizes = self.slots(index, rows)
        return np.repeat(places, times), pieces, sizes

    def slots(self, index: int, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """How many slots each of `rows` has; piece and length of each slot."""
        pattern = self.pattern(index, rows)
        first = self.slot_start[index][pattern]
        times = self.slot_start[index][pattern + 1] - first
        before = np.cumsum(times) - times
        slot = np.repeat(first - before, times) + np.arange(int(times.sum()))
        copy = np.repeat(rows - self.row_start[index][pattern], times)
        pieces = self.slot_piece[index][slot] + copy
        return times, pieces, self.slot_length[index][slot]


@dataclasses.dataclass(frozen=True)
class Dealt:
    """One window of one epoch: every slot has its piece, every batch its rows.

    Attributes:
        table: the rows and their slots.
        pieces: the pieces in the order in which slots count them, integers.
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

    def left(self, step: int) -> np.ndarray:
        """The pieces of the window's steps from `step` on, in no order that matters."""
        if step == 0:
            return self.pieces
        slots = []
        for index, bucket in enumerate(self.table.packed.buckets):
            taken = np.count_nonzero(self.bucket[:step] == index) * bucket.rows
            slots.append(self.table.slots(index, self.rows[index][taken:])[1])
        return self.pieces[np.concatenate(slots)]

    def rows_from(
        self, index: int, first: int, last: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Row (from 0), piece and length of each segment in rows `first` to `last` of a bucket."""
        times, slots, sizes = self.table.slots(index, self.rows[index][first:last])
        return np.repeat(np.arange(last - first), times), self.pieces[slots], sizes


@dataclasses.dataclass(frozen=True)
class Kind:
    """Windows that share one histogram and its rows.

    Attributes:
        number: how many there are.
        table: the rows of each.
        first: int64 [longest + 1], the rank of the first piece of each length in the first of
            them; each takes as many of the next ranks as `table.packed.counts` says.
    """

    number: int
    table: Table
    first: np.ndarray


class Windows:
    """The partition of the pieces into windows, and the deal of each window in each epoch.

    Args:
        pieces: what is packed.
        search: packs a histogram into rows; with `whole=True` into whole batches only.
        seed: decides every shuffle.
        shuffle: whether there are any.
        window: about the most pieces in a window, where it can hold a batch and some of each
            length; otherwise it is larger.

    Attributes:
        counts: int64 [longest + 1], pieces of each length.
        kinds: the windows, those that share one histogram together.
        steps: batches in an epoch.
        rows: of each bucket, rows in an epoch.
    """

    def __init__(
        self,
        pieces: Pieces | PairPieces,
        search: Callable[..., Packed],
        *,
        seed: int,
        shuffle: bool,
        window: int,
    ):
        self._pieces, self._seed, self._shuffle = pieces, seed, shuffle
        self._partition = None
        if len(pieces) > window:
            self._partition = Partition(pieces, window, seed if shuffle else None)
            self.counts = self._partition.counts
        else:
            self.counts = lengths_lib.histogram(pieces.numbered())
        counts = self.counts.copy()
        counts[0] = 0
        self.kinds: list[Kind] = []
        first = np.zeros_like(counts)
        number = 0
        while number != 1:
            number = max(-(-int(counts.sum()) // window), 1) if self._partition else 1
            packed = search(counts // number, whole=number > 1)
            while number > 1 and not packed.counts.any():
                # So many lengths that a window has none of each, or no whole batch: fewer windows.
                number //= 2
                packed = search(counts // number, whole=number > 1)
            if packed.counts.any():
                self.kinds.append(Kind(number, Table(packed), first))
            first = first + number * packed.counts
            counts = counts - number * packed.counts
        # The kind of each window, by its number.
        self._kind = np.repeat(np.arange(len(self.kinds)), [kind.number for kind in self.kinds])
        steps = np.array([kind.table.steps for kind in self.kinds])
        self._steps = steps[self._kind]
        self.steps = int(self._steps.sum())
        # The rows of each bucket in a window of each kind; and in an epoch.
        packed_kinds = [kind.table.packed for kind in self.kinds]
        self._rows = np.array(
            [[each.rows(i) for each in packed_kinds] for i in range(len(packed_kinds[0].buckets))]
        )
        self.rows = self._rows[:, self._kind].sum(axis=1).tolist()
        self._latest: tuple[int, np.ndarray, np.ndarray] | None = None

    def __len__(self) -> int:
        return len(self._kind)

    def find(self, epoch: int, step: int) -> tuple[int, int]:
        """The place in the epoch's order of windows, and the step in that window."""
        return _within(self._order(epoch)[2], step)

    def find_row(self, epoch: int, index: int, row: int) -> tuple[int, int]:
        """As `find`, for a row of a bucket, counted over the epoch."""
        order = self._order(epoch)[1]
        return _within(np.cumsum(self._rows[index][self._kind[order]]), row)

    def _order(self, epoch: int) -> tuple[int, np.ndarray, np.ndarray]:
        """The epoch, its windows in their order, and the step that follows each."""
        latest = self._latest
        if latest is None or latest[0] != epoch:
            order = np.arange(len(self))
            if self._shuffle:
                order = permutation(
                    random_bits(self._seed, Purpose.WINDOWS, len(self), epoch=epoch)
                )
            latest = self._latest = epoch, order, np.cumsum(self._steps[order])
        return latest

    def members(self, epoch: int, place: int) -> tuple[np.ndarray | None, np.ndarray]:
        """The pieces of the window at `place` of the epoch's order, and their lengths.

        None in place of the pieces for a window of all of them, by number.
        """
        if self._partition is None:
            return None, self._pieces.numbered()
        window = int(self._order(epoch)[1][place])
        kind = self.kinds[self._kind[window]]
        share = kind.table.packed.counts
        nth = window - int(np.searchsorted(self._kind, self._kind[window]))
        return self._partition.members(kind.first + nth * share, share)

    def deal(self, epoch: int, place: int) -> Dealt:
        """Deals the window at `place` of the epoch's order: a pure function."""
        window = int(self._order(epoch)[1][place])
        table = self.kinds[self._kind[window]].table
        members, sizes = self.members(epoch, place)
        random = functools.partial(random_bits, self._seed, epoch=epoch, window=window)
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


def _within(ends: np.ndarray, number: int) -> tuple[int, int]:
    """Which of consecutive runs that stop at `ends` holds `number`, and where in it."""
    place = int(np.searchsorted(ends, number, side="right"))
    return place, number - (int(ends[place - 1]) if place else 0)
