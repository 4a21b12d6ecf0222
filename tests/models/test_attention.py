"""Attention: every implementation against the dense one, and no leak between segments."""

import logging
import re
import types
from functools import partial, wraps

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo

from models import attention, blocked, nvidia, splash
from models.attention import choose, make_attention
from models.splash import splash_available
from models.visibility import Visibility, by_segment, causal_until, segment_ends
from pipeline.loading.sharding import column_order
from tests.meshes import mesh_of
from tests.processes import ROOT

ORDERS = [(True, None), (False, None), (True, 7), (False, 7)]  # causal, window


def needs(name, there, reason):
    return pytest.param(name, marks=pytest.mark.skipif(not there, reason=reason))


# Splash is interpreted here: tokamax's, and JAX's own. Tokamax for GPUs is computed by XLA.
TOKAMAX, GPU = "tokamax is not installed", "cuDNN needs a GPU of NVIDIA"
SPLASH = [needs("splash", splash_available(), TOKAMAX), "own splash"]
KERNELS = [*SPLASH, needs("tokamax", splash_available(), TOKAMAX)]
CUDNN = needs("cudnn", jax.default_backend() == "gpu", GPU)
FAST = ["blocked", CUDNN, *KERNELS]


@pytest.fixture(autouse=True)
def kernels(monkeypatch, request):
    """Makes kernels run on a CPU, and names of tests choose JAX's own splash."""
    monkeypatch.setattr(attention, "find_flaw", lambda name: "")
    asked = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    if "own splash" in asked.values():
        monkeypatch.setattr(splash, "splash_available", lambda: False)
    value_and_gradients.clear_cache()


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
def value_and_gradients(q, k, v, g, q_ids, kv_ids, _blocks=None, *, implementation, **options):
    options["implementation"] = implementation.removeprefix("own ")
    attend = make_attention(q_ids, kv_segment_ids=kv_ids, dtype=q.dtype, **options)
    out, pull_back = jax.vjp(attend, q, k, v)
    return out, *pull_back(g)


@partial(jax.jit, static_argnames=("causal", "window"))
def dense(*arrays, **options):
    """The same of dense attention, which no test changes: traced once for all of them."""
    return value_and_gradients.__wrapped__(*arrays, implementation="dense", **options)


def assert_equals_dense(
    name, q_ids, kv_ids=None, dtype="float32", tolerance=1e-5, heads=4, _blocks=None, **order
):
    inputs = arrays(q_ids, q_ids if kv_ids is None else kv_ids, heads=heads, dtype=dtype)
    exact = [np.asarray(x, np.float32) for x in inputs]
    due = dense(*exact, q_ids, kv_ids, **order)
    order |= {"implementation": name, "_blocks": _blocks}
    found = value_and_gradients(*inputs, q_ids, kv_ids, **order)
    assert found[0].dtype == jnp.dtype(dtype)
    for what, a, b in zip(("output", "dq", "dk", "dv"), found, due, strict=True):
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
@pytest.mark.parametrize("implementation", [CUDNN, *KERNELS])
def test_kernels_equal_dense(implementation, causal, window):
    ids = packed_ids(150, np.random.default_rng(1))
    assert_equals_dense(implementation, ids, causal=causal, window=window)


@pytest.mark.skipif(not splash_available(), reason=TOKAMAX)
@pytest.mark.parametrize(("causal", "window"), ORDERS)
def test_tokamax_is_told_that_order_is_causal(causal, window, monkeypatch):
    """Its backward pass leaves out later tiles then, and not for ends that say the same."""
    from tokamax._src.ops.attention import api

    masks, kernel = [], api.IMPLEMENTATIONS["xla"]

    def attend(q, k, v, *, mask):
        masks.append(mask)
        return kernel(q, k, v, mask=mask)

    monkeypatch.setattr(api, "IMPLEMENTATIONS", {"xla": attend})
    ids = packed_ids(90, np.random.default_rng(1))
    assert_equals_dense("tokamax", ids, causal=causal, window=window)
    (mask,) = masks
    assert (mask.is_causal, mask.k_end is None) == (causal, causal)


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
    changed = [np.array(x) for x in inputs]
    for x in changed:
        x[0, ~elsewhere] = rng.normal(size=x[0, ~elsewhere].shape)
    before = value_and_gradients(*inputs, ids, None, implementation=implementation)
    after = value_and_gradients(*changed, ids, None, implementation=implementation)
    for a, b in zip(*map(jax.device_get, (before, after)), strict=True):
        np.testing.assert_array_equal(a[0, elsewhere], b[0, elsewhere])
        assert (a[0, ~elsewhere] != b[0, ~elsewhere]).any()


@pytest.mark.parametrize("adjoining", [False, True])
def test_work_grows_with_segments_not_with_the_square_of_the_row(adjoining):
    @partial(jax.jit, static_argnums=0)
    def needed(length):
        ids = jnp.arange(length)[None] // 100 + 1
        visible = by_segment(ids, ids) if adjoining else causal_until(segment_ends(ids))
        return blocked.needed_blocks(visible, adjoining=adjoining)[1].sum()

    def steps(length):
        return int(needed(length))

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


# ---- Kernels where rows are divided, and what cuDNN is asked for.


@pytest.fixture
def xla_for_cudnn(monkeypatch):
    """XLA computes what cuDNN is asked for: its arguments are tested, not its kernel."""
    attend = jax.nn.dot_product_attention

    def by_xla(*arrays, implementation, **options):
        return attend(*arrays, **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", by_xla)


@pytest.mark.parametrize(("causal", "window"), ORDERS)
@pytest.mark.parametrize("axes", [{"data": 1}, {"data": 2, "tensor": 2}])
def test_cudnn_gets_the_mask_of_what_each_device_holds(axes, causal, window, xla_for_cudnn):
    ids = packed_ids(40, np.random.default_rng(1))
    with jax.set_mesh(mesh_of(**axes)):
        assert_equals_dense("cudnn", ids, causal=causal, window=window)


@pytest.mark.parametrize(
    ("order", "causal", "window"),
    [
        ("contiguous", True, None),
        ("zigzag", True, 20),
        ("striped", True, None),
        ("striped", False, None),
    ],
)
@pytest.mark.parametrize(
    "implementation",
    ["blocked", "own splash", "cudnn", needs("tokamax", splash_available(), TOKAMAX)],
)
def test_parts_of_queries_see_the_keys_of_whole_rows(
    implementation, order, causal, window, xla_for_cudnn
):
    ids = packed_ids(264, np.random.default_rng(1))
    inputs = arrays(ids, ids)
    options = {"causal": causal, "window": window}
    expected = dense(*inputs, ids, None, **options)
    columns = column_order(order, 264, 2)
    positions = np.broadcast_to(np.arange(264), ids.shape)[:, columns]
    with jax.set_mesh(mesh_of(data=2, context=2)):
        moved = jax.device_put([x[:, columns] for x in inputs], jax.P("data", "context"))
        found = value_and_gradients(
            *moved, ids[:, columns], None, positions=positions, implementation=implementation,
            **options,
        )  # fmt: skip
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, np.asarray(b)[:, columns], atol=2e-5)


@pytest.mark.parametrize("implementation", ["own splash", "cudnn"])
def test_groups_stay_groups_where_rows_are_divided(implementation, xla_for_cudnn):
    until = np.array([[6, 6, 4, 4, 6, 6, 9, 9, 9, 0, 0, 0]], np.int32)
    ids = np.int32(until > 0) + (until > 6)
    inputs = arrays(ids, ids)

    def run(implementation):
        value_and_gradients.clear_cache()
        return value_and_gradients(
            *inputs, ids, None, visible_until=until, implementation=implementation
        )

    expected = run("dense")
    with jax.set_mesh(mesh_of(context=2)):
        found = run(implementation)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


# ---- cuDNN's packed layout, by its definition.


@jax.custom_vjp
def _leave(x, written):
    return jnp.where(written, x, jnp.nan)


_leave.defvjp(
    lambda x, written: (_leave(x, written), written),
    lambda written, g: (jnp.where(written, jnp.where(written, g, 0), jnp.nan), None),
)


class Packed(types.SimpleNamespace):
    """What cuDNN's packed layout is said to compute; NaN where nothing is written.

    A row follows the row before it. The offsets of all rows that are not negative are paired, in
    order, with the sizes that are not negative. Each pair is a segment, which attends to itself.
    """

    class MaskType:
        PADDING, PADDING_CAUSAL = "padding", "padding and causal"

    @staticmethod
    def dot_product_attention(
        q, k, v, *, q_seqlen, kv_seqlen, q_offsets, kv_offsets, scale, mask_type,
        sliding_window_length=None,
    ):  # fmt: skip
        B, L, N, _ = q.shape
        S, places = k.shape[1], q_seqlen.shape[1]
        assert k.shape[2] == N  # or some versions read other heads
        assert places > 1  # or it is another layout
        assert q_offsets.shape == kv_offsets.shape == (B, places + 1)
        assert {x.dtype for x in (q_seqlen, kv_seqlen, q_offsets, kv_offsets)} == {
            jnp.dtype("int32")
        }
        causal = mask_type == Packed.MaskType.PADDING_CAUSAL
        assert sliding_window_length is None or causal
        q_sizes, kv_sizes = _in_line(q_seqlen, 0, 0), _in_line(kv_seqlen, 0, 0)
        q_begins, kv_begins = _in_line(q_offsets, L, B * L), _in_line(kv_offsets, S, B * S)
        rows, columns = jnp.arange(B * L), jnp.arange(B * S)
        seen, own = jnp.zeros((B * L, B * S), bool), jnp.zeros(B * L, bool)
        others = jnp.zeros(B * S, bool)
        for place in range(B * places):
            at, to = q_begins[place], kv_begins[place]
            q_in = (rows >= at) & (rows < at + q_sizes[place])
            k_in = (columns >= to) & (columns < to + kv_sizes[place])
            distance = (rows - at)[:, None] - (columns - to)
            near = distance < (sliding_window_length or B * (L + S))
            seen |= q_in[:, None] & k_in & near & ((distance >= 0) | (not causal))
            own, others = own | q_in, others | k_in
        q, k, v = (x.reshape(-1, N, x.shape[-1]) for x in (q, k, v))
        q = _leave(q, own[:, None, None])
        k, v = (_leave(x, others[:, None, None]) for x in (k, v))
        q, k, v = (jnp.nan_to_num(x) for x in (q, k, v))
        scores = jnp.einsum("LNK,SNK->NLS", q, k) * scale
        weights = jax.nn.softmax(jnp.where(seen, scores, -1e30), axis=-1)
        weights = jnp.where(seen, weights, 0)
        out = jnp.einsum("NLS,SNK->LNK", weights, v)
        return jnp.where(own[:, None, None], out, jnp.nan).reshape(B, L, N, -1)


def _in_line(x, length, rest):
    """All entries that are not negative, counted over rows of a length, then `rest`."""
    moved = jnp.where(x < 0, x, x + length * jnp.arange(len(x))[:, None]).ravel()
    return jnp.where(jnp.sort(moved < 0), rest, moved[jnp.argsort(moved < 0, stable=True)])


def offsets_of(ids, most):
    """Of rows with ids 1, 2, … in order."""
    rows = []
    for row in ids:
        begins = [int(np.flatnonzero(row == s)[0]) for s in range(1, row.max(initial=0) + 1)]
        end = int(np.flatnonzero(row)[-1]) + 1 if begins else 0
        rows.append([*begins, *[end] * (most + 1 - len(begins))])
    return np.array(rows, np.int32)


PACKED = {
    "packed": [
        [1] * 9 + [2] * 7 + [3] * 4,
        [1] * 3 + [2] * 10 + [0] * 7,
        [0] * 20,
        [1] * 5 + [0] * 3 + [2] * 8 + [3] * 2 + [0] * 2,  # padding after each segment
    ],
    "one segment": [[1] * 20, [1] * 12 + [0] * 8],
}


@pytest.mark.parametrize(("causal", "window"), [(True, None), (False, None), (True, 4)])
@pytest.mark.parametrize("rows", PACKED)
@pytest.mark.parametrize("axes", [{"data": 1}, {"tensor": 2}])
def test_offsets_ask_cudnn_for_each_segment_alone(axes, rows, causal, window, monkeypatch):
    monkeypatch.setattr(nvidia, "_fused_attention", lambda: Packed)
    ids = np.array(PACKED[rows], np.int32)
    offsets = offsets_of(ids, int(ids.max()))
    inputs, options = arrays(ids, ids), {"causal": causal, "window": window}
    expected = dense(*inputs, ids, None, **options)
    with jax.set_mesh(mesh_of(**axes)):
        found = value_and_gradients(
            *inputs, ids, None, segment_offsets=offsets, implementation="cudnn_packed", **options
        )
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
        assert (np.asarray(a)[ids == 0] == 0).all()


def test_offsets_of_both_sides_ask_for_pairs_of_segments(monkeypatch):
    monkeypatch.setattr(nvidia, "_fused_attention", lambda: Packed)
    q_ids = np.array([[1] * 4 + [2] * 3 + [3] * 3, [1] * 6 + [0] * 4], np.int32)
    kv_ids = np.array([[1] * 7 + [2] * 2 + [3] * 4 + [0], [1] * 3 + [0] * 11], np.int32)
    q_ids[0, 7:], kv_ids[0, :7] = 0, 0  # a segment without queries, and one without keys
    q_offsets = np.array([[0, 4, 7, 7], [0, 6, 6, 6]], np.int32)
    kv_offsets = np.array([[7, 7, 9, 13], [0, 3, 3, 3]], np.int32)
    inputs, options = arrays(q_ids, kv_ids), {"causal": False}
    expected = value_and_gradients(*inputs, q_ids, kv_ids, implementation="dense", **options)
    options |= {"segment_offsets": q_offsets, "kv_segment_offsets": kv_offsets}
    found = value_and_gradients(*inputs, q_ids, kv_ids, implementation="cudnn_packed", **options)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


# ---- The calls of docs/attention.md.

CALLS = [
    "The mask",
    "TPU: splash",
    needs("TPU: splash, by tokamax", splash_available(), TOKAMAX),
    "NVIDIA: cuDNN",
    needs("NVIDIA: tokamax", splash_available(), TOKAMAX),
    "Any device: blocks",
]


def function_of_page(name):
    """The function of a section of the page, or of its second block, if it is for tokamax."""
    page = (ROOT / "docs/attention.md").read_text()
    section = re.search(rf"^## {name.removesuffix(', by tokamax')}\n(.*?)^## ", page, re.S | re.M)
    blocks = re.findall(r"^```python\n(.*?)^```$", section[1], re.S | re.M)
    code, *_ = blocks[name.endswith("by tokamax")].split("\n\n\nnames = ")
    namespace = {}
    exec(code, namespace)
    return namespace["attend"]


@pytest.mark.parametrize("name", CALLS)
def test_the_calls_of_the_page_equal_a_mask_forward_and_backward(name, monkeypatch):
    monkeypatch.setattr(fused_attention_stablehlo, "MaskType", Packed.MaskType)
    monkeypatch.setattr(
        fused_attention_stablehlo, "dot_product_attention", Packed.dot_product_attention
    )
    ids = packed_ids(256, np.random.default_rng(11))[[0, 3]]
    q, k, v, g = arrays(ids, ids, width=64)
    real = (ids > 0)[..., None, None]
    g = jnp.where(real, g, 0)  # as with loss weights
    same, earlier = ids[:, :, None] == ids[:, None], np.tri(256, dtype=bool)
    mask = (same & earlier & (ids > 0)[:, None])[:, None]
    batch = {"inputs_segment_ids": ids, "inputs_positions": np.indices(ids.shape)[1]}
    inputs = [batch if name == "The mask" else jnp.asarray(ids)]
    if name == "NVIDIA: cuDNN":
        inputs.append(jnp.asarray(offsets_of(ids, int(ids.max()))))
    results = []
    for attend in (
        lambda *qkv: jax.nn.dot_product_attention(*qkv, mask=mask),
        lambda *qkv: function_of_page(name)(*qkv, *inputs),
    ):
        out, pull_back = jax.vjp(attend, q, k, v)
        results.append([jnp.where(real, out, 0), *(jnp.where(real, x, 0) for x in pull_back(g))])
    for expected, found in zip(*results, strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-4)


# ---- Programs for accelerators, made on this machine.


def lowered(attend, platform, kv_length, *shapes):
    """The program of outputs and gradients, for a platform that is not here."""
    spec = jax.ShapeDtypeStruct
    q = spec((2, 256, 4, 64), jnp.bfloat16)
    k = spec((2, kv_length, 2, 64), jnp.bfloat16)

    def step(q, k, v, g, *others):
        out, pull = jax.vjp(lambda *qkv: attend(*qkv, *others), q, k, v)
        return out, *pull(g)

    others = [spec(shape, jnp.int32) for shape in shapes]
    traced = jax.jit(step).trace(q, k, k, q, *others)
    return traced.lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize(("causal", "window"), [(True, None), (False, None), (True, 32)])
@pytest.mark.parametrize(("most", "places"), [(1, 2), (7, 7)])
def test_jax_makes_the_packed_program_that_is_asked_of_cudnn(
    most, places, causal, window, monkeypatch
):
    fused = nvidia._fused_attention()
    monkeypatch.setattr(fused, "check_cudnn_version", lambda: 91_000)
    monkeypatch.setattr(fused, "check_compute_capability", lambda capability: True)
    monkeypatch.setattr(fused, "is_cuda_compute_capability_equal", lambda capability: False)

    def attend(q, k, v, ids, offsets):
        return nvidia.packed_attention(q, k, v, ids, ids, offsets, offsets, causal, window)

    program = lowered(attend, "cuda", 256, (2, 256), (2, most + 1))
    calls = re.findall(r"@(__cudnn\$\w+)\(", program)
    assert sorted(calls) == ["__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"]
    said = program.replace("\\22", "'")
    for name, value in (
        ("mask_type", "'PADDING_CAUSAL'" if causal else "'PADDING'"),
        ("max_seg_per_batch", places),
        ("sliding_window_length", window or 0),
    ):
        assert said.count(f"'{name}': {value}") == 2, name
    assert not nvidia._find_flaw_of_version("cudnn_packed")


def test_jax_pairs_the_sizes_of_all_rows_with_their_offsets(monkeypatch):
    ids = np.array([*PACKED["packed"], *PACKED["one segment"]], np.int32)
    asked = {}

    def attend(q, k, v, **options):
        asked.update(options)
        return q

    fused = nvidia._fused_attention()
    monkeypatch.setattr(fused, "dot_product_attention", attend)
    q = jnp.ones((*ids.shape, 2, 8), jnp.bfloat16)
    both = jnp.asarray(offsets_of(ids, 3))
    nvidia.packed_attention(q, q, q, jnp.asarray(ids), jnp.asarray(ids), both, both, True, None)
    names = "q_seqlen", "kv_seqlen", "q_offsets", "kv_offsets"
    *sizes, starts, others = fused._fix_seqlen_offsets(*(asked[name] for name in names), q, q)
    line = ids.ravel()
    begins = np.flatnonzero((line > 0) & (np.diff(ids, axis=1, prepend=0).ravel() != 0))
    lengths = [np.count_nonzero(row == s) for row in ids for s in range(1, row.max() + 1)]
    for found in sizes:
        np.testing.assert_array_equal(found.ravel()[: len(lengths)], lengths)
        assert not found.ravel()[len(lengths) :].any()
    for found in (starts, others):  # in elements
        np.testing.assert_array_equal(found.ravel()[: len(begins)], begins * 2 * 8)
        assert (found.ravel()[len(begins) :] == ids.size * 2 * 8).all()


@pytest.mark.parametrize(("causal", "window"), ORDERS)
@pytest.mark.parametrize("implementation", SPLASH)
def test_splash_is_a_kernel_of_tpus_forward_and_backward(
    implementation, causal, window, monkeypatch
):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")

    def attend(q, k, v, ids):
        return splash.splash_attention(q, k, v, ids, ids, causal, window)

    assert lowered(attend, "tpu", 256, (2, 256)).count("@tpu_custom_call") >= 2


@pytest.mark.parametrize("implementation", SPLASH)
@pytest.mark.parametrize(
    "sizes", [{"fsdp": 2}, {"data": 2, "tensor": 2}, {"data": 2, "context": 2}, {"data": 4}]
)
def test_splash_is_lowered_for_tpus_on_any_mesh(sizes, implementation, monkeypatch):
    """A kernel needs all axes of the mesh to be manual: those of size 1, and without use, too."""
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")

    def attend(q, k, v, ids, positions):
        return make_attention(ids, positions=positions, implementation="splash")(q, k, v)

    axes = dict.fromkeys(("context", "data", "fsdp", "tensor"), 1) | sizes
    with jax.set_mesh(mesh_of(**axes)):
        program = lowered(attend, "tpu", 256, (2, 256), (2, 256))
    assert program.count("@tpu_custom_call") >= 2


def test_splash_of_parts_of_rows_is_a_kernel_of_tpus(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")

    def attend(q, k, v, *visible):
        return splash.splash_masked(q, k, v, Visibility(*visible))

    program = lowered(attend, "tpu", 512, (2, 256), (2, 512), (2, 512))
    assert program.count("@tpu_custom_call") >= 3


def test_the_comparison_finds_kernels_that_are_wrong_or_gone(monkeypatch):
    monkeypatch.setattr(nvidia, "_fused_attention", lambda: Packed)
    assert nvidia._compare("cudnn_packed") < nvidia.CLOSE

    class Wrong(Packed):
        @staticmethod
        @wraps(Packed.dot_product_attention)
        def dot_product_attention(q, k, v, **options):
            return Packed.dot_product_attention(q, k, v, **options | {"scale": 0.2})

    device = types.SimpleNamespace(compute_capability="9.0", device_kind="NVIDIA H100")
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    gone = types.SimpleNamespace(dot_product_attention=lambda query, key: None)
    find_flaw = nvidia.find_flaw.__wrapped__
    for there, said in ((Packed, ""), (Wrong, "differ from dense"), (gone, "does not take kv_o")):
        monkeypatch.setattr(nvidia, "_fused_attention", lambda there=there: there)
        flaw = find_flaw("cudnn_packed")
        assert said in flaw if said else not flaw, flaw
    device.compute_capability = "8.0"
    assert "needs a GPU of NVIDIA from Hopper on, and this is NVIDIA H100" in find_flaw("tokamax")


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("cudnn_packed", {}, "it needs segment_offsets"),
        ("cudnn_packed", {"window": 3, "causal": False}, "no window that sees both ways"),
        ("tokamax", {"visible_until": True}, "rows have groups"),
        ("tokamax", {"flaw": "tokamax is not installed"}, "tokamax is not installed"),
    ],
)
def test_a_kernel_that_cannot_be_used_is_replaced_and_a_warning_says_so_once(
    name, options, said, monkeypatch, caplog
):
    ids = packed_ids(40, np.random.default_rng(7))
    if "flaw" in options:
        monkeypatch.setattr(attention, "find_flaw", lambda name: said)
        options = {}
    if "window" in options:
        options = options | {"segment_offsets": offsets_of(ids[1:2], 20).repeat(4, axis=0)}
    if "visible_until" in options:
        options = {"visible_until": np.asarray(segment_ends(ids))}
    attention._say.cache_clear()
    inputs = arrays(ids, ids)
    found = value_and_gradients(*inputs, ids, None, implementation=name, **options)
    value_and_gradients.clear_cache()
    value_and_gradients(*inputs, ids, None, implementation=name, **options)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert f"{name!r} is not used: " in record.getMessage()
    assert said in record.getMessage()
    assert "; instead 'blocked', because on CPU" in record.getMessage()
    options.pop("segment_offsets", None)
    expected = value_and_gradients(*inputs, ids, None, implementation="dense", **options)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize(
    ("platform", "length", "chosen", "faster"),
    [
        ("gpu", 2048, "cudnn", "'cudnn_packed' skips other segments, 'tokamax' in the forward"),
        ("gpu", 32_768, "blocked", "benchmarks/accelerator.py measures them"),
        ("tpu", 2048, "splash", ""),
        ("tpu", 256, "dense", ""),
        ("cpu", 2048, "blocked", ""),
    ],
)
def test_auto_chooses_what_was_measured_and_names_what_may_be_faster(
    platform, length, chosen, faster, monkeypatch
):
    device = types.SimpleNamespace(compute_capability="9.0")
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    choice = choose(platform, jnp.dtype("bfloat16"), length, length)
    assert choice.implementation == chosen
    assert faster in choice.faster
    with jax.set_mesh(mesh_of(context=4)):
        under = attention._under_context(choice)
    if chosen in ("cudnn", "splash"):
        assert under[:2] == ("blocked", "rows are divided over 4 devices")
        assert "keep" in under.faster
    else:
        assert under == choice


def test_auto_says_once_what_it_chose(caplog):
    attention._say.cache_clear()
    ids = np.ones((1, 33), np.int32)
    q, k, v, _ = arrays(ids, ids)
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            jax.eval_shape(lambda: make_attention(ids)(q, k, v))
    assert caplog.text.count("attention: 'blocked', because on CPU it was faster") == 1
