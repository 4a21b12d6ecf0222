import numpy as np

import pipeline
from pipeline.corpus import side
from pipeline.corpus.tasks import INPUTS
from tests.properties.accounts import batches_of

EXAMPLES = [[1, 5, 2], [1, 5], [1, 5, 2], [1], [1], [5, 2], [1, 6, 2], [1, 5, 2], [1, 5]]


def test_later_copies_are_found_and_left_out_of_a_plan(tmp_path):
    corpus = pipeline.Corpus.from_arrays(EXAMPLES, tmp_path)
    assert pipeline.corpus.duplicates(corpus).tolist() == [2, 7, 8]  # not 4, which is in no batch
    plan = pipeline.Plan(corpus, [pipeline.Bucket(1, 4)], exclude=pipeline.corpus.duplicates)
    seen = np.concatenate([batch.segments[:, 1] for batch in batches_of(plan)])
    assert sorted(seen) == [0, 1, 5, 6]


def test_arrays_are_compared_in_parts_of_corpora_too():
    pixels = [[[n, n + 1]] * 2 for n in range(40)]
    pixels[7] = pixels[30] = pixels[3]
    features = {"pixels": pipeline.Feature("patches", dtype="uint8", shape=2)}
    for more in ({}, {"tokens": [[1, 2, 3]] * 40}):
        corpus = pipeline.Examples({**more, "pixels": pixels}, features=features)
        parts = corpus.split(0.3)
        for each in (corpus, *parts, pipeline.Corpora({"one": parts[0], "two": parts[1]})):
            first = {}
            values = [side["pixels"].tobytes() for side in each]
            expected = [n for n, key in enumerate(values) if first.setdefault(key, n) != n]
            assert pipeline.corpus.duplicates(each).tolist() == expected


def test_copies_are_those_that_a_dict_finds(tmp_path, monkeypatch):
    monkeypatch.setattr(side, "POSITIONS", 3)  # blocks of one or two examples
    rng = np.random.default_rng(0)
    sizes = rng.integers(2, 5, (2, 200))
    one, other = ([rng.integers(0, 2, size).tolist() for size in side] for side in sizes)
    weights = [[1, *rng.integers(1, 3, len(each) - 1)] for each in one]
    parts = {
        name: pipeline.Corpus.from_arrays(some, tmp_path / name, vocab_size=9, task=INPUTS)
        for name, some in (("one", one), ("other", other))
    }
    views = {name: pipeline.Masked(each, mask_id=8) for name, each in parts.items()}
    weighted = {"tokens": one, "weights": weights}
    for corpus, examples in (
        (pipeline.Corpora(parts), one + other),
        (pipeline.Corpora(views), one + other),
        (
            pipeline.Corpus.from_arrays(weighted, tmp_path / "weighted"),
            zip(one, weights, strict=True),
        ),
        (pipeline.Pairs.from_arrays(one, other, tmp_path / "pairs"), zip(one, other, strict=True)),
    ):
        first = {}
        keys = map(repr, examples)
        expected = [n for n, key in enumerate(keys) if first.setdefault(key, n) != n]
        assert pipeline.corpus.duplicates(corpus).tolist() == expected != []
