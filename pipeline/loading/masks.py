"""The attention mask of a batch, for models that take one."""

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from pipeline.errors import InvalidValue
from pipeline.loading.sharding import with_auto_axes


def attention_mask(
    batch: Mapping[str, Any],
    *,
    side: str = "inputs",
    parts: str | None = None,
    causal: bool = True,
) -> Any:
    """The mask of attention within a side: the columns that each column of a row sees.

    A column sees the columns of its example that are not later, or all with `causal=False`. In a
    group, a continuation sees the prefix and itself, but no other continuation; there
    `visible_until` has, for each column, the first later column that no longer sees it. A column of
    padding sees only itself, so that no softmax is empty.

    The mask takes `rows · length²` bytes: 512 MiB for 8 rows of 8,192. If that is too much, an
    attention kernel can make it from `visible_until`, tile by tile.

    >>> batch = {"inputs_segment_ids": np.array([[1, 1, 2, 0]]),
    ...          "inputs_positions": np.array([[0, 1, 0, 0]])}
    >>> attention_mask(batch).astype(int)
    array([[[1, 0, 0, 0],
            [1, 1, 0, 0],
            [0, 0, 1, 0],
            [0, 0, 0, 1]]])

    Args:
        batch: fields `[rows, length]`, of NumPy or JAX, also in a compiled step; whole rows. With
            groups, columns must be in order.
        side: the side whose columns see one another; of pairs, "targets" for the decoder.
        parts: a pointer of that side to a side of parts, such as "patch_image": columns then see
            those of their part alone.
        causal: whether later columns are hidden.

    Returns:
        bool `[rows, length, length]`, of NumPy or JAX like the batch: `[r, q, k]` is True if
        column `q` of row `r` sees column `k`.

    Raises:
        ValueError: the batch has no segment ids or positions of that side, or it is the side of the
            inputs of pairs, which are not causal.
    """
    needed = (parts or f"{side}_segment_ids", f"{side}_positions")
    encodes = side == "inputs" and causal and "decoder_inputs" in batch
    if encodes or any(name not in batch for name in needed):
        raise InvalidValue(
            f"the batch has {', '.join(batch)}; the mask needs {' and '.join(needed)}, before the "
            "batch is renamed or transformed. Of pairs, give side='targets', or causal=False for "
            "the inputs, and compare the segment ids of both sides for cross-attention"
        )
    until = ["visible_until"] if causal and side == "inputs" and "visible_until" in batch else []
    fields = [batch[name] for name in (*needed, *until)]
    if isinstance(fields[0], np.ndarray):
        return _see(np, *fields, starts=int(parts is not None), causal=causal)
    import jax

    spec = jax.sharding.PartitionSpec(*jax.typeof(fields[0]).sharding.spec, None)
    see = functools.partial(_see, jax.numpy, starts=int(parts is not None), causal=causal)
    return with_auto_axes(see, *fields, spec=spec)


def _see(
    xp: Any, ids: Any, positions: Any, until: Any = None, *, starts: int = 0, causal: bool = True
) -> Any:
    ids = ids + starts  # pointers to parts count from 0
    columns = xp.arange(ids.shape[1])
    if until is not None:
        seen = (columns[:, None] >= columns) & (columns[:, None] < until[:, None])
    else:  # positions tell the order in any order of columns
        seen = ids[:, :, None] == ids[:, None]
        if causal:
            seen &= positions[:, :, None] >= positions[:, None]
    return xp.where(ids[:, :, None] > 0, seen, columns[:, None] == columns)
