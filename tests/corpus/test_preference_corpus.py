"""Corpora of preferences: what `prepare` makes of a template of groups, and what it refuses."""

import numpy as np
import pytest

import pipeline
from pipeline import Feature, templates
from pipeline.corpus import ranges
from pipeline.corpus.groups import Groups
from pipeline.corpus.on_read import tokenize_on_read
from pipeline.corpus.preparation import prepare, prepare_pairs, prepare_share
from pipeline.corpus.tasks import INPUTS
from pipeline.text import ragged
from pipeline.text.sources import Records
from pipeline.text.templates import Preference
from pipeline.text.tokenizers import Bytes
from tests.corpus.files import require_equal

TEMPLATE = Preference(prompt="{q} ", chosen="{good}", rejected="{bad}")


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


@pytest.mark.parametrize("tokens_per_part", [1 << 24, 50])  # parts end inside groups
def test_it_is_the_corpus_of_its_groups(tokens_per_part, tmp_path, monkeypatch):
    monkeypatch.setattr(ragged, "TOKENS_PER_PART", tokens_per_part)
    monkeypatch.setattr(ranges, "RECORDS", 16)
    records = make_records(60)
    features = {
        "margin": Feature("example", dtype="float32"),
        "length": Feature("continuation", dtype="int32"),
    }
    source = Records(records)
    prepare_share(source, Bytes(), tmp_path / "a", (0, 2), template=TEMPLATE, features=features)
    corpus = prepare(source, Bytes(), tmp_path / "a", template=TEMPLATE, features=features)
    assert isinstance(corpus, Groups)
    columns = {"tokens": [*map(group, records)], "weights": [group(r, True) for r in records]}
    columns |= {name: [record[name] for record in records] for name in features}
    expected = pipeline.Corpus.from_groups(columns, tmp_path / "b", features=features)
    require_equal(corpus, expected)
    np.testing.assert_array_equal(corpus.trees, expected.trees)
    assert corpus.tokenizer.fingerprint == Bytes().fingerprint
    assert corpus.num_learnt == sum(len(r["good"]) + len(r["bad"]) + 2 for r in records)
    again = prepare(source, Bytes(), tmp_path / "a", template=TEMPLATE, features=features)
    assert again.fingerprint == corpus.fingerprint
    assert pipeline.Corpus.open(tmp_path / "a").fingerprint == corpus.fingerprint


def test_records_that_fail_are_in_no_batch(tmp_path, caplog):
    records = make_records(20)
    records[3]["bad"] = records[3]["good"]
    source = Records(records)
    with pytest.raises(ValueError, match=r"record 3 does not suit .* are equal"):
        prepare(source, Bytes(), tmp_path / "a", template=TEMPLATE)
    corpus = prepare(source, Bytes(), tmp_path / "b", template=TEMPLATE, on_error="skip")
    assert "1 of 20 records have no tokens, for they are empty or failed: numbers 3" in caplog.text
    assert np.flatnonzero(corpus.lengths == 0).tolist() == [3]
    plan = pipeline.Plan(corpus, [pipeline.Bucket(2, 64)])
    found = [plan.batch(step).segments[:, 1] for step in range(plan.num_batches())]
    assert sorted(np.concatenate(found)) == [n for n in range(20) if n != 3]
    batches = pipeline.Batches(corpus, plan)
    assert sum(batches[step]["loss_weights"].sum() for step in range(plan.num_batches())) > 0
    del records[3]
    whole = prepare(Records(records), Bytes(), tmp_path / "c", template=TEMPLATE)
    assert [each["inputs"].tolist() for each in corpus if len(each["inputs"])] == [
        each["inputs"].tolist() for each in whole
    ]


def test_a_node_without_tokens_is_refused(tmp_path):
    bare, records = Bytes(begin=False, end=False), make_records(3)
    records[1]["good"] = ""
    with pytest.raises(ValueError, match="record 1: its prefix or a continuation has no token"):
        prepare(Records(records), bare, tmp_path, template=TEMPLATE)


def test_values_for_another_number_of_continuations_are_refused(tmp_path):
    records, features = make_records(3), {"length": Feature("continuation", dtype="int32")}
    records[2]["length"] = [1, 2, 3]
    with pytest.raises(ValueError, match=r"record 2: length .* for each of the 2 continuations"):
        prepare(Records(records), Bytes(), tmp_path, template=TEMPLATE, features=features)


def test_groups_are_made_where_they_can_be_stored_alone(tmp_path):
    source = Records(make_records(3))
    with pytest.raises(ValueError, match="makes groups, which are of the task 'causal', and the"):
        prepare(source, Bytes(), tmp_path / "a", template=TEMPLATE, task=INPUTS)
    with pytest.raises(ValueError, match="makes groups, which are of the task 'causal', and the"):
        prepare_pairs(source, Bytes(), tmp_path / "b", fields=("q", TEMPLATE))
    with pytest.raises(ValueError, match=r"makes groups, which are stored as tokens; prepare\(\)"):
        tokenize_on_read(source, Bytes(), tmp_path / "c", template=TEMPLATE)
    assert templates.count_nodes(TEMPLATE) == 3
