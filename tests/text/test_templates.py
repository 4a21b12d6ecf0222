"""Templates: what is read and what is learnt, from the record to the batch."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pipeline
from pipeline import templates
from pipeline.corpus.preparing.pairs import prepare_pairs
from pipeline.corpus.preparing.preparation import prepare
from pipeline.corpus.tasks import INPUTS
from pipeline.text.sources import Records
from pipeline.text.templates import Answer
from pipeline.text.tokenizers import Bytes

TEXT = st.text(max_size=12)
SPANS = st.lists(st.tuples(TEXT, st.sampled_from([0.0, 0.5, 1.0])), min_size=1, max_size=5)


def spoken(record):
    """A template as a user writes one."""
    return record["spans"]


@given(
    st.lists(SPANS, min_size=1, max_size=6),
    st.sampled_from([Bytes(), Bytes(begin=False), Bytes(end=False), Bytes(begin=False, end=False)]),
)
def test_a_template_gives_the_tokens_of_its_text_and_each_its_weight(examples, tokenizer):
    filled = [templates.fill(spoken, {"spans": spans})["inputs"] for spans in examples]
    chunk = templates.encode(filled, tokenizer)
    texts = ["".join(text for text, _ in spans) for spans in examples]
    flat, counts = tokenizer.encode_batch(texts)
    assert np.array_equal(chunk.flat, flat)
    assert np.array_equal(chunk.counts, counts)
    learnt = [[text for text, weight in spans if weight] for spans in examples]
    assert chunk.text_bytes.tolist() == [len("".join(each).encode()) for each in learnt]
    expected = []
    for spans in examples:
        expected += [0.0] * tokenizer.begin
        expected += [weight for text, weight in spans for _ in text.encode()]
        expected += [spans[-1][1]] * tokenizer.end
    assert chunk.weights.tolist() == expected


@pytest.mark.parametrize(
    ("record", "template", "sentence"),
    [
        ({"q": "x"}, Answer(prompt="{q}", answer="{a}"), r"record 1: .*it lacks 'a'.*fields are q"),
        ({"q": "yes"}, Answer(prompt="", answer="{q[0]}"), "field 'q' has no .*it is the text"),
        ({"q": b"yes"}, Answer(prompt="", answer="{q[x]}"), "field 'q' has no .*it is the text"),
        ({"spans": []}, spoken, r"the template spoken: it returned no spans"),
        ({"spans": [("a", -1)]}, spoken, r"returned the weight -1\.0; it must be from"),
        ({"spans": [("a", 1e39)]}, spoken, r"the weight 1e\+39; it must be from 0 to 3\.4e\+38"),
        ({"spans": [(5, 1)]}, spoken, "a span that is int, not text"),
        ({"spans": ["text"]}, spoken, r"it returned \['text'\]; return a list of spans"),
    ],
)
def test_a_record_that_does_not_suit_is_named(tmp_path, record, template, sentence):
    good = {"q": "x", "a": "y", "spans": [("", 1)]}
    with pytest.raises(ValueError, match=sentence):
        prepare(Records([good, record]), Bytes(), tmp_path, template=template)


def test_a_span_without_a_value_of_a_feature_has_its_fill():
    record = {"spans": [("Q", 0.0, {"turn": 3}), ("ab", 1.0)]}
    features = [{"turn": pipeline.Feature("inputs", dtype="int8", fill=n)} for n in (7, None)]
    filled = templates.fill(spoken, record, {"inputs": features[0]})["inputs"]
    chunk = templates.encode([filled], Bytes(), features[0])
    assert chunk.columns["turn"].values.tolist() == [3, 3, 7, 7, 7]
    with pytest.raises(ValueError, match="returned no 'turn' for the span 'ab'"):
        templates.fill(spoken, record, {"inputs": features[1]})


def test_a_task_without_a_loss_refuses_weights_that_would_be_lost(tmp_path):
    records = Records([{"spans": [("b", 1.0)]}, {"spans": [("a", 0.0), ("b", 1.0)]}])
    with pytest.raises(ValueError, match=r"record 1.*weight 0,.* Give all texts the weight 1"):
        prepare(records, Bytes(), tmp_path / "0", template=spoken, task=INPUTS, progress=False)
    alike = Records([{"spans": [("a", 1.0), ("b", 1.0)]}])
    prepare(alike, Bytes(), tmp_path / "1", template=spoken, task=INPUTS, progress=False)
    # Of pairs, the targets have the loss.
    prepare_pairs(records, Bytes(), tmp_path / "2", fields=(spoken, spoken), progress=False)
