"""Tuning: the shapes of batches with which a job takes the fewest seconds on these devices.

The search of `fit_buckets` is given the seconds of a `Stopwatch`, for some shapes. The neighbours
of the best set are measured, and it is sought again.
"""

import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from pipeline.corpus.interface import AnyCorpus
from pipeline.errors import InvalidValue, counted, require_whole, suggest_keywords
from pipeline.loading.batches import Batches
from pipeline.loading.loader import Loader
from pipeline.loading.sharding import batch_sharding, parts
from pipeline.planning.bucket import Bucket
from pipeline.planning.cascade import Packing, row_cost
from pipeline.planning.fit import MULTIPLES, Fit
from pipeline.planning.plan import Plan
from pipeline.planning.search import BucketSet, Search
from pipeline.planning.text_table import text_table
from pipeline.steps.compiled import show_bytes
from pipeline.steps.timing import Stopwatch, Timing, brief

logger = logging.getLogger(__name__)

# Shapes that are measured first at equal ratios of lengths, and at most; each is compiled once.
FIRST, MOST = 7, 16

# Rounds of each measurement.
ROUNDS = 5

# A further shape must save this many times the noise of the measurements.
NOISES = 2

# The finest step between lengths of rows, except on TPUs, which have 128 lanes.
FINE = 64


@dataclasses.dataclass(frozen=True)
class Tuned:
    """The choice of `tune`, and what it measured, which `print` shows as tables.

    Attributes:
        buckets: the buckets, for `load` or `Plan`.
        seconds: predicted seconds of the steps of an epoch, if their examples are short. If
            attention skips other segments, long examples take longer, by the same in any shapes.
        noise: the share by which the seconds of a shape are uncertain; each further shape had to
            save twice as much.
        compiling: seconds to compile the buckets once.
        sets: the best set of 1, 2, 3, … measured shapes; its cost is the seconds of an epoch.
        shapes: all shapes that were measured.
        left_out: shapes whose step failed, with the reason.
    """

    buckets: tuple[Bucket, ...]
    seconds: float
    noise: float
    compiling: float
    sets: tuple[BucketSet, ...]
    shapes: Mapping[Bucket, Timing]
    left_out: Mapping[Bucket, str]

    def __str__(self) -> str:
        chosen = ", ".join(map(str, self.buckets))
        lines = [
            f"{chosen}: {self.seconds:,.4g} s for the steps of an epoch, and "
            f"{self.compiling:,.3g} s to compile",
            f"measured {counted(len(self.shapes), 'shape')}, each to within {self.noise:.1%}",
            "",
            *text_table(self._rows_of_sets()),
            "",
            *text_table(self._rows_of_shapes()),
            *(f"left out: {bucket}: {reason}" for bucket, reason in self.left_out.items()),
        ]
        return "\n".join(lines)

    def _rows_of_sets(self) -> list[list[str]]:
        rows = [["shapes", "epoch, s", "padding", "compile, s", "memory"]]
        for each in self.sets:
            timings = [self.shapes[bucket] for bucket in each.buckets]
            rows.append(
                [
                    " ".join(map(str, each.buckets)) + " ←" * (each.buckets == self.buckets),
                    f"{each.cost:,.4g}",
                    f"{each.padding:.2%}",
                    f"{sum(timing.compiling for timing in timings):,.3g}",
                    _show_memory(max(timing.memory or 0 for timing in timings)),
                ]
            )
        return rows

    def _rows_of_shapes(self) -> list[list[str]]:
        rows = [["shape", "ms a step", "µs a position", "within", "compile, s", "memory"]]
        for bucket in sorted(self.shapes, key=lambda each: each.order):
            timing = self.shapes[bucket]
            rows.append(
                [
                    f"{bucket}",
                    f"{timing.seconds * 1e3:,.4g}",
                    f"{timing.seconds / bucket.positions * 1e6:,.4g}",
                    f"±{(timing.high - timing.low) / timing.seconds / 2:.1%}",
                    f"{timing.compiling:,.3g}",
                    _show_memory(timing.memory),
                ]
            )
        return rows


def _show_memory(count: int | None) -> str:
    return show_bytes(count) if count else "–"


@suggest_keywords
def tune(
    make_step: Callable[[], Callable[[Any], Any]],
    corpus: AnyCorpus,
    *,
    tokens_per_batch: int,
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
    """The buckets with which a job takes the fewest seconds here.

    It compiles a few shapes and measures seconds and memory of a step of each. Then it packs the
    corpus into sets of them, measures the neighbours of the best set, and searches again, for up to
    16 shapes. The job is all steps of `epochs` epochs and one compilation of each shape. Every
    shape has as many rows as `tokens_per_batch` allows, so that tuning does not change the
    optimisation.

    >>> import jax
    >>> from pipeline import Examples
    >>> corpus = Examples([np.arange(length) for length in range(2, 40)])
    >>> step = jax.jit(lambda batch: batch["inputs"] @ batch["targets"].T)
    >>> tuned = tune(lambda: step, corpus, tokens_per_batch=512, length_multiple=16)
    >>> tuned.buckets[-1].length >= 38 and len(tuned.shapes) <= 16
    True

    Args:
        make_step: `make_step()` returns `step(batch)`, which does one step on the devices and
            returns arrays to wait for. If it has `lower`, as jitted functions have, XLA reports
            its memory, and shapes that need more than the device has are not run. A training step
            keeps its state itself.
        corpus: the training corpus, as for `load`. Each step is measured on a batch of it.
        tokens_per_batch: the most positions in a batch, for pairs on both sides together.
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
    max_buckets = require_whole("max_buckets", max_buckets, 1)
    if not epochs > 0:
        raise InvalidValue(f"epochs is {epochs!r}; it must be a number above 0")
    sharding = batch_sharding(sharding)
    rows, length = parts(sharding)
    if length > 1:
        length_multiple = math.lcm(length_multiple or 128, length)
    fit = Fit(
        corpus,
        tokens_per_batch=tokens_per_batch,
        max_length=max_length,
        row_multiple=math.lcm(require_whole("row_multiple", row_multiple, 1), rows),
        **options,
    )
    if length_multiple is None:
        most = MULTIPLES[0] if jax.default_backend() == "tpu" else FINE
        length_multiple = _fine_enough(fit, [n for n in fit.multiples(None) if n <= most])
    search_of = functools.partial(fit.search, length_multiple)
    short = _shortest(search_of(formula), tokens_per_batch).lengths

    def load_batch(bucket: Bucket) -> Any:
        """A batch of short examples, which are the same for most shapes.

        If attention skips other segments, long examples take longer, but in rows of any shape.
        """
        lengths = np.asarray(corpus.lengths)
        room = tuple(map(min, bucket.lengths, short))
        plan = Plan(corpus, [bucket], exclude=_too_long(lengths, room), **options)
        with Loader(Batches(corpus, plan, sharding=sharding), prefetch=1) as loader:
            return next(loader)

    stopwatch = Stopwatch(make_step(), load_batch)
    best, sets, noise = find_best(
        stopwatch, search_of, fit.bucket, max_buckets=max_buckets, epochs=epochs
    )
    shapes = stopwatch.timings()
    return Tuned(
        buckets=best.buckets,
        seconds=best.cost,
        noise=noise,
        compiling=sum(shapes[bucket].compiling for bucket in best.buckets),
        sets=tuple(sets),
        shapes=shapes,
        left_out={bucket: brief(error) for bucket, error in stopwatch.failures.items()},
    )


def formula(bucket: Bucket) -> tuple[float, float]:
    """The cost of a batch by the formula of `fit_buckets`, as a `Price`."""
    cost = float(bucket.rows * row_cost(*bucket.lengths))
    return cost, cost


def find_best(
    stopwatch: Stopwatch,
    search_of: Callable[..., Search],
    bucket_of: Callable[[tuple[int, ...]], Bucket],
    *,
    max_buckets: int,
    epochs: float,
) -> tuple[BucketSet, list[BucketSet], float]:
    """The best set of shapes, the best set of each number of shapes, and the noise.

    Args:
        stopwatch: measures the shapes.
        search_of: `search_of(price, **options)` makes a `Search`.
        bucket_of: from the lengths of a row to a bucket.
        max_buckets: as for `tune`.
        epochs: as for `tune`.
    """

    def seconds(bucket: Bucket) -> tuple[float, float]:
        timing = stopwatch.timings()[bucket]
        return timing.seconds, timing.seconds

    def choose() -> tuple[BucketSet, float, list[BucketSet]]:
        timings = stopwatch.timings()
        lengths = {bucket.lengths for bucket in timings}
        found = search_of(seconds, candidates=lengths).find(max_buckets) if timings else {}
        if not found:  # every shape that holds all examples has failed
            raise next(iter(stopwatch.failures.values()))
        sets = [*found.values()]
        return *_choose(sets, timings, epochs), sets

    plain = search_of(formula)
    first = [bucket_of(lengths) for lengths in _equal_ratios(plain)]
    best_of_formula = [*plain.find(max_buckets).values()][-1].buckets
    stopwatch.measure(list(dict.fromkeys([*first, *best_of_formula]))[:MOST], ROUNDS)
    while True:
        chosen, _, _ = choose()
        tried = {*stopwatch.timings(), *stopwatch.failures}
        beside = map(bucket_of, _neighbours(chosen.buckets, plain.candidates))
        new = [each for each in beside if each not in tried][: max(MOST - len(tried), 0)]
        if not new:
            break
        logger.info("measuring %s", " ".join(map(str, new)))
        stopwatch.measure([*new, *chosen.buckets], ROUNDS)
    stopwatch.measure(stopwatch.timings(), ROUNDS)
    chosen, noise, sets = choose()
    return chosen, sets, noise


def _choose(
    sets: Sequence[BucketSet], known: Mapping[Bucket, Timing], epochs: float
) -> tuple[BucketSet, float]:
    """The set whose further shapes save more than noise and compilations take, and the noise."""
    compiling = float(np.mean([each.compiling for each in known.values()])) / epochs
    # Steps in a busy moment are slower, never faster: so the lower side shows the noise.
    noise = float(np.median([1 - each.low / each.seconds for each in known.values()]))
    chosen, *others = sets
    for other in others:
        further = len(other.buckets) - len(chosen.buckets)
        saved = chosen.cost - other.cost - compiling * further
        if saved > NOISES * noise * further * chosen.cost:
            chosen = other
    return chosen, noise


def _equal_ratios(search: Search) -> list[tuple[int, ...]]:
    """The longest of some lengths that hold all examples, and others at about equal ratios."""
    longest = search.longest
    shorter = [each for each in search.candidates if sum(each) <= sum(longest)]
    sizes = np.log([sum(each) for each in shorter])
    wanted = np.linspace(sizes.min(), sizes.max(), FIRST)
    numbers = [int(np.abs(sizes - each).argmin()) for each in wanted]
    return list(dict.fromkeys([longest, *(shorter[number] for number in numbers)]))


def _neighbours(
    buckets: Sequence[Bucket], candidates: Sequence[tuple[int, ...]]
) -> list[tuple[int, ...]]:
    """The next shorter and longer candidates of each of some buckets."""
    found: list[tuple[int, ...]] = []
    order = [sum(each) for each in candidates]
    for bucket in buckets:
        size = sum(bucket.lengths)
        found += [each for each, n in zip(candidates, order, strict=True) if n < size][-1:]
        found += [each for each, n in zip(candidates, order, strict=True) if n > size][:1]
    return list(dict.fromkeys(found))


def _fine_enough(fit: Fit, multiples: Sequence[int]) -> int:
    """The first multiple with little padding in one bucket, or the last."""
    for multiple in multiples:
        if fit.search(multiple, formula).find(1)[1].padding <= 0.02:
            return multiple
    return multiples[-1]


def _shortest(search: Search, tokens_per_batch: int) -> Bucket:
    """The shortest candidate whose examples fill two batches; else the longest."""
    sizes, counts = search.stock.examples
    *others, longest = search.candidates
    for lengths in others:
        holds = (sizes <= lengths).all(axis=1)
        if counts[holds] @ sizes[holds].sum(axis=1) >= 2 * tokens_per_batch:
            return Bucket(1, lengths)
    return Bucket(1, longest)


def _too_long(lengths: np.ndarray, room: tuple[int, ...]) -> np.ndarray:
    """The numbers of examples that are longer than `room`; none, if those would be all."""
    long = (lengths.reshape(len(lengths), -1) > room).any(axis=1)
    return np.zeros(0, np.int64) if long.all() else np.flatnonzero(long)
