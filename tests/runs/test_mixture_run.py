"""A mixture as a user has it: a config, the commands that look at it, and a run."""

import pytest

from pipeline.cli.commands import main
from tests.runs.runs import audited, run, segment_losses, steps, summary, tiny


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
