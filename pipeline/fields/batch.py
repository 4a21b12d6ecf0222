"""The fields of batches: `Batch` lists all of them, and `pipeline.loading.collate` fills them."""

from typing import Generic, TypedDict, TypeVar

Array = TypeVar("Array")


class Batch(TypedDict, Generic[Array]):
    """The fields of a batch, for editors and type checkers; at run time a batch is a dict.

    `pipeline.load` returns a `Batch[jax.Array]`, `pipeline.Batches` a `Batch[np.ndarray]`. All are
    `[rows, length]` and int32, except as below; padding is 0. The corpus decides which fields a
    batch has, which a type checker cannot know, so it accepts each. It does not know the names of
    features; to read them, write `fields: Mapping[str, Any] = batch`.

    Attributes:
        inputs: token ids.
        inputs_segment_ids: 1, 2, … for the examples of a row.
        inputs_positions: from 0 in each example; later pieces of a split example continue them. In
            groups, along the path to each continuation.
        targets: the token id to predict at each position; none in batches for an encoder.
        loss_weights: float32, 1, or the weight stored with the token.
        decoder_inputs: for pairs, the targets shifted to the right. Fields of targets have the
            bucket's second length, others its first.
        targets_segment_ids: for pairs, the segment of each target.
        targets_positions: for pairs, from 0 in each example.
        visible_until: for groups, the first later column that no longer sees this one.
        inputs_branch_ids: for groups, the continuation of each position, counted from 1 over all
            groups of a row; 0 in prefixes.
        inputs_columns: with another `context_order` than "contiguous", where rows are divided: for
            each column, the column of the planned row that it holds, the same in all rows. Other
            sides have theirs, such as `targets_columns`.
        inputs_segment_offsets: if `features=` names it, `[rows, segments + 1]`, the column of the
            planned row where each segment begins, and from the last one on the column where that
            ends. Every side has such a field, as `targets_segment_offsets`; attention kernels take
            it.
        example_id: if `features=` names it, `[rows, segments]`, the number of the example of each
            segment in the corpus, of a view of a split in the corpus that was split; -1 without a
            segment.

    A feature of tokens is `[rows, length, *shape]`. A feature of examples is `[rows, segments,
    *shape]`: column `s - 1` is that of segment id `s`. There are `max_segments` columns, or by
    default `plan.most_segments()[bucket]`. A feature of continuations is `[rows, continuations,
    *shape]`: column `b - 1` is that of branch id `b`; there are
    `plan.most_continuations()[bucket]` columns, and at least `max_segments` times those of the
    largest group. Give `max_segments` if batches of several plans must have one shape.
    """

    inputs: Array
    targets: Array
    decoder_inputs: Array
    loss_weights: Array
    example_id: Array
    inputs_segment_ids: Array
    inputs_positions: Array
    targets_segment_ids: Array
    targets_positions: Array
    visible_until: Array
    inputs_branch_ids: Array
    inputs_columns: Array
    targets_columns: Array
    inputs_segment_offsets: Array
    targets_segment_offsets: Array


FIELDS = (*Batch.__annotations__,)  # no feature has such a name

# The field with the number of each example, and the ending of the field of each side with the
# columns where its segments begin: a batch has them on request.
EXAMPLE_ID, OFFSETS = "example_id", "_segment_offsets"


def fields_of_side(side: str) -> set[str]:
    """The names of the fields that every side has.

    >>> sorted(fields_of_side("patches"))
    ['patches_columns', 'patches_positions', 'patches_segment_ids', 'patches_segment_offsets']
    """
    of_targets = [name for name in FIELDS if name.startswith("targets_")]
    return {name.replace("targets", side, 1) for name in of_targets}
