import re
import shutil

import pytest

from pipeline import Bucket, Corpora, Corpus, Pairs, Plan
from pipeline.cli.check import check_corpus, check_plan
from tests.corpus.files import flip
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


def test_check_looks_into_several_corpora(pairs, tmp_path):
    shutil.copytree(pairs.directory, tmp_path / "copy")
    flip(next((tmp_path / "copy/targets").glob("part-*.arrow")))
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
