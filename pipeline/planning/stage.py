"""Stages: a stage has the batches from a step on. A plan is a list of stages."""

import dataclasses
import functools
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import numpy as np

from pipeline.errors import DoesNotFit, InvalidValue, counted
from pipeline.planning.assembly import Assembly, StepBatches, Together
from pipeline.planning.bucket import PAIR
from pipeline.planning.cache import WindowCache
from pipeline.planning.identity import fingerprint_of
from pipeline.planning.members import Members
from pipeline.planning.mixture import NOTHING, Mixture
from pipeline.planning.options import LEAST_WINDOW, VERSION, Options
from pipeline.planning.schedule import Schedule, Single
from pipeline.planning.stream import Stream
from pipeline.planning.tiers import Tiers

# The cache holds windows with this many pieces; more if needed at a time.
CACHED = 1 << 22


class Stage:
    """The steps from one on, under one set of options: the streams and the schedule that they give.

    It does not change. A change of the plan is another stage, which goes on after some rows.

    Attributes:
        start: the first step.
        options: the options.
        weights: the share of each of several corpora, by name; None for one corpus.
        members: the corpora, with those that have joined by now.
        continues: whether it has the streams of the stage before it, with other weights and perhaps
            more corpora; else what that one leaves of epochs is planned again.
        streams: the stream of each corpus, in order.
        schedule: the bucket and the rows of each step.
        plain: the batches of each step before tiers deal their rows.
        assembly: the batches of each step.
    """

    def __init__(
        self,
        start: int,
        options: Options,
        members: Members,
        weights: Mapping[str, Fraction] | None,
        *,
        before: "Stage | None" = None,
        continues: bool = False,
    ):
        """`before` is the stage of the steps before `start`; None: there is none."""
        self.start, self.options, self.weights = start, options, weights
        self.members, self.continues = members, continues
        self.streams: tuple[Stream, ...] = self._make_streams(before)
        self.schedule: Schedule = self._make_schedule(before)
        self.plain = Assembly(self.streams, self.schedule, options, mixed=members.several)
        self.assembly: StepBatches = self.plain
        if options.tiers > 1:
            self.assembly = Tiers(self.plain, self.schedule, options)
        elif members.several:
            self.assembly = Together(self.plain, self.schedule, options)

    def _make_streams(self, before: "Stage | None") -> tuple[Stream, ...]:
        """The stream of each corpus, of which the first ones go on from those `before`."""
        present = () if before is None else before.streams
        cache = present[0].cache if present else WindowCache(CACHED)
        stream_options, several = self.options, self.members.several
        if several:
            stream_options = options_of_streams(stream_options, len(self.members.corpora))
        rows = None if before is None else before.schedule.before(self.start).rows
        streams: list[Stream] = []
        for number, (name, corpus) in enumerate(self.members.corpora.items()):
            try:
                if number >= len(present):
                    first = int(self.members.firsts[number])
                    stream = Stream(
                        corpus, stream_options, cache, name=name, by_row=several, first=first
                    )
                elif self.continues or rows is None:
                    stream = present[number]
                else:
                    stream = present[number].after(rows[:, number], corpus, stream_options)
            except ValueError as error:
                raise InvalidValue(
                    f"corpus {name!r}: {error}" if several else str(error)
                ) from error
            except MemoryError as error:
                positions = int(corpus.array.sum(dtype=np.int64))
                raise DoesNotFit(
                    f"planning {counted(len(corpus), 'example')} of {positions:,} positions takes "
                    "more memory than there is; give longer buckets, so that fewer pieces are made "
                    "of long examples, or overflow='truncate' or 'drop'"
                ) from error
            streams.append(stream)
        needs = sum(rows.needs for stream in streams for rows in stream.passes)
        cache.capacity = max(cache.capacity, needs)
        return tuple(streams)

    def _make_schedule(self, before: "Stage | None") -> Schedule:
        """The schedule; that of a mixture goes on from the one before."""
        if self.weights is None:
            return Single(self.start, self.streams[0], self.options)
        taken = NOTHING
        if before is not None:
            assert isinstance(before.schedule, Mixture), "one corpus stays one"
            taken = before.schedule.taken(self.start, replan=not self.continues)
        return Mixture(self.start, self.streams, self.options, self.weights, taken)

    @property
    def max_position(self) -> int:
        """The largest position in any row, from 0."""
        return max(stream.max_position for stream in self.streams)

    @property
    def cuts(self) -> int:
        """The number of pieces that an epoch of each corpus cuts to fill rows."""
        return int(sum(stream.whole.windows.cuts.sum() for stream in self.streams))

    @functools.cached_property
    def identity(self) -> dict[str, Any]:
        """Everything that the batches depend on, as JSON."""
        identity: dict[str, Any] = {"plan": VERSION, **self.options.as_json()}
        identity["buckets"] = "+".join(map(str, self.options.buckets))
        if (names := self.options.names) != PAIR[: len(names)]:
            identity["sides"] = [*names]
        del identity["window"]  # each stream has its own
        for name in ("align", "cost"):
            if identity[name] == 1:  # it has no effect
                del identity[name]
        if self.weights is None:
            del identity["by"]
            return identity | self.streams[0].identity
        if self.continues:
            identity["streams"] = "continue"
        corpora = {
            stream.name: {
                "number": number,
                **stream.identity,
                "weight": f"{self.weights[stream.name]}",
            }
            for number, stream in enumerate(self.streams)
        }
        # Weights count tokens of the side with the loss, if sides are named.
        if "sides" in identity:
            for stream in self.streams:
                corpora[stream.name]["loss"] = stream.lengths.loss
        return identity | {"corpora": corpora}

    @functools.cached_property
    def entry(self) -> Mapping[str, Any]:
        """The stage's entry in the data state."""
        where = {"from": self.start} if self.start else {}
        fingerprint = fingerprint_of(where | self.identity)
        return {"from": self.start, "fingerprint": fingerprint, "identity": self.identity}


def options_of_streams(options: Options, several: int) -> Options:
    """The options of the stream of each of several corpora: they divide the window, and take rows.

    A plan takes single rows of their buckets.
    """
    least = max(LEAST_WINDOW, options.read_shares)
    window = min(options.window, max(options.window // several, least))
    buckets = tuple(dataclasses.replace(bucket, rows=1) for bucket in options.buckets)
    return dataclasses.replace(options, window=window, buckets=buckets)
