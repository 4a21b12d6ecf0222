"""The stage: from a step on, how batches are made. A plan is a list of stages."""

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from pipeline.planning.lengths import HasCorpora, Lengths, begin, select
from pipeline.planning.options import MIXTURE_VERSION, VERSION, Options, as_phases
from pipeline.planning.shares import Shares
from pipeline.planning.source import Source
from pipeline.planning.timetable import EpochOrder

# The data state names up to this many examples that are left out; of more it has a digest.
NAMED = 32

ALONE = ("buckets", "seed", "shuffle", "packing", "overflow", "window", "max_segments")
SHARED = (*ALONE, "by", "ending")


@dataclasses.dataclass(frozen=True, eq=False)
class Stage:
    """From a step on: options, sources, and a timetable.

    Attributes:
        start: the first step.
        options: how the sources are planned.
        sources: one for each corpus, in order.
        timetable: which rows of which source each step has.
        weights: of several corpora, the share of each by name; None for one corpus.
        given: the lengths or corpora that the plan was made from, those that joined included.
        sharing: how many corpora share the window: those that the plan began with.
        changes: what is new here, as keywords of `Plan.after`: JSON, with `examples` (how many
            there are from here on) in place of `lengths`. Of the first stage, all options.
    """

    start: int
    options: Options
    sources: tuple[Source, ...]
    timetable: EpochOrder | Shares
    weights: Mapping[str, Fraction] | None
    given: Any
    sharing: int
    changes: Mapping[str, Any]

    @property
    def num_examples(self) -> int:
        """Examples of all corpora, those left out included."""
        return self.sources[-1].first + len(self.sources[-1].lengths)

    @property
    def end(self) -> int | None:
        """The step after the last; None if the steps never end."""
        return None if self.timetable.steps is None else self.start + self.timetable.steps

    @property
    def fingerprint(self) -> str:
        """What the batches of the stage depend on, as `name=value` with semicolons between."""
        own = self.options.parts()
        if self.weights is None:
            of = self.sources[0].parts
            parts = {"plan": VERSION, "lengths": of.pop("lengths"), **own}
            parts |= {"window": of.pop("window"), "max_segments": parts.pop("max_segments"), **of}
        else:
            parts = {"plan": f"{VERSION}.{MIXTURE_VERSION}"}
            for source in self.sources:
                parts |= {f"{part} of {source.name}": value for part, value in source.parts.items()}
            parts |= {**own, "weights by": self.options.by, "ending": self.options.ending}
            parts["weights"] = "+".join(f"{name}:{share}" for name, share in self.weights.items())
        return ";".join(f"{name}={value}" for name, value in parts.items())

    @property
    def entry(self) -> dict[str, Any]:
        """What the data state says of the stage."""
        entry = {"from": self.start, "fingerprint": self.fingerprint}
        return entry | {"changes": _short(self.changes)}

    @classmethod
    def first(
        cls, lengths: Any, options: Options, weights: Mapping[str, Fraction] | None, leave_out: Any
    ) -> "Stage":
        """The stage at step 0: of one corpus, or with weights of several."""
        if weights is None:
            _require_one(options)
            members, changes = {"": Lengths.of(lengths)}, options.as_json(ALONE)
        else:
            there = corpora(lengths)
            members = {name: Lengths.of(there[name]) for name in weights}
            changes = options.as_json(SHARED) | _weights(weights)
        if options.patterns is not None:
            changes["patterns"] = options.patterns
        count = sum(map(len, members.values()))
        left_out = select(leave_out, begin(lengths, count), count)
        changes |= {"leave_out": left_out.tolist()} if len(left_out) else {}
        sources = _sources(members, options, left_out, len(members))
        rows = [bucket.rows for bucket in options.buckets]
        timetable: EpochOrder | Shares
        if weights is None:
            timetable = EpochOrder(sources[0], rows)
        else:
            timetable = Shares(sources, tuple(weights.values()), options)
        return cls(0, options, sources, timetable, weights, lengths, len(sources), changes)

    def next(
        self,
        step: int,
        *,
        lengths: Any = None,
        leave_out: Any = (),
        weights: Mapping[str, Any] | None = None,
        **changes: Any,
    ) -> "Stage":
        """The stage that goes on from `step`; arguments and errors as for `Plan.after`.

        Where all corpora have ended before `step`, it starts at that end.
        """
        options = self.options.changed(**changes)
        if self.weights is None:
            _require_one(options)
        step = step if self.end is None else min(step, self.end)
        given = self.given if lengths is None else lengths
        members = {source.name: source.lengths for source in self.sources}
        if lengths is not None:
            members = self._grown(lengths, weights)
        shares = self.weights
        if weights is not None:
            shares = _shares(weights, members)
        count = sum(map(len, members.values()))
        left_out = [source.lengths.left_out + source.first for source in self.sources]
        more = select(leave_out, begin(given, count), count)
        more = np.setdiff1d(more, np.concatenate(left_out))
        asked = options.as_json(changes)
        asked |= {"leave_out": more.tolist()} if len(more) else {}
        replan = shares is None or bool(asked)
        asked |= _weights(shares) if weights is not None and shares is not None else {}
        asked |= {"examples": count} if count > self.num_examples else {}
        taken = self.timetable.before(step - self.start)[1]
        before = dict(zip(members, zip(self.sources, taken.T, strict=True), strict=False))
        sources = _sources(members, options, more, self.sharing, before, replan=replan)
        after = np.zeros((len(options.buckets), len(sources)), np.int64)
        timetable: EpochOrder | Shares
        if shares is None:
            timetable = EpochOrder(sources[0], [bucket.rows for bucket in options.buckets])
        else:
            if not replan:
                after[:, : taken.shape[1]] = taken
            timetable = self._shares_from(step, sources, options, shares, after, replan)
        return Stage(step, options, sources, timetable, shares, given, self.sharing, asked)

    def _shares_from(
        self, step: int, sources, options: Options, weights, taken: np.ndarray, replan: bool
    ) -> Shares:
        """The timetable of several corpora that goes on from `step`."""
        assert isinstance(self.timetable, Shares), "several corpora have shares"
        local = step - self.start
        epoch = self.timetable.epoch_of(local)
        begins = epoch >= self.timetable.first_epoch and self.timetable.first_step(epoch) == local
        ended = np.zeros(len(sources), bool)
        if not replan:
            ended[: len(self.sources)] = self.timetable.ended(local)
        return Shares(
            sources,
            [weights[source.name] for source in sources],
            options,
            taken=taken,
            ended=ended,
            epoch=epoch + (replan and not begins),
            begins=replan or begins,
        )

    def _grown(self, given: Any, weights: Any) -> dict[str, Lengths]:
        """The lengths of all corpora after growth: of one, more examples; of several, new ones."""
        if self.weights is None:
            return {"": self.sources[0].lengths.grown(given)}
        if weights is None:
            raise ValueError("lengths are given without weights; give each corpus its weight, too")
        there, names = corpora(given), [source.name for source in self.sources]
        if list(there)[: len(names)] != names:
            raise ValueError(
                f"the corpora are {', '.join(there)}, and the plan has {', '.join(names)}; put new "
                "ones after those there are"
            )
        for source in self.sources:
            if not source.lengths.same(Lengths.of(there[source.name])):
                raise ValueError(
                    f"corpus {source.name!r} has other lengths than it had; a mixture grows by "
                    "corpora, so make what is new one of its own"
                )
        known = {source.name: source.lengths for source in self.sources}
        return {name: known.get(name) or Lengths.of(each) for name, each in there.items()}


def corpora(given: Any) -> Mapping[str, Any]:
    """The corpora of a plan with weights, by name.

    Raises:
        ValueError: `given` has none.
    """
    if isinstance(given, HasCorpora):
        return given.corpora
    if not isinstance(given, Mapping) or "" in given:
        raise ValueError(
            f"lengths is {given!r:.60}; with weights it must be several corpora by name: a dict, "
            "or Corpora({'name': corpus})"
        )
    return given


def begin_of(given: Any, names: Iterable[str]) -> Any:
    """Those of several corpora, the first ones, that have these names."""
    there = corpora(given)
    found = {name: there[name] for name in names}
    if isinstance(given, HasCorpora) and len(found) > 1:
        return given.begin(sum(map(len, found.values())))
    return found


def _sources(
    members: Mapping[str, Lengths],
    options: Options,
    left_out: np.ndarray,
    sharing: int,
    before: Mapping[str, tuple[Source, np.ndarray]] | None = None,
    *,
    replan: bool = True,
) -> tuple[Source, ...]:
    """The source of each corpus; those of `before` go on after some rows, or stay as they are.

    Args:
        members: the lengths of each corpus.
        options: how to plan them.
        left_out: examples to leave out as well, counted over all corpora.
        sharing: how many corpora share the window.
        before: sources to take over from, and the rows that were taken of each.
        replan: whether they are planned anew.
    """
    own = dataclasses.replace(options, window=max(options.window // sharing, 1))
    found: list[Source] = []
    first = 0
    for name, lengths in members.items():
        mine = left_out[(left_out >= first) & (left_out < first + len(lengths))] - first
        previous, taken = (before or {}).get(name, (None, None))
        if previous is None or replan:
            try:
                previous = Source(
                    lengths.without(mine),
                    own if name else options,
                    name=name,
                    first=first,
                    by_row=bool(name),
                    previous=previous,
                    taken=taken,
                )
            except ValueError as error:
                raise ValueError(f"corpus {name!r}: {error}" if name else str(error)) from error
        found.append(previous)
        first += len(lengths)
    return tuple(found)


def _require_one(options: Options) -> None:
    if options.ending != "repeat" or options.by != "tokens":
        raise ValueError(
            f"ending={options.ending!r} and by={options.by!r} are for several corpora; give "
            "weights= as well"
        )


def _shares(weights: Any, members: Mapping[str, Lengths]) -> Mapping[str, Fraction]:
    if "" in members:
        raise ValueError("weights are for several corpora, and this plan is of one")
    if not isinstance(weights, Mapping):
        raise ValueError(
            f"weights is {weights!r}; it must be numbers by name, those that hold from this step on"
        )
    return as_phases(weights, tuple(members))[0][1]


def _weights(weights: Mapping[str, Fraction]) -> dict[str, Any]:
    return {"weights": {name: f"{share}" for name, share in weights.items()}}


def _short(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Some changes; of examples that are left out, if they are many, their count and a digest."""
    found = dict(changes)
    numbers: Sequence[int] = found.get("leave_out", ())
    if len(numbers) > NAMED:
        content = hashlib.sha256(np.array(numbers, "<i8").tobytes()).hexdigest()[:16]
        found["leave_out"] = {"number": len(numbers), "digest": content}
    return found
