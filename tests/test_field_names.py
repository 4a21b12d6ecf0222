import grain
import numpy as np
import pytest

import pipeline
from pipeline import Bucket

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


def lists(renamed):
    return {
        name: lists(values) if isinstance(values, dict) else values.tolist()
        for name, values in renamed.items()
    }


def test_maxtext_has_segments_for_both_sides_and_weights_of_zero_folded_in():
    renamed = pipeline.rename(BATCH, "maxtext")
    assert lists(renamed) == {
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
    assert lists(pipeline.rename(half, "t5x")) == {
        "decoder_input_tokens": [[5, 6, 7, 0]],
        "decoder_target_tokens": [[6, 7, 8, 0]],
        "decoder_segment_ids": [[1, 1, 2, 0]],
        "decoder_positions": [[0, 1, 0, 0]],
        "decoder_loss_weights": [[0, 0.5, 0.5, 0]],
    }


def test_axlearn_does_not_count_negative_labels():
    assert lists(pipeline.rename(BATCH, "axlearn")) == {
        "input_ids": [[5, 6, 7, 0]],
        "input_segment_ids": [[1, 1, 2, 0]],
        "input_positions": [[0, 1, 0, 0]],
        "target_labels": [[-1, 7, 8, -1]],
    }


def test_huggingface_has_labels_that_it_shifts_and_labels_that_it_does_not():
    assert lists(pipeline.rename(BATCH, "huggingface")) == {
        "input_ids": [[5, 6, 7, 0]],
        "position_ids": [[0, 1, 0, 0]],
        "labels": [[-100, -100, 7, 8]],
        "shift_labels": [[-100, 7, 8, -100]],
    }


def test_tunix_has_the_whole_example_and_a_mask_of_what_is_learned():
    renamed = pipeline.rename(ALONE, "tunix")
    assert lists(renamed) == {
        "input_tokens": [[5, 6, 7, 8, 0]],
        "input_mask": [[False, False, True, True, False]],
    }
    # Its loss shifts both by one: so the pairs of input and target are those of the batch.
    tokens, mask = renamed["input_tokens"], renamed["input_mask"]
    assert tokens[:, :-1][mask[:, 1:]].tolist() == [6, 7]
    assert tokens[:, 1:][mask[:, 1:]].tolist() == [7, 8]


def test_pairs_have_names_on_both_sides():
    assert lists(pipeline.rename(PAIR, "t5x")) == {
        "encoder_input_tokens": [[5, 6, 7, 0]],
        "encoder_segment_ids": [[1, 1, 1, 0]],
        "encoder_positions": [[0, 1, 2, 0]],
        "decoder_input_tokens": [[1, 6, 0]],
        "decoder_target_tokens": [[6, 2, 0]],
        "decoder_segment_ids": [[1, 1, 0]],
        "decoder_positions": [[0, 1, 0]],
        "decoder_loss_weights": [[1, 1, 0]],
    }
    nested = lists(pipeline.rename(PAIR, "axlearn"))
    assert nested["source"]["input_ids"] == [[5, 6, 7, 0]]
    assert nested["target"] == {
        "input_ids": [[1, 6, 0]],
        "input_segment_ids": [[1, 1, 0]],
        "positions": [[0, 1, 0]],
    }
    assert nested["target_labels"] == [[6, 2, -1]]
    assert lists(pipeline.rename(PAIR, "huggingface")) == {
        "input_ids": [[5, 6, 7, 0]],
        "attention_mask": [[1, 1, 1, 0]],
        "decoder_input_ids": [[1, 6, 0]],
        "decoder_attention_mask": [[1, 1, 0]],
        "labels": [[6, 2, -100]],
    }


@pytest.mark.parametrize(
    ("batch", "convention", "message"),
    [
        (BATCH | {"images": BATCH["inputs"]}, "t5x", "no name for images"),
        (BATCH | {"segments": BATCH["inputs"]}, "maxtext", "call `expand` on a compact batch"),
        (BATCH, "thd", "not compact, and thd needs .*compact=True"),
        (
            BATCH,
            "keras",
            "convention is 'keras'; .* one of maxtext, t5x, axlearn, tunix, huggingface",
        ),
        (BATCH, "tunix", "row 0 holds 2 segments.* packing='none'"),
        (PAIR, "maxtext", "no name for decoder_inputs"),
        (PAIR, "tunix", "no name for decoder_inputs"),
        (
            PAIR | {"inputs_segment_ids": BATCH["inputs_segment_ids"]},
            "huggingface",
            "row 0 holds 2 segments",
        ),
        (
            BATCH | {"inputs_positions": np.array([[7, 8, 0, 0]])},
            "huggingface",
            "goes on with .* at its position 7.* positions='restart', or plan with overflow='trunc",
        ),
        *(
            (ALONE | {"loss_weights": ALONE["loss_weights"] / 2}, name, r"loss_weights holds 0\.5")
            for name in ("maxtext", "axlearn", "tunix", "huggingface")
        ),
    ],
)
def test_what_a_convention_cannot_carry_is_refused(batch, convention, message):
    with pytest.raises(ValueError, match=message):
        pipeline.rename(batch, convention)


class Noise(grain.transforms.RandomMap):
    """Replaces some inputs, as a transform on batches may."""

    def random_map(self, batch, rng):
        noise = rng.random(batch["inputs"].shape) < 0.5
        return batch | {"inputs": np.where(noise, 0, batch["inputs"])}


def test_transforms_on_batches_are_grains_own(corpus):
    plan = pipeline.Plan(corpus, [Bucket(8, 64)], overflow="truncate")
    batches = pipeline.Batches(corpus, plan)
    renamed = batches.map(lambda batch: pipeline.rename(batch, "maxtext"))
    assert len(renamed) == len(batches)
    assert (renamed[3]["inputs_segmentation"] == batches[3]["inputs_segment_ids"]).all()
    for noise in (Noise(), lambda batch, rng: Noise().random_map(batch, rng)):
        noisy = batches.seed(5).random_map(noise)
        assert (noisy[2]["targets"] == batches[2]["targets"]).all()
        assert (noisy[2]["inputs"] != batches[2]["inputs"]).any()
        # Random, and yet the same at every look, in every process.
        assert (noisy[2]["inputs"] == noisy[2]["inputs"]).all()
        steps = iter(noisy.to_iter_dataset())
        for _ in range(2):
            next(steps)
        assert (next(steps)["inputs"] == noisy[2]["inputs"]).all()


def test_a_mapped_iterator_resumes_with_the_state_of_the_plan(corpus):
    batches = pipeline.Batches(corpus, pipeline.Plan(corpus, [Bucket(8, 64)]))
    mapped = batches.to_iter_dataset().map(lambda batch: pipeline.rename(batch, "t5x"))
    steps = iter(mapped)
    first = [next(steps)["decoder_input_tokens"] for _ in range(3)]
    again = iter(mapped)
    next(again)
    state = again.get_state()
    fresh = iter(mapped)
    fresh.set_state(state)
    assert (next(fresh)["decoder_input_tokens"] == first[1]).all()
