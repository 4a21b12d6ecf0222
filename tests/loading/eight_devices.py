"""Rows divided over 8 simulated devices: `python -m tests.loading.eight_devices NAME` does one."""

import itertools
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import pipeline
from pipeline import Batches, Bucket, DynamicContext, Examples, Plan
from pipeline.loading.loader import Loader
from pipeline.loading.sharding import CONTEXT_ORDERS
from pipeline.steps import Compiled, CompileLog, make_train_step, on_batch_mesh
from tests.loading.small_model import VOCABULARY, begin, loss, shardings_of
from tests.meshes import mesh_of

# Of 1,024 positions; a row is on 1, 1, 2, 4 and 8 devices.
DEGREES = {
    Bucket(16, 64): 1,
    Bucket(8, 128): 1,
    Bucket(4, 256): 2,
    Bucket(2, 512): 4,
    Bucket(1, 1024): 8,
}
SPANS = (700, 1024, 4), (300, 500, 12), (140, 250, 24), (70, 120, 60), (2, 40, 400)


def draw():
    """Examples of which some need each bucket; many fit the shorter ones."""
    rng = np.random.default_rng(0)
    sizes = np.concatenate([rng.integers(low, high, count) for low, high, count in SPANS])
    return Examples([rng.integers(1, VOCABULARY, size) for size in sizes])


def two_of_each(plan):
    """The first two steps of each bucket."""
    steps = {bucket: [] for bucket in DEGREES}
    for step in range(plan.num_batches()):
        steps[plan.batch(step).bucket].append(step)
    assert all(len(some) > 1 for some in steps.values())
    return [step for some in steps.values() for step in some[:2]]


def mean_loss(params, batch):
    total, weight = loss(params, batch)
    return total / weight


def differentiate(params, batch):
    return jax.value_and_grad(mean_loss)(params, batch)


def gradients():
    """Losses and gradients are those of one device, in each bucket and order of columns."""
    text = draw()
    plan = Plan(text, DEGREES)
    steps = two_of_each(plan)

    def of(sharding=None, order="contiguous"):
        params = begin(lambda params: params, getattr(sharding, "mesh", None))
        batches = Batches(text, plan, sharding=sharding, context_order=order)
        options = {} if sharding is None else {"out_shardings": (None, shardings_of(params))}
        program, found = Compiled(differentiate, params, batches.specs, **options), []
        for step in steps:
            batch, bucket = batches[step], plan.batch(step).bucket
            if sharding is not None:
                batch = pipeline.to_global(batch, sharding, bucket=bucket)
            value, gradient = program(params, batch)
            found.append((float(value), np.asarray(gradient["table"])))
        return found

    sharding = DynamicContext(mesh_of(fsdp=8))
    assert [sharding.degree(bucket.rows) for bucket in DEGREES] == [*DEGREES.values()]
    expected = of()
    assert all(np.abs(gradient).max() > 1e-3 for _, gradient in expected)
    for order in CONTEXT_ORDERS:
        for (value, gradient), (due, wanted) in zip(of(sharding, order), expected, strict=True):
            np.testing.assert_allclose(value, due, rtol=1e-6)
            np.testing.assert_allclose(gradient, wanted, atol=1e-7)


def switches():
    """A switch compiles nothing, transfers nothing, and overwrites each leaf where it is."""

    def memory(state):
        return [
            shard.data.unsafe_buffer_pointer()
            for leaf in jax.tree.leaves(state)
            for shard in leaf.addressable_shards
        ]

    text = draw()
    for axes in ({"fsdp": 8}, {"data": 2, "fsdp": 2, "tensor": 2}):
        mesh = mesh_of(**axes)
        sharding = DynamicContext(mesh)
        init, step = make_train_step(loss, optax.adam(0.01), sharding=sharding)
        state = begin(init, mesh)
        with Loader(Batches(text, Plan(text, DEGREES), sharding=sharding)) as loader:
            options = {"donate": True, "out_shardings": (shardings_of(state), None)}
            program = Compiled(step, state, loader.specs, **options)
            state, _ = program(state, next(loader))
            place, placed, used = memory(state), shardings_of(state), []
            with CompileLog() as log, jax.transfer_guard("disallow"), jax.set_mesh(mesh):
                for batch in loader:
                    used.append(loader.planned.bucket)
                    before = jax.tree.leaves(state)
                    state, _ = program(state, batch)
                    assert all(leaf.is_deleted() for leaf in before)
                    assert memory(state) == place
                    assert shardings_of(state) == placed
            assert log.names == []
            assert {*used} == {*DEGREES}
            assert sum(one != other for one, other in itertools.pairwise(used)) > 8


def resumes():
    """A run on 8 devices continues on 4, then 2, with the tokens that one device would have."""
    text, rows, state = draw(), [], None
    options = {"buckets": [*DEGREES], "num_epochs": 1}
    with pipeline.load(text, **options) as loader:
        expected = [np.asarray(batch["inputs"]) for batch in loader]
    for devices, order in ((8, "striped"), (4, "zigzag"), (2, "contiguous")):
        sharding, used = DynamicContext(mesh_of(fsdp=devices)), set()
        with pipeline.load(text, sharding=sharding, context_order=order, **options) as loader:
            if state is not None:
                loader.set_state(json.loads(json.dumps(state)))
            end = len(expected) if devices == 2 else loader.step + len(expected) // 3
            while loader.step < end:
                batch = next(loader)
                used.add(batch["inputs"].sharding.mesh.shape.get("context", 1))
                tokens = np.asarray(batch["inputs"])
                if "inputs_columns" in batch:
                    tokens = tokens[:, np.argsort(np.asarray(batch["inputs_columns"])[0])]
                rows.append(tokens)
            state = loader.get_state()
        assert len(used) > 1
    for found, due in zip(rows, expected, strict=True):
        np.testing.assert_array_equal(found, due)


FIELDS = "inputs", "inputs_segment_ids", "inputs_positions", "targets", "loss_weights"


def attend_part(table, inputs, ids, positions, targets, weights, *, axes=(), context=False):
    """The sums of one device, which gathers the keys of its rows, over all devices."""
    x = table[inputs]

    def whole(part):
        return jax.lax.all_gather(part, "context", axis=1, tiled=True) if context else part

    sees = (ids[:, :, None] == whole(ids)[:, None]) & (ids[:, :, None] > 0)
    sees &= positions[:, :, None] >= whole(positions)[:, None]
    scores = jnp.einsum("bqd,bkd->bqk", x, whole(x))
    read = jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(jnp.where(sees, scores, -1e9)), whole(x))
    logits = (x + read) @ table.T
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    sums = (nll * weights).sum(), weights.sum()
    return jax.lax.psum(sums, axes) if axes else sums


def mapped_loss(params, batch):
    """The mean loss by a `jax.shard_map` over the mesh of the batch."""
    mesh, fields = jax.sharding.get_abstract_mesh(), [batch[name] for name in FIELDS]
    if mesh.empty:
        total, weight = attend_part(params["table"], *fields)
        return total / weight
    context = "context" in mesh.axis_names
    spec = PartitionSpec("fsdp", *["context"] * context)

    def part(*arguments):
        return attend_part(*arguments, axes=mesh.axis_names, context=context)

    specs = PartitionSpec(), *[spec] * len(fields)
    sums = jax.shard_map(part, in_specs=specs, out_specs=(PartitionSpec(), PartitionSpec()))
    total, weight = sums(params["table"], *fields)
    return total / weight


def descend(of):
    def step(params, batch):
        value, gradient = jax.value_and_grad(of)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.5 * g, params, gradient), value

    return step


def own_steps():
    """Steps of a user's `jax.jit`, `jax.shard_map` and `nnx.jit` have the losses of one device."""
    text, steps = draw(), 12
    options = {"buckets": [*DEGREES]}
    sharding = DynamicContext(mesh_of(fsdp=8))

    def run(step, state, **more):
        losses, used = [], set()
        with pipeline.load(text, **options, **more) as loader:
            for _ in range(steps):
                state, value = step(state, next(loader))
                losses.append(float(value))
                used.add(loader.planned.bucket)
        assert len(used) > 2
        return losses, len(used)

    class Table(nnx.Module):
        def __init__(self, table):
            self.table = nnx.Param(table)

    def through_nnx(model, batch):
        value, gradient = nnx.value_and_grad(
            lambda model: mean_loss({"table": model.table[...]}, batch)
        )(model)
        model.table[...] -= 0.5 * gradient.table[...]
        return value

    alone = begin(lambda params: params)
    expected = {of: run(jax.jit(descend(of)), alone)[0] for of in (mean_loss, mapped_loss)}
    more = {"sharding": sharding, "context_order": "zigzag"}
    for of, due in expected.items():
        params = begin(lambda params: params, sharding.mesh)
        options_of_jit = {"out_shardings": (shardings_of(params), None), "donate_argnums": 0}
        with CompileLog() as log:
            own = on_batch_mesh(jax.jit(descend(of), **options_of_jit))
            losses, used = run(own, params, **more)
        np.testing.assert_allclose(losses, due, rtol=1e-5)
        assert log.names.count("jit(step)") == used
    model = Table(begin(lambda params: params, sharding.mesh)["table"])
    split = NamedSharding(sharding.mesh, PartitionSpec(None, "fsdp"))
    shardings = nnx.StateSharding({nnx.Param: split}), None
    own = on_batch_mesh(nnx.jit(through_nnx, in_shardings=shardings))
    losses, _ = run(lambda model, batch: (model, own(model, batch)), model, **more)
    np.testing.assert_allclose(losses, expected[mean_loss], rtol=1e-5)
    assert model.table[...].sharding == split


if __name__ == "__main__":
    globals()[sys.argv[1]]()
