"""What keeps the segments of a row apart: masks, boundaries, starts, and targets further ahead."""

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from pipeline.errors import InvalidValue, require_whole
from pipeline.fields.arrays import in_planned_order, on_host_or_device, require_planned_order


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
    if side == "inputs" and causal and "decoder_inputs" in batch:
        raise InvalidValue(
            "the mask of the inputs of pairs is not causal; give side='targets', or causal=False "
            "for the inputs, and compare the segment ids of both sides for cross-attention"
        )
    names = [parts or f"{side}_segment_ids", *[f"{side}_positions"] * causal]
    if groups := causal and side == "inputs" and "visible_until" in batch:
        names.append("visible_until")
    ids, *others = _fields(batch, *names, groups=groups)
    ids = ids if parts is None else ids + 1  # pointers to parts count from 0
    return on_host_or_device(_see, ids, *others, dimensions=2)


def _see(xp: Any, ids: Any, positions: Any = None, until: Any = None) -> Any:
    columns = xp.arange(ids.shape[1])[None]
    queries, keys = columns[:, :, None], columns[:, None]
    if until is not None:
        seen = (queries >= keys) & (queries < until[:, None])
    else:
        seen = ids[:, :, None] == ids[:, None]
        if positions is not None:  # they tell the order in any order of columns
            seen &= positions[:, :, None] >= positions[:, None]
    return xp.where(ids[:, :, None] > 0, seen, queries == keys)


def cu_seqlens(
    batch: Mapping[str, Any],
    max_segments: int,
    *,
    align: int = 1,
    side: str | None = None,
    parts: str | None = None,
) -> dict[str, Any]:
    """The boundaries of the sequences of a batch, for variable-length attention kernels (THD).

    They have the names of `DotProductAttention` of Transformer Engine and `PackedSeqParams` of
    Megatron-LM; `flash_attn_varlen_func` of FlashAttention calls `_kv` `_k`.

    They count the tokens of all rows, one row after another: `batch["inputs"].reshape(-1)`. The
    last sequence of each row is its padding, so every position is in a sequence, and kernels leave
    none undefined. Unused sequences have length 0. With `max_segments=3`, a row of length 6 with
    segments of 3 and 2 positions has `cu_seqlens_q = [0, 3, 5, 5, 6]`.

    Args:
        batch: fields `[rows, length]` with segment ids, of NumPy or JAX, also in a compiled step;
            whole rows with columns in order.
        max_segments: the most segments in a row: `plan.most_segments()[bucket]`. It decides the
            shapes.
        align: that of the plan (1). Above 1, padding may follow every segment, and is a sequence
            there: a row has `2 · max_segments` sequences instead of `max_segments + 1`.
        side: the side of both q and kv. Default None: for pairs, q is the side of the targets and
            kv that of the inputs; otherwise both are the inputs.
        parts: instead, a pointer to a side of parts, such as "patch_image", whose parts are the
            sequences; then `max_segments` is the length of that side.

    Returns:
        `cu_seqlens_q` and `cu_seqlens_kv`, int32 `[rows · (max_segments + 1) + 1]`, from 0 up to
        `rows · length`; `max_seqlen_q` and `max_seqlen_kv`, the row lengths, int.

    Raises:
        ValueError: the batch has no segment ids, has groups, or another order of columns; or a row
            of NumPy arrays has more segments, or, with `align=1`, padding before a segment.
    """
    sides = [name.removesuffix("_segment_ids") for name in batch if name.endswith("_segment_ids")]
    for looked_at in (side,) if side else sides:
        require_planned_order(batch, looked_at, "sequences of a kernel are")
    (ids,) = _fields(batch, parts or f"{side or 'inputs'}_segment_ids")
    q = kv = ids if parts is None else ids + 1  # pointers to parts count from 0
    if side is None and parts is None:
        q = batch.get("targets_segment_ids", kv)
    lengths = {}
    for name, ids in (("q", q), ("kv", kv)):
        lengths[f"cu_seqlens_{name}"] = _sequence_ends(ids, max_segments, align)
        lengths[f"max_seqlen_{name}"] = ids.shape[1]
    return lengths


def _sequence_ends(ids: Any, max_segments: int, align: int) -> Any:
    """0 and the end of each sequence, of segments and padding: int32 [sequences + 1]."""
    on_host = isinstance(ids, np.ndarray)
    if on_host and (most := int(ids.max(initial=0))) > max_segments:
        raise InvalidValue(
            f"max_segments is {max_segments}, but a row holds {most} segments; give "
            "plan.most_segments()[bucket], or plan with max_segments="
        )
    if on_host and align == 1 and ((ids[:, 1:] > 0) & (ids[:, :-1] == 0)).any():
        raise InvalidValue(
            "a row has padding before a segment; give the plan's align=, which makes this padding "
            "a sequence"
        )
    count = functools.partial(_count_ends, max_segments=max_segments, align=align)
    return on_host_or_device(count, ids, dimensions=0)


def _count_ends(xp: Any, ids: Any, max_segments: int, align: int) -> Any:
    if align == 1:
        per_row = max_segments + 1
        sequence = xp.where(ids > 0, xp.minimum(ids - 1, max_segments), max_segments)
    else:
        per_row = 2 * max_segments
        before = xp.maximum(xp.maximum.accumulate(ids, axis=1) - 1, 0)
        sequence = xp.minimum(2 * before + (ids == 0), per_row - 1)
    sequences = sequence + per_row * np.arange(len(ids), dtype=np.int32)[:, None]
    count = len(ids) * per_row
    size = {"minlength" if xp is np else "length": count}
    sizes = xp.bincount(sequences.reshape(-1), **size)
    return xp.pad(xp.cumsum(sizes, dtype=np.int32), (1, 0))


def segment_starts(batch: Mapping[str, Any], *, side: str = "inputs") -> Any:
    """The columns where a recurrent layer starts from an empty state: the first of each segment.

    A piece of a split example starts anew, too, although its positions go on: the state that it
    would continue from is in another row, or in another step.

    >>> batch = {"inputs_segment_ids": np.array([[1, 1, 2, 3, 3, 0]])}
    >>> segment_starts(batch).astype(int)
    array([[1, 0, 1, 1, 0, 0]])

    Args:
        batch: fields `[rows, length]`, of NumPy or JAX, also in a compiled step; whole rows with
            columns in order.
        side: the side of the layer; of pairs, "targets" for the decoder.

    Returns:
        bool `[rows, length]`, of NumPy or JAX like the batch; False on padding.

    Raises:
        ValueError: the batch has no segment ids of that side, has groups, or another order of
            columns, in which no state can go from column to column.
    """
    require_planned_order(batch, side, "a recurrent layer needs")
    ids = _fields(batch, f"{side}_segment_ids")
    return on_host_or_device(_find_starts, *ids, dimensions=2)


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
            whole rows, with columns in any `context_order`.
        ahead: the number of tokens after the next one, from 1.

    Returns:
        Targets and weights, `[rows, length]`, with the dtypes of `targets` and `loss_weights`.

    Raises:
        ValueError: the batch lacks a field, is of pairs or groups, has only some of the columns
            that were moved, or `ahead` is no such number.
    """
    ahead = require_whole("ahead", ahead, 1)
    if "decoder_inputs" in batch:
        raise InvalidValue("the batch is of pairs; targets further ahead need a causal batch")
    fields = _fields(batch, "inputs_segment_ids", "targets", "loss_weights")
    columns = batch.get("inputs_columns")
    move = in_planned_order(functools.partial(_move, ahead=ahead), columns)
    more = [] if columns is None else [columns]
    return on_host_or_device(move, *fields, *more, dimensions=2)


def _move(xp: Any, ids: Any, targets: Any, weights: Any, ahead: int) -> tuple[Any, Any]:
    ids_then, targets, weights = (
        xp.pad(field, ((0, 0), (0, ahead)))[:, ahead:] for field in (ids, targets, weights)
    )
    same = (ids_then == ids) & (ids > 0)
    return xp.where(same, targets, 0), xp.where(same, weights, 0)


def _find_starts(xp: Any, ids: Any) -> Any:
    return (ids != xp.pad(ids, ((0, 0), (1, 0)))[:, :-1]) & (ids > 0)


def _fields(batch: Mapping[str, Any], *names: str, groups: bool = False) -> list[Any]:
    """Fields of a batch, which may have groups only if the caller says so."""
    if missing := [name for name in names if name not in batch]:
        raise InvalidValue(
            f"the batch has no {missing[0]}; it has {', '.join(batch)}. Give it as it was loaded, "
            "before it is renamed or transformed"
        )
    if "visible_until" in batch and not groups:
        raise InvalidValue(
            "the batch has groups, whose continuations share a prefix that is not beside them; use "
            "a causal attention_mask or visible_until, or load examples that are not groups"
        )
    return [batch[name] for name in names]
