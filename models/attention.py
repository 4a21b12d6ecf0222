"""Attention inside segments: one function, and the dense reference it is measured against.

Shape letters are explained in `models/__init__.py`.
"""

import jax
import jax.numpy as jnp
from jax import Array

from models.segments import visible

IMPLEMENTATIONS = ("auto", "dense")


def segment_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    q_segment_ids: Array,
    kv_segment_ids: Array | None = None,
    causal: bool = True,
    window: int | None = None,
    implementation: str = "auto",
) -> Array:
    """Return [B, L, N, K]: each query's mean of the values that it may see, in the queries' dtype.

    A query sees the keys of its own segment: with `causal` those at or before its place in the
    row, with `window=w` those fewer than w places away. Segment 0 is padding: it sees nothing, is
    seen by nothing, and its outputs and gradients are exactly zero. So are the outputs of a query
    whose segment has no keys at all.

    For segment ids [1, 1, 2, 2, 0], causal, the places seen are 0 | 0 1 | 2 | 2 3 | none.

    Args:
        q: queries [B, L, N, K], floating point.
        k: keys [B, S, G, K]; N is a multiple of G, and N/G neighbouring query heads share a key.
        v: values [B, S, G, K].
        q_segment_ids: int [B, L].
        kv_segment_ids: int [B, S]; left out, the queries' ids.
        causal: compare places in the row; needs L = S.
        window: at least 1; needs L = S.
        implementation: one of `IMPLEMENTATIONS`; "auto" chooses.

    Raises:
        ValueError: if shapes do not fit or the implementation does not exist.
    """
    if kv_segment_ids is None:
        kv_segment_ids = q_segment_ids
    _check(q, k, v, q_segment_ids, kv_segment_ids, causal, window, implementation)
    return dense_attention(q, k, v, q_segment_ids, kv_segment_ids, causal=causal, window=window)


def dense_attention(
    q_BLNK: Array,
    k_BSGK: Array,
    v_BSGK: Array,
    q_segment_ids: Array,
    kv_segment_ids: Array,
    *,
    causal: bool,
    window: int | None,
) -> Array:
    """Return what `segment_attention` promises by masking all L×S scores: right, but never cheap.

    Softmax over a row in which everything is masked gives the mean of all values, and its gradient
    would reach the keys; so such rows are replaced by zeros, which cuts both.
    """
    places = jnp.arange(q_BLNK.shape[1]), jnp.arange(k_BSGK.shape[1])
    seen_BLS = visible(q_segment_ids, kv_segment_ids, *places, causal=causal, window=window)
    out_BLNK = jax.nn.dot_product_attention(q_BLNK, k_BSGK, v_BSGK, mask=seen_BLS[:, None])
    return jnp.where(seen_BLS.any(axis=-1)[:, :, None, None], out_BLNK, 0)


def _check(q, k, v, q_ids, kv_ids, causal, window, implementation):
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"implementation is {implementation!r}; use one of {', '.join(IMPLEMENTATIONS)}."
        )
    if q.ndim != 4 or k.ndim != 4 or k.shape != v.shape:
        raise ValueError(
            f"q, k and v have shapes {q.shape}, {k.shape} and {v.shape}; expected "
            f"[batch, length, heads, width], with k and v alike."
        )
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3] or q.shape[2] % k.shape[2]:
        raise ValueError(
            f"q has shape {q.shape} and k has shape {k.shape}; batch and width must agree, and "
            f"the number of query heads must be a multiple of the number of key heads."
        )
    if q_ids.shape != q.shape[:2] or kv_ids.shape != k.shape[:2]:
        raise ValueError(
            f"segment ids have shapes {q_ids.shape} and {kv_ids.shape}; q and k need "
            f"{q.shape[:2]} and {k.shape[:2]}. For cross-attention pass kv_segment_ids too."
        )
    if (causal or window is not None) and q.shape[1] != k.shape[1]:
        raise ValueError(
            f"q has {q.shape[1]} positions and k has {k.shape[1]}; causal order and windows "
            f"compare places in one row. For cross-attention use causal=False and window=None."
        )
    if window is not None and window < 1:
        raise ValueError(f"window is {window}; it counts the position itself: at least 1.")
