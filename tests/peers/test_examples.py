"""The examples, each run as a user runs it, killed, and run again."""

import itertools
import os
import re
import runpy
import shutil
import signal
import sys

import jax
import numpy as np
import pytest

import pipeline
from tests.processes import ROOT, call
from tests.runs.programs import variables

# Runs a program until it prints a step; then waits for a checkpoint and kills itself.
KILLER = """
import builtins, os, pathlib, runpy, signal, sys, time

_, last, checkpoint, *sys.argv = sys.argv
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

STEP = re.compile(r"^step (\d+) (?:shape (\(.*\)) )?loss (\S+)$", re.M)
COMPILE = re.compile(r"Compiling jit\((\w+)\) with global shapes and types (.*)")


# How many shapes each step of an example is compiled for.
EXAMPLES = {
    "linen": {"train_step": 2},
    "nnx": {"train_step": 2},
    "dpo": {"train_step": 1},
    "lm1b": {"train_step": 1, "eval_step": 1},
}


def run_example(name, folder, text, *, killed=False, devices=4):
    """To its end, or to step 17: losses and shapes of its steps, and its output."""
    options = [17 if killed else -1, folder / "run/checkpoints/10", ROOT / f"examples/{name}.py"]
    if name == "lm1b":
        options += ["--num-train-steps=40", f"--fsdp={min(devices, 2)}"]
    several = os.environ["XLA_FLAGS"].replace("device_count=4", f"device_count={devices}")
    own = {"XLA_FLAGS": several, "NPROC": os.environ["NPROC"], "JAX_LOG_COMPILES": "1"}
    own |= variables(text, "examples")
    command = [sys.executable, "-c", KILLER, *options, f"--workdir={folder}/run"]
    done = call(*command, cwd=folder, **own)
    expected = -signal.SIGKILL if killed else 0
    assert done.returncode == expected, done.stdout[-3000:] + done.stderr[-6000:]
    steps = STEP.findall(done.stdout)
    losses = {int(step): float(loss) for step, _, loss in steps}
    assert len(losses) == len(steps)
    return losses, {shape for _, shape, _ in steps}, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_learns_is_killed_and_goes_on_also_on_fewer_devices(name, text, tmp_path):
    (tmp_path / "4").mkdir()
    before, _, said = run_example(name, tmp_path / "4", text, killed=True)
    assert list(before) == list(range(18))
    again = range(10, 18)
    shutil.copytree(tmp_path / "4", tmp_path / "fewer")
    after, shapes, said_again = run_example(name, tmp_path / "4", text)
    assert list(after) == list(range(10, 40))
    assert [after[step] for step in again] == [before[step] for step in again]
    assert sum(after[step] for step in range(30, 40)) / 10 < 0.7 * before[0]
    assert len(shapes) == EXAMPLES[name]["train_step"]
    for output, (step, number) in itertools.product((said, said_again), EXAMPLES[name].items()):
        compiled = [shapes for each, shapes in COMPILE.findall(output) if each == step]
        assert len({*compiled}) == len(compiled) == number  # each shape once
    if name == "dpo":
        assert before[0] == pytest.approx(np.log(2))  # the model is its own reference
        stored = [tmp_path / f"{folder}/run/reference/scores.arrow" for folder in ("4", "fewer")]
        assert len({file.stat().st_mtime_ns for file in stored}) == 1  # and is computed once
        assert float(re.search(r"^held out: .* accuracy (\S+)$", said_again, re.M)[1]) > 0.9
    # The parameters of lm1b are on one device then.
    fewer = 1 if name == "lm1b" else 2
    there, _, _ = run_example(name, tmp_path / "fewer", text, devices=fewer)
    assert list(there) == list(after)
    np.testing.assert_allclose(
        [there[step] for step in again], [before[step] for step in again], rtol=1e-4
    )


def test_the_loss_of_pairs_in_a_row_is_that_of_their_paper_from_answers_alone():
    dpo, rng = runpy.run_path(ROOT / "examples/dpo.py"), np.random.default_rng(0)
    prompts, *answers = [[rng.integers(1, 99, n) for n in rng.integers(2, 9, 5)] for _ in range(3)]
    reference = rng.normal(-30, 5, (5, 2)).astype(np.float32)
    columns = {"tokens": [*zip(prompts, zip(*answers, strict=True), strict=True)]}
    columns[dpo["REFERENCE"]] = [*reference]
    features = {dpo["REFERENCE"]: pipeline.Feature("continuation")}
    examples = pipeline.Examples.from_groups(columns, features=features)
    ((planned, batch),) = pipeline.pack(examples, [pipeline.Bucket(2, 64)], max_segments=4)
    assert np.ptp(np.bincount(planned.segments[:, 0], minlength=2)) > 0  # unlike rows
    params = jax.jit(dpo["Model"]().init)(jax.random.key(0), batch)["params"]

    # Each answer after its prompt, in a row of its own.
    pairs = [
        (prompt, answer) for side in answers for prompt, answer in zip(prompts, side, strict=True)
    ]
    rows = np.zeros((3, len(pairs), 18), np.int32)
    for row, (prompt, answer) in enumerate(pairs):
        size = len(prompt) + len(answer)
        rows[0, row, :size], rows[1, row, : size - 1] = [*prompt, *answer], 1
        rows[2, row, :size] = range(size)
    tokens, ids, positions = rows
    alone = {"inputs": tokens, "inputs_segment_ids": ids, "inputs_positions": positions}
    logits = np.float64(jax.jit(dpo["Model"]().apply)({"params": params}, alone))
    logp = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    found = np.take_along_axis(logp[:, :-1], tokens[:, 1:, None], -1)[..., 0]
    begins = [(len(prompt) - 1, len(prompt) + len(answer) - 1) for prompt, answer in pairs]
    sums = [each[slice(*at)].sum() for each, at in zip(found, begins, strict=True)]
    good, bad = np.reshape(sums, (2, 5))
    margins = 0.1 * ((good - reference[:, 0]) - (bad - reference[:, 1]))
    expected = [np.log(1 + np.exp(-margins)).sum(), margins.sum(), (margins > 0).sum(), 5]
    np.testing.assert_allclose(jax.jit(dpo["sum_over_pairs"])(params, batch), expected, rtol=1e-4)


@pytest.mark.slow
def test_rollouts_are_rewarded_more_and_nothing_is_compiled_after_their_first_update():
    own = {"XLA_FLAGS": os.environ["XLA_FLAGS"], "NPROC": os.environ["NPROC"]}
    program = ROOT / "examples/rollouts.py"
    more = {"JAX_LOG_COMPILES": "1", "PYTHONWARNINGS": "ignore"} | own
    done = call("sh", "-c", '"$@" 2>&1', "sh", sys.executable, program, "--updates=40", **more)
    assert done.returncode == 0, done.stdout[-6000:]
    lines = done.stdout.splitlines()
    rewards = [float(each) for each in re.findall(r"^update \d+ reward (\S+) ", done.stdout, re.M)]
    assert len(rewards) == 40
    assert rewards[0] < 0.2 < 0.8 < np.mean(rewards[-5:])
    first = next(at for at, line in enumerate(lines) if line.startswith("update 0 "))
    compiled = COMPILE.findall("\n".join(lines[:first]))
    assert [name for name, _ in compiled].count("add_gradients") == 1  # for its shape
    assert not COMPILE.search("\n".join(lines[first:]))


def test_examples_stand_alone():
    for path in (ROOT / "examples").glob("*.py"):
        names = re.findall(r"^(?:from|import) (\w+)", path.read_text(), re.M)
        others = {
            other.stem for folder in ("examples", "tests") for other in (ROOT / folder).glob("*.py")
        }
        assert not {*names} & {*others, "models", "tests", "examples", "train"}, path
