"""Object storage: corpora, sources and runs in buckets of real servers on loopback, which fail."""

import contextlib
import functools
import json
import os
import re
import struct
import subprocess
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

import pipeline
from pipeline import sources
from pipeline.corpus.stored.cache import default_directory
from pipeline.fs import as_path, atomic_write, directory_lock, lease, objects, open_locked
from pipeline.history import RunLog
from pipeline.history.log_parts import read_log
from pipeline.text.sources import open_files
from tests.corpus.files import contents
from tests.fs import object_servers
from tests.processes import in_child
from tests.runs.runs import lines, messages
from tests.text import record_files
from trainer import mirror
from trainer.checkpoint import Checkpoints
from trainer.tensorboard import TensorBoard

SHARE = 0.1  # of requests that fail, where some are to
OTHER = {"owner": "x", "place": "elsewhere", "pid": 1, "beat": 0}  # the lock of another process


LATER = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("gs", "az")]


@pytest.fixture(scope="module", params=["s3", *LATER])
def server(request, tmp_path_factory):
    """A bucket of a real server, behind a proxy; the environment leads there."""
    kind = {"s3": "s3", "gs": "gcs", "az": "azure"}[request.param]
    if kind == "azure" and not object_servers.has_azure():
        pytest.skip("azurite-blob is not installed")
    folder = tmp_path_factory.mktemp(kind)
    with contextlib.ExitStack() as stack:
        port = stack.enter_context(getattr(object_servers, kind)(folder))
        proxy = object_servers.Proxy(port, translate=kind == "gcs")
        stack.enter_context(proxy)
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(objects, "LONGEST", 0.05)  # seconds between two tries
        patch.setattr(lease, "BEAT", 0.1)
        variables = getattr(object_servers, f"{kind}_environment")(proxy.server_port)
        for name, value in variables.items():
            patch.setenv(name, value)
        yield SimpleNamespace(root=f"{request.param}://{object_servers.BUCKET}", proxy=proxy)


@pytest.fixture
def place(server, request):
    """A directory of each test in the bucket."""
    objects._open_store.cache_clear()  # of another server, or with other options
    yield as_path(server.root) / request.node.originalname
    objects._open_store.cache_clear()
    server.proxy.share, server.proxy.refuse, server.proxy.fates = 0, 0, []


@pytest.fixture(params=["local", "bucket"])
def root(request, place, tmp_path):
    """A directory of each test, on disk and in the bucket."""
    return place if request.param == "bucket" else as_path(tmp_path)


def names(place):
    return sorted(path.name for path in place.iterdir())


def requests_of(server, act):
    """How many requests a call makes."""
    before = len(server.proxy.requests)
    act()
    return len(server.proxy.requests) - before


def test_a_path_has_the_methods_of_a_directory(place):
    assert isinstance(place, objects.ObjectPath)
    assert not place.exists()
    assert list(place.iterdir()) == []
    for name in ("a.txt", "b.txt", ".hidden.txt", "sub/c.txt", "sub x/d é~#%.txt"):
        assert (place / name).write_text(name) == len(name)
    assert place.is_dir()
    assert not place.is_file()
    assert (place / "a.txt").is_file()
    assert names(place) == [".hidden.txt", "a.txt", "b.txt", "sub", "sub x"]
    assert (place / "sub x" / "d é~#%.txt").read_text() == "sub x/d é~#%.txt"
    assert sorted(path.name for path in place.glob("*.txt")) == ["a.txt", "b.txt"]
    assert [path.name for path in place.glob(".h*")] == [".hidden.txt"]
    assert [path.name for path in place.glob("s*/c.t?t")] == ["c.txt"]
    assert [path.name for path in place.glob("*/c.txt")] == ["c.txt"]
    assert list(place.glob("*/none")) == []
    status = (place / "a.txt").stat()
    assert (status.length, status.is_directory) == (5, False)
    assert status.mtime > 1e9
    (place / "a.txt").unlink()
    (place / "a.txt").unlink(missing_ok=True)
    with pytest.raises(FileNotFoundError):
        (place / "a.txt").unlink()


def test_a_file_is_read_and_written_as_a_local_one(root, place):
    with (root / "f").open("wb") as file:
        assert file.write(b"0123456789\nabc\n") == 15
        assert file.tell() == 15
    with (root / "f").open("rb") as file:
        assert file.read(3) == b"012"
        assert file.seek(5) == 5
        assert file.readline() == b"56789\n"
        assert file.seek(-4, os.SEEK_END) == 11
        assert file.read() == b"abc\n"
        assert file.read() == b""
    with (root / "f").open() as file:
        assert list(file) == ["0123456789\n", "abc\n"]
    with pytest.raises(ValueError, match="not appended to"):
        (place / "f").open("a")


def test_what_is_read_in_order_takes_few_requests(server, place, monkeypatch):
    content = np.random.default_rng(0).bytes(1 << 20)
    objects.put(place / "x", content)
    monkeypatch.setattr(objects, "READ", 1 << 17)
    with (place / "x").open("rb") as file:
        read = []
        pieces = iter(lambda: file.read(1000), b"")
        assert requests_of(server, lambda: read.extend(pieces)) == 8
        assert b"".join(read) == content
        file.seek(500_000)
        assert requests_of(server, lambda: read.append(file.read(100))) == 1
        assert read[-1] == content[500_000:500_100]


@pytest.mark.parametrize("how", ["atomic and local", "atomic", "wb", "w"])
def test_a_file_appears_whole_or_not_at_all(place, tmp_path, how):
    path = (as_path(tmp_path) if how == "atomic and local" else place) / "f"
    path.write_text("before")

    def write(content, error=None):
        with path.open(how) if how in ("w", "wb") else atomic_write(path) as file:
            file.write(content if how == "w" else content.encode())
            assert path.read_text() == "before"
            if error:
                raise error

    with pytest.raises(KeyError):
        write("after", KeyError())
    assert path.read_text() == "before"
    write("after")
    assert path.read_text() == "after"
    assert names(path.parent) == ["f"]


def test_ranges_and_whole_objects_are_those_that_were_written(server, place, tmp_path, monkeypatch):
    monkeypatch.setattr(objects, "PIECE", 5 << 19)
    few = np.random.default_rng(1).bytes(objects.PIECE + 3)
    objects.put(place / "few", few)
    assert (
        objects.get(place / "few") == b"".join(objects.read_pieces(place / "few", len(few))) == few
    )
    whole = np.random.default_rng(0).bytes((17 << 20) + 3)
    objects.put(place / "x", whole)
    assert any(re.search("uploadId|comp=block", path) for _, path in server.proxy.requests)
    assert objects.get(place / "x") == whole
    assert objects.download(place / "x", tmp_path / "x") == len(whole)
    assert (tmp_path / "x").read_bytes() == whole
    begins, ends = [9, 100_000, 100_010, 5, 7, 0], [80_000, 100_020, 100_015, 5, 9, 9 << 20]
    contents = objects.get_ranges([place / "x"] * 6, begins, ends)
    assert [bytes(content) for content in contents] == [
        whole[at] for at in map(slice, begins, ends)
    ]
    with pytest.raises(OSError, match="is shorter than it was"):
        objects.get_ranges([place / "x"], [len(whole) - 2], [len(whole) + 3])
    objects.put(place / "empty", b"")
    assert objects.get(place / "empty") == b""


def test_of_several_that_write_if_there_is_none_one_writes(server, place):
    server.proxy.share = SHARE

    def race(file, text, **condition):
        """The version that the only one of eight writers who succeeds has written."""
        texts = [f"{text} {who}".encode() for who in range(8)]
        with ThreadPoolExecutor(8) as pool:
            put = functools.partial(objects.put, **condition)
            versions = list(pool.map(put, [file] * 8, texts))
        (won,) = [who for who, version in enumerate(versions) if version]
        assert objects.get(file) == texts[won]
        return versions[won]

    for number in range(5):
        file = place / f"{number}"
        first = race(file, "first", if_absent=True)
        race(file, "second", if_version=first)
        assert not objects.put(file, b"late", if_version=first)
        file.unlink()
        assert not objects.put(file, b"late", if_version=first)
        assert not file.exists()


def test_a_conditional_write_that_was_heard_and_not_answered_is_known_to_be_ours(server, place):
    server.proxy.fates = ["cut"]
    assert objects.put(place / "x", b"mine", if_absent=True)
    server.proxy.fates = ["cut"]
    assert not objects.put(place / "x", b"other", if_absent=True)
    _, seen = objects.get_version(place / "x")
    server.proxy.fates = ["cut"]
    assert (written := objects.put(place / "x", b"mine, later", if_version=seen))
    assert objects.get(place / "x") == b"mine, later"
    assert objects.put(place / "x", b"", if_version=written)


@pytest.mark.parametrize("fate", ["refuse", "cut", "half"])
def test_a_large_write_succeeds_whose_last_answer_is_lost(server, place, monkeypatch, fate):
    monkeypatch.setattr(objects, "PIECE", 5 << 19)
    large = np.random.default_rng(0).bytes(11 << 20)  # three parts
    begun = 0 if server.root.startswith("az") else 1  # requests before the parts
    server.proxy.fates = [*["answer"] * (begun + 3), fate]
    objects.put(place / "x", large)
    assert server.proxy.fates == []
    assert objects.get(place / "x") == large


def test_of_several_that_write_a_large_object_one_is_there_and_none_fails(place, monkeypatch):
    monkeypatch.setattr(objects, "PIECE", 5 << 19)
    texts = [bytes([number]) * (11 << 20) for number in range(2)]
    with ThreadPoolExecutor(2) as pool:
        for _ in range(3):
            list(pool.map(objects.put, [place / "x"] * 2, texts))
            assert objects.get(place / "x") in texts


@pytest.mark.parametrize("fate", ["refuse", "cut", "half", "slow"])
def test_a_request_that_fails_is_made_again(server, place, fate):
    objects.put(place / "x", b"content")
    for act, result in (
        (lambda: objects.get_version(place / "x")[0], b"content"),
        (lambda: objects.get(place / "x"), b"content"),
        (lambda: names(place), ["x"]),
    ):
        server.proxy.fates = [fate, fate]
        assert act() == result
        assert server.proxy.fates == ([fate] if fate == "slow" else [])


def test_what_changes_while_its_answer_is_cut_is_read_anew(server, place):
    objects.put(place / "x", b"long" * 100)
    server.proxy.fates = ["half", "slow"]
    change = threading.Timer(0.1, objects.put, [place / "x", b"short"])
    change.start()
    assert objects.get_version(place / "x")[0] == b"short"
    change.join()


def test_a_storage_that_always_fails_is_asked_few_times(server, place, tmp_path, monkeypatch):
    monkeypatch.setattr(objects, "LONGEST", 0.01)
    large = bytes(5 * objects.PIECE)
    objects.put(place / "x", large)
    size, most = len(large), objects.ROUNDS * (objects.RETRIES + 1)
    first = 3 if server.root.startswith("az") else 1  # where parts go up before anything is asked
    for act, requests in (
        (lambda: objects.put(place / "y", large), first),
        (lambda: objects.put(place / "y", b"", if_absent=True), 1),
        (lambda: objects.get(place / "x"), 1),
        (lambda: objects.download(place / "x", tmp_path / "x", size=size), 1),
        (lambda: objects.get_ranges([place / "x"] * 2, [0, size - 1], [1, size]), 2),
        ((place / "x").open, 1),
        (place.exists, 1),
    ):
        server.proxy.refuse, before = 503, len(server.proxy.requests)
        with pytest.raises(OSError, match=r"cannot be reached: .*after 2 retries"):
            act()
        time.sleep(0.1)  # nothing goes on behind it
        assert most <= len(server.proxy.requests) - before <= requests * most
        server.proxy.refuse = 0


def test_what_cannot_be_done_is_a_sentence(server, place, monkeypatch):
    monkeypatch.setattr(objects, "ROUNDS", 1)
    missing = as_path(f"{server.root.partition('://')[0]}://missing/x")
    with pytest.raises(FileNotFoundError, match=f"there is no object {place}/none; check the path"):
        objects.get(place / "none")
    with pytest.raises(OSError, match=r"there is no bucket .*//missing for .*/missing/x; create"):
        missing.write_bytes(b"")
    if not server.root.startswith("gs"):  # the emulator has another status for it
        for act in (missing.exists, lambda: pipeline.Corpus.open(missing)):
            with pytest.raises(OSError, match="there is no bucket"):
                act()
    get, put = (functools.partial(function, place / "x") for function in (objects.get, objects.put))
    for status, act, error, sentence in (
        (403, get, PermissionError, "the credentials do not allow this for .*/x; they"),
        (400, get, OSError, "the storage refused a request for .*/x: "),
        (301, get, OSError, "in another region" if server.root.startswith("s3") else "be reached"),
        (503, lambda: put(b""), OSError, "cannot be reached: .*after 2 retries.*503"),
    ):
        server.proxy.refuse = status
        with pytest.raises(error, match=sentence):
            act()


def test_a_fork_of_a_process_that_used_it_is_refused(place):
    def refused():
        with pytest.raises(RuntimeError, match=r"start processes by .*spawn"):
            objects.get(place / "x")
        return True

    objects.put(place / "x", b"1")
    assert in_child(refused)


def test_a_corpus_in_a_bucket_is_read_through_a_cache_of_the_user(
    server, place, tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("pipeline.text.ragged.TOKENS_PER_PART", 40)
    default_directory.cache_clear()
    examples = [np.arange(number, number + 9) for number in range(20)]
    with messages() as said:
        pipeline.Corpus.from_arrays(examples, place / "c")
        corpus, again = (pipeline.Corpus.open(place / "c") for _ in range(2))
        for number in (7, 0, 19):
            assert corpus[number]["targets"].tolist() == examples[number][1:].tolist()
    assert str(said).count(f"are kept in {tmp_path}/lockstep, up to 20,000,000,000 bytes") == 1
    assert len(list((tmp_path / "lockstep").glob("*/part-*.arrow"))) == 3
    assert requests_of(server, lambda: again[0]) == 0
    assert len(again.caches) == 1


def test_the_fingerprint_of_many_files_takes_few_requests_and_reads_none(server, place):
    with ThreadPoolExecutor(16) as pool:
        paths = [place / "text" / f"{number:03}.txt" for number in range(60)]
        list(pool.map(lambda path: objects.put(path, bytes(100)), paths))
    objects.put(place / "text" / "folder" / "other.txt", b"")
    made = []
    source = functools.partial(sources.TextFiles, place / "text" / "*.txt")
    assert requests_of(server, lambda: made.append(source().fingerprint)) < 12
    (before,) = made
    assert source().fingerprint == before
    few = [sources.TextFiles(paths[:3]).fingerprint for _ in range(2)]
    assert few[0] == few[1] != before
    opened = source()
    assert opened.fingerprint == before
    objects.put(paths[7], bytes(99) + b"1")
    assert source().fingerprint != before
    with pytest.raises(ValueError, match=r"007\.txt changed after this source was first used"):
        _ = opened.fingerprint
    objects.delete([paths[8]])
    with pytest.raises(FileNotFoundError, match=r"there is no file .*008\.txt"):
        sources.TextFiles(paths)


def test_a_writer_goes_on_in_a_bucket_as_on_disk_while_a_tenth_of_requests_fail(
    server, place, tmp_path
):
    server.proxy.share, before = SHARE, server.proxy.failed
    written = {}
    for root in (tmp_path, place):
        for first in (0, 40):
            with pipeline.Writer(root / "c") as writer:
                assert writer.cursor == (first or None)
                for number in range(first, first + 40):
                    writer.append([number] * (number % 7))
                writer.seal(cursor=first + 40)
                for number in range(9):  # never sealed
                    writer.append([number])
                with pytest.raises(RuntimeError, match="not sealed is lost, 9 examples"):
                    writer.__exit__(None, None, None)
        written[root] = contents(root / "c")
        with pipeline.Writer(root / "c") as writer:
            writer.finish()
        finished = pipeline.Corpus.open(root / "c")
        finished.verify()
        assert finished.lengths.tolist() == [max(n % 7 - 1, 0) for n in range(80)]
    assert written[tmp_path] == written[place]
    assert contents(tmp_path / "c") == contents(place / "c")
    assert server.proxy.failed > before + 5


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "parquet", "arrow"])
def test_texts_in_a_bucket_are_sources(place, kind, tmp_path):
    records = [{"text": f"line {number}"} for number in range(100)]
    here = record_files.make(kind, tmp_path, records)
    for file in here.files:
        (place / file.name).write_bytes(file.read_bytes())
    source, again = (open_files([str(place / f"*.{kind}")]) for _ in range(2))
    assert source.fingerprint == again.fingerprint != here.fingerprint  # of entity tags
    assert list(source) == records


def test_saves_upload_the_bytes_of_the_logs_once(place, server):
    steps, before = range(800), server.proxy.received
    with TensorBoard(place / "tensorboard", 0) as board, RunLog(place, writers=[board]) as log:
        for step in steps:
            log.write({"step": step, "loss": 1 / (step + 1)})
            if step % 20 == 19:  # 40 times
                log.save()
                board.save()
    uploaded = server.proxy.received - before
    contents = [path.read_bytes() for path in sorted((place / "tensorboard").iterdir())]
    size = len(read_log(place / "metrics.jsonl")) + sum(map(len, contents))
    assert size <= uploaded <= 1.02 * size
    assert len(contents) == 40
    for part in contents:  # a reader of events finds whole ones in each file
        while part:
            (length,) = struct.unpack("<Q", part[:8])
            assert len(part) >= length + 16
            part = part[length + 16 :]
    assert [line["step"] for line in lines(place)] == [*steps]
    with RunLog(place, 795) as log:  # joins the parts
        assert names(place) == ["metrics.jsonl", "tensorboard"]
        log.write({"step": 795, "loss": 2.0})
    assert [line["step"] for line in lines(place)] == [*range(796)]


def test_a_checkpoint_in_a_bucket_is_whole_or_not_there(place, monkeypatch):
    like = {"a": jnp.arange(100.0)}
    written, put = [], objects.put

    def note(path, *arguments, **options):
        written.append(path.relative_to(place).parts)
        return put(path, *arguments, **options)

    monkeypatch.setattr(objects, "put", note)
    with Checkpoints(place, keep=2) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, {"a": like["a"] + step}, data={"step": step})
    assert names(place) == ["2", "3"]
    for step in ("1", "2", "3"):  # complete when all its files are there
        assert [names for names in written if names[0] == step][-1] == (step, mirror.WHOLE)
    (place / "4" / "state" / "x").write_bytes(b"cut short: it has no mark that says it is whole")
    (place / "4" / "checksums" / "metadata").write_bytes(b"{}")
    with Checkpoints(place, keep=1) as checkpoints:  # only reads
        assert checkpoints.latest == 3
        state, data = checkpoints.restore_state(3, like), checkpoints.read().data
    np.testing.assert_array_equal(state["a"], like["a"] + 3)
    assert data == {"step": 3}
    assert names(place) == ["2", "3", "4"]
    with Checkpoints(place, keep=2) as checkpoints:
        checkpoints.save(4, state, data={"step": 4})
    assert names(place) == ["3", "4"]
    assert not (place / "4" / "state" / "x").exists()
    assert (place / "4" / mirror.WHOLE).exists()
    (place / "4" / "data" / "metadata").write_bytes(b"")
    with (
        Checkpoints(place) as checkpoints,
        pytest.raises(ValueError, match=f"{place}/4 cannot be restored.*from step 3"),
    ):
        checkpoints.read()


def test_checkpoints_leave_their_siblings_in_a_bucket_alone(place):
    like = {"a": jnp.arange(3.0)}
    siblings = {name: place / name / "x" for name in ("datasets", "best", "1", "2", "7")}
    (place / "7" / mirror.WHOLE).write_bytes(b"of another program")
    for file in siblings.values():
        file.write_bytes(b"mine")
    for _ in range(2):
        with Checkpoints(place, keep=1) as checkpoints:
            step = (checkpoints.latest or 0) + 1
            checkpoints.save(step, like, data={"step": step})
            checkpoints.save(step + 1, like, data={"step": step + 1})
            assert checkpoints.latest == step + 1
    assert all(file.read_bytes() == b"mine" for file in siblings.values())
    assert names(place) == sorted([*siblings, "11"])


def test_who_has_lost_the_lock_deletes_no_checkpoint_of_its_heir(place):
    state = {"a": jnp.arange(3.0)}
    with Checkpoints(place, keep=1) as before:
        before.save(1, state, data={"step": 1})
        assert before.latest == 1
        with Checkpoints(place, keep=2) as heir:
            heir.save(5, state, data={"step": 5})
        before.save(2, state, data={"step": 2})
    assert names(place) == ["2", "5"]


def test_what_a_killed_process_left_on_this_machine_is_removed(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in ("left", "new", "used"):
        (tmp_path / f"lockstep-mirror-{name}" / "5").mkdir(parents=True)
    (tmp_path / "lockstep-mirror-left" / ".lock").touch()
    with open_locked(tmp_path / "lockstep-mirror-used" / ".lock"):  # in any container
        mirror._remove_leftovers()
    assert {path.name.rpartition("-")[2] for path in tmp_path.iterdir()} == {"new", "used"}


def test_one_process_holds_the_lock_of_a_directory_and_others_wait(root):
    held, log = [], threading.Lock()

    def work(number):
        with directory_lock(root, "working"):
            assert log.acquire(blocking=False)
            held.append(number)
            refused = directory_lock(root, "working", wait=False)
            with pytest.raises(RuntimeError, match=r"another process is working in .*; stop it"):
                refused.__enter__()
            time.sleep(0.1)  # for the others to begin to wait
            log.release()

    with messages() as said, ThreadPoolExecutor(3) as pool:
        list(pool.map(work, range(3)))
    assert sorted(held) == [0, 1, 2]
    assert "waiting for it" in str(said)
    with pytest.raises(KeyError), directory_lock(root, "working", wait=False):
        raise KeyError  # a directory that was there stays
    in_bucket = isinstance(root, objects.ObjectPath)
    assert (root / ".lock").read_text() == ("{}" if in_bucket else "")


def test_a_lock_whose_holder_says_nothing_is_taken_over(place, monkeypatch):
    monkeypatch.setattr(lease, "SILENCE", 0.5)
    gone = subprocess.Popen(["true"])
    gone.wait()
    boot, numbers = lease._place().split()
    for seen, pid, least in (
        (None, gone.pid, 0.5),
        (f"another-boot {numbers}", gone.pid, 0.5),
        (f"{boot} pid:[1]", gone.pid, 0.5),  # another container, where the number says nothing
        (f"{boot} {numbers}", os.getppid(), 0.5),  # which runs, and says nothing
        # A process that was killed on this machine, whose last requests may still arrive, and one
        # that had the number of this one.
        (f"{boot} {numbers}", gone.pid, lease.BEAT),
        (f"{boot} {numbers}", os.getpid(), lease.BEAT),
    ):
        (place / ".lock").write_text(json.dumps({**OTHER, "pid": pid, "place": seen}))
        before = time.monotonic()
        with messages() as said, directory_lock(place, "working", wait=False):
            waited = time.monotonic() - before
        assert waited >= least
        assert (waited >= 0.5) == (least == 0.5)
        assert "is gone or silent; this process takes it" in str(said)


def test_the_silence_of_a_holder_begins_when_its_last_sign_of_life_was_first_sent(
    place, monkeypatch
):
    held = lease._Lease(place, "working")
    held.acquire(wait=True)
    write = objects.put

    def put(*arguments, **condition):
        write(*arguments, **condition)
        raise OSError("no answer")

    monkeypatch.setattr(objects, "put", put)
    before = lease._now()
    with pytest.raises(OSError, match="no answer"):
        held._write()
    after = lease._now()
    monkeypatch.setattr(objects, "put", write)
    time.sleep(0.1)
    assert held._write()  # the same again, which others have seen since then
    assert before <= held._heard <= after


def test_a_lock_that_is_heard_too_late_is_not_held(place, monkeypatch):
    monkeypatch.setattr(lease, "SILENCE", 0.2)
    write = objects.put

    def put(path, content, **condition):
        version = write(path, content, **condition)
        if condition.get("if_absent"):  # whose answer comes after another process took it over
            time.sleep(0.3)
            write(path, json.dumps(OTHER).encode())
        return version

    monkeypatch.setattr(objects, "put", put)
    with messages() as said, directory_lock(place, "working"):
        assert json.loads((place / ".lock").read_text())["beat"] >= 0
    assert "is gone or silent; this process takes it" in str(said)


def test_who_has_lost_a_lock_ends_with_an_error(place, monkeypatch):
    monkeypatch.setattr(lease, "BEAT", 0.1)
    monkeypatch.setattr(lease, "SILENCE", 1.0)

    def work():
        with directory_lock(place, "working"):
            (place / ".lock").write_text(json.dumps(OTHER))
            time.sleep(0.5)

    with pytest.raises(
        RuntimeError, match=r"lost the lock of .* another process may be working there now"
    ):
        work()
    assert json.loads((place / ".lock").read_text()) == OTHER
    (place / ".lock").unlink()


def test_who_was_stopped_for_long_writes_nothing_after_another_took_the_lock(place, monkeypatch):
    monkeypatch.setattr(lease, "SILENCE", 0.5)
    monkeypatch.setattr(lease._Lease, "renew", lambda self: None)  # as of a process that is stopped
    (place / "x").write_text("before")

    def lose(act):
        with directory_lock(place, "working"):
            time.sleep(0.4)
            (place / ".lock").write_text(json.dumps(OTHER))
            act()

    for act in ((place / "x").unlink, functools.partial((place / "x").write_text, "after")):
        with pytest.raises(
            RuntimeError, match=r"did not renew it for 0\.5 s, and another process may be"
        ):
            lose(act)
        (place / ".lock").unlink()
    assert (place / "x").read_text() == "before"
    with directory_lock(place, "working"):  # nobody takes it
        time.sleep(0.6)
        (place / "x").write_text("after")
        assert json.loads((place / ".lock").read_text())["beat"] == 1
    assert (place / "x").read_text() == "after"


def test_a_write_is_not_sent_again_once_the_lock_is_lost(server, place, monkeypatch):
    """As after an answer that was lost, and a stop that lasts until another holds the lock."""
    monkeypatch.setattr(lease, "SILENCE", 0.5)
    monkeypatch.setattr(lease._Lease, "renew", lambda self: None)
    sent, version = [], objects._version

    def lose(meta):
        if not sent:
            sent.append("once")
            time.sleep(0.6)
            monkeypatch.setattr(objects, "_version", version)
            objects.put(place / ".lock", json.dumps(OTHER).encode())
            store, key = objects._open(place / "x")
            store.put(key, b"theirs")
            raise objects._error()("Generic error: connection closed")
        return version(meta)

    def work():
        with directory_lock(place, "working"):
            monkeypatch.setattr(objects, "_version", lose)
            objects.put(place / "x", b"mine")

    with pytest.raises(RuntimeError, match="lost the lock"):
        work()
    assert objects.get(place / "x") == b"theirs"
    (place / ".lock").unlink()


NO_LOCKS = [b"", b"7", b'{"owner": "x"}', json.dumps(OTHER | {"pid": 10**30}).encode()]


@pytest.mark.parametrize("content", NO_LOCKS)
def test_what_is_not_a_lock_is_refused_and_stays(server, place, content):
    objects.put(place / ".lock", content)
    before = len(server.proxy.requests)
    with pytest.raises(ValueError, match=r"\.lock holds b.*, which is not a lock of Lockstep"):
        directory_lock(place, "working").__enter__()
    assert len(server.proxy.requests) - before < 3
    assert objects.get(place / ".lock") == content
