"""Fields: the arrays of a batch, by name."""

from typing import Generic, NotRequired, TypedDict, TypeVar

Array = TypeVar("Array")


class Batch(TypedDict, Generic[Array]):
    """The fields of a batch, for editors and type checkers; at run time a batch is a dict.

    `pipeline.load` gives a `Batch[jax.Array]`, `pipeline.Batches` a `Batch[np.ndarray]`. Every
    field is `[rows, length]`. The corpus decides which of them a batch has: those of pairs are in
    batches of pairs alone, and an encoder's corpus has no targets. A type checker cannot know, and
    accepts each of them.
    """

    inputs: Array
    inputs_segment_ids: Array
    inputs_positions: Array
    targets: Array
    loss_weights: Array
    # of pairs
    decoder_inputs: Array
    targets_segment_ids: Array
    targets_positions: Array
    # of compact batches, in place of segment ids, positions and weights: see `expand`
    segments: NotRequired[Array]
    inputs_segments: NotRequired[Array]
    targets_segments: NotRequired[Array]
