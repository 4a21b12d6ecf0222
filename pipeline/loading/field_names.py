"""Batches in the spelling that other code bases expect, checked against what they publish.

- MaxText: the keys of `create_dummy_batch_for_train` in its `max_utils.py`; in `train.py` the loss
  of a position counts where `targets_segmentation` is not 0.
- T5X: the standard features in the docstring of seqio's `feature_converters.py`.
- axlearn: `forward` of `axlearn/common/causal_lm.py`, and `predict` of `encoder_decoder.py`;
  negative `target_labels` do not count.
- Tunix: `TrainingInput` and `_default_loss_fn` in `tunix/sft/peft_trainer.py`, which shifts tokens
  and mask by one itself.
- Hugging Face: `ForCausalLMLoss` in transformers' `loss_utils.py`, where labels of -100 do not
  count and `shift_labels` are not shifted again; `find_packed_sequence_indices` in
  `masking_utils.py`, which tells packed examples apart by their positions.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

Fields = Mapping[str, Any]

DECODER = ("inputs", "targets", "inputs_segment_ids", "inputs_positions", "loss_weights")
PAIRS = (*DECODER, "decoder_inputs", "targets_segment_ids", "targets_positions")


def rename(batch: Fields, spelling: str) -> dict[str, Any]:
    """The fields of a batch under the names of another code base.

    `batches.map(lambda batch: rename(batch, "maxtext"))` applies it to all. Where a code base has
    no weights, those of 0 go into the field that its loss looks at: segment ids of 0 for MaxText,
    labels of -1 for axlearn and of -100 for Hugging Face, a mask of False for Tunix. For Tunix rows
    are one position longer, since it takes inputs and targets from the same tokens.

    Args:
        batch: NumPy arrays, as `Batches` gives them, of a decoder or of pairs.
        spelling: "maxtext", "t5x", "axlearn", "tunix" or "huggingface".

    Raises:
        ValueError: there is no such spelling, or the batch has what it cannot carry: a field that
            it has no name for; weights other than 0 and 1; packed rows; later pieces of split
            examples; the message says how to plan without it.
    """
    if spelling not in SPELLINGS:
        raise ValueError(f"spelling is {spelling!r}; it must be one of {', '.join(SPELLINGS)}")
    pairs, make = "decoder_inputs" in batch, SPELLINGS[spelling]
    if pairs and make in (_maxtext, _tunix):
        raise ValueError(f"{spelling} has no name for decoder_inputs: it trains decoders alone")
    known = PAIRS if pairs else DECODER
    for name in batch:
        if name not in known:
            advice = "; call `expand` on a compact batch" if name == "segments" else ""
            raise ValueError(
                f"{spelling} has no name for {name}; it has one for {', '.join(known)}{advice}"
            )
    return make(batch, pairs)


def _maxtext(batch: Fields, pairs: bool) -> dict[str, Any]:
    ids, positions = batch["inputs_segment_ids"], batch["inputs_positions"]
    return {
        "inputs": batch["inputs"],
        "targets": batch["targets"],
        "inputs_segmentation": ids,
        "targets_segmentation": np.where(_counted(batch, "maxtext"), ids, 0).astype(ids.dtype),
        "inputs_position": positions,
        "targets_position": positions,
    }


def _t5x(batch: Fields, pairs: bool) -> dict[str, Any]:
    names = {
        "inputs": "decoder_input_tokens",
        "targets": "decoder_target_tokens",
        "inputs_segment_ids": "decoder_segment_ids",
        "inputs_positions": "decoder_positions",
        "loss_weights": "decoder_loss_weights",
    }
    if pairs:
        names |= {
            "inputs": "encoder_input_tokens",
            "inputs_segment_ids": "encoder_segment_ids",
            "inputs_positions": "encoder_positions",
            "decoder_inputs": "decoder_input_tokens",
            "targets_segment_ids": "decoder_segment_ids",
            "targets_positions": "decoder_positions",
        }
    return {new: batch[old] for old, new in names.items() if old in batch}


def _axlearn(batch: Fields, pairs: bool) -> dict[str, Any]:
    labels = np.where(_counted(batch, "axlearn"), batch["targets"], -1)
    labels = labels.astype(batch["targets"].dtype)
    if not pairs:
        return {
            "input_ids": batch["inputs"],
            "input_segment_ids": batch["inputs_segment_ids"],
            "input_positions": batch["inputs_positions"],
            "target_labels": labels,
        }
    sides = {
        side: {
            "input_ids": batch[tokens],
            "input_segment_ids": batch[f"{field}_segment_ids"],
            "positions": batch[f"{field}_positions"],
        }
        for side, tokens, field in (
            ("source", "inputs", "inputs"),
            ("target", "decoder_inputs", "targets"),
        )
    }
    return {**sides, "target_labels": labels}


def _tunix(batch: Fields, pairs: bool) -> dict[str, Any]:
    _require_one_segment(batch["inputs_segment_ids"], "tunix")
    _require_from_start(batch["inputs_segment_ids"], batch["inputs_positions"], "tunix")
    inputs, targets = batch["inputs"], batch["targets"]
    # Row by row the tokens as they were, t0 to tn: the inputs, and the last target after them.
    tokens = np.concatenate([inputs, np.zeros_like(inputs[:, :1])], axis=1)
    size = (batch["inputs_segment_ids"] > 0).sum(axis=1)
    rows = np.flatnonzero(size)
    tokens[rows, size[rows]] = targets[rows, size[rows] - 1]
    counted = _counted(batch, "tunix")
    return {
        "input_tokens": tokens,
        "input_mask": np.concatenate([np.zeros_like(counted[:, :1]), counted], axis=1),
    }


def _huggingface(batch: Fields, pairs: bool) -> dict[str, Any]:
    labels = np.where(_counted(batch, "huggingface"), batch["targets"], -100)
    labels = labels.astype(batch["targets"].dtype)
    ids = batch["inputs_segment_ids"]
    if pairs:  # nothing there keeps packed pairs apart
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
        # To be shifted by the model, which loses the last place; and as they are.
        "labels": np.concatenate([ignored, labels[:, :-1]], axis=1),
        "shift_labels": labels,
    }


SPELLINGS: dict[str, Callable[[Fields, bool], dict[str, Any]]] = {
    "maxtext": _maxtext,
    "t5x": _t5x,
    "axlearn": _axlearn,
    "tunix": _tunix,
    "huggingface": _huggingface,
}


def _counted(batch: Fields, spelling: str) -> np.ndarray:
    """Where the loss counts: bool [rows, length]."""
    ids = batch.get("targets_segment_ids", batch["inputs_segment_ids"])
    weights = np.asarray(batch.get("loss_weights", ids > 0))
    wrong = weights[(weights != 0) & (weights != 1)]
    if len(wrong):
        raise ValueError(
            f"loss_weights holds {wrong[0]}, and the loss of {spelling} knows only 0 and 1; use a "
            "spelling with weights, or round them in a map before"
        )
    return (weights > 0) & (ids > 0)


def _require_one_segment(ids: np.ndarray, spelling: str) -> None:
    if ids.max(initial=0) > 1:
        row = int(np.flatnonzero(ids.max(axis=1) > 1)[0])
        raise ValueError(
            f"row {row} holds {int(ids[row].max())} segments, and {spelling} cannot keep them "
            "apart; plan one example in a row, with packing='none'"
        )


def _require_from_start(ids: np.ndarray, positions: np.ndarray, spelling: str) -> None:
    starts = (np.diff(ids, axis=1, prepend=0) != 0) & (ids > 0)
    wrong = np.argwhere(starts & (positions != 0))
    if len(wrong):
        row, column = wrong[0].tolist()
        raise ValueError(
            f"row {row} goes on with an example at its position {int(positions[row, column])}, and "
            f"in {spelling} every segment begins at 0; plan with overflow='truncate' or 'drop', or "
            "with longer rows"
        )
