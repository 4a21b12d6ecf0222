"""Compact batches: boundaries of segments in place of segment ids, positions and weights.

These three of the five fields of a batch follow from where segments begin. A compact batch has
`segments` instead (of pairs, `inputs_segments` and `targets_segments`), and `expand` makes the
fields on the device, inside the compiled step:

    batches = pipeline.load(corpus, compact=True, …)

    def train_step(state, batch):
        batch = pipeline.expand(batch)  # now as any other batch
        …
"""

from collections.abc import Mapping
from typing import Any, cast

import numpy as np

from pipeline.errors import InvalidValue
from pipeline.loading.fields import Batch

SEGMENTS = "segments"
# For each field of boundaries: the tokens that they are of, and the side in the names of the fields
# that `expand` makes. A batch has the first, or those of pairs.
SIDES = {
    SEGMENTS: ("inputs", "inputs"),
    "inputs_segments": ("inputs", "inputs"),
    "targets_segments": ("decoder_inputs", "targets"),
}


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
    """A compact batch with segment ids, positions and `loss_weights`.

    Call it first in a compiled step. The arrays equal, bit for bit, those of a batch that is not
    compact. A batch that is not compact is returned unchanged.

    Args:
        batch: as `load(…, compact=True)` gives it: tokens, int32 `[rows, length]`, boundaries,
            int32 `[rows, most segments, 2]`, and `loss_weights` if they are stored.
    """
    fields, ids = dict(batch), None
    for name, (tokens, side) in SIDES.items():
        if name in fields:
            ids, positions = _columns(fields.pop(name), fields[tokens].shape[1])
            fields |= {f"{side}_segment_ids": ids, f"{side}_positions": positions}
    if ids is not None:  # the last are those of the side with targets
        fields.setdefault("loss_weights", (ids > 0).astype(np.float32))
    return cast(Batch[Any], fields)  # it may be of any corpus


def _columns(segments: Any, length: int) -> tuple[Any, Any]:
    """Segment ids and positions, int32 [rows, length], of boundaries [rows, most, 2]."""
    xp, sizes, start = _namespace(segments), segments[..., 0], segments[..., 1]
    ends = _ends(sizes, length)
    ids = xp.broadcast_to(xp.arange(1, ends.shape[1], dtype=np.int32), sizes.shape)
    ids, ahead = (
        _spread(xp.pad(values, ((0, 0), (0, 1))), ends, length)  # 0 for the padding
        for values in (ids, start - ends[:, :-1] + sizes)
    )
    return ids, xp.where(ids > 0, xp.arange(length, dtype=np.int32) + ahead, 0)


def _ends(sizes: Any, length: int) -> Any:
    """One past the last column of each segment of a row, then of its padding: [rows, most + 1]."""
    xp = _namespace(sizes)
    ends = xp.cumsum(sizes, axis=1, dtype=np.int32)
    return xp.concatenate([ends, xp.full_like(ends, length, shape=(len(ends), 1))], axis=1)


def _spread(values: Any, ends: Any, length: int) -> Any:
    """The values of segments and padding, repeated over their columns: int32 [rows, length]."""
    xp = _namespace(values)
    begin = xp.pad(ends, ((0, 0), (1, 0)))[:, :-1]
    if xp is np:
        return np.repeat(values.ravel(), (ends - begin).ravel()).reshape(-1, length)
    # A column has the value of the last segment that begins at it or before it: the sum of what
    # each of these adds to the value before. Unlike `repeat`, this needs no other row.
    more = values - xp.pad(values, ((0, 0), (1, 0)))[:, :-1]
    reached = begin[:, :, None] <= xp.arange(length, dtype=np.int32)
    return xp.sum(xp.where(reached, more[:, :, None], 0), axis=1, dtype=np.int32)


def flatten(batch: Mapping[str, Any]) -> dict[str, Any]:
    """A compact batch in THD layout: rows one after another, and where its sequences begin.

    A row of length 6 with segments of 3 and 2 positions, where 3 is the most, has
    `cu_seqlens_q = [0, 3, 5, 5, 6]`. Unused sequences have length 0. The last
    of each row is its padding: every position is in a sequence, so kernels leave none undefined.

    Args:
        batch: as `load(…, compact=True)` gives it; NumPy or JAX arrays, also in a compiled step.

    Returns:
        Tokens, targets, positions and weights, `[rows · length]`; `cu_seqlens_q` and
        `cu_seqlens_kv`, int32 `[rows · (most segments + 1) + 1]`; `max_seqlen_q` and
        `max_seqlen_kv`, the row lengths, int. Of pairs, q is the targets' side and kv the inputs'.

    Raises:
        ValueError: the batch is not compact.
    """
    names = [name for name in SIDES if name in batch]
    if not names:
        raise InvalidValue(
            "the batch is not compact, and thd needs the boundaries of its segments, whose number "
            "the plan bounds; load with compact=True, and rename before expand"
        )
    flat = {
        name: cast(Any, values).reshape(-1)
        for name, values in expand(batch).items()
        if not name.endswith("segment_ids")
    }
    for side, name in (("q", names[-1]), ("kv", names[0])):
        sizes, length = batch[name][..., 0], batch[SIDES[name][0]].shape[1]
        xp, before = _namespace(sizes), length * np.arange(len(sizes), dtype=np.int32)[:, None]
        ends = (_ends(sizes, length) + before).reshape(-1)
        flat[f"cu_seqlens_{side}"] = xp.pad(ends, (1, 0))
        flat[f"max_seqlen_{side}"] = length
    return flat


def _namespace(array: Any) -> Any:
    """NumPy for its own arrays, else `jax.numpy`."""
    if isinstance(array, np.ndarray):
        return np
    import jax.numpy as jnp

    return jnp
