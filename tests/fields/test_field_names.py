import numpy as np
import pytest

import pipeline

BATCH = {
    "inputs": np.array([[5, 6, 7, 0]], np.int32),
    "targets": np.array([[6, 7, 8, 0]], np.int32),
    "inputs_segment_ids": np.array([[1, 1, 2, 0]], np.int32),
    "inputs_positions": np.array([[0, 1, 0, 0]], np.int32),
    "loss_weights": np.array([[0, 1, 1, 0]], np.float32),
}
ALONE = BATCH | {
    "inputs_segment_ids": np.array([[1, 1, 1, 0]], np.int32),
    "inputs_positions": np.array([[0, 1, 2, 0]], np.int32),
}
PAIR = ALONE | {
    "decoder_inputs": np.array([[1, 6, 0]], np.int32),
    "targets": np.array([[6, 2, 0]], np.int32),
    "targets_segment_ids": np.array([[1, 1, 0]], np.int32),
    "targets_positions": np.array([[0, 1, 0]], np.int32),
    "loss_weights": np.array([[1, 1, 0]], np.float32),
}


@pytest.mark.parametrize(
    ("batch", "convention", "expected"),
    [
        # Weights of 0 are folded into the segments of the targets.
        (BATCH | {"own": np.array([[3]], np.int32)}, "maxtext", {
            "own": [3], "inputs": [5, 6, 7, 0], "inputs_segmentation": [1, 1, 2, 0],
            "targets": [6, 7, 8, 0], "targets_segmentation": [0, 1, 2, 0],
            "inputs_position": [0, 1, 0, 0], "targets_position": [0, 1, 0, 0],
        }),
        # Labels that a model shifts, and labels that it does not.
        (BATCH, "huggingface", {
            "input_ids": [5, 6, 7, 0], "position_ids": [0, 1, 0, 0],
            "labels": [-100, -100, 7, 8], "shift_labels": [-100, 7, 8, -100],
        }),
        # The loss shifts both by one, so that 6 predicts 7, and 7 predicts 8.
        (ALONE, "tunix", {
            "input_tokens": [5, 6, 7, 8, 0], "input_mask": [False, False, True, True, False],
        }),
        (PAIR, "huggingface", {
            "input_ids": [5, 6, 7, 0], "attention_mask": [1, 1, 1, 0], "labels": [6, 2, -100],
            "decoder_input_ids": [1, 6, 0], "decoder_attention_mask": [1, 1, 0],
        }),
    ],
)  # fmt: skip
def test_each_convention_has_its_fields(batch, convention, expected):
    renamed = pipeline.rename(batch, convention)
    assert {name: values.tolist() for name, values in renamed.items()} == {
        name: [row] for name, row in expected.items()
    }
    assert all(values.dtype in (np.int32, bool) for values in renamed.values())


IDS, TWO = BATCH["inputs"], BATCH["inputs_segment_ids"]
LATE = {"inputs_positions": np.array([[7, 8, 9, 0]])}
HALF = {"loss_weights": ALONE["loss_weights"] / 2}
CONVENTIONS = "maxtext", "tunix", "huggingface"


@pytest.mark.parametrize(
    ("batch", "change", "convention", "message"),
    [
        (BATCH, {"targets_positions": IDS}, "maxtext", "no name for targets_posit"),
        (BATCH, {"inputs_position": IDS}, "maxtext", "inputs_position of your own, and maxtext us"),
        (BATCH, {}, "t5x", "convention is 't5x'"),
        (BATCH, {}, "tunix", "segment id 2: .* packing='none'"),
        (BATCH, {"patches_segment_ids": IDS}, "maxtext", "no side .patches., only text"),
        (PAIR, {}, "maxtext", "no name for decoder_inputs"),
        (PAIR, {}, "tunix", "no name for decoder_inputs"),
        (PAIR, {"inputs_segment_ids": TWO}, "huggingface", "cannot express segment id 2"),
        (BATCH, LATE, "huggingface", "begins at position 7.* positions='restart', or plan"),
        (ALONE, LATE, "tunix", "tunix cannot .* begins at position 7"),
        *((ALONE, HALF, name, r"cannot express loss weight 0\.5") for name in CONVENTIONS),
        *(({}, {"inputs": IDS}, name, "the batch has no .*targets") for name in CONVENTIONS),
    ],
)
def test_what_a_convention_cannot_carry_is_refused(batch, change, convention, message):
    with pytest.raises(ValueError, match=message):
        pipeline.rename(batch | change, convention)
