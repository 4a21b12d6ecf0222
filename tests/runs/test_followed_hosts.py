"""The training program on corpora that grow, on several hosts."""

import re
import shutil

import numpy as np
import pytest

from pipeline import Writer, tokenizers
from tests.runs.programs import start_hosts
from tests.runs.runs import audited, steps

WRITTEN = "corpus/sources/written"


def write(directory, last, *, finish=False):
    """Writes examples up to a number after those that are there, in parts of 20."""
    with Writer(directory, tokenizer=tokenizers.Bytes(begin=True, end=True)) as writer:
        for number in range(writer.cursor or 0, last):
            rng = np.random.default_rng(number)
            writer.append(rng.integers(3, 99, rng.integers(2, 120)))
            if number % 20 == 19:
                writer.seal(cursor=number + 1)
        if finish:
            writer.finish()


@pytest.mark.slow
def test_a_mixture_grows_on_two_hosts_then_one_then_two(text, tmp_path):
    live, later = tmp_path / "live", tmp_path / "later"

    def start(workdir, count, *flags):
        flags = ["--config.steps=60", *flags]
        return start_hosts(text, workdir, count, *flags, config="followed_config.py")

    saved = 0
    for number, count in ((140, 2), (240, 1), (340, 2)):
        write(live / WRITTEN, number)
        group = start(live, count, "--config.sources.written.wait_seconds=2.0")
        outputs = group.end_with(2)
        (said,) = {re.search("^train.py: .*$", each, re.M)[0] for each in outputs}
        assert "no part was added to" in said
        assert ("process 0: " in said) == (count > 1)
        assert (f"resumed: step {saved} " in outputs[0]) == (saved > 0)
        last = steps(live)[-1]["step"]
        assert saved <= last < 59
        saved = (last + 1) // 6 * 6
    write(live / WRITTEN, 380, finish=True)
    shutil.copytree(live / WRITTEN, later / WRITTEN)
    for workdir in (live, later):
        start(workdir, 2 if workdir == live else 1).end_with(0)
        audited(workdir)
    ours, theirs = steps(live), steps(later)
    assert [line["step"] for line in ours] == list(range(60))
    assert [line["batch"] for line in ours] == [line["batch"] for line in theirs]
    np.testing.assert_allclose(*([line["loss"] for line in each] for each in (ours, theirs)), 1e-5)
