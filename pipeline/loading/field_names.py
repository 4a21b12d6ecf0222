"""Batches with the field names of other trainers, checked against these trainers.

- MaxText 0.2.5: the keys of `get_shaped_batch` in `utils/maxtext_utils.py`; in
  `trainers/pre_train/train.py` the loss of a position counts where `targets_segmentation` is not 0.
- Tunix 0.1.7: `TrainingInput` and `_default_loss_fn` in `tunix/sft/peft_trainer.py`, which shifts
  tokens and mask by one itself.
- Hugging Face, transformers 5.23: `ForCausalLMLoss` in `loss_utils.py`, where labels of -100 do not
  count and `shift_labels` are not shifted again; `find_packed_sequence_indices` in
  `masking_utils.py` tells packed examples apart by their positions.
- `cu_seqlens`: `DotProductAttention` of Transformer Engine and `PackedSeqParams` of Megatron-LM;
  `flash_attn_varlen_func` of FlashAttention calls `_kv` `_k`.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import numpy as np

from pipeline.errors import InvalidValue, require_one_of
from pipeline.loading.sharding import with_auto_axes
from pipeline.text.features import EXAMPLE_ID, FIELDS

Fields = Mapping[str, Any]

Convention = Literal["maxtext", "tunix", "huggingface"]

# Tokens, segment ids and positions of each side of a batch.
INPUTS = ("inputs", "inputs_segment_ids", "inputs_positions")
TARGETS = ("decoder_inputs", "targets_segment_ids", "targets_positions")
LOSS = ("targets", "loss_weights")


def rename(batch: Fields, convention: Convention) -> dict[str, Any]:
    """The fields of a batch under the names of another trainer.

    `load(…, transform=lambda batch: rename(batch, "maxtext"))` applies it to all. These trainers
    have no loss weights; a weight of 0 becomes a segment id of 0 (MaxText), a mask of False
    (Tunix), or a label of -100 (Hugging Face). Rows for Tunix are one position longer, since it
    takes inputs and targets from the same tokens; so give it NumPy batches, `Batches(…).map(…)`,
    which it transfers itself. Call models of transformers with `use_cache=False`: with a cache,
    they let all examples of a row attend to each other.

    Features and other fields of your own keep their names. Rows of features are not made longer for
    Tunix. If a trainer takes only its own fields, load without others: `load(…, features=())`.

    Args:
        batch: NumPy arrays `[rows, length]` from `Batches`, for a decoder or pairs. For "tunix" and
            "huggingface", which shift columns, whole rows with columns in order.
        convention: "maxtext", "tunix" or "huggingface".

    Raises:
        ValueError: the convention is unknown, or cannot express the batch: it has no targets, a
            field without a name there, a feature with a name that it uses, weights other than 0
            and 1, packed rows, or pieces that do not begin at position 0; the message says how to
            avoid it.
    """
    require_one_of("convention", convention, get_args(Convention))
    pairs = "decoder_inputs" in batch and convention == "huggingface"  # others train only decoders
    known = (*INPUTS, *LOSS, *(TARGETS if pairs else ()))
    own = {name: each for name, each in batch.items() if name not in FIELDS or name == EXAMPLE_ID}
    if strange := [name for name in batch if name not in known and name not in own]:
        raise InvalidValue(
            f"{convention} has no name for {strange[0]}; it has names for {', '.join(known)}"
        )
    if missing := [name for name in known if name not in batch and name != "loss_weights"]:
        raise InvalidValue(
            f"the batch has no {', '.join(missing)}, and {convention} trains with it; batches of "
            "inputs alone, for an encoder, keep their names: do not rename them"
        )
    names, limits = NAMES["huggingface pairs" if pairs else convention]
    _, segments, positions = (batch[name] for name in INPUTS)
    starts = (np.diff(segments, axis=1, prepend=0) != 0) & (segments > 0)
    ids = batch["targets_segment_ids"] if pairs else segments
    weights = np.asarray(batch.get("loss_weights", ids > 0))
    found = {
        WEIGHT: weights[(weights != 0) & (weights != 1)],
        SEGMENT: segments[segments > 1],
        START: positions[starts & (positions > 0)],
    }
    for limit in (WEIGHT, *limits):
        if len(found[limit]):
            raise InvalidValue(f"{convention} cannot express {limit.format(found[limit][0])}")
    counts = (weights > 0) & (ids > 0)
    renamed = {
        name: batch[source] if isinstance(source, str) else source(batch, counts)
        for name, source in names.items()
    }
    if clash := [name for name in own if name in renamed]:
        raise InvalidValue(
            f"the batch has a field {clash[0]} of your own, and {convention} uses that name; give "
            "the feature another name, or load without it"
        )
    return renamed | own


def cu_seqlens(
    batch: Fields,
    max_segments: int,
    *,
    align: int = 1,
    side: str | None = None,
    parts: str | None = None,
) -> dict[str, Any]:
    """The boundaries of the sequences of a batch, for variable-length attention kernels (THD).

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
        ValueError: the batch has no segment ids; or a row of NumPy arrays has more segments, or,
            with `align=1`, padding before a segment.
    """
    needed = parts or f"{side or 'inputs'}_segment_ids"
    if needed not in batch:
        raise InvalidValue(
            f"the batch has no {needed}; it has {', '.join(batch)}. Call cu_seqlens on a batch "
            "before it is renamed or transformed"
        )
    if "visible_until" in batch:
        raise InvalidValue(
            "the batch has groups, whose shared prefixes cu_seqlens cannot express; use "
            "visible_until, or examples that are not groups"
        )
    q = kv = batch[needed] + (parts is not None)
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
    if on_host:
        return _count_ends(np, ids, max_segments, align)
    import jax

    count = functools.partial(_count_ends, jax.numpy, max_segments=max_segments, align=align)
    return with_auto_axes(count, ids, spec=jax.sharding.PartitionSpec())


def _count_ends(xp: Any, ids: Any, max_segments: int, align: int) -> Any:
    if align == 1:
        each = max_segments + 1
        sequence = xp.where(ids > 0, xp.minimum(ids - 1, max_segments), max_segments)
    else:
        each = 2 * max_segments
        before = xp.maximum(xp.maximum.accumulate(ids, axis=1) - 1, 0)
        sequence = xp.minimum(2 * before + (ids == 0), each - 1)
    places = sequence + each * np.arange(len(ids), dtype=np.int32)[:, None]
    count = len(ids) * each
    size = {"minlength" if xp is np else "length": count}
    sizes = xp.bincount(places.reshape(-1), **size)
    return xp.pad(xp.cumsum(sizes, dtype=np.int32), (1, 0))


def _tokens(batch: Fields, counts: np.ndarray) -> np.ndarray:
    """The tokens t0 … tn of each row: the inputs, and the last target after them."""
    tokens = np.pad(batch["inputs"], ((0, 0), (0, 1)))
    size = (batch["inputs_segment_ids"] > 0).sum(axis=1)
    rows = np.flatnonzero(size)
    tokens[rows, size[rows]] = batch["targets"][rows, size[rows] - 1]
    return tokens


def _labels(batch: Fields, counts: np.ndarray) -> np.ndarray:
    return np.where(counts, batch["targets"], -100).astype(batch["targets"].dtype)


def _is_real(side: str) -> Callable[[Fields, np.ndarray], np.ndarray]:
    return lambda batch, counts: (batch[f"{side}_segment_ids"] > 0).astype(np.int32)


SHIFT = (0, 0), (1, 0)  # one column to the right

# What a convention cannot express, and the remedy.
WEIGHT = "loss weight {}: its loss knows only 0 and 1; round the weights first"
SEGMENT = (
    "segment id {}: it has no field that keeps the segments of a row apart; plan one example in a "
    "row, with packing='none'"
)
START = (
    "a segment that begins at position {} of its example: each begins at 0 there; load with "
    "positions='restart', or plan with overflow='truncate' or 'drop', with longer rows, or without "
    "packing='fill'"
)

# For each convention, its names, each with our field, or a function of the batch and of the
# positions where the loss counts; then what it cannot express, besides weights.
NAMES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "maxtext": (
        {
            "inputs": "inputs",
            "targets": "targets",
            "inputs_segmentation": "inputs_segment_ids",
            "targets_segmentation": lambda batch, counts: batch["inputs_segment_ids"] * counts,
            "inputs_position": "inputs_positions",
            "targets_position": "inputs_positions",
        },
        (),
    ),
    "tunix": (
        {"input_tokens": _tokens, "input_mask": lambda batch, counts: np.pad(counts, SHIFT)},
        (SEGMENT, START),
    ),
    "huggingface": (
        {
            "input_ids": "inputs",
            "position_ids": "inputs_positions",
            # The model shifts `labels`, which loses the last position, and leaves `shift_labels`.
            "labels": lambda *given: np.pad(_labels(*given)[:, :-1], SHIFT, constant_values=-100),
            "shift_labels": _labels,
        },
        (START,),
    ),
    "huggingface pairs": (
        {
            "input_ids": "inputs",
            "attention_mask": _is_real("inputs"),
            "decoder_input_ids": "decoder_inputs",
            "decoder_attention_mask": _is_real("targets"),
            "labels": _labels,
        },
        (SEGMENT,),
    ),
}
