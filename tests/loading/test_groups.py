"""Groups: batches whose continuations share a prefix, column by column from the definition."""

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import pipeline
from pipeline import Batches, Bucket, Corpora, Examples, Feature, Plan
from pipeline.loading.collate import collate_side
from pipeline.loading.sharding import Block
from tests.loading.definition import (
    define_batch,
    define_groups,
    join,
    leaves_of,
    nodes_of,
    require_defined,
    require_same,
)
from tests.meshes import mesh_of

FEATURES = {
    "seen": Feature("inputs", dtype="int16", shape=(2,), fill=-1),
    "logprob": Feature("targets", dtype="float32", fill=-2),
    "reward": Feature("continuation", dtype="float32"),
    "margin": Feature("continuation", dtype="int32", shape=(2,)),
    "task": Feature("example", dtype="int32", fill=-3),
}

LEAF = st.integers(1, 4)
NODE = st.recursive(
    LEAF, lambda node: st.tuples(LEAF, st.lists(node, min_size=1, max_size=3)), max_leaves=5
)
GROUP = st.tuples(LEAF, st.lists(NODE, min_size=1, max_size=3))


def fill(shape, values):
    """A group in which each number of tokens has so many of `values`, which are drawn in order."""
    if isinstance(shape, tuple):
        return fill(shape[0], values), [fill(each, values) for each in shape[1]]
    return [next(values) for _ in range(shape)]


def columns_of(groups):
    """A column of each feature, whose values are functions of the tokens."""
    rng = np.random.default_rng(len(groups))

    def map_tokens(group, function):
        if isinstance(group, tuple):
            return map_tokens(group[0], function), [map_tokens(g, function) for g in group[1]]
        return [function(token) for token in group]

    leaves = [len(leaves_of(group)) for group in groups]
    return {
        "tokens": groups,
        "seen": [map_tokens(group, lambda t: [t % 100, -t % 100]) for group in groups],
        "logprob": [map_tokens(group, lambda t: t / 2) for group in groups],
        "reward": [rng.normal(size=n).astype(np.float32) for n in leaves],
        "margin": [rng.integers(0, 9, (n, 2)) for n in leaves],
        "task": [7 * number for number in range(len(groups))],
    }


@given(
    st.lists(GROUP, min_size=1, max_size=6),
    st.lists(st.integers(2, 6), max_size=4),
    st.sampled_from([1, 4]),
)
def test_each_column_of_a_batch_is_that_of_the_definition(shapes, documents, align):
    values = itertools.count(1)
    groups = [fill(shape, values) for shape in shapes]
    columns = columns_of(groups)
    corpus = Examples.from_groups(columns, features=FEATURES)
    texts = [fill(size, values) for size in documents]
    if texts:
        corpus = Corpora({"groups": corpus, "documents": Examples(texts)})
    # Documents have no continuations, and of the other features what stands for none.
    lacking = {
        "tokens": texts,
        "seen": [[[-1, -1]] * len(ids) for ids in texts],
        "logprob": [[-2] * len(ids) for ids in texts],
        "reward": [[]] * len(texts),
        "margin": [[]] * len(texts),
        "task": [-3] * len(texts),
    }
    every = {name: [*column, *lacking[name]] for name, column in columns.items()}
    fields = define_groups(every, FEATURES)
    longest = -(-int(corpus.lengths.max()) // align) * align
    plan = Plan(corpus, [Bucket(2, longest + 2 * align)], align=align, shuffle=False)
    (bucket,) = plan.buckets
    room = {
        "example": plan.most_segments()[bucket],
        "continuation": plan.most_continuations()[bucket],
    }
    batches, count, most = Batches(corpus, plan), 0, 0
    for step in range(plan.num_batches()):
        planned, batch = plan.batch(step), batches[step]
        require_defined(batch, define_batch(fields, planned, align, **room))
        assert planned.segments[:, 3].tolist() == corpus.lengths[planned.segments[:, 1]].tolist()
        count += len(planned.segments)
        most = max(most, int(batch["inputs_positions"].max()))
    assert count == len(groups) + len(texts)
    assert most == plan.max_position


@given(st.lists(GROUP, min_size=1, max_size=4))
@settings(max_examples=30)
def test_the_path_to_each_continuation_reads_as_the_row_it_would_have_alone(shapes):
    groups = [fill(shape, itertools.count(1)) for shape in shapes]
    corpus = Examples.from_groups(groups)
    plan = Plan(corpus, [Bucket(1, int(corpus.lengths.sum()))], shuffle=False)
    batch = {name: each[0] for name, each in dict(Batches(corpus, plan)[0]).items()}
    columns = np.arange(len(batch["inputs"]))
    order = [groups[n] for n in plan.batch(0).segments[:, 1]]
    leaves = [(group, name) for group in order for name, _, leaf in nodes_of(group) if leaf]
    for branch, (group, name) in enumerate(leaves, 1):
        tokens = [t for node, ids, _ in nodes_of(group) if name[: len(node)] == node for t in ids]
        last = np.flatnonzero(batch["inputs_branch_ids"] == branch)[-1]
        path = columns[(columns <= last) & (batch["visible_until"] > last)]
        path = path[batch["inputs_segment_ids"][path] == batch["inputs_segment_ids"][last]]
        seen = pipeline.attention_mask({name: each[None] for name, each in batch.items()})[0, last]
        assert np.flatnonzero(seen).tolist() == path.tolist()
        assert batch["inputs"][path].tolist() == tokens[:-1]
        assert batch["targets"][path].tolist() == tokens[1:]
        assert batch["inputs_positions"][path].tolist() == list(range(len(path)))


def test_processes_and_devices_hold_the_parts_of_the_rows_of_groups():
    values, shapes = itertools.count(1), [(1, [4]), (5, [2, (1, [3, 1])]), (3, [1, 4, 2])] * 10
    columns = columns_of([fill(shape, values) for shape in shapes])
    groups = Examples.from_groups(columns, features=FEATURES)
    corpus = Corpora({"groups": groups, "text": Examples([[1, 2, 3]])})
    plan = Plan(corpus, [Bucket(4, 32)], seed=1)
    whole = Batches(corpus, plan)
    spread = Batches(corpus, plan, sharding=mesh_of(data=2, context=2))
    halves = [Batches(corpus, plan, process_index=p, process_count=2) for p in (0, 1)]
    for step in range(plan.num_batches()):
        require_same(join([half[step] for half in halves]), whole[step])
        require_same(spread[step], whole[step])
    for begin, end in ((0, 11), (11, 32), (5, 6)):
        block = Block(np.array([1, 3]), (begin, end))
        for name, values in collate_side(corpus.sides["inputs"], plan.batch(0), 0, block).items():
            np.testing.assert_array_equal(values, whole[0][name][[1, 3], begin:end], name)
