"""The attention mask of a batch, for models that take one."""

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from pipeline.errors import InvalidValue
from pipeline.loading.sharding import with_auto_axes


def attention_mask(batch: Mapping[str, Any]) -> Any:
    """The mask of causal attention: the columns that each column of a row sees.

    A column sees the columns of its example that are not later. In a group, a continuation sees the
    prefix and itself, but no other continuation; there `visible_until` has, for each column, the
    first later column that no longer sees it. A column of padding sees only itself, so that no
    softmax is empty.

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

    Returns:
        bool `[rows, length, length]`, of NumPy or JAX like the batch: `[r, q, k]` is True if
        column `q` of row `r` sees column `k`.

    Raises:
        ValueError: the batch has no segment ids or positions, or is of pairs.
    """
    needed = ("inputs_segment_ids", "inputs_positions")
    if "decoder_inputs" in batch or any(name not in batch for name in needed):
        raise InvalidValue(
            f"the batch has {', '.join(batch)}; a causal mask needs {' and '.join(needed)}, and no "
            "pairs. Make the mask before the batch is renamed or transformed; for pairs, compare "
            "the segment ids of both sides"
        )
    fields = [batch[name] for name in (*needed, "visible_until") if name in batch]
    if isinstance(fields[0], np.ndarray):
        return _see(np, *fields)
    import jax

    spec = jax.sharding.PartitionSpec(*jax.typeof(fields[0]).sharding.spec, None)
    return with_auto_axes(functools.partial(_see, jax.numpy), *fields, spec=spec)


def _see(xp: Any, ids: Any, positions: Any, until: Any = None) -> Any:
    columns = xp.arange(ids.shape[1])[None]
    queries, keys = columns[:, :, None], columns[:, None]
    if until is not None:
        seen = (queries >= keys) & (queries < until[:, None])
    else:  # positions tell the order in any order of columns
        seen = (ids[:, :, None] == ids[:, None]) & (positions[:, :, None] >= positions[:, None])
    return xp.where(ids[:, :, None] > 0, seen, queries == keys)
