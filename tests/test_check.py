import json
import re
import shutil

import numpy as np
import pytest

from pipeline import Bucket, Corpus, Plan, PlannedBatch
from pipeline.commands.check import check_corpus, check_plan
from pipeline.planning import lengths as lengths_lib


@pytest.fixture
def copy(corpus, tmp_path):
    shutil.copytree(corpus.directory, tmp_path / "copy")
    return tmp_path / "copy"


def test_check_finds_an_id_outside_the_vocabulary(copy):
    manifest = json.loads((copy / "corpus.json").read_text())
    manifest["vocab_size"] = 900
    (copy / "corpus.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match="holds the id") as error:
        check_corpus(Corpus.open(copy), lambda what: None)
    found = re.search(r"(\w+) of example (\d+) holds the id (\d+).*from 0 to 899", str(error.value))
    name, example, seen = found.groups()
    assert int(seen) in Corpus.open(copy)[int(example)][name]


def test_check_finds_lengths_that_are_not_those_of_the_tokens(copy):
    lengths = np.load(copy / "lengths.npy")
    lengths[7] += 1
    np.save(copy / "lengths.npy", lengths)
    manifest = json.loads((copy / "corpus.json").read_text())
    manifest["lengths_digest"] = lengths_lib.digest(lengths)
    (copy / "corpus.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match="example 7 has length"):
        check_corpus(Corpus.open(copy), lambda what: None)


class Fake:
    """A plan of one batch of 2 × 4 with given segments."""

    buckets = (Bucket(2, 4),)

    def __init__(self, *segments, overflow="split"):
        self.overflow, self._segments = overflow, np.array(segments)

    def num_batches(self, epoch):
        return 1

    def batch(self, step):
        return PlannedBatch(self.buckets[0], self._segments)


@pytest.mark.parametrize(
    ("segments", "wrong"),
    [
        ([[0, 0, 0, 3], [1, 1, 0, 4], [0, 1, 4, 1]], None),
        ([[0, 0, 0, 3], [0, 1, 4, 1], [1, 1, 0, 4]], None),  # in another order
        ([[0, 0, 0, 3], [1, 1, 0, 4]], "example 1 exactly once"),  # one position is missing
        ([[0, 0, 0, 2], [1, 1, 0, 4], [0, 1, 4, 1]], "example 0 exactly once"),
        ([[0, 0, 0, 3], [1, 1, 0, 4], [0, 1, 3, 1]], "example 1 exactly once"),  # twice
        ([[0, 0, 0, 1], [0, 0, 2, 1], [1, 1, 0, 4], [0, 1, 4, 1]], "example 0 exactly once"),
        ([[0, 0, 1, 3], [1, 1, 0, 4], [0, 1, 4, 1]], "example 0 exactly once"),
        ([[0, 0, 0, 3], [0, 1, 0, 4], [1, 1, 4, 1]], "does not fit its bucket 2x4"),
        ([[0, 0, 0, 3], [2, 1, 0, 4], [1, 1, 4, 1]], "does not fit its bucket 2x4"),
    ],
)
def test_a_plan_that_is_no_partition_is_found(segments, wrong):
    told = []
    if wrong is None:
        check_plan(np.array([3, 5]), Fake(*segments), 0, told.append)
        assert told == ["plan: epoch 0 is a partition of 8 positions into 1 batches"]
    else:
        with pytest.raises(ValueError, match=wrong):
            check_plan(np.array([3, 5]), Fake(*segments), 0, told.append)


@pytest.mark.parametrize("overflow", ["split", "truncate", "drop"])
@pytest.mark.parametrize("epoch", [0, 2])
def test_real_plans_are_partitions(corpus, buckets, overflow, epoch):
    plan = Plan(corpus, buckets, overflow=overflow, window=100)
    check_plan(corpus.lengths, plan, epoch, lambda what: None)
