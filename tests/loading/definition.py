"""What a batch is, one position after another; and batches and examples compared."""

import numpy as np

FIELDS = ["inputs", "targets", "inputs_segment_ids", "inputs_positions", "loss_weights"]
# Of pairs: those of the inputs, then those of the targets.
PAIRED = ["inputs", "inputs_segment_ids", "inputs_positions"]
PAIRED += ["decoder_inputs", "targets", "targets_segment_ids", "targets_positions", "loss_weights"]


def define_batch(sides, planned, positions="continue"):
    """A planned batch of examples, the ids of which are listed for one side or two."""
    names, shapes = FIELDS, [side.bucket.shape for side in planned.sides]
    if len(sides) == 2:
        names = PAIRED
    batch = {
        name: np.zeros(shapes[-1 if name not in PAIRED[:3] else 0], np.int32) for name in names
    }
    batch["loss_weights"] = batch["loss_weights"].astype(np.float32)
    for number, side in enumerate(("inputs", "targets")[: len(sides)]):
        columns, segment = np.zeros((2, planned.bucket.rows), int)
        for row, example, start, *sizes in planned.segments.tolist():
            segment[row] += 1
            ids = sides[number][example]
            for place in range(start, start + sizes[number]):
                at = row, columns[row]
                columns[row] += 1
                batch[f"{side}_segment_ids"][at] = segment[row]
                batch[f"{side}_positions"][at] = place - start * (positions == "restart")
                batch["decoder_inputs" if number else "inputs"][at] = ids[place]
                if number == len(sides) - 1:
                    batch["targets"][at] = ids[place + 1]
                    batch["loss_weights"][at] = 1
    return batch


def require_same(one, other):
    """The fields of two examples, or of two batches, are equal."""
    assert list(one) == list(other)
    for name in one:
        assert one[name].dtype == other[name].dtype
        np.testing.assert_array_equal(np.asarray(one[name]), np.asarray(other[name]), name)
