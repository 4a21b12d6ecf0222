"""The loss in chunks: that of all logits at once, with its gradients, in less memory."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import loss
from models.loss import chunked_cross_entropy, cross_entropy
from pipeline.steps.segments import position_losses
from tests.meshes import mesh_of

ROWS, LENGTH, WIDTH, VOCABULARY = 4, 24, 8, 64


def project(table, hidden):
    return jnp.einsum("BLD,VD->BLV", hidden, table, preferred_element_type=jnp.float32)


def problem(dtype):
    rng = np.random.default_rng(0)
    params = {
        "hidden": jnp.asarray(2 * rng.normal(size=(ROWS, LENGTH, WIDTH)), dtype),
        "table": jnp.asarray(rng.normal(size=(VOCABULARY, WIDTH)), dtype),
    }
    batch = {
        "targets": rng.integers(0, VOCABULARY, (ROWS, LENGTH)),
        "loss_weights": np.float32(rng.integers(0, 3, (ROWS, LENGTH)) / 2),
    }
    return params, jax.tree.map(jnp.asarray, batch)


def values(chunks):
    """A function of parameters and a batch: losses of positions, and gradients of the sum."""

    def of_batch(params, batch):
        def logits(hidden):
            return project(params["table"], hidden)

        fields = batch["targets"], batch["loss_weights"]
        if chunks == "whole":
            return cross_entropy(logits(params["hidden"]), *fields)
        return chunked_cross_entropy(params["hidden"], logits, *fields, chunks)

    def with_positions(params, batch):
        value, weight, positions = position_losses(of_batch, params, batch)
        return value, (weight, positions)

    return jax.jit(jax.value_and_grad(with_positions, has_aux=True))


def assert_close(found, expected, tolerance):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        a, b = (np.asarray(x, np.float32) for x in (a, b))
        assert a.shape == b.shape
        assert np.abs(a - b).max() <= tolerance * np.abs(b).max()


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-6), ("bfloat16", 2e-2)])
@pytest.mark.parametrize("chunks", [None, 1, 2, 8, 24])
def test_chunks_change_neither_losses_nor_gradients(chunks, dtype, tolerance):
    params, batch = problem(dtype)
    (found, of_positions), gradients = values(chunks)(params, batch)
    (expected, of_all), whole = values("whole")(params, batch)
    assert_close((found, of_positions), (expected, of_all), 1e-6)  # sums of float32
    assert_close(gradients, whole, tolerance)


@pytest.mark.parametrize(
    "axes", [{"context": 2, "tensor": 2}, {"data": 2, "context": 2}, {"fsdp": 4}]
)
def test_chunks_are_parts_of_what_each_device_holds(axes):
    params, batch = problem("float32")
    expected = values("whole")(params, batch)
    with jax.set_mesh(mesh_of(**axes)):
        rows = jax.P(tuple({"data", "fsdp"} & axes.keys()), *{"context"} & axes.keys())
        placed = jax.device_put((params, batch), jax.P())
        placed[0]["hidden"] = jax.device_put(params["hidden"], rows)
        placed[0]["table"] = jax.device_put(params["table"], jax.P(*{"tensor"} & axes.keys()))
        placed = placed[0], jax.device_put(batch, rows)
        program = values(3).lower(*placed).compile()
        assert_close(program(*placed), expected, 1e-6)
    parts = ROWS * LENGTH * VOCABULARY // np.prod([*axes.values()]) // 3
    sizes = {int(np.prod([int(n) for n in shape.split(",")])) for shape in _shapes(program)}
    assert max(sizes) <= max(parts, VOCABULARY * WIDTH)


def _shapes(program):
    return re.findall(r"f32\[([\d,]+)\]", program.as_text())


def test_large_logits_are_made_in_chunks_and_take_less_memory():
    def temporary(chunks, tokens, vocabulary):
        shapes = (1, tokens, 16), (vocabulary, 16), (1, tokens)
        hidden, table, fields = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
        params = {"hidden": hidden, "table": table}
        batch = {"targets": fields.update(dtype=jnp.int32), "loss_weights": fields}
        program = values(chunks).lower(params, batch).compile()
        return program.memory_analysis().temp_size_in_bytes

    assert 3.5 * temporary(None, 2048, 65_536) < temporary(1, 2048, 65_536)  # 512 MiB of logits
    assert temporary(None, 2048, 32_768) == temporary(1, 2048, 32_768)


@pytest.mark.parametrize(
    ("size", "length", "chunks"),
    [(2**29 - 1, 2048, 1), (2**29, 2048, 4), (2**29 + 1, 2048, 8), (2**29, 7, 7), (2**40, 64, 64)],
)
def test_chunks_divide_the_length_and_are_as_few_as_fit(size, length, chunks):
    assert loss._count_chunks(size, length) == chunks
