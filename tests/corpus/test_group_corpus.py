"""Groups as a corpus: their weights, what is cut and refused, and those of preferences."""

import dataclasses
import pickle
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pipeline
from pipeline import Bucket, Corpora, Corpus, Examples, Feature, Plan, load, prepare, templates
from pipeline.corpus import Groups, Job, duplicates, prepare_share
from pipeline.loading import Batches
from pipeline.report.tiers import row_costs
from pipeline.text import ragged, source
from pipeline.text.sources import Records
from pipeline.text.templates import Preference
from pipeline.text.tokenizers import Bytes
from tests.corpus.files import require_equal

GROUPS = [
    ([1, 2, 3], [[4, 5], [6]]),
    ([7], [([8, 9], [[10], [11, 12, 13]]), [14, 15]]),
    ([1], [[2]]),
]
REWARD = {"reward": Feature("continuation", dtype="float32")}


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
    groups = [
        ([0] * p, [[*range(10 * n + 1, 10 * n + r + 1)] for n, r in enumerate(sizes)])
        for p, sizes in shapes
    ]
    corpus = Examples.from_groups(groups).truncate(limit)
    for (prefix, sizes), cut in zip(shapes, corpus, strict=True):
        rest = [*sizes]
        while prefix - 1 + sum(rest) > limit:  # the last of the longest loses its end
            rest[len(rest) - 1 - rest[::-1].index(max(rest))] -= 1
        due = [
            [0] * (prefix - 1),
            *([*range(10 * n + 1, 10 * n + k + 1)] for n, k in enumerate(rest)),
        ]
        assert cut["targets"].tolist() == [token for part in due for token in part]


def test_groups_that_truncation_makes_alike_are_left_out_and_counted(caplog):
    beginning, other = [1, *range(10, 30)], [2, *range(10, 30)]
    groups = [
        ([7], [[*beginning, 3], [*beginning, 4]]),
        ([7], [[*beginning, 3], [*beginning, 4, 5, 6]]),  # one keeps a token more
        ([7, 8], [beginning, [*beginning[:9], 99, *beginning]]),
        ([7], [[*beginning, 3], [*other, 3]]),
        ([7], [beginning, beginning]),  # alike before
        ([7], [[1], [*beginning, 3]]),
        ([7], [beginning[:8], [*beginning, 3]]),
        ([7], [[*beginning, 3], [*beginning, 4], [*other, 5]]),
        ([7], [([8], [[*beginning, 3], [*beginning, 4]])]),
        ([7], [beginning]),
    ]
    corpus = Examples.from_groups(groups)
    cut = corpus.truncate(16)
    assert np.flatnonzero(cut.lengths == 0).tolist() == [0, 1, 2, 6, 8]
    assert (
        "5 of 10 groups are left out: cut to 16 columns, their continuations are the" in caplog.text
    )
    assert "1 of 10 group" in caplog.text
    assert "stay, though cut to 16 columns some of their continuations are the same" in caplog.text
    assert "even with one token" not in caplog.text
    with load(corpus, buckets=[Bucket(1, 16)], overflow="truncate", num_epochs=1) as loader:
        assert sum(int(batch["inputs_branch_ids"].max() > 0) for batch in loader) == 5
    caplog.clear()
    assert (corpus.truncate(48).lengths > 0).all()
    (line,) = (record.getMessage() for record in caplog.records)
    assert "1 of 10 groups stay, though cut to 48 columns some of their" in line  # the eighth
    caplog.clear()
    apart = ([7], [[*beginning, 3], [*other, 4], [*beginning, 3], [*other[:9], 5]])  # equal before
    assert Examples.from_groups([apart]).truncate(40).lengths.tolist() == [40]
    assert not caplog.text
    assert pickle.loads(pickle.dumps(cut)).lengths.tolist() == cut.lengths.tolist()


def test_groups_that_are_alike_or_partly_so_are_those_of_the_definition(caplog):
    rng, totals = np.random.default_rng(3), [0, 0]

    def draw():
        middle = [5] * rng.integers(1, 9)
        return [*rng.integers(0, 2, rng.integers(0, 2)).tolist(), *middle, int(rng.integers(0, 2))]

    for _ in range(60):
        pools = [[draw(), draw(), draw()] for _ in range(9)]
        groups = [
            ([7], [pool[n] for n in rng.integers(0, 3, rng.integers(1, 5))]) for pool in pools
        ]
        most, due = int(rng.integers(4, 30)), [0, 0]
        corpus = Examples.from_groups(groups)
        for (_, sides), columns in zip(groups, corpus.lengths.tolist(), strict=True):
            room = most - columns + sum(map(len, sides))
            if columns <= most or room < len(sides):
                continue
            stay = max(n for n in range(1, 99) if sum(min(len(side), n) for side in sides) <= room)
            heads = {tuple(side[:stay]) for side in sides}
            if len(heads) < len({*map(tuple, sides)}):
                due[len(heads) > 1] += 1
        caplog.clear()
        corpus.truncate(most)
        words = ("are left out: cut", "stay, though cut")
        counts = [re.findall(rf"(\d+) of 9 groups {each}", caplog.text) for each in words]
        assert [sum(map(int, numbers)) for numbers in counts] == due
        totals = [a + b for a, b in zip(totals, due, strict=True)]
    assert min(totals) > 20


def test_load_cuts_groups_and_documents_to_the_longest_bucket():
    groups = Examples.from_groups([([1, 2], [[3] * 30, [4] * 9])] * 3)
    corpus = Corpora({"groups": groups, "text": Examples([[*range(40)]] * 5)})
    train = corpus.split(0.4)[0]
    for whole in (corpus, train):
        with load(whole, buckets=[Bucket(2, 24)], overflow="truncate", num_epochs=1) as loader:
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
        with pytest.raises(ValueError, match=r"groups\.truncate\(8\)"):
            load(groups, buckets=[Bucket(1, 8)])
        with pytest.raises(ValueError, match=r"a group is never split: .*groups\.truncate\(8\)"):
            load(groups, buckets=[Bucket(1, 8)], overflow="error")
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


def test_features_of_continuations_are_added_to_a_finished_corpus(tmp_path):
    groups = {"tokens": GROUPS, "reward": [[1, 2], [3, 4, 5], [6]]}
    corpus = Corpus.from_groups(groups, tmp_path, features=REWARD)
    columns = {"reference": [[-1.0, -2], [-3, -4, -5], [-6]], "kind": [7, 8, 9]}
    features = {"reference": Feature("continuation"), "kind": Feature("example")}
    more = corpus.with_features(columns, features=features)
    assert more.fingerprint != corpus.fingerprint
    cut = corpus.truncate(5).with_features(columns, features=features)
    assert cut.fingerprint == more.truncate(5).fingerprint
    opened = Corpus.open(tmp_path, features=["kind", "reference"])
    assert opened.fingerprint == more.fingerprint
    for copy in (more, opened, pickle.loads(pickle.dumps(more))):
        assert [example["reference"].tolist() for example in copy] == columns["reference"]
        assert [example["reward"].tolist() for example in copy] == [[1, 2], [3, 4, 5], [6]]
        assert [int(example["kind"]) for example in copy] == [7, 8, 9]
    assert more.read_examples([2, 0, 2], ["reward"])["reward"].tolist() == [6, 1, 2, 6]
    few = {"few": Feature("continuation")}
    with pytest.raises(ValueError, match=r"few of group 0 is \(1,\); for a group of 2 con"):
        corpus.with_features({"few": [[1], [3, 4, 5], [6]]}, features=few)


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
    planned = Plan(corpus, [Bucket(2, 16)], shuffle=False).batch(0)
    segments, costs = planned.segments, corpus.trees[planned.segments[:, 1], 2]
    expected = 16 + np.bincount(segments[:, 0], costs, 2) / 6
    assert row_costs(planned.bucket, segments, 1, corpus.trees).tolist() == expected.tolist()


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
        continuations = both.trees[planned.segments[:, 1], 1]
        ids = [batch["inputs_branch_ids"][row].max() for row in range(2)]
        assert ids == [continuations[planned.segments[:, 0] == row].sum() for row in range(2)]
    assert later.most_continuations()[Bucket(2, 16)] >= max(map(max, [ids]))


def test_copies_among_groups_are_those_with_the_same_tree():
    groups = [([1], [[1, 1], [1]]), ([1], [[1], [1, 1]]), ([1], [[1, 1], [1]]), ([1], [[1, 1, 1]])]
    assert duplicates(Examples.from_groups(groups)).tolist() == [2]


# ---- preferences


TEMPLATE = Preference(prompt="{q} ", chosen="{good}", rejected="{bad}")
LENGTHS = {"length": Feature("continuation", dtype="int32")}


def make_records(count):
    rng = np.random.default_rng(0)
    return [
        {
            "q": "?" * int(rng.integers(0, 5)),
            "good": "yes" * int(rng.integers(1, 4)),
            "bad": "no" * int(rng.integers(1, 9)),
            "margin": float(number),
            "length": [number, number + 1],
        }
        for number in range(count)
    ]


def group(record, weights=False):
    """The group of a record as `from_groups` takes it: ids of bytes with marks, or weights."""
    prompt, *sides = (
        [byte + 3 for byte in text.encode()]
        for text in (f"{record['q']} ", record["good"], record["bad"])
    )
    nodes = [[1, *prompt], *([*side, 2] for side in sides)]
    if weights:
        nodes = [[0.0] * len(nodes[0]), *([1.0] * len(node) for node in nodes[1:])]
    return nodes[0], nodes[1:]


def test_it_is_the_corpus_of_its_groups(tmp_path, monkeypatch):
    monkeypatch.setattr(ragged, "TOKENS_PER_PART", 50)
    for name, size in (("LEAST", 500), ("BLOCK", 50)):
        monkeypatch.setattr(source, name, size)
    records = make_records(60)
    features = {"margin": Feature("example", dtype="float32"), **LENGTHS}
    arguments = Records(records), Bytes(), tmp_path / "a"
    options = {"template": TEMPLATE, "features": features}
    prepare_share(Job(*arguments[:2], **options), tmp_path / "a", (0, 2))
    corpus = prepare(*arguments, **options)
    assert isinstance(corpus, Groups)
    columns = {"tokens": [*map(group, records)], "weights": [group(r, True) for r in records]}
    columns |= {name: [record[name] for record in records] for name in features}
    expected = pipeline.Corpus.from_groups(columns, tmp_path / "b", features=features)
    require_equal(corpus, expected)
    np.testing.assert_array_equal(corpus.trees, expected.trees)
    assert corpus.tokenizer.fingerprint == Bytes().fingerprint
    assert corpus.num_learnt == sum(len(r["good"]) + len(r["bad"]) + 2 for r in records)
    assert prepare(*arguments, **options).fingerprint == corpus.fingerprint
    assert pipeline.Corpus.open(tmp_path / "a").fingerprint == corpus.fingerprint


def test_records_without_a_preference_are_counted_and_left_out(tmp_path, caplog):
    records = make_records(21)
    records[3]["bad"] = records[3]["good"]
    records[20]["bad"] = ""
    options = {"template": TEMPLATE, "features": LENGTHS}
    corpus = prepare(Records(records), Bytes(), tmp_path / "b", **options)
    unasked, unused, *left_out = caplog.records
    assert "4 of 21 records have a prompt without text" in unasked.message
    assert "21 records, fields that are not used: 'margin' of 19;" in unused.message
    for record, number in zip(left_out, (3, 20), strict=True):
        assert re.match(rf"1 of 21 .* are left out; the first: record {number}", record.message)
    assert np.flatnonzero(corpus.lengths == 0).tolist() == [3, 20]
    del records[20], records[3]
    whole = prepare(Records(records), Bytes(), tmp_path / "c", template=TEMPLATE)
    assert [example["inputs"].tolist() for example in corpus if len(example["inputs"])] == [
        example["inputs"].tolist() for example in whole
    ]


def test_a_record_that_is_no_preference_is_refused(tmp_path):
    bare, options = Bytes(begin=False, end=False), {"template": TEMPLATE, "features": LENGTHS}
    chat = templates.Chat(messages="q", before="", after="", weights={"user": 1.0})
    no_prefix = Preference(chosen=chat, rejected="{bad}")
    turns = [{"role": "user", "content": "yes"}]
    for record, template, sentence in (
        ({"length": [1, 2, 3]}, TEMPLATE, "length .* for each of the 2 continuations"),
        ({"q": turns}, no_prefix, "its prefix or a continuation has no token"),
    ):
        records = make_records(3)
        records[1].update(record)
        records[0]["q"] = records[2]["q"] = turns if template is no_prefix else "?"
        source = Records(records), bare, tmp_path / next(iter(record))
        with pytest.raises(ValueError, match=f"record [01]: {sentence}"):
            prepare(*source, **options | {"template": template})


def test_a_prompt_has_several_rejected_answers(tmp_path):
    several = dataclasses.replace(TEMPLATE, rejected=("{bad[0]}", "{bad[1]}"))
    records = [{"q": "?", "good": "a", "bad": [*bad]} for bad in ("bc", "ba")]
    corpus = prepare(Records(records), Bytes(), tmp_path / "a", template=several)
    assert corpus.decode(0) == "? \n  a\n  b\n  c"
    assert corpus.lengths.tolist() == [8, 0]
    with pytest.raises(ValueError, match=r"no record of .* has tokens; the first: 1 of 1 record"):
        prepare(Records(records[1:]), Bytes(), tmp_path / "b", template=several)
