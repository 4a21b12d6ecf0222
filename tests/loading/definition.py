"""What a batch is, one position after another, also of groups; and batches compared."""

import numpy as np

FIELDS = ["inputs", "targets", "inputs_segment_ids", "inputs_positions", "loss_weights"]
# Of pairs: those of the inputs, then those of the targets.
PAIRED = ["inputs", "inputs_segment_ids", "inputs_positions"]
PAIRED += ["decoder_inputs", "targets", "targets_segment_ids", "targets_positions", "loss_weights"]


def define_batch(sides, planned, positions="continue", align=1):
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
            columns[row] += -columns[row] % align
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


def join(parts):
    """The batch of which the processes of a run have these parts, in their order."""
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


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


GROUPED = [*FIELDS[:4], "visible_until", "inputs_branch_ids", "loss_weights"]


def define_rows(rows, length, align=1):
    """The fields of rows of groups and documents, column after column.

    And for each row the names of its columns: which group, from 1, and which node of it; () between
    groups that are aligned.
    """
    batch = {name: np.zeros((len(rows), length), np.int32) for name in GROUPED}
    batch["loss_weights"] = batch["loss_weights"].astype(np.float32)
    names = [[] for _ in rows]
    for row, groups in enumerate(rows):
        branch = 0
        for segment, group in enumerate(groups, 1):
            names[row] += [()] * (-len(names[row]) % align)
            columns, leaves, first = define_group(group), leaves_of(group), len(names[row])
            for k, (before, token, position, name) in enumerate(columns):
                hidden = [q for q in range(k, len(columns)) if columns[q][3][: len(name)] != name]
                below = sum(leaf[: len(name)] == name for leaf in leaves)
                values = (
                    *(before, token, segment, position),
                    first + min([*hidden, len(columns)]),
                    branch + leaves.index(name) + 1 if name in leaves else 0,
                    max(below, 1),
                )
                for field, value in zip(GROUPED, values, strict=True):
                    batch[field][row, first + k] = value
            names[row] += [(segment, *name) for *_, name in columns]
            branch += len(leaves)
    return batch, names
