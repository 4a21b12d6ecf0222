"""Which keys a query sees, as a mask and as a range: the one rule that all attention follows."""

import jax.numpy as jnp
from jax import Array


def visible(
    q_ids: Array,
    kv_ids: Array,
    q_places: Array,
    kv_places: Array,
    *,
    causal: bool,
    window: int | None,
) -> Array:
    """Return bool [..., L, S]: True where a query sees a key.

    They must share a segment other than 0; with `causal` the key is not later in the row; with
    `window` they are fewer than `window` places apart.

    Args:
        q_ids: int [..., L], segment of each query.
        kv_ids: int [..., S], segment of each key.
        q_places: int [..., L], where in the row, or in its segment, each query is.
        kv_places: int [..., S], where each key is, counted likewise.
        causal: whether keys must not be later than their query.
        window: or None.
    """
    seen = (q_ids[..., :, None] == kv_ids[..., None, :]) & (q_ids != 0)[..., :, None]
    distance = q_places[..., :, None] - kv_places[..., None, :]
    if causal:
        seen &= distance >= 0
    if window is not None:
        seen &= jnp.abs(distance) < window
    return seen


def reach(
    q_ids: Array,
    kv_ids: Array,
    q_places: Array | None = None,
    *,
    causal: bool,
    window: int | None,
) -> tuple[Array, Array]:
    """Return int32 (first [L], stop [L]): every key that query i sees is in first[i] … stop[i] − 1.

    Key i is at place i; so is query i, unless `q_places`, int [L], says otherwise.

    For ids [1, 1, 2, 0], causal: first is [0, 0, 2, 4] and stop is [1, 2, 3, 0]; a query that sees
    nothing has first = S and stop = 0, so that a minimum or maximum over a block ignores it.

    Found by sorting the keys' ids, so no L×S array appears, and ids may be any integers in any
    order; where a segment is in pieces the range covers them all and what lies between.
    """
    S = kv_ids.shape[0]
    order = jnp.argsort(kv_ids, stable=True)  # the places of each id, ids and places ascending
    left = jnp.searchsorted(kv_ids[order], q_ids, side="left")
    right = jnp.searchsorted(kv_ids[order], q_ids, side="right")
    first = order[jnp.minimum(left, S - 1)]
    stop = order[jnp.maximum(right - 1, 0)] + 1
    here = jnp.arange(q_ids.shape[0]) if q_places is None else q_places
    if causal:
        stop = jnp.minimum(stop, here + 1)
    if window is not None:
        first = jnp.maximum(first, here - window + 1)
        stop = jnp.minimum(stop, here + window)
    nothing = (left == right) | (q_ids == 0) | (first >= stop)
    return (
        jnp.where(nothing, S, first).astype(jnp.int32),
        jnp.where(nothing, 0, stop).astype(jnp.int32),
    )
