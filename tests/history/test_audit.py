"""The audit of a run: passes where all batches are as planned, and else names the step."""

import json

import numpy as np
import pytest
from etils import epath

import pipeline
from pipeline import Bucket, Plan
from pipeline.history import read_history, write_history
from tests.history.documents import write_documents

SHORT = (Bucket(8, 16), Bucket(4, 32))
LONG = (Bucket(4, 64),)


def lines_of(plan, steps):
    return [
        {"step": step, "loss": 1.0, "gradient_norm": 1.0, "batch": plan.batch(step).digest}
        for step in range(steps)
    ]


@pytest.fixture
def ran(tmp_path):
    """A run of 60 steps, over three epochs, that changed twice; its lines."""
    corpus = write_documents(tmp_path / "corpus/train")
    plan = Plan(corpus, SHORT, overflow="truncate").after(7, exclude=[3, 5, 8], seed=4)
    plan = plan.after(20, buckets=LONG, overflow="split")
    write_history(epath.Path(tmp_path), corpus, plan)
    lines = lines_of(plan, 60)
    lines.insert(10, {"step": 10, "eval_loss": 2.0})
    return tmp_path, lines, plan


@pytest.fixture
def audited(run):
    """`audited(workdir, lines, *sentences, finds=False)`: what the audit of these lines says.

    It says each of the sentences, and that all is as planned, unless it finds a fault.
    """

    def audited(workdir, lines, *sentences, finds=False):
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (workdir / "metrics.jsonl").write_text(text)
        code, out, err = run("audit", workdir)
        assert (code, bool(err)) == (int(finds), finds), err
        if not finds:
            ran = len([line for line in lines if "eval_loss" not in line])
            sentences += (f"all {ran} batches are those that were planned, each once and in order",)
        for sentence in sentences:
            assert sentence in (err if finds else out)
        return out

    return audited


def test_a_run_as_planned_passes_and_its_epochs_are_counted(ran, audited):
    workdir, lines, plan = ran
    assert plan.batch(59).epoch == 3
    workdir = workdir.rename(f"{workdir}-moved")
    audited(
        workdir,
        lines,
        "plan from step 7 on: seed=4, exclude=3, 5, 8",
        "plan from step 20 on: buckets=[4, 64], overflow=split",
        "epoch 3, not over",
    )


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda lines: lines[31].update(batch="0123456789abcdef"), "step 30 did not run the batch"),
        (lambda lines: lines.pop(31), "step 30 is missing"),
        (lambda lines: lines.insert(31, lines[30]), "step 29 was run twice"),
        (lambda lines: lines[31].update(batch=lines[30]["batch"]), "but that of step 29, again"),
        (
            lambda lines: lines.__delitem__(slice(31, None)),
            "step 30 is missing: the log ends there, but the last checkpoint is for step 60",
        ),
    ],
)
def test_a_step_that_is_altered_missing_or_repeated_is_named(ran, audited, change, sentence):
    workdir, lines, _ = ran
    for step in (20, 40, 60):  # a run keeps several
        (workdir / f"checkpoints/{step}").mkdir(parents=True)
    change(lines)
    audited(workdir, lines, sentence, finds=True)


def test_steps_without_an_update_are_told(ran, audited):
    workdir, lines, plan = ran
    lines[3] = {"step": 3, "skipped": plan.batch(3).digest}
    lines[5]["loss"] = None
    lines[7]["gradient_norm"] = None
    audited(workdir, lines, "without an update: steps 3, 5, 7\n")
    audited(workdir, [*lines[:5], *lines_of(plan, 60)[5:]], "without an update: step 3\n")


def test_plans_made_otherwise_and_places_without_a_run_are_errors(ran, run):
    workdir, _, _ = ran
    history = json.loads((workdir / "plans.json").read_text())
    history["plans"][1]["changes"]["seed"] = 5
    (workdir / "plans.json").write_text(json.dumps(history))
    differs = "the plan from step 7 on differs from that of the run: seed was 4 and is now 5"
    assert differs in run.refused("audit", workdir)
    other = history | {"tokens": history["tokens"] | {"task": "masked"}}
    (workdir / "plans.json").write_text(json.dumps(other))
    assert "task was masked and is now causal" in run.refused("audit", workdir)
    (workdir / "plans.json").write_text("{")
    run.refused("audit", workdir)
    assert "give the work directory of a run" in run.refused("audit", workdir / "corpus/train")


def plan_mixture(workdir, **options):
    """The plan of a run of two corpora."""
    joined = pipeline.Corpora(
        {
            name: write_documents(workdir / "corpus/train" / name, count)
            for name, count in (("prose", 120), ("code", 60))
        }
    )
    plan = Plan(joined, SHORT, overflow="truncate", window=60, **options)
    write_history(epath.Path(workdir), joined, plan)
    return plan


def test_mixtures_are_audited_by_corpus(tmp_path, audited, monkeypatch):
    plan = plan_mixture(
        tmp_path, weights=[(0, {"prose": 3, "code": 1}), (20, {"prose": 1, "code": 1})]
    )
    changed = "plan from step 20 on: weights={'prose': '1/2', 'code': '1/2'}"
    audited(tmp_path, lines_of(plan, 60), changed, "epoch 0 of prose", "epoch 0 of code: ")

    def lose(self, step):
        """Each batch but for one position of an example of the second corpus."""
        planned = batch(self, step)
        planned.segments[planned.segments[:, 1] == 150, 3] -= 1
        return planned

    batch = Plan.batch
    monkeypatch.setattr(Plan, "batch", lose)
    lost = "positions of example 30 once (1 such example). This is a defect of Lockstep"
    audited(tmp_path, lines_of(plan, 60), "epoch 0 of code", lost, finds=True)


def test_the_features_that_were_added_to_a_corpus_are_opened_with_it(tmp_path):
    corpus = write_documents(tmp_path / "corpus", 20)
    plan = Plan(corpus, [Bucket(4, 96)])
    rewards = {"reward": np.arange(20.0)}
    more = corpus.with_features(rewards, features={"reward": pipeline.Feature("example")})
    for number, each in enumerate((corpus, more.split(0.2)[0], more)):
        write_history(tmp_path / str(number), each, Plan(each, plan.buckets))
        again, _ = read_history(epath.Path(tmp_path / str(number)))
        assert again.fingerprint == each.fingerprint
    assert float(again[3]["reward"]) == 3


@pytest.mark.parametrize("name", ["from", "fingerprint"])
def test_plans_whose_steps_were_altered_are_refused(tmp_path, name):
    corpus = write_documents(tmp_path / "corpus", 40)
    plan = Plan(corpus, [Bucket(4, 96)]).after(3, seed=1).after(5, exclude=[7])
    write_history(tmp_path, corpus, plan)
    _, again = read_history(epath.Path(tmp_path))
    assert again.fingerprint == plan.fingerprint
    path = tmp_path / "plans.json"
    content = json.loads(path.read_text())
    content["plans"][1][name] = 4 if name == "from" else "0" * 16
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"step [34] on was altered"):
        read_history(epath.Path(tmp_path))
