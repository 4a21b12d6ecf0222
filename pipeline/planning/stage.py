"""Stages: a stage says how batches are made from a step on. A plan is a list of stages."""

import dataclasses
import functools
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any, Unpack

import numpy as np

from pipeline.errors import InvalidValue
from pipeline.planning.lengths import (
    Exclude,
    Lengths,
    as_corpora,
    select,
    select_corpora,
    take_first,
)
from pipeline.planning.options import MIXTURE_VERSION, VERSION, Changes, Options, as_phases
from pipeline.planning.source import Source
from pipeline.planning.tiers import Tiers
from pipeline.planning.timetable import EpochTimetable, QuotaTimetable, Timetable

# The data state names up to this many examples that are left out; of more it has a digest.
MAX_NAMED = 32

# In the first stage's `changes`; one corpus has neither `by` nor `ending`, the last two.
OPTIONS = [field.name for field in dataclasses.fields(Options)]


@dataclasses.dataclass(frozen=True, eq=False)
class Stage:
    """From a step on: options, sources and a timetable."""

    start: int
    options: Options
    sources: tuple[Source, ...]  # of each corpus, in order
    timetable: Timetable
    weights: Mapping[str, Fraction] | None  # the share of each of several corpora
    given: Any  # the lengths or corpora of the plan, with corpora that have joined
    num_sharing: int  # the number of corpora that share `options.window`: that of the first stage
    # What is new in this stage, as keywords of `Plan.after` in JSON, with `examples` (the number of
    # examples from here on) instead of `lengths`. In the first stage, all options.
    changes: Mapping[str, Any]

    @property
    def num_examples(self) -> int:
        """Examples of all corpora, with those that are left out."""
        return self.sources[-1].first + len(self.sources[-1].lengths)

    @property
    def end(self) -> int | None:
        """One past the last step of the timetable; None if it never ends."""
        return None if self.timetable.steps is None else self.start + self.timetable.steps

    @functools.cached_property
    def tiers(self) -> Tiers:
        """The rows of each step."""
        return Tiers(self.start, self.sources, self.timetable, self.options)

    @property
    def fingerprint(self) -> str:
        """Everything that the batches depend on, as `name=value`, separated by semicolons."""
        own = self.options.fingerprint_parts
        if self.weights is None:
            source = self.sources[0].fingerprint_parts
            parts = {"plan": VERSION, "lengths": source.pop("lengths"), **own}
            parts |= {"window": source.pop("window"), "max_segments": parts.pop("max_segments")}
            parts |= source
        else:
            parts = {"plan": f"{VERSION}.{MIXTURE_VERSION}"}
            for each in self.sources:
                parts |= {f"{k} of {each.name}": v for k, v in each.fingerprint_parts.items()}
            parts |= {**own, "weights by": self.options.by, "ending": self.options.ending}
            parts["weights"] = "+".join(f"{name}:{share}" for name, share in self.weights.items())
        return ";".join(f"{name}={value}" for name, value in parts.items())

    @property
    def entry(self) -> dict[str, Any]:
        """The stage's entry in the data state; a digest stands for many examples left out."""
        changes = dict(self.changes)
        numbers: Sequence[int] = changes.get("exclude", ())
        if len(numbers) > MAX_NAMED:
            digest = hashlib.sha256(np.array(numbers, "<i8").tobytes()).hexdigest()[:16]
            changes["exclude"] = {"number": len(numbers), "digest": digest}
        return {"from": self.start, "fingerprint": self.fingerprint, "changes": changes}

    @classmethod
    def begin(
        cls,
        lengths: Any,
        options: Options,
        weights: Mapping[str, Fraction] | None,
        exclude: Exclude,
    ) -> "Stage":
        """The stage at step 0; with weights, of several corpora. Arguments as for `Plan`."""
        if weights is None:
            _check_one_corpus(options)
            members, changes = {"": Lengths.of(lengths)}, options.as_json(OPTIONS[:-2])
        else:
            given = as_corpora(lengths)
            members = {name: Lengths.of(given[name]) for name in weights}
            changes = options.as_json(OPTIONS) | _weights_as_json(weights)
        count = sum(map(len, members.values()))
        excluded = select(exclude, take_first(lengths, count), count)
        changes |= {"exclude": excluded.tolist()} if len(excluded) else {}
        sources = _make_sources(members, options, excluded, len(members))
        timetable: Timetable
        if weights is None:
            timetable = EpochTimetable(sources[0])
        else:
            timetable = QuotaTimetable(sources, weights, options)
        return cls(0, options, sources, timetable, weights, lengths, len(sources), changes)

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
        if self.weights is None:
            _check_one_corpus(options)
        given = self.given if lengths is None else lengths
        members = {source.name: source.lengths for source in self.sources}
        if lengths is not None:
            members = self._extend(lengths, weights)
        shares = self.weights if weights is None else _as_shares(weights, members)
        count = sum(map(len, members.values()))
        excluded = [source.lengths.excluded + source.first for source in self.sources]
        more = select(exclude, take_first(given, count), count)
        more = np.setdiff1d(more, np.concatenate(excluded))
        new = options.as_json(changes) | ({"exclude": more.tolist()} if len(more) else {})
        # With other weights and new corpora alone, the sources go on as they are.
        rows_before, left = self.tiers.before(step)
        replan = shares is None or bool(new) or left is not None
        new |= _weights_as_json(shares) if weights is not None and shares is not None else {}
        new |= {"examples": count} if count > self.num_examples else {}
        local = step - self.start
        before = {
            source.name: {
                "previous": source,
                "rows_before": rows_before[:, number],
                "left": None if left is None else left[number],
            }
            for number, source in enumerate(self.sources)
        }
        sources = _make_sources(members, options, more, self.num_sharing, before, replan=replan)
        timetable: Timetable
        if shares is None:
            timetable = EpochTimetable(sources[0])
        else:
            assert isinstance(self.timetable, QuotaTimetable), "several corpora have quotas"
            epoch = self.timetable.epoch_of(local)
            first = self.timetable.first_epoch
            begins = epoch >= first and self.timetable.first_step(epoch) == local
            joined = len(sources) - len(self.sources)
            timetable = QuotaTimetable(
                sources,
                shares,
                options,
                rows_before=None if replan else np.pad(rows_before, ((0, 0), (0, joined))),
                epoch=epoch + (replan and not begins),
                begins=replan or begins,
            )
        return Stage(step, options, sources, timetable, shares, given, self.num_sharing, new)

    def _extend(self, given: Any, weights: Any) -> dict[str, Lengths]:
        """The lengths of all corpora, with new examples (of one corpus) or new corpora."""
        if self.weights is None:
            return {"": self.sources[0].lengths.extend(given)}
        if weights is None:
            raise InvalidValue("lengths are given without weights; give a weight for each corpus")
        every, present = as_corpora(given), {each.name: each.lengths for each in self.sources}
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
        joined = select_corpora(given, shares) if len(shares) > len(last.sources) else None
        stages.append(last.change(start, lengths=joined, weights=shares))
    return stages


def _make_sources(
    members: Mapping[str, Lengths],
    options: Options,
    excluded: np.ndarray,
    num_sharing: int,
    before: Mapping[str, Mapping[str, Any]] | None = None,
    *,
    replan: bool = True,
) -> tuple[Source, ...]:
    """The source of each corpus.

    Args:
        members: the lengths of each corpus.
        options: the options of the sources.
        excluded: the examples to leave out in addition, numbered over all corpora.
        num_sharing: the number of corpora that share the window.
        before: by name, `previous`, `rows_before` and `left` of `Source`, to take over from.
        replan: whether the sources of `before` are planned anew, or stay as they are.
    """
    own = dataclasses.replace(options, window=max(options.window // num_sharing, 1))
    sources: list[Source] = []
    first = 0
    for name, lengths in members.items():
        mine = excluded[(excluded >= first) & (excluded < first + len(lengths))] - first
        takes_over = (before or {}).get(name, {})
        source = takes_over.get("previous")
        if source is None or replan:
            try:
                source = Source(
                    lengths.exclude(mine),
                    own if name else options,
                    name=name,
                    first=first,
                    by_row=bool(name),
                    **takes_over,
                )
            except ValueError as error:
                raise InvalidValue(f"corpus {name!r}: {error}" if name else str(error)) from error
        sources.append(source)
        first += len(lengths)
    return tuple(sources)


def _check_one_corpus(options: Options) -> None:
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


def _weights_as_json(weights: Mapping[str, Fraction]) -> dict[str, Any]:
    return {"weights": {name: f"{share}" for name, share in weights.items()}}
