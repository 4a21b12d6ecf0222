"""Attention inside segments in blocks, in plain JAX: no L×S array, no work on other segments.

For every block of queries, the segment ids tell where the first and the last key are that any of
them sees; a loop runs over the blocks of keys between those, and over nothing else. Softmax is
computed online (Milakov and Gimelshein, 2018) and its weights again in the backward pass, as in
FlashAttention (Dao et al., 2022).

Shape letters are explained in `models/__init__.py`; besides, H is the query heads that share a key
head (N = G·H), I the blocks of queries in a row, Q the queries in a block, T the keys in a block.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from models.segments import reach, visible

NOTHING = -1e30  # below every score, yet finite: exp(NOTHING − NOTHING) is not NaN


@partial(jax.custom_vjp, nondiff_argnums=(6, 7))
def blocked_attention(
    q_BLNK: Array,
    k_BSGK: Array,
    v_BSGK: Array,
    q_ids_BL: Array,
    kv_ids_BS: Array,
    q_places_BL: Array,
    causal: bool,
    window: int | None,
) -> Array:
    """Return what `segment_attention` promises, in time that grows with what queries see.

    Key i is at place i of its row, query i at `q_places_BL[:, i]`. Reverse-mode derivatives only.
    """
    ids_and_places = q_ids_BL, kv_ids_BS, q_places_BL
    return _forward(q_BLNK, k_BSGK, v_BSGK, *ids_and_places, causal, window)[0]


def _forward(q_BLNK, k_BSGK, v_BSGK, q_ids_BL, kv_ids_BS, q_places_BL, causal, window):
    B, L, N, K = q_BLNK.shape
    ranges, *ids_and_places = _ranges(q_ids_BL, kv_ids_BS, q_places_BL, causal, window)
    q_BIQGHK = _blocks(q_BLNK, k_BSGK.shape[2])
    row = partial(_forward_row, causal=causal, window=window)
    out, lse = _each_row(row, ranges, q_BIQGHK, *ids_and_places, k_BSGK, v_BSGK, kv_ids_BS)
    out_BLNK = out.reshape(B, -1, N, K)[:, :L]
    saved = q_BLNK, k_BSGK, v_BSGK, q_ids_BL, kv_ids_BS, q_places_BL, out_BLNK, lse
    return out_BLNK, saved


def _backward(causal, window, saved, g_BLNK):
    q_BLNK, k_BSGK, v_BSGK, q_ids_BL, kv_ids_BS, q_places_BL, out_BLNK, lse_BIQGH = saved
    B, L, N, K = q_BLNK.shape
    G = k_BSGK.shape[2]
    ranges, *ids_and_places = _ranges(q_ids_BL, kv_ids_BS, q_places_BL, causal, window)
    delta_BLN = jnp.sum(out_BLNK.astype(jnp.float32) * g_BLNK.astype(jnp.float32), axis=-1)
    q_BIQGHK, delta_BIQGH, g_BIQGHK = (_blocks(x, G) for x in (q_BLNK, delta_BLN, g_BLNK))
    row = partial(_backward_row, causal=causal, window=window)
    of_queries = lse_BIQGH, delta_BIQGH, g_BIQGHK
    rows = q_BIQGHK, *ids_and_places, k_BSGK, v_BSGK, kv_ids_BS, *of_queries
    dq, dk_BSGK, dv_BSGK = _each_row(row, ranges, *rows)
    return dq.reshape(B, -1, N, K)[:, :L], dk_BSGK, dv_BSGK, None, None, None


blocked_attention.defvjp(_forward, _backward)


def _forward_row(
    starts_I, counts_I, q_IQGHK, q_ids_IQ, q_places_IQ, k_SGK, v_SGK, kv_ids_S, *, causal, window
):
    """Return the outputs [I, Q, G, H, K] of one row, and the ln of their normalisers."""
    _, Q, G, H, K = q_IQGHK.shape

    def queries(block):
        start, count, q_QGHK, q_ids_Q, q_places_Q = block
        q_GHQK = jnp.moveaxis(q_QGHK, 0, 2)

        def keys(j, carry):
            peak_GHQ, sum_GHQ, out_GHQK = carry
            k_TGK, v_TGK, seen_QT, _ = _fetch(
                k_SGK, v_SGK, kv_ids_S, start, j, q_ids_Q, q_places_Q, causal, window
            )
            scores_GHQT = jnp.where(seen_QT, _scores(q_GHQK, k_TGK), NOTHING)
            new_peak = jnp.maximum(peak_GHQ, scores_GHQT.max(axis=-1))
            weights = jnp.where(seen_QT, jnp.exp(scores_GHQT - new_peak[..., None]), 0)
            shrink = jnp.exp(peak_GHQ - new_peak)
            values = _product("GHQT,TGK->GHQK", weights.astype(v_TGK.dtype), v_TGK)
            return (
                new_peak,
                sum_GHQ * shrink + weights.sum(axis=-1),
                out_GHQK * shrink[..., None] + values,
            )

        zeros_GHQ = jnp.zeros((G, H, Q), jnp.float32)
        empty = zeros_GHQ + NOTHING, zeros_GHQ, jnp.zeros((G, H, Q, K), jnp.float32)
        peak_GHQ, sum_GHQ, out_GHQK = jax.lax.fori_loop(0, count, keys, empty)
        sum_GHQ = jnp.where(sum_GHQ > 0, sum_GHQ, 1)  # queries that see nothing: 0 / 1
        out_QGHK = jnp.moveaxis(out_GHQK / sum_GHQ[..., None], 2, 0)
        lse_QGH = jnp.moveaxis(peak_GHQ + jnp.log(sum_GHQ), 2, 0)
        return out_QGHK.astype(q_IQGHK.dtype), lse_QGH

    return jax.lax.map(queries, (starts_I, counts_I, q_IQGHK, q_ids_IQ, q_places_IQ))


def _backward_row(
    starts_I, counts_I, q_IQGHK, q_ids_IQ, q_places_IQ, k_SGK, v_SGK, kv_ids_S, lse_IQGH,
    delta_IQGH, g_IQGHK, *, causal, window,
):  # fmt: skip
    """Return the gradients of one row for queries [I, Q, G, H, K], keys and values [S, G, K].

    One pass: each block of weights is computed once and serves all three gradients; those of keys
    and values are added up in place.
    """
    _, Q, G, H, K = q_IQGHK.shape

    def queries(dkv, block):
        start, count, q_QGHK, q_ids_Q, q_places_Q, lse_QGH, delta_QGH, g_QGHK = block
        lse_GHQ1, delta_GHQ1 = (jnp.moveaxis(x, 0, 2)[..., None] for x in (lse_QGH, delta_QGH))
        q_GHQK, g_GHQK = (jnp.moveaxis(x, 0, 2) for x in (q_QGHK, g_QGHK))

        def keys(j, carry):
            dk_SGK, dv_SGK, dq_GHQK = carry
            k_TGK, v_TGK, seen_QT, place = _fetch(
                k_SGK, v_SGK, kv_ids_S, start, j, q_ids_Q, q_places_Q, causal, window
            )
            weights = jnp.where(seen_QT, jnp.exp(_scores(q_GHQK, k_TGK) - lse_GHQ1), 0)
            dv_TGK = _product("GHQT,GHQK->TGK", weights.astype(g_GHQK.dtype), g_GHQK)
            dweights = _product("GHQK,TGK->GHQT", g_GHQK, v_TGK)
            dscores = (weights * (dweights - delta_GHQ1) * K**-0.5).astype(k_TGK.dtype)
            dk_TGK = _product("GHQT,GHQK->TGK", dscores, q_GHQK)
            dq_GHQK += _product("GHQT,TGK->GHQK", dscores, k_TGK)
            return _add(dk_SGK, dk_TGK, place), _add(dv_SGK, dv_TGK, place), dq_GHQK

        zeros = jnp.zeros((G, H, Q, K), jnp.float32)
        *dkv, dq_GHQK = jax.lax.fori_loop(0, count, keys, (*dkv, zeros))
        return tuple(dkv), jnp.moveaxis(dq_GHQK, 2, 0).astype(q_IQGHK.dtype)

    zeros = jnp.zeros(k_SGK.shape, jnp.float32)
    of_queries = q_IQGHK, q_ids_IQ, q_places_IQ, lse_IQGH, delta_IQGH, g_IQGHK
    (dk_SGK, dv_SGK), dq_IQGHK = jax.lax.scan(
        queries, (zeros, zeros), (starts_I, counts_I, *of_queries)
    )
    return dq_IQGHK, dk_SGK.astype(k_SGK.dtype), dv_SGK.astype(v_SGK.dtype)


def _fetch(k_SGK, v_SGK, kv_ids_S, start, j, q_ids_Q, q_places_Q, causal, window):
    """Return the j-th block of keys and values from `start` on, what is seen of it, its place.

    The last block of a row is moved back so that it ends with the row; what it then shares with
    the block before has been counted already and is not seen again.
    """
    T = _block(k_SGK.shape[0])
    wanted = start + j * T
    place = jnp.minimum(wanted, k_SGK.shape[0] - T)
    k_TGK, v_TGK, kv_ids_T = (
        jax.lax.dynamic_slice_in_dim(x, place, T) for x in (k_SGK, v_SGK, kv_ids_S)
    )
    places_T = place + jnp.arange(T)
    seen_QT = visible(q_ids_Q, kv_ids_T, q_places_Q, places_T, causal=causal, window=window)
    return k_TGK, v_TGK, seen_QT & (places_T >= wanted), place


def _scores(q_GHQK, k_TGK):
    return _product("GHQK,TGK->GHQT", q_GHQK, k_TGK) * k_TGK.shape[-1] ** -0.5


def _product(equation, a, b):
    return jnp.einsum(equation, a, b, preferred_element_type=jnp.float32)


def _add(total_SGK, part_TGK, place):
    old = jax.lax.dynamic_slice_in_dim(total_SGK, place, part_TGK.shape[0])
    return jax.lax.dynamic_update_slice_in_dim(total_SGK, old + part_TGK, place, axis=0)


def _block(length):
    """Return how many positions make a block of a row.

    On two cores, at 128, short segments waste little and matrix products stay efficient (64 and
    256 were within a third of it). An accelerator that starts each small kernel from the host
    wants fewer, larger steps.
    """
    return min(length, 128 if _on_cpu() else 512)


def _blocks(x, num_kv_heads=None):
    """Return [B, L, ...] cut into [B, I, Q, ...], zeros (segment 0) at the end; heads N as G, H."""
    B, L, *rest = x.shape
    Q = _block(L)
    x = jnp.pad(x, ((0, 0), (0, -L % Q), *((0, 0) for _ in rest)))
    heads = (num_kv_heads, rest[0] // num_kv_heads) if num_kv_heads else ()
    return x.reshape(B, -1, Q, *heads, *rest[1:])


def _ranges(q_ids_BL, kv_ids_BS, q_places_BL, causal, window):
    """Return, for each block of queries, its first key and number of key blocks; ids; places."""
    q_ids_BIQ, q_places_BIQ = _blocks(q_ids_BL), _blocks(q_places_BL)
    q_ids_BL, q_places_BL = (x.reshape(len(x), -1) for x in (q_ids_BIQ, q_places_BIQ))
    row_reach = jax.vmap(partial(reach, causal=causal, window=window))
    reach_BL = row_reach(q_ids_BL, kv_ids_BS, q_places_BL)
    first_BIQ, stop_BIQ = (x.reshape(q_ids_BIQ.shape) for x in reach_BL)
    first_BI, stop_BI = first_BIQ.min(axis=-1), stop_BIQ.max(axis=-1)
    T = _block(kv_ids_BS.shape[1])
    counts_BI = jnp.maximum(0, (stop_BI - first_BI + T - 1) // T)
    return (first_BI, counts_BI), q_ids_BIQ, q_places_BIQ


def _each_row(f, ranges, *arrays):
    """Return f over rows: one after the other on CPU, where each keeps its own loop lengths.

    Elsewhere all rows take each step together; the longest range of a block sets the number of
    steps, which for the others see nothing new at the end.
    """
    starts_BI, counts_BI = ranges
    if _on_cpu():
        return jax.lax.map(lambda row: f(*row), (starts_BI, counts_BI, *arrays))
    batched = (0, None, *(0 for _ in arrays))
    return jax.vmap(f, in_axes=batched)(starts_BI, counts_BI.max(axis=0), *arrays)


def _on_cpu():
    return jax.default_backend() == "cpu"
