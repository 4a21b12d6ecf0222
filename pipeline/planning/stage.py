"""Stages: a stage says how batches are made from a step on. A plan is a list of stages."""

import dataclasses
import functools
from collections.abc import Collection, Mapping, Sequence
from fractions import Fraction
from typing import Any, Unpack

import numpy as np

from pipeline.errors import DoesNotFit, InvalidValue, counted
from pipeline.planning.assembly import Assembly
from pipeline.planning.bucket import PAIR
from pipeline.planning.cache import WindowCache
from pipeline.planning.identity import fingerprint_of
from pipeline.planning.lengths import (
    Exclude,
    Lengths,
    as_corpora,
    exclude_from,
    select,
    store_mask,
    take_first,
)
from pipeline.planning.options import (
    LEAST_WINDOW,
    VERSION,
    Changes,
    Options,
    as_phases,
)
from pipeline.planning.schedule import Mixture, Schedule, Single, Taken
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
        taken = None if before is None else before.schedule.taken(start)
        present = () if before is None else before.streams
        self.streams: tuple[Stream, ...] = self._make_streams(present, taken if replan else None)
        self.schedule: Schedule = self._make_schedule(before, None if replan else taken)
        self.plain = Assembly(self.streams, self.schedule, options)
        self.assembly: Assembly | Tiers = self.plain
        if options.tiers > 1:
            self.assembly = Tiers(self.plain, self.schedule, options)

    def _make_streams(self, before: Sequence[Stream], taken: Taken | None) -> tuple[Stream, ...]:
        """The stream of each corpus.

        The streams `before` of the first corpora continue: unchanged, or with the rest of epochs
        after the rows `taken` of them planned again.
        """
        own = options_of_streams(self.options, self.members)
        cache = before[0].cache if before else WindowCache(CACHED)
        streams: list[Stream] = []
        for number, (name, corpus) in enumerate(self.members.items()):
            try:
                if number >= len(before):
                    first = int(self.firsts[number])
                    stream = Stream(corpus, own, cache, name=name, first=first)
                elif taken is None:
                    stream = before[number]
                else:
                    stream = before[number].after(taken.rows[:, number], corpus, own)
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
        needs = sum(leg.planned.needs for stream in streams for leg in stream.legs)
        cache.capacity = max(cache.capacity, needs)
        return tuple(streams)

    def _make_schedule(self, before: "Stage | None", taken: Taken | None) -> Schedule:
        """The schedule, whose streams go on after the rows `taken`; None: they are new."""
        if self.weights is None:
            return Single(self.start, self.streams[0], self.options)
        earlier = None if before is None else before.schedule
        assert earlier is None or isinstance(earlier, Mixture), "one corpus stays one"
        return Mixture(self.start, self.streams, self.options, self.weights, earlier, taken)

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
        return int(sum(stream.whole.layout.cuts.sum() for stream in self.streams))

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
        if "sides" in found:  # weights count tokens of the side with the loss
            found["loss"] = names[self.streams[0].lengths.loss_side]
        corpora = {
            stream.name: {
                "number": number,
                **stream.identity,
                "weight": f"{self.weights[stream.name]}",
            }
            for number, stream in enumerate(self.streams)
        }
        return found | {"corpora": corpora}

    @functools.cached_property
    def entry(self) -> Mapping[str, Any]:
        """The stage's entry in the data state."""
        fingerprint = fingerprint_of({"from": self.start, **self.identity})
        return {"from": self.start, "fingerprint": fingerprint, "identity": self.identity}

    @classmethod
    def begin(
        cls,
        lengths: Any,
        options: Options,
        weights: Mapping[str, Fraction] | None,
        exclude: Exclude,
    ) -> "Stage":
        """The stage at step 0; with weights, of several corpora. Arguments as for `Plan`."""
        given = {"": lengths} if weights is None else as_corpora(lengths)
        members = {name: Lengths.of(given[name]) for name in weights or given}
        check_options(options, several=weights is not None)
        changes = options.as_json() | _weights_as_json(weights)
        if weights is None:
            del changes["by"]
        excluded = _select(exclude, lengths, members)
        changes |= {"exclude": store_mask(excluded)} if excluded.any() else {}
        return cls(0, options, exclude_from(members, excluded), weights, lengths, changes)

    def change(
        self,
        step: int,
        *,
        lengths: Any = None,
        exclude: Exclude = (),
        weights: Mapping[str, Any] | None = None,
        **changes: Unpack[Changes],
    ) -> "Stage":
        """The stage that takes over at `step`; arguments and errors as for `Plan.after`."""
        options = self.options.change(**changes)
        block = self.assembly.block(step)
        if block.start != step:
            raise InvalidValue(
                f"step is {step:,}, in the middle of the steps {block.start:,} to "
                f"{block.stop - 1:,}, whose rows are dealt together (tiers="
                f"{self.options.tiers}); change the plan at step {block.stop:,}"
            )
        check_options(options, several=self.weights is not None)
        given, members = self.given if lengths is None else lengths, self.members
        if lengths is not None:
            members = self._extend(lengths, weights)
        shares = self.weights if weights is None else _as_shares(weights, members)
        more = _select(exclude, given, members)
        more = more & np.concatenate([lengths.stays for lengths in members.values()])
        new = options.as_json(changes)
        new |= {"exclude": store_mask(more)} if more.any() else {}
        # If only weights and corpora are new, the present streams continue.
        replan = shares is None or bool(new)
        new |= _weights_as_json(shares) if weights is not None else {}
        count = sum(map(len, members.values()))
        new |= {"examples": count} if count > self.num_examples else {}
        members = exclude_from(members, more)
        return Stage(step, options, members, shares, given, new, before=self, replan=replan)

    def _extend(self, given: Any, weights: Any) -> dict[str, Lengths]:
        """The lengths of all corpora, with new examples (of one corpus) or new corpora."""
        if self.weights is None:
            return {"": self.members[""].extend(given)}
        if weights is None:
            raise InvalidValue("lengths are given without weights; give a weight for each corpus")
        every, present = as_corpora(given), self.members
        if list(every)[: len(present)] != [*present]:
            raise InvalidValue(
                f"the corpora are {', '.join(every)}, and the plan has {', '.join(present)}; put "
                "new corpora after the present ones"
            )
        for name, lengths in present.items():
            if not lengths.equals(Lengths.of(every[name])):
                raise InvalidValue(
                    f"corpus {name!r} has other lengths than before; a plan of several corpora "
                    "takes new corpora, not new examples: make a corpus of the new examples"
                )
        return {name: present.get(name) or Lengths.of(each) for name, each in every.items()}


def _select(exclude: Exclude, given: Any, members: Mapping[str, Lengths]) -> np.ndarray:
    """Whether to leave out each example of all corpora: bool [examples]."""
    count = sum(map(len, members.values()))
    return select(exclude, take_first(given, count, several="" not in members), count)


def options_of_streams(options: Options, names: Collection[str]) -> Options:
    """The options of each corpus's stream; several divide `window` and have buckets of one row."""
    if "" in names:
        return options
    window = min(options.window, max(options.window // len(names), LEAST_WINDOW))
    buckets = tuple(dataclasses.replace(each, rows=1) for each in options.buckets)
    return dataclasses.replace(options, window=window, buckets=buckets)


def check_options(options: Options, *, several: bool) -> None:
    """Raises an error for options that only a plan of several corpora has."""
    if not several and options.by != "tokens":
        raise InvalidValue(
            f"by is {options.by!r}, the unit of weights; it is for several corpora: give weights= "
            "as well"
        )


def _as_shares(weights: Any, members: Mapping[str, Lengths]) -> Mapping[str, Fraction]:
    if "" in members:
        raise InvalidValue("weights are for several corpora, and this plan is of one")
    if not isinstance(weights, Mapping):
        raise InvalidValue(
            f"weights is {weights!r}; it must be numbers by name, the weights from this step on"
        )
    return as_phases(weights, tuple(members))[0][1]


def _weights_as_json(weights: Mapping[str, Fraction] | None) -> dict[str, Any]:
    return {} if weights is None else {"weights": {name: f"{weights[name]}" for name in weights}}
