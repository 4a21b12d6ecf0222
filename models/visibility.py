"""The keys that a query sees: the one rule that all attention follows.

Shape letters are explained in `models/__init__.py`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

# The name of results of attention, which `remat` keeps, since they cost more than a layer's input
# of the same size.
KEPT = "attention"


class Visibility(NamedTuple):
    """A query sees the keys with `since ≤ place < until`, where `place` is that of the query."""

    places_BL: Array  # int32; −1: the query is padding and sees nothing
    since_BS: Array  # int32
    until_BS: Array  # int32; 0: the key is padding and nothing sees it

    def mask(self) -> Array:
        """Return bool [B, L, S]: True where a query sees a key."""
        return seen(self.places_BL, self.since_BS, self.until_BS)


def seen(places: Array, since: Array, until: Array) -> Array:
    """Return bool [..., L, S] from places [..., L] of queries, and the ranges [..., S] of keys."""
    places = places[..., :, None]
    return (since[..., None, :] <= places) & (places < until[..., None, :])


def causal_until(until_BL: Array, window: int | None = None) -> Visibility:
    """Return the visibility if query q sees key k where k ≤ q < until[k].

    For until [4, 3, 3, 4, 6, 6, 0], which is a prefix with two continuations, of two columns and of
    one, and a document of two columns, the columns seen are 0 | 0 1 | 0 1 2 | 0 3 | 4 | 4 5 | none.

    Args:
        until_BL: int [B, L], for each column the first later column that no longer sees it; 0 on
            padding.
        window: a query sees only keys fewer than this many columns away; None: all of them.
    """
    columns_BL = jnp.broadcast_to(jnp.arange(until_BL.shape[1]), until_BL.shape)
    places_BL = jnp.where(until_BL > 0, columns_BL, -1)
    if window is not None:
        until_BL = jnp.minimum(until_BL, columns_BL + window)
    return Visibility(places_BL, columns_BL, until_BL)


def segment_ends(ids_BL: Array) -> Array:
    """Return int32 [B, L]: for each column the end of its segment, 0 on padding.

    For ids [1, 1, 2, 0] they are [2, 2, 3, 0]. Segments are contiguous.
    """
    last_BL = jnp.pad(ids_BL[:, 1:] != ids_BL[:, :-1], ((0, 0), (0, 1)), constant_values=True)
    L = ids_BL.shape[1]
    ends_BL = jax.lax.cummin(jnp.where(last_BL, jnp.arange(L) + 1, L), axis=1, reverse=True)
    return jnp.where(ids_BL > 0, ends_BL, 0)


def by_segment(
    q_ids_BL: Array,
    kv_ids_BS: Array,
    positions_BL: Array | None = None,
    *,
    causal: bool = False,
    window: int | None = None,
) -> Visibility:
    """Return the visibility if queries see the keys of their segment, anywhere in the row.

    Places are those in a row sorted by segment and position. For ids [2, 1, 2, 0], which become
    [0, 1, 2, 2], they are [2, 1, 3, −1].

    Args:
        q_ids_BL: int [B, L], the segment of each query, 0 on padding.
        kv_ids_BS: int [B, S], the segment of each key; any integers, 0 on padding.
        positions_BL: int [B, L], ascending in each segment; None: columns ascend.
        causal: whether a query sees no later key; queries and keys must be the same columns.
        window: a query sees keys fewer than this many places away, of the same columns; None: all.
    """
    minor_BL = jnp.zeros_like(q_ids_BL) if positions_BL is None else positions_BL
    order_BL = jnp.lexsort((minor_BL, q_ids_BL))
    places_BL = jnp.argsort(order_BL)
    sorted_BL = jnp.take_along_axis(q_ids_BL, order_BL, axis=1)
    since_BS, until_BS = (
        jax.vmap(lambda row, ids, side=side: jnp.searchsorted(row, ids, side=side))(
            sorted_BL, kv_ids_BS
        ).astype(jnp.int32)
        for side in ("left", "right")
    )
    if window is not None:
        since_BS = jnp.maximum(since_BS, places_BL - window + 1)
        until_BS = jnp.minimum(until_BS, places_BL + window)
    if causal:
        since_BS = jnp.maximum(since_BS, places_BL)
    return Visibility(
        jnp.where(q_ids_BL > 0, places_BL, -1), since_BS, jnp.where(kv_ids_BS > 0, until_BS, 0)
    )
