"""Batches in Grain's own tools: transformations, workers, indices, specs, and checkpoints."""

import contextlib
import functools
import itertools
import json
import signal
import threading
import time
from asyncio import CancelledError
from concurrent.futures import ThreadPoolExecutor

import grain
import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from absl import flags

import pipeline
from pipeline import Batches, Bucket, Plan
from pipeline.corpus import Masked
from pipeline.corpus.tasks import INPUTS
from pipeline.errors import UserError
from pipeline.loading.iteration import PRIVATE, require_names
from pipeline.loading.loader import Loader
from tests.meshes import OneProcess, mesh_of

KINDS = ("plan", "mixture", "pairs", "view")
NAMES = ("map", "random_map", "filter")
CHAINS = [chain for n in range(4) for chain in itertools.combinations(NAMES, n)]
PREFETCH = {
    "nothing": lambda steps: steps,
    "thread": lambda steps: grain.experimental.ThreadPrefetchIterDataset(
        steps, prefetch_buffer_size=2
    ),
    "device": lambda steps: grain.experimental.device_put(
        steps, jax.devices()[0], cpu_buffer_size=1, device_buffer_size=1
    ).map(lambda batch: jax.tree.map(np.asarray, batch)),
}
check = grain.experimental.assert_equal_output_after_checkpoint
slow = functools.partial(pytest.param, marks=pytest.mark.slow)


def reverse(batch):
    return {name: values[::-1] for name, values in batch.items()}


def number(element):
    """A whole number of a batch, and of what `TRANSFORMATIONS` make of it."""
    if isinstance(element, tuple):
        return 2 * number(element[0]) + int(element[1])
    return int(element["inputs"].sum()) if isinstance(element, dict) else element + 1


TRANSFORMATIONS = {
    "map": lambda steps: steps.map(number),
    "map_with_index": lambda steps: steps.map_with_index(lambda n, each: (n, number(each))),
    "random_map": lambda steps: steps.random_map(lambda each, rng: (each, rng.integers(9)), seed=5),
    "filter": lambda steps: steps.filter(lambda each: number(each) % 3),
    "seed": lambda steps: steps.seed(9),
    "slice": lambda steps: steps[1:-1:2],
    "shuffle": lambda steps: steps.shuffle(seed=3),
    "repeat": lambda steps: steps.repeat(2),
    "batch": lambda steps: steps.batch(2),
}


class TwoArguments(Exception):
    def __init__(self, text, place):
        super().__init__(text)
        self.place = place


class HoldsALock(Exception):
    def __init__(self, text):
        super().__init__(text)
        self.lock = threading.Lock()


class RaisesWhenRead(Exception):
    def __reduce__(self):
        return int, ("no number",)


class Fails:
    """A function of a batch that fails after `good` calls, in the way that `kind` says."""

    def __init__(self, kind, good=0):
        self.kind, self.good = kind, good

    def __call__(self, batch):
        self.good -= 1
        if self.good >= 0:
            return batch
        if self.kind == "a lock in the batch":
            return {**batch, "lock": threading.Lock()}
        raise {
            "OSError": lambda: OSError(5, "a read failed"),
            "two arguments": lambda: TwoArguments("a read failed", 3),
            "a lock": lambda: HoldsALock("a read failed"),
            "raises when read": lambda: RaisesWhenRead("a read failed"),
            "SystemExit": lambda: SystemExit("a read failed"),
            "a class inside": lambda: type("Inside", (Exception,), {})("a read failed"),
            "StopIteration": lambda: StopIteration("a read failed"),
        }[self.kind]()


@contextlib.contextmanager
def within(seconds):
    """Ends a wait that would never end."""

    def end(*_):
        raise TimeoutError(f"not within {seconds} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(seconds)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def transform(steps, chain):
    for name in chain:
        steps = TRANSFORMATIONS[name](steps)
    return steps


def work(steps, workers):
    return steps.mp_prefetch(grain.MultiprocessingOptions(workers))


@pytest.fixture(scope="module", autouse=True)
def parsed_flags():
    """Grain reads its flags when workers start, as in `absl.app.run`."""
    parsed = flags.FLAGS.is_parsed()
    flags.FLAGS.mark_as_parsed()
    yield
    if not parsed:
        flags.FLAGS.unparse_flags()


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    """`make(kind, seed, **options)`: the few batches of a plan, of a mixture, of pairs, of a view.

    `kind` may also be "one shape".
    """
    rng = np.random.default_rng(0)
    arrays = [rng.integers(1, 99, size).astype(np.int32) for size in rng.integers(3, 40, 24)]
    first = pipeline.Corpus.from_arrays(arrays, tmp_path_factory.mktemp("first"), vocab_size=99)
    second = pipeline.Examples(arrays[:9], vocab_size=99)
    inputs = pipeline.Examples(arrays, vocab_size=99, task=INPUTS)
    corpora = {
        "plan": first,
        "one shape": first,
        "mixture": pipeline.Corpora({"first": first, "second": second}),
        "pairs": pipeline.Pairs.from_arrays(arrays, arrays, tmp_path_factory.mktemp("pairs")),
        "view": Masked(inputs, mask_id=7, keep_ids=()),
    }

    def make(kind, seed=0, **options):
        lengths = [(16, 16), (48, 48), (64, 64)] if kind == "pairs" else [16, 48, 64]
        buckets = [Bucket(*shape) for shape in zip((8, 4, 2), lengths, strict=True)]  # none of 64
        buckets = [Bucket(8, 48)] if kind == "one shape" else buckets
        weights = {"weights": {"first": 2, "second": 1}} if kind == "mixture" else {}
        plan = Plan(corpora[kind], buckets, seed=seed, packing="none", **weights)
        return Batches(corpora[kind], plan, **options)

    return make


def chains_of(batches, chains=CHAINS):
    """Each chain of transformations, before and after the steps become an iterable."""
    for chain in chains:
        for cut in range(len(chain) + 1):
            yield transform(transform(batches, chain[cut:]).to_iter_dataset(), chain[:cut])


@pytest.mark.parametrize(
    ("kind", "prefetch", "chains"),
    [
        ("mixture", "thread", [NAMES]),
        *(slow("plan", prefetch, CHAINS) for prefetch in PREFETCH),
        *(slow(*each, CHAINS) for each in zip(KINDS[1:], PREFETCH, strict=False)),
    ],
)
def test_every_chain_goes_on_from_every_state(make, kind, prefetch, chains):
    for steps in chains_of(make(kind), chains):
        check(PREFETCH[prefetch](steps))


def test_every_chain_refuses_the_state_of_another_plan(make):
    of_plan, steps = iter(make("plan")).get_state(), make("plan").map(reverse).to_iter_dataset()
    for prefetch in PREFETCH.values():
        assert iter(prefetch(steps)).get_state() == of_plan
    for own, other in zip(chains_of(make("plan")), chains_of(make("plan", seed=1)), strict=True):
        with pytest.raises(ValueError, match="seed was 1 and is now 0"):
            iter(own).set_state(iter(other).get_state())


@pytest.mark.parametrize(
    ("kind", "saved", "later"),
    [("plan", 1, 0), slow("mixture", 0, 3), slow("pairs", 3, 1), slow("view", 2, 3)],
)
def test_a_state_of_any_number_of_workers_goes_on_with_any_other(make, kind, saved, later):
    steps = transform(make(kind), NAMES).to_iter_dataset()
    every, iterator = list(steps), iter(work(steps, saved))
    for wanted in every[:2]:
        np.testing.assert_equal(next(iterator), wanted)
    state = json.loads(json.dumps(iterator.get_state()))
    iterator.close()
    iterator = iter(work(steps, later))
    iterator.set_state(state)
    np.testing.assert_equal(list(iterator), every[2:])
    iterator.close()
    other = transform(make(kind, seed=1), NAMES).to_iter_dataset()
    with pytest.raises(ValueError, match="seed was 0 and is now 1"):
        iter(work(other, later)).set_state(state)


def test_the_next_index_is_the_step(make):
    batches = make("plan")
    steps = batches.to_iter_dataset(), batches.map(reverse).to_iter_dataset().map(reverse)
    prefetched = (iter(PREFETCH["thread"](each)) for each in steps)
    for iterator in (*map(iter, steps), *prefetched, Loader(batches)):
        iterator.start_prefetch()
        next(iterator)
        assert grain.experimental.get_next_index(iterator) == 1
        grain.experimental.set_next_index(iterator, 3)
        assert grain.experimental.get_next_index(iterator) == iterator.get_state()["step"] == 3
        np.testing.assert_equal(dict(next(iterator)), batches[3])
        iterator.close()


@pytest.mark.parametrize("kind", KINDS)
def test_the_element_spec_has_the_fields_of_every_bucket(make, kind):
    batches = make(kind)
    spec = grain.experimental.get_element_spec(transform(batches, ["filter"]).to_iter_dataset())
    for step in range(len(batches)):
        fields = spec[batches.plan.batch(step).bucket]
        assert {*fields} == {*batches[step]}
        for name, values in batches[step].items():
            assert (fields[name].shape, fields[name].dtype) == (values.shape, values.dtype)
    assert {*spec} == {batches.plan.batch(step).bucket for step in range(len(batches))}


def test_slices_are_not_taken_for_another_or_for_the_whole(make):
    batches = make("plan")
    alike = [
        [batches, batches[1::2], batches[0::2], batches.shuffle(3)],
        [batches.seed(3).shuffle(), batches.seed(4).shuffle()],
        [batches[1:], batches[1:][1:]],
    ]
    for saved, other in (pair for each in alike for pair in itertools.permutations(each, 2)):
        with pytest.raises(ValueError, match=r"order was \[.*\] and is now \[.*\]"):
            iter(other).set_state(iter(saved).get_state())
    later = Batches(batches.corpus, batches.plan.after(3, seed=1))  # another plan from the start
    with pytest.raises(ValueError, match="seed was 0 and is now 1 from step 3"):
        iter(later[1::2]).set_state(iter(batches[1::2]).get_state())


TWO, THREE = (
    [
        chain
        for chain in itertools.product(TRANSFORMATIONS, repeat=size)
        if chain.count("repeat") < 2
    ]
    for size in (2, 3)
)


@pytest.mark.parametrize("chains", [TWO, pytest.param(THREE, marks=pytest.mark.slow)])
def test_every_order_of_transformations_is_that_of_a_list_or_is_refused(make, chains):
    """Grain makes the same of a list of the batches, where steps are numbers in the list."""
    batches, refused, at_once = make("plan"), 0, grain.ReadOptions(0, 0)
    twice = [batches.repeat(2)[step] for step in range(2 * len(batches))]
    for chain in chains:
        repeats = chain[0] == "repeat"
        expected = grain.MapDataset.source(twice if repeats else twice[: len(batches)])
        try:
            steps = transform(batches, chain)
        except UserError:
            refused += "batch" in chain or "repeat" in chain[1:]
            continue
        every = list(transform(expected, chain[repeats:]).to_iter_dataset(at_once))
        iterator, at = iter(steps.to_iter_dataset(at_once)), len(every) // 2
        np.testing.assert_equal([next(iterator) for _ in range(at)], every[:at])
        other = iter(steps.to_iter_dataset(at_once))
        other.set_state(json.loads(json.dumps(iterator.get_state())))
        np.testing.assert_equal(list(other), every[at:])
    assert refused == sum("batch" in chain or "repeat" in chain[1:] for chain in chains)


def test_batches_are_stacked_after_they_become_an_iterable(make):
    one = make("one shape")
    check(one.to_iter_dataset().batch(2))
    shards = grain.sharding.ShardOptions(0, 2)
    with pytest.raises(ValueError, match="without ElasticIterator"):
        next(grain.experimental.ElasticIterator(one, 4, shards))


def test_batches_that_are_transformed_say_where_they_end(make):
    batches = make("plan")
    twice = iter(batches.repeat(2).map(reverse))
    state = batches.origin.state(len(batches) + 1)
    twice.set_state(state)
    np.testing.assert_equal(next(twice), reverse(batches[len(batches) + 1]))
    with pytest.raises(ValueError, match=f"end after {len(batches)}; give more epochs"):
        iter(batches.map(reverse)).set_state(state)
    with pytest.raises(ValueError, match="num_epochs is 0; it must be"):
        batches.repeat(0)


@pytest.mark.parametrize("threads", [0, 2, None])
def test_threads_that_share_an_iterator_or_a_loader_get_each_step_once(make, threads):
    def read(batch):
        time.sleep(0.005)
        return batch

    batches = make("plan", transform=read)
    options = grain.ReadOptions(num_threads=threads or 0, prefetch_buffer_size=4)
    iterator = Loader(batches) if threads is None else iter(batches.to_iter_dataset(options))
    with ThreadPoolExecutor(4) as pool:
        found = [each for some in pool.map(list, [iterator] * 4) for each in some]
    sums = sorted(int(batch["inputs"].sum()) for batch in found)
    assert sums == sorted(int(batch["inputs"].sum()) for batch in batches)
    assert list(iterator) == []
    iterator.close()


ERRORS = OSError, KeyboardInterrupt, StopIteration, SystemExit, GeneratorExit, CancelledError


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("threads", [0, 1, 3, None])
def test_a_step_that_failed_says_why_and_is_made_again(make, error, threads):
    """An error that means the end to Python, or to a thread, ends no epoch."""

    def fail(batch, planned):
        if planned.digest == second and not failed:
            failed.append(True)
            raise error("not now")
        return batch

    failed, whole = [], make("plan")
    second, batches = whole.plan.batch(1).digest, make("plan", transform=fail)
    options = grain.ReadOptions(num_threads=threads or 0, prefetch_buffer_size=4)
    steps = Loader(batches) if threads is None else iter(batches.to_iter_dataset(options))
    next(steps)
    in_main = threads == 0 and error in (KeyboardInterrupt, SystemExit)
    stays = error is OSError or in_main
    with pytest.raises(error if stays else RuntimeError, match="not now") as raised:
        next(steps)
    assert stays or isinstance(raised.value.__cause__, error)
    assert steps.get_state()["step"] == 1
    np.testing.assert_equal(dict(next(steps)), whole[1])
    steps.close()


@pytest.mark.parametrize(
    ("kind", "raised"),
    [
        ("OSError", OSError),
        slow("two arguments", RuntimeError),
        slow("a lock in the batch", TypeError),
        *(slow(kind, RuntimeError) for kind in ("a lock", "raises when read", "a class inside")),
        *(slow(kind, RuntimeError) for kind in ("SystemExit", "StopIteration")),
    ],
)
def test_whatever_fails_in_a_worker_arrives_with_its_text_and_traceback(make, kind, raised):
    steps = iter(work(make("plan").map(Fails(kind, good=1)).to_iter_dataset(), 1))
    text = "cannot pickle" if kind == "a lock in the batch" else "a read failed"
    with within(60):
        next(steps)
        with pytest.raises(raised, match=text) as error:
            next(steps)
    assert "In the worker process:" in error.value.__notes__[0]
    with within(60):
        next(steps)  # made again, by a new worker
    if raised is OSError:
        assert error.value.errno == 5
    steps.close()


@pytest.mark.parametrize("name", ["map", "map_with_index", "random_map", "filter"])
@pytest.mark.parametrize("before", [False, True])
def test_a_function_cannot_end_the_data_by_mistake(make, name, before):
    """`next()` of an empty iterator raises `StopIteration`, which ends a Python iterator."""

    def fail(*arguments):
        calls.append(arguments)
        return next(iter([])) if len(calls) > 2 else True

    calls, steps = [], make("plan")
    steps = steps if before else steps.to_iter_dataset().seed(3).map(lambda batch: batch)
    options = {"seed": 3} if name == "random_map" else {}
    steps = getattr(steps, name)(fail, **options)
    steps = iter(steps.to_iter_dataset() if before else steps.map(lambda each: each))
    next(steps), next(steps)
    with pytest.raises(RuntimeError, match="raise a ValueError to report what is wrong"):
        next(steps)


def test_random_numbers_differ_between_the_rows_of_processes_and_equal_those_of_replicas(make):
    def noisy(batch, rng):
        return rng.random(3)

    def draw(batches):
        steps = batches.seed(5).random_map(noisy), batches.to_iter_dataset().seed(5)
        return [*steps[0]], [*steps[1].random_map(noisy)]

    whole = draw(make("plan"))
    parts = [draw(make("plan", process_index=p, process_count=2)) for p in range(2)]
    np.testing.assert_equal(whole, parts[0])
    for one, other in zip(*parts, strict=True):
        assert not np.isin(one, other).any()
    # Devices 0 and 2 hold the first half of the rows, 1 and 3 the other.
    sharding = pipeline.loading.batch_sharding(mesh_of(data=2, tensor=2, order=(0, 2, 1, 3)))
    for devices, part in (([0], 0), ([2], 0), ([1, 3], 1)):
        found = draw(make("plan", sharding=OneProcess(sharding, devices)))
        np.testing.assert_equal(found, parts[part])


def test_a_version_of_grain_without_a_name_is_refused_by_that_name():
    require_names(PRIVATE)
    with pytest.raises(ImportError, match=r"no DatasetIterator\._next, .* install"):
        require_names({**PRIVATE, grain.DatasetIterator: ("_next",)})


def test_interrupts_in_a_wait_lose_no_work(make):
    """A notebook's cell is interrupted and run again; a debugger stops the wait."""

    class Interrupt(BaseException):
        pass

    def interrupt(*_):
        raise Interrupt

    def slow(batch):
        if threading.current_thread().name == "loader":
            time.sleep(0.3)
        return batch

    batches, found = make("plan"), []
    steps = iter(batches.map(slow).to_iter_dataset())
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for _ in range(60):
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            with contextlib.suppress(Interrupt):
                found.append(next(steps))
            signal.setitimer(signal.ITIMER_REAL, 0)
            if len(found) == 2:
                break
    finally:
        signal.signal(signal.SIGALRM, before)
    np.testing.assert_equal(found, [batches[0], batches[1]])


def test_a_data_loader_of_batches_refuses_the_state_of_another_plan(make):
    def load(batches):
        none = grain.sharding.NoSharding()
        sampler = grain.samplers.IndexSampler(len(batches), shard_options=none, num_epochs=1)
        return iter(grain.DataLoader(data_source=batches, sampler=sampler))

    state = load(make("plan")).get_state()
    load(make("plan")).set_state(state)
    with pytest.raises(ValueError, match="DataSource in checkpoint does not match"):
        load(make("plan", seed=1)).set_state(state)


def test_grains_checkpoint_handler_saves_and_restores_a_loader(make, tmp_path):
    batches, items = make("plan"), ocp.args.Composite
    with (
        ocp.CheckpointManager(tmp_path) as manager,
        Loader(batches) as loader,
        Loader(batches) as fresh,
    ):
        next(loader)
        manager.save(1, args=items(data=grain.checkpoint.CheckpointSave(loader)))
        manager.restore(1, args=items(data=grain.checkpoint.CheckpointRestore(fresh)))
        np.testing.assert_equal(dict(next(fresh)), batches[1])
