import numpy as np

import pipeline
from pipeline.corpus import interface
from pipeline.corpus.tasks import INPUTS
from tests.properties.accounts import batches_of

EXAMPLES = [[1, 5, 2], [1, 5], [1, 5, 2], [1], [1], [5, 2], [1, 6, 2], [1, 5, 2], [1, 5]]


def test_later_copies_are_found_and_left_out_of_a_plan(tmp_path):
    corpus = pipeline.Corpus.from_arrays(EXAMPLES, tmp_path)
    assert pipeline.corpus.duplicates(corpus).tolist() == [2, 7, 8]  # not 4, which is in no batch
    plan = pipeline.Plan(corpus, [pipeline.Bucket(1, 4)], exclude=pipeline.corpus.duplicates)
    seen = np.concatenate([batch.segments[:, 1] for batch in batches_of(plan)])
    assert sorted(seen) == [0, 1, 5, 6]


def test_random_examples_have_the_copies_that_a_dict_finds(tmp_path, monkeypatch):
    monkeypatch.setattr(interface, "TOGETHER", 3)  # blocks of one or two examples
    rng = np.random.default_rng(0)
    examples = [rng.integers(0, 3, rng.integers(2, 6)).tolist() for _ in range(400)]
    corpus = pipeline.Corpus.from_arrays(examples, tmp_path)
    first: dict = {}
    expected = [
        n for n, example in enumerate(map(tuple, examples)) if first.setdefault(example, n) != n
    ]
    assert pipeline.corpus.duplicates(corpus).tolist() == expected


def test_copies_have_the_same_weights_and_the_same_other_side(tmp_path):
    weights = [[1] * len(example) for example in EXAMPLES]
    weights[2] = [1, 1, 0.5]
    corpus = pipeline.Corpus.from_arrays({"tokens": EXAMPLES, "weights": weights}, tmp_path / "one")
    assert pipeline.corpus.duplicates(corpus).tolist() == [7, 8]
    inputs, targets = [[5], [5, 6], [5], [5], [5, 6]], [[1, 6, 7], [1, 7], [1, 6, 7], [1, 8], [1]]
    pairs = pipeline.Pairs.from_arrays(inputs, targets, tmp_path / "pairs")
    assert pipeline.corpus.duplicates(pairs).tolist() == [2]


def test_copies_are_found_across_corpora_and_beneath_views(tmp_path):
    one, other = (
        pipeline.Corpus.from_arrays(some, tmp_path / name, vocab_size=9, task=INPUTS)
        for name, some in (("one", EXAMPLES[:3]), ("other", EXAMPLES[5:]))
    )
    both = pipeline.Corpora({"one": one, "other": other})
    assert pipeline.corpus.duplicates(both).tolist() == [2, 5, 6]
    views = pipeline.Corpora({
        "one": pipeline.Masked(one, mask_id=8), "other": pipeline.Masked(other, mask_id=8)
    })  # fmt: skip
    assert pipeline.corpus.duplicates(views).tolist() == [2, 5, 6]
