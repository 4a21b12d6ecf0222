"""Context parallelism: the order of columns, the cost of each part, and attention over them."""

import functools

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

import pipeline
from models.attention import make_attention
from pipeline import Bucket, Plan
from pipeline.loading.sharding import CONTEXT_ORDERS, batch_sharding, column_order
from tests.meshes import mesh_of
from tests.properties.accounts import batches_of


@pytest.fixture(autouse=True, scope="module")
def _quickly_compiled():
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def test_lengths_divide_or_are_refused_with_the_multiple_that_would_do(corpus):
    options = {"sharding": mesh_of(context=3), "context_order": "zigzag"}
    with pipeline.load(corpus, tokens_per_batch=1024, **options) as loader:
        assert [bucket.length for bucket in loader.plan.buckets] == [384]
        assert len(next(loader)["inputs"].addressable_shards) == 3
    with pytest.raises(ValueError, match=r"zigzag order; .* a multiple of 6 \(fit_buckets: len"):
        pipeline.load(corpus, buckets=[Bucket(2, 64)], **options)


def cost_over_ideal(lengths, length, parts, order):
    """The cost of the costliest part of a row over the mean of its parts, over all rows."""
    costs, columns = [], column_order(order, length, parts)
    for row in batches_of(Plan(lengths, [Bucket(1, length)])):
        keys = np.concatenate([np.arange(1, size + 1) for size in row.segments[:, 3]])
        keys = np.pad(keys, (0, length - len(keys)))[columns]
        costs.append(keys.reshape(parts, -1).sum(axis=1))
    return np.max(costs, axis=1).sum() / np.mean(costs, axis=1).sum()


def test_parts_of_a_row_cost_alike_where_contiguous_ones_do_not():
    whole = functools.partial(cost_over_ideal, [4096] * 8, 4096, 4)
    assert whole("contiguous") == pytest.approx(1.75, abs=0.01)
    assert whole("zigzag") == pytest.approx(1, abs=1e-3)
    lengths = np.clip(np.random.default_rng(0).lognormal(6, 1.3, 1000), 1, 4096).astype(int)
    packed = functools.partial(cost_over_ideal, lengths, 4096, 4)
    assert packed("contiguous") == pytest.approx(1.55, abs=0.01)
    # Zigzag suits one segment; the halves of a packed row are of different ones.
    assert packed("zigzag") == pytest.approx(1.24, abs=0.01)
    assert packed("striped") < 1.002


def test_attention_compares_positions_where_the_mesh_divides_rows():
    mesh = mesh_of(data=1, context=4)
    ids = np.repeat([[1, 2, 3, 0], [1, 2, 3, 4]], [9, 27, 20, 8], axis=1)
    positions = np.tile(np.concatenate([np.arange(n) + 5 for n in (9, 27, 20, 8)]), (2, 1))
    rng = np.random.default_rng(0)
    q, k, v, g = (rng.normal(size=(2, 64, n, 8)).astype(np.float32) for n in (2, 1, 1, 2))

    @functools.partial(jax.jit, static_argnames="name")
    def attend(q, k, v, g, ids, positions, name):
        attention = make_attention(ids, positions=positions, window=20, implementation=name)
        out, pull_back = jax.vjp(attention, q, k, v)
        return out, *pull_back(g)

    expected = attend(q, k, v, g, ids, positions, "dense")
    sharding = batch_sharding(mesh)
    fields = {"inputs_segment_ids": ids, "inputs_positions": positions}
    mask = pipeline.attention_mask(fields)
    with jax.set_mesh(mesh):
        for order in CONTEXT_ORDERS:
            columns = column_order(order, 64, 4)
            moved = pipeline.attention_mask({name: x[:, columns] for name, x in fields.items()})
            np.testing.assert_array_equal(moved, mask[:, columns][:, :, columns])
            laid = [x[:, columns] for x in (q, k, v, g, ids, positions)]
            found = attend(*jax.device_put(laid, sharding), "blocked")
            assert found[0].sharding.is_equivalent_to(NamedSharding(mesh, sharding.spec), 4)
            for name, a, b in zip(("out", "dq", "dk", "dv"), found, expected, strict=True):
                np.testing.assert_allclose(a, b[:, columns], atol=1e-5, err_msg=f"{name}, {order}")
