"""Shares: windows divided by their files, so that the rows of a host need a share of the files.

In a window, parts of files, in a seeded order, are dealt to groups that have equal shares of the
columns, and each group is packed by itself. The rows of the window are in the order of the groups,
and place `s` of every batch takes rows of the `s`-th stratum of them. So the rows that a host
builds are of adjacent groups, whatever the number of hosts. The groups are the same in every epoch.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from pipeline.planning.balance import count_units
from pipeline.planning.layout import FlatRows, OrderRows, ranges
from pipeline.planning.lengths import NO_EXAMPLES
from pipeline.planning.options import Options
from pipeline.planning.order import Purpose, permutation, random_bits
from pipeline.planning.patterns import Packed, Packer
from pipeline.planning.processes import spread
from pipeline.planning.rows import ORDERS, Rows
from pipeline.planning.windows import Measure, Measures, Windows, cut_runs

# A process for each so many pieces to pack, which take about half a second.
PER_PROCESS = 1 << 20

# The columns of a piece are counted in this many parts of the longest one.
COLUMNS = 1 << 20

# Multiples of the golden ratio, in parts of 2**64, are spread evenly, from whichever one on.
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
WHOLE = 1 << 32  # a batch, in the unit of places

# Rows whose ranks by cost differ by less than this part of all are in random order.
MIXED = 32

# The parts of the ranks of which consecutive rows of a stratum have one each; and by how many of
# them adjacent strata differ: any two in a row by half.
PARTS = 4
TURNS = np.array([0, 2, 1, 3])

# A row that a mixture takes is up to this many places from where the place of its number is, and
# so many rows of a window may be of another stratum.
ASIDE = 3


class Groups(Windows):
    """Windows divided into `options.read_shares` groups each; a window of this class is a group.

    Attributes:
        window_of: int64 [groups], the window of each group.
    """

    def _divide(
        self, options: Options, files: tuple[np.ndarray, np.ndarray] | None, key: int | None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """See `Windows`; runs are cut where a group ends."""
        self._shares = options.read_shares
        edges, file_of_run, number = cut_runs(self.pieces, options.window, files)
        window_of_run, order = self._deal_runs(edges, number, key), np.arange(len(edges) - 1)
        if key is not None:
            order = permutation(random_bits(key, Purpose.SHARES, len(order)))
        order = order[window_of_run[order].argsort(kind="stable")]
        of_windows = np.split(order, np.bincount(window_of_run, minlength=number).cumsum()[:-1])
        cuts = [self._cut(edges, runs, n * self._shares) for n, runs in enumerate(of_windows)]
        begins, groups, runs = np.concatenate(cuts, axis=1)
        sort = begins.argsort()
        self.window_of = np.unique(groups) // self._shares
        file = None if file_of_run is None else file_of_run[runs[sort]]
        return np.append(begins[sort], edges[-1]), groups[sort], file

    def _cut(self, edges: np.ndarray, runs: np.ndarray, first: int) -> np.ndarray:
        """Consecutive runs of a window, cut into groups of equal shares of columns.

        The first piece, the group and the run of each part: int64 [3, parts].
        """
        if not len(runs):
            return np.zeros((3, 0), np.int64)
        bounds = zip(edges[runs].tolist(), edges[runs + 1].tolist(), strict=True)
        keys = np.concatenate([self.pieces.keys(begin, end) for begin, end in bounds])
        table = self.pieces.table
        columns = (table * COLUMNS // np.maximum(table.max(axis=0), 1)).sum(axis=1)[keys]
        total, before = int(columns.sum()), columns.cumsum() - columns
        # A group begins with the first piece before which there are the columns of the others.
        due = -(-np.arange(1, self._shares) * total // self._shares)
        ends = before.searchsorted(due)
        begin = np.cumsum(np.append(0, np.diff(edges)[runs]))
        cuts = np.unique(np.concatenate([begin[:-1], ends[ends < len(keys)]]))
        run = begin.searchsorted(cuts, side="right") - 1
        group = ends.searchsorted(cuts, side="right")
        return np.stack([edges[runs[run]] + cuts - begin[run], first + group, runs[run]])

    def _measure_all(self) -> Iterator[Measures]:
        """See `Windows`; in several processes, if that takes long."""
        surplus = self._surplus[0].tolist() if len(self) > 1 else None
        pack = functools.partial(
            _pack_and_measure, self._packer, self._measure, surplus, len(self.counts)
        )
        with spread(pack, sum(self.sizes) // PER_PROCESS) as measure:
            for begin in range(0, len(self), self._shares):
                histograms = list[tuple[np.ndarray, np.ndarray]]()
                for group in range(begin, min(begin + self._shares, len(self))):
                    counts = self._count(group)
                    self.counts += counts
                    keys = np.flatnonzero(counts)
                    histograms.append((keys, counts[keys]))
                yield from measure(histograms)


def _pack_and_measure(
    packer: Packer,
    measure: Measure,
    surplus: Sequence[int] | None,
    size: int,
    histogram: tuple[np.ndarray, np.ndarray],
) -> Measures:
    """The measures of a packed histogram of `size` keys, given as keys and their counts."""
    keys, numbers = histogram
    counts = np.zeros(size, np.int64)
    counts[keys] = numbers
    return measure(packer.pack(counts, surplus))


class SharedWindows:
    """Windows divided into groups; see `PackedWindows`.

    Attributes:
        groups: the groups of all windows.
        edges: int64 [windows + 1], the first group of each window, and the end of the last.
    """

    def __init__(self, *given: Any, **options: Any):
        """See `Windows`."""
        self.groups = groups = Groups(*given, **options)
        self.pieces, self.counts = groups.pieces, groups.counts
        self.most_segments = groups.most_segments
        self.most_continuations = groups.most_continuations
        self.edges = np.append(np.flatnonzero(np.diff(groups.window_of, prepend=-1)), len(groups))
        firsts = self.edges[:-1]
        self.rows = np.add.reduceat(groups.rows, firsts, axis=1)
        self.real = np.add.reduceat(groups.real, firsts, axis=1)
        self.cuts = np.add.reduceat(groups.cuts, firsts)
        self.sizes = np.add.reduceat(groups.sizes, firsts).tolist()
        self.most_pieces = max(self.sizes)
        self.files: list[np.ndarray] | None = None
        if (files := groups.files) is not None:
            in_windows = [[files[group] for group in self.groups_of(n)] for n in range(len(self))]
            self.files = [np.unique(np.concatenate(of_window)) for of_window in in_windows]

    def __len__(self) -> int:
        return len(self.edges) - 1

    def groups_of(self, window: int) -> range:
        """The numbers of the groups of a window."""
        return range(*self.edges[window : window + 2].tolist())

    def pieces_in(self, window: int) -> np.ndarray:
        """See `PackedWindows`."""
        return np.concatenate([self.groups.pieces_in(group) for group in self.groups_of(window)])

    def packings(self, window: int) -> Iterable[Packed]:
        """See `PackedWindows`."""
        return map(self.groups.packed, self.groups_of(window))

    def lay_out(
        self, window: int, bits: np.ndarray | None, order_rows: OrderRows
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """See `PackedWindows`; rows are in the order of the groups, and ordered within each."""
        groups, begin = self.groups_of(window), 0
        of_groups = list[list[tuple[np.ndarray, np.ndarray]]]()
        for group in groups:
            end = begin + self.groups.sizes[group]
            group_bits = None if bits is None else bits[begin:end]
            of_groups.append(self.groups.lay_out(group, group_bits, order_rows))
            begin = end
        laid_out = list[tuple[np.ndarray, np.ndarray]]()
        for of_shape in zip(*of_groups, strict=True):
            times, segments = zip(*of_shape, strict=True)
            laid_out.append((np.concatenate(times), np.concatenate(segments)))
        return laid_out


def _as_they_are(shape: int, segments: np.ndarray, first_pieces: np.ndarray) -> np.ndarray:
    """The order of rows that `layout.lay_out` gives them."""
    return np.arange(len(segments))


class SharedRows(Rows):
    """The rows of windows that are divided into shares, in batches in the order of the shares."""

    windows: SharedWindows
    make_windows = SharedWindows

    def __init__(self, *given: Any, **options: Any):
        super().__init__(*given, **options)
        self._files_by_epoch: dict[tuple[int, bytes], list[np.ndarray | None]] = {}

    def _fill(self, epoch: int, place: int) -> list[FlatRows]:
        """See `Rows`."""
        order, edges = self._order(epoch)
        window, shuffle = int(order[place]), self._options.shuffle
        draw = functools.partial(self._bits, epoch=epoch, window=window)
        bits = draw(Purpose.EXAMPLES, self.windows.sizes[window]) if shuffle else None
        in_groups, filled = self.windows.lay_out(window, bits, _as_they_are), list[FlatRows]()
        for shape, (times, segments) in enumerate(in_groups):
            rows = FlatRows(times, segments, self._sum_costs(times, segments))
            begin, end = edges[shape, place : place + 2].tolist()
            places = self._places(shape, begin, end)
            order_in_window = self._deal(shape, rows, begin, places, draw)
            taken = rows.pick(order_in_window)
            filled.append(FlatRows(*taken, rows.costs[order_in_window], places))
        return filled

    def _strata(self, shape: int) -> tuple[int, int]:
        """The rows that have all places once, and the number of strata; both of a shape.

        A stratum is that of a unit of a batch. Of a mixture, which takes any number of rows at a
        time, it is a share.
        """
        rows, shares = self._rows_per_batch[shape], self._options.read_shares
        return (shares, shares) if rows is None else (rows, count_units(rows, shares))

    def _places(self, shape: int, begin: int, end: int) -> np.ndarray:
        """The places of the rows from number `begin` to `end` of an epoch, as in `FlatRows`.

        Of a mixture, any consecutive rows are spread evenly.
        """
        number, rows = np.arange(begin, end), self._rows_per_batch[shape]
        if rows is None:
            return number.astype(np.uint64) * GOLDEN >> np.uint64(32)
        slots, last = number % rows, int(self.counts[shape]) % rows
        if last:  # the last batch is not full, and its rows are spread over it
            is_last = number >= self.counts[shape] - last
            slots[is_last] = slots[is_last] * rows // last
        return ((2 * slots + 1) * (WHOLE // 2) // rows).astype(np.uint64)

    def _deal(
        self,
        shape: int,
        rows: FlatRows,
        begin: int,
        places: np.ndarray,
        draw: Callable[..., np.ndarray],
    ) -> np.ndarray:
        """An order of the rows of a window, which are in the order of its groups: int64 [rows].

        A stratum has the next rows, ranked by cost. Each four of its rows that are taken one after
        another, or all that a batch takes from it if those are more, have one of each part of the
        ranks. The first part has the costliest rows: all strata have about the same ranks of it in
        the same batches, so that they cost about the same. Rows of other parts are in random order,
        so that batches have about the same number of segments. Where a batch takes fewer than four,
        adjacent strata take the parts in other orders.
        """
        count, (turn, units) = len(rows), self._strata(shape)
        stratum = (places * np.uint64(units) >> np.uint64(32)).astype(np.int64)
        of_rows, order = np.sort(stratum), np.empty(count, np.int64)
        if not self._options.shuffle:
            first = rows.segments[rows.times.cumsum() - rows.times, 0]
            order[stratum.argsort(kind="stable")] = np.lexsort((first, of_rows))
            return order
        near, row_bits = draw(Purpose.ROWS, 2 * count, bucket=shape).reshape(2, -1)
        sizes = np.bincount(stratum, minlength=units)
        near = (near >> np.uint64(32)) * sizes.repeat(sizes).astype(np.uint64) >> np.uint64(32)
        ranked, rank = np.lexsort((-rows.costs, of_rows)), ranges(0 * sizes, sizes)
        ranked = ranked[np.lexsort((rank * MIXED + near.astype(np.int64), of_rows))]
        # The number of each row among those of its stratum; those of one batch are consecutive.
        size, number = turn // units, np.arange(begin, begin + count)
        number = (number // turn - begin // turn) * size + number % size
        parts = max(size, PARTS)
        shared = draw(Purpose.MATCHED, int(number.max(initial=0)) // parts + 2, bucket=shape)
        turned = TURNS[(np.arange(units) + int(shared[-1] >> np.uint64(62))) % len(TURNS)]
        part = (number + turned[stratum]) % parts
        bits = np.where(part == 0, shared[number // parts], row_bits)
        order[np.lexsort((bits, part, stratum))] = ranked
        return order

    # ---- the files of some rows

    def _files_of(self, epoch: int, mine: Sequence[np.ndarray]) -> Sequence[np.ndarray | None]:
        """See `Rows`."""
        if all(some.all() for some in mine):
            return super()._files_of(epoch, mine)
        epoch = epoch if self._options.shuffle else 0
        key = epoch, b"".join(some.tobytes() for some in mine)
        if key not in self._files_by_epoch:
            windows, _ = self._order(epoch)
            of_windows = [self._find_files(epoch, place, mine) for place in range(len(windows))]
            self._files_by_epoch[key] = of_windows
            for oldest in list(self._files_by_epoch)[:-ORDERS]:
                self._files_by_epoch.pop(oldest, None)
        return self._files_by_epoch[key]

    def _find_files(self, epoch: int, place: int, mine: Sequence[np.ndarray]) -> np.ndarray | None:
        """The files of the rows `mine` of a window of an epoch."""
        if (files := self.windows.groups.files) is None:
            return None
        order, edges = self._order(epoch)
        groups = self.windows.groups_of(int(order[place]))
        needed = np.zeros(len(groups), bool)
        for shape, some in enumerate(mine):
            begin, end = edges[shape, place : place + 2].tolist()
            if begin == end or not some.any():
                continue
            first, last = self._find_rows(shape, begin, end, some)
            of_groups = self.windows.groups.rows[shape, groups.start : groups.stop]
            ends, covers = of_groups.cumsum(), np.zeros(len(groups) + 1, np.int64)
            np.add.at(covers, ends.searchsorted(first, side="right"), 1)
            np.add.at(covers, ends.searchsorted(last - 1, side="right") + 1, -1)
            needed |= (covers.cumsum()[:-1] > 0) & (of_groups > 0)
        needed_files = [files[groups.start + n] for n in np.flatnonzero(needed)]
        return np.unique(np.concatenate(needed_files)) if needed_files else NO_EXAMPLES

    def _find_rows(
        self, shape: int, begin: int, end: int, mine: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """The ranges of the rows of a window, in the order of its groups, that are `mine`.

        `begin` and `end` are as for `_places`.
        """
        count, (rows, units) = end - begin, self._strata(shape)
        if self._rows_per_batch[shape] is None:
            slots, total = np.flatnonzero(mine), len(mine)
            first = np.maximum(slots - ASIDE, 0) * units // total
            last = -(-np.minimum(slots + 1 + ASIDE, total) * units // total)
            low, high = first * count // units - ASIDE, -(-last * count // units) + ASIDE
            return np.maximum(low, 0), np.minimum(high, count)
        size, full = rows // units, int(self.counts[shape]) // rows * rows
        before = [
            number // rows * size + np.clip(number % rows - size * np.arange(units), 0, size)
            for number in (min(begin, full), min(end, full))
        ]
        sizes = before[1] - before[0]
        if end > full:
            places = self._places(shape, max(begin, full), end) * np.uint64(units) >> np.uint64(32)
            sizes += np.bincount(places.astype(np.int64), minlength=units)
        ends = sizes.cumsum()
        which = mine.reshape(units, size).any(axis=1) & (sizes > 0)
        return (ends - sizes)[which], ends[which]
