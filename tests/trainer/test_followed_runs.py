"""Runs on a corpus that another program writes meanwhile, with a model that is next to nothing."""

import logging
import threading

import numpy as np
import pytest

import pipeline
import train
from pipeline import Corpus, Writer
from pipeline.fs.atomic import as_path
from pipeline.scoring import open_table
from tests.runs.runs import audit, messages, run, steps, tiny

pytestmark = pytest.mark.usefixtures("counter")


@pytest.fixture
def config(text):
    config = tiny(text, steps=8, eval_every=8, checkpoint_every=8, batches__max_buckets=1)
    config.train.files, config.train.follow = "", True
    with config.batches.unlocked():
        config.batches.window = 20
    return config


class WaitsFor(threading.Event):
    """Is set once a message that contains `text` is logged."""

    def __init__(self, text):
        super().__init__()
        self.text = text

    def filter(self, record):
        if self.text in record.getMessage():
            self.set()
        return True


def write(directory, first, last, *, finish):
    """Writes the examples of these numbers after those that are there."""
    rng = np.random.default_rng(first)
    with Writer(directory) as writer:
        for _ in range(first, last):
            writer.append(rng.integers(3, 99, rng.integers(2, 120)))
        writer.seal()
        if finish:
            writer.finish()


def test_a_run_says_that_it_waits_and_its_finished_corpus_is_scored(config, tmp_path):
    place = tmp_path / "corpus" / "train"
    write(place, 0, 40, finish=False)
    waits = WaitsFor("waiting for part 1 of")

    def write_the_rest():
        assert waits.wait(60)
        write(place, 40, 120, finish=True)

    thread = threading.Thread(target=write_the_rest)
    thread.start()
    log = logging.getLogger("pipeline.corpus.log")
    log.addFilter(waits)
    run(config, tmp_path)
    log.removeFilter(waits)
    assert len(steps(tmp_path)) == 8
    assert audit(tmp_path)[0] == 0
    thread.join()
    with messages() as said:
        train.score(config, as_path(tmp_path))
    assert "120 documents: loss 8.0000" in str(said)
    table = open_table(as_path(tmp_path) / "scores" / "8" / "scores.arrow")
    assert table["weight"].to_pylist() == Corpus.open(place).lengths.tolist()


def test_a_corpus_that_still_grows_is_not_scored(tmp_path):
    write(tmp_path / "corpus", 0, 20, finish=False)
    options = {"per": "position", "buckets": [pipeline.Bucket(2, 128)]}

    def step(batch):
        return {"token": batch["inputs"]}

    grown = Corpus.open(tmp_path / "corpus", follow=True)
    for corpus in (grown, pipeline.Corpora({"a": grown, "b": grown})):
        with pytest.raises(ValueError, match="is half-written"):
            pipeline.score(corpus, step, directory=tmp_path / "scores", **options)
    with pytest.raises(TypeError, match="no option 'follow'"):
        pipeline.score(
            tmp_path / "corpus", step, directory=tmp_path / "scores", follow=True, **options
        )
    write(tmp_path / "corpus", 20, 30, finish=True)
    found = pipeline.score(grown, step, directory=tmp_path / "scores", **options)
    assert found["token"].to_pylist()[-1] == Corpus.open(tmp_path / "corpus")[-1]["inputs"].tolist()
