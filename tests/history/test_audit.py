"""The audit of a run: passes where all batches are as planned, and else names the step."""

import copy
import json
import re

import numpy as np
import pytest
from etils import epath

from pipeline import Bucket, Corpora, Plan
from pipeline.cli.commands import main
from pipeline.history import read_history, write_history
from pipeline.planning import figures
from pipeline.planning.stream import Rows

SHORT = (Bucket(8, 16), Bucket(4, 32))
LONG = (Bucket(4, 64),)
WEIGHTS = {"prose": 3, "code": 1, "chat": 1}
EVEN = dict.fromkeys(WEIGHTS, 1)

# What an audit says of each kind of run.
SAID = {
    "text": (
        "plan from step 20 on: buckets=4x64, overflow=split",
        "left out from step 7 on, as asked: 3, 5, 8\n",
        "left out from step 20 on, as asked: 9\n",
        "from step 0 on, documents longer than 32 are cut (overflow='truncate')",
        "documents with nothing to train on",
        "documents in 3 epochs each",
    ),
    "joined": ("plan from step 7 on: exclude=202, examples=206",),
    "pairs": (
        "documents longer than 64 and 48 are dropped (overflow='drop')",
        "plan from step 31 on: buckets=4x90/60",
    ),
    "phases": (
        "plan from step 20 on: weights=prose:1/2 code:1/2",
        "documents are counted over all corpora, from 0 prose, from 120 code, from 180 chat",
    ),
    "mixture": (
        "plan from step 21 on: buckets=4x64, overflow=drop, exclude=3, 190",
        "plan from step 40 on: weights=prose:1/3 code:1/3 chat:1/3",
        "left out from step 21 on, as asked: 3, 190",
    ),
}


@pytest.fixture(scope="module")
def runs(documents, pairs, tmp_path_factory):
    """By kind: a corpus, its plan, and how many of its steps have run, over several epochs."""
    place = tmp_path_factory.mktemp("corpora")
    text, new = documents(place / "text"), documents(place / "new", 6)
    plan = Plan(text, SHORT, overflow="truncate")
    both = Corpora({"first": text, "new": new})
    joined = plan.after(7, lengths=both, exclude=[202])
    of_pairs = Plan(pairs, (Bucket(8, (32, 24)), Bucket(4, (64, 48))), overflow="drop")
    of_pairs = of_pairs.after(9, seed=3, exclude=[11]).after(31, buckets=[Bucket(4, (90, 60))])
    counts = {"prose": 120, "code": 60, "chat": 40}
    corpora = Corpora({name: documents(place / name, count) for name, count in counts.items()})
    weights = [(0, {"prose": 3, "code": 1}), (20, {"prose": 1, "code": 1}), (50, EVEN)]
    phases = Plan(corpora, SHORT, weights=weights, overflow="truncate", window=60)
    mixture = Plan(corpora, SHORT, weights=WEIGHTS, overflow="truncate")
    mixture = mixture.after(21, buckets=LONG, exclude=[3, 190], overflow="drop")
    mixture = mixture.after(40, weights=EVEN).after(60, buckets=SHORT, seed=2)
    plan = plan.after(7, exclude=[3, 5, 8], seed=4)
    plan = plan.after(20, buckets=LONG, overflow="split", exclude=[9])
    return {
        "text": (text, plan, 60),
        "joined": (both, joined.after(20, buckets=LONG, overflow="split"), 50),
        "pairs": (pairs, of_pairs, 60),
        "phases": (corpora, phases, 120),
        "mixture": (corpora, mixture, 200),
    }


def lines_of(plan, steps):
    return [
        {"step": step, "loss": 1.0, "gradient_norm": 1.0, "batch": plan.batch(step).digest}
        for step in range(steps)
    ]


def write(workdir, lines):
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (workdir / "metrics.jsonl").write_text(text)


@pytest.fixture
def kind():
    return "text"


@pytest.fixture
def ran(kind, runs, tmp_path):
    """The work directory of a run, its lines, and its plan."""
    corpus, plan, steps = runs[kind]
    write_history(epath.Path(tmp_path), corpus, plan)
    lines = lines_of(plan, steps)
    lines.insert(10, {"step": 10, "eval_loss": 2.0})
    write(tmp_path, lines)
    return tmp_path, lines, plan


def audited(workdir, capsys):
    code = main(["audit", str(workdir)])
    said = capsys.readouterr()
    return code, said.out, said.err


@pytest.mark.parametrize("kind", SAID)
def test_a_run_as_planned_passes_and_says_what_became_of_every_example(runs, ran, kind, capsys):
    workdir, _, plan = ran
    corpus, _, steps = runs[kind]
    code, out, err = audited(workdir, capsys)
    assert (code, err) == (0, "")
    for sentence in SAID[kind]:
        assert sentence in out
    if kind == "joined":  # new examples are due from the epoch that they join
        due = np.minimum(np.delete(corpus.lengths, 202), 32).sum()
        assert f"epoch 0: {due:,} positions, each once" in out
    for name, epochs in figures.whole_epochs(plan, steps).items():
        of = f" of {name}" * bool(name)
        assert epochs > 0
        for epoch in range(epochs):
            assert re.search(rf"^epoch {epoch}{of}: [\d,]+ positions, each once", out, re.M)
        assert f"epoch {epochs}{of}, not over" in out
    assert f"all {steps} batches are those that were planned, each once and in order" in out


SPOILT = (
    (lambda log: log[31].update(batch="0" * 16), "wrong: step 30 did not run the batch that was"),
    (lambda log: log.pop(31), "step 30 is missing"),
    (lambda log: log.insert(31, log[30]), "step 29 was run twice"),
    (lambda log: log[31].update(batch=log[30]["batch"]), "but that of step 29, again"),
)


@pytest.mark.parametrize("kind", ["text", "pairs", "phases", "mixture"])
def test_the_step_that_is_not_as_planned_is_named(ran, capsys):
    workdir, lines, _ = ran
    for spoil, sentence in SPOILT:
        log = copy.deepcopy(lines)
        spoil(log)
        write(workdir, log)
        code, _, err = audited(workdir, capsys)
        assert code == 1
        assert sentence in err


def test_a_log_that_ends_before_the_last_checkpoint_lacks_a_step(ran, capsys):
    workdir, lines, _ = ran
    write(workdir, lines[:31])
    (workdir / "checkpoints/60").mkdir(parents=True)
    code, _, err = audited(workdir, capsys)
    assert code == 1
    assert "step 30 is missing: the log ends there, and the last checkpoint is of step 60" in err


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
    assert "the plan from step 7 on is another than that of the run: seed was 4 and is now 5" in err
    (workdir / "plans.json").write_text("{")
    assert audited(workdir, capsys)[0] == 2
    code, _, err = audited(tmp_path_factory.mktemp("empty"), capsys)
    assert code == 2
    assert "give the work directory of a run" in err


@pytest.mark.parametrize(
    ("kind", "example", "epoch", "sentence"),
    [
        ("text", 40, 1, "example 40 (1 such examples). This is a defect of Lockstep"),
        ("joined", 204, 0, "positions of example 204 (1 such examples)"),
        ("phases", 150, 1, "positions of example 30 (1 such examples)"),
    ],
)
def test_a_plan_that_loses_a_position_would_be_found(
    ran, kind, example, epoch, sentence, capsys, monkeypatch
):
    workdir, lines, _ = ran
    batch = Plan.batch

    def losing(self, step):
        planned = batch(self, step)
        lost = (planned.segments[:, 1] == example) & (planned.epoch_of_segments == epoch)
        planned.segments[lost, 3] -= 1
        return planned

    monkeypatch.setattr(Plan, "batch", losing)
    _, plan = read_history(epath.Path(workdir))
    write(workdir, lines_of(plan, len(lines) - 1))
    code, _, err = audited(workdir, capsys)
    assert code == 1
    assert ("epoch 1 of code" in err) == (kind == "phases")
    assert sentence in err


@pytest.mark.parametrize("kind", ["mixture"])
def test_a_piece_that_the_epoch_of_a_change_loses_is_found(ran, capsys, monkeypatch):
    workdir, lines, _ = ran
    joined, plan = read_history(epath.Path(workdir))
    code, segments_of = plan.stages[1].streams[1], Rows.segments

    def losing(self, order=None):
        times, segments = segments_of(self, order)
        if self.of_pass is code.passes[0]:
            segments[:, 3] -= 1
        return times, segments

    with monkeypatch.context() as patch:
        patch.setattr(Rows, "segments", losing)
        patch.setattr("pipeline.history.auditing.read_history", lambda _: (joined, plan))
        write(workdir, lines_of(plan, len(lines) - 1))
        code, _, err = audited(workdir, capsys)
    assert code == 1
    assert "of code of the plan has" in err


def test_a_log_beyond_the_end_of_a_mixture_is_found(runs, tmp_path, capsys):
    corpora, _, _ = runs["mixture"]
    plan = Plan(corpora, SHORT, weights=WEIGHTS, ending="stop")
    write_history(epath.Path(tmp_path), corpora, plan)
    lines = lines_of(plan, plan.num_batches())
    write(tmp_path, lines)
    assert audited(tmp_path, capsys)[0] == 0
    write(tmp_path, [*lines, lines[-1] | {"step": len(lines)}])
    code, _, err = audited(tmp_path, capsys)
    assert code == 1
    assert f"step {len(lines)} ran, and the plan ends before it" in err
