"""Compact batches: boundaries of segments in place of segment ids, positions and weights.

These three of the five fields of a batch follow from where segments begin. A compact batch has
`segments` instead, and `expand` makes the three fields on the device, inside the compiled step:

    batches = pipeline.load(corpus, compact=True, …)

    def train_step(state, batch):
        batch = pipeline.expand(batch)  # now as any other batch
        …
"""

from collections.abc import Mapping
from typing import Any, cast

import numpy as np

from pipeline.loading.fields import Batch

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
        start: the position it begins with, in its example or (positions="restart") 0.
        size: its length.
        shape: the number of rows, and the most segments in a row.
    """
    found = np.zeros((*shape, 2), np.int32)
    found[row, ids - 1, 0], found[row, ids - 1, 1] = size, start
    return found


def expand(batch: Mapping[str, Any]) -> Batch[Any]:
    """A compact batch with `inputs_segment_ids`, `inputs_positions` and `loss_weights`.

    Call it first in a compiled step. The arrays equal, bit for bit, those of a batch that is not
    compact. A batch that is not compact is returned unchanged.

    Args:
        batch: as `load(…, compact=True)` gives it: `inputs` and `targets`, int32 `[rows, length]`,
            `segments`, int32 `[rows, most segments, 2]`, and `loss_weights` if they are stored.
    """
    if SEGMENTS not in batch:
        return cast(Batch[Any], dict(batch))
    import jax.numpy as jnp

    fields = dict(batch)
    segments = fields.pop(SEGMENTS)
    length, start = segments[..., 0], segments[..., 1]
    begin = jnp.cumsum(length, axis=1) - length
    place = jnp.arange(fields["inputs"].shape[1], dtype=jnp.int32)
    # The id of a column is the number of segments that begin at it or before it. Its position is
    # the column, moved by `ahead` of its segment: the sum of what each of them adds to it.
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
    return cast(Batch[Any], fields)  # it may be of any corpus
