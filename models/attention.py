"""Attention inside segments: one function, its implementations, and how one is chosen.

Shape letters are explained in `models/__init__.py`.
"""

import logging
from functools import cache

import jax
import jax.numpy as jnp
from jax import Array

from models.blocked import blocked_attention
from models.mesh import per_device, splits_length
from models.segments import visible
from models.splash import splash_attention, splash_available

IMPLEMENTATIONS = ("auto", "dense", "blocked", "splash")


def segment_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    q_segment_ids: Array,
    kv_segment_ids: Array | None = None,
    positions: Array | None = None,
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

    Under a mesh with an axis `context`, each device computes its part of a row's queries against
    all keys. The columns of a row may then be in any order: in place of places in the row,
    `positions` of one segment are compared.

    Args:
        q: queries [B, L, N, K], floating point.
        k: keys [B, S, G, K]; N is a multiple of G, and N/G neighbouring query heads share a key.
        v: values [B, S, G, K].
        q_segment_ids: int [B, L].
        kv_segment_ids: int [B, S]; left out, the queries' ids.
        positions: int [B, L], ascending in each segment, of queries and keys alike; needed for
            causal order and windows under a mesh with an axis `context`, else not used.
        causal: compare places in the row; needs L = S.
        window: at least 1; needs L = S.
        implementation: one of `IMPLEMENTATIONS`; "auto" chooses.

    Raises:
        ValueError: if shapes do not fit or the implementation does not exist.
    """
    itself = kv_segment_ids is None
    kv_segment_ids = q_segment_ids if kv_segment_ids is None else kv_segment_ids
    _check(q, k, v, q_segment_ids, kv_segment_ids, causal, window, implementation)
    by_place, any_order = causal or window is not None, splits_length()
    if by_place and any_order and (positions is None or not itself):
        raise ValueError(
            "the mesh splits rows over 'context', so that their columns may be in any order, and "
            "causal order and windows compare positions: give positions, and no kv_segment_ids."
        )
    no_splash = ""
    if by_place and not itself:
        no_splash = "splash compares places in self-attention only: leave kv_segment_ids out"
    elif any_order:
        no_splash = "splash wants whole rows, and the mesh splits them over 'context'"
    if implementation == "auto":
        implementation, why = choose(jax.default_backend(), q.dtype, q.shape[1], k.shape[1])
        if implementation == "splash" and no_splash:
            implementation, why = "blocked", no_splash
        _say(implementation, why, q.shape[1], k.shape[1])
    if implementation == "splash" and no_splash:
        raise ValueError(f"implementation is 'splash', but {no_splash}; or use 'blocked'.")
    if implementation == "splash":
        return per_device(
            lambda q, q_ids, k, v, kv_ids: splash_attention(q, k, v, q_ids, kv_ids, causal, window),
            (q, q_segment_ids),
            (k, v, kv_segment_ids),
        )
    positions = positions if any_order and itself else None
    if implementation == "dense":
        return dense_attention(q, k, v, q_segment_ids, kv_segment_ids, positions, causal, window)
    places_BL = jnp.broadcast_to(jnp.arange(q.shape[1]), q_segment_ids.shape)
    keys: tuple[Array, ...] = (k, v, kv_segment_ids)
    if any_order:
        # Sorted by segment and position, keys are in one piece for each segment.
        minor = jnp.zeros_like(kv_segment_ids) if positions is None else positions
        order_BS = jnp.lexsort((minor, kv_segment_ids))
        places_BL = places_BL if positions is None else jnp.argsort(order_BS)
        keys = *keys, order_BS

    def attend(q, q_ids, places, k, v, kv_ids, *order):
        if order:
            kv_ids = jnp.take_along_axis(kv_ids, order[0], axis=1)
            k, v = (jnp.take_along_axis(x, order[0][:, :, None, None], axis=1) for x in (k, v))
        return blocked_attention(q, k, v, q_ids, kv_ids, places, causal, window)

    return per_device(attend, (q, q_segment_ids, places_BL), keys)


def choose(platform: str, dtype: jnp.dtype, q_length: int, kv_length: int) -> tuple[str, str]:
    """Return the implementation that "auto" stands for, and why, as the end of a sentence.

    Every one of them respects segments; the choice is about speed and memory.

    >>> choose("cpu", jnp.dtype("float32"), 4096, 4096)
    ('blocked', 'on CPU it was faster than dense at every length from 64')

    Args:
        platform: "cpu", "gpu" or "tpu".
        dtype: of the queries.
        q_length: positions in a row of queries.
        kv_length: positions in a row of keys.
    """
    if platform == "cpu":
        return "blocked", "on CPU it was faster than dense at every length from 64"
    if q_length * kv_length <= 512 * 512:
        return "dense", "rows are so short that masking all scores in one step is cheap"
    if platform == "tpu" and dtype != jnp.float16:
        if splash_available():
            return "splash", "on TPU its kernel skips other segments"
        return "blocked", "tokamax 0.0.17 or newer, whose kernel skips segments, is not installed"
    # JAX's cuDNN attention takes no segment ids, but an L×S mask, and computes every score.
    return "blocked", "it needs no L×S array and skips other segments"


@cache
def _say(implementation: str, why: str, q_length: int, kv_length: int) -> None:
    """Log a choice, once for each."""
    logging.getLogger(__name__).info(
        "attention over rows of %d × %d positions: %r, because %s.",
        q_length,
        kv_length,
        implementation,
        why,
    )


def dense_attention(
    q_BLNK: Array,
    k_BSGK: Array,
    v_BSGK: Array,
    q_ids_BL: Array,
    kv_ids_BS: Array,
    positions_BL: Array | None,
    causal: bool,
    window: int | None,
) -> Array:
    """Return what `segment_attention` promises by masking all L×S scores: right, but never cheap.

    `positions_BL`, of queries and keys alike, are compared in place of places in the row.

    Softmax over a row in which everything is masked gives the mean of all values, and its gradient
    would reach the keys; so such rows are replaced by zeros, which cuts both. XLA has no float16
    product on CPU that JAX asks for here, so float32 takes its place there.
    """
    dtype = q_BLNK.dtype
    if dtype == jnp.float16 and jax.default_backend() == "cpu":
        q_BLNK, k_BSGK, v_BSGK = (x.astype(jnp.float32) for x in (q_BLNK, k_BSGK, v_BSGK))
    places = [jnp.arange(ids.shape[1]) for ids in (q_ids_BL, kv_ids_BS)]
    places = places if positions_BL is None else [positions_BL, positions_BL]
    seen_BLS = visible(q_ids_BL, kv_ids_BS, *places, causal=causal, window=window)
    out_BLNK = jax.nn.dot_product_attention(q_BLNK, k_BSGK, v_BSGK, mask=seen_BLS[:, None])
    return jnp.where(seen_BLS.any(axis=-1)[:, :, None, None], out_BLNK, 0).astype(dtype)


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
