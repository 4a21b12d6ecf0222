"""The audit of a run: passes where all batches are as planned, and else names the step."""

import json

import numpy as np
import pytest
from etils import epath
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import pipeline
from pipeline import Bucket, Plan
from pipeline.cli.commands import main
from pipeline.history import read_history, write_history
from pipeline.history.auditing import Ledger
from pipeline.planning import figures
from pipeline.planning.stream import Rows

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
    plan = Plan(corpus, SHORT, overflow="truncate").after(7, exclude=[3, 5, 8], seed=4)
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


def test_a_run_as_planned_passes_and_its_epochs_are_counted(ran, capsys):
    workdir, _, plan = ran
    code, out, err = audited(workdir, capsys)
    assert (code, err) == (0, "")
    assert "plan from step 7 on: seed=4, exclude=3, 5, 8" in out
    assert "plan from step 20 on: buckets=[4, 64], overflow=split" in out
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


def test_steps_without_an_update_are_told(ran, capsys):
    workdir, lines, plan = ran
    lines[3] = {"step": 3, "skipped": plan.batch(3).digest}
    lines[5]["loss"] = None
    write(workdir, lines)
    code, out, _ = audited(workdir, capsys)
    assert code == 0
    assert "without an update: steps 3, 5\n" in out


def test_plans_that_cannot_be_made_again_and_places_without_a_run_are_errors(
    ran, tmp_path_factory, capsys
):
    workdir, _, _ = ran
    history = json.loads((workdir / "plans.json").read_text())
    history["plans"][1]["changes"]["seed"] = 5
    (workdir / "plans.json").write_text(json.dumps(history))
    code, _, err = audited(workdir, capsys)
    assert code == 2
    assert "the plan from step 7 on differs from that of the run: seed was 4 and is now 5" in err
    (workdir / "plans.json").write_text("{")
    assert audited(workdir, capsys)[0] == 2
    code, _, err = audited(tmp_path_factory.mktemp("empty"), capsys)
    assert code == 2
    assert "give the work directory of a run" in err


def test_a_plan_that_loses_a_position_would_be_found(ran, capsys, monkeypatch):
    workdir, lines, _ = ran
    batch = Plan.batch

    def losing(self, step):
        planned = batch(self, step)
        if step == 25:
            planned.segments[0, 3] -= 1
        return planned

    monkeypatch.setattr(Plan, "batch", losing)
    _, plan = read_history(epath.Path(workdir))
    lines[26]["batch"] = plan.batch(25).digest
    write(workdir, lines)
    code, _, err = audited(workdir, capsys)
    assert code == 1
    assert "This is a defect of Lockstep" in err


def test_new_corpora_are_due_from_the_epoch_that_they_join(ran, capsys, monkeypatch):
    workdir, _, _ = ran
    first = pipeline.Corpus.open(workdir / "corpus/train")
    new = [np.arange(size) for size in (70, 12, 1, 30, 25, 9)]
    new = pipeline.Corpus.from_arrays(new, workdir / "corpus/new", vocab_size=None)
    both = pipeline.Corpora({"first": first, "new": new})
    plan = Plan(first, SHORT, overflow="truncate").after(7, lengths=both, exclude=[202])
    plan = plan.after(20, buckets=LONG, overflow="split")
    write_history(epath.Path(workdir), both, plan)
    write(workdir, lines_of(plan, 50))
    code, out, err = audited(workdir, capsys)
    assert (code, err) == (0, "")
    assert "plan from step 7 on: exclude=202, examples=206" in out
    assert f"epoch 0: {np.minimum(both.lengths, 32).sum():,} positions, each once" in out
    assert plan.batch(49).epoch == 2
    # One position of what is new that nobody trained on is found.
    batch = Plan.batch

    def losing(self, step):
        planned = batch(self, step)
        lost = planned.segments[:, 1] == 204
        planned.segments[lost, 3] -= 1
        return planned

    with monkeypatch.context() as patch:
        patch.setattr(Plan, "batch", losing)
        write(workdir, lines_of(plan, 50))
        code, _, err = audited(workdir, capsys)
    assert code == 1
    assert "positions of example 204 once (1 such examples)" in err


def test_runs_of_pairs_are_audited(pairs, tmp_path, capsys):
    shape = (Bucket(8, (32, 24)), Bucket(4, (64, 48)))
    plan = Plan(pairs, shape, overflow="drop").after(9, seed=3, exclude=[11])
    plan = plan.after(31, buckets=[Bucket(4, (90, 60))])
    write_history(epath.Path(tmp_path), pairs, plan)
    lines = lines_of(plan, 60)
    write(tmp_path, lines)
    code, out, err = audited(tmp_path, capsys)
    assert (code, err) == (0, "")
    assert "plan from step 31 on: buckets=[4, [90, 60]]" in out
    assert "all 60 batches are those that were planned" in out
    lines[40]["batch"] = lines[39]["batch"]
    write(tmp_path, lines)
    code, _, err = audited(tmp_path, capsys)
    assert code == 1
    assert "step 40 did not run" in err


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """A run of a mixture in which weights change, and then a third corpus joins."""
    workdir, rng = tmp_path_factory.mktemp("mixed"), np.random.default_rng(3)
    corpora = {}
    for name, count in (("prose", 120), ("code", 60), ("chat", 40)):
        sizes = np.clip(rng.lognormal(2.7, 0.8, count), 0, 90).astype(int)
        examples = [rng.integers(1, 99, size).astype(np.int32) for size in sizes]
        directory = workdir / "corpus/train" / name
        corpora[name] = pipeline.Corpus.from_arrays(examples, directory, vocab_size=99)
    joined = pipeline.Corpora(corpora)
    weights = [
        (0, {"prose": 3, "code": 1}),
        (20, {"prose": 1, "code": 1}),
        (50, {"prose": 1, "code": 1, "chat": 1}),
    ]
    plan = Plan(joined, SHORT, weights=weights, overflow="truncate", window=60)
    write_history(epath.Path(workdir), joined, plan)
    return workdir, plan


def test_runs_of_mixtures_are_audited_corpus_by_corpus(mixed, capsys):
    workdir, plan = mixed
    lines = lines_of(plan, 120)
    write(workdir, lines)
    code, out, err = audited(workdir, capsys)
    assert (code, err) == (0, "")
    assert "plan from step 20 on: weights={'prose': '1/2', 'code': '1/2'}" in out
    assert "all 120 batches are those that were planned" in out
    for name, passes in figures.count_steps(plan, 0, 120).passes.items():
        for epoch in range(int(passes)):
            assert f"epoch {epoch} of {name}: " in out
        assert f"epoch {int(passes)} of {name}, not over" in out
    lines[70]["batch"] = lines[69]["batch"]
    write(workdir, lines)
    code, _, err = audited(workdir, capsys)
    assert code == 1
    assert "step 70 did not run" in err


@given(
    st.lists(
        st.tuples(
            st.integers(0, 80),
            st.fixed_dictionaries(
                {},
                optional={
                    "buckets": st.sampled_from([SHORT, LONG, (Bucket(6, 20), Bucket(3, 40))]),
                    "overflow": st.sampled_from(["split", "truncate", "drop"]),
                    "exclude": st.lists(st.integers(0, 219), max_size=5),
                    "weights": st.sampled_from([dict.fromkeys(("prose", "code", "chat"), 1)]),
                },
            ),
        ),
        max_size=4,
    )
)
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_ledger_of_a_mixture_balances_whatever_changes(mixed, changes):
    joined, _ = read_history(epath.Path(mixed[0]))
    plan = Plan(joined, SHORT, weights={"prose": 3, "code": 1, "chat": 1})
    for step, options in sorted(changes, key=lambda each: each[0]):
        plan = plan.after(step, **options)
    said = []
    book = Ledger(plan, said.append)
    for step in range(150):
        book.add(plan.batch(step))
    book.finish(150)
    closed = [line for line in said if "each once" in line]
    assert len(closed) == sum(figures.whole_epochs(plan, 150).values())


def test_a_log_beyond_the_end_of_a_mixture_is_found(mixed, tmp_path, capsys):
    joined, _ = read_history(epath.Path(mixed[0]))
    weights = {"prose": 3, "code": 1, "chat": 1}
    plan = Plan(joined, SHORT, weights=weights, ending="stop")
    write_history(epath.Path(tmp_path), joined, plan)
    lines = lines_of(plan, plan.num_batches())
    write(tmp_path, lines)
    assert audited(tmp_path, capsys)[0] == 0
    write(tmp_path, [*lines, lines[-1] | {"step": len(lines)}])
    code, _, err = audited(tmp_path, capsys)
    assert code == 1
    assert f"step {len(lines)} ran, and the plan ends before it" in err


def test_a_mixture_that_loses_a_position_would_be_found(mixed, capsys, monkeypatch):
    workdir, _ = mixed
    batch = Plan.batch

    def losing(self, step):
        planned = batch(self, step)
        lost = (planned.segments[:, 1] == 150) & (planned.epochs == 1)
        planned.segments[lost, 3] -= 1
        return planned

    monkeypatch.setattr(Plan, "batch", losing)
    _, plan = read_history(epath.Path(workdir))
    write(workdir, lines_of(plan, 120))
    code, _, err = audited(workdir, capsys)
    assert code == 1
    assert "epoch 1 of code" in err
    assert "positions of example 30 once (1 such examples). This is a defect of Lockstep" in err


def test_mixtures_that_change_on_the_way_are_audited(mixed, tmp_path, capsys, monkeypatch):
    joined, _ = read_history(epath.Path(mixed[0]))
    weights = {"prose": 3, "code": 1, "chat": 1}
    plan = Plan(joined, SHORT, weights=weights, overflow="truncate")
    plan = plan.after(21, buckets=LONG, exclude=[3, 190], overflow="drop")
    plan = plan.after(40, weights=dict.fromkeys(weights, 1)).after(60, buckets=SHORT, seed=2)
    write_history(epath.Path(tmp_path), joined, plan)
    lines = lines_of(plan, 200)
    write(tmp_path, lines)
    code, out, err = audited(tmp_path, capsys)
    assert (code, err) == (0, "")
    assert "plan from step 21 on: buckets=[4, 64], overflow=drop, exclude=3, 190" in out
    assert "plan from step 40 on: weights={'prose': '1/3', 'code': '1/3', 'chat': '1/3'}" in out
    assert "all 200 batches are those that were planned" in out
    assert figures.whole_epochs(plan, 200)["chat"] > 2
    lines[130]["batch"] = lines[131]["batch"]
    write(tmp_path, lines)
    code, _, err = audited(tmp_path, capsys)
    assert code == 1
    assert "step 130 did not run" in err
    # A piece that the epoch of the change loses is found.
    _, plan = read_history(epath.Path(tmp_path))
    code, segments_of = plan.stages[1].streams[1], Rows.segments

    def losing(self, order=None):
        times, segments = segments_of(self, order)
        if self.of_pass is code.passes[0]:
            segments[:, 3] -= 1
        return times, segments

    with monkeypatch.context() as patch:
        patch.setattr(Rows, "segments", losing)
        patch.setattr("pipeline.history.auditing.read_history", lambda _: (joined, plan))
        write(tmp_path, lines_of(plan, 200))
        code, _, err = audited(tmp_path, capsys)
    assert code == 1
    assert "of code of the plan does not have each" in err
