import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pipeline
from pipeline import Bucket, Examples, Plan
from pipeline.planning.fit import Fit
from pipeline.steps.timing import Stopwatch
from pipeline.steps.tuning import MOST, find_best
from tests.meshes import mesh_of


class Machine:
    """A clock and steps of a known cost, drawn by a seed, with jumps as caches make them.

    Args:
        seed: of the cost, of the noise, and of examples of up to 1,536 positions.
        slow: the share of steps that are slow at random.
        fails: whether a step of a bucket fails.
        compiling: seconds that the first step of a bucket takes beside.
    """

    def __init__(self, seed, slow=0.0, fails=lambda bucket: False, compiling=0.0):
        rng = np.random.default_rng(seed)
        self.now, self.seen, self._fails = 0.0, set(), fails
        self._width, self._edges = rng.uniform(200, 4000), rng.uniform(128, 1536, 3)
        self._jumps, self._odd = rng.uniform(1, 1.35, 3), rng.uniform(0.95, 1.05, 4096)
        self._slow, self._rng, self._compiling = slow, rng, compiling
        self.noise = 0.01
        self.stopwatch = Stopwatch(self._step, lambda bucket: bucket, self)
        rng = np.random.default_rng(seed)
        mean, sigma = rng.uniform(3.5, 6), rng.uniform(0.4, 1.2)
        lengths = np.clip(rng.lognormal(mean, sigma, 20_000), 3, 1536).astype(int)
        lengths[0] = 1536
        self.fit = Fit(lengths, tokens_per_batch=16_384)

    def __call__(self):
        return self.now

    def cost(self, bucket):
        """Seconds of a step."""
        jumps = np.prod(self._jumps[bucket.length > self._edges])
        rate = (1 + bucket.length / self._width) * jumps * self._odd[bucket.length]
        return bucket.positions * rate * 1e-5

    def _step(self, bucket):
        self.now += self._compiling * (bucket not in self.seen)
        self.seen.add(bucket)
        if self._fails(bucket):
            raise RuntimeError("RESOURCE_EXHAUSTED")
        noise = max(1 + self.noise * self._rng.normal(), 0.1) if self._slow else 1
        if self._rng.random() < self._slow:
            noise += self._rng.exponential()
        self.now += self.cost(bucket) * noise

    def tune(self, max_buckets=2, epochs=1):
        search_of = functools.partial(self.fit.search, 128)
        options = {"max_buckets": max_buckets, "epochs": epochs}
        return find_best(self.stopwatch, search_of, self.fit.bucket, **options)[0]

    def regret(self, chosen):
        """By how much a set is slower than the best of all sets of one and two shapes."""
        search = self.fit.search(128, lambda bucket: (self.cost(bucket),) * 2)
        lengths = [(length,) for length in range(128, 1537, 128)]
        pairs = [(short, lengths[-1]) for short in lengths[:-1]]
        best = min(search.measure(each).cost for each in [*pairs, (lengths[-1],)])
        batches = zip(chosen.batches, chosen.buckets, strict=True)
        return sum(count * self.cost(bucket) for count, bucket in batches) / best - 1


@pytest.mark.parametrize("slow", [0.0, 0.2])
@pytest.mark.parametrize("seed", range(6))
def test_the_choice_is_nearly_the_best_of_all_sets_of_two(seed, slow):
    machine = Machine(seed, slow)
    best = machine.tune()
    assert machine.regret(best) <= 0.03 + 0.01 * bool(slow)
    assert len(machine.seen) <= MOST


@pytest.mark.parametrize(("epochs", "number"), [(1, 1), (10, 2)])
def test_a_second_shape_is_compiled_where_epochs_enough_pay_for_it(epochs, number):
    machine = Machine(0, compiling=200.0)  # a second shape saves 36 seconds an epoch
    best = machine.tune(epochs=epochs)
    assert len(best.buckets) == number


def test_a_further_shape_must_save_twice_the_noise():
    def number(noise):
        machine = Machine(0, slow=1e-9)
        machine.noise = noise
        return len(machine.tune().buckets)

    assert [number(noise) for noise in (0, 0.3)] == [2, 1]


def test_shapes_that_fail_are_left_out():
    machine = Machine(1, fails=lambda bucket: bucket.length == 128)
    best = machine.tune(max_buckets=3)
    assert all(bucket.length > 128 for bucket in best.buckets)
    assert {bucket.length for bucket in machine.stopwatch.failures} == {128}


def test_if_no_shape_for_the_longest_example_runs_its_error_is_raised():
    machine = Machine(1, fails=lambda bucket: bucket.length > 1400)
    with pytest.raises(RuntimeError, match="RESOURCE_EXHAUSTED"):
        machine.tune()


def test_long_examples_take_longer_in_rows_of_any_shape(monkeypatch):
    """Where attention skips other segments, its work is that of the examples, not of the shape."""
    rng, now = np.random.default_rng(0), 0.0
    sizes = np.clip(rng.lognormal(4.5, 1.2, 600), 2, 2000).astype(int)
    corpus = Examples([np.ones(size + 1, np.int32) for size in sizes])

    def cost(batch):
        rows, length = batch["inputs"].shape
        segments = [np.bincount(row)[1:] for row in np.asarray(batch["inputs_segment_ids"])]
        attention = sum(float((each**2).sum()) for each in segments)
        return (rows * length * (1 + length / 8000) + attention / 500) * 1e-5

    def step(batch):
        nonlocal now
        now += cost(batch)

    clock = functools.partial(Stopwatch, clock=lambda: now)
    monkeypatch.setattr("pipeline.steps.tuning.Stopwatch", clock)
    options, rows = {"tokens_per_batch": 8192, "max_buckets": 2}, {"max_segments": 2, "align": 128}
    tuned = pipeline.tune(lambda: step, corpus, epochs=100, **options, **rows)

    def epoch(buckets):
        plan = Plan(corpus, buckets, **rows)
        return sum(map(cost, pipeline.Batches(corpus, plan).to_iter_dataset()))

    *shorter, longest = sorted(tuned.shapes, key=lambda each: each.order)
    others = [epoch([each, longest]) for each in shorter]
    assert tuned.seconds < epoch(tuned.buckets) <= min(others) * 1.01


# ---- With real steps.


def examples():
    rng = np.random.default_rng(0)
    sizes = np.clip(rng.lognormal(3.5, 0.8, 400), 2, 200).astype(int)
    return Examples([rng.integers(1, 9, size).astype(np.int32) for size in sizes])


@jax.jit
def scores(batch):
    hidden = jax.nn.one_hot(batch["inputs"], 16)
    return jnp.einsum("bqd,bkd->bqk", hidden, hidden).sum()


OPTIONS = {"tokens_per_batch": 1024, "length_multiple": 32, "max_buckets": 2}


def test_the_result_is_a_table_that_names_a_step_that_fails_for_a_shape():
    @jax.jit
    def step(batch):
        if batch["inputs"].shape[1] == 32:
            raise ValueError("32 is not a multiple of 64")
        return batch["inputs"].sum()

    tuned = pipeline.tune(lambda: step, examples(), **OPTIONS)
    assert {bucket.length for bucket in tuned.left_out} == {32}
    left_out = "left out: 32x32: ValueError: 32 is not a multiple of 64"
    for each in ("measured ", "µs a position", str(tuned.buckets[-1]), "MiB", left_out):
        assert each in str(tuned)
    assert tuned.seconds > 0


def test_a_corpus_of_one_example_has_one_shape_which_its_devices_divide():
    one = Examples([np.arange(150, dtype=np.int32)])
    options = OPTIONS | {"length_multiple": 33, "row_multiple": 3, "max_length": 30}
    tuned = pipeline.tune(lambda: scores, one, **options, sharding=mesh_of(data=2, context=2))
    assert tuned.buckets == (Bucket(12, 66),)


def test_lengths_are_tried_finer_than_the_formula_has_them():
    corpus = Examples([np.arange(3 + n % 300, dtype=np.int32) for n in range(2_000)])
    options = {"tokens_per_batch": 1024, "max_buckets": 2}
    assert {bucket.length % 128 for bucket in pipeline.fit_buckets(corpus, **options)} == {0}
    tuned = pipeline.tune(lambda: scores, corpus, **options)
    assert {shape.length % 128 for shape in tuned.shapes} == {0, 64}


def test_pairs_and_unpacked_rows_are_tuned_too(pairs):
    @jax.jit
    def step(batch):
        return jnp.einsum("bi,bt->bit", batch["inputs"], batch["targets"]).sum()

    options = OPTIONS | {"length_multiple": None, "packing": "none"}
    tuned = pipeline.tune(lambda: step, pairs, **options)
    assert len(tuned.shapes) <= MOST
    Plan(pairs, tuned.buckets, packing="none", overflow="error")
