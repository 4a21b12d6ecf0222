"""The supply: the rows of one corpus, in the order in which a mixture takes them."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pipeline.planning.bucket import Bucket
from pipeline.planning.leftover import Leftover, Reduced
from pipeline.planning.rows import Rows
from pipeline.planning.timeline import Stock


class Supply:
    """Rows of each bucket, one after another: first what was left of epochs, then whole epochs.

    Args:
        whole: plans the rows of whole epochs.
        leftover: what epochs that were begun still have, with the epoch of each run; None for
            nothing.
        epoch: the first that is whole.

    Attributes:
        whole: as given.
        rest: plans the rows of what was left; None for nothing.
        epoch: as given.
        begun: the epochs before it that had something left.
    """

    def __init__(self, whole: Rows, leftover: Leftover | None = None, epoch: int = 0):
        self.whole, self.epoch = whole, epoch
        self._leftover: Any = None  # there wherever there is a rest
        self.rest: Rows | None = None
        self.begun: tuple[int, ...] = ()
        if leftover is not None:
            self.begun = tuple(np.unique(leftover.epochs).tolist())
            self._leftover = leftover = leftover.cut(whole.buckets[-1], whole.overflow)
            # Only in buckets that whole epochs have, too: these take what is left of a bucket when
            # the others are through theirs. What needs a longer one is split.
            used = [bucket for bucket, rows in whole.batches_per_bucket.items() if rows]
            if len(leftover):
                self.rest = whole.anew(leftover, buckets=used, overflow="split")

    @property
    def rest_rows(self) -> list[int]:
        """Of each bucket, the rows before the first whole epoch."""
        rest = {} if self.rest is None else self.rest.batches_per_bucket
        return [rest.get(bucket, 0) for bucket in self.whole.buckets]

    @property
    def plans(self) -> tuple[Rows, ...]:
        """The plans that its rows come from."""
        return (self.whole,) if self.rest is None else (self.rest, self.whole)

    @property
    def max_position(self) -> int:
        """The largest position that a row of it holds."""
        if self.rest is None:
            return self.whole.max_position
        rest = self._leftover.max_position(self.rest.buckets[-1], "split")
        return max(rest, self.whole.max_position)

    def rows(self, index: int, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
        """The segments of rows `first` to `last` of bucket number `index`, and their epochs.

        Returns:
            Segments as `PlannedBatch.segments`, rows counted from 0, int64 [n, 4]; and the epoch
            of each, int64 [n].
        """
        before = self.rest_rows[index]
        found, epochs = [np.zeros((0, 4), np.int64)], [np.zeros(0, np.int64)]
        if self.rest is not None and first < before:
            of_rest = self.rest.buckets.index(self.whole.buckets[index])
            segments = self.rest.rows(of_rest, first, min(last, before))
            runs = segments[:, 1].copy()
            segments[:, 1], segments[:, 2] = self._leftover.locate(runs, segments[:, 2])
            found.append(segments)
            epochs.append(self._leftover.epochs[runs])
        if last > before:
            in_epoch = self.whole.rows_in_epoch[index]
            begun = max(first - before, 0)
            at = self.epoch * in_epoch + begun
            segments = self.whole.rows(index, at, at + last - before - begun)
            epochs.append((segments[:, 0] + at) // in_epoch)
            segments[:, 0] += max(before - first, 0)
            found.append(segments)
        return np.concatenate(found), np.concatenate(epochs)

    def left(self, taken: Sequence[int]) -> tuple[np.ndarray, np.ndarray, int]:
        """What the epochs that were begun still have, after some rows of each bucket.

        Returns:
            Example, first position and positions of each piece, int64 [n, 3]; its epoch; and the
            first epoch that was not begun.
        """
        in_epoch = np.array(self.whole.rows_in_epoch)
        rows = np.array(taken) - self.rest_rows  # of whole epochs
        begun = max(-(-np.maximum(rows, 0)[in_epoch > 0] // in_epoch[in_epoch > 0]))
        found, epochs = [np.zeros((0, 3), np.int64)], [np.zeros(0, np.int64)]
        for index, (number, rest) in enumerate(zip(taken, self.rest_rows, strict=True)):
            last = rest + int(begun * in_epoch[index])
            if number < last:
                segments, of = self.rows(index, number, last)
                found.append(segments[:, 1:])
                epochs.append(of)
        return np.concatenate(found), np.concatenate(epochs), self.epoch + int(begun)

    def onward(self, taken: Sequence[int], whole: Rows, left_out: np.ndarray) -> "Supply":
        """The supply that goes on after some rows of each bucket, with another plan.

        Args:
            taken: rows of each bucket that are taken.
            whole: the plan.
            left_out: the examples that are left out from now on, int64, ascending.
        """
        pieces, epochs, epoch = self.left(taken)
        stays = ~np.isin(pieces[:, 0], left_out)
        examples, starts, sizes = pieces[stays].T
        kept = getattr(whole.lengths, "kept", None)
        leftover = Leftover(examples, starts, sizes, kept, epochs[stays])
        supply = Supply(whole, leftover, epoch)
        supply.begun = tuple(np.unique(epochs).tolist())  # those of which nothing stays as well
        return supply

    def whole_epochs(self, taken: Sequence[int]) -> int:
        """How many epochs are over after some rows of each bucket; at least so many."""
        rows = np.array(taken) - self.rest_rows
        if (rows < 0).any():
            return min(self.begun)
        in_epoch = np.array(self.whole.rows_in_epoch)
        return self.epoch + int((rows[in_epoch > 0] // in_epoch[in_epoch > 0]).min())


def plans_of_rows(
    corpora: Mapping[str, Any],
    left_out: Mapping[str, np.ndarray],
    buckets: Sequence[Bucket],
    **options: Any,
) -> dict[str, Rows]:
    """The plan of rows of each corpus, by name, without the examples that are left out.

    Raises:
        ValueError: what `Plan` raises of one of them.
    """
    found = {}
    for name, corpus in corpora.items():
        there = Reduced(corpus, left_out[name]) if len(left_out[name]) else corpus
        try:
            found[name] = Rows(there, buckets, **options)
        except ValueError as error:
            raise ValueError(f"corpus {name!r}: {error}") from error
    return found


def stock_of(plans: Sequence[Rows | None], buckets: Sequence[Bucket], by: str) -> Stock:
    """What an epoch of each of some plans has of each bucket; of None, nothing.

    Weights count tokens or examples, as `by` says.
    """
    places = {bucket.length: place for place, bucket in enumerate(buckets)}
    shape = len(buckets), len(plans)
    stock = Stock(*(np.zeros(each, np.int64) for each in (shape, shape, len(plans))))
    for number, plan in enumerate(plans):
        if plan is not None:
            for index, bucket in enumerate(plan.buckets):
                place = places[bucket.length], number
                stock.rows[place] = plan.rows_in_epoch[index]
                stock.real[place] = sum(many * each.real(index) for many, each in plan.packed())
            stock.sizes[number] = plan.num_tokens if by == "tokens" else plan.num_trained
    return stock
