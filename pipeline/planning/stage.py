"""Stages: a stage says how batches are made from a step on. A plan is a list of stages."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from pipeline.errors import DoesNotFit, InvalidValue, counted
from pipeline.planning.assembly import Assembly, Batches, Together
from pipeline.planning.bucket import PAIR
from pipeline.planning.cache import WindowCache
from pipeline.planning.identity import fingerprint_of
from pipeline.planning.lengths import Lengths
from pipeline.planning.options import LEAST_WINDOW, VERSION, Options
from pipeline.planning.schedule import NOTHING, Mixture, Schedule, Single
from pipeline.planning.stream import Stream
from pipeline.planning.tiers import Tiers

# The cache holds windows with this many pieces; more if needed at a time.
CACHED = 1 << 22


class Stage:
    """The options of a plan from a step on, and the streams and the schedule that they give.

    Attributes:
        start: the first step.
        options: the options.
        weights: the share of each of several corpora, by name; None for one corpus.
        given: the lengths or corpora of the plan, with corpora that have joined.
        members: the lengths of each corpus by name.
        firsts: the number in the plan of the first example of each corpus: int64 [corpora].
        changes: the changes of this stage, as keywords of `Plan.after` in JSON, with `examples`
            (their number from here on) instead of `lengths`. In the first stage, all options.
        replans: whether what the stage before it leaves of epochs is planned again, by new streams;
            else it has other weights than that, and perhaps more corpora.
        streams: the stream of each corpus, in order.
        schedule: the bucket and the rows of each step.
        plain: the batches of each step before tiers deal their rows.
        assembly: the batches of each step.
    """

    def __init__(
        self,
        start: int,
        options: Options,
        members: Mapping[str, Lengths],
        weights: Mapping[str, Fraction] | None,
        given: Any,
        changes: Mapping[str, Any],
        *,
        before: "Stage | None" = None,
        replan: bool = True,
    ):
        self.start, self.options, self.weights, self.given = start, options, weights, given
        self.members, self.changes, self.replans = members, changes, replan
        self.firsts = np.cumsum([0, *map(len, members.values())])[:-1]
        taken = before.schedule.before(start).rows if before is not None and replan else None
        self.streams: tuple[Stream, ...] = self._make_streams(
            () if before is None else before.streams, taken
        )
        self.schedule: Schedule = self._make_schedule(before)
        mixed = weights is not None
        self.plain = Assembly(self.streams, self.schedule, options, mixed=mixed)
        self.assembly: Batches = self.plain
        if options.tiers > 1:
            self.assembly = Tiers(self.plain, self.schedule, options)
        elif mixed:
            self.assembly = Together(self.plain, self.schedule, options)

    def _make_streams(
        self, before: Sequence[Stream], taken: np.ndarray | None
    ) -> tuple[Stream, ...]:
        """The stream of each corpus.

        The streams `before` of the first corpora continue: unchanged, or with the rest of epochs
        after the rows `taken` of them planned again.
        """
        own, mixed = self.options, self.weights is not None
        if mixed:
            own = options_of_streams(own, len(self.members))
        cache = before[0].cache if before else WindowCache(CACHED)
        streams: list[Stream] = []
        for number, (name, corpus) in enumerate(self.members.items()):
            try:
                if number >= len(before):
                    first = int(self.firsts[number])
                    stream = Stream(corpus, own, cache, name=name, by_row=mixed, first=first)
                elif taken is None:
                    stream = before[number]
                else:
                    stream = before[number].after(taken[:, number], corpus, own)
            except ValueError as error:
                raise InvalidValue(f"corpus {name!r}: {error}" if name else str(error)) from error
            except MemoryError as error:
                positions = int(corpus.array.sum(dtype=np.int64))
                raise DoesNotFit(
                    f"planning {counted(len(corpus), 'example')} of {positions:,} positions takes "
                    "more memory than there is; give longer buckets, so that fewer pieces are made "
                    "of long examples, or overflow='truncate' or 'drop'"
                ) from error
            streams.append(stream)
        needs = sum(each.needs for stream in streams for each in stream.passes)
        cache.capacity = max(cache.capacity, needs)
        return tuple(streams)

    def _make_schedule(self, before: "Stage | None") -> Schedule:
        """The schedule; that of a mixture goes on from the one before."""
        if self.weights is None:
            return Single(self.start, self.streams[0], self.options)
        taken = NOTHING
        if before is not None:
            assert isinstance(before.schedule, Mixture), "one corpus stays one"
            taken = before.schedule.taken(self.start, replan=self.replans)
        return Mixture(self.start, self.streams, self.options, self.weights, taken)

    @property
    def num_examples(self) -> int:
        """Examples of all corpora, including those left out."""
        return sum(map(len, self.members.values()))

    @property
    def excluded(self) -> np.ndarray:
        """Whether each example of all corpora is left out: bool [examples]."""
        return np.concatenate([~lengths.stays for lengths in self.members.values()])

    @property
    def num_excluded(self) -> int:
        """The number of examples of all corpora that are left out."""
        return sum(lengths.num_excluded for lengths in self.members.values())

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
        found: dict[str, Any] = {"plan": VERSION, **self.options.as_json()}
        found["buckets"] = "+".join(map(str, self.options.buckets))
        if (names := self.options.names) != PAIR[: len(names)]:
            found["sides"] = [*names]
        del found["window"]  # each stream has its own
        for name in ("align", "cost"):
            if found[name] == 1:  # it has no effect
                del found[name]
        if self.weights is None:
            del found["by"]
            return found | self.streams[0].identity
        if not self.replans:
            found["streams"] = "continue"
        corpora = {
            stream.name: {
                "number": number,
                **stream.identity,
                "weight": f"{self.weights[stream.name]}",
            }
            for number, stream in enumerate(self.streams)
        }
        if "sides" in found:  # weights count tokens of the side with the loss, if sides are named
            for stream in self.streams:
                known, side = stream.lengths.names, stream.lengths.loss_side
                corpora[stream.name]["loss"] = names[side] if known else None
        return found | {"corpora": corpora}

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
    window = min(options.window, max(options.window // several, LEAST_WINDOW))
    buckets = tuple(dataclasses.replace(each, rows=1) for each in options.buckets)
    return dataclasses.replace(options, window=window, buckets=buckets)
