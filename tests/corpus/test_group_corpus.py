"""Groups as a corpus: what they are made of, their weights, what is cut, and what is refused."""

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pipeline
from pipeline import Bucket, Corpora, Corpus, Examples, Feature, Masked, Pairs, Plan, load, rename
from pipeline.corpus import Groups, duplicates
from pipeline.loading import Batches, cu_seqlens
from pipeline.report.tiers import row_costs

GROUPS = [
    ([1, 2, 3], [[4, 5], [6]]),
    ([7], [([8, 9], [[10], [11, 12, 13]]), [14, 15]]),
    ([1], [[2]]),
]
REWARD = {"reward": Feature("continuation", dtype="float32")}


def refused(function, *arguments, **options):
    with pytest.raises(ValueError) as caught:
        function(*arguments, **options)
    return str(caught.value)


@pytest.mark.parametrize(
    ("weights", "due", "learnt"),
    [
        (None, [[2, 2, 1, 1, 1], [2, 2, 1, 1, 1, 1, 1, 1], [1]], 14),
        ([[0.5, 2], [1, 0, 4], [3]], [[2.5, 2.5, 0.5, 0.5, 2], [1, 1, 1, 0, 0, 0, 4, 4], [3]], 11),
        (
            [(0, [1, [2]]), ([5], [([1, 0], [2, [0, 1, 2]]), [0, 3]]), (1, [4])],
            [[0, 0, 1, 1, 2], [1, 0, 2, 0, 1, 2, 0, 3], [4]],
            9,
        ),
    ],
    ids=["as the rows it would be in", "of continuations", "nested like the tokens"],
)
def test_weights_of_what_is_shared_add_up_unless_they_are_nested(weights, due, learnt):
    corpus = Examples.from_groups({"tokens": GROUPS, "weights": weights})
    assert [example["loss_weights"].tolist() for example in corpus] == due
    assert corpus.num_learnt == learnt
    assert corpus.truncate(5).num_learnt == (None if weights else 5 + 5 + 1)


@given(
    st.lists(st.tuples(st.integers(1, 5), st.lists(st.integers(1, 9), min_size=1, max_size=4))),
    st.integers(8, 20),
)
def test_truncated_groups_lose_the_ends_of_their_longest_continuations(shapes, limit):
    shapes = [*shapes, (2, [3, 1])]
    groups = [([0] * p, [[*range(1, r + 1)] for r in sizes]) for p, sizes in shapes]
    corpus = Examples.from_groups(groups).truncate(limit)
    for (prefix, sizes), cut in zip(shapes, corpus, strict=True):
        kept = np.diff(np.flatnonzero(np.append(cut["targets"], 1) == 1))
        assert len(cut["targets"]) == min(prefix - 1 + sum(sizes), limit)
        assert len(kept) == len(sizes)
        shorter = [each for each, size in zip(kept, sizes, strict=True) if each < size]
        assert all(each <= size for each, size in zip(kept, sizes, strict=True))
        assert not shorter or (max(kept) <= max(shorter) + 1 and min(shorter) + 1 >= max(shorter))
        for start, size in zip(np.flatnonzero(cut["targets"] == 1), kept, strict=True):
            assert cut["targets"][start : start + size].tolist() == [*range(1, size + 1)]


def test_load_cuts_groups_and_documents_to_the_longest_bucket():
    groups = Examples.from_groups([([1, 2], [[3] * 30, [4] * 9])] * 3)
    corpus = Corpora({"groups": groups, "text": Examples([[*range(40)]] * 5)})
    train = corpus.split(0.4)[0]
    for each in (corpus, train):
        with load(each, buckets=[Bucket(2, 24)], overflow="truncate", num_epochs=1) as loader:
            batches = [{name: np.asarray(v) for name, v in batch.items()} for batch in loader]
        ends = [batch["visible_until"].max(axis=1) for batch in batches]
        assert {24} == {int(end) for end in np.concatenate(ends) if end}
    again = Examples.from_groups([([1, 2], [[3] * 30, [4] * 9])] * 3)
    assert again.fingerprint == groups.fingerprint != again.truncate(24).fingerprint
    assert again.truncate(40) is again
    cut = pickle.loads(pickle.dumps(again.truncate(24)))
    assert cut[0]["targets"].tolist() == [2] + [3] * 14 + [4] * 9


@pytest.mark.parametrize("advice", [{"overflow": "truncate"}, "truncate(8)", "both"])
def test_groups_whose_prefix_fills_the_row_are_left_out_and_counted(caplog, advice):
    good = ([1, 2], [[3] * 20, [4]])  # of continuations of 6 and 1 tokens in 8 columns
    long, wide = ([*range(1, 21)], [[30, 31], [40]]), ([1], [[2]] * 9)
    groups = Examples.from_groups([good, long, wide, good])
    if advice != {"overflow": "truncate"}:
        assert "groups.truncate(8)" in refused(load, groups, buckets=[Bucket(1, 8)])
        groups = groups.truncate(8)
        assert groups.lengths.tolist() == [8, 0, 0, 8]
        assert len(groups[1]["targets"]) == 0
    options = {"buckets": [Bucket(1, 8)], "num_epochs": 1}
    options |= {"overflow": "truncate"} if advice != "truncate(8)" else {}
    with load(groups, **options) as loader:
        targets = [np.asarray(batch["targets"]).tolist() for batch in loader]
    assert targets == [[[2, 3, 3, 3, 3, 3, 3, 4]]] * 2
    assert "left out: 2 examples with nothing to train on" in str(loader.plan)
    assert "2 of 4 groups are left out: even with one token in each cont" in caplog.text
    assert "none of the examples has a position to train on" in refused(
        load, Examples.from_groups([long] * 3), **{**options, "overflow": "truncate"}
    )


def test_features_of_continuations_are_added_to_a_finished_corpus(tmp_path):
    corpus = Corpus.from_groups({"tokens": GROUPS, "reward": [[1, 2], [3, 4, 5], [6]]},
                                tmp_path, features=REWARD)  # fmt: skip
    columns = {"reference": [[-1.0, -2], [-3, -4, -5], [-6]], "kind": [7, 8, 9]}
    features = {"reference": Feature("continuation"), "kind": Feature("example")}
    more = corpus.with_features(columns, features=features)
    assert more.fingerprint != corpus.fingerprint
    cut = corpus.truncate(5).with_features(columns, features=features)
    assert cut.fingerprint == more.truncate(5).fingerprint
    opened = Corpus.open(tmp_path, features=["kind", "reference"])
    assert opened.fingerprint == more.fingerprint
    for each in (more, opened, pickle.loads(pickle.dumps(more))):
        assert [example["reference"].tolist() for example in each] == columns["reference"]
        assert [example["reward"].tolist() for example in each] == [[1, 2], [3, 4, 5], [6]]
        assert [int(example["kind"]) for example in each] == [7, 8, 9]
    assert more.read_examples([2, 0, 2], ["reward"])["reward"].tolist() == [6, 1, 2, 6]
    few = refused(corpus.with_features, {"few": [[1], [3, 4, 5], [6]]},
                  features={"few": Feature("continuation")})  # fmt: skip
    assert "the shape of few of group 0 is (1,); for a group of 2 continuations, it must" in few


def test_the_cost_of_groups_is_what_their_columns_see_also_in_a_report():
    corpus = Corpora({"groups": Examples.from_groups(GROUPS), "text": Examples([[1] * 5])})
    plan = Plan(corpus, [Bucket(1, 32)], shuffle=False)
    batch = Batches(corpus, plan)[0]
    until, ids = batch["visible_until"][0], batch["inputs_segment_ids"][0]
    for segment, example in enumerate(plan.batch(0).segments[:, 1].tolist(), 1):
        columns = np.flatnonzero(ids == segment)
        cost = 2 * (until[columns] - columns).sum() - len(columns)
        assert corpus.trees[example].tolist()[2] == cost
        path = int(batch["inputs_positions"][0, columns].max()) + 1
        assert corpus.trees[example].tolist()[0] == path
    assert corpus.trees[3].tolist() == [4, 0, 16]
    assert plan.max_position == 4
    assert plan.trees.tolist() == corpus.trees.tolist()
    assert Plan([3, 4], [Bucket(1, 8)]).trees is None
    planned = Plan(corpus, [Bucket(2, 16)], shuffle=False).batch(0)
    segments, costs = planned.segments, corpus.trees[planned.segments[:, 1], 2]
    expected = 16 + np.bincount(segments[:, 0], costs, 2) / 6
    assert row_costs(planned.bucket, segments, 1, plan.trees).tolist() == expected.tolist()


def test_rows_of_groups_are_sorted_by_their_real_cost():
    # All groups have 16 columns; the more continuations, the fewer keys a query sees.
    groups = [([1], [[2] * (16 // n)] * n) for n in (1, 2, 4, 8)] * 4
    corpus = Examples.from_groups(groups)
    plan = Plan(corpus, [Bucket(4, 16)], tiers=4, seed=1)
    for step in range(4):
        costs = corpus.trees[plan.batch(step).segments[:, 1], 2]
        assert len(set(costs.tolist())) == 1, "a tier has rows that cost the same"
    other = Plan(corpus.lengths, [Bucket(4, 16)], tiers=4, seed=1)
    assert other.fingerprint != plan.fingerprint


def test_groups_change_and_drop_like_other_examples():
    corpus = Examples.from_groups([([1, 2], [[3] * n, [4] * n]) for n in range(1, 21)])
    plan = Plan(corpus, [Bucket(2, 32)], overflow="drop", seed=2)
    later = plan.after(2, buckets=[Bucket(2, 48)], exclude=[0]).after(3, tiers=2)
    assert plan.max_position == 15
    assert later.max_position == 20
    steps = range(later.num_batches(0))
    seen = np.concatenate([later.batch(step).segments[:, 1] for step in steps])
    assert len(set(seen.tolist())) == len(seen)
    assert Plan.replay(corpus, later.changes).fingerprint == later.fingerprint
    split = Corpora({"groups": corpus, "text": Examples([[1] * 100, [2] * 3])})
    longer = Plan(split, [Bucket(2, 48)])  # the document is split, the groups fit
    assert longer.max_position == 98
    batches = Batches(split, longer)
    for step in range(longer.num_batches()):
        batch = batches[step]
        rows = np.where(batch["inputs_segment_ids"] > 0, np.arange(48) < batch["visible_until"], 1)
        assert rows.all()


def test_a_run_on_documents_goes_on_with_groups():
    text = Examples([[1] * (3 + n % 9) for n in range(40)])
    groups = Examples.from_groups([([1, 2], [[3] * 4, [4] * 5]), ([1], [[3], [4]])] * 5)
    both = Corpora({"text": text, "groups": groups})
    plan = Plan(text, [Bucket(2, 16)], seed=4)
    later = plan.after(2, lengths=both)
    assert Plan.replay(both, later.changes).fingerprint == later.fingerprint
    batches = Batches(both, later)
    seen = [later.batch(step).segments[:, 1] for step in range(later.num_batches())]
    assert sorted(np.concatenate(seen).tolist()) == [*range(50)]
    for step in range(later.num_batches()):
        planned, batch = later.batch(step), batches[step]
        own = both.trees[planned.segments[:, 1], 1]
        ids = [batch["inputs_branch_ids"][row].max() for row in range(2)]
        assert ids == [own[planned.segments[:, 0] == row].sum() for row in range(2)]
    assert later.most_continuations()[Bucket(2, 16)] >= max(map(max, [ids]))


def test_the_text_of_a_group_has_a_line_for_each_node(monkeypatch):
    groups = [([*b"ab"], [[*b"cd"], ([*b"e"], [[*b"f"], [*b"gh"]])]), ([*b"x"], [[*b"yz"]])]
    corpus = Examples.from_groups(groups)
    assert "was made without a tokenizer" in refused(corpus.decode, 0)
    monkeypatch.setattr(type(corpus), "tokenizer", Letters())
    assert corpus.decode(0) == "ab\n  cd\n  e\n    f\n    gh"
    assert corpus.truncate(5).decode(0) == "ab\n  c\n  e\n    f\n    g"
    assert corpus.decode(-1) == "x\n  yz"


class Letters:
    """A tokenizer of bytes, without marks."""

    def decode(self, ids):
        return bytes(ids.tolist()).decode()


def test_what_a_group_cannot_be_is_refused():
    for groups, sentence in (
        ([GROUPS[0], [1, 2]], "group 1 is [1, 2]; a group must be (prefix, [continuation, …])"),
        ([([1], [[2], []])], "continuation 1 of group 0 has no token; give each prefix"),
        ([([], [[2]])], "the prefix of group 0 has no token"),
        ([([1], [])], "group 0 has a prefix and no continuation; give at least one"),
        (
            [([1], [[2], ([3], [[-3]])])],
            "continuation 0 of continuation 1 of group 0 holds the token id -3",
        ),
        ([([9], [[2]])], "the prefix of group 0 holds the token id 9; ids are 0 to 7 (vocab_size)"),
        ([], "examples are empty"),
    ):
        assert sentence in refused(Examples.from_groups, groups, vocab_size=8)
    features = {"logprob": Feature("targets", dtype="float32"), "_above": Feature("example")}
    features |= REWARD
    for name, values, sentence in (
        ("reward", [[1, 2], [3, 4], [5]], "shape of reward of group 1 is (2,); for a group of 3"),
        ("logprob", [[1, 2, 3]], "logprob of group 0 is [1, 2, 3]; nest it like the tokens"),
        ("logprob", [([1, 2, 3], [[4, 5], [6, 7]])], "1 of logprob of group 0 must have shape (1,"),
        ("weights", [[1, 2, 3]], "the shape of the weights of group 0 is (3,); for a group of 2 c"),
        ("weights", [(0, [1, [-1]])], "the weights of group 0 cannot hold -1.0; a weight must"),
        ("_above", [], "a feature is named '_above'"),
    ):
        own = {name: features[name]} if name in features else {}
        columns = {"tokens": GROUPS, name: values}
        assert sentence in refused(Examples.from_groups, columns, features=own)
    assert "the feature 'reward' is of continuations, but these examples are not groups" in refused(
        Examples, {"tokens": [[1, 2]], "reward": [[1]]}, features=REWARD
    )
    nodes = Examples.from_groups(GROUPS).nodes
    for above in ([1, 0], [0, -1], [0, 0, 2]):
        columns = {"tokens": [[1]] * len(above), "_above": above}
        wrong = Examples(columns, features=nodes.features, task=nodes.task)
        assert "its nodes do not make groups" in refused(Groups, wrong)


def test_what_cannot_carry_groups_says_so(tmp_path):
    corpus = Corpus.from_groups(GROUPS, tmp_path)
    assert "holds a corpus of other examples" in refused(Corpus.from_groups, GROUPS[:2], tmp_path)
    assert "groups, which cannot be followed" in refused(Corpus.open, tmp_path, follow=True)
    refused(Plan, corpus, [Bucket(1, 6)], overflow="error")
    for overflow in ("split", None):
        sentence = refused(Plan, corpus, [Bucket(1, 6)], overflow=overflow)
        assert "example 1 is a group of 8 columns, longer than the longest bucket's 6" in sentence
        assert "a group is never split: give a longer bucket, overflow='drop' or" in sentence
    assert "groups.truncate(6)" in refused(Plan, corpus, [Bucket(1, 6)], overflow="truncate")
    plan = Plan(corpus, [Bucket(1, 16)])
    order = refused(Batches, corpus, plan, context_order="zigzag")
    assert "context_order is 'zigzag', but the corpus has groups" in order
    batch = dict(Batches(corpus, plan)[0])
    for convention in ("maxtext", "tunix", "huggingface"):
        assert f"{convention} has no name for visible_until" in refused(rename, batch, convention)
    assert "the batch has groups, whose shared prefixes cu_seqlens cannot express" in refused(
        cu_seqlens, batch, 4
    )
    assert "needs documents of the task 'inputs'" in refused(Masked, corpus, mask_id=99)
    text = Examples([[1, 2]])
    assert "are groups, but a side of pairs must be a corpus of the task 'inputs'" in refused(
        Pairs, corpus, corpus
    )
    assert text.trees is None
    assert Plan(text, [Bucket(1, 4)]).most_continuations() == {Bucket(1, 4): 1}


def test_copies_among_groups_are_those_with_the_same_tree():
    groups = [([1], [[1, 1], [1]]), ([1], [[1], [1, 1]]), ([1], [[1, 1], [1]]), ([1], [[1, 1, 1]])]
    assert duplicates(Examples.from_groups(groups)).tolist() == [2]


def test_groups_print_as_prefix_and_continuations(tmp_path):
    corpus = Corpus.from_groups(GROUPS, tmp_path)
    assert "3" in str(corpus)
    assert "tokens       14 to train on" in str(corpus)
    assert repr(corpus) == f"Groups of {corpus.nodes!r}"
    assert isinstance(pipeline.Corpus.open(tmp_path), type(corpus))
