"""The examples, each run as a user runs it, killed, and run again."""

import os
import re
import signal
import subprocess
import sys

import pytest

from tests.processes import ROOT, TIME_LIMIT, environment

# Runs a program until it prints a step, waits for a checkpoint, and kills itself. Modules of
# BLOCKED cannot be imported.
KILLER = """
import builtins, os, pathlib, runpy, signal, sys, time

_, last, checkpoint, blocked, *sys.argv = sys.argv
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
runpy.run_path(sys.argv[0], run_name="__main__")
"""
STEP = re.compile(r"^step (\d+) shape (\(.*\)) loss (\S+)$", re.M)
COMPILE = re.compile(r"Compiling jit\((\w+)\) with global shapes and types (.*)")


def run_example(name, workdir, arguments, *, kill_at=-1, checkpoint="", blocked=""):
    """Runs one to its end, or to a step; returns the losses and shapes of its steps, and stderr."""
    program = str(ROOT / "examples" / f"{name}.py")
    done = subprocess.run(
        [sys.executable, "-c", KILLER, str(kill_at), str(workdir / checkpoint), blocked, program]
        + [f"--workdir={workdir}", *arguments],
        cwd=workdir.parent,
        env=environment(
            XLA_FLAGS=os.environ["XLA_FLAGS"], NPROC=os.environ["NPROC"], JAX_LOG_COMPILES="1"
        ),
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT,
    )
    expected = 0 if kill_at < 0 else -signal.SIGKILL
    assert done.returncode == expected, done.stdout + done.stderr[-6000:]
    steps = STEP.findall(done.stdout)
    losses = {int(step): float(loss) for step, _, loss in steps}
    assert len(losses) == len(steps)
    return losses, {shape for _, _, shape in steps}, done.stderr


def check_example(name, workdir, *arguments, checkpoint="checkpoints/10", blocked=""):
    """An example trains, is killed, and goes on with the same losses; returns stderr of both."""
    options = {"checkpoint": checkpoint, "blocked": blocked}
    before, _, said = run_example(name, workdir, arguments, kill_at=17, **options)
    assert list(before) == list(range(18))
    after, shapes, said_again = run_example(name, workdir, arguments, blocked=blocked)
    first = min(after)
    assert first == 10  # the last checkpoint
    assert list(after) == list(range(first, 40))
    assert [after[step] for step in range(first, 18)] == [before[step] for step in range(first, 18)]
    assert sum(after[step] for step in range(30, 40)) / 10 < 0.7 * before[0]
    assert len(shapes) == 2
    return said, said_again


def check_compilations(said, step, number):
    """Each shape of a step is compiled once."""
    shapes = [shapes for name, shapes in COMPILE.findall(said) if name == step]
    assert len({*shapes}) == len(shapes) == number


@pytest.mark.slow
@pytest.mark.parametrize("name", ["linen", "nnx"])
def test_a_flax_loop_learns_is_killed_and_goes_on(name, tmp_path):
    for said in check_example(name, tmp_path / "run"):
        check_compilations(said, "train_step", 2)


@pytest.mark.slow
def test_the_loop_of_lm1b_shards_parameters_and_evaluates(tmp_path):
    for said in check_example("lm1b", tmp_path / "run", "--num-train-steps=40", "--fsdp=2"):
        check_compilations(said, "train_step", 2)
        check_compilations(said, "eval_step", 2)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_a_torch_loop_needs_no_jax(workers, tmp_path):
    pytest.importorskip("torch")
    options = {"checkpoint": "checkpoint.pt", "blocked": "jax grain"}
    check_example("torch_loader", tmp_path / "run", f"--workers={workers}", **options)


def test_examples_stand_alone():
    for path in (ROOT / "examples").glob("*.py"):
        names = re.findall(r"^(?:from|import) (\w+)", path.read_text(), re.M)
        others = {
            other.stem for folder in ("examples", "tests") for other in (ROOT / folder).glob("*.py")
        }
        assert not {*names} & {*others, "models", "tests", "examples", "train"}, path
