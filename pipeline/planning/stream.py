"""Streams: a stream is one corpus under given options, as endless rows of each bucket.

It has one or two passes. If options changed, the first pass has the rest of the epochs in progress,
once. The last one has whole epochs for ever. A pass takes the rows of its windows, one window after
another, in a seeded order.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from pipeline.errors import InvalidValue
from pipeline.planning.cache import WindowCache
from pipeline.planning.gaps import check_fill
from pipeline.planning.layout import FlatRows
from pipeline.planning.lengths import Lengths, digest
from pipeline.planning.options import Options
from pipeline.planning.pieces import Pieces, as_spans, merge_spans
from pipeline.planning.rows import Rows
from pipeline.planning.shares import SharedRows


class Stream:
    """The rows of one corpus, by random access.

    A plan of several streams takes single rows: their `options` have buckets of one row. Otherwise
    it takes full batches, and rows that fill none move to a longer bucket.

    Attributes:
        lengths: the lengths of the corpus.
        name: the name of the corpus.
        by_row: whether the plan takes any number of rows at a time, not batches.
        first: the number of its first example in the plan.
        number: how many earlier streams the corpus has had.
        passes: the rest of epochs in progress, if there is one, then whole epochs.
        open_epochs: the earlier epochs of which positions remained.
        lost: spans of open epochs that are in no row: of examples left out, or overlong.
    """

    def __init__(
        self,
        lengths: Lengths,
        options: Options,
        cache: WindowCache,
        *,
        name: str,
        by_row: bool,
        first: int = 0,
        number: int = 0,
        epoch: int = 0,
        rest: np.ndarray | None = None,
    ):
        """Whole epochs begin with number `epoch`; `rest` has spans of open epochs."""
        self._make_rows = SharedRows if options.read_shares > 1 else Rows
        self.lengths, self.options, self.cache = lengths, options, cache
        self.name, self.by_row, self.first, self.number = name, by_row, first, number
        self.open_epochs: tuple[int, ...] = ()
        self.lost = np.zeros((0, 3 + len(options.names)), np.int64)
        none = np.zeros(len(options.buckets), np.int64)
        whole = self._make_rows(self, self._cut_whole(), epoch=epoch, start=none)
        self.passes: tuple[Rows, ...] = (whole,)
        if rest is not None and len(rest) and (resumed := self._plan_rest(rest)):
            whole.start = resumed.counts
            self.passes = (resumed, whole)

    @property
    def whole(self) -> Rows:
        """The pass of whole epochs."""
        return self.passes[-1]

    def _cut_whole(self) -> Pieces:
        """The pieces of whole examples, checked."""
        lengths, longest = self.lengths, self.options.buckets[-1]
        if lengths.num_sides != len(longest.lengths) or lengths.names not in ((), longest.names):
            named = f" of {', '.join(lengths.names)}" if lengths.names else ""
            raise InvalidValue(
                f"lengths has shape {lengths.array.shape}{named}, and the longest bucket is "
                f"{longest!r}; buckets have one length for each side, in the same order: "
                "Bucket(rows=…, length=(inputs, targets)) for pairs, and by name for others"
            )
        if self.options.cuts:
            check_fill(groups=lengths.has_groups)
        pieces = self.options.cut(lengths)
        if len(pieces.table) == 1:
            silent = f" ({lengths.num_silent:,} have no loss)" if lengths.num_silent else ""
            excluded = lengths.num_excluded - lengths.num_silent
            silent += f" (exclude leaves out {excluded:,})" if excluded else ""
            raise InvalidValue(
                f"none of the examples has a position to train on{silent}; a causal "
                "example needs at least two tokens, and overflow='drop' leaves out those longer "
                f"than the longest bucket ({longest.length})"
            )
        return pieces

    def _plan_rest(self, spans: np.ndarray) -> Rows | None:
        """The pass of the rest of open epochs; None without a position."""
        self.open_epochs = tuple(np.unique(spans[:, 0]).tolist())
        if self.lengths.num_excluded:
            stays = self.lengths.stays[spans[:, 1]]
            spans, self.lost = spans[stays], spans[~stays]
        pieces, used = self._cut_rest(spans[:, 1], spans[:, 3:].astype(np.uint32))
        sizes = pieces.positions_per_example()
        lost = spans.copy()
        lost[:, 3:] -= sizes
        if not self.options.vectors:  # the last positions are lost
            lost[:, 2] += sizes[:, 0]
        self.lost = np.concatenate([self.lost, lost[lost[:, 3:].any(axis=1)]])
        if len(pieces.table) == 1:
            return None
        none, epoch = np.zeros(len(self.options.buckets), np.int64), int(spans[:, 0].min())
        return self._make_rows(self, pieces, epoch=epoch, start=none, used=used, spans=spans)

    def _cut_rest(
        self, examples: np.ndarray, sizes: np.ndarray
    ) -> tuple[Pieces, Sequence[int] | None]:
        """The pieces of spans of these sizes, and the buckets of their rows, as for `packer`."""
        lengths = self.lengths.of_parts(examples, sizes)
        pieces = self.options.cut(lengths)
        if not self.by_row:
            return pieces, None
        # Only buckets that have rows in whole epochs, which follow. A span that they do not hold is
        # split; an example of several sides or a group cannot be split and is dropped.
        used = np.flatnonzero(self.whole.counts).tolist()
        buckets = [self.options.buckets[number] for number in used]
        sizes, vectors = pieces.positions_per_example(), self.options.vectors
        holds = np.any([(sizes <= bucket.lengths).all(axis=1) for bucket in buckets], axis=0)
        sizes[(lengths.indivisible | vectors) & ~holds] = 0
        room = tuple(map(max, zip(*(bucket.lengths for bucket in buckets), strict=True)))
        rest = self.lengths.of_parts(examples, sizes)
        return self.options.cut(rest, room, "truncate" if vectors else "split"), used

    @property
    def identity(self) -> dict[str, Any]:
        """Everything of the corpus on which its rows depend, as JSON."""
        several = any(len(its_pass.windows) > 1 for its_pass in self.passes)
        window = self.options.window if several else None
        identity = {"lengths": self.lengths.digest, "window": window}
        by_file = any(its_pass.windows.files is not None for its_pass in self.passes)
        if by_file and self.lengths.files is not None:
            identity["files"] = digest(self.lengths.files)
        return identity

    @property
    def max_position(self) -> int:
        """The largest position in whole epochs, from 0."""
        return self.whole.windows.pieces.max_position

    # ---- rows

    def take(self, shape: int, first: int, count: int) -> Iterator[FlatRows]:
        """Rows `first` to `first + count` of a shape, divided by window; see `Rows.take`."""
        while count:
            its_pass = next(
                its_pass for its_pass in reversed(self.passes) if first >= its_pass.start[shape]
            )
            yield (rows := its_pass.take(shape, first, count))
            first, count = first + len(rows), count - len(rows)

    def rest(self, rows: np.ndarray) -> tuple[np.ndarray, int]:
        """What remains after some rows: spans of epochs in progress, and the next whole epoch."""
        spans = itertools.chain.from_iterable(its_pass.rest(rows) for its_pass in self.passes)
        _, begun = self.whole.count_times(rows)
        return merge_spans(np.concatenate([self.lost[:0], *spans])), self.whole.epoch + begun

    def after(self, rows: np.ndarray, lengths: Lengths, options: Options) -> "Stream":
        """The stream after some rows, with the rest of open epochs planned again.

        New examples at the end of `lengths` join the latest epoch in progress.
        """
        spans, epoch = self.rest(rows)
        before = len(self.lengths)
        if len(spans) and len(lengths) > before:
            sizes = lengths.positions_from(before)
            joining = as_spans(epoch - 1, np.arange(before, len(lengths)), 0, sizes)
            spans = np.concatenate([spans, joining[sizes.any(axis=1)]])
        return Stream(
            lengths,
            options,
            self.cache,
            name=self.name,
            by_row=self.by_row,
            first=self.first,
            number=self.number + 1,
            epoch=epoch,
            rest=spans,
        )

    def files_ahead(self, rows: np.ndarray, mine: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The files of each window after some rows, and of each window of the next epoch.

        `mine` is as for `Rows.files_from`.
        """
        assert self.lengths.files is not None, "the corpus has files"
        every = np.arange(len(self.lengths.files))
        of_windows = itertools.chain.from_iterable(
            its_pass.files_from(rows, mine) for its_pass in self.passes
        )
        return [every if files is None else files for files in of_windows]


def expected_positions(streams: Sequence[Stream], epoch: int) -> tuple[np.ndarray, np.ndarray]:
    """The positions of each example in the batches of an epoch, and the pieces that it has lost.

    int64 [examples, sides], and [pieces, 2 + sides]: example, first position, and sizes. Positions
    lost to overflow and examples left out do not count. New examples count from the epoch that they
    join. `streams` are those of one corpus in the stages of a plan.
    """
    expected, first = streams[0].lost[:0, 3:], -1
    if begun := [n for n, stream in enumerate(streams) if epoch >= stream.whole.epoch]:
        first = begun[-1]
        expected = streams[first].whole.windows.pieces.positions_per_example()
    for stream in streams[first + 1 :]:
        before = len(expected)
        expected = np.pad(expected, ((0, len(stream.lengths) - before), (0, 0)))
        if epoch == stream.whole.epoch - 1 and epoch in stream.open_epochs:
            expected[before:] = stream.lengths.positions_from(before)
        lost = stream.lost[stream.lost[:, 0] == epoch]
        np.subtract.at(expected, lost[:, 1], lost[:, 3:])
    every = np.concatenate([stream.lost for stream in streams])
    return expected, every[every[:, 0] == epoch, 1:]
