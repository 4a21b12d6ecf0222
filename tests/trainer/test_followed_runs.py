"""Runs on a corpus that another program writes meanwhile, with a model that is next to nothing."""

import json
import logging
import shutil
import threading

import numpy as np
import pytest

import pipeline
import train
from pipeline import Corpus, Writer, tokenizers
from pipeline.cli.commands import main
from pipeline.fs.atomic import as_path
from pipeline.planning import growing
from pipeline.scoring import open_table
from tests.runs.runs import audited, messages, run, steps, tiny

pytestmark = pytest.mark.usefixtures("counter")


@pytest.fixture
def config(text):
    config = tiny(text, steps=8, eval_every=8, checkpoint_every=4)
    config.train.files, config.train.follow = "", True
    with config.batches.unlocked():
        config.batches.window = 20
    return config


def write(directory, first, last, *, finish, tokenizer=None):
    """Writes the examples of these numbers after those that are there."""
    rng = np.random.default_rng(first)
    with Writer(directory, tokenizer=tokenizer) as writer:
        for _ in range(first, last):
            writer.append(rng.integers(3, 99, rng.integers(2, 120)))
        writer.seal()
        if finish:
            writer.finish()


def test_a_run_says_that_it_waits_and_its_finished_corpus_is_scored(config, tmp_path):
    place = tmp_path / "corpus" / "train"
    write(place, 0, 40, finish=False)
    waits = threading.Event()

    def note(record):
        if "waiting for part 1 of" in record.getMessage():
            waits.set()
        return True

    def write_the_rest():
        assert waits.wait(60)
        write(place, 40, 120, finish=True)

    thread = threading.Thread(target=write_the_rest)
    thread.start()
    log = logging.getLogger("pipeline.corpus.log")
    log.addFilter(note)
    run(config, tmp_path)
    log.removeFilter(note)
    assert len(steps(tmp_path)) == 8
    audited(tmp_path)
    thread.join()
    with messages() as said:
        train.score(config, as_path(tmp_path))
    assert "120 documents: loss 8.0000" in str(said)
    table = open_table(as_path(tmp_path) / "scores" / "8" / "scores.arrow")
    lengths = Corpus.open(place).lengths
    assert table["weight"].to_pylist() == lengths.tolist()
    assert table["nll"].to_pylist() == (8 * lengths).tolist()


def test_a_mixture_follows_what_is_written_and_prepared(text, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(growing, "CHAPTER", 3)

    def train_on(name, **fields):
        config = tiny(text, "followed", checkpoint_every=10, eval_every=60, **fields)
        run(config, tmp_path / name)
        audited(tmp_path / name)
        return tmp_path / name

    def held(workdir):
        (path,) = (workdir / "corpus" / "sources" / "written" / "shards" / "readers").glob("*.json")
        return json.loads(path.read_text())["number"]

    live, later = (tmp_path / name / "corpus/sources/written" for name in ("live", "later"))
    made = {"tokenizer": tokenizers.Bytes(begin=True, end=True)}
    for first in range(0, 400, 40):
        write(live, first, first + 40, finish=False, **made)
    workdir = train_on("live", steps=10)
    assert held(workdir) == 0
    train_on("live", steps=40)
    assert held(workdir) == 3  # step 20, of three checkpoints, is in the second chapter
    train_on("live", steps=50)
    assert held(workdir) == 3  # the two that this start knows need less
    write(live, 400, 440, finish=True, **made)
    train_on("live", steps=60)
    shutil.copytree(live, later)
    train_on("later", steps=60)
    digests = [[line["batch"] for line in steps(tmp_path / name)] for name in ("live", "later")]
    assert digests[0] == digests[1]
    said = audited(workdir)
    for line in (
        "epoch 0 of library: ",
        "epoch 0 of prepared: ",
        "epoch 2 of prepared: ",
        "epoch 1 of written, not over: ",
    ):
        assert line in said
    capsys.readouterr()
    for command in (["show", f"{workdir}", "--step=3"], ["why", f"{workdir}", "--step=40"]):
        assert main(command) == 0
        assert "written" in capsys.readouterr().out


def test_a_corpus_that_still_grows_is_not_scored(tmp_path):
    write(tmp_path / "corpus", 0, 20, finish=False)
    options = {"per": "position", "buckets": [pipeline.Bucket(2, 128)]}
    options |= {"directory": tmp_path / "scores"}

    def step(batch):
        return {"token": batch["inputs"]}

    grown = Corpus.open(tmp_path / "corpus", follow=True)
    for corpus in (grown, pipeline.Corpora({"a": grown, "b": grown})):
        with pytest.raises(ValueError, match="is half-written"):
            pipeline.score(corpus, step, **options)
    with pytest.raises(TypeError, match="no option 'follow'"):
        pipeline.score(tmp_path / "corpus", step, follow=True, **options)
    write(tmp_path / "corpus", 20, 30, finish=True)
    found = pipeline.score(grown, step, **options)
    assert found["token"].to_pylist()[-1] == Corpus.open(tmp_path / "corpus")[-1]["inputs"].tolist()
