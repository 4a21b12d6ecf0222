"""The loop of the training program, with a model that is next to nothing."""

import itertools
import json
import signal
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict, config_dict

import pipeline
import train
import trainer
from pipeline.cli.commands import main
from pipeline.errors import InvalidValue
from pipeline.fs.atomic import directory_lock
from pipeline.history import losses, read_history
from pipeline.steps.compiled import Compiled
from tests.properties.disk import Disk, fails
from tests.runs.runs import lines, run, segment_losses, steps, summary, tiny
from trainer import TrainingLog, parameters
from trainer.checkpoint import Checkpoints
from trainer.config import check_config, stored_config
from trainer.evaluation import evaluate, evaluation_batches

pytestmark = pytest.mark.usefixtures("counter")


@pytest.fixture
def config(text):
    often = {"eval_every": 6, "checkpoint_every": 6}
    return tiny(text, steps=12, **often, peak_flops=1e9)


def whole_summary(workdir):
    return json.loads((workdir / "summary.json").read_text())


def evaluations(workdir):
    return [(line["step"], line["eval_loss"]) for line in lines(workdir) if "eval_loss" in line]


def test_an_evaluation_cuts_no_document_to_fill_a_row():
    corpus = pipeline.Examples([np.arange(10)] * 3)
    options = pipeline.Plan(corpus, [pipeline.Bucket(2, 14)], packing="fill").options
    batches = evaluation_batches(corpus, options)
    found = np.concatenate([batches.plan.batch(step).segments for step in range(len(batches))])
    assert found[:, 1:].tolist() == [[0, 0, 9], [1, 0, 9], [2, 0, 9]]


def test_an_evaluation_is_over_all_positions_whatever_batch_they_are_in():
    corpus = pipeline.Examples([np.arange(length) for length in (3, 20, 9, 14)])
    options = pipeline.Plan(corpus, [pipeline.Bucket(1, 19)]).options
    batches = evaluation_batches(corpus, options)
    assert len(batches) > 1

    def step(params, batch):
        return (batch["targets"] * batch["loss_weights"]).sum(), batch["loss_weights"].sum()

    sums = 3 + 190 + 36 + 91, 2 + 19 + 8 + 13
    for count, threads in ((None, 1), (9, 2)):
        options = ConfigDict({"eval_batches": count, "num_threads": threads})
        assert evaluate(options, batches, step, None) == (*sums, None)
    options.eval_batches = 1
    assert evaluate(options, batches, step, None) == (*step(None, batches[0]), None)
    options.eval_batches, asked = 2, []
    assert evaluate(options, batches, step, None, stop=lambda: not asked.append(1)) is None
    assert len(asked) == 1


def test_a_run_weighs_each_held_out_position_once_and_counts_all_its_seconds(config, tmp_path):
    begin = time.perf_counter()
    assert "step 0: eval_loss 0.0000" in run(config, tmp_path)
    passed = time.perf_counter() - begin
    assert evaluations(tmp_path) == [(0, 0.0), (6, 6.0), (12, 12.0)]
    _, plan = read_history(train.epath.Path(tmp_path))
    assert summary(tmp_path)["tokens"] == sum(plan.batch(step).num_tokens for step in range(12))
    assert [line["loss"] for line in steps(tmp_path)] == list(range(12))
    seconds = whole_summary(tmp_path)["seconds"]
    assert 0.5 * passed < sum(seconds.values()) < passed
    phases = {"prepare", "plan", "compile", "initialise", "train", "wait", "evaluate", "save"}
    assert set(seconds) == phases | {"other"}
    log = [line for line in map(json.loads, (tmp_path / "metrics.jsonl").open()) if "loss" in line]
    used = [line["flop_utilisation"] * line["seconds"] for line in log]
    assert used == pytest.approx([line["tokens"] / 4e9 for line in log])  # on four devices
    utilisation = sum(used) / sum(line["seconds"] for line in log)
    assert whole_summary(tmp_path)["flop_utilisation"] == pytest.approx(utilisation)


def test_a_slow_source_shows_as_waiting(config, tmp_path, monkeypatch):
    read = pipeline.Corpus.read

    def slowly(*arguments, **options):
        time.sleep(0.1)
        return read(*arguments, **options)

    monkeypatch.setattr(pipeline.Corpus, "read", slowly)
    run(config, tmp_path)
    slow = whole_summary(tmp_path)
    assert slow["waiting"] > 0.5
    log = [json.loads(line) for line in (tmp_path / "metrics.jsonl").open()]
    assert all(line["waited"] <= line["seconds"] for line in log if "loss" in line)
    waited = sum(line.get("waited", 0) for line in log)
    assert waited == pytest.approx(slow["seconds"]["wait"], rel=0.1)


def test_a_step_compiled_after_the_start_is_counted(config, tmp_path, monkeypatch):
    original, calls = Compiled.__call__, itertools.count()

    def train_step(state):
        return state + 1

    def sneaky(self, state, batch):
        if self.name == "train_step" and next(calls) == 4:
            jax.jit(train_step)(jnp.ones(3))
        return original(self, state, batch)

    monkeypatch.setattr(Compiled, "__call__", sneaky)
    run(config, tmp_path)
    assert whole_summary(tmp_path)["compiles_after_start"] == 1


def test_the_log_names_the_batches_that_ran(config, tmp_path, monkeypatch):
    make = pipeline.Loader

    def make_ahead(*arguments, **options):
        loader = make(*arguments, **options)
        next(loader)  # a defect: the loader is a batch ahead of the loop
        return loader

    monkeypatch.setattr(pipeline, "Loader", make_ahead)
    run(config, tmp_path)
    _, plan = read_history(train.epath.Path(tmp_path))
    batches = [line["batch"] for line in steps(tmp_path)]
    assert batches == [plan.batch(step).digest for step in range(1, 13)]


def stop_after(step):
    """`TrainingLog.add` that a signal follows after so many steps."""
    add = TrainingLog.add

    def add_and_stop(self, number, planned, values):
        add(self, number, planned, values)
        if number + 1 == step:
            signal.raise_signal(signal.SIGTERM)

    return add_and_stop


def test_told_to_stop_it_saves_at_once_and_logs_evaluations_once(config, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(TrainingLog, "add", stop_after(6))
        assert "SIGTERM: saved step 6; run again to continue" in run(config, tmp_path)
    assert evaluations(tmp_path) == [(0, 0.0)]
    assert Checkpoints(tmp_path / "checkpoints").latest == 6
    # The next start makes the evaluation up, and is killed before it saves.
    with monkeypatch.context() as patch:
        patch.setattr(TrainingLog, "add", stop_after(8))
        patch.setattr(Checkpoints, "save", lambda *_, **__: None)
        run(config, tmp_path)
    assert evaluations(tmp_path) == [(0, 0.0), (6, 6.0)]
    run(config, tmp_path)
    assert evaluations(tmp_path) == [(0, 0.0), (6, 6.0), (12, 12.0)]
    assert [line["step"] for line in steps(tmp_path)] == list(range(12))


@pytest.mark.parametrize("done", [0, 4, 6, 12])
def test_a_signal_ends_an_evaluation_which_the_next_start_makes(
    config, tmp_path, monkeypatch, done
):
    config.eval_every, config.checkpoint_every = (4 if done == 4 else 6), 6
    original, save, asked, saved = trainer.evaluate, Checkpoints.save, [], [None]

    def note(self, step, *arguments, **options):
        saved.append(step)
        save(self, step, *arguments, **options)

    def interrupted(config, batches, step, params, *, stop):
        def stop_here():
            if int(params["count"]) == done:
                asked.append(saved[-1])
                if len(asked) == 2:
                    signal.raise_signal(signal.SIGTERM)
            return stop()

        return original(config, batches, step, params, stop=stop_here)

    with monkeypatch.context() as patch:
        patch.setattr(trainer, "evaluate", interrupted)
        patch.setattr(Checkpoints, "save", note)
        said = run(config, tmp_path)
    assert len(asked) == 2  # there are more batches
    assert f"SIGTERM: {f'saved step {done}' if done else 'it had made no step'}; run again" in said
    assert done not in dict(evaluations(tmp_path))
    # What is due at this step is saved before the evaluation begins.
    assert asked[0] == (done if done % 6 == 0 and done else None)
    assert Checkpoints(tmp_path / "checkpoints").latest == (done or None)
    run(config, tmp_path)
    due = range(0, 13, config.eval_every)
    assert evaluations(tmp_path) == [(step, float(step)) for step in due]
    assert [line["step"] for line in steps(tmp_path)] == list(range(12))
    assert whole_summary(tmp_path)["eval_loss_last"] == 12


def test_a_loss_that_is_not_finite_stops_or_is_skipped(config, tmp_path, monkeypatch, capsys):
    make_model = train.make_model

    def diverging(config, corpus):
        model = make_model(config, corpus)

        def wrong(params, batch):
            total, weight = model.loss(params, batch)
            late = (params["count"] > 7) & (batch["inputs_positions"] == 60)
            return total + (jnp.where(late, jnp.nan, 0) * batch["loss_weights"]).sum(), weight

        return model._replace(loss=wrong)

    monkeypatch.setattr(train, "make_model", diverging)
    with pytest.raises(FloatingPointError, match=r"at step 8, .*--config.skip_steps='\(8,\)'"):
        run(config, tmp_path)
    assert Checkpoints(tmp_path / "checkpoints").latest == 6  # what was being saved is saved
    _, plan = read_history(train.epath.Path(tmp_path))
    assert main(["why", str(tmp_path), "--step", "8"]) == 0
    head, _, *told = capsys.readouterr().out.splitlines()
    assert head.endswith("loss nan")
    documents, first, count = plan.batch(8).segments[:, 1:].T
    long = documents[(first <= 60) & (first + count > 60)].tolist()
    assert 0 < len(long) < len(documents)
    assert {int(line.split()[0]) for line in told[: len(long)]} == set(long)
    assert [" nan " in line for line in told] == [at < len(long) for at in range(len(told))]
    config.on_nonfinite = "skip"
    assert "no update: loss nan" in run(config, tmp_path)
    assert summary(tmp_path)["skipped_steps"] == 4
    last = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["eval_loss"] is None
    found = segment_losses(tmp_path)  # add up to the logged losses, also to those not finite
    assert np.isfinite(found.usual).all()
    assert set(found.step[np.isnan(found.loss)].tolist()) == {8, 9, 10, 11}


def test_steps_to_skip_are_left_out_and_the_others_keep_their_batches(config, tmp_path):
    run(config, tmp_path / "whole")
    config.skip_steps = (2, 4)
    run(config, tmp_path / "some")
    whole = {line["step"]: line["batch"] for line in steps(tmp_path / "whole")}
    some = {line["step"]: line["batch"] for line in steps(tmp_path / "some")}
    skipped = [line for line in lines(tmp_path / "some") if "skipped" in line]
    skipped = {line["step"]: line["skipped"] for line in skipped}
    assert list(skipped) == [2, 4]
    assert some | skipped == whole
    assert not some.keys() & skipped.keys()
    assert set(losses(tmp_path / "some").step.tolist()) == {0, 1, 3, *range(5, 12)}
    assert main(["why", str(tmp_path / "some"), "--step", "4"]) == 2


def test_gradients_of_the_last_steps_are_in_an_update_of_their_own(config, tmp_path):
    config.accumulate, config.skip_steps, config.steps = 4, (5,), 10
    assert "tiers=1: with tiers=4" in run(config, tmp_path)
    assert read_history(tmp_path)[1].options.tiers == 1
    # The parameter is the number of updates: two windows of four steps, and the last step.
    assert [line["loss"] for line in steps(tmp_path)] == [0, 0, 0, 0, 1, 1, 1, 1, 2]
    assert evaluations(tmp_path) == [(0, 0.0), (6, 1.0), (10, 3.0)]
    assert whole_summary(tmp_path)["other_compiles"] == 0
    config.steps = 14  # the window of the last step goes on, for three more
    run(config, tmp_path)
    assert [line["loss"] for line in steps(tmp_path)][9:] == [3, 3, 3, 4]
    assert evaluations(tmp_path)[-1] == (14, 5.0)


def test_windows_end_with_the_blocks_of_tiers_also_after_an_update_by_fewer_steps(config, tmp_path):
    config.accumulate, config.steps = 4, 10
    run(config, tmp_path)
    config.steps = 17
    run(config, tmp_path)
    # Steps 8 and 9 had an update at the end, and 10 and 11 have one: 12 begins block and window.
    due = [0] * 4 + [1] * 4 + [2] * 2 + [3] * 2 + [4] * 4 + [5]
    assert [line["loss"] for line in steps(tmp_path)] == due
    assert evaluations(tmp_path)[-1] == (17, 6.0)


def test_an_evaluation_at_the_end_is_of_the_parameters_that_are_saved(
    config, tmp_path, monkeypatch
):
    """A run is stopped inside a window of accumulated steps, and is then told to end there."""
    config.accumulate = 4
    with monkeypatch.context() as patch:
        patch.setattr(TrainingLog, "add", stop_after(6))
        run(config, tmp_path)
    config.steps = 6
    said = run(config, tmp_path)
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        like = {"params": {"count": jnp.float32(0)}}
        saved = checkpoints.restore_part(6, like)["params"]["count"]
    assert evaluations(tmp_path)[-1] == (6, float(saved)) == (6, 1.0)
    assert "the last steps wait for the rest of their update" in said
    config.steps = 12
    run(config, tmp_path)
    assert [line["loss"] for line in steps(tmp_path)] == [0] * 4 + [1] * 4 + [2] * 4


def test_a_run_that_is_killed_before_it_compiles_has_stored_its_config(
    config, tmp_path, monkeypatch
):
    def killed(*_, **__):
        raise KeyboardInterrupt

    def start_and_kill():
        with monkeypatch.context() as patch:
            patch.setattr(trainer, "prepare_run", killed)
            with pytest.raises(KeyboardInterrupt):
                run(config, tmp_path)

    start_and_kill()
    assert stored_config(tmp_path).steps == 12
    config.steps = 13
    start_and_kill()
    assert stored_config(tmp_path).steps == 13  # nothing was trained with the other one
    run(config, tmp_path)
    config.steps = 14
    start_and_kill()
    assert stored_config(tmp_path).steps == 13  # that of the run, until it continues


def test_a_config_is_checked_before_scores(config, tmp_path):
    config.keep = 0
    with pytest.raises(InvalidValue, match=r"config.keep is 0; it must be a whole number from 1"):
        trainer.score(config, tmp_path, train.make_model)


def test_parameters_of_another_run_replace_those_of_the_beginning(monkeypatch):
    """The first ones are gone before the others are read: there is never room for both."""
    first = {"params": {"w": jnp.ones(4)}, "steps": jnp.int32(0)}
    old, sharding = first["params"]["w"], first["params"]["w"].sharding

    def restore(workdir, corpus, like):
        assert old.is_deleted()
        assert like["w"] == jax.ShapeDtypeStruct((4,), jnp.float32, sharding=sharding)
        return 3, {"w": jnp.zeros(4)}

    monkeypatch.setattr(parameters, "restore_parameters", restore)
    begun = parameters.start_from(ConfigDict({"start_from": "runs/one"}), first, None)
    assert begun["params"]["w"].tolist() == [0.0] * 4
    assert int(begun["steps"]) == 0


def test_a_finished_run_says_so_and_goes_on_when_it_is_given_more_steps(config, tmp_path):
    run(config, tmp_path)
    batches = [line["batch"] for line in steps(tmp_path)]
    (tmp_path / "summary.json").unlink()
    run(config, tmp_path)
    assert summary(tmp_path)["steps"] == 12
    said = run(config, tmp_path)
    assert "finished: " in said
    assert "for more, give --config.steps=N" in said
    config.optimizer.decay_steps = None
    config.steps = 15
    run(config, tmp_path)
    assert [line["batch"] for line in steps(tmp_path)][:12] == batches
    assert [line["loss"] for line in steps(tmp_path)] == list(range(15))
    assert [step for step, _ in evaluations(tmp_path)] == [0, 6, 12, 15]  # each once


def test_a_second_run_in_a_directory_is_refused(config, tmp_path):
    refusal = f"another process is training in {tmp_path}; stop it first"
    with directory_lock(tmp_path, "training"), pytest.raises(RuntimeError, match=refusal):
        run(config, tmp_path)


def test_a_field_that_is_not_given_again_is_that_of_the_run(config, tmp_path):
    config.optimizer.update(decay_steps=20, warmup_steps=2)
    run(config, tmp_path)
    for decay, due in ((None, 20), (30, 30)):
        config.optimizer.update(decay_steps=decay, warmup_steps=None)
        config.steps += 1
        run(config.copy_and_resolve_references(), tmp_path)
        stored = stored_config(tmp_path).optimizer
        assert (stored.decay_steps, stored.warmup_steps) == (due, 2)


@pytest.mark.parametrize("name", ["warmup_steps", "decay_steps"])
@pytest.mark.parametrize("value", ["two", -1, 2.5])
def test_steps_of_the_optimizer_are_whole_numbers(config, name, value):
    untyped = ConfigDict({name: config_dict.placeholder(object)})  # as a stored config has them
    config.optimizer = ConfigDict({**config.optimizer.to_dict(), **untyped})
    config.optimizer[name] = value
    with pytest.raises(InvalidValue, match=f"config.optimizer.{name} is {value!r}; it must be"):
        check_config(config)


@pytest.mark.slow
def test_a_full_disk_gives_a_sentence_and_a_rerun_with_room_ends_the_same(config, tmp_path):
    config.peak_flops = 0.0
    config.eval_every, config.checkpoint_every = 4, 3
    run(config.copy_and_resolve_references(), tmp_path / "whole")
    room, refusals = 1 << 12, 0
    with Disk(tmp_path / "disk") as disk:
        while fails(run, config.copy_and_resolve_references(), disk.make(room)):
            refusals += 1
            disk.grow()
            run(config.copy_and_resolve_references(), disk.place)
            assert lines(disk.place) == lines(tmp_path / "whole")
            room = room * 5 // 4
    assert refusals > 10
