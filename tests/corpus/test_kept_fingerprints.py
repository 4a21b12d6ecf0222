"""Fingerprints of corpora stay: states of runs, which name them, are refused otherwise."""

import numpy as np
import pytest

import pipeline
from pipeline import Corpus, Examples, Feature, Pairs, prepare, sources, templates, tokenizers

IDS = [[1, 5, 6, 2], [1, 2], [], [1, 7, 7, 7, 2]]
PIXELS = [[[n, 255]] * n for n in (1, 2, 1, 3)]
FEATURES = {
    "reward": Feature("example", dtype="float32"),
    "seen": Feature("inputs", dtype="uint8", shape=2),
}
COLUMNS = {
    "tokens": IDS,
    "weights": [[n % 2 for n in range(len(ids))] for ids in IDS],
    "reward": [0.5, -1, 0, 2],
    "seen": [np.array([[token, 1] for token in ids]).reshape(-1, 2) for ids in IDS],
}
PATCHES = {"pixels": Feature("patches", dtype="uint8", shape=2)}
RECORDS = sources.Records([{"q": "2+2", "a": "4"}, {"q": "1+2", "a": "3"}], fingerprint="sums")

MADE = {
    "tokens": lambda directory: Corpus.from_arrays(IDS, directory),
    "columns": lambda directory: Corpus.from_arrays(COLUMNS, directory, features=FEATURES),
    "groups": lambda directory: Corpus.from_groups(
        [([1, 5], [[6, 2], [7]]), ([1], [[2]])], directory
    ),
    "sides": lambda directory: Corpus.from_arrays(
        {"tokens": IDS, "pixels": PIXELS}, directory, features=PATCHES
    ),
    "arrays": lambda directory: Corpus.from_arrays({"pixels": PIXELS}, directory, features=PATCHES),
    "pairs": lambda directory: Pairs.from_arrays(IDS, IDS[::-1], directory),
    "prepared": lambda directory: prepare(
        RECORDS,
        tokenizers.Bytes(),
        directory,
        template=templates.Answer(prompt="{q}=", answer="{a}"),
        progress=False,
        num_workers=0,
    ),
    "memory": lambda directory: Examples(COLUMNS, features=FEATURES),
    "split": lambda directory: Corpus.from_arrays(IDS, directory).split(0.5)[0],
    "joined": lambda directory: pipeline.Corpora({"a": Examples(IDS), "b": Examples(IDS[:2])}),
    "masked": lambda directory: pipeline.Masked(
        Examples(IDS, task=pipeline.corpus.INPUTS), mask_id=9
    ),
}
FINGERPRINTS = {
    "tokens": "6cc22b69ff925b59",
    "columns": "6d006cf106f98ca9",
    "groups": "37bc326040349483",
    "sides": "a11edd4c331c9cfc",
    "arrays": "2ebcf500ccf967e3",
    "pairs": "e2b4787d0e2e6383",
    "prepared": "44530897fa7634c4",
    "memory": "f06d45b1a5c03ea9",
    "split": "7e5b67eda23a63fa",
    "joined": "adf0baa16a2d1183",
    "masked": "4ac42001d9867191",
}


@pytest.mark.parametrize("kind", MADE)
def test_a_corpus_has_the_fingerprint_that_it_always_had(kind, tmp_path):
    assert MADE[kind](tmp_path / "corpus").fingerprint == FINGERPRINTS[kind]
