"""The loop itself, with a step that is next to nothing."""

import json
import time

import jax
import jax.numpy as jnp
import pytest
from etils import epath
from ml_collections import ConfigDict

import pipeline
from pipeline.loading.checkpoint import Checkpoints
from pipeline.sources import Records
from pipeline.tokenizers import Bytes
from pipeline.training import hosts, metrics
from pipeline.training.compiled import Compiled
from pipeline.training.history import require_tokenizer, write_history
from pipeline.training.metrics import Clock, MetricsLog, Profile
from pipeline.training.record import Record, changes, unigram_entropy
from pipeline.training.trainer import Trainer

CONFIG = ConfigDict(
    {
        "steps": 12,
        "eval_every": 6,
        "checkpoint_every": 6,
        "skip_steps": (),
        "on_nonfinite": "stop",
        "on_compile": "stop",
        "peak_flops": 1e9,
    }
)


def train_step(state, batch):
    loss = batch["loss_weights"].sum() * state["params"]
    values = {"loss": loss, "gradient_norm": loss, "finite": jnp.isfinite(loss)}
    return {"params": state["params"] + 1}, values


def eval_step(params, batch):
    return batch["loss_weights"].sum() * params, batch["loss_weights"].sum()


def run(corpus, buckets, workdir, step=train_step, begin=(0, None)):
    """A whole run of the loop, or from a step on; returns its record."""
    first, record = begin[0], begin[1] or Record(config={})
    clock, state = Clock(record.seconds), {"params": jnp.full((), float(first))}
    once = {"corpus": corpus, "buckets": buckets, "shuffle": False, "num_epochs": 1}
    with pipeline.load(corpus, buckets=buckets) as loader:
        loader.set_state({**loader.get_state(), "step": first})
        trainer = Trainer(
            CONFIG,
            workdir,
            train_step=Compiled(step, state, loader.specs, report=None),
            eval_step=Compiled(eval_step, state["params"], loader.specs, report=None),
            held_out=once,
            flops=lambda planned: 2.0 * planned.num_tokens,
            checkpoints=Checkpoints(workdir / "checkpoints"),
            record=record,
            clock=clock,
        )
        trainer.train(state, loader, first, Profile("", workdir))
    return record


def test_a_slow_source_shows_as_waiting(corpus, buckets, tmp_path, monkeypatch):
    fast = run(corpus, buckets, tmp_path / "fast")
    read = pipeline.Corpus.read

    def slowly(*arguments):
        time.sleep(0.1)
        return read(*arguments)

    monkeypatch.setattr(pipeline.Corpus, "read", slowly)
    slow = run(corpus, buckets, tmp_path / "slow")
    assert slow.seconds["wait"] > fast.seconds["wait"] + 0.1  # evaluations leave time to read ahead
    assert slow.summary(12)["waiting"] > 0.5
    lines = [json.loads(line) for line in (tmp_path / "slow/metrics.jsonl").open()]
    assert all(line["waited"] <= line["seconds"] for line in lines if "loss" in line)
    assert sum(line.get("waited", 0) for line in lines) == pytest.approx(
        slow.seconds["wait"], rel=0.1
    )


def test_an_evaluation_weighs_every_held_out_position_once(corpus, buckets, tmp_path):
    record = run(corpus, buckets, tmp_path)
    assert {step: values["eval_loss"] for step, values in record.evaluations.items()} == {
        "0": 0.0,
        "6": 6.0,
        "12": 12.0,
    }
    assert record.tokens == sum(
        pipeline.Plan(corpus, buckets).batch(step).num_tokens for step in range(12)
    )


def test_a_step_compiled_after_the_start_stops_the_run(corpus, buckets, tmp_path, monkeypatch):
    original = Compiled.__call__

    def sneaky(self, state, batch):
        if self.name == "train_step" and int(state["params"]) == 4:
            jax.jit(train_step)(state, {"loss_weights": jnp.ones(3)})
        return original(self, state, batch)

    monkeypatch.setattr(Compiled, "__call__", sneaky)
    with pytest.raises(
        RuntimeError, match=r"compiled at step 4, after the start: jit\(train_step\)"
    ):
        run(corpus, buckets, tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").open()]
    assert [line["step"] for line in lines if "loss" in line] == [0, 1, 2, 3]


def test_the_log_tells_of_the_batches_that_ran(corpus, buckets, tmp_path, monkeypatch):
    plan, loop = pipeline.Plan(corpus, buckets), Trainer.loop

    def one_ahead(self, state, loader, step, profile):
        next(loader)  # a defect: the loader is a batch ahead of the loop
        return loop(self, state, loader, step, profile)

    monkeypatch.setattr(Trainer, "loop", one_ahead)
    run(corpus, buckets, tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").open()]
    ran = [line["batch"] for line in lines if "loss" in line]
    assert ran == [plan.batch(step + 1).digest for step in range(12)]


def test_told_to_stop_it_saves_at_once_and_the_next_start_makes_up_the_evaluation(
    corpus, buckets, tmp_path, monkeypatch
):
    monkeypatch.setattr(hosts.StopSignals, "asked", lambda self, step: step == 6)
    record = run(corpus, buckets, tmp_path)
    assert list(record.evaluations) == ["0"]
    assert Checkpoints(tmp_path / "checkpoints").latest == 6
    monkeypatch.undo()
    evaluated = run(corpus, buckets, tmp_path, begin=(6, record)).evaluations
    assert list(evaluated) == ["0", "6", "12"]


def test_what_is_being_saved_when_a_loss_is_not_finite_is_saved(corpus, buckets, tmp_path):
    def diverging(state, batch):
        state, values = train_step(state, batch)
        return state, values | {"finite": state["params"] < 9}

    diverging.__name__ = "train_step"
    with pytest.raises(FloatingPointError, match="at step 8"):
        run(corpus, buckets, tmp_path, step=diverging)
    assert Checkpoints(tmp_path / "checkpoints").latest == 6


def test_the_seconds_of_all_phases_are_those_that_have_passed(corpus, buckets, tmp_path):
    begin = time.perf_counter()
    record = run(corpus, buckets, tmp_path)
    passed = time.perf_counter() - begin
    assert 0.5 * passed < sum(record.seconds.values()) < passed
    assert {"train", "wait", "evaluate", "save", "other"} == set(record.seconds)


def test_the_summary_says_how_fast_and_how_large_batches_were():
    record = Record(config={}, tokens=900, positions=1000, documents=40, batches=10)
    record.seconds = {"train": 2.5, "wait": 0.5, "compile": 6.0, "lost": 1.0}
    record.flops, record.capacity, record.skipped_seconds = 6e9, 12e9, 0.5
    values = record.summary(12)
    assert values["tokens_per_second"] == 300
    assert values["positions_per_second"] == pytest.approx(1000 / 3)
    assert (values["tokens_per_batch"], values["documents_per_batch"]) == (90, 4)
    assert values["flop_utilisation"] == 0.5
    assert values["goodput"] == 0.2
    assert values["waiting"] == pytest.approx(1 / 6)
    assert Record(config={}).summary(0)["flop_utilisation"] is None


def test_blocks_within_blocks_are_counted_once(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: now[0])
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
    import tensorboardX

    drawn = []
    monkeypatch.setattr(
        tensorboardX.SummaryWriter,
        "add_scalar",
        lambda self, name, value, step: drawn.append((name, value, step)),
    )
    log = MetricsLog(tmp_path, 0)
    again = {"step": 4, "loss": 3.0, "seconds": 2.5}
    for line in ({"step": 3, "loss": 1.0}, {"step": 4, "eval_loss": 2.0}, again):
        log.write(line)
    log.close()
    drawn.clear()
    log = MetricsLog(tmp_path, 4)
    assert log.lost == 2.5  # what is done again was time lost
    log.close()
    assert drawn == [("eval_loss", 2.0, 4)]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_where_files_cannot_be_appended_to_they_are_written_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(metrics, "is_local", lambda path: False)
    first = MetricsLog(metrics.epath.Path(tmp_path), 0)
    for step in range(4):
        first.write({"step": step, "loss": 1.0})
    first.flush()
    first.write({"step": 4, "loss": 1.0})  # lost with the process: never flushed
    again = MetricsLog(metrics.epath.Path(tmp_path), 3)
    again.write({"step": 3, "loss": 2.0})
    again.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["loss"]) for line in lines] == [(0, 1), (1, 1), (2, 1), (3, 2)]
    assert len(list((tmp_path / "tensorboard").iterdir())) >= 1


def test_a_profile_asks_for_a_range_of_steps(tmp_path):
    for steps in ("3", "a:b", "5:3"):
        with pytest.raises(ValueError, match="it must be FIRST:LAST"):
            Profile(steps, tmp_path)


def test_changes_name_fields_that_came_went_or_differ():
    then, now = {"a": 1, "b": {"c": 2}, "steps": 3}, {"b": {"c": 4, "d": 5}, "steps": 9}
    assert changes(then, now, ("steps",)) == [
        "config.a was 1 and is now not there",
        "config.b.c was 2 and is now 4",
        "config.b.d was not there and is now 5",
    ]


def test_unigram_entropy_of_even_targets_is_the_log_of_their_number(tmp_path):
    corpus = pipeline.Corpus.from_arrays([[9, 0, 1, 2, 3], [9, 3, 2], [9, 0, 1]], tmp_path / "c")
    assert unigram_entropy(corpus) == pytest.approx(1.3862944)


def test_a_held_out_corpus_without_a_loss_is_refused(tmp_path):
    corpus = pipeline.Corpus.from_arrays([[1, 2, 3]], tmp_path, weights=[[0, 0, 0]])
    with pytest.raises(ValueError, match="none of the 1 held-out examples has a position with a"):
        unigram_entropy(corpus)


def test_an_evaluation_that_is_not_finite_is_valid_json():
    record = Record(config={})
    assert record.evaluate(3, float("nan"), 2.0, 7) == {"eval_loss": None, "bits_per_byte": None}
    assert "NaN" not in json.dumps(record.evaluations)


def test_parameters_for_the_ids_of_another_tokenizer_are_refused(tmp_path):
    made = {}
    for name, tokenizer in (("then", Bytes()), ("now", Bytes(begin=False))):
        source = Records(["some text", "and more"])
        made[name] = pipeline.prepare(source, tokenizer, tmp_path / name, progress=False)
    plan = pipeline.Plan(made["then"], [pipeline.Bucket(2, 16)])
    write_history(epath.Path(tmp_path), made["then"], plan)
    require_tokenizer(epath.Path(tmp_path), made["then"])
    with pytest.raises(ValueError, match="the same ids stand for other text"):
        require_tokenizer(epath.Path(tmp_path), made["now"])
