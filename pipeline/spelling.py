"""Batches in the spelling that other code bases expect."""

from collections.abc import Mapping
from typing import Any

import numpy as np

# Field of a decoder-only batch → its names there. MaxText: its input pipeline's packing, "Data
# input pipeline" in its documentation. T5X: the features of `seqio`'s LM feature converter.
SPELLINGS: dict[str, dict[str, tuple[str, ...]]] = {
    "maxtext": {
        "inputs": ("inputs",),
        "targets": ("targets",),
        "inputs_segment_ids": ("inputs_segmentation", "targets_segmentation"),
        "inputs_positions": ("inputs_position", "targets_position"),
    },
    "t5x": {
        "inputs": ("decoder_input_tokens",),
        "targets": ("decoder_target_tokens",),
        "inputs_segment_ids": ("decoder_segment_ids",),
        "inputs_positions": ("decoder_positions",),
        "loss_weights": ("decoder_loss_weights",),
    },
}


def rename(batch: Mapping[str, Any], spelling: str) -> dict[str, Any]:
    """The fields of a decoder-only batch under the names of another code base.

    MaxText has no weights: its loss counts a position when its `targets_segmentation` is not 0.
    So weights of 0 are folded into that field.

    Args:
        batch: NumPy arrays, as `Batches` gives them; `Batches(…).map(…)` applies this to all.
        spelling: "maxtext" or "t5x".

    Raises:
        ValueError: there is no such spelling, the batch has a field that it has no name for, or
            weights other than 0 and 1 for one that has no weights.
    """
    if spelling not in SPELLINGS:
        raise ValueError(f"spelling is {spelling!r}; it must be one of {', '.join(SPELLINGS)}")
    names = SPELLINGS[spelling]
    unknown = [name for name in batch if name not in names and name != "loss_weights"]
    if unknown:
        raise ValueError(
            f"{spelling} has no name for {', '.join(unknown)}; it has one for {', '.join(names)}"
        )
    renamed = {new: batch[old] for old in names if old in batch for new in names[old]}
    if "loss_weights" in batch and "loss_weights" not in names:
        weights = np.asarray(batch["loss_weights"])
        if not np.isin(weights, (0, 1)).all():
            wrong = weights[~np.isin(weights, (0, 1))][0]
            raise ValueError(
                f"loss_weights holds {wrong}, and the loss of {spelling} knows only 0 and 1; use a "
                "spelling with weights, or round them in a map before"
            )
        ids = renamed["targets_segmentation"]
        renamed["targets_segmentation"] = np.where(weights > 0, ids, 0).astype(ids.dtype)
    return renamed
