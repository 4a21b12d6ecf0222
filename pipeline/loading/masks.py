"""What keeps the segments of a row apart: masks, starts of state, and targets further ahead."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from pipeline.errors import InvalidValue, require_whole
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
            groups, columns must be in order. Without `causal`, only segment ids are needed.
        side: the side whose columns see one another; of pairs, "targets" for the decoder.
        parts: a pointer of that side to a side of parts, such as "patch_image": columns then see
            those of their part alone.
        causal: whether later columns are hidden.

    Returns:
        bool `[rows, length, length]`, of NumPy or JAX like the batch: `[r, q, k]` is True if
        column `q` of row `r` sees column `k`.

    Raises:
        ValueError: the batch has no segment ids or positions of that side; or it is the side of the
            inputs of pairs, or has groups, and the mask is causal there, or is not causal here.
    """
    needed = (parts or f"{side}_segment_ids", *[f"{side}_positions"] * causal)
    encodes = side == "inputs" and causal and "decoder_inputs" in batch
    if encodes or any(name not in batch for name in needed):
        raise InvalidValue(
            f"the batch has {', '.join(batch)}; the mask needs {' and '.join(needed)}, before the "
            "batch is renamed or transformed. Of pairs, give side='targets', or causal=False for "
            "the inputs, and compare the segment ids of both sides for cross-attention"
        )
    if "visible_until" in batch and not causal:
        raise InvalidValue(
            "the batch has groups, whose continuations see their prefix and not each other; leave "
            "causal=True, or load examples that are not groups"
        )
    until = ["visible_until"] if side == "inputs" and "visible_until" in batch else []
    fields = [batch[name] for name in (*needed, *until)]
    starts = int(parts is not None)  # pointers to parts count from 0
    if isinstance(fields[0], np.ndarray):
        return _see(np, starts, *fields)
    import jax

    spec = jax.sharding.PartitionSpec(*jax.typeof(fields[0]).sharding.spec, None)
    return with_auto_axes(functools.partial(_see, jax.numpy, starts), *fields, spec=spec)


def _see(xp: Any, starts: int, ids: Any, positions: Any = None, until: Any = None) -> Any:
    ids = ids + starts
    columns = xp.arange(ids.shape[1])[None]
    queries, keys = columns[:, :, None], columns[:, None]
    if until is not None:
        seen = (queries >= keys) & (queries < until[:, None])
    else:
        seen = ids[:, :, None] == ids[:, None]
        if positions is not None:  # they tell the order in any order of columns
            seen &= positions[:, :, None] >= positions[:, None]
    return xp.where(ids[:, :, None] > 0, seen, queries == keys)


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


def targets_ahead(batch: Mapping[str, Any], ahead: int) -> tuple[Any, Any]:
    """The targets some tokens later in the same segment, and their weights, for multi-token heads.

    With `ahead=1`, a position gets the token after its target. The last `ahead` positions of each
    segment get 0 and weight 0; at the end of a piece of a split example, their tokens are in
    another row. Divide the loss by the sum of these weights over the global batch.

    >>> batch = {"inputs_segment_ids": np.array([[1, 1, 1, 2, 2, 0]]),
    ...          "targets": np.array([[5, 6, 7, 8, 9, 0]]),
    ...          "loss_weights": np.array([[1, 1, 0.5, 1, 1, 0]])}
    >>> targets_ahead(batch, 1)
    (array([[6, 7, 0, 9, 0, 0]]), array([[1. , 0.5, 0. , 1. , 0. , 0. ]]))

    Args:
        batch: fields `[rows, length]` of a causal batch, of NumPy or JAX, also in a compiled step;
            whole rows with columns in order.
        ahead: the number of tokens after the next one, from 1.

    Returns:
        Targets and weights, `[rows, length]`, with the dtypes of `targets` and `loss_weights`.

    Raises:
        ValueError: the batch lacks a field, is of pairs or groups, or `ahead` is no such number.
    """
    ahead = require_whole("ahead", ahead, 1)
    if "decoder_inputs" in batch:
        raise InvalidValue("the batch is of pairs; targets further ahead need a causal batch")
    move = functools.partial(_move, ahead=ahead)
    names = "inputs_segment_ids", "targets", "loss_weights"
    return _compare(batch, move, *names)


def _move(xp: Any, ids: Any, targets: Any, weights: Any, ahead: int) -> tuple[Any, Any]:
    ids_then, targets, weights = (
        xp.pad(field, ((0, 0), (0, ahead)))[:, ahead:] for field in (ids, targets, weights)
    )
    same = (ids_then == ids) & (ids > 0)
    return xp.where(same, targets, 0), xp.where(same, weights, 0)


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
