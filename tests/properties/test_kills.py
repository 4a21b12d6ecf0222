"""A few kills; `python -m tests.properties kills` makes hundreds."""

import sys

import pytest

from tests.processes import call

# In a process of its own, which has no backend of JAX and can fork.
PROGRAM = """
import pathlib, sys

from tests.properties.kills import Kills, Preparation, Training
from tests.properties.kills import prepare_environment, write_documents

folder = pathlib.Path(sys.argv[1])
write_documents(folder / "documents.jsonl")
prepare_environment(folder)
for number, (trial, count) in enumerate({
    Preparation(folder / "documents.jsonl"): 5,
    Preparation(folder / "documents.jsonl", "index"): 3,
    Preparation(folder / "documents.jsonl", workers=2): 1,
    Training(folder / "documents.jsonl"): 2,
}.items()):
    kills = Kills(trial, folder / str(number))
    kills.run(count)
    print(trial.name, sum(kills.kills.values()), *kills.found, flush=True)
"""


@pytest.mark.slow
def test_what_is_killed_at_any_instant_ends_as_if_it_had_not_been(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(f"if __name__ == '__main__':\n    exec({PROGRAM!r})\n")
    seen = call(sys.executable, script, tmp_path, limit=None)
    due = ["prepare 5", "index 3", "prepare, 2 workers 1", "train.py 2"]
    assert seen.stdout.splitlines() == due, seen.stderr


PROGRAM_OF_A_STREAM = """
import os, pathlib, sys

from pipeline.corpus import Corpus, Writer  # once, and not in each child
from tests.fs import object_servers
from tests.properties.kills import Kills, Stream

folder = pathlib.Path(sys.argv[1])
kills = Kills(Stream(30), folder / "disk")
kills.run_to_each_change()
print(kills.changes == sum(kills.kills.values()), *kills.found, flush=True)
(folder / "server").mkdir()
with object_servers.s3(folder / "server") as port:
    os.environ |= object_servers.s3_environment(port)
    kills = Kills(Stream(30, folder / "server" / object_servers.BUCKET), folder / "bucket")
    kills.run(8)
    print(sum(kills.kills.values()), *kills.found, flush=True)
"""

PROGRAM_IN_A_BUCKET = """
import os, pathlib, sys

from tests.fs import object_servers
from tests.properties.kills import Kills, Training, prepare_environment, write_documents

folder = pathlib.Path(sys.argv[1])
write_documents(folder / "documents.jsonl")
prepare_environment(folder)
(folder / "server").mkdir()
with object_servers.s3(folder / "server") as port:
    os.environ |= object_servers.s3_environment(port)
    bucket = folder / "server" / object_servers.BUCKET
    kills = Kills(Training(folder / "documents.jsonl", bucket=bucket), folder / "0")
    kills.run(1)
    print(sum(kills.kills.values()), *kills.found, flush=True)
"""


@pytest.mark.slow
def test_a_writer_that_is_killed_loses_nothing_it_acknowledged_and_seals_nothing_twice(tmp_path):
    seen = call(sys.executable, "-c", PROGRAM_OF_A_STREAM, tmp_path, limit=None)
    assert seen.stdout.splitlines() == ["True", "8"], seen.stderr


@pytest.mark.slow
def test_a_run_in_a_bucket_that_is_killed_leaves_its_siblings_and_ends_as_if_it_had_not_been(
    tmp_path,
):
    seen = call(sys.executable, "-c", PROGRAM_IN_A_BUCKET, tmp_path, limit=None)
    assert seen.stdout.splitlines() == ["1"], seen.stderr
