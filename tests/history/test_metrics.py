"""What a run records: seconds by phase, the log, the summary, and what it compares."""

import json
import os
import sys
from unittest import mock

import jax.numpy as jnp
import pytest
from etils import epath

import pipeline
from pipeline.history import RunLog, metrics_files, run_stats, write_history
from pipeline.history.progress import Progress
from pipeline.history.run_stats import Clock, RunStats
from pipeline.text.sources import Records
from pipeline.text.tokenizers import Bytes
from pipeline.trainer.evaluation import sum_over_batches
from pipeline.trainer.parameters import require_tokenizer, restore_parameters
from pipeline.trainer.run_config import require_same
from tests.runs.runs import lines, summary

PLAN = pipeline.Plan([5, 3, 4], [pipeline.Bucket(1, 8)])


def test_a_config_under_which_a_run_cannot_go_on_names_every_field():
    def of(config):
        return {"config": config, "schedule": {}, "record": {}}

    then = {"a": 1, "b": {"c": 2}, "e": "", "steps": 3}
    now = {"b": {"c": 4, "d": 5}, "e": "gsm", "steps": 9}
    with pytest.raises(ValueError) as error:
        require_same(of(then), now)
    for part in (
        "config.a was 1 and is now not there",
        "config.b.c was 2 and is now 4",
        "config.b.d was not there and is now 5",
        "config.e was '' and is now 'gsm'",
    ):
        assert part in str(error.value)
    require_same(of(then), {"a": None, "b": {"c": 2}, "e": "", "steps": 9})
    decay = {"optimizer": {"decay_steps": 2}}
    require_same(of(decay), {"optimizer": {"decay_steps": 3}})
    may = "steps mesh microbatches memory_budget peak_flops eval_every checkpoint_every keep"
    may = [*may.split(), "skip_steps", "on_nonfinite"]  # docs/changing_a_run.md
    require_same(of(dict.fromkeys(may, 1)), dict.fromkeys(may, 2))
    assert require_same(of({"a": [1]}), {"a": None}) == {"a": (1,)}  # such as task.keep_ids
    with pytest.raises(ValueError, match="no schedule and no record: another version"):
        require_same({"config": then, "stages": []}, then)


def test_the_summary_says_how_fast_a_run_was():
    record = RunStats(tokens=900, positions=1000)
    record.seconds = {"train": 2.5, "wait": 0.5, "compile": 6.0, "lost": 1.0}
    record.flops, record.capacity = 6e9, 12e9
    values = record.summary(12)
    assert values["tokens_per_second"] == 300
    assert values["padding"] == pytest.approx(0.1)
    assert values["flop_utilisation"] == 0.5
    assert values["goodput"] == 0.25
    assert values["waiting"] == pytest.approx(1 / 6)
    assert RunStats().summary(0)["flop_utilisation"] is None
    assert list(map(run_stats.peak_of, ("A100-SXM4-80GB", "H100 PCIe"))) == [312e12, 756e12]


def test_blocks_within_blocks_are_counted_once(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(run_stats.time, "perf_counter", lambda: now[0])
    clock = Clock({"train": 5.0})
    with clock("train"):
        now[0] = 2.0
        with clock("wait"):
            now[0] = 5.0
            assert clock.seconds() == {"train": 7.0, "other": 0.0, "wait": 3.0}
        now[0] = 6.0
    now[0] = 10.0
    assert clock.seconds() == {"train": 8.0, "other": 4.0, "wait": 3.0}


def test_tensorboard_keeps_the_evaluation_at_the_step_that_is_gone_on_from(tmp_path, monkeypatch):
    writer = mock.Mock()
    monkeypatch.setattr("tensorboardX.SummaryWriter", writer)
    again = {"step": 4, "loss": 3.0, "seconds": 2.5}
    with RunLog(tmp_path, 0, 6) as log:
        for line in ({"step": 3, "loss": 1.0}, {"step": 4, "eval_loss": 2.0}, again):
            log.write(line)
    with RunLog(tmp_path, 4, 6, state={"evaluations": {"4": {}}}) as log:
        assert log.clock.seconds()["lost"] == 2.5  # what is done again was time lost
    assert [call.kwargs["purge_step"] for call in writer.call_args_list] == [1, 5]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_where_files_cannot_be_appended_to_they_are_written_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(metrics_files, "is_local", lambda path: False)
    first = RunLog(tmp_path, 0, 6).__enter__()
    for step in range(4):
        first.write({"step": step, "loss": 1.0})
    first.save()
    first.write({"step": 4, "loss": 1.0})  # lost with the process: never saved
    with RunLog(tmp_path, 3, 6) as again:
        again.write({"step": 3, "loss": 2.0})
    found = [(line["step"], line["loss"]) for line in lines(tmp_path)]
    assert found == [(0, 1), (1, 1), (2, 1), (3, 2)]
    assert len(list((tmp_path / "tensorboard").iterdir())) >= 1


def test_a_held_out_corpus_without_a_loss_is_refused(tmp_path):
    corpus = pipeline.Corpus.from_arrays({"tokens": [[1, 2, 3]], "weights": [[0, 0, 0]]}, tmp_path)
    batches = pipeline.Batches(corpus, pipeline.Plan(corpus.covering(), [pipeline.Bucket(1, 8)]))
    with pytest.raises(ValueError, match="no held-out example has a position that carries"):
        sum_over_batches(batches, lambda _, batch: (0.0, batch["loss_weights"].sum()), None)


def test_parameters_for_the_ids_of_another_tokenizer_are_refused(tmp_path):
    source = Records(["some text", "and more"])
    then, now = (
        pipeline.prepare(source, tokenizer, tmp_path / tokenizer.fingerprint, progress=False)
        for tokenizer in (Bytes(), Bytes(begin=False))
    )
    write_history(tmp_path, then, pipeline.Plan(then, [pipeline.Bucket(2, 16)]))
    require_tokenizer(epath.Path(tmp_path), then)
    require_tokenizer(epath.Path(tmp_path / "none"), now)  # of a loop that stores no plan
    with pytest.raises(ValueError, match="the same ids stand for other text"):
        restore_parameters(epath.Path(tmp_path), now, like=None)


def test_progress_shows_the_rates_since_its_last_line(monkeypatch, caplog):
    now = [100.0]
    monkeypatch.setattr(run_stats.time, "perf_counter", lambda: now[0])
    caplog.set_level("INFO", "pipeline")
    progress = Progress(6, 2)  # a run that goes on, after hours of waiting
    for step, passed in ((3, 4.0), (4, 8.0), (5, 2.0), (6, 2.0)):
        now[0] += passed
        progress.update(step, 60, 1.5, "loss 1")
    first, last = caplog.messages
    assert first == "step 4/6 · loss 1 · 10 tokens/s · 25.0% waiting · 12 s left"
    assert last == "step 6/6 · loss 1 · 30 tokens/s · 75.0% waiting · 0 s left"


def test_a_log_stops_at_a_loss_that_is_not_finite_but_not_at_an_overflow(tmp_path):
    workdir = tmp_path / "made/by/it"
    with RunLog(os.fspath(workdir), 0, 2, peak_flops=1.0) as log:
        log.add(0, PLAN.batch(0), {"loss": jnp.float32(2), "finite": False, "loss_scale": 2.0})
        log.add(1, PLAN.batch(1), {"loss": float("nan"), "loss_scale": 2.0})
        assert log.stats.skipped == 1  # gradients may overflow under a scale
        with pytest.raises(FloatingPointError, match=r"loss nan at step 1, bucket 1x8, documents "):
            log.flush()
    (line,) = (workdir / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line)["batch"] == PLAN.batch(0).digest
    assert "flop_utilisation" not in json.loads(line)


def test_a_log_needs_no_tensorboard(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    caplog.set_level("INFO", "pipeline")
    with RunLog(tmp_path, 0, 1) as log:
        log.write({"step": 0, "margin": 1.5})
        log.save()
    assert lines(tmp_path) == [{"step": 0, "margin": 1.5}]
    assert not (tmp_path / "tensorboard").exists()
    assert caplog.messages == ["tensorboardX is not installed, so there are no TensorBoard events"]


def test_writers_get_the_numbers_of_each_line_and_again_those_of_a_resumed_run(tmp_path):
    found = []
    writers = [lambda step, values: found.append((step, values))]
    for first in (0, 1):
        with RunLog(tmp_path, first, 2, writers=writers) as log:
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
    with RunLog(tmp_path, 0, 1) as log:
        log.add(0, PLAN.batch(0), {"loss": 1.0, "step": 7, "padding": 0.0})
        with pytest.raises(ValueError, match="values has padding, step, which the line has alrea"):
            log.flush()


def test_a_log_is_used_in_a_with_block_and_goes_on_from_its_own_state(tmp_path):
    with pytest.raises(RuntimeError, match="the log is not open; use it as in: with RunLog"):
        RunLog(tmp_path, 0, 2).add(0, PLAN.batch(0), {"loss": 2.0})
    assert not list(tmp_path.iterdir())
    with RunLog(tmp_path, 0, 2) as log:
        log.add(0, PLAN.batch(0), {"loss": 2.0})
        state = json.loads(json.dumps(log.save()))
    with RunLog(tmp_path, 1, 2, state=state) as log:
        log.add(1, PLAN.batch(1), {"loss": 1.0})  # recorded at the end of the block
    assert [line["step"] for line in lines(tmp_path)] == [0, 1]
    log.write_summary(2)
    assert summary(tmp_path)["tokens"] == PLAN.batch(0).num_tokens + PLAN.batch(1).num_tokens
    with pytest.raises(ValueError, match="state has record; give the result of `save`"):
        RunLog(tmp_path, 1, 2, state={"record": state})
