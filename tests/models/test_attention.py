"""Attention: every implementation against the dense one, and no leak between segments."""

import logging
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import attention, blocked
from models.attention import make_attention
from models.splash import splash_available
from models.visibility import by_segment, causal_until, segment_ends
from tests.meshes import mesh_of

KERNELS = [  # interpreted here: meant for TPUs
    pytest.param(
        "splash",
        marks=pytest.mark.skipif(not splash_available(), reason="tokamax is not installed"),
    )
]
FAST = ["blocked", "cudnn", *KERNELS]
ORDERS = [(True, None), (False, None), (True, 7), (False, 7)]  # causal, window


@pytest.fixture(autouse=True)
def xla_for_cudnn(monkeypatch):
    """Without a GPU, XLA computes what cuDNN is asked for."""
    attention = jax.nn.dot_product_attention
    if jax.default_backend() == "cpu":
        monkeypatch.setattr(
            jax.nn,
            "dot_product_attention",
            lambda *arrays, implementation, **options: attention(*arrays, **options),
        )


def packed_ids(length, rng):
    """Rows of one segment, of many, of none, and of some and padding."""
    some = np.repeat(np.arange(1, 40), rng.integers(1, 30, 39))[: length - 5]
    rows = np.ones(length), np.arange(length) // 2 + 1, np.zeros(length)
    return np.stack([*rows, np.pad(some, (0, length - len(some)))]).astype(np.int32)


def arrays(q_ids, kv_ids, *, heads=4, kv_heads=2, width=16, dtype="float32", seed=0):
    """Queries, keys, values and a cotangent for the output."""
    rng = np.random.default_rng(seed)
    shapes = [(*ids.shape, n, width) for ids, n in
              [(q_ids, heads), (kv_ids, kv_heads), (kv_ids, kv_heads), (q_ids, heads)]]  # fmt: skip
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


@partial(jax.jit, static_argnames=("causal", "window", "implementation", "_blocks"))
def value_and_gradients(q, k, v, g, q_ids, kv_ids, _blocks=None, **options):
    attend = make_attention(q_ids, kv_segment_ids=kv_ids, dtype=q.dtype, **options)
    out, pull_back = jax.vjp(attend, q, k, v)
    return out, *pull_back(g)


def assert_equals_dense(
    name, q_ids, kv_ids=None, dtype="float32", tolerance=1e-5, heads=4, _blocks=None, **order
):
    inputs = arrays(q_ids, q_ids if kv_ids is None else kv_ids, heads=heads, dtype=dtype)
    exact = [np.asarray(x, np.float32) for x in inputs]
    dense = value_and_gradients(*exact, q_ids, kv_ids, **order, implementation="dense")
    order |= {"implementation": name, "_blocks": _blocks}
    found = value_and_gradients(*inputs, q_ids, kv_ids, **order)
    assert found[0].dtype == jnp.dtype(dtype)
    for what, a, b in zip(("output", "dq", "dk", "dv"), found, dense, strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        error = np.abs(a - b).max() / max(1, np.abs(b).max())
        assert error < tolerance, f"{what} is off by {error:.1e}"
    return found


@pytest.fixture(params=["rows in turn", "rows together"])
def small_blocks(request, monkeypatch):
    """Blocks of 16, so that short rows have many; the way of CPUs and that of accelerators."""
    monkeypatch.setattr(blocked, "_block", lambda length: min(length, 16))
    monkeypatch.setattr(blocked, "_on_cpu", lambda: request.param == "rows in turn")
    return request.param


@pytest.mark.parametrize(
    ("causal", "window", "dtype", "tolerance"),
    [(*order, "float32", 1e-5) for order in ORDERS]
    + [(True, None, "bfloat16", 1e-2), (False, 7, "bfloat16", 1e-2)],
)
def test_blocked_equals_dense(causal, window, dtype, tolerance, small_blocks):
    ids = packed_ids(83, np.random.default_rng(1))
    options = {"causal": causal, "window": window, "_blocks": small_blocks}
    assert_equals_dense("blocked", ids, None, dtype, tolerance, **options)


@pytest.mark.parametrize(("causal", "window"), ORDERS)
@pytest.mark.parametrize("implementation", ["cudnn", *KERNELS])
def test_kernels_equal_dense(implementation, causal, window):
    ids = packed_ids(150, np.random.default_rng(1))
    assert_equals_dense(implementation, ids, causal=causal, window=window)


@pytest.mark.parametrize("length", [1, 128, 300])
def test_blocked_equals_dense_with_its_own_block_size(length):
    ids = packed_ids(max(length, 6), np.random.default_rng(2))[:, :length]
    assert_equals_dense("blocked", ids, heads=2)  # as many as heads of keys


@pytest.mark.parametrize("implementation", ["dense", *FAST])
def test_cross_attention_equals_dense_and_is_zero_where_a_segment_has_no_keys(implementation):
    rng = np.random.default_rng(3)
    q_ids, kv_ids = packed_ids(70, rng), packed_ids(131, rng)
    q_ids[3], kv_ids[3] = q_ids[3][::-1], np.where(kv_ids[3] == 2, 99, kv_ids[3])
    out, dq, *_ = assert_equals_dense(implementation, q_ids, kv_ids, causal=False)
    if implementation in ("dense", "blocked"):
        for array in (out[3], dq[3]):
            assert (array[q_ids[3] == 2] == 0).all()
            assert (array[q_ids[3] == 1] != 0).any()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("implementation", ["dense", *FAST])
def test_padding_gives_zeros_and_no_gradient(implementation, dtype):
    ids = np.array([[1] * 9 + [2] * 5 + [0] * 6, [0] * 20], np.int32)
    found = value_and_gradients(
        *arrays(ids, ids, dtype=dtype), ids, None, implementation=implementation
    )
    for array in found:
        array = np.asarray(array, np.float32)
        assert np.isfinite(array).all()
        assert (array[ids == 0] == 0).all()
        assert (array[ids != 0] != 0).any()


@pytest.mark.parametrize("implementation", ["dense", *FAST])
def test_a_segment_changes_nothing_in_another(implementation):
    rng = np.random.default_rng(4)
    ids = np.repeat([1, 2, 3, 4, 0], [40, 3, 70, 30, 7])[None].astype(np.int32)
    inputs = arrays(ids, ids)
    elsewhere = ids[0] != 3
    changed = [x.at[0, ~elsewhere].set(rng.normal(size=x[0, ~elsewhere].shape)) for x in inputs]
    before = value_and_gradients(*inputs, ids, None, implementation=implementation)
    after = value_and_gradients(*changed, ids, None, implementation=implementation)
    for a, b in zip(before, after, strict=True):
        np.testing.assert_array_equal(a[0, elsewhere], b[0, elsewhere])
        assert (a[0, ~elsewhere] != b[0, ~elsewhere]).any()


@pytest.mark.parametrize("adjoining", [False, True])
def test_work_grows_with_segments_not_with_the_square_of_the_row(adjoining):
    def steps(length):
        ids = jnp.arange(length)[None] // 100 + 1
        visible = by_segment(ids, ids) if adjoining else causal_until(segment_ends(ids))
        return int(blocked.needed_blocks(visible, adjoining=adjoining)[1].sum())

    assert steps(4096) == pytest.approx(2 * steps(2048), rel=0.05)
    assert steps(4096) < 3 * 4096 / 128


def test_memory_of_blocked_is_a_fraction_of_dense():
    q, k, ids = (jax.ShapeDtypeStruct((1, 2048, n, 16), "float32") for n in (4, 2, 1))
    ids = jax.ShapeDtypeStruct((1, 2048), "int32")

    def temporary_bytes(implementation):
        lowered = value_and_gradients.lower(q, k, k, q, ids, None, implementation=implementation)
        return lowered.compile().memory_analysis().temp_size_in_bytes

    assert 50 * temporary_bytes("blocked") < temporary_bytes("dense")


@pytest.mark.parametrize(("causal", "window"), ORDERS)
def test_the_mask_is_its_definition_wherever_columns_are(causal, window):
    """Of rows in order, of rows in any order with their positions, and of until."""
    rng = np.random.default_rng(5)
    ids = packed_ids(40, rng)
    columns = np.arange(40)
    distance = columns[:, None] - columns
    expected = (ids[:, :, None] == ids[:, None]) & (ids > 0)[:, :, None]
    expected &= (distance >= 0) | (not causal)
    expected &= abs(distance) < (window or 40)
    options = {"causal": causal, "window": window}
    np.testing.assert_array_equal(by_segment(ids, ids, **options).mask(), expected)
    if causal:
        found = causal_until(segment_ends(ids), window).mask()
        np.testing.assert_array_equal(found, expected)
    order = rng.permutation(40)
    positions = np.broadcast_to(columns, ids.shape)[:, order]
    found = by_segment(ids[:, order], ids[:, order], positions, **options).mask()
    np.testing.assert_array_equal(found, expected[:, order][:, :, order])


@pytest.mark.parametrize(("key_heads", "here"), [(2, 1), (1, 1), (4, 1), (8, 2)])
def test_each_device_computes_its_heads_also_if_key_heads_are_few(key_heads, here, monkeypatch):
    ids = packed_ids(40, np.random.default_rng(6))
    inputs = arrays(ids, ids, heads=8, kv_heads=key_heads)
    expected = value_and_gradients(*inputs, ids, None, implementation="dense")
    shapes, attend = [], attention.blocked_attention

    def see(q, k, v, *ranges):
        shapes.append((q.shape[2], k.shape[2]))
        return attend(q, k, v, *ranges)

    monkeypatch.setattr(attention, "blocked_attention", see)
    with jax.set_mesh(mesh_of(tensor=4)):
        found = value_and_gradients(*inputs, ids, None, implementation="blocked")
    assert shapes == [(2, here)]
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_auto_says_once_what_it_chose(caplog):
    ids = np.ones((1, 33), np.int32)
    q, k, v, _ = arrays(ids, ids)
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            jax.eval_shape(lambda: make_attention(ids)(q, k, v))
    assert caplog.text.count("attention over rows of 33 × 33 positions: 'blocked', because") == 1
