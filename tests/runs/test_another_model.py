"""A copy of train.py with the model and the optimizer of a page: only what builds them changes."""

import sys

from tests.pages import SNIPPETS
from tests.processes import ROOT, call
from tests.runs.runs import steps, summary


def test_a_copy_trains_another_model_and_goes_on(text, tmp_path):
    whole = (ROOT / "train.py").read_text()
    (builders,) = (each.content for each in SNIPPETS if "def make_model(" in each.content)
    before, rest = whole.split("def make_model(", 1)
    _, after = rest.split("# ---- ", 1)
    copy = tmp_path / "linen_train.py"
    copy.write_text(before + builders + "# ---- " + after)
    for number in (6, 10):
        command = [sys.executable, copy, "--config=tests/runs/tiny_config.py", "--config.keep=1"]
        command += [f"--workdir={tmp_path / 'run'}", f"--config.steps={number}"]
        command += ["--config.batches.tokens_per_batch=512"]
        done = call(*command, TINY_TEXT=str(text))
        assert done.returncode == 0, done.stdout + done.stderr
    assert "resumed: step 6 of 10" in done.stdout
    assert [line["step"] for line in steps(tmp_path / "run")] == list(range(10))
    values = summary(tmp_path / "run")
    assert values["eval_loss_last"] < values["eval_loss_first"]
    assert values["compiles_after_start"] == 0
