"""The audit of a run: passes where all batches are as planned, and else names the step."""

import json

import numpy as np
import pytest
from etils import epath

import pipeline
from pipeline import Bucket, Plan
from pipeline.__main__ import main
from pipeline.training.history import read_history, write_history

SHORT = (Bucket(8, 16), Bucket(4, 32))
LONG = (Bucket(4, 64),)


def lines_of(plan, steps):
    return [
        {"step": step, "loss": 1.0, "gradient_norm": 1.0, "batch": plan.batch(step).digest}
        for step in range(steps)
    ]


def write(workdir, lines):
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (workdir / "metrics.jsonl").write_text(text)


@pytest.fixture
def ran(tmp_path):
    """A run of 60 steps, over three epochs, that changed twice; its lines."""
    rng = np.random.default_rng(0)
    sizes = np.clip(rng.lognormal(2.7, 0.8, 200), 0, 90).astype(int)
    sizes[:2] = 0, 1
    examples = [rng.integers(1, 99, size).astype(np.int32) for size in sizes]
    corpus = pipeline.Corpus.from_arrays(examples, tmp_path / "corpus/train")
    plan = Plan(corpus, SHORT, overflow="truncate").after(7, leave_out=[3, 5, 8], seed=4)
    plan = plan.after(20, buckets=LONG, overflow="split")
    write_history(epath.Path(tmp_path), corpus, plan)
    lines = lines_of(plan, 60)
    lines.insert(10, {"step": 10, "eval_loss": 2.0})
    write(tmp_path, lines)
    return tmp_path, lines, plan


def audited(workdir, capsys):
    code = main(["audit", str(workdir)])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_a_run_as_planned_passes_and_says_what_became_of_every_example(ran, capsys):
    workdir, _, plan = ran
    code, out, err = audited(workdir, capsys)
    assert (code, err) == (0, "")
    assert "plan from step 20 on: buckets=4x64, overflow=split" in out
    assert "left out from step 7 on, as asked: 3, 5, 8" in out
    assert "documents longer than 32 are cut (overflow='truncate')" in out
    assert "documents with nothing to train on" in out
    assert "documents in 3 epochs each" in out
    assert plan.batch(59).epoch == 3
    assert "epoch 3, not over" in out
    assert "all 60 batches are those that were planned, each once and in order" in out


def test_one_altered_digest_is_named(ran, capsys):
    workdir, lines, _ = ran
    lines[31]["batch"] = "0123456789abcdef"
    write(workdir, lines)
    code, _, err = audited(workdir, capsys)
    assert code == 1
    assert "wrong: step 30 did not run the batch that was planned" in err


def test_a_step_that_is_missing_is_named(ran, capsys):
    workdir, lines, _ = ran
    write(workdir, lines[:31] + lines[32:])
    code, _, err = audited(workdir, capsys)
    assert code == 1
    assert "step 30 is missing" in err
    write(workdir, lines[:31])
    (workdir / "checkpoints/60").mkdir(parents=True)
    code, _, err = audited(workdir, capsys)
    assert code == 1
    assert "step 30 is missing: the log ends there, and the last checkpoint is of step 60" in err


def test_a_batch_that_was_trained_twice_is_named(ran, capsys):
    workdir, lines, _ = ran
    write(workdir, lines[:31] + lines[30:])
    code, _, err = audited(workdir, capsys)
    assert code == 1
    assert "step 29 was run twice" in err
    lines[31]["batch"] = lines[30]["batch"]
    write(workdir, lines)
    code, _, err = audited(workdir, capsys)
    assert code == 1
    assert "step 30 did not run" in err
    assert "but that of step 29, again" in err


def test_steps_without_effect_are_told_with_their_documents(ran, capsys):
    workdir, lines, plan = ran
    lines[3] = {"step": 3, "skipped": plan.batch(3).digest}
    lines[5]["loss"] = None
    write(workdir, lines)
    code, out, _ = audited(workdir, capsys)
    assert code == 0
    assert "the batches of steps 3 (skip_steps): documents" in out
    assert "without an update, as the loss was not finite: steps 5: documents" in out


def test_plans_that_cannot_be_made_again_and_places_without_a_run_are_errors(
    ran, tmp_path_factory, capsys
):
    workdir, _, _ = ran
    history = json.loads((workdir / "plans.json").read_text())
    history["plans"][1]["changes"]["seed"] = 5
    (workdir / "plans.json").write_text(json.dumps(history))
    code, _, err = audited(workdir, capsys)
    assert code == 2
    assert "the plan from step 7 on was" in err
    (workdir / "plans.json").write_text("{")
    assert audited(workdir, capsys)[0] == 2
    code, _, err = audited(tmp_path_factory.mktemp("empty"), capsys)
    assert code == 2
    assert "give the work directory of a run" in err


def test_a_plan_that_loses_a_position_would_be_found(ran, capsys, monkeypatch):
    workdir, lines, _ = ran
    batch = pipeline.planning.chain.Chain.batch

    def losing(self, step):
        planned = batch(self, step)
        if step == 25:
            planned.segments[0, 3] -= 1
        return planned

    monkeypatch.setattr(pipeline.planning.chain.Chain, "batch", losing)
    _, plan = read_history(epath.Path(workdir))
    lines[26]["batch"] = plan.batch(25).digest
    write(workdir, lines)
    code, _, err = audited(workdir, capsys)
    assert code == 1
    assert "This is a defect of Lockstep" in err
