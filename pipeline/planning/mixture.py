"""Mixture: batches of several corpora in given shares, met by quota."""

import copy
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from pipeline.planning.balance import balanced
from pipeline.planning.bucket import Bucket, as_buckets
from pipeline.planning.checks import require_whole, unknown
from pipeline.planning.lengths import digest
from pipeline.planning.mixture_chain import MixtureChain, MixtureLink
from pipeline.planning.mixture_figures import MixtureFigures
from pipeline.planning.packing import check_packing
from pipeline.planning.plan import VERSION as PLAN_VERSION
from pipeline.planning.plan import WINDOW
from pipeline.planning.planned import MixedBatch
from pipeline.planning.rows import Rows
from pipeline.planning.supply import Supply, plans_of_rows, stock_of
from pipeline.planning.timeline import ENDINGS, Timeline
from pipeline.planning.weights import Weights, as_phases

# The version of how rows of several plans share batches; it goes up as `plan.VERSION` does.
VERSION = 1


class Mixture(MixtureFigures):
    """A plan of several corpora, in which each has its weight at every step.

    Every corpus has a plan of its own for rows: a row holds examples of one corpus, and every
    epoch of a corpus has each of its positions once. A step takes the next rows of each, so many
    that the shares of all steps so far, and so those of any stretch of steps, are the weights.
    Where each row comes from is known in closed form: any step is random access.

    Args:
        joined: the corpora, by name: `pipeline.Joined`; or, without tokens, the lengths of each.
        buckets: the shapes, ascending by length.
        weights: how much of each there is, by name, in any unit; or phases,
            `[(0, {…}), (2000, {…})]`: the first step of each, and the weights from there on. A
            corpus that a phase is the first to name joins with it, planned as it would have been
            by `after`; those that join come last.
        by: what weights count: "tokens", real positions, or "examples".
        ending: what happens when a corpus ends: "repeat" it, shuffled anew, for ever; "stop"
            before the first step that it cannot fill; or "renormalise", where the others go on in
            the proportion of their weights, each once, until all have ended.
        seed: decides every shuffle.
        packing, overflow, max_segments: as for `Plan`.
        window: as for `Plan`, for all corpora together.

    Attributes:
        sources: the plan of rows of each corpus, by name.
        supplies: the rows of each corpus as they are taken, by name.
        finite: whether the steps end.

    Raises:
        ValueError: an argument is not as above, or what `Plan` raises of one of the corpora.
    """

    def __init__(
        self,
        joined,
        buckets: Iterable[Bucket],
        *,
        weights: Weights,
        by: str = "tokens",
        ending: str = "repeat",
        seed: int = 0,
        packing: str = "best_fit",
        overflow: str = "split",
        window: int = WINDOW,
        max_segments: int | None = None,
    ):
        if ending not in ENDINGS:
            raise ValueError(f"ending is {ending!r}; it must be one of {', '.join(ENDINGS)}")
        #: What it was made from, all of it and by name; and what of each is left out, int64.
        self.joined, self.lengths = joined, dict(getattr(joined, "corpora", joined))
        self.left_out = {name: np.zeros(0, np.int64) for name in self.lengths}
        corpora = self.lengths
        phases = as_phases(weights, tuple(corpora))
        self.shuffle, self.bound, self.ending = True, None, ending
        self._choose(
            len(phases[0][1]),
            buckets=buckets,
            by=by,
            seed=seed,
            packing=packing,
            overflow=overflow,
            window=window,
            max_segments=max_segments,
        )
        self.sources = self._planned(corpora)
        self.supplies = {name: Supply(plan) for name, plan in self.sources.items()}
        self._begin(phases)

    def _choose(
        self, sharing: int, *, buckets, by, seed, packing, overflow, window, max_segments
    ) -> None:
        """Takes the options that may change, `window` for so many corpora together."""
        if by not in ("tokens", "examples"):
            raise ValueError(f"by is {by!r}; it must be one of tokens, examples")
        check_packing(packing)
        for name, value, least in (("seed", seed, 0), ("window", window, 1)):
            require_whole(name, value, least)
        if max_segments is not None:
            require_whole("max_segments", max_segments, 1)
        self.buckets, self.by = as_buckets(buckets), by
        self.seed, self.packing, self.overflow = int(seed), packing, overflow or "split"
        self.window, self.max_segments = int(window), max_segments and int(max_segments)
        # Of the window, for each corpus; one that joins changes nothing before.
        self._share = max(self.window // sharing, 1)

    def _planned(self, corpora: Mapping[str, Any]) -> dict[str, Rows]:
        """The plan of rows of each of some corpora, without what is left out of it."""
        names = ("seed", "packing", "overflow", "max_segments")
        options = {name: getattr(self, name) for name in names} | {"window": self._share}
        return plans_of_rows(corpora, self.left_out, self.buckets, **options)

    def _begin(self, phases: Sequence[tuple[int, dict[str, Fraction]]]):
        """Lays out the steps; a phase has the weights of those sources that there are by then."""
        self._phases, self.names = phases, tuple(self.sources)
        plans = self._plans = list(self.sources.values())
        #: The number of each corpus's first example.
        self._first = np.cumsum([0] + [plan.num_examples for plan in plans])
        self.num_examples = int(self._first[-1])
        self.num_empty = sum(plan.num_empty for plan in plans)
        supplies = list(self.supplies.values())
        self.max_position = max(supply.max_position for supply in supplies)
        #: An epoch of each source, and what each has before its first whole one.
        self._whole = stock_of(plans, self.buckets, self.by)
        self._rests = stock_of([supply.rest for supply in supplies], self.buckets, self.by)
        self._timeline = Timeline(
            self._whole,
            [bucket.rows for bucket in self.buckets],
            [
                (start, [shares.get(name, Fraction(0)) for name in self.names])
                for start, shares in phases
            ],
            self.ending,
            self._rests,
        )
        if not self._timeline.epoch:
            raise ValueError(
                "the mixture has no step: a corpus cannot fill its share of even one batch. Use "
                "ending='repeat' or 'renormalise', smaller batches, or another weight"
            )
        self.finite = self._timeline.steps is not None
        #: What the mixture depends on, all phases included.
        self.fingerprint = self.entries[-1]["fingerprint"]

    def after(  # type: ignore[override]  # a mixture stays one
        self,
        step: int,
        *,
        weights: Mapping[str, float] | None = None,
        lengths: Any = None,
        leave_out: Any = (),
        **changes: Any,
    ) -> "Mixture | MixtureChain":
        """The mixture as it is up to `step`, and under other weights or options from there on.

        Other weights alone are a phase more, and only corpora that are new are planned. With other
        options each corpus goes on from where it stands, as a `Plan` does.

        Args:
            step: the first step that may differ, from 0; not before an earlier change of options.
            weights: how much of each corpus there is from then on; phases that would have begun
                later are left out. None: as it was, phases to come included.
            lengths: the corpora so far, in the same order, and others after them: as `joined`.
                None: no others.
            leave_out: examples that are left out from then on: numbers that count the examples of
                all corpora, one after another; or a function of `joined` that gives them.
            **changes: what else `Mixture` takes by keyword but for `ending`, and `buckets`.

        Raises:
            ValueError: an argument is not as above, or what `Mixture` raises.
        """
        require_whole("step", step, 0)
        if weights is None or changes or callable(leave_out) or len(leave_out):
            return MixtureChain([MixtureLink(0, self)]).after(
                step, weights=weights, lengths=lengths, leave_out=leave_out, **changes
            )
        changed = copy.copy(self) if lengths is None else self.grown(lengths)
        ((_, shares),) = as_phases(_by_name(weights), changed.names)
        past = [phase for phase in self._phases if phase[0] < step]
        changed._begin([*past, (int(step), shares)])
        return changed

    def grown(self, joined: Any) -> "Mixture":
        """The same mixture with other corpora after those there are, of which it has nothing yet.

        Raises:
            ValueError: the first of `joined` are not those there are.
        """
        corpora = getattr(joined, "corpora", joined)
        if not isinstance(corpora, Mapping):
            raise ValueError(
                f"lengths is {joined!r:.60}; it must be corpora by name, as those of the "
                "mixture are, and others after them"
            )
        if list(corpora)[: len(self.names)] != list(self.names):
            raise ValueError(
                f"the corpora are {', '.join(corpora)}, and the mixture has "
                f"{', '.join(self.names)}; put new ones after those there are"
            )
        for name, known in self.lengths.items():
            if digest(known) != digest(corpora[name]):
                raise ValueError(
                    f"corpus {name!r} has other lengths than it had; a mixture grows by "
                    "corpora, so make what is new one of its own"
                )
        new = {name: corpora[name] for name in corpora if name not in self.sources}
        changed = copy.copy(self)
        changed.joined, changed.lengths = joined, self.lengths | new
        changed.left_out = self.left_out | {name: np.zeros(0, np.int64) for name in new}
        planned = changed._planned(new)
        changed.sources = self.sources | planned
        changed.supplies = self.supplies | {name: Supply(plan) for name, plan in planned.items()}
        changed._begin(self._phases)
        return changed

    def goes_on(
        self, step: int, *, weights: Mapping[str, float] | None, leave_out: np.ndarray, **changes
    ) -> "Mixture":
        """The mixture that takes over at `step` with other options; its steps count from there.

        Args:
            step: how many steps this one has.
            weights: as for `after`.
            leave_out: examples of all corpora that are left out as well, int64, ascending.
            **changes: as for `after`.

        Raises:
            ValueError: as `after`.
        """
        options = {**self.options, "buckets": self.buckets}
        del options["ending"]
        for name in changes:
            if name not in options:
                known = ["weights", "lengths", "leave_out", *options]
                raise ValueError(f"a mixture has no option that can change {unknown(name, known)}")
        if self.ending != "repeat":
            raise ValueError(
                f"a mixture with ending={self.ending!r} can change its weights, and not "
                f"{', '.join(changes) or 'leave_out'}: that is for mixtures with ending='repeat'"
            )
        if weights is not None:
            phases = as_phases(_by_name(weights), self.names)
        else:
            now = [shares for start, shares in self._phases if start <= step][-1]
            later = [(start - step, shares) for start, shares in self._phases if start > step]
            phases = [(0, now), *later]
        changed = copy.copy(self)
        share = self._share
        changed._choose(len(phases[0][1]), **{**options, **changes})
        if "window" not in changes:
            changed._share = share
        parts = np.split(leave_out, np.searchsorted(leave_out, self._first[1:-1]))
        changed.left_out = {
            name: np.union1d(self.left_out[name], part - first)
            for name, part, first in zip(self.names, parts, self._first[:-1], strict=True)
        }
        changed.sources = changed._planned(self.lengths)
        taken = self.taken(step)
        changed.supplies = {
            name: self.supplies[name].onward(taken[name], plan, changed.left_out[name])
            for name, plan in changed.sources.items()
        }
        changed._begin(phases)
        return changed

    @property
    def left_out_of_all(self) -> np.ndarray:
        """The examples that are left out, counted over all corpora: int64, ascending."""
        pairs = zip(self.left_out.values(), self._first[:-1], strict=True)
        return np.concatenate([examples + first for examples, first in pairs])

    def examples_at(self, step: int) -> int:
        """How many examples the corpora have that have joined by `step`."""
        phases = zip(self._phases, self.counts, strict=True)
        return max(count for (start, _), count in phases if start <= step)

    @property
    def counts(self) -> tuple[int, ...]:
        """How many examples there are in each phase."""
        return tuple(int(self._first[len(shares)]) for _, shares in self._phases)

    @property
    def entries(self) -> tuple[dict[str, Any], ...]:
        """What its batches depend on from each phase on: the corpora and weights up to there."""
        entries, said = [], {}
        for (start, shares), (_, changes) in zip(self._phases, self.changes, strict=True):
            told = "+".join(f"{name}:{share}" for name, share in shares.items())
            said[f"weights from step {start}"] = told
            parts = {"plan": f"{PLAN_VERSION}.{VERSION}"}
            for name in shares:
                plan = self.sources[name]
                own = dict(part.split("=", 1) for part in plan.fingerprint.split(";"))
                for part in ("lengths", "window", "patterns"):
                    if part in own:
                        parts[f"{part} of {name}"] = own[part]
                rest = self.supplies[name].rest
                if rest is not None and rest.patterns:
                    parts[f"patterns of the rest of {name}"] = rest.patterns
            parts |= {
                "buckets": "+".join(map(str, self.buckets)),
                "seed": str(self.seed),
                "packing": self.packing,
                "overflow": self.overflow,
                "max_segments": str(self.max_segments or "any"),
                "weights by": self.by,
                "ending": self.ending,
            }
            fingerprint = ";".join(f"{name}={value}" for name, value in (parts | said).items())
            entry: dict[str, Any] = {"from": start, "fingerprint": fingerprint}
            entries.append(entry | ({"changes": changes} if start else {}))
        return tuple(entries)

    def entries_at(self, step: int) -> tuple[dict[str, Any], ...]:
        """Its entries but for phases to come, which may change."""
        return tuple(entry for entry in self.entries if entry["from"] < max(step, 1))

    def num_batches(self, epoch: int = 0) -> int:
        """Steps until each corpus that has a weight has been through; all, where they end."""
        del epoch
        return self._timeline.epoch

    def batch(self, step: int) -> MixedBatch:
        """The batch of global step `step`.

        Raises:
            IndexError: `step` is negative, or the mixture has ended.
        """
        index, before, taken = self._timeline.at(int(step))
        found, epochs, sources, height = [], [], {}, 0
        for number, (first, count) in enumerate(zip(before.tolist(), taken.tolist(), strict=True)):
            if count:
                supply = self.supplies[self.names[number]]
                segments, of = supply.rows(index, first, first + count)
                epochs.append(of)
                segments[:, 0] += height
                segments[:, 1] += self._first[number]
                height += count
                found.append(segments)
                sources[self.names[number]] = int(segments[:, 3].sum())
        segments = np.concatenate(found)
        cost = np.bincount(segments[:, 0], segments[:, 3].astype(float) ** 2, height)
        bucket = self.buckets[index]
        rows, places = balanced(np.arange(height), cost, bucket.rows)
        place = np.empty(height, np.int64)
        place[rows] = places
        segments[:, 0] = place[segments[:, 0]]
        order = np.argsort(segments[:, 0], kind="stable")
        return MixedBatch(
            bucket,
            segments[order],
            int(step) // self._timeline.epoch,
            sources,
            np.concatenate(epochs)[order],
        )

    @property
    def options(self) -> dict[str, Any]:
        """As those of `Plan`, without the weights."""
        own = {"by": self.by, "ending": self.ending}
        names = ("seed", "packing", "overflow", "window", "max_segments")
        buckets = [bucket.as_json for bucket in self.buckets]
        return {"buckets": buckets, **{name: getattr(self, name) for name in names}, **own}

    @property
    def changes(self) -> list[tuple[int, dict[str, Any]]]:
        """From which step on each phase holds, and its weights; the options with the first's.

        Where corpora join, `examples` is how many there are then.
        """
        found: list[tuple[int, dict[str, Any]]] = []
        known = self.counts[0]
        for (start, shares), count in zip(self._phases, self.counts, strict=True):
            weights = {"weights": {name: f"{share}" for name, share in shares.items()}}
            more = {"examples": count} if count > known else {}
            found.append((start, (weights | more) if found else (self.options | weights)))
            known = count
        return found

    @property
    def plans(self) -> tuple["Mixture", ...]:
        """Itself alone, as of a `MixtureChain`."""
        return (self,)


def _by_name(weights: Any) -> Mapping[str, float]:
    if not isinstance(weights, Mapping):
        raise ValueError(
            f"weights is {weights!r}; it must be numbers by name, those that hold from this step on"
        )
    return weights
