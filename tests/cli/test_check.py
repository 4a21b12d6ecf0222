import dataclasses
import re
import shutil

import numpy as np
import pytest

from pipeline import Bucket, Corpora, Corpus, Pairs, Plan
from pipeline.cli.check import check_corpus, check_plan
from pipeline.history import NotAsPlanned
from pipeline.planning import lengths as lengths_lib
from tests.corpus.manifests import alter


@pytest.fixture
def copy(corpus, tmp_path):
    shutil.copytree(corpus.directory, tmp_path / "copy")
    return tmp_path / "copy"


def test_check_finds_an_id_outside_the_vocabulary(copy):
    alter(Corpus.open(copy), lambda manifest: manifest.update(vocab_size=900))
    with pytest.raises(ValueError, match="holds the id") as error:
        check_corpus(Corpus.open(copy), lambda what: None)
    found = re.search(r"(\w+) of example (\d+) holds the id (\d+).*from 0 to 899", str(error.value))
    name, example, seen = found.groups()
    assert int(seen) in Corpus.open(copy)[int(example)][name]


@pytest.mark.parametrize("change", ["one more", "two exchanged"])
def test_check_finds_lengths_that_are_not_those_of_the_tokens(copy, change):
    corpus, lengths = Corpus.open(copy), np.load(copy / "lengths.npy")
    if change == "one more":
        lengths[7] += 1
    else:
        other = int(np.flatnonzero(lengths != lengths[7])[0])
        lengths[[7, other]] = lengths[[other, 7]]
    np.save(copy / "lengths.npy", lengths)
    stated = {"lengths_digest": lengths_lib.digest(lengths), "num_tokens": int(lengths.sum())}
    alter(corpus, lambda manifest: manifest.update(stated))
    with pytest.raises(ValueError, match=r"the corpus is damaged at .*: its (num_tokens|lengths)"):
        check_corpus(Corpus.open(copy), lambda what: None)


def test_check_looks_into_pairs_and_into_several_corpora(pairs, tmp_path):
    told = []
    check_corpus(pairs, told.append)
    assert [line.split()[0] for line in told] == [
        "files:",
        "offsets:",
        "fingerprint:",
        "vocabulary",
    ] * 2
    shutil.copytree(pairs.directory, tmp_path / "copy")
    part = next((tmp_path / "copy/targets").glob("part-*.arrow"))
    data = bytearray(part.read_bytes())
    data[len(data) // 2] ^= 1
    part.write_bytes(data)
    damaged = Pairs.open(tmp_path / "copy")
    for each in (damaged, Corpora({"good": pairs, "bad": damaged})):
        with pytest.raises(ValueError, match="targets"):
            check_corpus(each, lambda what: None)


@pytest.fixture
def altered(monkeypatch):
    """Makes all plans give other segments, those that a function makes of the right ones."""

    def alter(change):
        def batch(self, step):
            planned = real(self, step)
            return dataclasses.replace(planned, segments=np.array(change(planned)))

        monkeypatch.setattr(Plan, "batch", batch)

    real = Plan.batch
    return alter


@pytest.mark.parametrize(
    ("segments", "wrong"),
    [
        ([[0, 0, 0, 3], [1, 1, 0, 4], [0, 1, 4, 1]], None),
        ([[0, 0, 0, 3], [0, 1, 4, 1], [1, 1, 0, 4]], None),  # in another order
        ([[0, 0, 0, 3], [1, 1, 0, 4]], "5 positions of example 1 once .1 such"),
        ([[0, 0, 0, 2], [1, 1, 0, 4], [0, 1, 4, 1]], "3 positions of example 0 once"),
        ([[0, 0, 0, 3], [1, 1, 0, 4], [0, 1, 3, 1]], "positions of example 1 once"),
        ([[0, 0, 0, 1], [0, 0, 2, 1], [1, 1, 0, 4], [0, 1, 4, 1]], "positions of example 0 once"),
        ([[0, 0, 1, 3], [1, 1, 0, 4], [0, 1, 4, 1]], "positions of example 0 once"),
        ([[0, 0, 0, 3], [0, 1, 0, 4], [1, 1, 4, 1]], "does not fit its bucket 2x4"),
        ([[0, 0, 0, 3], [2, 1, 0, 4], [1, 1, 4, 1]], "does not fit its bucket 2x4"),
    ],
)
def test_a_plan_that_is_no_partition_is_found(altered, segments, wrong):
    plan = Plan([3, 5], [Bucket(2, 4)])
    altered(lambda planned: segments)
    told = []
    if wrong is None:
        check_plan(plan, 0, told.append)
        assert told == [
            "plan: epoch 0: 8 positions, each once",
            "plan: 1 batch, no row over its length",
        ]
    else:
        with pytest.raises(ValueError, match=wrong):
            check_plan(plan, 0, told.append)


@pytest.mark.parametrize("overflow", ["truncate", "drop"])
def test_plans_of_pairs_are_partitions_of_both_sides(pairs, altered, overflow):
    plan, told = Plan(pairs, [Bucket(8, (64, 48))], overflow=overflow), []
    check_plan(plan, 1, told.append)
    assert told[0].split(";")[0] == f"plan: epoch 1: {plan.num_tokens:,} positions, each once"

    def one_target_less(planned):
        found = planned.segments.copy()
        found[found[:, 1] == 7, 4] -= 1
        return found

    altered(one_target_less)
    with pytest.raises(NotAsPlanned, match=r"positions of example 7 once \(1 such examples\)"):
        check_plan(plan, 1, told.append)


def test_plans_with_weights_are_partitions_corpus_by_corpus(corpus, altered):
    both, told = Corpora({"all": corpus, "again": corpus}), []
    plan = Plan(both, [Bucket(8, 64)], weights={"all": 3, "again": 1}, overflow="truncate")
    check_plan(plan, 0, told.append)
    said = [line.split(";")[0] for line in told]
    assert [line for line in said if "again" in line and "each once" in line] == [
        f"plan: epoch 0 of again: {np.minimum(corpus.lengths, 64).sum():,} positions, each once"
    ]
    assert "plan: epoch 2 of all: " in "".join(told)
    assert told[-1] == f"plan: {plan.num_batches():,} batches, no row over its length"
    example = int(np.flatnonzero(corpus.lengths > 3)[5])

    def moved(planned):
        found = planned.segments.copy()
        found[(found[:, 1] == example) & (planned.epochs == 1), 2] += 1
        return found

    altered(moved)
    with pytest.raises(NotAsPlanned, match=f"epoch 1 of all .*of example {example} once"):
        check_plan(plan, 0, told.append)


def test_every_epoch_of_a_plan_that_changes_is_a_partition(corpus, buckets, altered):
    plan = Plan(corpus, buckets, overflow="truncate").after(3, seed=4, exclude=[5, 8])
    plan = plan.after(2 * plan.num_batches() + 1, buckets=buckets[-1], overflow="split")
    told = []
    for epoch in range(4):
        check_plan(plan, epoch, told.append)
    said = [line for line in told if "each once" in line]
    assert [line.split(":")[1] for line in said] == [f" epoch {epoch}" for epoch in range(4)]
    steps = range(plan.first_step(2), plan.first_step(3))
    assert f" {sum(plan.batch(step).num_tokens for step in steps):,} positions" in said[2]
    altered(lambda planned: planned.segments[1:])
    for epoch in range(4):
        with pytest.raises(NotAsPlanned, match=f"epoch {epoch} of the plan does not have"):
            check_plan(plan, epoch, told.append)
