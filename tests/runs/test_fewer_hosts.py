"""Eight rows a batch on four hosts, and then three are left."""

import re

import pytest

from tests.runs.programs import run_hosts, start_hosts
from tests.runs.runs import audit, steps

EIGHT_ROWS = (
    "--config.batches.row_multiple=4",
    "--config.batches.tokens_per_batch=1024",
    "--config.batches.max_buckets=1",
    "--config.model.num_layers=1",
    "--config.model.width=32",
    "--config.model.attention=dense",
)
THREE = '--change={"row_multiple": 3}'


@pytest.mark.slow
def test_three_of_four_hosts_go_on_where_three_do_not_divide_the_rows(text, tmp_path):
    run_hosts(text, tmp_path, 4, *EIGHT_ROWS, "--config.steps=5")
    more = (*EIGHT_ROWS, "--config.steps=12")
    group = start_hosts(text, tmp_path, 3, *more)
    assert all(code != 0 for code in group.wait())
    said = group.outputs()[0]
    assert "a bucket of 8 rows × 128 does not divide over" in said
    assert "row_multiple=3" in said
    said = run_hosts(text, tmp_path, 3, *more, THREE)[0]
    assert "changed from step 5 on: row_multiple=3" in said
    log = steps(tmp_path)
    assert [line["step"] for line in log] == list(range(12))
    assert [line["bucket"] for line in log] == ["8x128"] * 5 + ["6x128"] * 7
    code, said = audit(tmp_path)
    assert code == 0, said
    assert re.search(r"epoch 0: [\d,]+ positions, each once$", said, re.M)
