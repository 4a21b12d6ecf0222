"""Runs of the training program on the tiny configuration: what it learns, changes and refuses."""

import json
import pathlib
import re
import sys
from unittest import mock

import jax
import pytest
from etils import epath

import train
import trainer
from pipeline.cli.commands import main
from pipeline.history.run_config import read_config
from pipeline.steps import hosts
from tests.runs.program_flags import parse
from tests.runs.runs import (
    assert_same_losses,
    audited,
    messages,
    run,
    segment_losses,
    steps,
    summary,
    tiny,
)
from trainer.checkpoint import Checkpoints
from trainer.config import stored_config


@pytest.mark.slow
def test_a_loss_scale_that_is_too_large_falls_while_training_goes_on(text, tmp_path):
    run(tiny(text, model__dtype="float16", optimizer__loss_scale=1e9), tmp_path)
    log = steps(tmp_path)
    scales = [line["loss_scale"] for line in log]
    skipped = [line["step"] for line in log if line["gradient_norm"] is None]
    assert skipped
    assert summary(tmp_path)["skipped_steps"] == len(skipped)
    assert all(scales[step + 1] == scales[step] / 2 for step in skipped if step + 1 < len(scales))
    assert summary(tmp_path)["eval_loss_last"] < summary(tmp_path)["eval_loss_first"]


def test_the_learning_rate_rises_and_falls_over_updates(text):
    fields = {"accumulate": 4, "optimizer__decay_steps": 82}
    for warmup in (8, None):  # a tenth of the decay, which are 2 updates
        _, rate = train.make_optimizer(tiny(text, **fields, optimizer__warmup_steps=warmup))
        rates = [float(rate(update)) for update in (0, 1, 2, 21, 99)]
        assert rates == pytest.approx([2e-3, 3e-3, 4e-3, 2e-4, 2e-4])
        assert rate(20) > 2.1e-4  # the last 2 of 82 steps are in it


@pytest.mark.usefixtures("counter")
def test_changed_batches_need_an_entry_of_the_schedule_and_are_logged_first(
    text, tmp_path, monkeypatch
):
    run(tiny(text, steps=5), tmp_path)
    more = {"steps": 8, "batches__tokens_per_batch": 512}
    with pytest.raises(ValueError, match="tokens_per_batch was 1024 and is now 512"):
        run(tiny(text, **more), tmp_path)
    output = run(tiny(text, **more, schedule=((5, {"tokens_per_batch": 512}),)), tmp_path)
    logged = output.index("changed from step 5 on: tokens_per_batch=512")
    assert logged < output.index("resumed: step 5 of 8") < output.index("step 8/8")
    # New data joins the epoch that is half done, also under the first config.
    monkeypatch.setenv("TINY_MORE", "1")
    schedule = ((8, {"add": ["more"]}), (10, {"max_length": 64}))
    output = run(tiny(text, steps=11, schedule=schedule), tmp_path)
    assert "from step 8 on: 32 new examples" in output
    buckets = [line["bucket"] for line in steps(tmp_path)]
    assert buckets == ["8x128"] * 5 + ["4x128"] * 5 + ["8x64"]
    # What is planned is compiled before the first step.
    assert summary(tmp_path)["compiles_after_start"] == 0
    assert "plan from step 8 on: examples=" in audited(tmp_path)


@pytest.mark.slow
def test_a_run_goes_on_under_other_weights_when_a_phase_says_so(
    text, tmp_path, monkeypatch, capsys
):
    def of(**fields):
        return tiny(text, "mixture", **fields)

    run(of(), tmp_path)
    assert summary(tmp_path)["shares"] == pytest.approx({"first": 0.75, "second": 0.25}, abs=0.05)
    with pytest.raises(ValueError, match=r"weight of first was 3/4 and is now 1/2"):
        run(of(steps=18, mixture__weights=((0, {"first": 1, "second": 1}),)), tmp_path)
    # Twelve steps at three to one, and six of the second alone, which another joins halfway.
    monkeypatch.setenv("TINY_MORE", "1")
    phases = (
        (0, {"first": 3, "second": 1}),
        (12, {"first": 0, "second": 1}),
        (15, {"first": 0, "second": 0, "another": 1}),
    )
    run(of(steps=18, mixture__weights=phases), tmp_path)
    wanted = {"first": 1 / 2, "second": 1 / 3, "another": 1 / 6}
    assert summary(tmp_path)["shares"] == pytest.approx(wanted, abs=0.05)
    # Then larger batches, without one document.
    schedule = ((18, {"tokens_per_batch": 2048, "exclude": [7]}),)
    output = run(of(steps=22, mixture__weights=phases, schedule=schedule), tmp_path)
    assert "changed from step 18 on: tokens_per_batch=2048, exclude=7" in output
    rows, length = map(int, steps(tmp_path)[-1]["bucket"].split("x"))
    assert rows * length == 2048
    said = audited(tmp_path)
    assert "plan from step 15 on: weights={'first': '0', 'second': '0', 'another': '1'}" in said
    assert "exclude=7\n" in said
    assert "all 22 batches are those that were planned" in said
    # Another comes last in the plan, as it joined last.
    assert set(segment_losses(tmp_path).corpus.tolist()) == {0, 1, 2}
    assert main(["why", str(tmp_path), "--step", "17"]) == 0
    assert " another " in capsys.readouterr().out


@pytest.mark.usefixtures("counter")
def test_weights_of_a_file_are_taken_while_a_run_trains_and_a_wrong_file_is_not(
    text, tmp_path, monkeypatch
):
    files = {
        2: '{"first": 1, "second": 3}',  # from step 4 on: two batches are ready
        4: '{"first": 1, "second":',
        5: '{"first": 9, "second": 1}',  # nobody looks
        6: '{"first": 1, "third": 2}',
        8: '{"first": -1, "second": 2}',
        10: '{"first": 2, "second": 6}',  # the same shares
        14: '{"first": 0, "second": 1}',  # from step 16 on, where the run has ended
    }
    look = trainer.WeightsFile.look

    def write_and_look(weights, step):
        if step in files:
            (tmp_path / "weights.json").write_text(files[step])
        look(weights, step)

    monkeypatch.setattr(trainer.WeightsFile, "look", write_and_look)
    fields = {"weights_every": 2, "optimizer__decay_steps": 16, "eval_every": 20}
    phases = (0, {"first": 3, "second": 1}), (14, {"first": 1, "second": 1})
    output = run(tiny(text, "mixture", **fields, steps=16, mixture__weights=phases), tmp_path)
    path = tmp_path / "weights.json"
    said = f"changed from step 4 on, as {path} says: weights={{'first': 1, 'second': 3}}"
    assert output.count(said) == 1
    assert "weights that change at step 4 replace those from 14 on" in output
    for what in (
        "Expecting value",
        "first, third, and the corpora are first, second",
        "at least 0",
    ):
        assert len(re.findall(rf"weights.json is not taken: .*{what}", output)) == 1
    assert output.count("is not taken") == 3
    assert output.count("changed from step") == 2
    assert "plan from step 4 on: weights={'first': '1/4', 'second': '3/4'}" in audited(tmp_path)
    # The next start has the change that had not begun, and does not take the file again.
    output = run(tiny(text, "mixture", **fields, steps=20, mixture__weights=phases), tmp_path)
    assert "changed from step" not in output
    every = audited(tmp_path)
    assert "plan from step 16 on: weights={'first': '0', 'second': '1'}" in every
    assert "all 20 batches are those that were planned" in every
    owners = segment_losses(tmp_path)
    assert set(owners.corpus[owners.step >= 16].tolist()) == {1}
    assert set(owners.corpus[owners.step < 16].tolist()) == {0, 1}
    assert summary(tmp_path)["compiles_after_start"] == 0


@pytest.mark.slow
def test_a_run_goes_on_with_the_length_divided_in_any_order_and_in_microbatches(text, tmp_path):
    small = {"batches__row_multiple": 4, "optimizer__decay_steps": 12}
    run(tiny(text, **small, steps=12), tmp_path / "rows")
    context = {**small, "mesh__data": 1, "mesh__context": 4}
    run(tiny(text, **context, steps=8, context_order="zigzag"), tmp_path / "length")
    context |= {"mesh__context": 2, "mesh__data": 2, "microbatches": 2}
    said = run(tiny(text, **context, steps=12, context_order="striped"), tmp_path / "length")
    assert "in 2 microbatches" in said
    assert_same_losses(tmp_path / "length", tmp_path / "rows", rtol=1e-4)


@pytest.mark.slow
def test_a_run_divides_the_rows_of_each_shape_and_goes_on_with_fewer_devices(text, tmp_path):
    shapes = {"tokens_per_batch": 512, "max_buckets": 2, "length_multiple": 32, "devices": 4}
    shapes |= {"max_length": 256, "packing": "none", "row_multiple": 1}
    small = {f"batches__{name}": value for name, value in shapes.items()}
    small |= {"optimizer__decay_steps": 12}
    run(tiny(text, **small, steps=12, mesh__data=1, mesh__context=4), tmp_path / "rows")
    dynamic = {**small, "dynamic_context": True, "mesh__data": 1, "context_order": "zigzag"}
    run(tiny(text, **dynamic, steps=8, mesh__fsdp=4), tmp_path / "dynamic")
    fewer = {"mesh__fsdp": 2, "mesh__tensor": 2}  # that share a batch
    run(tiny(text, **dynamic, **fewer, steps=12), tmp_path / "dynamic")
    assert_same_losses(tmp_path / "dynamic", tmp_path / "rows", rtol=1e-4)
    buckets = {tuple(map(int, step["bucket"].split("x"))) for step in steps(tmp_path / "dynamic")}
    assert min(buckets)[0] < 4 <= max(buckets)[0]  # some rows are divided, and some not


def test_a_finished_run_is_evaluated_on_other_files(text, tmp_path):
    run_dir, fields = tmp_path / "run", {"steps": 4, "tokenizer__vocab_size": 300}
    config = tiny(text, **fields, tokenizer__kind="sentencepiece")
    run(config, run_dir)
    config = stored_config(run_dir)

    def evaluate():
        with messages() as said:
            trainer.score(config, epath.Path(run_dir), train.make_model, test=True)
        (place,) = {*run_dir.glob("tests/*/4")} - places
        places.add(place)
        return json.loads((place / "summary.json").read_text()), str(said)

    places: set[pathlib.Path] = set()
    same, said = evaluate()
    assert same["loss"] == pytest.approx(summary(run_dir)["eval_loss_last"], rel=1e-5)
    assert same["bits_per_byte"] == pytest.approx(summary(run_dir)["bits_per_byte"], rel=1e-5)
    assert f"loss {same['loss']:.4f}, perplexity {same['perplexity']:.2f}, " in said
    # The training text is not needed, and neither is it changed.
    test = tmp_path / "test.jsonl"
    test.write_text('{"text": "pack the rows"}\n{"text": ""}\n{"text": "a bucket of lengths"}\n')
    trained, config.train.files, config.eval.files = config.train.files, "none", str(test)
    other, said = evaluate()
    assert (other["documents"], other["unscored"]) == (3, 0)
    assert other["loss"] != same["loss"]
    config.hold_out, config.train.files = 0.5, trained
    held_out, _ = evaluate()
    assert 0 < held_out["documents"] < 128
    with pytest.raises(ValueError, match=r"there is no checkpoint in .*new to take parameters"):
        trainer.score(config, epath.Path(tmp_path / "new"), train.make_model, test=True)


@pytest.fixture(autouse=True)
def command(text, monkeypatch):
    monkeypatch.setenv("TINY_TEXT", str(text))
    monkeypatch.setattr(sys, "argv", ["train.py"])


def test_without_a_config_the_default_begins_in_any_new_work_directory():
    config, workdir = parse("--config.steps=3", "--workdir=nowhere")
    assert (config.steps, config.model.width, workdir) == (3, 128, "nowhere")
    assert parse()[1] == "runs/quickstart"
    assert parse("--config=tests/runs/tiny_config.py:pairs")[1] == "runs/tiny_config"


@pytest.mark.slow
def test_a_cache_changes_no_loss_and_a_run_tells_what_it_read(text, tmp_path):
    run(tiny(text, steps=6), tmp_path / "plain")
    config = tiny(text, steps=6, cache__directory=str(tmp_path / "cache"))
    with jax.profiler.trace(tmp_path / "profile"):
        run(config, tmp_path / "cached")
    (trace,) = (tmp_path / "profile").rglob("*.xplane.pb")
    for phase in (b"plan", b"collate", b"transfer", b"train_step"):
        assert phase in trace.read_bytes()
    assert sorted(path.name for path in (tmp_path / "cache").glob("*/*.arrow"))
    ours, theirs = (steps(tmp_path / name) for name in ("cached", "plain"))
    for our, their in zip(ours, theirs, strict=True):
        assert our.items() >= their.items()
        assert our["stalled"] >= 0
    assert ours[-1]["fetched_bytes"] > 0
    config.steps, config.cache.bytes = 8, 1 << 30  # may change
    run(config, tmp_path / "cached")
    assert len(steps(tmp_path / "cached")) == 8


@pytest.mark.usefixtures("counter")
def test_checkpoints_are_read_after_the_lock_is_held_on_all_hosts(text, tmp_path, monkeypatch):
    calls = mock.Mock()
    calls.attach_mock(mock.Mock(wraps=hosts.main_process_first), "first")
    calls.attach_mock(mock.Mock(wraps=Checkpoints), "open")
    monkeypatch.setattr(hosts, "main_process_first", calls.first)
    monkeypatch.setattr(trainer, "Checkpoints", calls.open)
    run(tiny(text, steps=4), tmp_path)
    first, second, *_ = calls.mock_calls
    assert first == mock.call.first("locking the work directory", mock.ANY)
    assert second[0] == "open"


@pytest.mark.usefixtures("counter")
def test_a_run_knows_its_config_and_flags_change_it(text, tmp_path, capsys):
    fields = {"steps": 4, "model__width": 64, "seed": 3, "mesh__data": 4}
    schedule = ((0, {"seed": 5}), (2, {"max_length": 64}))
    run(tiny(text, **fields, schedule=schedule), tmp_path)
    known = stored_config(tmp_path)
    fields["seed"] = 5  # that of the run, from step 0 on
    expected = tiny(text, **fields, optimizer__decay_steps=4, schedule=schedule)
    assert json.loads(known.to_json()) == json.loads(expected.to_json())
    assert read_config(tmp_path)["batches"] == json.loads(expected.batches.to_json())
    with pytest.raises(ValueError, match=r"config\.model\.width was 64 and is now 32"):
        run(tiny(text, **fields | {"model__width": 32}), tmp_path)
    flags = f"--workdir={tmp_path}", "--config.steps=7", "--config.optimizer.warmup_steps=2"
    more = "--config.skip_steps=(3,)", "--config.batches.row_multiple=3"  # which was None
    config, workdir = parse(*flags, *more)
    assert (config.steps, config.model.width, config.optimizer.warmup_steps) == (7, 64, 2)
    assert (config.skip_steps, config.batches.row_multiple) == ((3,), 3)
    assert workdir == str(tmp_path)
    assert parse("--config=tests/runs/tiny_config.py", *flags)[0].model.width == 32
    capsys.readouterr()
    # A start that is refused leaves the stored values as they are.
    wrong = {"steps": 9, "schedule": ((5, {"max_length": 0}),)}
    with pytest.raises(ValueError, match="max_length"):
        run(tiny(text, **fields | wrong), tmp_path)
    assert stored_config(tmp_path).steps == 4
    known.steps = 5
    run(known, tmp_path)
    assert stored_config(tmp_path).steps == 5
