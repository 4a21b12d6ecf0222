"""Collation: the arrays of a batch from its planned segments, without a loop over segments."""

import dataclasses
import types
from collections.abc import Mapping, Sequence

import numpy as np

from pipeline.corpus.interface import AnyCorpus
from pipeline.corpus.side import Side
from pipeline.fields.batch import EXAMPLE_ID, OFFSETS
from pipeline.loading.segments import Positions, Segments, cut_to_columns, find_in_rows
from pipeline.loading.sharding import Block
from pipeline.planning.layout import count_before, ranges
from pipeline.planning.planned import PlannedBatch
from pipeline.text.features import NOWHERE, Feature

INT = np.int32


def collate(
    corpus: AnyCorpus,
    planned: PlannedBatch,
    blocks: Sequence[Block],
    positions: Positions = "continue",
    features: Sequence[str] = (),
) -> dict[str, np.ndarray]:
    """The arrays of this process's part of a planned batch, for all sides.

    All sides of an example have the same segment id. A row of pairs, the first of 3 inputs and 2
    targets, the second of 1 and 2:

        inputs_segment_ids   [1, 1, 1, 2, 0, 0]
        targets_segment_ids  [1, 1, 2, 2]

    `blocks` are the parts to build, one for each side; `features` are names of features of
    positions. The result has the fields of `collate_side` for each side, but `loss_weights` only of
    the side that carries the loss, last; and the columns of a side whose block has an order.
    """
    batch, loss = dict[str, np.ndarray](), dict[str, np.ndarray]()
    for number, (name, block) in enumerate(zip(corpus.sides, blocks, strict=True)):
        side = corpus.sides[name]
        of_side = [feature for feature in features if feature in side.features]
        aims = {feature: to for feature in of_side if (to := side.features[feature].to)}
        pointers = {feature: corpus.side_names.index(to) for feature, to in aims.items()}
        whole = block
        if block.order is not None:  # its columns may come from anywhere in the row
            length = planned.bucket.lengths[number]
            whole = dataclasses.replace(block, columns=(0, length), order=None)
        fields = collate_side(side, planned, number, whole, positions, of_side, pointers, name)
        if block.order is not None:
            taken = block.order[slice(*block.columns)]
            fields = {field: values[:, taken] for field, values in fields.items()}
            fields[f"{name}_columns"] = np.tile(taken.astype(INT), (len(block.rows), 1))
        for feature, aim in pointers.items():
            if (order := blocks[aim].order) is not None:
                places = np.append(np.argsort(order), NOWHERE).astype(INT)  # -1 is the last one
                fields[feature] = places[fields[feature]]
        weights = fields.pop("loss_weights")
        if name == corpus.loss:
            loss["loss_weights"] = weights
        batch |= fields
    return batch | loss


def collate_side(
    side: Side,
    planned: PlannedBatch,
    number: int,
    block: Block,
    positions: Positions = "continue",
    features: Sequence[str] = (),
    pointers: Mapping[str, int] = types.MappingProxyType({}),
    name: str = "inputs",
) -> dict[str, np.ndarray]:
    """The arrays of one side of a batch; padding is 0 in every field, and -1 in pointers.

    A row with two segments, the second a later piece that starts at position 7 of its example
    (with `positions="restart"` its positions are `0, 1`):

        inputs_segment_ids  [1, 1, 1, 2, 2, 0]
        inputs_positions    [0, 1, 2, 7, 8, 0]
        loss_weights        [1, 1, 1, 1, 1, 0]

    `number` and `name` are those of the side; `pointers` are the numbers of the sides that pointers
    among its features point to.

    Returns:
        The side's fields (for text `inputs`, `targets`, int32), `inputs_segment_ids` and
        `inputs_positions` (int32) with its name in place of `inputs`, and `loss_weights`
        (float32), each `[rows, length]` of the block, and each of the features,
        `[rows, length, *shape]`. If there are groups, also `visible_until` and
        `inputs_branch_ids`; see `_lay_out_nodes`.
    """
    height, width = block.shape
    segments = find_in_rows(planned, number, block.rows, positions, with_begins=bool(pointers))
    if side.trees is not None:
        count = side.trees[segments.example, 1]
        segments = segments._replace(branch=count_before(segments.row, count))
    if block.columns != (0, planned.bucket.lengths[number]) or not segments.size.all():
        segments = cut_to_columns(segments, block.columns)
    row, column, ids, example, start, position, size, *_, epoch = segments
    begin, cells = row * width + column, height * width
    # The fields are built flat and without padding: each segment is extended to the beginning of
    # the next one. Then the padding, which is rare, is set to 0.
    edge = int(begin[0]) if len(begin) else cells
    reach = np.empty_like(begin)
    reach[:-1], reach[-1:] = begin[1:], cells
    reach -= begin
    batch = side.read(example, start, size, reach, epoch, features)
    weights = batch.pop("loss_weights", None)
    batch[f"{name}_segment_ids"] = ids.astype(INT).repeat(reach)
    batch[f"{name}_positions"] = ranges(position, reach, INT)
    if side.trees is not None:
        batch |= _lay_out_nodes(side, segments, reach, block.columns[0])
    batch["loss_weights"] = np.ones(cells - edge, np.float32) if weights is None else weights
    for pointer, to in pointers.items():
        values, shift = batch[pointer], segments.begins[:, to].astype(INT).repeat(reach)
        shift = shift.reshape(-1, *[1] * (values.ndim - 1))
        batch[pointer] = np.where(values >= 0, values + shift, INT(NOWHERE))
    padded = np.flatnonzero(reach > size)  # segments with padding after them
    padding = ranges((begin + size - edge)[padded], (reach - size)[padded])
    for field, values in batch.items():
        empty = NOWHERE if field in pointers else 0
        values[padding] = empty
        shape = values.shape[1:]
        if edge:  # the first rows are empty
            values = np.concatenate([np.full((edge, *shape), empty, values.dtype), values])
        batch[field] = values.reshape(height, width, *shape)
    return batch


def collate_examples(
    corpus: AnyCorpus,
    planned: PlannedBatch,
    rows: np.ndarray,
    room: Mapping[str, int],
    features: Mapping[str, Feature],
) -> dict[str, np.ndarray]:
    """The features of the examples in some rows of a planned batch, for all columns of these rows.

    The segment with id `s` is in column `s - 1`, the continuation with branch id `b` in column
    `b - 1`. Empty columns hold 0, and -1 in `example_id`. With room for 3, a row with pieces of the
    examples 7 and 4 has

        example_id  [7, 4, -1]

    Args:
        corpus: the corpus.
        planned: the batch.
        rows: ascending, int64 [n].
        room: the number of columns of features of an "example", and of a "continuation".
        features: features of these two kinds, by name; and fields that a batch has on request.

    Returns:
        An array `[n, room, *shape]` for each of the features; offsets have a column more, as
        `find_offsets` says.
    """
    segments = find_in_rows(planned, 0, rows, "continue")
    stored = [name for name in features if name in corpus.features]
    values = corpus.read_examples(segments.example, stored)
    if EXAMPLE_ID in features:
        values[EXAMPLE_ID], _ = corpus.find_unsplit(segments.example)
    places = {"example": (segments.row, segments.ids - 1)}
    if "continuation" in room:
        count = np.zeros_like(segments.row)
        if corpus.trees is not None:
            count = corpus.trees[segments.example, 1]
        before = count_before(segments.row, count)
        places["continuation"] = segments.row.repeat(count), ranges(before, count)
    fields = {}
    for name, feature in features.items():
        if name in values:
            shape = len(rows), room[feature.of], *feature.shape
            empty = NOWHERE if name == EXAMPLE_ID else 0
            fields[name] = np.full(shape, empty, feature.dtype)
            fields[name][places[feature.of]] = values[name]
        else:
            side = corpus.side_names.index(name.removesuffix(OFFSETS))
            fields[name] = find_offsets(planned, side, rows, room["example"])
    return fields


def find_offsets(planned: PlannedBatch, number: int, rows: np.ndarray, most: int) -> np.ndarray:
    """Where the segments of some rows of a planned batch begin on a side: int32 [n, most + 1].

    Column `s - 1` has the first column of the row that the segment with id `s` takes. From the last
    segment on, columns have the end of that segment, so that unused places have length 0. With
    `most=3`, rows with segments of 3 and 2 positions, of 4, and of none have

        [[0, 3, 5, 5], [0, 4, 4, 4], [0, 0, 0, 0]]

    `number` is that of the side; `rows` are ascending, int64 [n]; `most` is at least the number of
    segments of each. If the plan aligns segments, padding may precede the next offset.
    """
    segments = find_in_rows(planned, number, rows, "continue")
    ends = np.zeros(len(rows), INT)
    np.maximum.at(ends, segments.row, segments.end.astype(INT))
    offsets = ends[:, None].repeat(most + 1, axis=1)
    offsets[segments.row, segments.ids - 1] = segments.column
    return offsets


def _lay_out_nodes(
    corpus: Side, segments: Segments, reach: np.ndarray, left: int
) -> dict[str, np.ndarray]:
    """The fields of groups, flat, of segments that take `reach` columns each, from `left` on.

    `visible_until` is, for each column, the first later column of the row that does not see it: in
    a prefix the end of its last continuation, in a continuation or a document its own end. So the
    query in column q sees the key in column k if k ≤ q < visible_until[k]. `inputs_branch_ids`
    number the continuations of a row from 1, over all its groups; they are 0 on prefixes and on
    documents. The positions of a continuation follow those of its prefix.
    """
    nodes = corpus.read_nodes(segments.example)
    of = np.arange(len(reach)).repeat(nodes.number)
    start, last = segments.start[of], np.cumsum(nodes.number) - 1
    begin = np.maximum(nodes.first, start)
    columns = np.minimum(nodes.first + nodes.columns, start + segments.size[of]) - begin
    columns = np.maximum(columns, 0)
    columns[last] += reach - segments.size  # the padding after a segment
    position = nodes.position + begin - nodes.first + (segments.position - segments.start)[of]
    origin = segments.column + left - segments.start  # where the example's column 0 would be
    until = np.minimum(origin[of] + nodes.until, segments.end[of])
    number = count_before(of, nodes.branch.astype(np.int64)) + 1  # in its example
    ids = np.where(nodes.branch, number + segments.branch[of], 0)
    return {
        "inputs_positions": ranges(position, columns, INT),
        "visible_until": until.astype(INT).repeat(columns),
        "inputs_branch_ids": ids.astype(INT).repeat(columns),
    }
