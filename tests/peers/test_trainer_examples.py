"""The examples for other trainers, where these are installed: each runs, stops, and goes on.

pip install google-tunix torch      # and MaxText, as docs/migration.md says; Python 3.12
pytest -m slow tests/peers/test_trainer_examples.py
"""

import re
import sys

import pytest

from tests.processes import ROOT, call
from tests.runs.programs import variables

LIMIT = 1800  # seconds; most of them are spent in compiling


def run(name, text, *options, **more):
    """Runs an example as a user does; returns what it printed."""
    program = ROOT / f"examples/{name}.py"
    done = call(sys.executable, program, *options, limit=LIMIT, **variables(text, name), **more)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return done.stdout


def checkpoints(folder):
    """The steps of the checkpoints in a folder of orbax."""
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdecimal())


@pytest.mark.slow
def test_a_loop_of_torch_learns_and_goes_on_with_equal_losses(text, tmp_path):
    pytest.importorskip("torch")

    def losses(folder, steps):
        said = run("torch_loader", text, f"--workdir={tmp_path / folder}", f"--steps={steps}")
        return dict(re.findall(r"^step (\d+) .*loss (\S+)$", said, re.M))

    whole = losses("whole", 20)
    assert list(whole) == [f"{step}" for step in range(20)]
    assert float(whole["19"]) < 0.8 * float(whole["0"])
    first, then = losses("parts", 10), losses("parts", 20)
    assert {**first, **then} == whole
    assert next(iter(then)) == "10"


@pytest.mark.slow
def test_fine_tuning_with_tunix_goes_on_from_its_last_checkpoint(text, tmp_path):
    pytest.importorskip("tunix")
    for steps in (8, 12):
        options = [f"--workdir={tmp_path}", f"--steps={steps}", "--save-every=4"]
        assert "padding" in run("tunix_sft", text, *options)
        assert checkpoints(tmp_path / "checkpoints")[-1] == steps


@pytest.mark.slow
def test_preferences_with_tunix_train_to_their_last_step(text, tmp_path):
    pytest.importorskip("tunix")
    run("tunix_dpo", text, f"--workdir={tmp_path}")
    assert max(checkpoints(tmp_path)) == 40


@pytest.mark.slow
def test_rewards_with_tunix_are_those_of_each_update(text):
    pytest.importorskip("tunix")
    said = run("tunix_grpo", text, "--updates=3")
    updates = re.findall(r"^update (\d+) reward (-?[\d.]+)$", said, re.M)
    assert [int(number) for number, _ in updates] == [0, 1, 2]


@pytest.mark.slow
def test_maxtext_trains_on_packed_batches(text, tmp_path):
    pytest.importorskip("maxtext")
    options = [f"base_output_directory={tmp_path}", "run_name=first", "steps=4"]
    run("maxtext_pretrain", text, *options)
    assert checkpoints(tmp_path / "first/checkpoints")[-1] == 3
