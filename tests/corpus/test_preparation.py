import contextlib
import itertools
import json
import os
import re
import signal
import sys
import textwrap
from pathlib import Path
from subprocess import PIPE, Popen
from types import SimpleNamespace

import pyarrow as pa
import pytest

from pipeline import Corpus, Writer, prepare
from pipeline.corpus import INPUTS, Job, engines, prepare_job, prepare_share
from pipeline.corpus.preparing import preparation, processes, work
from pipeline.corpus.stored.manifest import Manifest
from pipeline.fs.atomic import as_path, directory_lock
from pipeline.text import ragged
from pipeline.text import source as sizes
from pipeline.text.sources import Records, TextFiles
from pipeline.text.templates import Answer, Function
from pipeline.text.tokenizers import Bytes
from tests.corpus.files import contents, few_bytes, wait_for
from tests.processes import call, environment

LINES = [f"document {number} " + "abc " * (number * 7 % 23) for number in range(200)]

# Small parts and shards, so that little text makes many of both.
SMALL = {"TOKENS_PER_PART": 500, "LEAST": 1000, "BLOCK": 200}

# A program that prepares `text` into `directory` slowly: it notes each record that it reads.
PROGRAM = """
    import os, sys, time
    from pipeline.text import ragged
    from pipeline.corpus.preparing import preparation
    from pipeline.text import source as sizes
    from pipeline.text.sources import TextFiles
    from pipeline.text.tokenizers import Bytes

    text, directory, workers, delay = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])

    class Slow(TextFiles):
        def read(self, shard, start=None):
            for block in super().read(shard, start):
                time.sleep(delay * len(block.records) / 16)
                with open(text + ".log", "a") as log:
                    log.write("".join(f"{os.getpid()} {at}\\n" for _, at in block.places))
                yield block

    if __name__ == "__main__":
        ragged.TOKENS_PER_PART, sizes.LEAST, sizes.BLOCK = 500, 1000, 200
        source = Slow(text)
        source.ballast = bytes(1 << 20)  # more than a pipe holds
        corpus = preparation.prepare(source, Bytes(), directory, num_workers=workers)
        print(corpus.fingerprint)
"""


@pytest.fixture
def source(tmp_path):
    (tmp_path / "text.txt").write_text("\n".join(LINES))
    return TextFiles(tmp_path / "text.txt")


@pytest.fixture
def run(tmp_path, source):
    """Starts the program with these workers and this delay."""
    started = []
    (tmp_path / "program.py").write_text(textwrap.dedent(PROGRAM))

    def run(workers=0, delay=0.0):
        command = sys.executable, tmp_path / "program.py", source.files[0], tmp_path / "corpus"
        options = {"stdout": PIPE, "stderr": PIPE, "cwd": tmp_path, "env": environment()}
        started.append(Popen([*map(str, (*command, workers, delay))], text=True, **options))
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.communicate()


def log_of(source):
    lines = Path(f"{source.files[0]}.log").read_text().splitlines()
    return [tuple(map(int, line.split())) for line in lines]


def gone(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_the_corpus_is_the_same_for_any_number_of_workers(source, tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "count_cpus", lambda: 3)
    for workers in (0, None):
        prepare(source, Bytes(), tmp_path / f"{workers}", num_workers=workers, progress=False)
        assert contents(tmp_path / f"{workers}") == contents(tmp_path / "0")


def test_a_finished_corpus_is_opened_at_once(source, tmp_path, monkeypatch):
    first = prepare(source, Bytes(), tmp_path / "corpus", progress=False)
    monkeypatch.setattr(TextFiles, "read", None)
    # No lock, so a read-only place will do.
    monkeypatch.setattr(preparation, "directory_lock", None)
    (tmp_path / "corpus" / "shards").mkdir()  # as a kill leaves it, after the manifest was written
    (tmp_path / "corpus" / "shards" / "000000-00000.json").touch()
    late = tmp_path / "corpus" / f".part-000000-00000.arrow.{7:032x}.tmp"  # of a share killed later
    for _ in range(2):
        late.touch()
        again = prepare(TextFiles(source.files), Bytes(), tmp_path / "corpus")
        assert again.fingerprint == first.fingerprint
        assert not (tmp_path / "corpus" / "shards").exists()
        assert not late.exists()


@pytest.mark.parametrize("finished", [True, False])
def test_a_corpus_of_another_origin_is_refused(source, tmp_path, finished):
    directory = tmp_path / "corpus"
    if finished:
        prepare(source, Bytes(), directory, progress=False)
    else:
        ending = SimpleNamespace(run=lambda do, items: (do(item) for item in items[:2]))
        with pytest.raises(RuntimeError, match="ended without"):
            prepare(source, Bytes(), directory, engine=ending, progress=False)
    before = contents(directory)
    other = TextFiles(source.files, sample_by="file")
    for changed, options, sentence in (
        ((other, Bytes()), {}, f"another source: there {re.escape(source.fingerprint)}, now"),
        ((source, Bytes(end=False)), {}, "tokenizer: there bytes-begin-end, now bytes-begin."),
        ((source, Bytes()), {"field": "body"}, "another field of the records: there text, now bo"),
        ((source, Bytes()), {"task": INPUTS}, "corpus of the task 'causal', not 'inputs'"),
    ):
        with pytest.raises(ValueError, match=sentence):
            prepare(*changed, directory, **options, progress=False)
    with pytest.raises(ValueError, match="holds a corpus made with another source"):
        Corpus.from_arrays([[1, 2]], directory)
    assert contents(directory) == before


def test_a_killed_run_goes_on_where_it_was_and_ends_the_same(source, tmp_path, run):
    whole = prepare(source, Bytes(), tmp_path / "whole", progress=False)
    process = run(workers=2, delay=0.15)
    in_shards = tmp_path / "corpus" / "shards"
    wait_for(lambda: len(list(in_shards.glob("0*.json"))) >= 3)
    process.send_signal(signal.SIGKILL)
    process.wait()
    # Workers do not outlive the process that started them.
    wait_for(lambda: all(gone(pid) for pid, _ in log_of(source)))
    records = [json.loads(path.read_text()) for path in in_shards.glob("0*.json")]
    sealed = sum(part["examples"] for record in records for part in record["parts"])
    assert 0 < sealed < len(LINES)
    with pytest.raises(ValueError, match="is not finished"):
        Corpus.open(tmp_path / "corpus")

    Path(f"{source.files[0]}.log").unlink()
    out, err = run().communicate(timeout=60)
    assert out.strip() == whole.fingerprint, err
    assert contents(tmp_path / "corpus") == contents(whole.directory)
    read = [at for _, at in log_of(source)]
    assert len(read) == len({*read}) == len(LINES) - sealed


@pytest.mark.parametrize(
    "name", ["part-000000-00000.arrow", "part-000007-00003.arrow", "lengths.npy"]
)
def test_files_of_others_are_refused_by_name_and_stay(source, tmp_path, name):
    directory = tmp_path / "c"
    directory.mkdir()
    with pa.ipc.new_file(str(directory / name), pa.schema([("text", pa.string())])):
        pass  # a file of somebody else
    (directory / ".notes.1.tmp").write_bytes(b"mine")
    before = contents(directory)
    for make in (
        lambda: prepare(source, Bytes(), directory, progress=False),
        lambda: Corpus.from_arrays([[1, 2, 3]], directory),
        lambda: Writer(directory),
    ):
        with pytest.raises(ValueError, match=rf"{re.escape(name)} is not of a corpus that was beg"):
            make()
        assert contents(directory) == before
    (directory / name).rename(tmp_path / name)  # away from it, it is no trouble
    assert len(Corpus.from_arrays([[1, 2, 3]], directory)) == 1
    assert (directory / ".notes.1.tmp").read_bytes() == b"mine"


def test_a_lock_is_neither_emptied_nor_followed(tmp_path):
    (tmp_path / ".lock").write_text("what somebody wrote")
    with directory_lock(tmp_path, "testing"):
        pass
    assert (tmp_path / ".lock").read_text() == "what somebody wrote"
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / ".lock").symlink_to(tmp_path / ".lock")
    with (
        pytest.raises(ValueError, match="is a symbolic link; remove it"),
        directory_lock(tmp_path / "linked", "testing"),
    ):
        pass
    with contextlib.suppress(KeyError), directory_lock(tmp_path / "new", "failing"):
        raise KeyError
    assert os.listdir(tmp_path / "new") == [".lock"]  # for those who wait for it


def test_a_worker_that_dies_gives_a_sentence(source, run):
    process = run(workers=2, delay=0.2)
    log = Path(f"{source.files[0]}.log")  # the process itself looks at a sample first
    wait_for(lambda: log.exists() and {pid for pid, _ in log_of(source)} - {process.pid})
    (pid, *_) = {pid for pid, _ in log_of(source)} - {process.pid}
    os.kill(pid, signal.SIGKILL)
    error = process.communicate(timeout=60)[1]
    assert process.returncode == 1
    assert "InvalidState: a worker died while tokenising" in error
    assert "run again to finish" in error


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_a_lack_of_memory_is_a_sentence_and_no_record_is_left_out(on_error, source, tmp_path):
    def fail(record):
        if record["text"] == LINES[100]:
            raise MemoryError
        return [(record["text"], 1.0)]

    template = Function(fail, fingerprint="1")
    with pytest.raises(MemoryError, match="not enough memory to tokenise; use fewer workers"):
        prepare(
            *(source, Bytes(), tmp_path / "c"),
            template=template, on_error=on_error, num_workers=0, progress=False,
        )  # fmt: skip


@pytest.mark.parametrize("kind", ["as long", "gone", "share", "records"])
def test_a_source_that_is_edited_while_it_is_read_makes_no_corpus(kind, source, tmp_path):
    path, directory, here = Path(source.files[0]), tmp_path / "corpus", engines.Processes(0)
    text, listed = path.read_text(), [{"text": line} for line in LINES]

    def add_line():
        path.write_text(f"{text}more\n")

    edited, *edits = {
        # The size stays, and so do all samples of a large file.
        "as long": (source, lambda: path.write_text(text.replace("document 150", "DOCUMENT 150"))),
        "gone": (source, path.unlink),
        "share": (source, add_line),
        "records": (Records(listed), lambda: listed[0].update(text="else")),
    }[kind]

    def edit(record):
        """Leaves the record as it is, and edits the source while its 100th one is read."""
        if record["text"] == LINES[100] and edits:
            edits.pop()()
        return [(record["text"], 1.0)]

    def make(source):
        job = Job(source, Bytes(), template=Function(edit, fingerprint="1"))
        act, share = (prepare_share, [(0, 1)]) if kind == "share" else (prepare_job, [])
        act(job, directory, *share, engine=here, progress=False)
        return job

    with pytest.raises(ValueError, match=r"(text\.txt|the source) changed .* again"):
        make(edited)
    assert contents(directory) == {}
    if kind != "gone":  # nothing of it is in the way of what the source is now
        again = Records(LINES) if kind == "records" else TextFiles(path)
        assert len(prepare_job(make(again), directory, progress=False)) == len(list(again))


def test_a_source_that_is_touched_while_it_is_read_loses_no_part(source, tmp_path):
    path, here = Path(source.files[0]), engines.Processes(0)

    def touch(record):
        """Leaves the record as it is, and touches the source."""
        if record["text"] == LINES[100]:
            os.utime(path, (1, 1))
        return [(record["text"], 1.0)]

    job = Job(source, Bytes(), template=Function(touch, fingerprint="1"))
    corpus = prepare_job(job, tmp_path / "corpus", engine=here, progress=False)
    again = Job(TextFiles(path), Bytes(), template=Function(touch, fingerprint="1"))
    whole = prepare_job(again, tmp_path / "whole", engine=here, progress=False)
    assert contents(corpus.directory) == contents(whole.directory)


def test_a_fingerprint_that_is_never_the_same_is_found_before_the_work(tmp_path):
    class Nameless(Records):
        numbers = itertools.count()
        fingerprint = property(lambda self: str(next(self.numbers)))

        def __getitems__(self, indices):
            raise AssertionError("read")

    with pytest.raises(ValueError, match=r"the source changed while it was read \(200 records"):
        prepare(Nameless(LINES), Bytes(), tmp_path, progress=False)


LINE = "abc " * (1 << 13)


@pytest.mark.parametrize(
    ("line", "count", "template", "most"),
    [
        # Four bytes are a token's, twice where a part is put together.
        (256 * LINE, 1, None, 9 * 256 * len(LINE)),
        # Records are taken by their size, and not only by number.
        (LINE, 40, None, 40 * len(LINE)),
        (LINE, 40, Answer(prompt="", answer="{text}"), 40 * len(LINE)),
    ],
)
def test_memory_is_that_of_few_records_however_large(
    line, count, template, most, tmp_path, monkeypatch
):
    if count == 1:
        monkeypatch.setattr(ragged, "TOKENS_PER_PART", 1 << 24)
    for name, size in (("LEAST", 1 << 16), ("BLOCK", 1 << 14)):
        monkeypatch.setattr(sizes, name, size)
    short = "short\n" * 100 if count == 1 else ""
    (tmp_path / "a.txt").write_text(short + f"{line}\n" * count)
    source = TextFiles(tmp_path / "a.txt")
    with few_bytes(most):
        prepare(source, Bytes(), tmp_path / "c", template=template, num_workers=0, progress=False)


NOTEBOOK = """
from pipeline.corpus.preparing.preparation import prepare
from pipeline.text import source as sizes
from pipeline.text.sources import Records
from pipeline.text.tokenizers import Bytes

sizes.LEAST = 100
suffix = "!"

def shout(record):
    return [(record["text"].upper() + suffix, 1.0)]

source = Records([{"text": f"number {n}"} for n in range(80)])
corpus = prepare(source, Bytes(), "corpus", template=shout, num_workers=2, progress=False)
print(corpus.decode(79))
"""


@pytest.mark.slow
def test_workers_get_the_functions_of_a_notebook(tmp_path):
    ran = call(sys.executable, "-c", NOTEBOOK, cwd=tmp_path)
    assert ran.stdout.splitlines() == ["NUMBER 79!"], ran.stderr[-2000:]


def test_a_share_that_begins_while_others_end_leaves_their_manifest(tmp_path, monkeypatch):
    (tmp_path / "text").write_text("one\ntwo\n")
    job = Job(TextFiles(tmp_path / "text"), Bytes(), "text", None, None)
    find, seen = Manifest.find, []

    def late(directory):  # others prepare all of it between a look and what follows
        paths = find(directory)
        if not seen:
            seen.append(paths)
            prepare_job(job, directory, num_workers=0, progress=False)
        return paths

    monkeypatch.setattr(Manifest, "find", late)
    monkeypatch.setattr("pipeline.corpus.stored.log.is_finished", lambda directory: False)
    work.Work(job, as_path(tmp_path / "corpus")).declare()
    assert len(Corpus.open(tmp_path / "corpus")) == 2
