"""The audit of runs that followed a corpus while it grew."""

import json

import numpy as np
import pytest

from pipeline import Bucket, Corpus
from pipeline.corpus.writer import Writer
from pipeline.history import audit, read_history, write_history
from pipeline.history.auditing import FollowedLedger, NotAsPlanned
from pipeline.planning import growing
from pipeline.planning.following import FollowedPlan


@pytest.fixture(autouse=True)
def _short_chapters(monkeypatch):
    monkeypatch.setattr(growing, "CHAPTER", 3)


@pytest.fixture
def run(tmp_path):
    """The work directory of a run, and its plan, which changes once."""
    rng = np.random.default_rng(0)
    with Writer(tmp_path / "corpus" / "train") as writer:
        for number in range(200):
            writer.append(rng.integers(0, 255, rng.integers(2, 80)))
            if number % 20 == 19:
                writer.seal()
        writer.finish()
    corpus, _ = Corpus.open(tmp_path / "corpus" / "train", follow=True).split(0.1)
    plan = FollowedPlan(corpus.log, [Bucket(4, 64)], window=50)
    plan = plan.after(12, buckets=[Bucket(2, 64)])
    write_history(tmp_path, corpus, plan)
    return tmp_path, plan


def log(workdir, digests):
    lines = [json.dumps({"step": n, "batch": each, "loss": 1.0}) for n, each in enumerate(digests)]
    (workdir / "metrics.jsonl").write_text("\n".join([*lines, ""]))


@pytest.mark.parametrize("steps", [5, 40, 120])  # in a chapter, in another, in a later epoch
def test_a_run_is_audited(run, steps):
    workdir, plan = run
    log(workdir, [plan.batch(step).digest for step in range(steps)])
    said = []
    audit(workdir, said.append)
    assert said[-1] == (f"all {steps} batches are those that were planned, each once and in order")
    assert any(line.startswith("epoch 0 of a corpus, which grows: ") for line in said)
    assert any(line.startswith("epoch 1") for line in said) == (steps == 120)


def test_a_batch_of_another_plan_is_found(run):
    workdir, plan = run
    log(workdir, [plan.batch(step).digest for step in (0, 1, 2, 3, 3, 5)])
    with pytest.raises(NotAsPlanned, match="step 4 did not run the batch that was planned"):
        audit(workdir)


def test_a_position_twice_is_found(run):
    _, plan = run
    ledger = FollowedLedger(plan, print)
    for step in (0, 1, 1):
        ledger.add(plan.batch(step))
    with pytest.raises(NotAsPlanned, match="does not have each position of example"):
        ledger.finish(3)


def test_a_history_is_read(run):
    workdir, plan = run
    corpus, again = read_history(workdir)
    assert [again.batch(n).digest for n in range(60)] == [plan.batch(n).digest for n in range(60)]
    assert len(corpus[150]["inputs"]) == corpus.lengths[150]
