import contextlib
import copy
import functools
import importlib
import itertools
import json
import os
import pickle
import re
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import grain
import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import pipeline
from pipeline import Batches, Bucket, Plan
from pipeline.errors import UserError
from pipeline.loading.loader import Loader
from pipeline.loading.state import StateKey
from pipeline.loading.transfer import field_specs
from pipeline.planning.identity import fingerprint_of
from pipeline.steps import Compiled, CompileLog
from tests.loading.definition import require_same
from tests.meshes import OneProcess, mesh_of

CUT = Bucket(16, 16), Bucket(8, 24), Bucket(4, 32)  # full rows of these cut 29 documents

FIELDS = ["inputs", "targets", "inputs_segment_ids", "inputs_positions", "loss_weights"]
OF_INPUTS = ["inputs", "inputs_segment_ids", "inputs_positions"]
OF_TARGETS = ["decoder_inputs", "targets", "targets_segment_ids", "targets_positions"]


def test_fields_are_in_the_order_of_the_page(corpus, pairs):
    for data, bucket, names in (
        (corpus, Bucket(8, 200), FIELDS),
        (pairs, Bucket(8, (96, 64)), [*OF_INPUTS, *OF_TARGETS, "loss_weights"]),
    ):
        assert list(Batches(data, Plan(data, [bucket]))[0]) == names


def divided(*spec, order=None, **axes):
    return NamedSharding(mesh_of(order=order, **axes), PartitionSpec(*spec))


MESHES = {
    "rows": divided("data", data=4),
    "another order": divided("data", data=4, order=(2, 0, 3, 1)),
    "replicas": divided("data", data=2, tensor=2, order=(3, 1, 0, 2)),
    "length": divided("data", "sequence", data=2, sequence=2),
    "length alone": divided(None, "sequence", sequence=4),
    "two axes of rows": divided(("data", "fsdp"), fsdp=2, data=2),
}


@pytest.mark.parametrize("name", MESHES)
def test_a_process_builds_exactly_what_its_devices_hold(corpus, buckets, name):
    sharding, plan = MESHES[name], Plan(corpus, buckets)
    options = {"positions": "restart" if name == "length" else "continue"}
    whole, every = (Batches(corpus, plan, sharding=each, **options) for each in (None, sharding))
    arrays = pipeline.to_global(every[0], sharding)
    require_same(arrays, whole[0])
    assert all(array.sharding.is_equivalent_to(sharding, 2) for array in arrays.values())
    for devices in ([0], [0, 1], [0, 2], [0, 3]):
        part = OneProcess(sharding, devices)
        batches = Batches(corpus, plan, sharding=part, **options)
        for step in range(3):
            built, bucket = batches[step], plan.batch(step).bucket
            (block,), shape = batches.blocks[bucket], bucket.shape
            here = block.rows.tolist(), [*range(*block.columns)]
            indices = part.addressable_devices_indices_map(shape).values()
            for axis, held in enumerate(here):
                spans = {index[axis].indices(shape[axis]) for index in indices}
                exactly = sorted(each for span in spans for each in range(*span))
                assert held in (exactly, [*range(shape[1])] if axis else exactly)
            at = np.ix_(*here)
            require_same(built, {name: values[at] for name, values in whole[step].items()})
            # What it holds tells the global shape, also of fields of whole rows.
            fields = {"ids": built["inputs"], "most": np.zeros((len(here[0]), 5, 3))}
            for known in (None, bucket):
                specs = field_specs(fields, part, known)
                assert [each.shape for each in specs.values()] == [shape, (shape[0], 5, 3)]


def loading(**options):
    given = {"max_length": 64, "length_multiple": 16} | options
    return lambda corpus, plan: pipeline.load(corpus, **given)


def batching(*buckets, **options):
    """Batches of a plan in these buckets, if there are some."""
    return lambda c, plan: Batches(c, Plan(c, buckets) if buckets else plan, **options)


def transforming(change):
    """The first batch of a transform that returns a changed field."""

    def transform(batch):
        return {"own": change(batch["inputs"])}

    return lambda c, plan: next(pipeline.load(c, buckets=plan.buckets, transform=transform))


def placing(shape, **options):
    return lambda c, plan: pipeline.to_global({"inputs": np.zeros(shape)}, ROWS, **options)


BUDGET = {"tokens_per_batch": 1024}
ROWS, LENGTH = MESHES["rows"], MESHES["length alone"]
TOO_LONG = {"transform": lambda batch: {"longer": np.zeros((16, 17))}, "buckets": CUT[:1]}
NO_ARRAYS = (3, [1], {"a": np.ones(4)}, np.array(["a"]), np.array([None]))
NO_ARRAYS += (np.ma.masked_array(np.ones(4), True), np.array(["2026-01-01"], "datetime64[D]"))
WRONG = [
    (batching(process_index=0, process_count=3), "row_multiple=3"),
    (batching(Bucket(6, 64), sharding=ROWS), "row_multiple=4"),
    (batching(Bucket(8, 66), sharding=LENGTH), "length_multiple=4"),
    (batching(process_index=2, process_count=2), "from 0 to 1"),
    (batching(sharding=ROWS, process_count=2), "give one of them"),
    (lambda c, p: Batches(c, Plan([1, 2], p.buckets)), "the plan is for 2"),
    (lambda c, p: Batches(c, p).repeat(2).repeat(2), "call repeat once"),
    (lambda c, p: Batches(c, p).repeat(2, reseed_each_epoch=False), "without other options"),
    (lambda c, p: Batches(c, Plan(c.lengths[:9], CUT).after(0, lengths=c)), "others join later"),
    (lambda c, p: pipeline.to_global({}, mesh_of(x=4)), "none of 'data', 'fsdp' and 'context'"),
    (placing((2, 8)), r"holds multiples of \(4, 1\) of a global batch"),
    (placing((4, 8), bucket=Bucket(8, 8)), r"shape \(4, 8\), but .* holds \(8, 8\) of 8x8"),
    (loading(buckets=[Bucket(1, 64)], max_buckets=3), "max_buckets, max_length to choose them;"),
    (loading(weights={"a": 1}, **BUDGET), "with weights it must be several corpora by name"),
    (loading(timeout_seconds=np.nan, **BUDGET), "timeout_seconds is"),
    (lambda c, p: pipeline.load(c, **TOO_LONG), r"longer has shape .* keep rows and positions"),
    (lambda c, p: Loader(Batches(c, p).map(dict)), "it must be Batches; transform them"),
    (lambda c, p: pipeline.load([[1, 2]], **BUDGET), "a list; it must be .* by Corpus.from_arr"),
    (loading(token_per_batch=1024), "did you mean 'tokens_per_batch'"),
    (loading(), "needs tokens_per_batch=, to choose buckets, or buckets="),
    (loading(transform=lambda batch: None, **BUDGET), "transform returned a NoneType; it must"),
    *(
        (loading(transform=lambda batch, own=own: {"own": own}, **BUDGET), "which no device can")
        for own in NO_ARRAYS
    ),
    (transforming(lambda ids: ids.astype(np.int64) - (1 << 40)), "from -1,099,511,627,.* as int64"),
    (transforming(lambda ids: ids.astype(np.int64) + (1 << 40)), "from 1,099,511,627,.* as int64"),
    (transforming(lambda ids: ids * 1e300), "as float64 that are infinite as float32"),
]


@pytest.mark.parametrize(("call", "sentence"), WRONG)
def test_what_cannot_be_loaded_gets_a_sentence(corpus, buckets, call, sentence):
    with pytest.raises(UserError, match=sentence):
        call(corpus, Plan(corpus, buckets))


def test_a_state_restores_at_every_step_in_any_order(corpus, buckets):
    batches = Batches(corpus, Plan(corpus, buckets)).repeat(2)
    with Loader(batches) as iterator:
        seen, states = [], [iterator.get_state()]
        for batch in iterator:
            seen.append(batch)
            states.append(json.loads(json.dumps(iterator.get_state())))
        assert len(seen) == len(batches) == 2 * batches.plan.num_batches()
        for at in np.random.default_rng(0).permutation(len(states)):  # with batches in flight
            iterator.set_state(states[at])
            if at == len(seen):
                assert list(iterator) == []
            else:
                require_same(next(iterator), seen[at])


def test_the_state_is_small_json_with_whole_numbers_of_any_kind(corpus, buckets):
    plan = Plan(corpus, buckets)
    plans = [plan.entries[0] | {"corpus": corpus.identity}]
    expected = {"step": 3, "plans": plans}
    expected["digest"] = fingerprint_of(expected)
    assert len(json.dumps(expected)) < 1024
    for kind in (int, np.int64, np.uint8, np.array):
        state = StateKey(plan, corpus).state(kind(3))
        assert json.loads(json.dumps(state)) == expected
        iterator = iter(Batches(corpus, plan).to_iter_dataset())
        iterator.set_state(state | {"step": kind(3)})
        assert json.loads(json.dumps(iterator.get_state())) == expected
        grain.experimental.set_next_index(iterator, kind(4))
        for part in ("identity", "corpus"):  # who changes a state changes no later one
            iterator.get_state()["plans"][0][part].clear()
        assert json.loads(json.dumps(iterator.get_state())) == StateKey(plan, corpus).state(4)


def test_load_chooses_buckets(corpus):
    options = {"tokens_per_batch": 1024, "max_length": 64, "length_multiple": 16}
    with pipeline.load(corpus.directory, sharding=MESHES["rows"].mesh, seed=3, **options) as loader:
        assert all(bucket.rows % 4 == 0 for bucket in loader.plan.buckets)
        assert next(loader)["inputs"].sharding.num_devices == 4
        assert set(loader.specs) == {b for b, n in loader.plan.batches_per_bucket.items() if n}
    both = pipeline.Corpora({"a": corpus, "b": corpus})
    with pipeline.load(both, weights={"a": 1, "b": 2}, **options) as loader:
        assert loader.plan.buckets[-1].length == 64


@pytest.mark.parametrize(("name", "prefetch"), [("rows", 0), ("length alone", np.int64(3))])
def test_a_loader_transfers_what_a_transform_returns_and_its_specs_say_so(
    corpus, buckets, name, prefetch
):
    def transform(batch, convention):
        ids = batch["inputs_segment_ids"]
        return pipeline.rename(batch, convention) | {
            "most": ids.max(axis=1),
            "mask": ids[:, :, None] == ids[:, None, :],
            "swapped": batch["inputs"].astype(">i4"),  # numbers in another order of bytes
            "long": batch["inputs"].astype(np.int64),
        }

    given = {"transform": functools.partial(transform, convention="maxtext")}
    whole = Batches(corpus, Plan(corpus, buckets), **given)
    given |= {"buckets": buckets, "sharding": MESHES[name], "num_epochs": 1, "prefetch": prefetch}
    with pipeline.load(corpus, **given) as loader:
        assert loader.specs == loader.batches.specs
        count = Compiled(
            lambda total, batch: total + batch["most"].sum() + batch["long"].max(), 0, loader.specs
        )
        for step, batch in enumerate(loader):
            here = {
                field: values.astype(np.int32) if field in ("swapped", "long") else values
                for field, values in whole[step].items()
            }
            require_same(batch, here)
            assert count(0, batch) == here["most"].sum() + here["long"].max()


def odd(batch):
    return batch["inputs"][0, 0] % 2 == 1


VARYING = {
    "dtype": lambda b: b | {"more": b["inputs"].astype(np.float32 if odd(b) else np.int32)},
    "field": lambda b: b | {"more": b["inputs"]} if odd(b) else b,
    "size": lambda b: b | {"more": np.zeros((*b["inputs"].shape, int(b["inputs"][0, 0]) + 1))},
}


@pytest.mark.parametrize("sharding", [None, ROWS])
@pytest.mark.parametrize("what", VARYING)
def test_a_transform_that_varies_is_refused_by_the_field_and_what_it_was(
    corpus, buckets, what, sharding
):
    given = {"transform": VARYING[what], "buckets": buckets, "sharding": sharding}
    whole = Batches(corpus, Plan(corpus, buckets))
    first = next(step for step in range(len(whole)) if odd(whole[step]))
    with pipeline.load(corpus, **given) as loader:
        for _ in range(first if what != "size" else 0):
            next(loader)
        with pytest.raises(ValueError, match=r"more of the batch of step \d+ is .*, and was "):
            next(loader)


def test_a_function_of_ones_own_is_compiled_once_for_each_shape(corpus, buckets):
    """Its state begins as arrays that are on no device in particular, as JAX makes them."""

    @jax.jit
    def step(state, batch):
        return state + batch["inputs"].sum()

    def run(batches):
        state = jax.numpy.zeros((3,))
        for batch in batches:
            state = step(state, batch)

    packed = pipeline.pack(pipeline.Examples([[1, 2, 3, 4]] * 20), [Bucket(2, 8)])
    for batches, shapes in (
        (pipeline.load(corpus, buckets=buckets, num_epochs=1), len(buckets)),
        ([batch for _, batch in packed], 1),
    ):
        with CompileLog() as log:
            run(batches)
        assert log.names.count("jit(step)") == shapes


def test_threads_that_wait_while_a_state_is_set_get_its_batches(corpus, buckets):
    """A thread that wakes after the old batches ended, and before the new step, does not hang."""
    busy = threading.Lock()

    def alone(batch):
        if threading.current_thread().name == "loader":
            assert busy.acquire(blocking=False), "batches are made at the same time"
            time.sleep(0.01)
            busy.release()
        return batch

    with pipeline.load(corpus, buckets=buckets, transform=alone, num_epochs=1) as loader:
        begin = loader.get_state()
        with ThreadPoolExecutor(3) as pool:
            readers = [pool.submit(list, loader) for _ in range(3)]
            for _ in range(5):
                loader.set_state(begin)
            counts = [len(reader.result(60)) for reader in readers]
    assert sum(counts) >= len(loader)


class Stall:
    """A transform that does not return from its call `at` on, until `close`."""

    def __init__(self, at=0):
        self.at, self.begun, self._released = at, threading.Event(), threading.Event()
        self.close = self._released.set

    def __call__(self, batch):
        if threading.current_thread().name == "loader":  # not for the batches of `specs`
            self.at -= 1
            if self.at < 0:
                self.begun.set()
                self._released.wait()
        return batch


def test_a_stalled_loader_ends_soon_and_says_so_to_a_thread_that_waits(corpus, buckets):
    stall = Stall()
    options = {"buckets": buckets, "transform": stall}
    pool = ThreadPoolExecutor()
    with pool, contextlib.closing(stall), pipeline.load(corpus, **options) as loader:
        waits = pool.submit(next, loader)
        assert stall.begun.wait(60)
        for end in (lambda: loader.set_state(loader.get_state()), loader.close):
            begin = time.monotonic()
            end()
            assert time.monotonic() - begin < 1
        with pytest.raises(RuntimeError, match="closed while a thread waited"):
            waits.result(60)
        with pytest.raises(ValueError, match="this loader is closed; make another"):
            next(loader)


def test_a_late_batch_says_what_it_waits_for_and_is_not_lost(corpus, buckets):
    stall = Stall(at=1)
    options = {"buckets": buckets, "transform": stall, "timeout_seconds": 0.2}
    with pipeline.load(corpus, **options) as loader:
        next(loader)
        late = (
            r"step 1 was not ready within .* in wait \(threading.*, called by _transform \(batches"
        )
        for _ in range(2):
            with pytest.raises(TimeoutError, match=late):
                next(loader)
        assert loader.step == 1
        stall.close()
        require_same(next(loader), Batches(corpus, loader.plan)[1])


def test_arrays_of_a_transform_may_be_its_scratch(corpus, buckets):
    def aligned(like):
        memory = np.empty(like.nbytes + 64, np.uint8)
        begin = -memory.ctypes.data % 64
        return memory[begin : begin + like.nbytes].view(like.dtype).reshape(like.shape)

    def reuse(make):
        def transform(batch):
            for name, field in batch.items():
                np.copyto(scratch.setdefault((name, field.shape), make(field)), field)
            return {name: scratch[name, field.shape] for name, field in batch.items()}

        scratch = {}
        return transform

    plan = Plan(corpus, buckets)
    right, transform = [Batches(corpus, plan)[step] for step in range(8)], reuse(aligned)
    for make in (aligned, np.copy, lambda field: field):
        batches = Batches(corpus, plan, transform=reuse(make))
        on_four = Batches(corpus, plan, transform=reuse(make), sharding=ROWS)
        for found in (
            [batches[step] for step in range(8)],
            [*itertools.islice(batches.to_iter_dataset(), 8)],
            [*itertools.islice(Loader(batches), 8)],
            [*itertools.islice(Loader(on_four), 8)],
            [pipeline.to_global(transform(batch), ROWS) for batch in right],
        ):
            for batch, expected in zip(found, right, strict=True):
                require_same(batch, expected)


def test_a_loader_of_another_process_says_so(corpus, buckets, monkeypatch):
    with pipeline.load(corpus, buckets=buckets) as loader:
        next(loader)
        monkeypatch.setattr(os, "getpid", lambda: -1)
        with pytest.raises(RuntimeError, match="made before the process forked"):
            next(loader)
        monkeypatch.undo()


def test_batches_need_no_jax(corpus, buckets, monkeypatch):
    plan = Plan(corpus, buckets)
    here = Batches(corpus, plan, process_index=1, process_count=2)
    monkeypatch.setattr(pipeline, "loading", pipeline.loading)  # to come back to it
    for name in [name for name in sys.modules if name.startswith("pipeline.loading")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "jax", None)
    without = importlib.import_module("pipeline.loading.batches").Batches
    assert without is not Batches
    batches = without(corpus, plan, process_index=1, process_count=2)
    iterator = iter(batches)
    iterator.set_state(json.loads(json.dumps(here.origin.state(3))))
    require_same(next(iterator), here[3])


def test_a_state_of_something_else_is_refused_by_what_changed(corpus, examples, buckets):
    plan, other = Plan(corpus, buckets), pipeline.Examples([ids + 1 for ids in examples])
    key, alone = StateKey(plan, corpus), StateKey(plan)
    state = key.state(3)
    for now, sentence in (
        (StateKey(Plan(corpus, buckets, tiers=4), corpus), "tiers was 1 and is now 4"),
        (StateKey(Plan(corpus, buckets, align=2), corpus), "align was .* and is now 2"),
        (StateKey(Plan(corpus, buckets[2:]), corpus), r"buckets was 16x16\+.* and is now 4x64"),
        (StateKey(plan, other), "tokens was .* and is now"),
        (StateKey(plan, corpus, "restart"), "step 3 .* positions was continue and is now restart"),
    ):
        with pytest.raises(ValueError, match=sentence):
            now.resume(state)
    assert alone.resume(state) == alone.resume(alone.state(3)) == 3  # as far as it is known
    with pytest.raises(ValueError, match="has no corpus to compare with"):
        key.resume(alone.state(3))
    for altered in ({"positions": None}, {"step": 4}):
        with pytest.raises(ValueError, match="is not a data state, or was altered"):
            key.resume({**state, **altered})
    for plans in ([5], [{}], "abc", {"from": 0}):  # with the right digest
        forged = {"step": 3, "plans": plans}
        with pytest.raises(ValueError, match="is not a data state"):
            key.resume({**forged, "digest": fingerprint_of(forged)})
    restart = StateKey(plan, corpus, "restart").state(4)
    with pipeline.load(corpus, buckets=buckets, positions="restart") as loader:
        loader.set_state(json.loads(json.dumps(restart)))
        require_same(next(loader), Batches(corpus, plan, positions="restart")[4])


def test_a_loader_says_what_it_loads(corpus, examples, buckets):
    endless = Batches(corpus, Plan(corpus, buckets)).repeat()
    each, digest = endless.plan.num_batches(), re.search(r"fingerprint \w{16}", repr(endless))[0]
    text = f"{len(corpus)} examples, buckets 16x16, 8x32, 4x64, {each} batches an epoch"
    assert repr(endless) == f"Batches({text}, endless, {digest})"
    moved, plan = pipeline.Examples([ids + 1 for ids in examples]), endless.plan
    for other in (Batches(moved, plan), Batches(corpus, plan, positions="restart")):
        assert digest not in repr(other)
    batches = f"Batches({text}, {2 * each} in all, {digest})"
    with pipeline.load(corpus, buckets=buckets, num_epochs=2) as loader:
        next(loader)
        assert repr(loader) == f"Loader({batches}, at step 1)"
    loader.close()  # again


def test_batches_can_be_copied_and_pickled_and_loaders_cannot(corpus, buckets):
    batches = Batches(corpus, Plan(corpus, buckets), sharding=MESHES["length"])
    for make in (copy.copy, copy.deepcopy):
        assert make(batches).repeat(2).sharding == MESHES["length"]
    there = pickle.loads(pickle.dumps(batches))
    require_same(there[3], batches[3])
    with pytest.raises(ValueError, match="a pickled copy, which knows no devices"):
        Loader(there)
    with Loader(batches) as loader:
        for each in (loader, iter(batches.to_iter_dataset())):
            for make in (pickle.dumps, copy.copy, copy.deepcopy):
                with pytest.raises(TypeError, match="cannot be copied or pickled; save its get_st"):
                    make(each)


def test_a_loader_says_its_step_and_how_many_there_are(corpus, buckets):
    plan = Plan(corpus, buckets)
    each = plan.num_batches()
    with pipeline.load(corpus, buckets=buckets, num_epochs=2) as loader:
        assert (loader.step, len(loader)) == (0, 2 * each)
        loader.set_state(StateKey(plan, corpus).state(each))
        assert (loader.step, len(loader)) == (each, 2 * each)  # from the beginning of the plan
        for step, _ in enumerate(loader, each + 1):
            assert loader.step == loader.get_state()["step"] == step
        assert loader.step == 2 * each
    with Loader(Batches(corpus, plan)) as loader:  # an epoch
        assert len(loader) == len(list(loader)) == loader.step
    with pipeline.load(corpus, buckets=buckets) as loader:  # without an end
        with pytest.raises(TypeError, match="has no length; give num_epochs= to load"):
            len(loader)
        loader.set_state(StateKey(plan, corpus).state(10**7))
        require_same(next(iter(loader)), Batches(corpus, plan)[10**7])
