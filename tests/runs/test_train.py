"""The training program in processes of its own: as a user runs it, and stopped."""

import os
import re
import signal
import sys
import time

import numpy as np
import pytest

from tests.pages import SNIPPETS
from tests.processes import COMPILE_QUICKLY, ROOT, call
from tests.runs.programs import CONFIG, SLOW, start, variables, wait_for_step
from tests.runs.runs import assert_same_losses, lines, segment_losses, steps, summary


@pytest.fixture(scope="module")
def whole(text, once):
    """The work directory of a whole run, with its output in a file."""

    def make(workdir):
        (output,) = start(text, workdir).end_with(0)
        (workdir / "output").write_text(output)

    return once("uninterrupted", make)


def test_a_run_learns_and_compiles_each_bucket_once_and_nothing_after_the_start(whole):
    values, output, log = summary(whole), (whole / "output").read_text(), steps(whole)
    assert values["eval_loss_last"] < values["eval_loss_first"]
    assert values["steps"] == 30
    assert [line["step"] for line in log] == list(range(30))
    assert {line["epoch"] for line in log} >= {0, 1}
    assert sum(line["tokens"] for line in log) == values["tokens"]
    evaluations = [line for line in lines(whole) if "eval_loss" in line]
    assert [line["step"] for line in evaluations] == [0, 10, 20, 30]
    assert evaluations[-1]["bits_per_byte"] == values["bits_per_byte"]
    assert values["compiles_after_start"] == values["other_compiles"] == 0, output
    buckets = re.findall(r"train_step (\w+): compiled in", output)
    assert len({*buckets}) == len(buckets) == 2
    assert "padding" in output
    segment_losses(whole)
    assert list((whole / "tensorboard").iterdir())


@pytest.mark.slow
def test_a_run_ends_with_commands_that_can_be_pasted(whole, text, tmp_path):
    output = (whole / "output").read_text()
    assert f"the log and the checkpoints are in {whole}: metrics.jsonl" in output
    commands = [line.strip() for line in output.splitlines() if line.startswith("  ")][-3:]
    for command, said in zip(
        commands, ("losses of the run", "usual", "losses are in"), strict=True
    ):
        here = command.replace("report.html", f"{tmp_path}/report.html")
        ended = call("sh", "-c", here, **variables(text))  # where the run was started
        assert ended.returncode == 0, ended.stderr[-3000:]
        assert said in ended.stdout
    assert "<h2>The run</h2>" in (tmp_path / "report.html").read_text()
    assert (whole / "scores").is_dir()


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_a_signal_saves_leaves_with_its_status_and_the_next_start_continues_bit_for_bit(
    whole, text, tmp_path, number
):
    group = start(text, tmp_path, SLOW)
    wait_for_step(group, tmp_path, 7)
    os.kill(group.processes[0].pid, number)
    (output,) = group.end_with(128 + number)  # so that `train.py && next` ends here
    assert f"{number.name}: saved step" in output
    saved = lines(tmp_path)
    assert len(saved) > 7
    assert saved == lines(whole)[: len(saved)]
    kept = set((text.parent / "programs").glob("*_step-*"))
    for name in ("plans.json", "losses/000000001-000000004-0a.arrow"):  # as if killed later
        file = tmp_path / name
        (file.parent / f".{file.name}.{'0' * 32}.tmp").write_text("{")
    (output,) = start(text, tmp_path, config=()).end_with(0)  # it knows its config
    assert kept
    assert kept == set((text.parent / "programs").glob("*_step-*"))  # nothing is compiled anew
    assert "resumed: step" in output
    assert not [*tmp_path.rglob(".*.tmp")]
    for read in (lines, summary, segment_losses):
        np.testing.assert_equal(read(tmp_path), read(whole))


@pytest.mark.slow
def test_an_interrupt_before_the_first_step_ends_the_run_at_once(text, tmp_path):
    group = start(text, tmp_path)
    while group.processes[0].is_alive() and not (tmp_path / "run_config.json").exists():
        time.sleep(0.02)
    os.kill(group.processes[0].pid, signal.SIGINT)
    (output,) = group.end_with(-signal.SIGINT)
    assert "Traceback" not in output
    assert not lines(tmp_path)


@pytest.mark.slow
def test_a_copy_trains_another_model_and_goes_on(text, tmp_path):
    """With those of a page; only what builds the model and the optimizer changes."""
    whole = (ROOT / "train.py").read_text()
    (builders,) = (each.content for each in SNIPPETS if "def make_model(" in each.content)
    before, rest = whole.split("def make_model(", 1)
    _, after = rest.split("# ---- ", 1)
    copy = tmp_path / "linen_train.py"
    copy.write_text(before + builders + "# ---- " + after)
    for number in (6, 10):
        command = [sys.executable, copy, CONFIG, "--config.keep=1"]
        command += [f"--workdir={tmp_path / 'run'}", f"--config.steps={number}"]
        command += ["--config.batches.tokens_per_batch=512"]
        done = call(*command, **variables(text))
        assert done.returncode == 0, done.stdout + done.stderr
    assert "resumed: step 6 of 10" in done.stdout
    assert [line["step"] for line in steps(tmp_path / "run")] == list(range(10))
    values = summary(tmp_path / "run")
    assert values["eval_loss_last"] < values["eval_loss_first"]
    assert values["compiles_after_start"] == 0


@pytest.mark.slow
def test_a_run_with_a_mesh_for_each_shape_is_killed_and_goes_on_with_fewer_devices(text, tmp_path):
    """The steps after its last save are done again, on half of the devices, and are the same."""
    shapes = {"tokens_per_batch": 512, "max_buckets": 2, "length_multiple": 32}
    shapes |= {"max_length": 256, "packing": "none"}
    fields = {f"batches.{name}": value for name, value in shapes.items()}
    fields |= {"dynamic_context": True, "mesh.data": 1, "context_order": "zigzag", "steps": 12}
    flags = [f"--config.{name}={value}" for name, value in fields.items()]

    def run(workdir, devices, program="train.py", **more):
        simulated = f"--xla_force_host_platform_device_count={devices} {COMPILE_QUICKLY}"
        where = [f"--workdir={tmp_path / workdir}", f"--config.mesh.fsdp={devices}"]
        more |= variables(text) | {"XLA_FLAGS": simulated, "NPROC": "16"}
        done = call(sys.executable, program, CONFIG, *where, *flags, **more)
        return done.returncode, done.stdout + done.stderr

    ended, output = run("whole", 4)
    assert ended == 0, output
    killed, _ = run("killed", 4, "tests/runs/killed_train.py", KILLED="8")
    assert killed == -signal.SIGKILL
    ended, output = run("killed", 2)
    assert ended == 0, output
    assert "resumed: step 5 of 12" in output
    assert_same_losses(tmp_path / "killed", tmp_path / "whole", rtol=1e-4)
    buckets = {line["bucket"] for line in steps(tmp_path / "killed")}
    assert len(buckets) == 2
    assert min(int(bucket.partition("x")[0]) for bucket in buckets) < 4  # some rows are divided
