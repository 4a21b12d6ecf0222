"""Runs whose batches change on the way, planned and not, and their audit."""

import pytest

from pipeline.loading.checkpoint import Checkpoints
from pipeline.steps.hosts import StopSignals
from tests.runs.runs import audited, run, segment_losses, steps, summary, tiny

RAMP = ((4, {"tokens_per_batch": 2048}), (9, {"max_length": 256}))


@pytest.fixture(scope="module")
def ramped(text, once):
    """A run with a ramp of the batch size and a part of longer context, stopped on the way."""

    def make(workdir):
        config = {"steps": 16, "schedule": RAMP}
        save = Checkpoints.save
        with pytest.MonkeyPatch.context() as patch:  # what is after the checkpoint at 5 is lost
            patch.setattr(StopSignals, "received", lambda self, step: step == 8)
            patch.setattr(
                Checkpoints,
                "save",
                lambda self, step, *items, **more: step == 8 or save(self, step, *items, **more),
            )
            run(tiny(text, **config), workdir)
        assert Checkpoints(workdir / "checkpoints").latest == 5
        (workdir / "output").write_text(run(tiny(text, **config), workdir))

    workdir = once("ramped", make)
    return workdir, (workdir / "output").read_text()


def test_all_shapes_of_a_schedule_are_compiled_before_step_0_and_the_loss_falls(ramped):
    workdir, output = ramped
    log = steps(workdir)
    assert [line["step"] for line in log] == list(range(16))
    shapes = [tuple(map(int, line["bucket"].split("x"))) for line in log]
    assert {rows * length for rows, length in shapes[:4]} == {1024}
    assert {length for _, length in shapes[:9]} == {128}
    assert max(length for _, length in shapes[9:]) == 256
    assert summary(workdir)["compiles_after_start"] == 0, output
    assert log[-1]["loss"] < log[0]["loss"] - 1
    segment_losses(workdir)


def test_the_audit_of_a_run_that_changed_and_was_killed_passes(ramped):
    said = audited(ramped[0])
    assert "plan from step 9 on: buckets=" in said
    assert "all 16 batches are those that were planned" in said
