import dataclasses
import re
import shutil

import numpy as np
import pytest

from pipeline import Bucket, Corpora, Corpus, Pairs, Plan
from pipeline.cli.check import check_corpus, check_plan
from pipeline.planning import lengths as lengths_lib
from tests.corpus.manifests import alter


@pytest.fixture
def copy(corpus, tmp_path):
    shutil.copytree(corpus.directory, tmp_path / "copy")
    return tmp_path / "copy"


def test_check_finds_an_id_outside_the_vocabulary(copy, monkeypatch):
    monkeypatch.setattr("pipeline.corpus.copies.READ", 50)
    alter(Corpus.open(copy), lambda manifest: manifest.update(vocab_size=999))
    with pytest.raises(ValueError, match="holds the id") as error:
        check_corpus(Corpus.open(copy), lambda what: None)
    found = re.search(r"(\w+) of example (\d+) holds the id (\d+).*from 0 to 998", str(error.value))
    name, example, seen = found.groups()
    assert int(seen) in Corpus.open(copy)[int(example)][name]


def test_check_says_which_ids_there_are(tmp_path):
    for ids, said in (([[6, 5], [7, 5]], "ids are from 5 to 7"), ([[]], "there are no ids")):
        found = Corpus.from_arrays(ids, tmp_path / said, vocab_size=9)
        lines = []
        check_corpus(found, lines.append)
        assert lines[-1] == f"vocabulary of 9: {said}"


@pytest.mark.parametrize("change", ["one more", "two exchanged"])
def test_check_finds_lengths_that_are_not_those_of_the_tokens(copy, change):
    corpus, lengths = Corpus.open(copy), np.load(copy / "lengths.npy")
    if change == "one more":
        lengths[7] += 1
    else:
        other = int(np.flatnonzero(lengths != lengths[7])[0])
        lengths[[7, other]] = lengths[[other, 7]]
    np.save(copy / "lengths.npy", lengths)
    stated = {"lengths_digest": lengths_lib.digest(lengths)}
    alter(corpus, lambda manifest: manifest.update(stated))
    with pytest.raises(ValueError, match=r"the corpus is damaged at .*: its lengths_digest"):
        check_corpus(Corpus.open(copy), lambda what: None)


def test_check_looks_into_several_corpora(pairs, tmp_path):
    shutil.copytree(pairs.directory, tmp_path / "copy")
    part = next((tmp_path / "copy/targets").glob("part-*.arrow"))
    data = bytearray(part.read_bytes())
    data[len(data) // 2] ^= 1
    part.write_bytes(data)
    several = Corpora({"good": pairs, "bad": Pairs.open(tmp_path / "copy")})
    with pytest.raises(ValueError, match="targets"):
        check_corpus(several, lambda what: None)


@pytest.mark.parametrize(
    ("segments", "wrong"),
    [
        ([[0, 0, 0, 3], [1, 1, 0, 4], [0, 1, 4, 1]], None),
        ([[0, 0, 0, 3], [1, 1, 0, 4]], "5 positions of example 1 once .1 such"),
        ([[0, 0, 0, 2], [1, 1, 0, 4], [0, 1, 4, 1]], "3 positions of example 0 once"),
        ([[0, 0, 0, 3], [1, 1, 0, 4], [0, 1, 3, 1]], "positions of example 1 once"),
        ([[0, 0, 0, 1], [0, 0, 2, 1], [1, 1, 0, 4], [0, 1, 4, 1]], "positions of example 0 once"),
        ([[0, 0, 1, 3], [1, 1, 0, 4], [0, 1, 4, 1]], "positions of example 0 once"),
        ([[0, 0, 0, 3], [0, 1, 0, 4], [1, 1, 4, 1]], "does not fit its bucket 2x4"),
        ([[0, 0, 0, 3], [2, 1, 0, 4], [1, 1, 4, 1]], "does not fit its bucket 2x4"),
    ],
)
def test_a_plan_that_is_no_partition_is_found(monkeypatch, segments, wrong):
    plan, told = Plan([3, 5], [Bucket(2, 4)]), []
    planned = dataclasses.replace(plan.batch(0), segments=np.array(sorted(segments)))
    monkeypatch.setattr(Plan, "batch", lambda self, step: planned)
    if wrong is None:
        check_plan(plan, 0, told.append)
        assert told == [
            "plan: epoch 0: 8 positions, each once",
            "plan: 1 batch, no row over its length",
        ]
    else:
        with pytest.raises(ValueError, match=wrong):
            check_plan(plan, 0, told.append)


def test_every_epoch_of_a_plan_whose_change_dropped_what_was_left_is_whole():
    plan = Plan([5, 3, 14], [Bucket(2, 8), Bucket(1, 16)], overflow="truncate")
    plan = plan.after(5, buckets=[Bucket(3, 12)], overflow="drop")
    for epoch in range(6):
        said = []
        check_plan(plan, epoch, said.append)
        assert said[-1].endswith("no row over its length")
