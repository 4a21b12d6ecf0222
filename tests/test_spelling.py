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


def test_maxtext_has_segments_for_both_sides_and_weights_of_zero_folded_in():
    renamed = pipeline.rename(BATCH, "maxtext")
    assert {name: values.tolist() for name, values in renamed.items()} == {
        "inputs": [[5, 6, 7, 0]],
        "targets": [[6, 7, 8, 0]],
        "inputs_segmentation": [[1, 1, 2, 0]],
        "targets_segmentation": [[0, 1, 2, 0]],
        "inputs_position": [[0, 1, 0, 0]],
        "targets_position": [[0, 1, 0, 0]],
    }
    assert all(values.dtype == np.int32 for values in renamed.values())


def test_t5x_keeps_weights_even_fractional_ones():
    half = BATCH | {"loss_weights": BATCH["loss_weights"] / 2}
    renamed = pipeline.rename(half, "t5x")
    assert renamed["decoder_loss_weights"].tolist() == [[0, 0.5, 0.5, 0]]
    assert set(renamed) == {
        "decoder_input_tokens",
        "decoder_target_tokens",
        "decoder_segment_ids",
        "decoder_positions",
        "decoder_loss_weights",
    }


def test_what_a_spelling_cannot_carry_is_refused():
    with pytest.raises(ValueError, match=r"loss_weights holds 0\.5"):
        pipeline.rename(BATCH | {"loss_weights": BATCH["loss_weights"] / 2}, "maxtext")
    with pytest.raises(ValueError, match="no name for images"):
        pipeline.rename(BATCH | {"images": BATCH["inputs"]}, "t5x")
    with pytest.raises(ValueError, match="one of maxtext, t5x"):
        pipeline.rename(BATCH, "keras")
