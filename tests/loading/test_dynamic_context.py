"""A mesh for each bucket: batches, gradients and switches are those of one device and one mesh."""

import functools
import json
import logging
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import pipeline
from models.mesh import gather_table
from pipeline import Batches, Bucket, DynamicContext, Examples, Plan
from pipeline.loading.dynamic_context import _require_nested
from pipeline.loading.loader import Loader
from pipeline.loading.sharding import CONTEXT_ORDERS, multiples
from pipeline.steps import Compiled, CompileLog, make_train_step, on_batch_mesh
from tests.loading.small_model import VOCABULARY, attend, begin, loss, shardings_of
from tests.meshes import mesh_of
from tests.processes import COMPILE_QUICKLY, call

# On 4 devices that share a batch: degrees 1, 1, 2 and 4.
BUCKETS = Bucket(8, 16), Bucket(4, 32), Bucket(2, 64), Bucket(1, 128)
MESHES = {
    "data": {"data": 4},
    "fsdp": {"fsdp": 4},
    "both": {"data": 2, "fsdp": 2},
    "another order": {"data": 2, "fsdp": 2, "order": (3, 1, 0, 2)},
}


@pytest.fixture(autouse=True, scope="module")
def _quickly_compiled():
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def draw(rng, *, longest=128):
    """Sizes of examples that need every bucket, the longest fewest."""
    spans = [(longest * 3 // 4, longest, 12), (40, 64, 24), (20, 32, 40), (2, 15, 120)]
    sizes = [rng.integers(low, high, count) for low, high, count in spans if high <= longest]
    return np.concatenate(sizes)


def tokens(rng, sizes, more=0):
    return [rng.integers(1, VOCABULARY, size + more) for size in sizes]


@pytest.fixture(scope="module")
def text():
    rng = np.random.default_rng(0)
    return Examples(tokens(rng, draw(rng)))


def loss_of_pairs(params, batch):
    """The decoder also sees the mean of the inputs of its own example, in any order of columns."""
    ids, memory = batch["targets_segment_ids"], batch["inputs_segment_ids"]
    table = gather_table(params["table"])
    x = table[batch["decoder_inputs"]]
    x = x + attend(ids, batch["targets_positions"], x)
    sees = (ids[:, :, None] == memory[:, None]) & (ids[:, :, None] > 0)
    read = jnp.einsum("bqk,bkd->bqd", sees.astype(x.dtype), table[batch["inputs"]])
    nll = optax.softmax_cross_entropy_with_integer_labels(
        (x + read) @ params["table"].T, batch["targets"]
    )
    return (nll * batch["loss_weights"]).sum(), batch["loss_weights"].sum()


def train(data, buckets, sharding=None, order="contiguous", *, of=loss, parts=1, steps=10):
    """The losses of some steps, those of segments, and the parameters after them."""
    init, step = make_train_step(of, optax.adam(0.01), most_segments=40, sharding=sharding)
    state = begin(init, getattr(sharding, "mesh", None))
    options = {"donate": True, "microbatches": parts}
    if sharding is not None:
        options["out_shardings"] = shardings_of(state), None
    plan = Plan(data, buckets, overflow="truncate")
    with Loader(Batches(data, plan, sharding=sharding, context_order=order).repeat()) as loader:
        program = Compiled(step, state, loader.specs, **options)
        losses, used = [], set()
        for _ in range(steps):
            state, values = program(state, next(loader))
            used.add(loader.planned.bucket.rows)
            losses.append((float(values["loss"]), np.asarray(values["segments"])))
    return losses, np.asarray(state["params"]["table"]), used


@pytest.fixture(scope="module")
def alone(text):
    """The text trained on one device."""
    return train(text, BUCKETS)


def require_equal(found, expected):
    assert found[2] == expected[2]
    assert len(expected[2]) > 1  # several meshes
    for (one, segments), (other, due) in zip(found[0], expected[0], strict=True):
        assert one == pytest.approx(other, abs=1e-5)
        np.testing.assert_allclose(segments, due, rtol=1e-6, atol=1e-4)
    np.testing.assert_allclose(found[1], expected[1], atol=1e-5)


def test_the_mesh_of_a_bucket_divides_its_rows_as_little_as_their_number_allows():
    for axes, rows, shape in (
        ({"data": 2, "fsdp": 2}, 8, {"data": 2, "fsdp": 2}),
        ({"data": 2, "fsdp": 2}, 2, {"data": 2, "fsdp": 1, "context": 2}),
        ({"data": 2, "fsdp": 2}, 1, {"data": 1, "fsdp": 1, "context": 4}),
        ({"data": 4}, 6, {"data": 2, "context": 2}),
        ({"fsdp": 2, "tensor": 2}, 3, {"fsdp": 1, "context": 2, "tensor": 2}),
        ({"tensor": 2, "data": 2}, 1, {"tensor": 2, "data": 1, "context": 2}),
    ):
        mesh = mesh_of(**axes)
        sharding = DynamicContext(mesh).of(rows)
        assert dict(sharding.mesh.shape) == shape
        assert sharding.mesh.devices.ravel().tolist() == mesh.devices.ravel().tolist()
    assert DynamicContext(mesh_of(data=4)).of(4).mesh == mesh_of(data=4)
    least = DynamicContext(mesh_of(data=4), least=2, most=2)
    assert [least.degree(rows) for rows in (2, 4, 8)] == [2, 2, 2]
    assert multiples(least, "zigzag") == (2, 4)
    # 3 devices of 4 never share a row.
    assert multiples(DynamicContext(mesh_of(data=4), most=3), "contiguous") == (2, 2)


@pytest.mark.parametrize(
    ("mesh", "order"), [*zip(MESHES, (*CONTEXT_ORDERS, "zigzag"), strict=True)]
)
def test_losses_gradients_and_segments_are_those_of_one_device(text, alone, mesh, order):
    sharding = DynamicContext(mesh_of(**MESHES[mesh]))
    require_equal(train(text, BUCKETS, sharding, order), alone)


def test_a_row_may_be_divided_beside_heads(text):
    buckets = (Bucket(4, 32), Bucket(2, 64), Bucket(1, 128))
    sharding = DynamicContext(mesh_of(fsdp=2, tensor=2))
    require_equal(train(text, buckets, sharding, "striped"), train(text, buckets))


def test_microbatches_are_parts_of_each_devices_rows():
    rng = np.random.default_rng(0)
    text, buckets = Examples(tokens(rng, draw(rng, longest=64))), (Bucket(16, 16), Bucket(4, 64))
    sharding = DynamicContext(mesh_of(fsdp=4), least=2)  # 8 and 2 rows on each pair of devices
    found = train(text, buckets, sharding, "zigzag", parts=2)
    require_equal(found, train(text, buckets))


def test_pairs_and_groups_are_divided_too():
    rng = np.random.default_rng(0)
    sizes = draw(rng, longest=64)
    both = pipeline.Pairs(
        Examples(tokens(rng, sizes), task=pipeline.corpus.INPUTS),
        Examples(tokens(rng, np.maximum(sizes // 2, 2)), task=pipeline.corpus.TARGETS),
    )
    buckets = Bucket(4, (32, 16)), Bucket(2, (64, 48))
    sharding = DynamicContext(mesh_of(data=2, fsdp=2))
    require_equal(
        train(both, buckets, sharding, "zigzag", of=loss_of_pairs),
        train(both, buckets, of=loss_of_pairs),
    )
    groups = Examples.from_groups(
        [
            (prefix, tokens(rng, (3, 5)))
            for prefix in tokens(rng, np.maximum(draw(rng, longest=112) - 8, 2))
        ]
    )
    require_equal(train(groups, BUCKETS, sharding), train(groups, BUCKETS))


def test_switches_compile_nothing_and_leave_the_state_in_its_place(text):
    mesh = mesh_of(data=2, fsdp=2)
    sharding = DynamicContext(mesh)
    init, step = make_train_step(loss, optax.adam(0.01), sharding=sharding)
    state = begin(init, mesh)

    def memory(state):
        return [
            shard.data.unsafe_buffer_pointer()
            for leaf in jax.tree.leaves(state)
            for shard in leaf.addressable_shards
        ]

    with Loader(Batches(text, Plan(text, BUCKETS), sharding=sharding).repeat()) as loader:
        with pytest.raises(ValueError, match="buckets have several meshes"):
            Compiled(step, state, loader.specs, donate=True)
        program = Compiled(
            step, state, loader.specs, donate=True, out_shardings=(shardings_of(state), None)
        )
        state, _ = program(state, next(loader))
        place, used = memory(state), []
        with CompileLog() as log, jax.transfer_guard("disallow"), jax.set_mesh(mesh):
            for _ in range(8):
                batch = next(loader)
                used.append(loader.planned.bucket)
                state, _ = program(state, batch)
                assert memory(state) == place
        assert log.names == []
        assert len({*used}) > 2


def test_a_step_of_ones_own_runs_on_the_mesh_of_each_batch(text, alone):
    mesh = mesh_of(data=2, fsdp=2)
    sharding = DynamicContext(mesh)
    init, step = make_train_step(loss, optax.adam(0.01), sharding=sharding)
    state = begin(init, mesh)
    own = on_batch_mesh(jax.jit(step, out_shardings=(shardings_of(state), None)))
    options = {"sharding": sharding, "buckets": BUCKETS, "context_order": "striped"}
    expected, _, _ = alone
    with CompileLog() as log, pipeline.load(text, **options) as loader:
        for due, _ in expected:
            state, values = own(state, next(loader))
            assert float(values["loss"]) == pytest.approx(due, abs=1e-5)
    used = {loader.plan.batch(at).bucket for at in range(len(expected))}
    assert log.names.count("jit(train_step)") == len(used)
    with pytest.raises(ValueError, match="no field of the batch, the last argument, is on a mesh"):
        own(state, {"inputs": np.zeros((2, 4), np.int32)})


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gradients", "switches", "resumes", "own_steps"])
def test_on_eight_devices_with_rows_on_one_two_four_and_all_of_them(name):
    flags = f"--xla_force_host_platform_device_count=8 {COMPILE_QUICKLY}"
    done = call(
        *(sys.executable, "-m", "tests.loading.eight_devices", name), XLA_FLAGS=flags, NPROC="16"
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_program_refuses_a_batch_of_the_same_shape_on_another_mesh(text):
    """Zigzag rows on the base mesh would have other losses, and nothing inside a step can tell."""
    sharding = DynamicContext(mesh_of(data=4))
    plan = Plan(text, BUCKETS[-1:])
    on_bucket = Batches(text, plan, sharding=sharding, context_order="zigzag")
    init, step = make_train_step(loss, optax.sgd(0.1), sharding=sharding)
    state = begin(init, sharding.mesh)
    program = Compiled(step, state, on_bucket.specs, out_shardings=(shardings_of(state), None))
    batch = pipeline.to_global(on_bucket[0], sharding, bucket=BUCKETS[-1])
    program(state, batch)
    whole = NamedSharding(sharding.mesh, PartitionSpec())
    moved = {name: jax.device_put(np.asarray(field), whole) for name, field in batch.items()}
    with pytest.raises(ValueError, match=r"is on the mesh {'data': 4}, and the program of"):
        program(state, moved)


def test_a_state_on_the_devices_in_another_order_is_refused(text):
    sharding = DynamicContext(mesh_of(data=4))
    init, step = make_train_step(loss, optax.sgd(0.1), sharding=sharding)
    state = begin(init, mesh_of(data=4, order=(1, 0, 2, 3)))
    specs = Batches(text, Plan(text, BUCKETS), sharding=sharding).specs
    with pytest.raises(ValueError, match=r"in the order \[1, 0, 2, 3\], and batches of"):
        Compiled(step, state, specs, out_shardings=(shardings_of(state), None))


def test_a_run_continues_on_other_numbers_of_devices_with_the_same_tokens(text):
    """Buckets need not be multiples of the devices, so fewer or more of them take the same plan."""
    options, rows = {"buckets": BUCKETS, "num_epochs": 1}, []
    with pipeline.load(text, **options) as loader:
        expected = [np.asarray(batch["inputs"]) for batch in loader]
    state = None
    for devices, order in ((4, "striped"), (2, "zigzag"), (1, "contiguous"), (4, "contiguous")):
        sharding = DynamicContext(mesh_of(fsdp=devices))
        with pipeline.load(text, sharding=sharding, context_order=order, **options) as loader:
            if state is not None:
                loader.set_state(json.loads(json.dumps(state)))
            end = len(loader) if order == "contiguous" and devices == 4 else loader.step + 3
            while loader.step < end:
                batch = next(loader)
                tokens = np.asarray(batch["inputs"])
                if "inputs_columns" in batch:
                    tokens = tokens[:, np.argsort(np.asarray(batch["inputs_columns"])[0])]
                rows.append(tokens)
            state = loader.get_state()
    assert len(rows) == len(expected)
    for found, due in zip(rows, expected, strict=True):
        np.testing.assert_array_equal(found, due)


def test_pack_and_score_take_it_as_well(text, tmp_path):
    sharding = DynamicContext(mesh_of(data=4))
    buckets = BUCKETS[1], BUCKETS[3]
    plain = [np.asarray(batch["inputs"]) for _, batch in pipeline.pack(text, buckets)]
    packed = pipeline.pack(text, buckets, sharding=sharding)
    assert packed.specs[buckets[1]]["inputs"].sharding == sharding.of(1)
    for (planned, batch), due in zip(packed, plain, strict=True):
        assert batch["inputs"].sharding == sharding.of(planned.bucket.rows)
        np.testing.assert_array_equal(batch["inputs"], due)

    def step(batch):
        return {"token": batch["inputs"] * batch["inputs_positions"]}

    given = {"buckets": buckets, "per": "position"}
    alone = pipeline.score(text, step, directory=tmp_path / "one", **given)
    assert pipeline.score(
        text, step, directory=tmp_path / "four", sharding=sharding, **given
    ).equals(alone)


def explicit():
    return jax.make_mesh((4,), ("data",), axis_types=(AxisType.Explicit,))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: DynamicContext(explicit()), r"give jax\.sharding\.Mesh\(mesh\.devices"),
        (lambda: DynamicContext("data"), "mesh is 'data'"),
        (lambda: DynamicContext(mesh_of(tensor=4)), "needs 'data' or 'fsdp'"),
        (lambda: DynamicContext(mesh_of(data=2, context=2)), "and no 'context'"),
        (lambda: DynamicContext(mesh_of(data=4), least=0), "least is 0"),
        (lambda: DynamicContext(mesh_of(data=4), least=3, most=2), "most not below least"),
        (lambda: DynamicContext(mesh_of(data=4), most=8), "most is 8"),
        (lambda: DynamicContext(mesh_of(data=4), least=3, most=3), "raise most, or lower least"),
        (lambda: DynamicContext(mesh_of(data=4), most=2).of(1), "make its rows a multiple of 2"),
        (lambda: DynamicContext(mesh_of(fsdp=2, data=2)).of(1), "would not be neighbours"),
        (lambda: DynamicContext(mesh_of(data=2, tensor=2, fsdp=1)).of(1), None),
    ],
)
def test_what_has_no_mesh_for_a_bucket_is_refused(make, said):
    if said is None:
        assert make() is not None
        return
    with pytest.raises((ValueError, TypeError), match=said):
        make()


def test_explicit_axes_are_made_automatic_by_the_call_that_the_error_names():
    mesh = explicit()
    assert DynamicContext(Mesh(mesh.devices, mesh.axis_names)).degree(2) == 2


def test_a_length_is_a_multiple_of_its_degree(text):
    sharding = DynamicContext(mesh_of(data=4))
    for length, order, multiple in ((126, "contiguous", 4), (124, "zigzag", 8)):
        plan = Plan(text, [Bucket(4, 32), Bucket(1, length)], overflow="truncate")
        with pytest.raises(ValueError, match=f"a multiple of {multiple} "):
            Batches(text, plan, sharding=sharding, context_order=order)
    with pytest.raises(TypeError, match=r"to_global\(\) needs bucket="):
        pipeline.to_global({"inputs": np.zeros((4, 4), np.int32)}, sharding)


def test_rows_that_need_more_devices_than_others_would_are_warned_of(caplog):
    sharding = DynamicContext(mesh_of(fsdp=4))
    with caplog.at_level(logging.WARNING):
        sharding.of(3)
        sharding.of(3)
        sharding.of(12)
    assert len(caplog.messages) == 1
    assert "a bucket of 3 rows divides each over 4 of 4 devices" in caplog.text


def test_processes_share_rows_whole_or_not_at_all():
    class Device:
        def __init__(self, process_index):
            self.process_index = process_index

    def nested(processes, *shape):
        grid = np.array([Device(p) for p in processes]).reshape(shape)
        return functools.partial(_require_nested, grid, ["data", "context"])

    nested([0, 0, 1, 1], 2, 2)()  # a row in a process
    nested([0, 0, 1, 1], 1, 4)()  # a row over both
    with pytest.raises(ValueError, match="some devices of process 0 would share a row with other"):
        nested([0, 0, 0, 1, 1, 1], 3, 2)()


def test_fitted_rows_divide_the_devices_and_the_longest_may_fill_a_batch():
    rng = np.random.default_rng(0)
    long = np.exp(rng.uniform(np.log(2_000), np.log(16_384), 40)).astype(int)
    lengths = np.concatenate([[16_384], long, rng.integers(20, 900, 4_000)])
    options = {"tokens_per_batch": 16_384, "max_buckets": 4}
    with pytest.raises(ValueError, match="8 rows"):
        pipeline.fit_buckets(lengths, row_multiple=8, **options)
    buckets = pipeline.fit_buckets(lengths, devices=8, **options)
    assert buckets[-1] == Bucket(1, 16_384)
    for bucket in buckets:
        assert 8 % bucket.rows == 0 or bucket.rows % 8 == 0
    # Where the last bucket holds all rows, others are full, too.
    one = pipeline.fit_buckets(np.minimum(lengths, 1_000), devices=8, **options)
    assert all(0.85 < each.rows * each.length / 16_384 <= 1 for each in one)
    with pytest.raises(ValueError, match="devices=8 is no multiple of it"):
        pipeline.fit_buckets(lengths, devices=8, row_multiple=3, **options)
    sharding = DynamicContext(mesh_of(fsdp=4), most=2)
    texts = Examples([rng.integers(1, VOCABULARY, size) for size in lengths[:60] % 2_000 + 2])
    with pipeline.load(texts, sharding=sharding, tokens_per_batch=8_192) as loader:
        for bucket in loader.plan.buckets:
            assert bucket.rows % 2 == 0
            assert 4 % bucket.rows == 0 or bucket.rows % 4 == 0
