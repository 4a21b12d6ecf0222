"""Sources: a source is one corpus under given options, as an endless stream of rows per bucket."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from pipeline.errors import InvalidValue
from pipeline.planning.assignment import Rows
from pipeline.planning.bucket import Bucket
from pipeline.planning.cascade import pack
from pipeline.planning.lengths import NO_EXAMPLES, Lengths, digest
from pipeline.planning.options import VERSION, Options
from pipeline.planning.patterns import Packed
from pipeline.planning.pieces import (
    Pieces,
    as_spans,
    cut,
    file_runs,
    merge_spans,
    trainable_positions,
)
from pipeline.planning.solution import Search, Solution, load_solution
from pipeline.planning.windows import Windows


class Source:
    """The rows of one corpus, epoch after epoch, by random access.

    A plan of several sources takes single rows (`by_row`). Otherwise it takes whole batches, and
    rows that make no whole batch move to a longer bucket.

    A source may take over in mid-epoch from another (`previous`), of the same corpus or of the
    start of it. It begins with the remainder, planned anew. `rows_before` has the rows of each
    bucket that were taken from `previous`; `left`, of these rows, the spans that no batch has had,
    and the first epoch not begun.

    Attributes:
        name: the name of the corpus; empty if it is the only one.
        first: the number of its first example in the plan.
        whole: the windows of whole epochs.
        remainder: the windows of the remainder; None if there is none.
        remainder_files: int64, the file of the corpus for each file in which the remainder lies.
        epoch: the number of the first whole epoch.
        open_epochs: the epochs before it of which positions remained.
        solution: the patterns of whole epochs with packing="optimal"; else None.
    """

    def __init__(
        self,
        lengths: Lengths,
        options: Options,
        *,
        name: str = "",
        first: int = 0,
        by_row: bool = False,
        previous: "Source | None" = None,
        rows_before: np.ndarray | None = None,
        left: tuple[np.ndarray, int] | None = None,
    ):
        self.lengths, self.options, self.name, self.first = lengths, options, name, first
        self.by_row, self._previous, self._buckets = by_row, previous, options.buckets
        if by_row:
            self._buckets = tuple(dataclasses.replace(each, rows=1) for each in options.buckets)
        longest = options.buckets[-1]
        if lengths.array.ndim != len(longest.lengths):
            raise InvalidValue(
                f"lengths has shape {lengths.array.shape} and the longest bucket is {longest!r}; "
                "pairs need buckets with two lengths, Bucket(rows=…, length=(inputs, targets)), "
                "and others with one"
            )
        pieces = cut(lengths.array, longest.lengths, options.overflow)
        if pieces.longest == 0:
            raise InvalidValue(
                f"none of the {len(lengths):,} examples has a position to train on; a causal "
                "example needs at least two tokens, and overflow='drop' leaves out those longer "
                f"than the longest bucket ({longest})"
            )
        self.whole, self.solution = self._make_windows(pieces, lengths, self._buckets)
        self.epoch, self.open_epochs = 0, ()
        self.remainder: Windows | None = None
        self.remainder_files = NO_EXAMPLES
        self._spans = self._lost = np.zeros((0, 3 + len(longest.lengths)), np.int64)
        self._remainder_solution: Solution | None = None
        if previous is not None:
            assert rows_before is not None, "a source that takes over knows the rows before it"
            self._take_over(previous, rows_before, left)

    def _make_windows(
        self, pieces: Pieces, lengths: Lengths, buckets: tuple[Bucket, ...]
    ) -> tuple[Windows, Solution | None]:
        """The windows of pieces of `lengths` with rows in `buckets`; the solution if "optimal"."""
        options = self.options
        fixed: dict[str, Any] = {"max_segments": options.max_segments}
        if pieces.table is not None:
            fixed["sizes"] = pieces.table

        def make(search: Callable[..., Packed], files: np.ndarray | None = None) -> Windows:
            return Windows(
                pieces,
                functools.partial(_pack_used, search, self._buckets, buckets, fixed),
                [bucket.rows for bucket in self._buckets],
                seed=options.seed,
                shuffle=options.shuffle,
                window=options.window,
                by_row=self.by_row,
                files=files,
            )

        if options.packing != "optimal":  # which solves one histogram, shared by all windows
            return make(functools.partial(pack, packing=options.packing), lengths.files), None
        inputs = {
            "plan": VERSION,
            "lengths": lengths.digest,
            "buckets": "+".join(map(str, buckets)),
            "packing": options.packing,
            "overflow": options.overflow,
            "window": self._window(pieces),
            "max_segments": options.max_segments or "any",
        }

        def search() -> Search:
            search = Search()
            search.counts = make(search.pack).counts
            return search

        solution = load_solution(self.lengths.store, inputs, search)
        return make(solution.pack), solution

    def _window(self, pieces: Pieces) -> int | str:
        return self.options.window if len(pieces) > self.options.window else "all"

    def _take_over(self, previous: "Source", rows_before: np.ndarray, left: Any) -> None:
        """Plans the positions that `previous` had not used of its epochs."""
        spans, self.epoch = previous.remaining_spans(rows_before, left)
        self.open_epochs = tuple(np.unique(spans[:, 0]).tolist())
        new = np.arange(len(previous.lengths), len(self.lengths))
        if self.open_epochs and len(new):  # new examples join the latest epoch in progress
            sizes = trainable_positions(self.lengths.array[new])
            joining = as_spans(self.epoch - 1, new, 0, sizes)
            spans = np.concatenate([spans, joining[sizes.any(axis=1)]])
        if len(self.lengths.excluded):
            stays = ~np.isin(spans[:, 1], self.lengths.excluded)
            spans, self._lost = spans[stays], spans[~stays]
        self._spans = spans
        lengths = spans[:, 3:].astype(np.uint32)
        lengths = lengths if self.options.pairs else lengths[:, 0]
        pieces, buckets = self._cut_remainder(lengths)
        sizes = pieces.positions_per_example()
        lost = spans.copy()
        lost[:, 3:] -= sizes
        self._lost = np.concatenate([self._lost, lost[lost[:, 3:].any(axis=1)]])
        self._last = (spans[:, 2:3] + sizes).max(initial=0, where=sizes > 0) - 1
        if pieces.longest:
            self.remainder_files, files = file_runs(spans, self.lengths.files)
            self.remainder, self._remainder_solution = self._make_windows(
                pieces, Lengths(lengths, files=files), buckets
            )

    def _cut_remainder(self, lengths: np.ndarray) -> tuple[Pieces, tuple[Bucket, ...]]:
        """The pieces of spans of these lengths, and the buckets for their rows."""
        pieces = cut(lengths, self.options.buckets[-1].lengths, self.options.overflow)
        if not self.by_row:
            return pieces, self._buckets
        # Only buckets with rows in whole epochs, which follow the remainder in every bucket. A span
        # that these do not hold is split; a pair cannot be split and is dropped.
        used = [n for n, rows in enumerate(self.whole.rows) if rows]
        buckets = tuple(self._buckets[n] for n in used)
        sizes = pieces.positions_per_example()
        holds = [(sizes <= bucket.lengths).all(axis=1) for bucket in buckets]
        room = tuple(map(max, zip(*(bucket.lengths for bucket in buckets), strict=True)))
        if self.options.pairs:
            sizes[~np.logical_or.reduce(holds)] = 0
            return cut(sizes, room, "truncate"), buckets
        return cut(sizes[:, 0], room, "split"), buckets

    @functools.cached_property
    def remainder_rows(self) -> np.ndarray:
        """Rows of each bucket in the remainder: int64 [buckets]."""
        return 0 * self.whole.rows if self.remainder is None else self.remainder.rows

    @property
    def fingerprint_parts(self) -> dict[str, Any]:
        """The source's parts of a fingerprint, by name."""
        parts = {"lengths": self.lengths.digest, "window": self._window(self.whole.pieces)}
        if self.whole.files is not None and self.lengths.files is not None:
            parts["window"] = f"{parts['window']} of files {digest(self.lengths.files)}"
        if self.solution is not None:
            parts["patterns"] = self.solution.digest
        if self._remainder_solution is not None:
            parts["patterns of the rest"] = self._remainder_solution.digest
        return parts

    @property
    def max_position(self) -> int:
        """The largest position in any row."""
        whole = self.whole.pieces.max_position
        return whole if self.remainder is None else max(int(self._last), whole)

    @property
    def num_lost(self) -> int:
        """Positions of open epochs that are in no row: of examples left out, or overlong."""
        return int(self._lost[:, 3:].sum())

    def take(self, bucket: int, first: int, count: int) -> list[Rows]:
        """Rows `first` to `first + count` of a bucket's stream, divided by window."""
        found, at, end = [], first, first + count
        before = int(self.remainder_rows[bucket])
        while at < end:
            if self.remainder is not None and at < before:
                windows, epoch, row, spans = self.remainder, self.epoch - 1, at, self._spans
            else:
                epochs, row = divmod(at - before, int(self.whole.rows[bucket]))
                windows, epoch, spans = self.whole, self.epoch + epochs, None
            assignment, numbers = windows.take(epoch, bucket, row, end - at)
            rows = assignment, bucket, numbers, assignment.slots.pattern(bucket, numbers)
            found.append(Rows(*rows, windows.pieces, spans, self.first, epoch))
            at += len(numbers)
        return found

    def files_ahead(self, rows_before: np.ndarray) -> list[np.ndarray]:
        """The files of each window after some rows, and of those of the next epoch."""
        assert self.lengths.files is not None, "only a corpus of files is asked"
        every, found = np.arange(len(self.lengths.files)), []
        rest, in_epoch = rows_before - self.remainder_rows, self.whole.rows
        if self.remainder is not None and (rest < 0).any():
            for runs in self.remainder.files_from(self.epoch - 1, rows_before):
                found.append(every if runs is None else np.unique(self.remainder_files[runs]))
            rest = 0 * rest
        epochs = int((rest[in_epoch > 0] // in_epoch[in_epoch > 0]).min())
        for more, before in ((0, rest - epochs * in_epoch), (1, 0 * rest)):
            for files in self.whole.files_from(self.epoch + epochs + more, before):
                found.append(every if files is None else files)
        return found

    def remaining_spans(self, rows_before: np.ndarray, left: Any) -> tuple[np.ndarray, int]:
        """The spans that remain of open epochs, and the first epoch of which no row was taken."""
        rows = rows_before - self.remainder_rows
        in_epoch = self.whole.rows
        after_remainder = np.maximum(rows, 0)[in_epoch > 0]
        over = int((after_remainder // in_epoch[in_epoch > 0]).min())
        started = int((-(-after_remainder // in_epoch[in_epoch > 0])).max())
        more, begun = left or (self._spans[:0], self.epoch + started)
        begun = min(max(begun, self.epoch), self.epoch + started)
        parts = [more]
        if self.remainder is not None:
            used = np.minimum(rows_before, self.remainder_rows)
            pieces = self.remainder.remaining_pieces(self.epoch - 1, used)
            numbers, starts = self.remainder.pieces.locate(pieces)
            epochs, examples, first = self._spans[numbers, :3].T
            sizes = self.remainder.pieces.positions_of(pieces)
            parts.append(as_spans(epochs, examples, first + starts, sizes))
        for number in range(over, begun - self.epoch):
            epoch = self.epoch + number
            used = np.clip(rows - number * in_epoch, 0, in_epoch)
            pieces = self.whole.remaining_pieces(epoch, used)
            examples, starts = self.whole.pieces.locate(pieces)
            sizes = self.whole.pieces.positions_of(pieces)
            parts.append(as_spans(epoch, examples, starts, sizes))
        spans = merge_spans(np.concatenate(parts))
        return spans[spans[:, 0] < begun], begun

    def expected_positions(self, epoch: int) -> np.ndarray:
        """The positions of each example that batches of an epoch have: int64 [examples, 1 or 2].

        This is the only definition of coverage. Positions lost to overflow and examples left out
        do not count. New examples count from the epoch that they join.
        """
        if self._previous is None or epoch >= self.epoch:
            return self.whole.pieces.positions_per_example()
        before = self._previous.expected_positions(epoch)
        expected = np.zeros((len(self.lengths), before.shape[1]), np.int64)
        expected[: len(before)] = before
        if epoch == self.epoch - 1 and epoch in self.open_epochs:
            expected[len(before) :] = trainable_positions(self.lengths.array[len(before) :])
        lost = self._lost[self._lost[:, 0] == epoch]
        np.subtract.at(expected, lost[:, 1], lost[:, 3:])
        return expected

    def count_examples(self, epoch: int) -> int:
        """The number of examples at the end of an epoch; new examples have the numbers after it."""
        if self._previous is None or epoch >= self.epoch or epoch in self.open_epochs:
            return len(self.lengths)
        return self._previous.count_examples(epoch)

    def count_epochs(self, rows_before: np.ndarray) -> int:
        """The number of epochs that are over, at least, after some rows of each bucket."""
        rows = rows_before - self.remainder_rows
        if (rows < 0).any():
            return min(self.open_epochs)
        used = self.whole.rows > 0
        return self.epoch + int((rows[used] // self.whole.rows[used]).min())


def _pack_used(
    search: Callable[..., Packed],
    buckets: tuple[Bucket, ...],
    used: tuple[Bucket, ...],
    options: Mapping[str, Any],
    counts: np.ndarray,
    *,
    whole: bool = False,
    surplus: Sequence[int] | None = None,
) -> Packed:
    """Packs a histogram by `search`, as `cascade.pack`, into those of `buckets` that are `used`."""
    if surplus is not None:
        given = dict(zip(buckets, surplus, strict=True))
        options = {**options, "surplus": [given[bucket] for bucket in used]}
    packed = search(counts, buckets=used, whole=whole, **options)
    if len(used) == len(buckets):
        return packed
    patterns = dict(zip(used, packed.patterns, strict=True))
    return Packed(buckets, tuple(patterns.get(each, ()) for each in buckets), packed.counts)
