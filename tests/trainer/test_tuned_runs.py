"""Runs whose buckets are measured, with a model that is next to nothing."""

import json

import pytest

import train
from pipeline.cli.commands import main
from pipeline.fs.atomic import as_path
from pipeline.history import read_history
from pipeline.steps import tuning
from pipeline.trainer import read_tuned
from tests.runs.runs import assert_same_losses, audited, messages, run, steps, tiny

MEASURED = "shapes, each to within"  # said by each measurement


@pytest.fixture(autouse=True)
def few_rounds(counter, monkeypatch):
    monkeypatch.setattr(tuning, "ROUNDS", 2)


@pytest.fixture
def config(text):
    few = {"batches__max_buckets": 2, "batches__length_multiple": 32}  # four shapes to measure
    return tiny(text, steps=12, batches__tune=True, **few)


def buckets_of(workdir):
    _, plan = read_history(as_path(workdir))
    return plan.options.buckets


def test_a_run_measures_once_and_keeps_its_buckets(config, tmp_path):
    said = run(config, tmp_path)
    assert said.count(MEASURED) == 1
    tuned = read_tuned(tmp_path)
    assert buckets_of(tmp_path) == tuned
    assert main(["buckets", "tests/runs/tiny_config.py", "--workdir", str(tmp_path)]) == 0
    config.steps = 18
    said = run(config, tmp_path)
    assert "resumed: step 12" in said
    assert MEASURED not in said
    assert buckets_of(tmp_path) == tuned
    audited(tmp_path)
    # Steps that were measured leave no trace in the losses.
    assert [(line["step"], line["loss"]) for line in steps(tmp_path)] == [(n, n) for n in range(18)]
    # The batches are those of a run that is given these buckets.
    with config.unlocked():
        config.batches.update(tune=False, buckets=[bucket.as_json for bucket in tuned])
    run(config, tmp_path / "given")
    assert_same_losses(tmp_path, tmp_path / "given")


def test_what_was_tuned_before_the_run_is_taken(config, tmp_path):
    config.batches.tune = False
    train.tune(config, as_path(tmp_path))
    before, config.batches.tune = read_tuned(tmp_path), True
    said = run(config, tmp_path)
    assert "buckets as measured before" in said
    assert MEASURED not in said
    conditions = json.loads((tmp_path / "tuning.json").read_text())["conditions"]
    assert conditions["corpus"] == read_history(as_path(tmp_path))[0].fingerprint
    assert buckets_of(tmp_path) == before
    with messages() as said:
        train.tune(config, as_path(tmp_path))
    assert str(said).count(MEASURED) == 1  # a command measures


def test_another_config_is_measured_again(config, tmp_path):
    train.tune(config, as_path(tmp_path))
    config.batches.tokens_per_batch = 512
    said = run(config, tmp_path)
    assert "measuring again" in said
    assert said.count(MEASURED) == 1
    assert max(bucket.positions for bucket in buckets_of(tmp_path)) <= 512


def test_a_run_that_goes_on_cannot_begin_to_tune(config, tmp_path):
    config.batches.tune, config.steps = False, 1
    run(config, tmp_path)
    config.batches.tune, config.steps = True, 2
    with pytest.raises(ValueError, match="tune was False and is now True"):
        run(config, tmp_path)
