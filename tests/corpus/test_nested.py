"""Corpora of every kind, joined, split, viewed and nested: their examples stay the same."""

import itertools
import json
import pickle

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pipeline import Bucket, Corpora, Corpus, Examples, Feature, FillInTheMiddle, Masked, Plan
from pipeline.corpus import CAUSAL, INPUTS
from pipeline.corpus.corpora import Lacking
from pipeline.corpus.description import describe, make_corpus
from tests.corpus.kinds import KINDS, make
from tests.loading.definition import require_same

IDS = {"prefix": 200, "middle": 201, "suffix": 202}
SHARE = 0.4
OTHERS = "added", "memory", "sides", "text beside sides", "masked in memory"
GAMMA, WORD = 0x9E3779B97F4A7C15, (1 << 64) - 1


def is_held_out(number):
    """SplitMix64 of the number, below the share."""
    bits = (number + 1) * GAMMA & WORD
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        bits = (bits ^ bits >> shift) * factor & WORD
    return bits < SHARE * 2**64


def sizes_of(corpus):
    """The number of examples of each corpus that is split by itself."""
    if isinstance(corpus, Corpora):
        return [size for member in corpus.corpora.values() for size in sizes_of(member)]
    return sizes_of(corpus.corpus) if isinstance(corpus, Lacking) else [len(corpus)]


def in_memory():
    """Corpora that have no directory."""
    rng = np.random.default_rng(0)
    sizes = rng.integers(0, 9, 30)
    ids = [rng.integers(3, 99, size) for size in sizes]
    weights = [np.arange(size) * (at % 3 > 0) for at, size in enumerate(sizes)]
    yield "memory", Examples({"tokens": ids, "weights": weights})
    columns = {"tokens": [id_ + 1 for id_ in ids], "weights": weights}
    columns |= {"frames": [np.arange(n) for n in rng.integers(0, 5, 30)], "label": range(30)}
    features = {"frames": Feature("frames", dtype="int8"), "label": Feature("example", fill=7)}
    sides = Examples(columns, features=features)
    yield "sides", sides
    yield "text beside sides", Corpora({"text": Examples(ids), "sides": sides})
    yield "masked in memory", Masked(Examples(ids, task=INPUTS, vocab_size=99))


@pytest.fixture(scope="module")
def leaves(tmp_path_factory):
    folder = tmp_path_factory.mktemp("leaves")
    made = {kind: make(kind, folder / kind) for kind in KINDS} | dict(in_memory())
    score, ids = {"score": Feature("targets")}, [np.arange(9)] * 12
    corpus = Corpus.from_arrays(ids, folder / "added")
    return made | {"added": corpus.with_features({"score": ids}, features=score)}


def wrap(corpus, origin, how):
    """A corpus of this one, and for each example a corpus whose example it is, and its number."""
    if how in ("train", "held out"):
        held = [[is_held_out(n) == (how == "held out") for n in range(n)] for n in sizes_of(corpus)]
        if not all(any(some) and not all(some) for some in held):  # a side has no example
            with pytest.raises(ValueError, match="split a larger corpus"):
                corpus.split(SHARE)
            return corpus, origin
        return (
            corpus.split(SHARE)[how == "held out"],
            [*itertools.compress(origin, itertools.chain(*held))],
        )
    if how == "twice":
        return Corpora({"a": corpus, "b": corpus}), origin * 2
    weighted = any(side.weighted for side in corpus.sides.values())
    if how == "viewed" and corpus.trees is None and not weighted:
        view = FillInTheMiddle if corpus.task == CAUSAL else None
        view = Masked if corpus.task == INPUTS else view
        options = IDS if view is FillInTheMiddle else {"mask_id": 200}
        made = corpus if view is None else view(corpus, **options, seed=len(origin))
        return made, [(made, number) for number in range(len(made))]
    return (Corpora({"a": corpus}) if how == "alone" else corpus), origin


def plan_of(corpus):
    names = corpus.side_names
    length = dict.fromkeys(names, 64) if len(names) > 1 else 64
    cost = {"cost": dict.fromkeys(names, 1)} if len(names) > 1 else {}
    return Plan(corpus, [Bucket(4, length)], overflow="drop", **cost)


@settings(max_examples=60)
@example(kind="added", hows=["train"] * 4, covers=False, seed=0)
@given(
    kind=st.sampled_from(
        [*KINDS, "added", "memory", "sides", "text beside sides", "masked in memory"]
    ),
    hows=st.lists(st.sampled_from(["train", "held out", "twice", "viewed", "alone"]), max_size=4),
    covers=st.booleans(),
    seed=st.integers(0, 99),
)
def test_examples_are_those_of_the_members_however_they_are_nested(
    leaves, kind, hows, covers, seed
):
    rng, corpus = np.random.default_rng(seed), leaves[kind]
    origin = [(corpus, number) for number in range(len(corpus))]
    for how in hows:
        corpus, origin = wrap(corpus, origin, how)
    silent = [at for at, (leaf, number) in enumerate(origin) if number in {*leaf.silent.tolist()}]
    assert corpus.silent.tolist() == silent
    if covers:
        corpus, silent = corpus.covering(), []
    assert corpus.silent.tolist() == silent
    assert len(corpus) == len(origin)
    assert np.array_equal(corpus.lengths, [leaf.lengths[number] for leaf, number in origin])
    picks = rng.integers(0, len(origin), 7)
    copies = [corpus, pickle.loads(pickle.dumps(corpus))]
    if kind in (*KINDS, "added"):
        copies.append(make_corpus(json.loads(json.dumps(describe(corpus)))))
    for copy in copies:
        assert copy.fingerprint == corpus.fingerprint
        for index, (name, side) in enumerate(copy.sides.items()):
            ends = np.reshape(copy.lengths, (len(copy), -1))[picks, index].astype(np.int64)
            starts = (rng.random(7) * ends).astype(np.int64)
            read = side.read(picks, starts, ends - starts, epoch=2)
            at = 0
            for pick, start, end in zip(picks, starts, ends, strict=True):
                leaf, number = origin[pick]
                due = leaf.sides[name].read([number], [start], [end - start], epoch=2)
                piece = {n: values[at : at + end - start] for n, values in read.items()}
                require_same(piece, due)
                at += end - start
        for pick in picks[:2].tolist():
            leaf, number = origin[pick]
            require_same(copy[pick], leaf[number])
    left = [at for at in range(len(origin)) if np.any(corpus.lengths[at]) and at not in silent]
    if left:
        alone = Corpora({"a": corpus})
        assert plan_of(alone).fingerprint == plan_of(corpus).fingerprint
        assert alone.fingerprint == corpus.fingerprint
        assert alone.partly_learnt == corpus.partly_learnt
