"""Attention in blocks, in plain JAX: no L×S array, no work on keys that a block does not see.

Of every block of queries it is known, once a step, which blocks of keys any of them sees; a loop
runs over these and nothing else. Softmax is computed online (Milakov and Gimelshein, 2018) and its
weights again in the backward pass, as in FlashAttention (Dao et al., 2022).

Shape letters are explained in `models/__init__.py`; besides, H is the query heads that share a key
head (N = G·H), I the blocks of queries in a row, Q the queries in a block, J the blocks of keys, T
the keys in a block.
"""

import jax
import jax.numpy as jnp
from jax import Array

from models.visibility import Visibility, seen

NOTHING = -1e30  # below every score, yet finite: exp(NOTHING − NOTHING) is not NaN


def needed_blocks(visible: Visibility) -> tuple[Array, Array]:
    """Return the blocks of keys that each block of queries needs, and how many these are.

    That is all blocks some key of which begins to be seen before the last query, and some key of
    which is still seen after the first. They need not adjoin: between a prefix and its last
    continuation lie the others.

    Returns:
        int32 [B, I·J], for each block of queries the numbers of the blocks, ascending, then J for
        the rest; and int32 [B, I].
    """
    places_BIQ = _places(visible)
    since_BJT, until_BJT = _blocks(visible.since_BS), _blocks(visible.until_BS)
    never = jnp.iinfo(jnp.int32).max
    first_BI = jnp.where(places_BIQ < 0, never, places_BIQ).min(axis=-1)
    last_BI = places_BIQ.max(axis=-1)
    begin_BJ = jnp.where(until_BJT == 0, never, since_BJT).min(axis=-1)
    end_BJ = until_BJT.max(axis=-1)
    needed_BIJ = (begin_BJ[:, None] <= last_BI[..., None]) & (end_BJ[:, None] > first_BI[..., None])
    B, _, J = needed_BIJ.shape
    # A scatter: sorting would take several times as long where blocks are many.
    slots_BIJ = jnp.where(needed_BIJ, jnp.cumsum(needed_BIJ, axis=-1) - 1, J)
    row, block, number = (jnp.arange(n) for n in needed_BIJ.shape)
    list_BIJ = jnp.full(needed_BIJ.shape, J, jnp.int32)
    list_BIJ = list_BIJ.at[row[:, None, None], block[:, None], slots_BIJ].set(number, mode="drop")
    return list_BIJ.reshape(B, -1), needed_BIJ.sum(axis=-1, dtype=jnp.int32)


@jax.custom_vjp
def blocked_attention(
    q_BLNK: Array,
    k_BSGK: Array,
    v_BSGK: Array,
    visible: Visibility,
    needed: tuple[Array, Array],
) -> Array:
    """Return each query's mean of the values that it sees: [B, L, N, K], 0 where it sees none.

    `needed` is `needed_blocks(visible)`. Reverse-mode derivatives only.
    """
    return _forward(q_BLNK, k_BSGK, v_BSGK, visible, needed)[0]


def _forward(q_BLNK, k_BSGK, v_BSGK, visible, needed):
    B, L, N, K = q_BLNK.shape
    keys = _keys(k_BSGK, v_BSGK, visible)
    q_BIQGHK = _blocks(q_BLNK, k_BSGK.shape[2])
    out, lse_BIQGH = _each_row(_forward_row, needed, _places(visible), keys, q_BIQGHK)
    out_BLNK = out.reshape(B, -1, N, K)[:, :L]
    return out_BLNK, (q_BLNK, k_BSGK, v_BSGK, visible, needed, out_BLNK, lse_BIQGH)


def _backward(saved, g_BLNK):
    q_BLNK, k_BSGK, v_BSGK, visible, needed, out_BLNK, lse_BIQGH = saved
    B, L, N, K = q_BLNK.shape
    _, S, G, _ = k_BSGK.shape
    keys = _keys(k_BSGK, v_BSGK, visible)
    delta_BLN = jnp.sum(out_BLNK.astype(jnp.float32) * g_BLNK.astype(jnp.float32), axis=-1)
    q_BIQGHK, delta_BIQGH, g_BIQGHK = (_blocks(x, G) for x in (q_BLNK, delta_BLN, g_BLNK))
    of_queries = q_BIQGHK, lse_BIQGH, delta_BIQGH, g_BIQGHK
    gradients = _each_row(_backward_row, needed, _places(visible), keys, *of_queries)
    dq_BLNK, dk_BSGK, dv_BSGK = (
        x.reshape(B, -1, *shape)[:, :length]
        for x, shape, length in zip(gradients, ((N, K), (G, K), (G, K)), (L, S, S), strict=True)
    )
    return dq_BLNK, dk_BSGK, dv_BSGK, None, None


blocked_attention.defvjp(_forward, _backward)


def _forward_row(which_IJ, counts_I, places_IQ, keys, q_IQGHK):
    """Return the outputs [I, Q, G, H, K] of one row, and the ln of their normalisers."""
    _, Q, G, H, K = q_IQGHK.shape

    def queries(block):
        which_J, count, places_Q, q_QGHK = block
        q_GHQK = jnp.moveaxis(q_QGHK, 0, 2)

        def add(j, carry):
            peak_GHQ, sum_GHQ, out_GHQK = carry
            k_TGK, v_TGK, since_T, until_T = _pick(keys, which_J[j])
            seen_QT = seen(places_Q, since_T, until_T)
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

    return jax.lax.map(queries, (which_IJ, counts_I, places_IQ, q_IQGHK))


def _backward_row(
    which_IJ, counts_I, places_IQ, keys, q_IQGHK, lse_IQGH, delta_IQGH, g_IQGHK
):  # fmt: skip
    """Return the gradients of one row for queries [I, Q, G, H, K], keys and values [J, T, G, K].

    One pass: each block of weights is computed once and serves all three gradients; those of keys
    and values are added up in place.
    """
    _, Q, G, H, K = q_IQGHK.shape

    def queries(dkv, block):
        which_J, count, places_Q, q_QGHK, lse_QGH, delta_QGH, g_QGHK = block
        lse_GHQ1, delta_GHQ1 = (jnp.moveaxis(x, 0, 2)[..., None] for x in (lse_QGH, delta_QGH))
        q_GHQK, g_GHQK = (jnp.moveaxis(x, 0, 2) for x in (q_QGHK, g_QGHK))

        def add(j, carry):
            dk_JTGK, dv_JTGK, dq_GHQK = carry
            k_TGK, v_TGK, since_T, until_T = _pick(keys, which_J[j])
            seen_QT = seen(places_Q, since_T, until_T)
            weights = jnp.where(seen_QT, jnp.exp(_scores(q_GHQK, k_TGK) - lse_GHQ1), 0)
            dv_TGK = _product("GHQT,GHQK->TGK", weights.astype(g_GHQK.dtype), g_GHQK)
            dweights = _product("GHQK,TGK->GHQT", g_GHQK, v_TGK)
            dscores = (weights * (dweights - delta_GHQ1) * K**-0.5).astype(k_TGK.dtype)
            dk_TGK = _product("GHQT,GHQK->TGK", dscores, q_GHQK)
            dq_GHQK += _product("GHQT,TGK->GHQK", dscores, k_TGK)
            return (
                _add(dk_JTGK, dk_TGK, which_J[j]),
                _add(dv_JTGK, dv_TGK, which_J[j]),
                dq_GHQK,
            )

        zeros = jnp.zeros((G, H, Q, K), jnp.float32)
        *dkv, dq_GHQK = jax.lax.fori_loop(0, count, add, (*dkv, zeros))
        return tuple(dkv), jnp.moveaxis(dq_GHQK, 2, 0).astype(q_IQGHK.dtype)

    k_JTGK = keys[0]
    zeros = jnp.zeros(k_JTGK.shape, jnp.float32)
    of_queries = places_IQ, q_IQGHK, lse_IQGH, delta_IQGH, g_IQGHK
    dkv, dq_IQGHK = jax.lax.scan(queries, (zeros, zeros), (which_IJ, counts_I, *of_queries))
    return dq_IQGHK, *(x.astype(k_JTGK.dtype) for x in dkv)


def _scores(q_GHQK, k_TGK):
    return _product("GHQK,TGK->GHQT", q_GHQK, k_TGK) * k_TGK.shape[-1] ** -0.5


def _product(equation, a, b):
    return jnp.einsum(equation, a, b, preferred_element_type=jnp.float32)


def _pick(keys, block):
    """Return what `keys` have of a block. Of block J, which is none, nothing is seen."""
    return tuple(jax.lax.dynamic_index_in_dim(x, block, keepdims=False) for x in keys)


def _add(total_JTGK, part_TGK, block):
    old = jax.lax.dynamic_index_in_dim(total_JTGK, block, keepdims=False)
    return jax.lax.dynamic_update_index_in_dim(total_JTGK, old + part_TGK, block, axis=0)


def _block(length):
    """Return how many positions make a block of a row.

    On two cores, at 128, short segments waste little and matrix products stay efficient (64 and
    256 were within a third of it). An accelerator that starts each small kernel from the host
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


def _keys(k_BSGK, v_BSGK, visible):
    """Return blocks of keys, of values, and of where these are seen: that of block J is nowhere."""
    k, v, since, until_BJT = map(_blocks, (k_BSGK, v_BSGK, visible.since_BS, visible.until_BS))
    return k, v, since, jnp.pad(until_BJT, ((0, 0), (0, 1), (0, 0)))


def _each_row(f, needed, *arrays):
    """Return f over rows: one after the other on CPU, where each keeps its own loop lengths.

    Elsewhere all rows take each step together; the longest list of a block sets the number of
    steps, in which the others come to block J and see nothing.
    """
    counts_BI = needed[1]
    which_BIJ = needed[0].reshape(*counts_BI.shape, -1)
    if _on_cpu():
        return jax.lax.map(lambda row: f(*row), (which_BIJ, counts_BI, *arrays))
    batched = (0, None, *(0 for _ in arrays))
    return jax.vmap(f, in_axes=batched)(which_BIJ, counts_BI.max(axis=0), *arrays)


def _on_cpu():
    return jax.default_backend() == "cpu"
