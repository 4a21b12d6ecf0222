"""Whatever stalls or raises, wherever, and whatever ends the loop: the process has ended soon.

`ENDINGS=300` draws as many cases; see tests/README.md.
"""

import itertools
import json
import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.processes import ROOT, environment

STALLS = ["sleep", "wait", "read", "busy"]
RAISES = ["ValueError", "OSError", "TimeoutError", "SystemExit", "KeyboardInterrupt"]
RAISES += ["StopIteration", "GeneratorExit", "CancelledError"]
WHERE = ["source", "feature", "transform", "Grain's map", "stream", "score", "pack"]
ENDS = ["close", "with", "break", "ctrl-c", "exception", "end of program"]
CASES = [*itertools.product(STALLS + RAISES, WHERE, ENDS)]
# A function that raises it ends any data set of Grain's.
CASES = [each for each in CASES if each[:2] != ("StopIteration", "stream")]
SECONDS = 2.0  # from the moment that it should end


def watch(cases):
    command = [sys.executable, "-m", "tests.loading.endings"]
    lines = [json.dumps(dict(zip(("what", "where", "end"), case, strict=True))) for case in cases]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        input="".join(f"{line}\n" for line in lines),
        check=False,
    )
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(found) == len(cases), done.stderr
    return [*zip(cases, found, strict=True)]


@pytest.mark.slow
def test_every_loop_ends_and_every_error_arrives():
    drawn = random.Random(0).sample(CASES, min(int(os.environ.get("ENDINGS", "40")), len(CASES)))
    with ThreadPoolExecutor() as pool:
        found = [*itertools.chain(*pool.map(watch, (drawn[::2], drawn[1::2])))]
    wrong = [case for case in found if case[1]["seconds"] > SECONDS]
    for (what, where, end), ended in found:
        said = " ".join(ended["said"])
        arrived = f"error {what}" in said or (f"error InvalidState {what}" in said)
        if (what in RAISES and not arrived) or "nothing happened" in said:
            wrong.append(((what, where, end), ended))
    assert not wrong, "\n".join(map(str, wrong))
