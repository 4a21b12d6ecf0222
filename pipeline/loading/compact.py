"""Compact batches: rows' boundaries in place of the fields that follow from them.

Segment ids, positions and weights are three of the five fields of a batch, and all three follow
from where segments begin. A compact batch has `segments` instead, and `expand` makes the three on
the device, inside the compiled step:

    batches = pipeline.load(corpus, compact=True, …)

    def train_step(state, batch):
        batch = pipeline.expand(batch)  # now as any other batch
        …
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

SEGMENTS = "segments"


def row_segments(
    row: np.ndarray, ids: np.ndarray, start: np.ndarray, size: np.ndarray, shape: tuple[int, int]
) -> np.ndarray:
    """Length and first position of each segment of each row: int32 [rows, most, 2], then zeros.

    >>> row, ids, start, size = np.array([[0, 0, 1], [1, 2, 1], [0, 7, 0], [3, 2, 4]])
    >>> row_segments(row, ids, start, size, (2, 2)).tolist()
    [[[3, 0], [2, 7]], [[4, 0], [0, 0]]]

    Args:
        row: the row of each segment; integers [segments].
        ids: its number in the row, from 1.
        start: its first position, within its example.
        size: its length.
        shape: how many rows there are, and the most segments that a row has.
    """
    found = np.zeros((*shape, 2), np.int32)
    found[row, ids - 1, 0], found[row, ids - 1, 1] = size, start
    return found


def expand(batch: Mapping[str, Any]) -> dict[str, Any]:
    """A compact batch with `inputs_segment_ids`, `inputs_positions` and `loss_weights`.

    To be called inside a compiled step, before all else. The arrays are those of a batch that is
    not compact, bit for bit; one that is not is given back as it is.
    """
    if SEGMENTS not in batch:
        return dict(batch)
    import jax.numpy as jnp

    fields = dict(batch)
    segments = fields.pop(SEGMENTS)
    length, start = segments[..., 0], segments[..., 1]
    begin = jnp.cumsum(length, axis=1) - length
    place = jnp.arange(fields["inputs"].shape[1], dtype=jnp.int32)
    # Of each place, the segments that begin at it or before: their number is its id, and what
    # each adds to how far positions are ahead of places adds up. Unused ones add nothing.
    used = length > 0
    ahead = jnp.where(used, start - begin, 0)
    more = jnp.where(used, jnp.diff(ahead, axis=1, prepend=0), 0)
    reached = (begin[:, :, None] <= place) & used[:, :, None]
    real = place < jnp.sum(length, axis=1, keepdims=True)
    ids = jnp.sum(reached, axis=1, dtype=jnp.int32)
    positions = place + jnp.sum(jnp.where(reached, more[:, :, None], 0), axis=1)
    fields["inputs_segment_ids"] = jnp.where(real, ids, 0)
    fields["inputs_positions"] = jnp.where(real, positions, 0)
    fields.setdefault("loss_weights", real.astype(jnp.float32))
    return fields
