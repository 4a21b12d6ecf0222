"""The losses of segments: written by the plan's order, and what they tell."""

import numpy as np
import pytest
from etils import epath

from configs import exclude
from pipeline import Bucket, Corpora, Plan
from pipeline.cli.commands import main
from pipeline.errors import name_some
from pipeline.history import loss_archive, losses, read_history, write_history
from pipeline.history.loss_archive import LossLog
from tests.corpus.files import contents, flip
from tests.history.documents import write_documents
from tests.runs.runs import run, segment_losses, tiny

BUCKETS = (Bucket(8, 16), Bucket(4, 32))
STEPS = 90
NOISY = [4, 40, 130]  # documents that lose more than others


def sums_of(planned, step):
    """Losses that fall as the run learns, of each segment, in the shape of a batch."""
    rng, segments = np.random.default_rng(step), planned.segments
    sums = np.zeros((2, planned.bucket.rows, 40), np.float32)
    row = segments[:, 0]
    mean = 5 - step / 30 + np.isin(segments[:, 1], NOISY) + rng.normal(0, 0.05, len(row))
    weight = segments[:, 3]
    sums[:, row, np.arange(len(row)) - np.searchsorted(row, row)] = mean * weight, weight
    return sums


def write_losses(workdir, plan, first=0, every=20):
    log = LossLog(epath.Path(workdir), first)
    for step in range(first, STEPS):
        log.add(step, plan.batch(step), sums_of(plan.batch(step), step))
        if (step + 1) % every == 0:
            log.flush()
    log.flush()


@pytest.fixture
def ran(tmp_path):
    """A run of several epochs over split documents whose plan changed."""
    corpus = write_documents(tmp_path / "corpus/train", first=())
    plan = Plan(corpus, BUCKETS).after(30, buckets=(Bucket(4, 64),), seed=4)
    write_history(epath.Path(tmp_path), corpus, plan)
    write_losses(tmp_path, plan)
    return tmp_path, corpus, plan


def test_the_usual_loss_is_the_mean_of_the_corpus_over_the_steps_around(tmp_path):
    both = Corpora({name: write_documents(tmp_path / name, 40) for name in ("one", "two")})
    plan = Plan(both, BUCKETS, weights={"one": 1, "two": 2})
    write_history(epath.Path(tmp_path), both, plan)
    write_losses(tmp_path, plan)
    found = losses(tmp_path)
    for step, corpus in ((0, 0), (40, 1), (STEPS - 1, 0)):
        around = found.select((abs(found.step - step) <= 8) & (found.corpus == corpus))
        usual = found.usual[(found.step == step) & (found.corpus == corpus)]
        assert usual == pytest.approx(around.loss.sum() / around.weight.sum())


def test_why_ranks_the_documents_of_a_step_and_of_the_run(ran, run):
    workdir, corpus, plan = ran
    lines = run.done("why", workdir, "--worst", 3).splitlines()
    assert lines[0] == f"200 documents in {STEPS} steps"
    assert sorted(int(line.split()[0]) for line in lines[2:]) == NOISY
    seen = [step for step in range(STEPS) if 40 in plan.batch(step).segments[:, 1]]
    step = next(step for step in seen if step >= 40)
    lines = run.done("why", workdir, "--step", step).splitlines()
    found = losses(workdir)
    here = found.select(found.step == step)
    mean = here.loss.sum() / here.weight.sum()
    assert lines[0] == f"step {step}: {len(np.unique(here.example))} documents, loss {mean:.4f}"
    assert lines[2].startswith("40 ")
    ranked = [float(line.split()[1]) for line in lines[2:]]
    assert ranked == sorted(ranked, reverse=True)
    assert " ".join(map(str, corpus[40]["inputs"][:3])) in lines[2]
    lines = run.done("why", workdir, "--document", 40).splitlines()
    assert [line.split()[0] for line in lines[1:-1]] == [*map(str, seen)]
    here = found.select((found.example == 40) & (found.step == seen[0]))
    weight = here.weight.sum()
    means = here.loss.sum() / weight, (here.usual * here.weight).sum() / weight
    assert lines[1].split()[2:] == [*(f"{each:.3f}" for each in means), f"{weight:g}"]
    assert lines[-1].split()[:3] == list(map(str, corpus[40]["inputs"][:3]))
    assert "--worst 20 lists some" in run.refused("why", workdir, "--document", 200)
    for asked in (["--step", 90], ["--document", 200]):
        assert "losses" in run.refused("why", workdir, *asked)


def test_a_run_that_goes_on_has_the_losses_of_each_step_once(ran, tmp_path):
    workdir, _, plan = ran
    whole = contents(workdir / "losses")
    # Killed at step 50: what is after the checkpoint at 40 is made again.
    write_losses(workdir, plan, first=40)
    assert contents(workdir / "losses") == whole
    # It may go on from the middle of a file, too.
    expected = losses(workdir)
    write_losses(workdir, plan, first=50)
    assert len(list((workdir / "losses").iterdir())) == 6
    for one, other in zip(losses(workdir), expected, strict=True):
        np.testing.assert_array_equal(one, other)
    LossLog(epath.Path(workdir), 0)
    with pytest.raises(FileNotFoundError, match="there are no losses in"):
        losses(workdir)


def test_many_segments_make_a_file_before_the_next_checkpoint(ran, monkeypatch):
    workdir, _, plan = ran
    monkeypatch.setattr(loss_archive, "SEGMENTS", 100)
    write_losses(workdir, plan, every=10**9)
    assert 8 < len(list((workdir / "losses").iterdir())) < STEPS
    assert len(np.unique(losses(workdir).step)) == STEPS


def test_damaged_losses_and_those_of_another_run_are_refused(ran, run):
    workdir, corpus, _ = ran
    path = sorted((workdir / "losses").iterdir())[1]
    flip(path, 300)
    assert "the losses of steps 20 to 39 in" in run.refused("why", workdir, "--worst", 3)
    path.unlink()
    assert 25 not in losses(workdir).step
    write_history(epath.Path(workdir), corpus, Plan(corpus, (Bucket(2, 64),)))
    with pytest.raises(ValueError, match="; give the losses of this run"):
        losses(workdir)


@pytest.mark.slow
def test_a_config_leaves_out_what_stays_hard_for_two_epochs(text, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(exclude, "QUANTILE", 0.9)

    def go_on(count):
        schedule = exclude.leave_out_worst(tmp_path)
        run(tiny(text, steps=count, schedule=schedule), tmp_path)
        return schedule

    run(tiny(text, steps=4), tmp_path)
    _, plan = read_history(epath.Path(tmp_path))
    assert go_on(plan.first_step(2)) == ()
    found = losses(tmp_path)
    ((step, changes),) = go_on(plan.first_step(2) + 4)
    assert step == plan.first_step(2)
    for epoch in (0, 1):
        numbers, _, above = found.select(found.epoch == epoch).documents()
        high = np.isin(numbers, changes["exclude"])
        assert 0 < high.sum() < 0.1 * len(numbers)
        assert above[high].min() > np.quantile(above, 0.9)
    # A later start has the same schedule, and the audit the words.
    assert go_on(plan.first_step(2) + 8) == ((step, changes),)
    found = segment_losses(tmp_path)
    late = found.select(found.step >= step)
    assert len(np.unique(late.step)) == 8
    assert not np.isin(late.example, changes["exclude"]).any()
    assert main(["audit", str(tmp_path)]) == 0
    names = name_some(changes["exclude"])
    assert f"plan from step {step} on: exclude={names}\n" in capsys.readouterr().out
