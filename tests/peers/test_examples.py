"""The examples, each run as a user runs it, killed, and run again."""

import os
import re
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest

import pipeline
from tests.processes import ROOT, TIME_LIMIT, environment

# Runs code, then a program until it prints a step; then waits for a checkpoint and kills itself.
# Modules of BLOCKED cannot be imported.
KILLER = """
import builtins, os, pathlib, runpy, signal, sys, time

_, last, checkpoint, blocked, code, *sys.argv = sys.argv
sys.modules.update(dict.fromkeys(blocked.split()))
show = print

def show_or_die(*words, **options):
    show(*words, **options, flush=True)
    if words[:2] == ("step", int(last)):
        while not pathlib.Path(checkpoint).exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)

builtins.print = show_or_die
sys.path[0] = os.path.dirname(sys.argv[0])
exec(code)
runpy.run_path(sys.argv[0], run_name="__main__")
"""
STEP = re.compile(r"^step (\d+) (?:shape (\(.*\)) )?loss (\S+)$", re.M)
COMPILE = re.compile(r"Compiling jit\((\w+)\) with global shapes and types (.*)")

# MaxText has no hook for losses.
PRINT_LOSSES = """
from maxtext.common.metric_logger import MetricLogger

write = MetricLogger.write_metrics

def write_and_print(self, metrics, step, metric_type="train"):
    write(self, metrics, step, metric_type)
    if metric_type == "train":
        print("step", step, "loss", float(metrics["scalar"]["learning/loss"]))
    if metric_type == "eval":
        print("evaluated", float(metrics["scalar"]["eval/total_weights"]))

MetricLogger.write_metrics = write_and_print
"""

# Tunix shows losses in a progress bar, rounded.
PRINT_TUNIX_LOSSES = """
from tunix.sft.peft_trainer import PeftTrainer

write = PeftTrainer._write_metrics

def write_and_print(self, metrics):
    write(self, metrics)
    print("step", metrics.step - 1, "loss", float(metrics.loss))

PeftTrainer._write_metrics = write_and_print
"""


def run_example(
    name, arguments, folder, *, kill_at=-1, checkpoint="", blocked="", code="", devices=4
):
    """Runs one to its end, or to a step; returns losses and shapes of its steps, and its output."""
    options = [str(kill_at), str(checkpoint), blocked, code, str(ROOT / f"examples/{name}.py")]
    done = subprocess.run(
        [sys.executable, "-c", KILLER, *options, *arguments],
        cwd=folder,
        env=environment(
            XLA_FLAGS=os.environ["XLA_FLAGS"].replace("device_count=4", f"device_count={devices}"),
            NPROC=os.environ["NPROC"],
            JAX_LOG_COMPILES="1",
        ),
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT,
    )
    expected = 0 if kill_at < 0 else -signal.SIGKILL
    assert done.returncode == expected, done.stdout[-3000:] + done.stderr[-6000:]
    steps = STEP.findall(done.stdout)
    losses = {int(step): float(loss) for step, _, loss in steps}
    assert len(losses) == len(steps)
    return losses, {shape for _, shape, _ in steps}, done.stdout + done.stderr


def check_example(name, arguments, folder, checkpoint="run/checkpoints/10", first=10, **options):
    """An example learns, is killed, and goes on with step `first` as if it had not been.

    Returns:
        The shapes of its batches, and what each of both processes wrote.
    """
    before, _, said = run_example(
        name, arguments, folder, kill_at=17, checkpoint=folder / checkpoint, **options
    )
    assert list(before) == list(range(18))
    after, shapes, said_again = run_example(name, arguments, folder, **options)
    assert list(after) == list(range(first, 40))
    again = range(first, 18)
    assert [after[step] for step in again] == [before[step] for step in again]
    assert sum(after[step] for step in range(30, 40)) / 10 < 0.7 * before[0]
    return shapes, (said, said_again)


def check_compilations(said, step, number):
    """Each shape of a step is compiled once."""
    shapes = [shapes for name, shapes in COMPILE.findall(said) if name == step]
    assert len({*shapes}) == len(shapes) == number


@pytest.mark.slow
@pytest.mark.parametrize("name", ["linen", "nnx"])
def test_a_flax_loop_learns_is_killed_and_goes_on(name, tmp_path):
    shapes, outputs = check_example(name, [f"--workdir={tmp_path}/run"], tmp_path)
    assert len(shapes) == 2
    for said in outputs:
        check_compilations(said, "train_step", 2)


@pytest.mark.slow
def test_the_loop_of_lm1b_shards_parameters_and_evaluates(tmp_path):
    arguments = [f"--workdir={tmp_path}/run", "--num-train-steps=40", "--fsdp=2"]
    shapes, outputs = check_example("lm1b", arguments, tmp_path)
    assert len(shapes) == 2
    for said in outputs:
        check_compilations(said, "train_step", 2)
        check_compilations(said, "eval_step", 1)  # the held-out rows have one shape


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_a_torch_loop_needs_no_jax(workers, tmp_path):
    pytest.importorskip("torch")
    arguments = [f"--workdir={tmp_path}/run", f"--workers={workers}"]
    shapes, _ = check_example(
        "torch_loader", arguments, tmp_path, "run/checkpoint.pt", blocked="jax"
    )
    assert len(shapes) == 2


@pytest.mark.slow
def test_tunix_trains_a_llama_with_lora_on_packed_rows(tmp_path):
    pytest.importorskip("tunix")
    arguments = [f"--workdir={tmp_path}/run"]
    _, outputs = check_example("tunix_sft", arguments, tmp_path, code=PRINT_TUNIX_LOSSES)
    for said in outputs:
        check_compilations(said, "_train_step", 3)


@pytest.mark.slow
def test_tunix_prefers_answers_in_three_shapes(tmp_path):
    pytest.importorskip("tunix")
    arguments = [f"--workdir={tmp_path}/run"]
    _, outputs = check_example("tunix_dpo", arguments, tmp_path, "run/10", code=PRINT_TUNIX_LOSSES)
    for said in outputs:
        check_compilations(said, "_train_step", 3)


@pytest.mark.slow
def test_maxtext_trains_its_own_model(tmp_path):
    pytest.importorskip("maxtext")
    arguments = [f"base_output_directory={tmp_path}", "run_name=run"]
    # MaxText names a checkpoint by the number of the step before it.
    _, outputs = check_example("maxtext_pretrain", arguments, tmp_path, first=11, code=PRINT_LOSSES)
    for said in outputs:
        check_compilations(said, "train_step", 2)
    held_out = pipeline.Corpus.open(tmp_path / "corpus/eval")
    assert f"evaluated {float(held_out.num_tokens)}\n" in outputs[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "library", "checkpoint", "first", "code"),
    [
        ("linen", "flax", "run/checkpoints/10", 10, ""),
        ("nnx", "flax", "run/checkpoints/10", 10, ""),
        ("lm1b", "flax", "run/checkpoints/10", 10, ""),
        ("tunix_sft", "tunix", "run/checkpoints/10", 10, PRINT_TUNIX_LOSSES),
        ("tunix_dpo", "tunix", "run/10", 10, PRINT_TUNIX_LOSSES),
        ("maxtext_pretrain", "maxtext", "run/checkpoints/10", 11, PRINT_LOSSES),
    ],
)
def test_a_run_of_two_devices_goes_on_with_one_and_with_four(
    name, library, checkpoint, first, code, tmp_path
):
    pytest.importorskip(library)

    def go_on(folder, devices, **options):
        arguments = [f"--workdir={folder}/run"]
        if name == "lm1b":  # parameters on one device or on two, whatever the checkpoint had
            arguments += ["--num-train-steps=40", f"--fsdp={min(devices, 2)}"]
        if name == "maxtext_pretrain":  # the rows of a batch are this for each device
            arguments = [f"base_output_directory={folder}", "run_name=run"]
            arguments += [f"per_device_batch_size={4 // devices}", "dtype=float32"]
        options |= {"code": code, "devices": devices}
        return run_example(name, arguments, folder, **options)[0]

    (tmp_path / "2").mkdir()
    before = go_on(tmp_path / "2", 2, kill_at=17, checkpoint=tmp_path / "2" / checkpoint)
    for devices in (1, 4):
        folder = shutil.copytree(tmp_path / "2", tmp_path / str(devices))
        after = go_on(folder, devices)
        assert list(after) == list(range(first, 40))
        again = range(first, 18)
        np.testing.assert_allclose(
            [after[step] for step in again], [before[step] for step in again], rtol=1e-4
        )


def test_examples_stand_alone():
    for path in (ROOT / "examples").glob("*.py"):
        names = re.findall(r"^(?:from|import) (\w+)", path.read_text(), re.M)
        others = {
            other.stem for folder in ("examples", "tests") for other in (ROOT / folder).glob("*.py")
        }
        assert not {*names} & {*others, "models", "tests", "examples", "train"}, path
