"""Examples without loss are counted and in no batch of training; scores cover them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pipeline
from pipeline import Bucket, Corpora, Corpus, Examples, Plan, sources, templates, tokenizers
from pipeline.corpus import Pairs
from tests.properties.accounts import batches_of

WEIGHTS = st.lists(st.lists(st.sampled_from([0, 0, 0, 0.5, 1]), max_size=20), min_size=1)


def columns(weights):
    return {"tokens": [[*range(len(each))] for each in weights], "weights": weights}


def losses(weights):
    """The weights of the targets of each example."""
    return [each[1:] for each in weights]


@settings(max_examples=60, deadline=None)
@given(WEIGHTS, st.sampled_from(["split", "truncate", "drop"]), st.sampled_from([4, 16]))
def test_each_example_has_loss_and_all_loss_that_fits_is_there(weights, overflow, length):
    drops = overflow == "drop"
    if not any(any(each) and not (drops and len(each) > length) for each in losses(weights)):
        return
    examples = Examples(columns(weights))
    plan = Plan(examples, [Bucket(2, length)], overflow=overflow)
    found = {
        (example, start): size
        for batch in batches_of(plan)
        for _, example, start, size in batch.segments.tolist()
    }
    expected = {}
    for number, each in enumerate(losses(weights)):
        if not any(each) or (drops and len(each) > length):
            continue
        last = len(each) if overflow == "split" else min(length, len(each))
        for start in range(0, last, length):
            expected[number, start] = min(length, last - start)
    assert found == expected
    silent = [n for n, each in enumerate(losses(weights)) if each and not any(each)]
    assert examples.silent.tolist() == silent
    covering = Plan(examples.covering(), [Bucket(2, length)], overflow=overflow)
    assert covering.stages[0].members.stays.all()


def chat(*contents):
    roles = ("user", "assistant")
    return {"messages": [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)]}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    records = [chat("a", "b"), chat("question"), chat("c", "d"), chat("?")] * 3
    return pipeline.prepare(
        sources.Records(records),
        tokenizers.Bytes(),
        tmp_path_factory.mktemp("silent") / "a",
        template=templates.Chat(before="", after=""),
        progress=False,
    )


def test_every_kind_of_corpus_knows_its_examples_without_loss(corpus, tmp_path):
    silent = [1, 3, 5, 7, 9, 11]
    assert corpus.silent.tolist() == Corpus.open(corpus.directory).silent.tolist() == silent
    both = Corpora({"a": corpus, "b": corpus})
    assert both.silent.tolist() == silent + [12 + n for n in silent]
    for view in corpus.split(0.5):
        assert view.numbers[view.silent].tolist() == [n for n in view.numbers if n in silent]
        assert not len(view.covering().silent)
    for whole in (corpus.covering(), both.covering()):
        assert not len(whole.silent)
    pairs = Pairs.from_arrays([[1], [1]], columns([[1, 0], [1, 1]]), tmp_path / "pairs")
    assert pairs.silent.tolist() == [0]


GROUP = [([1, 5, 6, 2], [[7, 8, 3], [9, 3]])]


@pytest.mark.parametrize(
    ("weights", "silent"),
    [
        ([[0, 0], [1, 0], [0, 0], [0, 2]], [0, 2]),
        ([([0, 0, 0, 1], [[0, 0, 0], [0, 0]]), ([1, 0, 0, 0], [0, 0]), [1, 1], [0, 0]], [1, 3]),
        ([([0, 0, 0, 0], [[0, 0, 0], [0, 0.5]])] * 4, []),
    ],
)
def test_groups_without_loss_are_in_no_batch(weights, silent, tmp_path):
    columns = {"tokens": GROUP * 4, "weights": weights}
    made = Examples.from_groups(columns), Corpus.from_groups(columns, tmp_path, vocab_size=10)
    for groups in (*made, Corpus.open(tmp_path)):
        assert groups.silent.tolist() == silent
        batches = batches_of(Plan(groups, [Bucket(1, 16)]))
        examples = np.concatenate([batch.segments[:, 1] for batch in batches])
        assert sorted(examples) == sorted({*range(4)} - {*silent})
        assert not len(groups.covering().silent)


def test_scores_cover_examples_without_loss(corpus, tmp_path):
    options = {"tokens_per_batch": 64, "max_length": 16}
    with pipeline.load(corpus, num_epochs=1, **options) as loader:
        assert all(float(batch["loss_weights"].sum()) > 0 for batch in loader)
        assert "left out: 6 examples without loss" in str(loader.plan)

    def step(batch):
        return {"id": batch["inputs"]}

    options |= {"per": "position", "reduce": "sum", "directory": tmp_path}
    for which in (corpus, corpus.directory):
        assert pipeline.score(which, step, **options)["id"].null_count == 0


@pytest.mark.parametrize(
    ("weights", "overflow", "said"),
    [
        ([[0] * 3 + [1] * 9], "split", "positions without loss, such as a prompt, split: "),
        ([[0] * 9 + [1] * 3], "split", "positions without loss, such as a prompt, split: "),
        (
            [[0] * 9 + [1] * 3, [0, 1]],
            "truncate",
            "truncated: what is cut may be all that has loss",
        ),
        ([[0] * 3 + [1] * 9, [0, 1]], "drop", "1 example longer than 1x6, dropped"),
        ([[0, 1, 1]], "split", ""),
    ],
)
def test_what_a_bucket_does_to_examples_is_said_by_loaders(weights, overflow, said, caplog):
    with pipeline.load(Examples(columns(weights)), buckets=[Bucket(1, 6)], overflow=overflow):
        assert said in caplog.text
        assert bool(said) == bool(caplog.text)
