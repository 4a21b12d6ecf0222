"""The source: one corpus under given options, as rows that a plan takes one after another."""

import dataclasses
import functools
from typing import Any

import numpy as np

from pipeline.packing.bucket import Bucket
from pipeline.packing.cascade import pack
from pipeline.packing.patterns import Packed
from pipeline.packing.solution import Search, Solution, load_solution, store_in_file
from pipeline.planning.dealing import Taken
from pipeline.planning.lengths import Lengths
from pipeline.planning.options import VERSION, Options
from pipeline.planning.pieces import Pieces, Runs, cut, trained
from pipeline.planning.windows import Windows


class Source:
    """The rows of each bucket as one endless stream, epoch after epoch, random access.

    A source that takes over from another in the middle of an epoch begins with the remainder: what
    the other had left, planned anew. Whole epochs follow.

    Args:
        lengths: of the corpus.
        options: how to plan it; the window is this source's own.
        name: of the corpus, among several; empty for the only one.
        first: the number of its first example in the plan.
        by_row: whether rows are taken one by one, to share batches with other sources; else the
            plan takes whole batches, and rows that fill no batch move on to a longer bucket.
        previous: the source that this one takes over from; of the same corpus, which may have
            grown, and of which more examples may be left out.
        taken: the rows of each bucket that were taken of `previous`, int64 [buckets].

    Attributes:
        whole: the rows of whole epochs.
        remainder: the rows before them; None for nothing.
        epoch: the first whole epoch.
        begun: the epochs before it that had something left.

    Raises:
        ValueError: no example has a position to train on, or one is too long for overflow="error".
        ImportError: packing is "optimal", patterns have to be found, and scipy is missing.
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
        taken: np.ndarray | None = None,
    ):
        self.lengths, self.options, self.name, self.first = lengths, options, name, first
        self.by_row, self._previous, self._buckets = by_row, previous, options.buckets
        if by_row:
            self._buckets = tuple(dataclasses.replace(each, rows=1) for each in options.buckets)
        longest = options.buckets[-1]
        if lengths.array.ndim != len(longest.lengths):
            raise ValueError(
                f"lengths has shape {lengths.array.shape} and the longest bucket is {longest!r}; "
                "pairs need buckets with two lengths, Bucket(rows=…, length=(inputs, targets)), "
                "and others with one"
            )
        pieces = cut(lengths.array, longest.lengths, str(options.overflow))
        if pieces.longest == 0:
            raise ValueError(
                f"none of the {len(lengths):,} examples has a position to train on; a causal "
                "example needs at least two tokens, and overflow='drop' leaves out those longer "
                f"than the longest bucket ({longest})"
            )
        self.whole, self.solution = self._planned(
            pieces, lengths, self._buckets, others=previous is not None
        )
        self.epoch, self.begun = 0, ()
        self.remainder: Windows | None = None
        self._runs = self._lost = Runs.none(len(longest.lengths))
        self._rest_solution: Solution | None = None
        if previous is not None:
            self._take_over(previous, taken)

    def _planned(
        self, pieces: Pieces, lengths: Lengths, buckets: tuple[Bucket, ...], *, others: bool
    ) -> tuple[Windows, Solution | None]:
        """The rows of some pieces, in some of the source's buckets; and what "optimal" found.

        Args:
            pieces: what to plan.
            lengths: what the pieces are of.
            buckets: which of the buckets may have rows.
            others: whether the file of `patterns` may be that of another plan.
        """
        options = self.options
        fixed: dict[str, Any] = {"buckets": buckets, "max_segments": options.max_segments}
        if pieces.table is not None:
            fixed["sizes"] = pieces.table

        def windows(search, **more) -> Windows:
            def packed(counts: np.ndarray, *, whole: bool) -> Packed:
                found = search(counts, whole=whole, **fixed, **more)
                if len(buckets) == len(self._buckets):
                    return found
                patterns = dict(zip(buckets, found.patterns, strict=True))
                every = tuple(patterns.get(bucket, ()) for bucket in self._buckets)
                return Packed(self._buckets, every, found.counts)

            return Windows(
                pieces,
                packed,
                seed=options.seed,
                shuffle=options.shuffle,
                window=options.window,
                by_row=self.by_row,
            )

        if options.packing != "optimal":
            return windows(pack, packing=options.packing), None
        about = {
            "plan": VERSION,
            "lengths": lengths.digest,
            "buckets": "+".join(map(str, buckets)),
            "packing": options.packing,
            "overflow": options.overflow,
            "window": self._window(pieces),
            "max_segments": options.max_segments or "any",
        }

        def solve() -> Search:
            search = Search()
            search.counts = windows(search.pack).counts
            return search

        keep = self.lengths.keep
        if options.patterns is not None:
            keep = store_in_file(options.patterns, allow_other=others)
        found = load_solution(keep, about, solve, options.patterns)
        return windows(found.pack), found

    def _window(self, pieces: Pieces) -> int | str:
        return self.options.window if len(pieces) > self.options.window else "all"

    def _take_over(self, previous: "Source", taken: np.ndarray | None) -> None:
        """Plans what the source before had left of its epochs."""
        assert taken is not None, "whoever takes over knows from where on"
        runs, self.epoch = previous.left(taken)
        changes = np.flatnonzero(np.diff(runs.epochs, prepend=-1))  # they are sorted by epoch
        self.begun = tuple(runs.epochs[changes].tolist())
        new = np.arange(len(previous.lengths), len(self.lengths))
        if self.begun and len(new):  # new examples join the epoch in progress
            sizes = trained(self.lengths.array[new])
            joined = Runs(new, 0 * new, sizes, np.full(len(new), self.epoch - 1))
            runs = Runs.concatenate([runs, joined.take(sizes.any(axis=1))])
        kept = runs
        if len(self.lengths.left_out):
            stays = ~np.isin(runs.examples, self.lengths.left_out)
            kept, self._lost = runs.take(stays), runs.take(~stays)
        self._runs = kept
        pieces, buckets = self._pieces_of(kept)
        dealt = pieces.due()
        short = (kept.sizes != dealt).any(axis=1)
        cut_off = kept.take(short).with_sizes((kept.sizes - dealt)[short])
        self._lost = Runs.concatenate([self._lost, cut_off])
        self._last = (kept.starts[:, None] + dealt).max(initial=0, where=dealt > 0) - 1
        if pieces.longest:
            self.remainder, self._rest_solution = self._planned(
                pieces, Lengths(kept.lengths), buckets, others=True
            )

    def _pieces_of(self, runs: Runs) -> tuple[Pieces, tuple[Bucket, ...]]:
        """The pieces of the remainder, and the buckets that it is packed into."""
        room, overflow = self.options.buckets[-1].lengths, str(self.options.overflow)
        pieces = cut(runs.lengths, room, overflow)
        if not self.by_row:
            return pieces, self._buckets
        # Only buckets that whole epochs have, too, which go on where the remainder of a bucket
        # ends. A run that these do not hold is split; a pair, which cannot be, is dropped.
        used = [n for n, rows in enumerate(self.whole.rows) if rows]
        buckets = tuple(self._buckets[n] for n in used)
        lengths = pieces.due()
        holds = [(lengths <= bucket.lengths).all(axis=1) for bucket in buckets]
        room = tuple(map(max, zip(*(bucket.lengths for bucket in buckets), strict=True)))
        if self.options.pairs:
            lengths[~np.logical_or.reduce(holds)] = 0
            return cut(lengths, room, "truncate"), buckets
        return cut(lengths[:, 0], room, "split"), buckets

    @functools.cached_property
    def remainder_rows(self) -> np.ndarray:
        """Rows of each bucket before the first whole epoch: int64 [buckets]."""
        return 0 * self.whole.rows if self.remainder is None else self.remainder.rows

    @property
    def windows(self) -> tuple[Windows, ...]:
        """The remainder, if there is one, and whole epochs."""
        return (self.whole,) if self.remainder is None else (self.remainder, self.whole)

    @property
    def parts(self) -> dict[str, Any]:
        """What of it a fingerprint has, by name."""
        found = {"lengths": self.lengths.digest, "window": self._window(self.whole.pieces)}
        if self.solution is not None:
            found["patterns"] = self.solution.digest
        if self._rest_solution is not None:
            found["patterns of the rest"] = self._rest_solution.digest
        return found

    @property
    def max_position(self) -> int:
        """The largest position that a row of it holds."""
        whole = self.whole.pieces.max_position
        return whole if self.remainder is None else max(int(self._last), whole)

    @property
    def num_lost(self) -> int:
        """Positions of epochs in progress that this source took out: left out, or too long."""
        return int(self._lost.sizes.sum())

    def rows(self, bucket: int, first: int, count: int) -> list[Taken]:
        """Rows `first` to `first + count` of a bucket's stream, window by window."""
        found, at, end = [], first, first + count
        before = int(self.remainder_rows[bucket])
        while at < end:
            if self.remainder is not None and at < before:
                windows, epoch, local = self.remainder, self.epoch - 1, at
            else:
                epoch, local = divmod(at - before, int(self.whole.rows[bucket]))
                windows, epoch = self.whole, self.epoch + epoch
            rows = windows.take(epoch, bucket, local, end - at)
            runs = self._runs if windows is self.remainder else None
            found.append(Taken(rows, windows.pieces, runs, self.first, epoch))
            at += len(rows)
        return found

    def left(self, taken: np.ndarray) -> tuple[Runs, int]:
        """What is left of epochs that were begun when so many rows of each bucket are taken.

        Returns:
            The runs of positions; and the first epoch that was not begun.
        """
        rows = taken - self.remainder_rows
        in_epoch = self.whole.rows
        whole = np.maximum(rows, 0)[in_epoch > 0]
        over, begun = (whole // in_epoch[in_epoch > 0]).min(), -(-whole // in_epoch[in_epoch > 0])
        parts = [Runs.none(len(self._buckets[-1].lengths))]
        if self.remainder is not None:
            pieces = self.remainder.left(self.epoch - 1, np.minimum(taken, self.remainder_rows))
            runs, starts = self.remainder.pieces.locate(pieces)
            sizes = self.remainder.pieces.positions_of(pieces)
            found = self._runs.take(runs).with_sizes(sizes)
            parts.append(dataclasses.replace(found, starts=found.starts + starts))
        for number in range(int(over), int(begun.max())):
            here = np.clip(rows - number * in_epoch, 0, in_epoch)
            pieces = self.whole.left(self.epoch + number, here)
            examples, starts = self.whole.pieces.locate(pieces)
            starts = np.broadcast_to(starts, len(pieces))
            epochs = np.full(len(pieces), self.epoch + number)
            parts.append(Runs(examples, starts, self.whole.pieces.positions_of(pieces), epochs))
        return Runs.concatenate(parts).merged(), self.epoch + int(begun.max())

    def due(self, epoch: int) -> np.ndarray:
        """The positions of each example that an epoch has: int64 [examples, 1 or 2].

        The one account of coverage: what overflow truncates or drops and what is left out is not
        due; new examples are due from the epoch that they join.
        """
        if self._previous is None or epoch >= self.epoch:
            return self.whole.pieces.due()
        before = self._previous.due(epoch)
        due = np.zeros((len(self.lengths), before.shape[1]), np.int64)
        due[: len(before)] = before
        if epoch == self.epoch - 1 and epoch in self.begun:
            due[len(before) :] = trained(self.lengths.array[len(before) :])
        lost = self._lost.take(self._lost.epochs == epoch)
        np.subtract.at(due, lost.examples, lost.sizes)
        return due

    def known(self, epoch: int) -> int:
        """How many examples there were by the end of an epoch; new ones are numbered after them."""
        if self._previous is None or epoch >= self.epoch or epoch in self.begun:
            return len(self.lengths)
        return self._previous.known(epoch)

    def whole_epochs(self, taken: np.ndarray) -> int:
        """At least how many epochs are over when so many rows of each bucket are taken."""
        rows = taken - self.remainder_rows
        if (rows < 0).any():
            return min(self.begun)
        some = self.whole.rows > 0
        return self.epoch + int((rows[some] // self.whole.rows[some]).min())
