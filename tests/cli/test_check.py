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
    monkeypatch.setattr("pipeline.corpus.interface.TOGETHER", 50)
    alter(Corpus.open(copy), lambda manifest: manifest.update(vocab_size=999))
    with pytest.raises(ValueError, match="holds the id") as error:
        check_corpus(Corpus.open(copy), lambda what: None)
    found = re.search(r"(\w+) of example (\d+) holds the id (\d+).*from 0 to 998", str(error.value))
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


def test_every_epoch_of_a_plan_whose_change_dropped_what_was_left_is_whole():
    plan = Plan([5, 3, 14], [Bucket(2, 8), Bucket(1, 16)], overflow="truncate")
    plan = plan.after(5, buckets=[Bucket(3, 12)], overflow="drop")
    for epoch in range(6):
        said = []
        check_plan(plan, epoch, said.append)
        assert said[-1].endswith("no row over its length")
