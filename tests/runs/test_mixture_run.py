"""A mixture as a user has it: a config, the commands that look at it, and a run."""

import json
import re

import pytest

from pipeline.cli.commands import main
from tests.processes import ROOT
from tests.runs.runs import audited, run, segment_losses, steps, summary, tiny

CONFIG = ROOT / "tests/runs/mixture_config.py"


def test_report_check_and_show_take_the_config_of_a_mixture(text, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TINY_TEXT", str(text))
    given = [str(CONFIG), "--workdir", str(tmp_path)]
    assert main(["report", *given, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert re.search(r"^first +0.75  7[3-7]\.", figures["plan"]["printed"], re.MULTILINE)
    assert main(["check", *given]) == 0
    said = capsys.readouterr().out
    assert all(f"epoch 0 of {name}: " in said for name in ("first", "second"))
    assert main(["show", *given, "--step", "3"]) == 0
    assert "step 3" in capsys.readouterr().out
    assert main(["report", *given]) == 0
    assert re.search(r"^first +0.75  7[3-7]\.", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.slow
def test_a_run_goes_on_under_other_weights_when_a_phase_says_so(
    text, tmp_path, monkeypatch, capsys
):
    def of(**fields):
        return tiny(text, "mixture_config", **fields)

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
