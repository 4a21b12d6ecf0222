"""The network of a config: its attention, which is said where a run starts."""

import pytest

from models import attention
from tests.runs.runs import assert_same_losses, run, tiny


@pytest.mark.slow
def test_a_run_says_its_attention_once_and_replaces_what_this_machine_lacks(text, tmp_path):
    attention._say.cache_clear()
    options = {"steps": 4, "eval_every": 4, "checkpoint_every": 4}
    said = run(tiny(text, model__attention="auto", **options), tmp_path / "auto")
    assert said.count("attention: 'blocked', because on CPU") == 1
    said = run(tiny(text, model__attention="cudnn_packed", **options), tmp_path / "packed")
    told = "'cudnn_packed' is not used: it needs a GPU of NVIDIA from Hopper on, and this is cpu"
    assert said.count(f"attention: {told}; instead 'blocked'") == 1
    assert_same_losses(tmp_path / "auto", tmp_path / "packed", rtol=0)
