"""Tuning: the shapes of batches with which a job takes the fewest seconds on these devices.

It has three parts, each useful alone: a `Stopwatch` measures steps, a `Surface` interpolates
between them, and a `SetSearch` finds the best sets of shapes for given seconds. `tune` measures the
shapes that can change the choice, until no other set can be much better.
"""

import dataclasses
import functools
import itertools
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from pipeline.corpus.interface import AnyCorpus
from pipeline.errors import InvalidValue, counted, require_whole, suggest_keywords
from pipeline.loading.batches import Batches
from pipeline.loading.loader import Loader
from pipeline.loading.sharding import batch_sharding, parts
from pipeline.planning.bucket import Bucket
from pipeline.planning.cascade import Packing
from pipeline.planning.fit import BucketSearch, make_search
from pipeline.planning.plan import Plan
from pipeline.planning.sets import BucketSet, SetSearch
from pipeline.planning.surface import Estimate, Surface, spread_out
from pipeline.planning.text_table import text_table
from pipeline.steps.compiled import show_bytes
from pipeline.steps.timing import Stopwatch, Timing, Trial, brief

logger = logging.getLogger(__name__)

# Tuning ends when no other set seems better by this share.
CLOSE = 0.02

# Shapes that are measured at first, and at most, for each choice; each is compiled once.
FIRST, MOST = 5, 16

# Rounds of each measurement, and at most.
ROUNDS, MOST_ROUNDS = 5, 40

# Steps of the check run.
CHECKED = 24

# The finest step between lengths of rows, except on TPUs, which have 128 lanes.
FINE = 64


@dataclasses.dataclass(frozen=True)
class Measured:
    """A shape that was measured, with the number of the choice of its step."""

    bucket: Bucket
    choice: int
    timing: Timing


@dataclasses.dataclass(frozen=True)
class Tuned:
    """The choice of `tune`, with its certificate, which `print` shows as a table.

    Attributes:
        buckets: the buckets, for `load` or `Plan`.
        choice: the best of `choices`, for `make_step`.
        seconds: predicted seconds of the steps of an epoch: those of their shapes, and what the
            check run took beside, which is the same for any shapes.
        bound: seconds of an epoch that no set of shapes can beat: all tokens at the best rate that
            was measured for their length, without padding, and the same beside.
        gap: another set of shapes is better by at most this share, as far as noise and
            interpolation between measured shapes can tell.
        compiling: seconds to compile the buckets once.
        epochs: the epochs over which a compilation had to pay off.
        sets: the best set of 1, 2, 3, … shapes, for this choice; shapes that were not measured are
            interpolated.
        shapes: all shapes that were measured.
        choices: all choices that were tried.
        left_out: shapes whose step failed, with the number of their choice and the reason.
        checked: the number of steps of a short run of the plan, the seconds of their shapes, and
            the seconds that they took.
    """

    buckets: tuple[Bucket, ...]
    choice: Mapping[str, Any]
    seconds: float
    bound: float
    gap: float
    compiling: float
    epochs: float
    sets: tuple[BucketSet, ...]
    shapes: tuple[Measured, ...]
    choices: tuple[Mapping[str, Any], ...]
    left_out: tuple[tuple[Bucket, int, str], ...]
    checked: tuple[int, float, float]

    def __str__(self) -> str:
        chosen = ", ".join(map(str, self.buckets))
        steps, predicted, took = self.checked
        lines = [
            f"{chosen}{_show_choice(self.choice)}: {self.seconds:,.4g} s for the steps of an "
            f"epoch, and {self.compiling:,.3g} s to compile",
            f"at least {self.bound:,.4g} s with any shapes; another set is better by at most "
            f"{self.gap:.1%}",
            f"check: {counted(steps, 'step')} of the plan took {took:,.3g} s, and their shapes "
            f"{predicted:,.3g} s: {took / predicted - 1:+.1%}, which the epoch has too",
            "",
            *text_table(self._rows_of_sets()),
            "",
            *text_table(self._rows_of_shapes()),
        ]
        for bucket, number, reason in self.left_out:
            lines.append(f"left out: {bucket}{_show_choice(self.choices[number])}: {reason}")
        return "\n".join(lines)

    def _rows_of_sets(self) -> list[list[str]]:
        number = self.choices.index(self.choice)
        known = {each.bucket: each.timing for each in self.shapes if each.choice == number}
        rows = [["shapes", "epoch, s", "padding", "compile, s", "memory"]]
        for each in self.sets:
            there = [known[bucket] for bucket in each.buckets if bucket in known]
            memory = max((timing.memory or 0 for timing in there), default=0)
            about = "" if len(there) == len(each.buckets) else "≈"
            rows.append(
                [
                    " ".join(map(str, each.buckets)) + " ←" * (each.buckets == self.buckets),
                    f"{about}{each.seconds:,.4g}",
                    f"{each.padding:.2%}",
                    f"{about}{each.compiling:,.3g}",
                    show_bytes(memory) if memory else "–",
                ]
            )
        return rows

    def _rows_of_shapes(self) -> list[list[str]]:
        rows = [["shape", "ms a step", "µs a position", "within", "compile, s", "memory"]]
        order = sorted(self.shapes, key=lambda each: (each.choice, each.bucket.order))
        for each in order:
            timing = each.timing
            width = (timing.high - timing.low) / timing.seconds / 2
            choice = _show_choice(self.choices[each.choice]) if len(self.choices) > 1 else ""
            rows.append(
                [
                    f"{each.bucket}{choice}",
                    f"{timing.seconds * 1e3:,.4g}",
                    f"{timing.seconds / each.bucket.positions * 1e6:,.4g}",
                    f"±{width:.1%}",
                    f"{timing.compiling:,.3g}",
                    "–" if timing.memory is None else show_bytes(timing.memory),
                ]
            )
        return rows

    def as_json(self) -> dict[str, Any]:
        """All fields, as `from_json` takes them."""
        found = dataclasses.asdict(self)
        found["buckets"] = [bucket.as_json for bucket in self.buckets]
        for each, stored in zip(self.sets, found["sets"], strict=True):
            stored["buckets"] = [bucket.as_json for bucket in each.buckets]
        for measured, stored in zip(self.shapes, found["shapes"], strict=True):
            stored["bucket"] = measured.bucket.as_json
        found["left_out"] = [(bucket.as_json, *others) for bucket, *others in self.left_out]
        return found

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> "Tuned":
        """The object that `as_json` described."""

        def buckets(every: Iterable[Sequence[Any]]) -> tuple[Bucket, ...]:
            return tuple(Bucket(*shape) for shape in every)

        sets = [
            BucketSet(
                **{**each, "buckets": buckets(each["buckets"]), "batches": tuple(each["batches"])}
            )
            for each in stored["sets"]
        ]
        shapes = [
            Measured(Bucket(*each["bucket"]), each["choice"], Timing(**each["timing"]))
            for each in stored["shapes"]
        ]
        return cls(
            **{
                **stored,
                "buckets": buckets(stored["buckets"]),
                "sets": tuple(sets),
                "shapes": tuple(shapes),
                "choices": tuple(stored["choices"]),
                "left_out": tuple((Bucket(*shape), *more) for shape, *more in stored["left_out"]),
                "checked": tuple(stored["checked"]),
            }
        )


@suggest_keywords
def tune(
    make_step: Callable[..., Callable[[Any], Any]],
    corpus: AnyCorpus,
    *,
    tokens_per_batch: int,
    choices: Mapping[str, Sequence[Any]] | None = None,
    max_length: int | tuple[int, int] | None = None,
    max_buckets: int = 4,
    epochs: float = 1,
    row_multiple: int = 1,
    length_multiple: int | None = None,
    packing: Packing = "best_fit",
    max_segments: int | None = None,
    align: int = 1,
    sharding: Any = None,
) -> Tuned:
    """The buckets, and the choice of a step, with which a job takes the fewest seconds here.

    It compiles a few shapes, measures seconds and memory of a step of each, interpolates between
    them, packs the corpus into sets of shapes, and measures the shapes that can change the best
    set. The job is all steps of `epochs` epochs and one compilation of each shape. Every shape has
    at most `tokens_per_batch` positions, and at least nine tenths of that if rows allow it, so that
    tuning does not change the optimisation.

    >>> import jax
    >>> from pipeline import Examples
    >>> corpus = Examples([np.arange(length) for length in range(2, 40)])
    >>> step = jax.jit(lambda batch: batch["inputs"] @ batch["targets"].T)
    >>> tuned = tune(lambda: step, corpus, tokens_per_batch=512, length_multiple=16)
    >>> tuned.buckets[-1].length >= 38 and tuned.seconds >= tuned.bound
    True

    Args:
        make_step: `make_step(**choice)` returns `step(batch)`, which does one step on the devices
            and returns arrays to wait for. If it has `lower`, as jitted functions have, XLA reports
            its memory, and shapes that need more than the device has are not run. A training step
            keeps its state itself; the steps of all choices are kept until the end.
        corpus: the training corpus, as for `load`. Each step is measured on a batch of it.
        tokens_per_batch: the most positions in a batch, for pairs on both sides together.
        choices: options to try beside shapes, each with its values, such as
            `{"remat": [False, True]}`. All combinations are tried. Default None: no options.
        max_length: as for `fit_buckets`.
        max_buckets: the most shapes; default 4.
        epochs: the epochs of training, over which a compilation must pay off; default 1.
        row_multiple: numbers of rows are multiples of this, and of the devices in `sharding`.
        length_multiple: bucket lengths are multiples of this; default None: of 64, on TPUs of 128;
            or of less if that leaves less padding.
        packing: as for `Plan`.
        max_segments: as for `Plan`.
        align: as for `Plan`.
        sharding: as for `load`. With several processes, each of them calls `tune`.

    Raises:
        ValueError: an argument is not as above, or no row fits the batch.
        Exception: what the step raised, if no shape that holds all examples can be run.
    """
    options: Any = {"packing": packing, "max_segments": max_segments, "align": align}
    every = _combine(choices)
    max_buckets = require_whole("max_buckets", max_buckets, 1)
    if not epochs > 0:
        raise InvalidValue(f"epochs is {epochs!r}; it must be a number above 0")
    sharding = batch_sharding(sharding)
    rows, length = parts(sharding)
    if length > 1:
        length_multiple = math.lcm(length_multiple or 128, length)
    search_of = functools.partial(
        make_search,
        corpus,
        tokens_per_batch=tokens_per_batch,
        max_buckets=max_buckets,
        max_length=max_length,
        row_multiple=math.lcm(require_whole("row_multiple", row_multiple, 1), rows),
        align=align,
        packing=packing,
        max_segments=max_segments,
    )
    found = search_of(length_multiple=length_multiple)
    if length_multiple is None and found.multiple > FINE and jax.default_backend() != "tpu":
        found = search_of(length_multiple=FINE)
    search = SetSearch(found)
    short = _shortest(found, search.candidates).lengths

    def load_batch(bucket: Bucket) -> Any:
        """A batch of short examples, which are the same for most shapes.

        If attention skips other segments, long examples take longer, but in rows of any shape.
        """
        lengths = np.asarray(corpus.lengths)
        room = tuple(map(min, bucket.lengths, short))
        plan = Plan(corpus, [bucket], exclude=_too_long(lengths, room), **options)
        with Loader(Batches(corpus, plan, sharding=sharding), prefetch=1) as loader:
            return next(loader)

    stopwatch = Stopwatch(lambda number: make_step(**every[number]), load_batch)
    choice, best, gap = find_best(
        stopwatch, search, choices=len(every), max_buckets=max_buckets, epochs=epochs
    )
    timings = stopwatch.timings()
    mine = {trial.bucket: each for trial, each in timings.items() if trial.choice == choice}
    plan = Plan(corpus, best.buckets, **options)
    batches = Batches(corpus, plan, sharding=sharding)
    with Loader(batches, prefetch=1) as loader:
        taken, positions, predicted, took = 0, 0, 0.0, 0.0
        for batch in itertools.islice(loader, CHECKED):
            took += stopwatch.run(choice, batch)
            predicted += mine[loader.planned.bucket].seconds
            positions += loader.planned.bucket.positions
            taken += 1
    epoch = plan.batches_per_bucket
    of_shapes = sum(n * mine[bucket].seconds for bucket, n in epoch.items())
    share = positions / sum(n * bucket.positions for bucket, n in epoch.items())
    of_examples = (took - predicted) / share
    estimate = estimate_all(search, timings, stopwatch.failures, choice)
    compiling = _compiling(search, mine)
    sets = search.best(
        estimate.seconds, compiling=compiling, max_buckets=max_buckets, epochs=epochs
    )
    sets[len(best.buckets)] = best
    return Tuned(
        buckets=best.buckets,
        choice=every[choice],
        seconds=of_shapes + of_examples,
        bound=search.bound(_best_seen(search, timings)) + of_examples,
        gap=gap,
        compiling=best.compiling,
        epochs=epochs,
        sets=tuple(
            dataclasses.replace(each, seconds=each.seconds + of_examples) for each in sets.values()
        ),
        shapes=tuple(Measured(each.bucket, each.choice, t) for each, t in timings.items()),
        choices=every,
        left_out=tuple(
            (each.bucket, each.choice, brief(error)) for each, error in stopwatch.failures.items()
        ),
        checked=(taken, predicted, took),
    )


def find_best(
    stopwatch: Stopwatch, search: SetSearch, *, choices: int, max_buckets: int, epochs: float
) -> tuple[int, BucketSet, float]:
    """The number of a choice, its best set of shapes, and the share by which another may be better.

    Measures until that share is small. The best set whose shapes are all measured is compared with
    the best possible set, whose other shapes are as fast as the surface allows. If shapes of the
    latter are not measured yet, they are measured next, or else both sets again.
    """
    shapes = search.candidates
    longest = max(range(len(shapes)), key=lambda number: shapes[number].order)
    first = [shapes[number] for number in spread_out(shapes, longest, FIRST)]
    stopwatch.measure([Trial(c, each) for c in range(choices) for each in first], ROUNDS)
    options: Any = {"max_buckets": max_buckets, "epochs": epochs}
    while True:
        timings, failures = stopwatch.timings(), stopwatch.failures
        best: tuple[float, int, BucketSet] | None = None
        estimates = {}
        for choice in range(choices):
            mine = {trial.bucket: t for trial, t in timings.items() if trial.choice == choice}
            if not mine:
                continue
            estimates[choice] = estimate_all(search, timings, failures, choice)
            known = np.array([shape in mine for shape in shapes])
            seconds = np.where(known, estimates[choice].seconds, np.inf)
            found = search.best(seconds, compiling=_compiling(search, mine), **options)
            for each in found.values():
                total = each.seconds * epochs + each.compiling
                if best is None or total < best[0]:
                    best = total, choice, each
        if best is None:  # none of the shapes that hold all examples could be run
            if not (left := _next_long(search, choices, failures)):
                raise next(iter(failures.values()))
            stopwatch.measure(left, ROUNDS)
            continue
        _, chosen, incumbent = best
        challenger, ratio = (chosen, incumbent), 1.0
        own = [shapes.index(bucket) for bucket in incumbent.buckets]
        for choice, estimate in estimates.items():
            mine = {trial.bucket: t for trial, t in timings.items() if trial.choice == choice}
            low = estimate.low.copy()
            if choice == chosen:
                low[own] = estimate.high[own]
            found = search.best(low, compiling=_compiling(search, mine), **options)
            high = estimates[chosen].high[own] @ np.array(incumbent.batches)
            mark = high * epochs + incumbent.compiling
            for each in found.values():
                if (better := mark / (each.seconds * epochs + each.compiling)) > ratio:
                    challenger, ratio = (choice, each), better
        gap = ratio - 1
        logger.info(
            "best of %d measured shapes: %s; another set may be better by %.1f%%",
            len(timings), " ".join(map(str, incumbent.buckets)), gap * 100,
        )  # fmt: skip
        ours = [Trial(chosen, bucket) for bucket in incumbent.buckets]
        theirs = [Trial(challenger[0], bucket) for bucket in challenger[1].buckets]
        new = [trial for trial in theirs if trial not in timings]
        measured = sum(trial.choice == challenger[0] for trial in [*timings, *failures])
        if gap <= CLOSE:
            return chosen, incumbent, gap
        if new and measured < MOST:
            stopwatch.measure([*new, *_some(timings, challenger[0]), *ours], ROUNDS)
        elif not new and min(timings[each].steps for each in [*ours, *theirs]) < MOST_ROUNDS:
            stopwatch.measure([*ours, *theirs, *_some(timings, chosen)], ROUNDS)
        else:
            return chosen, incumbent, gap


def estimate_all(
    search: SetSearch,
    timings: Mapping[Trial, Timing],
    failures: Mapping[Trial, Exception],
    choice: int,
) -> Estimate:
    """Seconds of a step of each candidate; infinite if it, or a smaller shape, has failed."""
    mine = {trial.bucket: t for trial, t in timings.items() if trial.choice == choice}
    columns = zip(*((each.seconds, each.low, each.high) for each in mine.values()), strict=True)
    found = Surface(list(mine), *columns).estimate(search.candidates)
    failed = [trial.bucket for trial in failures if trial.choice == choice]
    lost = np.array(
        [
            shape not in mine
            and any(
                shape.rows >= bad.rows
                and all(a >= b for a, b in zip(shape.lengths, bad.lengths, strict=True))
                for bad in failed
            )
            for shape in search.candidates
        ]
    )
    return Estimate(*(np.where(lost, np.inf, values) for values in found))


def _some(timings: Mapping[Trial, Timing], choice: int) -> list[Trial]:
    """A few trials to measure with others, to tell a busy moment from a slow shape."""
    return [trial for trial in timings if trial.choice == choice][:3]


def _next_long(search: SetSearch, choices: int, failures: Mapping[Trial, Exception]) -> list[Trial]:
    """For each choice, the next shape to try among those that hold all examples."""
    found = []
    for choice in range(choices):
        every = (Trial(choice, search.candidates[number]) for number in search.holding_all)
        found += [trial for trial in every if trial not in failures][:1]
    return found


def _compiling(search: SetSearch, mine: Mapping[Bucket, Timing]) -> np.ndarray:
    """Seconds to compile each candidate; the mean if it was not measured."""
    mean = float(np.mean([each.compiling for each in mine.values()]))
    known = {bucket: each.compiling for bucket, each in mine.items()}
    return np.array([known.get(shape, mean) for shape in search.candidates])


def _best_seen(search: SetSearch, timings: Mapping[Trial, Timing]) -> np.ndarray:
    """The least seconds of a step of each candidate over all choices; infinite if not measured."""
    best: dict[Bucket, float] = {}
    for trial, each in timings.items():
        best[trial.bucket] = min(best.get(trial.bucket, np.inf), each.seconds)
    return np.array([best.get(shape, np.inf) for shape in search.candidates])


def _shortest(search: BucketSearch, candidates: Sequence[Bucket]) -> Bucket:
    """The shortest candidate whose examples fill two batches; else the longest candidate."""
    table, counts = search.histogram
    for bucket in candidates:
        holds = (table <= bucket.lengths).all(axis=1)
        if counts[holds] @ table[holds].sum(axis=1) >= 2 * search.tokens_per_batch:
            return bucket
    return candidates[-1]


def _too_long(lengths: np.ndarray, room: tuple[int, ...]) -> np.ndarray:
    """The numbers of examples that are longer than `room`; none, if those would be all."""
    long = (lengths.reshape(len(lengths), -1) > room).any(axis=1)
    return np.zeros(0, np.int64) if long.all() else np.flatnonzero(long)


def _combine(choices: Mapping[str, Sequence[Any]] | None) -> tuple[dict[str, Any], ...]:
    """All combinations of some choices, each a dict."""
    for name, values in (choices or {}).items():
        if isinstance(values, str) or not isinstance(values, Sequence) or not values:
            raise InvalidValue(
                f"choices has {name}={values!r}; it must be a list of values to try, as in "
                "{'remat': [False, True]}"
            )
    names, every = list(choices or {}), (choices or {}).values()
    return tuple(dict(zip(names, each, strict=True)) for each in itertools.product(*every))


def _show_choice(choice: Mapping[str, Any]) -> str:
    shown = ", ".join(f"{name}={value}" for name, value in choice.items())
    return f" with {shown}" if shown else ""
