"""Corpora of preferences: what `prepare` makes of a template of groups, and what it refuses."""

import dataclasses

import numpy as np
import pytest

import pipeline
from pipeline import Feature, prepare, templates
from pipeline.corpus import INPUTS, Groups, Job, prepare_share
from pipeline.text import ragged
from pipeline.text.sources import Records, source
from pipeline.text.templates import Preference
from pipeline.text.tokenizers import Bytes
from tests.corpus.files import require_equal

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
    place = Records(records), Bytes(), tmp_path / "a"
    options = {"template": TEMPLATE, "features": features}
    prepare_share(Job(*place[:2], **options), tmp_path / "a", (0, 2))
    corpus = prepare(*place, **options)
    assert isinstance(corpus, Groups)
    columns = {"tokens": [*map(group, records)], "weights": [group(r, True) for r in records]}
    columns |= {name: [record[name] for record in records] for name in features}
    expected = pipeline.Corpus.from_groups(columns, tmp_path / "b", features=features)
    require_equal(corpus, expected)
    np.testing.assert_array_equal(corpus.trees, expected.trees)
    assert corpus.tokenizer.fingerprint == Bytes().fingerprint
    assert corpus.num_learnt == sum(len(r["good"]) + len(r["bad"]) + 2 for r in records)
    assert prepare(*place, **options).fingerprint == corpus.fingerprint
    assert pipeline.Corpus.open(tmp_path / "a").fingerprint == corpus.fingerprint


def test_records_without_a_preference_are_counted_and_in_no_batch(tmp_path, caplog):
    records = make_records(21)
    records[3]["bad"] = records[3]["good"]
    records[20]["bad"] = ""
    features = {"margin": Feature("example", dtype="float32"), **LENGTHS}
    corpus = prepare(
        Records(records), Bytes(), tmp_path / "b", template=TEMPLATE, features=features
    )
    assert [record.message for record in caplog.records] == [
        "1 of 21 records have a chosen and a rejected side that are equal; they are left out; "
        "the first: record 3",
        "1 of 21 records have a side that is empty, or that ends where another one goes on; they "
        "are left out; the first: record 20",
    ]
    assert np.flatnonzero(corpus.lengths == 0).tolist() == [3, 20]
    plan = pipeline.Plan(corpus, [pipeline.Bucket(2, 64)])
    found = [plan.batch(step).segments[:, 1] for step in range(plan.num_batches())]
    assert sorted(np.concatenate(found)) == [n for n in range(20) if n != 3]
    batches = pipeline.Batches(corpus, plan)
    assert sum(batches[step]["loss_weights"].sum() for step in range(plan.num_batches())) > 0
    del records[20], records[3]
    whole = prepare(Records(records), Bytes(), tmp_path / "c", template=TEMPLATE)
    assert [each["inputs"].tolist() for each in corpus if len(each["inputs"])] == [
        each["inputs"].tolist() for each in whole
    ]


def test_a_record_that_is_no_preference_is_refused(tmp_path):
    bare, options = Bytes(begin=False, end=False), {"template": TEMPLATE, "features": LENGTHS}
    chat = templates.Chat(messages="q", before="", after="", weights={"user": 1.0})
    no_prefix = Preference(chosen=chat, rejected="{bad}")
    turns = [{"role": "user", "content": "yes"}]
    for record, template, sentence in (
        ({"length": [1, 2, 3]}, TEMPLATE, "length .* for each of the 2 continuations"),
        ({"q": turns}, no_prefix, "its prefix or a continuation has no token"),
        ({"bad": None}, TEMPLATE, "it does not suit .* its field 'bad' is null"),
    ):
        records = make_records(3)
        records[1].update(record)
        records[0]["q"] = records[2]["q"] = turns if template is no_prefix else "?"
        source = Records(records), bare, tmp_path / next(iter(record))
        with pytest.raises(ValueError, match=f"record [01]: {sentence}"):
            prepare(*source, **options | {"template": template})
    with pytest.raises(ValueError, match="makes groups, which are of the task 'causal'"):
        prepare(Records(records), bare, tmp_path / "a", template=TEMPLATE, task=INPUTS)


def test_a_prompt_has_several_rejected_answers(tmp_path):
    several = dataclasses.replace(TEMPLATE, rejected=("{bad[0]}", "{bad[1]}"))
    records = [{"q": "?", "good": "a", "bad": ["b", "c"]}, {"q": "?", "good": "a", "bad": "ba"}]
    corpus = prepare(Records(records), Bytes(), tmp_path / "a", template=several)
    assert corpus.decode(0) == "? \n  a\n  b\n  c"
    assert corpus.lengths.tolist() == [8, 0]
    with pytest.raises(ValueError, match=r"no record of .* has tokens; the first: 1 of 1 record"):
        prepare(Records(records[1:]), Bytes(), tmp_path / "b", template=several)
