"""Long work shows a bar on a terminal, and nothing elsewhere or where the log tells the same."""

import io
import logging
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict

import pipeline
from pipeline import Batches, Bucket, Examples, Plan
from pipeline.bar import Bar
from pipeline.corpus.views import prefixes
from pipeline.scoring import score
from pipeline.steps import Compiled
from pipeline.text.sources import Records
from pipeline.text.tokenizers import Bytes
from trainer.evaluation import evaluate

BUCKET = Bucket(4, 64)


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)
    return Examples([rng.integers(1, 99, size) for size in rng.integers(2, 60, 80)])


def compile_steps(data, folder):
    specs = Batches(data, Plan(data, [BUCKET])).specs
    Compiled(lambda state, batch: state + batch["inputs"].sum(), jnp.zeros((), jnp.int32), specs)


def score_all(data, folder):
    options = {"directory": folder / "scores", "per": "position", "reduce": "sum"}
    score(data, lambda batch: {"ids": batch["inputs"]}, buckets=[BUCKET], **options)


def evaluate_all(data, folder):
    config = ConfigDict({"eval_batches": None, "num_threads": 1})
    batches = Batches(data, Plan(data, [BUCKET], shuffle=False))

    def sums(params, batch):
        return batch["loss_weights"].sum(), batch["loss_weights"].sum()

    assert evaluate(config, batches, sums, None).weight == data.lengths.sum()


def find_prefixes(data, folder):
    pipeline.find_prefixes(
        [data[number]["inputs"] for number in range(80) if data.lengths[number] > 1]
    )


def prepare(data, folder):
    pipeline.prepare(Records(["a text"] * 9), Bytes(), folder / "corpus")


WORK = {
    "compiling": compile_steps,
    "scoring": score_all,
    "evaluating": evaluate_all,
    "finding prefixes": find_prefixes,
    "preparing": prepare,
}


@pytest.mark.parametrize("name", WORK)
def test_long_work_shows_a_bar_on_a_terminal(data, name, tmp_path, monkeypatch):
    monkeypatch.setattr(prefixes, "SHOWN_AFTER", 0.0)
    monkeypatch.setattr(sys, "stderr", Terminal())
    WORK[name](data, tmp_path)
    shown = sys.stderr.getvalue()
    assert f"\r{name}" in shown
    assert "%|" in shown
    if name != "preparing":
        assert shown.endswith("\r")  # it is removed


@pytest.mark.parametrize("name", [name for name in WORK if name != "preparing"])
def test_a_file_gets_no_bar(data, name, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(prefixes, "SHOWN_AFTER", 0.0)
    WORK[name](data, tmp_path)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("name", ["compiling", "scoring"])
def test_the_log_of_the_same_steps_replaces_the_bar(data, name, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(sys, "stderr", Terminal())
    with caplog.at_level(logging.INFO, logger="pipeline"):
        WORK[name](data, tmp_path)
    assert {"compiling": "compiled in", "scoring": "tokens/s"}[name] in caplog.text
    assert sys.stderr.getvalue() == ""


def test_other_hosts_show_no_bar(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert [*Bar("counting", range(3), shown=False)] == [0, 1, 2]
    assert sys.stderr.getvalue() == ""
    assert [*Bar("counting", range(3))] == [0, 1, 2]
    assert "counting" in sys.stderr.getvalue()


def test_loading_prints_nothing_and_the_loader_shows_its_plan(data, capsys):
    with pipeline.load(data, tokens_per_batch=256, max_length=64, num_epochs=2) as loader:
        next(loader)
        assert capsys.readouterr() == ("", "")
        print(loader)
        shown = capsys.readouterr().out
        assert shown.startswith(f"{loader.plan}\n")
        assert shown.endswith(f"next: step 1 of {len(loader)}\n")
    assert "fingerprint" in repr(loader)
