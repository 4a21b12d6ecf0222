"""The training program, run as a user runs it: in processes of its own."""

import json
import pathlib
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from tests.processes import environment

ROOT = pathlib.Path(__file__).parent.parent
TIME_LIMIT = 240  # seconds for one start


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """160 documents of 5 to 300 characters as JSON lines."""
    rng = np.random.default_rng(0)
    words = ["pack", "the", "rows", "a", "bucket", "of", "lengths", "and", "step"]
    path = tmp_path_factory.mktemp("text") / "documents.jsonl"
    documents = [
        " ".join(rng.choice(words, size=int(n))) + "."
        for n in np.clip(rng.lognormal(2.5, 0.8, 160), 1, 60)
    ]
    path.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents))
    return path


# What depends on the clock.
CLOCK = {"waited", "seconds", "tokens_per_second", "positions_per_second", "goodput", "waiting"}
CLOCK |= {"seconds/compile", "seconds/save"}


def start(text, workdir, *flags, program="train.py"):
    """Starts the program; one device, as on a user's machine."""
    programs = str(text.parent / "programs")  # of all starts
    command = [sys.executable, program, "--config=tests/tiny_config.py", f"--workdir={workdir}"]
    return subprocess.Popen(
        [*command, *flags],
        cwd=ROOT,
        env=environment(TINY_TEXT=str(text), JAX_COMPILATION_CACHE_DIR=programs),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def run(text, workdir, *flags):
    """Runs the program to its end: exit code and output."""
    process = start(text, workdir, *flags)
    try:
        output, _ = process.communicate(timeout=TIME_LIMIT)
    finally:
        process.kill()
    return process.returncode, output


def lines(workdir):
    """The lines of steps and of evaluations, without what depends on the clock."""
    path = workdir / "metrics.jsonl"
    whole = [line for line in path.read_text().split("\n")[:-1] if line] if path.exists() else []
    parsed = [json.loads(line) for line in whole]
    return [{k: v for k, v in line.items() if k not in CLOCK} for line in parsed]


def wait_for_step(process, workdir, step):
    deadline = time.monotonic() + TIME_LIMIT
    while process.poll() is None and time.monotonic() < deadline:
        if any(line["step"] >= step and "loss" in line for line in lines(workdir)):
            return
        time.sleep(0.02)
    process.kill()
    raise AssertionError(f"step {step} was not reached:\n{process.communicate()[0]}")


def summary(workdir):
    """The summary without what depends on the clock."""
    values = json.loads((workdir / "summary.json").read_text())
    return {k: v for k, v in values.items() if k not in CLOCK}


@pytest.fixture(scope="module")
def uninterrupted(text, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("uninterrupted")
    code, output = run(text, workdir)
    assert code == 0, output
    return workdir, output


def test_a_run_compiles_each_bucket_once_and_nothing_after_the_start(uninterrupted):
    workdir, output = uninterrupted
    values = summary(workdir)
    assert 1 <= len(values["compiles"]) <= 3
    assert set(values["compiles"].values()) == {1}
    assert values["compiles_after_start"] == values["other_compiles"] == 0, output
    for bucket in values["compiles"]:
        assert f"train_step {bucket}: compiled in" in output


def test_a_run_learns_and_says_how_much(uninterrupted):
    workdir, output = uninterrupted
    values = summary(workdir)
    assert values["eval_loss_last"] < values["eval_loss_first"]
    assert values["steps"] == 30
    steps = [line for line in lines(workdir) if "loss" in line]
    assert [line["step"] for line in steps] == list(range(30))
    assert {line["epoch"] for line in steps} >= {0, 1}
    assert sum(line["tokens"] for line in steps) == values["tokens"]
    evaluations = [line for line in lines(workdir) if "eval_loss" in line]
    assert [line["step"] for line in evaluations] == [0, 10, 20, 30]
    assert evaluations[-1]["bits_per_byte"] == values["bits_per_byte"]
    assert "padding" in output
    assert list((workdir / "tensorboard").iterdir())


def test_the_held_out_unigram_entropy_is_that_of_the_bytes(uninterrupted, text):
    workdir, _ = uninterrupted
    documents = [json.loads(line)["text"] for line in text.read_text().splitlines()][128:]
    targets = [byte for document in documents for byte in [*document.encode(), 256]]
    share = np.unique(targets, return_counts=True)[1] / len(targets)
    entropy = -(share * np.log(share)).sum()
    assert summary(workdir)["unigram_entropy"] == pytest.approx(entropy)


def test_killed_at_a_random_step_it_continues_bit_for_bit(uninterrupted, text, tmp_path):
    workdir, _ = uninterrupted
    process = start(text, tmp_path, program="tests/slow_train.py")
    wait_for_step(process, tmp_path, random.Random().randint(6, 20))
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    kept = set((text.parent / "programs").glob("*_step-*"))
    code, output = run(text, tmp_path)
    assert code == 0, output
    assert kept
    assert kept == set((text.parent / "programs").glob("*_step-*"))  # nothing is compiled anew
    assert "resumed: step" in output
    assert lines(tmp_path) == lines(workdir)
    assert summary(tmp_path) == summary(workdir)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_leaves_with_success_and_the_next_start_continues(
    uninterrupted, text, tmp_path, number
):
    workdir, _ = uninterrupted
    process = start(text, tmp_path, program="tests/slow_train.py")
    wait_for_step(process, tmp_path, 7)
    process.send_signal(number)
    output, _ = process.communicate(timeout=TIME_LIMIT)
    assert process.returncode == 0, output
    assert f"{number.name}: saved step" in output
    code, output = run(text, tmp_path)
    assert code == 0, output
    assert lines(tmp_path) == lines(workdir)


def test_a_finished_run_says_so_and_goes_on_when_it_is_given_more_steps(
    uninterrupted, text, tmp_path
):
    code, output = run(text, tmp_path, "--config.steps=6")
    assert code == 0, output
    code, output = run(text, tmp_path, "--config.steps=6")
    assert code == 0
    assert "finished: " in output
    assert "--config.steps=N" in output
    code, output = run(text, tmp_path, "--config.steps=9")
    assert code == 0, output
    assert summary(tmp_path)["steps"] == 9
    steps = [line for line in lines(tmp_path) if "loss" in line]
    assert [line["step"] for line in steps] == list(range(9))
    workdir, _ = uninterrupted
    batches = [line["batch"] for line in lines(workdir) if "batch" in line]
    assert [line["batch"] for line in steps] == batches[:9]
    code, output = run(text, tmp_path, "--config.steps=12", "--config.model.width=32")
    assert code != 0
    assert "config.model.width was 64 and is now 32" in output


def test_a_loss_that_is_not_finite_stops_with_the_documents_and_can_be_skipped(text, tmp_path):
    wild = ("--config.optimizer.learning_rate=1e30", "--config.steps=8")
    code, output = run(text, tmp_path / "stop", *wild)
    assert code != 0
    assert "FloatingPointError: loss" in output
    assert "--config.skip_steps='(" in output
    code, output = run(text, tmp_path / "skip", *wild, "--config.on_nonfinite=skip")
    assert code == 0, output
    assert summary(tmp_path / "skip")["skipped_steps"] > 0
    assert "no update: loss" in output


def test_a_loss_scale_that_is_too_large_falls_while_training_goes_on(text, tmp_path):
    flags = ("--config.model.dtype=float16", "--config.optimizer.loss_scale=1e9")
    code, output = run(text, tmp_path, *flags)
    assert code == 0, output
    steps = [line for line in lines(tmp_path) if "loss_scale" in line]
    scales = [line["loss_scale"] for line in steps]
    skipped = [line["step"] for line in steps if line["gradient_norm"] is None]
    assert skipped
    assert summary(tmp_path)["skipped_steps"] == len(skipped)
    assert all(scales[step + 1] == scales[step] / 2 for step in skipped if step + 1 < len(scales))
    assert summary(tmp_path)["eval_loss_last"] < summary(tmp_path)["eval_loss_first"]


def test_microbatches_train_like_the_whole_batch(uninterrupted, text, tmp_path):
    code, output = run(text, tmp_path, "--config.microbatches=2", "--config.steps=30")
    assert code == 0, output
    assert "in 2 microbatches" in output
    ours, theirs = (
        [line["loss"] for line in lines(workdir) if "loss" in line]
        for workdir in (tmp_path, uninterrupted[0])
    )
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)


def test_a_budget_that_no_bucket_meets_ends_the_run_before_its_first_step(text, tmp_path):
    code, output = run(text, tmp_path, "--config.memory_budget=1000")
    assert code != 0
    assert "MemoryError: train_step needs" in output
    assert not lines(tmp_path)


def test_steps_to_skip_are_left_out_and_the_others_keep_their_batches(
    uninterrupted, text, tmp_path
):
    flags = ("--config.steps=6", "--config.skip_steps=(2,4)", "--profile_steps=1:3")
    code, output = run(text, tmp_path, *flags)
    assert code == 0, output
    (trace,) = (tmp_path / "profile").rglob("*.xplane.pb")
    for name in (b"plan", b"collate", b"transfer", b"train_step"):
        assert name in trace.read_bytes()
    batches = {line["step"]: line["batch"] for line in lines(tmp_path) if "batch" in line}
    assert list(batches) == [0, 1, 3, 5]
    skipped = {line["step"]: line["skipped"] for line in lines(tmp_path) if "skipped" in line}
    assert list(skipped) == [2, 4]
    whole = {line["step"]: line["batch"] for line in lines(uninterrupted[0]) if "batch" in line}
    assert batches.items() | skipped.items() <= whole.items()


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--config.model.widht=3"], 'Did you mean "width" instead of "widht"?'),
        (["--config.on_nonfinite=ignore"], "on_nonfinite is 'ignore'"),
        (["--config.keep=0"], "config.keep is 0; it must be a whole number from 1 up"),
        (["--config.steps=9", "more.jsonl"], "'more.jsonl' is no flag; write --NAME=VALUE"),
        (["--config.train.tfds=lm1b"], "give one of them and leave the others empty"),
        (["--config.optimizer.warmup_steps=30"], "warm-up takes some of the steps, or 0"),
        (["--config.model.attention=foo"], "attention is 'foo'"),
        (["--config.mesh.data=3"], "does not fit 1 devices"),
    ],
)
def test_a_wrong_configuration_gets_a_sentence(text, tmp_path, flags, sentence):
    code, output = run(text, tmp_path, *flags)
    assert code != 0
    assert sentence in output
