"""Batches with the field names of other trainers, checked against these trainers.

- MaxText 0.2.5: the keys of `get_shaped_batch` in `utils/maxtext_utils.py`; in
  `trainers/pre_train/train.py` the loss of a position counts where `targets_segmentation` is not 0.
- Tunix 0.1.7: `TrainingInput` and `_default_loss_fn` in `tunix/sft/peft_trainer.py`, which shifts
  tokens and mask by one itself.
- Hugging Face, transformers 5.23: `ForCausalLMLoss` in `loss_utils.py`, where labels of -100 do not
  count and `shift_labels` are not shifted again; `find_packed_sequence_indices` in
  `masking_utils.py` tells packed examples apart by their positions.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import numpy as np

from pipeline.errors import InvalidValue, require_one_of
from pipeline.fields.arrays import require_planned_order
from pipeline.fields.batch import EXAMPLE_ID, FIELDS

Fields = Mapping[str, Any]

Convention = Literal["maxtext", "tunix", "huggingface"]

# Tokens, segment ids and positions of each side of a batch.
INPUTS = ("inputs", "inputs_segment_ids", "inputs_positions")
TARGETS = ("decoder_inputs", "targets_segment_ids", "targets_positions")
LOSS = ("targets", "loss_weights")
ORDERS = ("inputs_columns", "targets_columns")


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
            field without a name there, another side, a feature with a name that it uses, weights
            other than 0 and 1, packed rows, another order of columns, or pieces that do not begin
            at position 0; the message says how to avoid it.
    """
    require_one_of("convention", convention, get_args(Convention))
    if convention != "maxtext":  # which takes the order of columns from positions
        for side in ("inputs", "targets"):
            require_planned_order(batch, side, f"{convention} needs")
    batch = {name: field for name, field in batch.items() if name not in ORDERS}
    pairs = "decoder_inputs" in batch and convention == "huggingface"  # others train only decoders
    known = (*INPUTS, *LOSS, *(TARGETS if pairs else ()))
    ours = {*FIELDS} - {EXAMPLE_ID}
    others = {name: field for name, field in batch.items() if name not in ours}
    if strange := [name for name in batch if name not in known and name not in others]:
        raise InvalidValue(
            f"{convention} has no name for {strange[0]}; it has names for {', '.join(known)}"
        )
    if sides := [name for name in others if name.endswith("_segment_ids")]:
        raise InvalidValue(
            f"{convention} has no side {sides[0].removesuffix('_segment_ids')!r}, only text or "
            "pairs; leave the fields of that side out before, or train in a loop of your own"
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
    violations = {
        WEIGHT: weights[(weights != 0) & (weights != 1)],
        SEGMENT: segments[segments > 1],
        START: positions[starts & (positions > 0)],
    }
    for limit in (WEIGHT, *limits):
        if len(violations[limit]):
            raise InvalidValue(f"{convention} cannot express {limit.format(violations[limit][0])}")
    counts = (weights > 0) & (ids > 0)
    renamed = {
        name: batch[source] if isinstance(source, str) else source(batch, counts)
        for name, source in names.items()
    }
    if clash := [name for name in others if name in renamed]:
        raise InvalidValue(
            f"the batch has a field {clash[0]} of your own, and {convention} uses that name; give "
            "the feature another name, or load without it"
        )
    return renamed | others


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
