"""What keeps the segments of a row apart: the mask of attention, and where state starts anew."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from pipeline.errors import InvalidValue
from pipeline.loading.sharding import with_auto_axes


def attention_mask(batch: Mapping[str, Any], *, causal: bool = True) -> Any:
    """The mask of attention: the columns that each column of a row sees.

    A column sees the columns of its example that are not later, or with `causal=False`, as encoders
    do, all columns of its example. In a group, a continuation sees the
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
            groups, columns must be in order. Without `causal`, only segment ids are needed.
        causal: whether a column sees no later ones.

    Returns:
        bool `[rows, length, length]`, of NumPy or JAX like the batch: `[r, q, k]` is True if
        column `q` of row `r` sees column `k`.

    Raises:
        ValueError: the batch has no segment ids or positions, or is of pairs; or it has groups, and
            the mask is not causal.
    """
    needed = ("inputs_segment_ids", *["inputs_positions"] * causal)
    if "decoder_inputs" in batch or any(name not in batch for name in needed):
        raise InvalidValue(
            f"the batch has {', '.join(batch)}; a mask needs {' and '.join(needed)}, and no "
            "pairs. Make the mask before the batch is renamed or transformed; for pairs, compare "
            "the segment ids of both sides"
        )
    if "visible_until" in batch and not causal:
        raise InvalidValue(
            "the batch has groups, whose continuations see their prefix and not each other; leave "
            "causal=True, or load examples that are not groups"
        )
    fields = [batch[name] for name in (*needed, "visible_until") if name in batch]
    if isinstance(fields[0], np.ndarray):
        return _see(np, *fields)
    import jax

    spec = jax.sharding.PartitionSpec(*jax.typeof(fields[0]).sharding.spec, None)
    return with_auto_axes(functools.partial(_see, jax.numpy), *fields, spec=spec)


def _see(xp: Any, ids: Any, positions: Any = None, until: Any = None) -> Any:
    columns = xp.arange(ids.shape[1])
    if until is not None:
        seen = (columns[:, None] >= columns) & (columns[:, None] < until[:, None])
    else:
        seen = ids[:, :, None] == ids[:, None]
        if positions is not None:  # they tell the order in any order of columns
            seen &= positions[:, :, None] >= positions[:, None]
    return xp.where(ids[:, :, None] > 0, seen, columns[:, None] == columns)


def segment_starts(batch: Mapping[str, Any]) -> Any:
    """The columns where a recurrent layer starts from an empty state: the first of each segment.

    A piece of a split example starts anew, too, although its positions go on: the state that it
    would continue from is in another row, or in another step.

    >>> batch = {"inputs_segment_ids": np.array([[1, 1, 2, 3, 3, 0]])}
    >>> segment_starts(batch).astype(int)
    array([[1, 0, 1, 1, 0, 0]])

    Args:
        batch: fields `[rows, length]`, of NumPy or JAX, also in a compiled step; whole rows with
            columns in order. For the decoder of pairs, give
            `{"inputs_segment_ids": batch["targets_segment_ids"]}`.

    Returns:
        bool `[rows, length]`, of NumPy or JAX like the batch; False on padding.

    Raises:
        ValueError: the batch has no segment ids, or has groups.
    """
    return _compare(batch, _find_starts, "inputs_segment_ids")


def _find_starts(xp: Any, ids: Any) -> Any:
    return (ids != xp.pad(ids, ((0, 0), (1, 0)))[:, :-1]) & (ids > 0)


def _compare(batch: Mapping[str, Any], function: Callable[..., Any], *names: str) -> Any:
    """`function` of NumPy or JAX and of the fields, which compares columns of a segment."""
    if missing := [name for name in names if name not in batch]:
        raise InvalidValue(
            f"the batch has no {missing[0]}; it has {', '.join(batch)}. Give it as it was loaded, "
            "before it is renamed or transformed"
        )
    if "visible_until" in batch:
        raise InvalidValue(
            "the batch has groups, in which a column may follow a prefix that is not beside it; "
            "load examples that are not groups"
        )
    fields = [batch[name] for name in names]
    if isinstance(fields[0], np.ndarray):
        return function(np, *fields)
    import jax

    spec = jax.typeof(fields[0]).sharding.spec
    return with_auto_axes(functools.partial(function, jax.numpy), *fields, spec=spec)
