"""What a batch is: every field, segment after segment; and batches compared.

Nothing is computed by the package, and nothing is done for many segments at once.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from pipeline import Bucket, PlannedBatch

# The side of the tokens of each task, and how much later each field reads them.
TASKS = {
    "causal": ("inputs", {"inputs": 0, "targets": 1}),
    "inputs": ("inputs", {"inputs": 0}),
    "targets": ("targets", {"decoder_inputs": 0, "targets": 1}),
    None: (None, {}),
}


class Field(NamedTuple):
    """What each example has in one field of a batch."""

    of: str | None  # a side, "example" or "continuation"
    values: Sequence[Any]  # for each example, one value for each position of the side, in order
    dtype: Any = "int32"
    shape: tuple[int, ...] = ()
    empty: int = 0  # where no example is
    to: str | None = None  # values above `empty` count from the example's first column on this side


def define_fields(columns, features=(), task="causal"):
    """The fields of examples in `columns`: of their tokens, their weights and their features."""
    side, shifts = TASKS[task]
    shift = max(shifts.values(), default=0)
    fields = {
        name: Field(side, [ids[start:] for ids in columns["tokens"]])
        for name, start in (shifts if "tokens" in columns else {}).items()
    }
    if fields and shift:
        weights = columns.get("weights", [[1] * len(ids) for ids in columns["tokens"]])
        fields["loss_weights"] = Field(side, [each[1:] for each in weights], "float32")
    for name, feature in dict(features).items():
        of, values = feature.of, columns[name]
        if of == "example":
            values = [[each] for each in values]
        elif of == "targets":
            of, values = side, [each[shift:] for each in values]
        empty = -1 if feature.to else 0
        fields[name] = Field(of, values, feature.dtype, feature.shape, empty, feature.to)
    return fields


def define_numbers(numbers):
    """The field `example_id` of examples that have these numbers."""
    return {"example_id": Field("example", [[n] for n in numbers], empty=-1)}


def define_segments(planned, align=1, fields=None):
    """Each segment: its row, its example, its first position, and for each side (column, size).

    So also among the examples of its row and, with `fields` of groups, among the continuations.
    """
    aligns, names = align, planned.bucket.names
    if isinstance(align, tuple):
        aligns = dict(zip(names, align, strict=True))
    elif isinstance(align, int):
        aligns = dict.fromkeys(names, align)
    branches = (fields or {}).get("inputs_branch_ids")
    used = [{} for _ in range(planned.bucket.rows)]
    for row, example, start, *sizes in planned.segments.tolist():
        size = dict(zip(planned.bucket.names, sizes, strict=True)) | {"example": 1}
        size["continuation"] = max([0, *branches.values[example]]) if branches else 0
        places = {}
        for side, count in size.items():
            begin = used[row].get(side, 0)
            begin += -begin % aligns.get(side, 1)
            places[side] = begin, count
            used[row][side] = begin + count
        yield row, example, start, places


def define_batch(fields, planned, align=1, positions="continue", **columns):
    """A planned batch of examples that have these fields, with so many `columns` by example."""
    rows = planned.bucket.rows
    columns |= dict(zip(planned.bucket.names, planned.bucket.lengths, strict=True))
    batch = {
        f"{side}_{name}": np.zeros((rows, columns[side]), np.int32)
        for side in planned.bucket.names
        for name in ("segment_ids", "positions")
    }
    for name, field in fields.items():
        shape = rows, columns[field.of], *field.shape
        batch[name] = np.full(shape, field.empty, field.dtype)
    for row, example, start, places in define_segments(planned, align, fields):
        for side in planned.bucket.names:
            begin, size = places[side]
            here = row, slice(begin, begin + size)
            first = start if positions == "continue" else 0
            batch[f"{side}_segment_ids"][here] = places["example"][0] + 1
            batch[f"{side}_positions"][here] = range(first, first + size)
        for name, field in fields.items():
            begin, size = places[field.of]
            first = start if field.of in planned.bucket.names else 0
            values = np.array(field.values[example][first : first + size], field.dtype)
            values = values.reshape(size, *field.shape)
            if field.to is not None:
                values[values > field.empty] += places[field.to][0]
            batch[name][row, begin : begin + size] = values
    return batch


def define_row(fields, sizes, length):
    """A batch of one row with all examples, which have these sizes."""
    segments = [(0, number, 0, size) for number, size in enumerate(sizes)]
    row = PlannedBatch(Bucket(1, length), np.reshape(segments, (-1, 4)).astype(int))
    return define_batch(fields, row)


def require_defined(batch, expected):
    """A batch has the fields of a definition, in any order, and no others."""
    assert {*batch} == {*expected}
    require_same({name: batch[name] for name in expected}, expected)


def require_same(one, other):
    """The fields of two examples, or of two batches, are equal."""
    assert list(one) == list(other)
    for name in one:
        assert one[name].dtype == other[name].dtype, name
        np.testing.assert_array_equal(np.asarray(one[name]), np.asarray(other[name]), name)


def join(parts):
    """The batch of which the processes of a run have these parts, in their order."""
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


# ---- groups


def nodes_of(group, name=()):
    """The name and the tokens of each node, depth first, and whether it is a leaf.

    A group is (tokens, [child, …]), a leaf also its tokens alone; a name begins with its parent's.
    """
    tokens, children = group if isinstance(group, tuple) else (group, [])
    yield name, tokens, not children
    for number, child in enumerate(children):
        yield from nodes_of(child, (*name, number))


def leaves_of(group):
    """The names of the continuations of a group; a document has none."""
    return [name for name, _, is_leaf in nodes_of(group) if is_leaf and name]


def define_group(group):
    """The columns of a group: every token but the first is predicted from the one before it.

    For each column: the value before on its path and its own, the position, and the name of its
    node.
    """
    found, paths = [], {}
    for name, tokens, _ in nodes_of(group):
        path = list(paths.get(name[:-1], [])) if name else []
        for token in tokens:
            if path:
                found.append((path[-1], token, len(path) - 1, name))
            path.append(token)
        paths[name] = path
    return found


def define_groups(columns, features=()):
    """The fields of groups, and of documents among them, as `define_fields`."""
    groups = columns["tokens"]
    until, branches, weights = [], [], []
    for group in groups:
        names, leaves = [name for *_, name in define_group(group)], leaves_of(group)
        hidden = [
            [q for q in range(k, len(names)) if names[q][: len(name)] != name]
            for k, name in enumerate(names)
        ]
        until.append([min([*each, len(names)]) for each in hidden])
        branches.append([leaves.index(name) + 1 if name in leaves else 0 for name in names])
        below = [sum(leaf[: len(name)] == name for leaf in leaves) for name in names]
        weights.append([max(each, 1) for each in below])
    fields = {
        name: Field("inputs", [[column[k] for column in define_group(group)] for group in groups])
        for k, name in enumerate(("inputs", "targets", "inputs_positions"))
    }
    fields["visible_until"] = Field("inputs", until, to="inputs")
    fields["inputs_branch_ids"] = Field("inputs", branches, to="continuation")
    fields["loss_weights"] = Field("inputs", weights, "float32")
    for name, feature in dict(features).items():
        of, values = feature.of, columns[name]
        if of == "example":
            values = [[each] for each in values]
        elif of in ("inputs", "targets"):
            values = [[column[of == "targets"] for column in define_group(v)] for v in values]
            of = "inputs"
        fields[name] = Field(of, values, feature.dtype, feature.shape)
    return fields
