"""Batches with the field names of other trainers, checked against what these publish.

- MaxText 0.2.5: the keys of `get_shaped_batch` in `utils/maxtext_utils.py`; in
  `trainers/pre_train/train.py` the loss of a position counts where `targets_segmentation` is not 0.
- T5X: the standard features in the docstring of seqio's `feature_converters.py`.
- axlearn: `forward` of `axlearn/common/causal_lm.py`, and `predict` of `encoder_decoder.py`;
  negative `target_labels` do not count.
- Tunix 0.1.7: `TrainingInput` and `_default_loss_fn` in `tunix/sft/peft_trainer.py`, which shifts
  tokens and mask by one itself.
- Hugging Face: `ForCausalLMLoss` in transformers' `loss_utils.py`, where labels of -100 do not
  count and `shift_labels` are not shifted again; `find_packed_sequence_indices` in
  `masking_utils.py`, which tells packed examples apart by their positions.
- "thd": `DotProductAttention` of Transformer Engine and `PackedSeqParams` of Megatron-LM;
  `flash_attn_varlen_func` of FlashAttention calls `_kv` `_k`.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import numpy as np

from pipeline.loading.compact import SIDES, flatten

Fields = Mapping[str, Any]

Convention = Literal["maxtext", "t5x", "axlearn", "tunix", "huggingface", "thd"]

# Tokens, segment ids and positions of each side of a batch.
INPUTS = ("inputs", "inputs_segment_ids", "inputs_positions")
TARGETS = ("decoder_inputs", "targets_segment_ids", "targets_positions")
LOSS = ("targets", "loss_weights")


def rename(batch: Fields, convention: Convention) -> dict[str, Any]:
    """The fields of a batch under the names of another trainer.

    `batches.map(lambda batch: rename(batch, "maxtext"))` applies it to all. A trainer without loss
    weights gets weights of 0 in the field that its loss looks at: segment ids of 0 (MaxText),
    labels of -1 (axlearn) or -100 (Hugging Face), a mask of False (Tunix). Rows for Tunix are one
    position longer, since it takes inputs and targets from the same tokens.

    Args:
        batch: NumPy arrays `[rows, length]`, as `Batches` gives them, of a decoder or of pairs. For
            "thd" a compact batch, of NumPy or JAX arrays.
        convention: "maxtext", "t5x", "axlearn", "tunix", "huggingface", or "thd": rows one after
            another and `cu_seqlens_q`, `cu_seqlens_kv`, `max_seqlen_q` and `max_seqlen_kv`, which
            attention kernels of variable length take.

    Raises:
        ValueError: the convention is unknown, or cannot carry the batch: a field without a name
            there, weights other than 0 and 1, packed rows, or pieces that do not begin at position
            0; the message says how to plan or load without it.
    """
    if convention not in CONVENTIONS:
        raise ValueError(
            f"convention is {convention!r}; it must be one of {', '.join(CONVENTIONS)}"
        )
    pairs = "decoder_inputs" in batch
    if pairs and convention in ("maxtext", "tunix"):
        raise ValueError(f"{convention} has no name for decoder_inputs: it trains decoders alone")
    known = (*INPUTS, *LOSS, *(TARGETS if pairs else ()), *(SIDES if convention == "thd" else ()))
    for name in batch:
        if name not in known:
            advice = "; call `expand` on a compact batch" if name in SIDES else ""
            raise ValueError(
                f"{convention} has no name for {name}; it has one for {', '.join(known)}{advice}"
            )
    return CONVENTIONS[convention](batch, TARGETS if pairs else INPUTS)


def _maxtext(batch: Fields, decoder: tuple[str, ...]) -> dict[str, Any]:
    tokens, ids, positions = (batch[name] for name in decoder)
    return {
        "inputs": tokens,
        "targets": batch["targets"],
        "inputs_segmentation": ids,
        "targets_segmentation": np.where(_counts(batch, ids, "maxtext"), ids, 0).astype(ids.dtype),
        "inputs_position": positions,
        "targets_position": positions,
    }


def _t5x(batch: Fields, decoder: tuple[str, ...]) -> dict[str, Any]:
    sides = {"decoder": decoder} if decoder == INPUTS else {"encoder": INPUTS, "decoder": decoder}
    fields = {"decoder_target_tokens": "targets", "decoder_loss_weights": "loss_weights"}
    for side, names in sides.items():
        theirs = (f"{side}_{field}" for field in ("input_tokens", "segment_ids", "positions"))
        fields |= dict(zip(theirs, names, strict=True))
    return {new: batch[old] for new, old in fields.items() if old in batch}


def _axlearn(batch: Fields, decoder: tuple[str, ...]) -> dict[str, Any]:
    labels = {"target_labels": _labels(batch, decoder, "axlearn", -1)}
    if decoder == INPUTS:
        names = ("input_ids", "input_segment_ids", "input_positions")
        return {new: batch[old] for new, old in zip(names, INPUTS, strict=True)} | labels
    names = ("input_ids", "input_segment_ids", "positions")
    return {
        side: {new: batch[old] for new, old in zip(names, ours, strict=True)}
        for side, ours in (("source", INPUTS), ("target", decoder))
    } | labels


def _tunix(batch: Fields, decoder: tuple[str, ...]) -> dict[str, Any]:
    inputs, ids, positions = (batch[name] for name in decoder)
    _require_one_segment(ids, "tunix")
    _require_from_start(ids, positions, "tunix")
    # Each row has its tokens t0 … tn: the inputs, and the last target after them.
    tokens = np.concatenate([inputs, np.zeros_like(inputs[:, :1])], axis=1)
    size = (ids > 0).sum(axis=1)
    rows = np.flatnonzero(size)
    tokens[rows, size[rows]] = batch["targets"][rows, size[rows] - 1]
    counts = _counts(batch, ids, "tunix")
    mask = np.concatenate([np.zeros_like(counts[:, :1]), counts], axis=1)
    return {"input_tokens": tokens, "input_mask": mask}


def _huggingface(batch: Fields, decoder: tuple[str, ...]) -> dict[str, Any]:
    labels = _labels(batch, decoder, "huggingface", -100)
    ids = batch["inputs_segment_ids"]
    if decoder == TARGETS:  # nothing there keeps packed pairs apart
        _require_one_segment(ids, "huggingface")
        return {
            "input_ids": batch["inputs"],
            "attention_mask": (ids > 0).astype(ids.dtype),
            "decoder_input_ids": batch["decoder_inputs"],
            "decoder_attention_mask": (batch["targets_segment_ids"] > 0).astype(ids.dtype),
            "labels": labels,
        }
    _require_from_start(ids, batch["inputs_positions"], "huggingface")
    ignored = np.full_like(labels[:, :1], -100)
    return {
        "input_ids": batch["inputs"],
        "position_ids": batch["inputs_positions"],
        # The model shifts `labels`, which loses the last position, and leaves `shift_labels`.
        "labels": np.concatenate([ignored, labels[:, :-1]], axis=1),
        "shift_labels": labels,
    }


def _thd(batch: Fields, decoder: tuple[str, ...]) -> dict[str, Any]:
    return flatten(batch)


CONVENTIONS: dict[str, Callable[[Fields, tuple[str, ...]], dict[str, Any]]] = dict(
    zip(get_args(Convention), (_maxtext, _t5x, _axlearn, _tunix, _huggingface, _thd), strict=True)
)


def _counts(batch: Fields, ids: np.ndarray, convention: str) -> np.ndarray:
    """Where the loss counts: bool [rows, length]."""
    weights = np.asarray(batch.get("loss_weights", ids > 0))
    wrong = weights[(weights != 0) & (weights != 1)]
    if len(wrong):
        raise ValueError(
            f"loss_weights holds {wrong[0]}, and the loss of {convention} knows only 0 and 1; use "
            "a convention with weights (t5x), or round them in a map before"
        )
    return (weights > 0) & (ids > 0)


def _labels(batch: Fields, decoder: tuple[str, ...], convention: str, ignored: int) -> np.ndarray:
    """The targets where the loss counts, elsewhere `ignored`."""
    counts = _counts(batch, batch[decoder[1]], convention)
    return np.where(counts, batch["targets"], ignored).astype(batch["targets"].dtype)


def _require_one_segment(ids: np.ndarray, convention: str) -> None:
    if ids.max(initial=0) > 1:
        row = int(np.flatnonzero(ids.max(axis=1) > 1)[0])
        raise ValueError(
            f"row {row} holds {int(ids[row].max())} segments, and {convention} cannot keep them "
            "apart; plan one example in a row, with packing='none'"
        )


def _require_from_start(ids: np.ndarray, positions: np.ndarray, convention: str) -> None:
    starts = (np.diff(ids, axis=1, prepend=0) != 0) & (ids > 0)
    wrong = np.argwhere(starts & (positions != 0))
    if len(wrong):
        row, column = wrong[0].tolist()
        raise ValueError(
            f"row {row} goes on with an example at its position {int(positions[row, column])}, and "
            f"in {convention} every segment begins at 0; load with positions='restart', or plan "
            "with overflow='truncate' or 'drop', or with longer rows"
        )
