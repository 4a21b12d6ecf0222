"""Attention inside segments on NVIDIA GPUs: Pallas kernels that skip other segments.

The loops of `models/blocked.py`, a kernel for each gradient, lowered through Triton. They have been
run under Pallas's interpreter and lowered for CUDA, but not yet run or timed on a GPU, so "auto"
does not choose them: ask for `implementation="triton"`. JAX 0.12 warns that a later release drops
its Triton lowering; this file then goes, or moves to another one.

Shape letters are explained in `models/__init__.py`; besides, H is the query heads that share a key
head (N = G·H), Q and T are the positions of a block of queries and of a block of keys. Inside,
heads come before positions, and a kernel works on one row, one query head and one block.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from models.segments import block_reach, seen_from, visible

BLOCK = 64  # positions in a block, Q and T; a power of two, of at least 16 for the matrix units
NOTHING = -1e30  # below every score, yet finite: exp(NOTHING − NOTHING) is not NaN


@partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def triton_attention(
    q_BLNK: Array,
    k_BSGK: Array,
    v_BSGK: Array,
    q_ids_BL: Array,
    kv_ids_BS: Array,
    causal: bool,
    window: int | None,
) -> Array:
    """Return what `segment_attention` promises. Away from a GPU the kernels are interpreted: slow.

    Reverse-mode derivatives only.

    Raises:
        ValueError: if the width of a head is not a power of two of at least 16.
    """
    return _forward(q_BLNK, k_BSGK, v_BSGK, q_ids_BL, kv_ids_BS, causal, window)[0]


def _forward(q_BLNK, k_BSGK, v_BSGK, q_ids_BL, kv_ids_BS, causal, window):
    L, N, K = q_BLNK.shape[1:]
    if K < 16 or K & (K - 1):
        raise ValueError(
            f"heads are {K} wide; implementation 'triton' needs a power of two of at least 16. "
            f"Use 'blocked', or another number of heads."
        )
    q, k, v, q_ids, kv_ids = map(_arrange, (q_BLNK, k_BSGK, v_BSGK, q_ids_BL, kv_ids_BS))
    first, stop = block_reach(q_ids, kv_ids, block=BLOCK, causal=causal, window=window)
    out, lse = _run(
        partial(_forward_kernel, causal=causal, window=window),
        num_heads=N,
        own=(q, q_ids),
        whole=(k, v, kv_ids),
        ranges=(first // BLOCK, -(-stop // BLOCK)),
        outputs=(q, q[..., 0].astype(jnp.float32)),
    )
    saved = (q_BLNK, k_BSGK, v_BSGK, q_ids_BL, kv_ids_BS, out, lse)
    return out.swapaxes(1, 2)[:, :L], saved


def _backward(causal, window, saved, g_BLNK):
    *arrays, out, lse = saved
    L, N, K = arrays[0].shape[1:]
    B, S, G, _ = arrays[1].shape
    q, k, v, q_ids, kv_ids = map(_arrange, arrays)
    g = _arrange(g_BLNK)
    delta = jnp.sum(out.astype(jnp.float32) * g.astype(jnp.float32), axis=-1)
    options = {"causal": causal, "window": window}
    first, stop = block_reach(q_ids, kv_ids, block=BLOCK, **options)
    (dq,) = _run(
        partial(_query_gradient_kernel, **options),
        num_heads=N,
        own=(q, q_ids, lse, delta, g),
        whole=(k, v, kv_ids),
        ranges=(first // BLOCK, -(-stop // BLOCK)),
        outputs=(q,),
    )
    first, stop = block_reach(kv_ids, q_ids, block=BLOCK, reach=seen_from, **options)
    per_query_head = jnp.zeros((B, N, *k.shape[2:]), jnp.float32)
    dk, dv = _run(
        partial(_key_gradient_kernel, **options),
        num_heads=N,
        own=(k, v, kv_ids),
        whole=(q, q_ids, lse, delta, g),
        ranges=(first // BLOCK, -(-stop // BLOCK)),
        outputs=(per_query_head, per_query_head),
    )
    dk_BSGK, dv_BSGK = (
        x.reshape(B, G, N // G, -1, K).sum(axis=2).swapaxes(1, 2)[:, :S].astype(k.dtype)
        for x in (dk, dv)
    )
    return dq.swapaxes(1, 2)[:, :L], dk_BSGK, dv_BSGK, None, None


triton_attention.defvjp(_forward, _backward)


def _forward_kernel(
    q_ref, q_ids_ref, k_ref, v_ref, kv_ids_ref, start_ref, end_ref, out_ref, lse_ref,
    *, causal, window,
):  # fmt: skip
    q_QK, q_ids_Q, here = q_ref[...], q_ids_ref[...], pl.program_id(2)

    def keys(j, carry):
        peak_Q, sum_Q, out_QK = carry
        k_TK, v_TK, kv_ids_T = (_load(ref, j) for ref in (k_ref, v_ref, kv_ids_ref))
        seen_QT = _seen(q_ids_Q, kv_ids_T, here, j, causal, window)
        scores_QT = jnp.where(seen_QT, _scores(q_QK, k_TK), NOTHING)
        new_peak = jnp.maximum(peak_Q, jnp.max(scores_QT, axis=1))
        weights_QT = jnp.where(seen_QT, jnp.exp(scores_QT - new_peak[:, None]), 0.0)
        shrink_Q = jnp.exp(peak_Q - new_peak)
        values_QK = triton.dot(weights_QT.astype(v_TK.dtype), v_TK)
        sum_Q = sum_Q * shrink_Q + jnp.sum(weights_QT, axis=1)
        return new_peak, sum_Q, out_QK * shrink_Q[:, None] + values_QK

    zeros_Q = jnp.zeros(q_QK.shape[0], jnp.float32)
    empty = zeros_Q + NOTHING, zeros_Q, jnp.zeros(q_QK.shape, jnp.float32)
    peak_Q, sum_Q, out_QK = jax.lax.fori_loop(start_ref[0], end_ref[0], keys, empty)
    sum_Q = jnp.where(sum_Q > 0, sum_Q, 1.0)  # queries that see nothing: 0 / 1
    out_ref[...] = (out_QK / sum_Q[:, None]).astype(out_ref.dtype)
    lse_ref[...] = peak_Q + jnp.log(sum_Q)


def _query_gradient_kernel(
    q_ref, q_ids_ref, lse_ref, delta_ref, g_ref, k_ref, v_ref, kv_ids_ref, start_ref, end_ref,
    dq_ref, *, causal, window,
):  # fmt: skip
    queries = q_ref[...], lse_ref[...], delta_ref[...], g_ref[...]
    q_ids_Q, here = q_ids_ref[...], pl.program_id(2)

    def keys(j, dq_QK):
        k_TK, v_TK, kv_ids_T = (_load(ref, j) for ref in (k_ref, v_ref, kv_ids_ref))
        seen_QT = _seen(q_ids_Q, kv_ids_T, here, j, causal, window)
        _, dscores_QT = _weights_and_gradient(*queries, k_TK, v_TK, seen_QT)
        return dq_QK + triton.dot(dscores_QT.astype(k_TK.dtype), k_TK)

    zeros = jnp.zeros(q_ref.shape, jnp.float32)
    dq_QK = jax.lax.fori_loop(start_ref[0], end_ref[0], keys, zeros)
    dq_ref[...] = dq_QK.astype(dq_ref.dtype)


def _key_gradient_kernel(
    k_ref, v_ref, kv_ids_ref, q_ref, q_ids_ref, lse_ref, delta_ref, g_ref, start_ref, end_ref,
    dk_ref, dv_ref, *, causal, window,
):  # fmt: skip
    k_TK, v_TK, kv_ids_T, here = k_ref[...], v_ref[...], kv_ids_ref[...], pl.program_id(2)

    def queries(i, carry):
        dk_TK, dv_TK = carry
        q_QK, lse_Q, delta_Q, g_QK = (_load(ref, i) for ref in (q_ref, lse_ref, delta_ref, g_ref))
        seen_QT = _seen(_load(q_ids_ref, i), kv_ids_T, i, here, causal, window)
        weights_QT, dscores_QT = _weights_and_gradient(
            q_QK, lse_Q, delta_Q, g_QK, k_TK, v_TK, seen_QT
        )
        dv_TK += triton.dot(weights_QT.astype(g_QK.dtype), g_QK, trans_a=True)
        return dk_TK + triton.dot(dscores_QT.astype(q_QK.dtype), q_QK, trans_a=True), dv_TK

    zeros = jnp.zeros(k_TK.shape, jnp.float32)
    dk_ref[...], dv_ref[...] = jax.lax.fori_loop(start_ref[0], end_ref[0], queries, (zeros, zeros))


def _weights_and_gradient(q_QK, lse_Q, delta_Q, g_QK, k_TK, v_TK, seen_QT):
    """Return the softmax weights [Q, T] again, and the gradient of the unscaled scores."""
    weights_QT = jnp.where(seen_QT, jnp.exp(_scores(q_QK, k_TK) - lse_Q[:, None]), 0.0)
    dweights_QT = triton.dot(g_QK, v_TK, trans_b=True)
    return weights_QT, weights_QT * (dweights_QT - delta_Q[:, None]) * k_TK.shape[-1] ** -0.5


def _scores(q_QK, k_TK):
    return triton.dot(q_QK, k_TK, trans_b=True) * k_TK.shape[-1] ** -0.5


def _seen(q_ids_Q, kv_ids_T, i, j, causal, window):
    places = jnp.arange(BLOCK)
    q_places, kv_places = i * BLOCK + places, j * BLOCK + places
    return visible(q_ids_Q, kv_ids_T, q_places, kv_places, causal=causal, window=window)


def _load(ref, block):
    return ref[pl.ds(block * BLOCK, BLOCK), ...]


def _arrange(x):
    """Return [B, L, N, K] as [B, N, L, K], or ids [B, L]; zeros fill L to a multiple of BLOCK."""
    x = jnp.pad(x, [(0, 0), (0, -x.shape[1] % BLOCK)] + [(0, 0)] * (x.ndim - 2))
    return x.swapaxes(1, 2) if x.ndim == 4 else x


def _run(kernel, *, num_heads, own, whole, ranges, outputs):
    """Run a kernel for every row, query head and block of the arrays in `own` and `outputs`.

    It gets refs of its block of `own`, of all positions of `whole`, of the range of blocks to go
    over, and of its block of each output; outputs are given by arrays of their shape and dtype.
    """

    def spec(x, size=None):
        heads = x.shape[1:2] if x.ndim > 2 else ()
        positions = x.shape[1 + len(heads)]

        def index(b, n, i):
            shared = [n * h // num_heads for h in heads]
            return b, *shared, 0 if size is None else i, *(0 for _ in x.shape[3:])

        block = (None, *(None for _ in heads), size or positions, *x.shape[3:])
        return pl.BlockSpec(block, index)

    blocks = outputs[0].shape[2] // BLOCK
    return pl.pallas_call(
        kernel,
        grid=(own[0].shape[0], num_heads, blocks),
        in_specs=[spec(x, BLOCK) for x in own] + [spec(x) for x in whole]
        + [spec(x, 1) for x in ranges],
        out_specs=tuple(spec(x, BLOCK) for x in outputs),
        out_shape=tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in outputs),
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=2),
        interpret=jax.default_backend() != "gpu",
    )(*own, *whole, *ranges)  # fmt: skip
