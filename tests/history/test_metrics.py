"""What a run records: lines, losses that are not finite, evaluations; and its progress."""

import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pipeline
from pipeline.history import RunLog, metrics_files, progress
from tests.runs.runs import lines

PLAN = pipeline.Plan([5, 3, 4], [pipeline.Bucket(1, 8)])


def test_where_files_cannot_be_appended_to_they_are_written_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(metrics_files, "is_local", lambda path: False)
    first = RunLog(tmp_path).__enter__()
    for step in range(4):
        first.write({"step": step, "loss": 1.0})
    first.save()
    first.write({"step": 4, "loss": 1.0})  # lost with the process: never saved
    assert [line["step"] for line in lines(tmp_path)] == [0, 1, 2, 3]
    with RunLog(tmp_path, 3) as again:
        again.write({"step": 3, "loss": 2.0})
    found = [(line["step"], line["loss"]) for line in lines(tmp_path)]
    assert found == [(0, 1), (1, 1), (2, 1), (3, 2)]


def test_progress_shows_the_rates_since_its_last_line(monkeypatch, caplog):
    now = [100.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now[0])
    caplog.set_level("INFO", "pipeline")
    shown = progress.Progress("training", 6, 2)  # a run that goes on, after hours of waiting
    for step, passed in ((3, 4.0), (4, 8.0), (5, 2.0), (6, 2.0)):
        now[0] += passed
        shown.update(step, 60, 1.5, "loss 1")
    first, last = caplog.messages
    assert first == "step 4/6 · loss 1 · 10 tokens/s · 25.0% waiting · 12 s left"
    assert last == "step 6/6 · loss 1 · 30 tokens/s · 75.0% waiting · 0 s left"


def test_a_log_stops_at_a_loss_that_is_not_finite_but_not_at_an_overflow(tmp_path):
    workdir, seen = tmp_path / "made/by/it", []

    def measure(step, planned, values):
        seen.append((step, values["finite"]))
        return {"seconds": 2.0}

    with RunLog(os.fspath(workdir), measure=measure) as log:
        log.add(0, PLAN.batch(0), {"loss": jnp.float32(2), "finite": False, "loss_scale": 2.0})
        log.add(1, PLAN.batch(1), {"loss": float("nan"), "loss_scale": 2.0})
        assert seen == [(0, False)]  # gradients may overflow under a scale
        with pytest.raises(FloatingPointError, match=r"loss nan at step 1, bucket 1x8, documents "):
            log.flush()
    (line,) = (workdir / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line)["batch"] == PLAN.batch(0).digest
    assert json.loads(line)["seconds"] == 2.0


def test_writers_get_the_numbers_of_each_line_and_again_those_of_a_resumed_run(tmp_path):
    found = []
    writers = [lambda step, values: found.append((step, values))]
    for first in (0, 1):
        with RunLog(tmp_path, first, writers=writers) as log:
            for step in range(first, 2):
                log.add(step, PLAN.batch(step), {"loss": jnp.float32(2 + first)})
            log.evaluate(2, 3.0, 2.0)
            log.write({"step": 2, "note": "no number"})
    assert [(step, values.get("loss", values.get("eval_loss"))) for step, values in found] == [
        *((0, 2.0), (1, 2.0), (2, 1.5)),
        *((1, 3.0), (2, 1.5)),
    ]
    assert found[0][1]["tokens"] == PLAN.batch(0).num_tokens
    assert all({type(each) for each in values.values()} <= {int, float} for _, values in found)
    assert [line["loss"] for line in lines(tmp_path) if "loss" in line] == [2.0, 3.0]


def test_a_value_does_not_replace_what_a_line_says_itself(tmp_path):
    with RunLog(tmp_path) as log:
        log.add(0, PLAN.batch(0), {"loss": 1.0, "step": 7, "padding": 0.0})
        with pytest.raises(ValueError, match="values has padding, step, which the line has alrea"):
            log.flush()


def test_a_log_is_used_in_a_with_block_and_goes_on_from_its_own_lines(tmp_path):
    with pytest.raises(RuntimeError, match="the log is not open; use it as in: with RunLog"):
        RunLog(tmp_path).add(0, PLAN.batch(0), {"loss": 2.0})
    assert not list(tmp_path.iterdir())
    again = {"step": 4, "loss": 3.0, "seconds": 2.5}
    with RunLog(tmp_path) as log:
        log.add(0, PLAN.batch(0), {"loss": 2.0})
        log.evaluate(0, 4.0, 2.0)
        for line in ({"step": 3, "loss": 1.0}, {"step": 4, "eval_loss": 2.0}, again):
            log.write(line)
        log.write({"step": 5, "eval_loss": 1.0})
    with RunLog(tmp_path, 4) as log:
        assert log.evaluations == {0: {"eval_loss": 2.0}, 4: {"eval_loss": 2.0}}
        assert log.lost == 2.5  # what is done again was time lost
        log.add(4, PLAN.batch(1), {"loss": 1.0})  # recorded at the end of the block
    assert [(line["step"], "loss" in line) for line in lines(tmp_path)] == [
        *((0, True), (0, False), (3, True), (4, False), (4, True)),
    ]


@pytest.mark.parametrize("leads", [True, False])
def test_losses_of_segments_are_fetched_on_the_process_that_writes_them(
    tmp_path, monkeypatch, leads
):
    class Sums:
        def __array__(self, dtype=None, copy=None):
            fetched.append(True)
            return np.ones((2, 1, 3), np.float32)

    fetched = []
    monkeypatch.setattr(jax, "process_index", lambda: 0 if leads else 1)
    with RunLog(tmp_path) as log:
        log.add(0, PLAN.batch(0), {"loss": jnp.float32(2), "segments": Sums()})
    assert fetched == [True] * leads
    assert (tmp_path / "losses").exists() == leads
