"""Stages: a stage says how batches are made from a step on. A plan is a list of stages."""

import contextlib
import dataclasses
import functools
import gc
import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, Unpack

import numpy as np

from pipeline.errors import DoesNotFit, InvalidValue, counted
from pipeline.planning.assembly import Assembly
from pipeline.planning.cache import WindowCache
from pipeline.planning.identity import fingerprint_of
from pipeline.planning.lengths import (
    Exclude,
    Lengths,
    as_corpora,
    select,
    select_corpora,
    take_first,
)
from pipeline.planning.options import (
    LEAST_WINDOW,
    VERSION,
    Changes,
    Options,
    as_phases,
)
from pipeline.planning.schedule import Schedule
from pipeline.planning.stream import Stream

# The cache holds windows with this many pieces; more if needed at a time.
CACHED = 1 << 22

# The data state lists up to this many examples that are left out; of more, it has a digest.
MAX_NAMED = 32


@dataclasses.dataclass(frozen=True, eq=False)
class Stage:
    """The options, streams and schedule of a plan from a step on."""

    options: Options
    streams: tuple[Stream, ...]  # one for each corpus, in order
    schedule: Schedule
    weights: Mapping[str, Fraction] | None  # the share of each of several corpora
    given: Any  # the lengths or corpora of the plan, with corpora that have joined
    # The changes of this stage, as keywords of `Plan.after` in JSON, with `examples` (the number of
    # examples from here on) instead of `lengths`. In the first stage, all options.
    changes: Mapping[str, Any]

    def __post_init__(self) -> None:
        needed = sum(found.needs for stream in self.streams for found in stream.passes)
        if not self.grows:
            needed = max(needed, CACHED)  # chapters raise it themselves
        cache = self.streams[0].cache  # shared by all stages of a plan
        cache.capacity = max(cache.capacity, needed)

    @property
    def num_examples(self) -> int:
        """Examples of all corpora, including those left out."""
        return self.streams[-1].first + len(self.streams[-1].lengths)

    @property
    def excluded(self) -> np.ndarray:
        """The examples that are left out, numbered over all corpora: int64, ascending."""
        return np.concatenate([each.lengths.excluded + each.first for each in self.streams])

    @property
    def start(self) -> int:
        """The first step."""
        return self.schedule.start

    @property
    def end(self) -> int | None:
        """One past the last step of the schedule; None if it never ends."""
        return self.schedule.end

    @property
    def grows(self) -> bool:
        """Whether it has chapters of corpora that grow."""
        return not all(stream.passes for stream in self.streams)

    @property
    def is_phase(self) -> bool:
        """Whether it has other weights than the stage before, and perhaps more corpora."""
        return {"weights"} <= {*self.changes} <= {"weights", "examples"}

    @functools.cached_property
    def assembly(self) -> Assembly:
        """The batches of each step."""
        return Assembly(self.streams, self.schedule, self.options)

    @functools.cached_property
    def identity(self) -> dict[str, Any]:
        """Everything that the batches depend on, as JSON."""
        found: dict[str, Any] = {"plan": VERSION, **self.options.as_json()}
        found["buckets"] = "+".join(map(str, self.options.buckets))
        del found["window"]  # each stream has its own
        if self.options.align == 1:  # it has no effect
            del found["align"]
        if self.weights is None:
            del found["by"], found["ending"]
            return found | self.streams[0].identity
        corpora = {
            stream.name: {**stream.identity, "weight": f"{self.weights[stream.name]}"}
            for stream in self.streams
        }
        return found | {"corpora": corpora}

    @functools.cached_property
    def entry(self) -> Mapping[str, Any]:
        """The stage's entry in the data state; a digest replaces a long list of examples."""
        changes = dict(self.changes)
        numbers: Sequence[int] = changes.get("exclude", ())
        if len(numbers) > MAX_NAMED:
            digest = hashlib.sha256(np.array(numbers, "<i8").tobytes()).hexdigest()[:16]
            changes["exclude"] = {"number": len(numbers), "digest": digest}
        return {
            "from": self.start,
            "fingerprint": fingerprint_of(self.identity),
            "identity": self.identity,
            "changes": changes,
        }

    @classmethod
    def begin(
        cls,
        lengths: Any,
        options: Options,
        weights: Mapping[str, Fraction] | None,
        exclude: Exclude,
    ) -> "Stage":
        """The stage at step 0; with weights, of several corpora. Arguments as for `Plan`."""
        check_options(options, several=weights is not None)
        given = {"": lengths} if weights is None else as_corpora(lengths)
        members = {name: Lengths.of(given[name]) for name in weights or given}
        changes = options_as_json(options, weights)
        count = sum(map(len, members.values()))
        excluded = select(exclude, take_first(lengths, count), count)
        changes |= {"exclude": excluded.tolist()} if len(excluded) else {}
        streams = _make_streams(members, options, excluded)
        schedule = Schedule(0, streams, options, weights)
        return cls(options, streams, schedule, weights, lengths, changes)

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
        given = self.given if lengths is None else lengths
        members = {stream.name: stream.lengths for stream in self.streams}
        if lengths is not None:
            members = self._extend(lengths, weights)
        shares = self.weights if weights is None else _as_shares(weights, members)
        count = sum(map(len, members.values()))
        more = select(exclude, take_first(given, count), count)
        more = np.setdiff1d(more, self.excluded)
        new = options.as_json(changes)
        new |= {"exclude": more.tolist()} if len(more) else {}
        # If only weights and corpora are new, the present streams continue.
        replan = shares is None or bool(new)
        new |= _weights_as_json(shares) if weights is not None else {}
        new |= {"examples": count} if count > self.num_examples else {}
        taken = self.schedule.taken(step)
        rows = taken.rows if replan else None
        streams = _make_streams(members, options, more, self.streams, rows)
        goes_on = None if replan else taken
        schedule = Schedule(step, streams, options, shares, self.schedule, taken=goes_on)
        return Stage(options, streams, schedule, shares, given, new)

    def _extend(self, given: Any, weights: Any) -> dict[str, Lengths]:
        """The lengths of all corpora, with new examples (of one corpus) or new corpora."""
        if self.weights is None:
            return {"": self.streams[0].lengths.extend(given)}
        if weights is None:
            raise InvalidValue("lengths are given without weights; give a weight for each corpus")
        every, present = as_corpora(given), {each.name: each.lengths for each in self.streams}
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


def add_phases(
    stages: list[Stage], phases: Iterable[tuple[int, Mapping[str, Fraction]]], given: Any
) -> list[Stage]:
    """Adds to `stages` a stage for each phase of weights, up to the end of the plan.

    `given` are all corpora, with those that join at a phase.
    """
    for start, shares in phases:
        last = stages[-1]
        if last.end is not None and last.end <= start:
            break
        joined = select_corpora(given, shares) if len(shares) > len(last.streams) else None
        stages.append(last.change(start, lengths=joined, weights=shares))
    return stages


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Pauses the collector: packing makes millions of tuples, and no cycles."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@_no_garbage_collection()
def _make_streams(
    members: Mapping[str, Lengths],
    options: Options,
    excluded: np.ndarray,
    before: Sequence[Stream] = (),
    rows: np.ndarray | None = None,
) -> tuple[Stream, ...]:
    """The stream of each corpus.

    Args:
        members: the lengths of each corpus.
        options: the options of the plan.
        excluded: the examples to leave out in addition, numbered over all corpora.
        before: the streams of the first corpora, which continue.
        rows: int64 [lengths, streams], the rows taken from `before`, to plan the rest of their
            epochs again; None: these streams do not change.
    """
    own = options_of_streams(options, members)
    cache = before[0].cache if before else WindowCache(CACHED)
    streams: list[Stream] = []
    first = 0
    for number, (name, lengths) in enumerate(members.items()):
        mine = excluded[(excluded >= first) & (excluded < first + len(lengths))] - first
        try:
            if number >= len(before):
                without = lengths.exclude(mine)
                stream = Stream(without, own, cache, name=name, first=first)
            elif rows is None:
                stream = before[number]
            else:
                stream = before[number].after(rows[:, number], lengths.exclude(mine), own)
        except ValueError as error:
            raise InvalidValue(f"corpus {name!r}: {error}" if name else str(error)) from error
        except MemoryError as error:
            positions = int(lengths.array.sum(dtype=np.int64))
            raise DoesNotFit(
                f"planning {counted(len(lengths), 'example')} of {positions:,} positions takes "
                "more memory than there is; give longer buckets, so that fewer pieces are made of "
                "long examples, or overflow='truncate' or 'drop'"
            ) from error
        streams.append(stream)
        first += len(lengths)
    return tuple(streams)


def options_of_streams(options: Options, names: Collection[str]) -> Options:
    """The options of each corpus's stream; several divide `window` and have buckets of one row."""
    if "" in names:
        return options
    window = min(options.window, max(options.window // len(names), LEAST_WINDOW))
    buckets = tuple(dataclasses.replace(each, rows=1) for each in options.buckets)
    return dataclasses.replace(options, window=window, buckets=buckets)


def check_options(options: Options, *, several: bool) -> None:
    """Raises an error for options that a plan of one corpus, or of several, does not have."""
    if several and len(options.groups) < len(options.buckets):
        raise InvalidValue(
            f"buckets are {', '.join(map(str, options.buckets))}; a second one of a length is for "
            "the last batches of an epoch, which a plan with weights does not have; give one "
            "bucket of each length"
        )
    if several:
        return
    if options.ending != "repeat" or options.by != "tokens":
        raise InvalidValue(
            f"ending={options.ending!r} and by={options.by!r} are for several corpora; give "
            "weights= as well"
        )


def _as_shares(weights: Any, members: Mapping[str, Lengths]) -> Mapping[str, Fraction]:
    if "" in members:
        raise InvalidValue("weights are for several corpora, and this plan is of one")
    if not isinstance(weights, Mapping):
        raise InvalidValue(
            f"weights is {weights!r}; it must be numbers by name, the weights from this step on"
        )
    return as_phases(weights, tuple(members))[0][1]


def options_as_json(options: Options, weights: Mapping[str, Fraction] | None) -> dict[str, Any]:
    """The options of a plan and its weights, as JSON; one corpus has no `by` and `ending`."""
    changes = options.as_json() | _weights_as_json(weights)
    if weights is None:
        del changes["by"], changes["ending"]
    return changes


def _weights_as_json(weights: Mapping[str, Fraction] | None) -> dict[str, Any]:
    if weights is None:
        return {}
    return {"weights": {name: f"{share}" for name, share in weights.items()}}
