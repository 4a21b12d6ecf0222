"""Features in batches: which are read, and those of examples that are cut into pairs."""

import numpy as np
import pytest

import pipeline
from pipeline import Batches, Bucket, Examples, Plan
from pipeline.corpus import CAUSAL, INPUTS
from tests.loading.drawn import FEATURES, Drawn


def draw(sizes, task=CAUSAL):
    """Examples of these sizes with all features."""
    drawn = Drawn(np.random.default_rng(0), task, tokens=sizes)
    drawn.add_features()
    return drawn


def test_pairs_of_spans_have_the_features_of_the_examples_they_are_cut_from():
    drawn = draw([40] * 20, INPUTS)
    spans = pipeline.SpanCorruption(drawn.examples(vocab_size=90), max_length=15, end_id=2)
    assert {*spans.features} == {"reward", "group"}
    plan = Plan(spans, [Bucket(4, (20, 28))])
    for planned, batch in Batches(spans, plan, features=["reward", "example_id"]).with_plans():
        number = batch["example_id"]
        assert (number >= 0).sum() == len(planned.segments)
        due = np.array(drawn.columns["reward"])[spans.examples_of(number)]
        np.testing.assert_array_equal(batch["reward"], np.where(number < 0, 0, due))


@pytest.mark.parametrize("names", [(), ["example_id"], ["reward", "logprob"], None])
def test_only_the_features_that_are_asked_for_are_read_and_none_is_in_a_state(names, monkeypatch):
    corpus, read = draw([9, 5, 12]).examples(), []
    plan = Plan(corpus, [Bucket(4, 16)], max_segments=16)

    def note(method):
        return lambda self, *given: read.extend(given[-1]) or method(self, *given)

    for method in ("_read", "_read_examples"):
        monkeypatch.setattr(Examples, method, note(getattr(Examples, method)))
    batches = Batches(corpus, plan, features=names)
    assert Batches(corpus, plan, features=["seen"]).origin.resume(batches.origin.state(0)) == 0
    assert {*(names or ())} <= {*batches[0]}
    assert sorted(read) == sorted(FEATURES if names is None else {*names} - {"example_id"})
