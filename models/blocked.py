"""Attention in blocks, in plain JAX: no L×S array, no work on keys that a block does not see.

Once a step, each block of queries gets the list of the blocks of keys that any of its queries sees;
a loop runs over this list only. Softmax is computed online (Milakov and Gimelshein, 2018), and its
weights again in the backward pass, as in FlashAttention (Dao et al., 2022).

Shape letters are explained in `models/__init__.py`. In addition, H is the query heads that share a
key head (N = G·H), I the blocks of queries in a row, Q the queries in a block, J the blocks of
keys, T the keys in a block.
"""

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from models.visibility import KEPT, Visibility, seen

NEVER = jnp.iinfo(jnp.int32).max
NOTHING = -1e30  # below every score, yet finite: exp(NOTHING − NOTHING) is not NaN


def needed_blocks(visible: Visibility, *, adjoining: bool) -> tuple[Array, Array]:
    """Return the first keys of the blocks that each block of queries needs, and their number.

    Blocks begin at multiples of T. A block of queries needs a block of keys if some of its keys
    begin to be seen before the last query, and some are still seen after the first. The needed
    blocks need not adjoin: between a prefix and its last continuation lie the others. With
    `adjoining`, as in segments that are seen as a whole, they do, and begin with the first key
    that is seen.

    Returns:
        int32 [B, I·J], for each block of queries the places of the blocks' first keys, ascending,
        then any past the row; and int32 [B, I].
    """
    _, since_BS, until_BS = visible
    places_BIQ = _places(visible)
    first_BI1 = jnp.where(places_BIQ < 0, NEVER, places_BIQ).min(axis=-1)[..., None]
    last_BI1 = places_BIQ.max(axis=-1)[..., None]
    S = since_BS.shape[1]
    T = _block(S)
    J = -(-S // T)
    if adjoining:
        keys = jnp.arange(S)
        needed_BIS = (since_BS[:, None] <= last_BI1) & (until_BS[:, None] > first_BI1)
        begin_BI = jnp.where(needed_BIS, keys, S).min(axis=-1)
        end_BI = jnp.where(needed_BIS, keys + 1, 0).max(axis=-1)
        counts_BI = jnp.maximum(0, -((begin_BI - end_BI) // T))
        starts_BIJ = begin_BI[..., None] + T * jnp.arange(J)
    else:
        since_BJ = _blocks(jnp.where(until_BS == 0, NEVER, since_BS), fill=NEVER).min(axis=-1)
        until_BJ = _blocks(until_BS).max(axis=-1)
        needed_BIJ = (since_BJ[:, None] <= last_BI1) & (until_BJ[:, None] > first_BI1)
        counts_BI = needed_BIJ.sum(axis=-1)
        # A scatter: sorting would take several times as long where blocks are many.
        slots_BIJ = jnp.where(needed_BIJ, jnp.cumsum(needed_BIJ, axis=-1) - 1, J)
        row, block, number = (jnp.arange(size) for size in needed_BIJ.shape)
        at = row[:, None, None], block[:, None], slots_BIJ
        starts_BIJ = jnp.full(needed_BIJ.shape, S).at[at].set(number * T, mode="drop")
    starts_BE = starts_BIJ.reshape(len(starts_BIJ), -1)
    return starts_BE.astype(jnp.int32), counts_BI.astype(jnp.int32)


@jax.custom_vjp
def blocked_attention(
    q_BLNK: Array,
    k_BSGK: Array,
    v_BSGK: Array,
    visible: Visibility,
    needed: tuple[Array, Array],
) -> Array:
    """Return the weighted mean of the values that each query sees: [B, L, N, K]; of none, 0.

    `needed` is what `needed_blocks` returns for `visible`. Reverse-mode derivatives only.
    """
    return _forward(q_BLNK, k_BSGK, v_BSGK, visible, needed)[0]


def _forward(q_BLNK, k_BSGK, v_BSGK, visible, needed):
    B, L, N, K = q_BLNK.shape
    keys = k_BSGK, v_BSGK, visible.since_BS, visible.until_BS
    q_BIQGHK = _blocks(q_BLNK, k_BSGK.shape[2])
    out, lse_BIQGH = _each_row(_forward_row, needed, _places(visible), keys, q_BIQGHK)
    out_BLNK = checkpoint_name(out.reshape(B, -1, N, K)[:, :L], KEPT)
    lse_BIQGH = checkpoint_name(lse_BIQGH, KEPT)
    return out_BLNK, (q_BLNK, k_BSGK, v_BSGK, visible, needed, out_BLNK, lse_BIQGH)


def _backward(saved, g_BLNK):
    q_BLNK, k_BSGK, v_BSGK, visible, needed, out_BLNK, lse_BIQGH = saved
    B, L, N, K = q_BLNK.shape
    G = k_BSGK.shape[2]
    keys = k_BSGK, v_BSGK, visible.since_BS, visible.until_BS
    delta_BLN = jnp.sum(out_BLNK.astype(jnp.float32) * g_BLNK.astype(jnp.float32), axis=-1)
    q_BIQGHK, delta_BIQGH, g_BIQGHK = (_blocks(x, G) for x in (q_BLNK, delta_BLN, g_BLNK))
    of_queries = q_BIQGHK, lse_BIQGH, delta_BIQGH, g_BIQGHK
    dq, dk_BSGK, dv_BSGK = _each_row(_backward_row, needed, _places(visible), keys, *of_queries)
    return dq.reshape(B, -1, N, K)[:, :L], dk_BSGK, dv_BSGK, None, None


blocked_attention.defvjp(_forward, _backward)


def _forward_row(starts_IJ, counts_I, places_IQ, keys, q_IQGHK):
    """Return the outputs [I, Q, G, H, K] of one row, and the ln of their normalisers."""
    _, Q, G, H, K = q_IQGHK.shape

    def queries(block):
        starts_J, count, places_Q, q_QGHK = block
        q_GHQK = jnp.moveaxis(q_QGHK, 0, 2)

        def add(j, carry):
            peak_GHQ, sum_GHQ, out_GHQK = carry
            k_TGK, v_TGK, seen_QT, _ = _fetch(keys, starts_J[j], places_Q)
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
        peak_GHQ, sum_GHQ, out_GHQK = jax.lax.fori_loop(0, count, add, empty)
        sum_GHQ = jnp.where(sum_GHQ > 0, sum_GHQ, 1)  # queries that see nothing: 0 / 1
        out_QGHK = jnp.moveaxis(out_GHQK / sum_GHQ[..., None], 2, 0)
        lse_QGH = jnp.moveaxis(peak_GHQ + jnp.log(sum_GHQ), 2, 0)
        return out_QGHK.astype(q_IQGHK.dtype), lse_QGH

    return jax.lax.map(queries, (starts_IJ, counts_I, places_IQ, q_IQGHK))


def _backward_row(
    starts_IJ, counts_I, places_IQ, keys, q_IQGHK, lse_IQGH, delta_IQGH, g_IQGHK
):  # fmt: skip
    """Return the gradients of one row for queries [I, Q, G, H, K], keys and values [S, G, K].

    One pass: each block of weights is computed once and serves all three gradients; those of keys
    and values are added up in place.
    """
    _, Q, G, H, K = q_IQGHK.shape

    def queries(dkv, block):
        starts_J, count, places_Q, q_QGHK, lse_QGH, delta_QGH, g_QGHK = block
        lse_GHQ1, delta_GHQ1 = (jnp.moveaxis(x, 0, 2)[..., None] for x in (lse_QGH, delta_QGH))
        q_GHQK, g_GHQK = (jnp.moveaxis(x, 0, 2) for x in (q_QGHK, g_QGHK))

        def add(j, carry):
            dk_SGK, dv_SGK, dq_GHQK = carry
            k_TGK, v_TGK, seen_QT, place = _fetch(keys, starts_J[j], places_Q)
            weights = jnp.where(seen_QT, jnp.exp(_scores(q_GHQK, k_TGK) - lse_GHQ1), 0)
            dv_TGK = _product("GHQT,GHQK->TGK", weights.astype(g_GHQK.dtype), g_GHQK)
            dweights = _product("GHQK,TGK->GHQT", g_GHQK, v_TGK)
            dscores = (weights * (dweights - delta_GHQ1) * K**-0.5).astype(k_TGK.dtype)
            dk_TGK = _product("GHQT,GHQK->TGK", dscores, q_GHQK)
            dq_GHQK += _product("GHQT,TGK->GHQK", dscores, k_TGK)
            return _add(dk_SGK, dk_TGK, place), _add(dv_SGK, dv_TGK, place), dq_GHQK

        zeros = jnp.zeros((G, H, Q, K), jnp.float32)
        *dkv, dq_GHQK = jax.lax.fori_loop(0, count, add, (*dkv, zeros))
        return tuple(dkv), jnp.moveaxis(dq_GHQK, 2, 0).astype(q_IQGHK.dtype)

    k_SGK = keys[0]
    zeros = jnp.zeros(k_SGK.shape, jnp.float32)
    of_queries = places_IQ, q_IQGHK, lse_IQGH, delta_IQGH, g_IQGHK
    dkv, dq_IQGHK = jax.lax.scan(queries, (zeros, zeros), (starts_IJ, counts_I, *of_queries))
    return dq_IQGHK, *(x.astype(k_SGK.dtype) for x in dkv)


def _scores(q_GHQK, k_TGK):
    return _product("GHQK,TGK->GHQT", q_GHQK, k_TGK) * k_TGK.shape[-1] ** -0.5


def _product(equation, a, b):
    return jnp.einsum(equation, a, b, preferred_element_type=jnp.float32)


def _fetch(keys, start, places_Q):
    """Return the block of keys and values from `start` on, a mask of what is seen, and its place.

    The last block of a row is moved back so that it ends with the row. The mask hides the keys that
    it then shares with the block before, and everything past the row.
    """
    T = _block(keys[0].shape[0])
    place = jnp.minimum(start, keys[0].shape[0] - T)
    k_TGK, v_TGK, since_T, until_T = (jax.lax.dynamic_slice_in_dim(x, place, T) for x in keys)
    seen_QT = seen(places_Q, since_T, until_T) & (place + jnp.arange(T) >= start)
    return k_TGK, v_TGK, seen_QT, place


def _add(total_SGK, part_TGK, place):
    old = jax.lax.dynamic_slice_in_dim(total_SGK, place, part_TGK.shape[0])
    return jax.lax.dynamic_update_slice_in_dim(total_SGK, old + part_TGK, place, axis=0)


def _block(length):
    """Return the positions in a block.

    On two cores, with 128, short segments waste little and matrix products stay efficient (64 and
    256 were within a third of its time). An accelerator that starts each small kernel from the host
    wants fewer, larger steps.
    """
    return min(length, 128 if _on_cpu() else 512)


def _blocks(x, num_kv_heads=None, *, fill=0):
    """Return [B, L, ...] cut into [B, I, Q, ...], with `fill` at the end; heads N as G, H."""
    B, L, *rest = x.shape
    Q = _block(L)
    x = jnp.pad(x, ((0, 0), (0, -L % Q), *((0, 0) for _ in rest)), constant_values=fill)
    if num_kv_heads:
        rest[:1] = num_kv_heads, rest[0] // num_kv_heads
    return x.reshape(B, -1, Q, *rest)


def _places(visible):
    """Return the places [B, I, Q] of blocks of queries, −1 at the end: at 0 they would see keys."""
    return _blocks(visible.places_BL, fill=-1)


def _each_row(f, needed, *arrays):
    """Return f over rows: on CPU one after the other, each with its own loop lengths.

    Elsewhere all rows take each step together, and the longest list of a block sets the number of
    steps; at the end, the others see nothing new.
    """
    counts_BI = needed[1]
    starts_BIJ = needed[0].reshape(*counts_BI.shape, -1)
    if _on_cpu():
        return jax.lax.map(lambda row: f(*row), (starts_BIJ, counts_BI, *arrays))
    batched = (0, None, *(0 for _ in arrays))
    return jax.vmap(f, in_axes=batched)(starts_BIJ, counts_BI.max(axis=0), *arrays)


def _on_cpu():
    return jax.default_backend() == "cpu"
