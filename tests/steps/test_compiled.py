import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from pipeline import Bucket
from pipeline.steps import Compiled
from pipeline.steps.compiled import keep_programs, programs_table
from pipeline.steps.microbatches import allowed, split, summed
from tests.meshes import mesh_of

WIDTH = 16


@pytest.fixture(scope="module")
def sharding():
    return NamedSharding(mesh_of(data=4), PartitionSpec("data"))


def specs_of(sharding, *shapes):
    return {
        Bucket(*shape): {
            "inputs": jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding),
            "loss_weights": jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding),
        }
        for shape in shapes
    }


def batch_of(sharding, shape):
    inputs = np.arange(np.prod(shape), dtype=np.int32).reshape(shape) % 50
    batch = {"inputs": inputs, "loss_weights": np.ones(shape, np.float32)}
    return jax.device_put(batch, sharding)


def loss(params, batch):
    hidden = jnp.tanh(params["table"][batch["inputs"]] @ params["out"])
    return (hidden.sum(-1) ** 2 * batch["loss_weights"]).sum(), batch["loss_weights"].sum()


@pytest.fixture(scope="module")
def params():
    table, out = jax.random.normal(jax.random.key(0), (2, 50, WIDTH))
    return {"table": table, "out": out[:WIDTH]}


def make_step(sharding):
    def step(params, batch, microbatches=1):
        differentiate = jax.value_and_grad(loss, has_aux=True)
        (total, weight), gradients = summed(
            differentiate, params, batch, microbatches=microbatches, sharding=sharding
        )
        return jax.tree.map(lambda p, g: p - 0.1 * g / weight, params, gradients), total / weight

    return step


def test_splitting_moves_no_row_to_another_device(sharding):
    batch = batch_of(sharding, (16, 24))
    run = jax.jit(lambda batch: split(batch, 2, sharding)).lower(batch).compile()
    text = run.as_text()
    for collective in ("all-to-all", "all-gather", "collective-permute", "all-reduce"):
        assert collective not in text
    rows = np.asarray(batch["inputs"]).reshape(4, 2, 2, 24)
    np.testing.assert_array_equal(run(batch)["inputs"], rows.swapaxes(0, 1).reshape(2, 8, 24))


def test_what_is_held_besides_counts_and_what_is_donated_counts_once(sharding, params):
    specs = specs_of(sharding, (8, 8))
    one = {"moment": jax.ShapeDtypeStruct((4, 100), jnp.float32, sharding=sharding)}
    options = {}, {"held": one}, {"donate": True}
    made = (Compiled(make_step(sharding), params, specs, **each) for each in options)
    free, held, donated = (each.programs[Bucket(8, 8)].memory for each in made)
    assert held - free == 400  # a quarter of it on each of four devices
    assert donated < free


def test_what_was_not_compiled_is_refused(sharding, params):
    step = Compiled(make_step(sharding), params, specs_of(sharding, (8, 8)))
    good = batch_of(sharding, (8, 8))
    whole = jax.device_put(good["inputs"], NamedSharding(sharding.mesh, PartitionSpec()))
    for batch, sentence in (
        (good | {"inputs": good["inputs"].astype(jnp.float32)}, "compiled with int32"),
        (good | {"inputs": whole}, "sharding"),
        (good | {"extra": good["inputs"]}, r"the shapes .*'extra': \(8, 8\)"),
        (batch_of(sharding, (4, 8)), r"'inputs': \(4, 8\).* buckets 8x8, and have"),
        ({"inputs": good["inputs"]}, "the fields inputs, loss_weights"),
    ):
        with pytest.raises((TypeError, ValueError), match=sentence):
            step(params, batch)


def test_auto_splits_only_the_bucket_that_is_over_the_budget(sharding, params, caplog):
    specs = specs_of(sharding, (32, 8), (32, 512))
    free = Compiled(make_step(sharding), params, specs, microbatches=1)
    short, long = (program.memory for program in free.programs.values())
    budget = (short + long) // 2
    caplog.set_level("INFO", "pipeline")
    step = Compiled(make_step(sharding), params, specs, microbatches="auto", budget=budget)
    first, second = step.programs.values()
    assert (first.microbatches, second.microbatches > 1) == (1, True)
    assert second.memory <= budget < long
    assert f"{second.microbatches}" in programs_table(step)
    assert "microbatches" in caplog.text


def test_auto_compiles_no_number_of_microbatches_that_cannot_fit(sharding, params, caplog):
    specs = specs_of(sharding, (96, 512))  # 24 rows on a device: 1, 2, 3, 4, 6, 8, 12 or 24 parts
    (whole,) = Compiled(make_step(sharding), params, specs, microbatches=1).programs.values()
    caplog.set_level("INFO", "pipeline")
    budget = whole.memory // 5
    step = Compiled(make_step(sharding), params, specs, microbatches="auto", budget=budget)
    (program,) = step.programs.values()
    assert program.memory <= budget
    split = [int(number) for number in re.findall(r"in (\d+) microbatches: compiled", caplog.text)]
    assert split == [each for each in (6, 8, 12, 24) if each <= program.microbatches]


def test_a_budget_that_nothing_meets_is_refused_with_a_sentence(sharding, params):
    specs = specs_of(sharding, (8, 64))
    with pytest.raises(MemoryError, match=r"bucket 8x64 in 2 microbatches, and there are 0\.0 MiB"):
        Compiled(make_step(sharding), params, specs, microbatches="auto", budget=1000)


def test_microbatches_that_do_not_divide_are_refused(sharding, params):
    assert allowed(24, sharding) == [1, 2, 3, 6]
    with pytest.raises(ValueError, match=r"24 rows, .* must be one of 1, 2, 3, 6"):
        Compiled(make_step(sharding), params, specs_of(sharding, (24, 8)), microbatches=4)


def test_a_state_on_several_devices_is_refused_for_batches_on_one(sharding, params):
    one = NamedSharding(mesh_of(data=1), PartitionSpec("data"))
    with jax.set_mesh(sharding.mesh):
        state = jax.tree.map(jnp.zeros_like, jax.device_put(params, PartitionSpec()))
        with pytest.raises(ValueError, match=r"on 4 devices, .* on one; load them with sharding="):
            Compiled(make_step(None), state, specs_of(one, (8, 8)))
        Compiled(make_step(sharding), state, specs_of(sharding, (8, 8)))
        Compiled(
            make_step(None), jax.device_put(params, one.mesh.devices[0]), specs_of(one, (8, 8))
        )


@pytest.mark.parametrize("known", ["arrays", "shapes"])
@pytest.mark.parametrize("same", ["leaf", "memory"])
def test_a_donated_state_that_holds_an_array_twice_is_refused_before_a_step(sharding, same, known):
    def step(state, batch):
        return jax.tree.map(lambda leaf: leaf + batch["loss_weights"].sum(), state)

    where = NamedSharding(sharding.mesh, PartitionSpec())
    params = jax.device_put({"a": jnp.ones(3), "none": jnp.zeros(0)}, where)
    again = params["a"]
    if same == "memory":  # another object for the same memory
        again = jax.make_array_from_single_device_arrays(
            (3,), where, [shard.data for shard in again.addressable_shards]
        )
    state = {"params": params, "average": {"a": again, "none": params["none"]}}
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), state)
    specs, batch = specs_of(sharding, (8, 8)), batch_of(sharding, (8, 8))
    told = r"state\['params'\]\['a'\] is the same array as state\['average'\]\['a'\].* a copy"
    with pytest.raises(ValueError, match=told):
        Compiled(step, state if known == "arrays" else like, specs, donate=True)(state, batch)
    state["average"] = jax.tree.map(jnp.copy, params)
    donating = Compiled(step, state, specs, donate=True)
    for _ in range(2):
        state = donating(state, batch)
    assert float(state["average"]["a"][0]) == 1 + 2 * 64


@pytest.mark.parametrize("told", [None, "theirs"])
@pytest.mark.parametrize("directory", ["runs/programs", "s3://bucket/run/programs"])
def test_programs_are_kept_where_jax_can_read_them(directory, told, monkeypatch):
    updates = {}
    monkeypatch.setattr(type(jax.config), "jax_compilation_cache_dir", told)
    monkeypatch.setattr(type(jax.config), "update", lambda _, name, to: updates.update({name: to}))
    keep_programs(directory)
    local = None if told or "://" in directory else directory
    assert updates.get("jax_compilation_cache_dir") == local
