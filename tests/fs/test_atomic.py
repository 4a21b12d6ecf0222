"""Files appear whole or not at all, also where there are no hard links."""

import errno
import os
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from pipeline import Corpus, Writer, prepare
from pipeline.fs import as_path, atomic, atomic_write
from pipeline.text.sources import Records
from pipeline.text.tokenizers import Bytes

NO_LINKS = [errno.EPERM, errno.ENOTSUP, errno.ENOSYS]  # FAT; SMB; a bucket that is mounted


@pytest.fixture(params=[None, *NO_LINKS], ids=["links", "EPERM", "ENOTSUP", "ENOSYS"])
def links(request, monkeypatch):
    """Whether there are hard links; else the error of a file system that has none."""
    if request.param is not None:

        def refuse(*_):
            raise OSError(request.param, os.strerror(request.param))

        monkeypatch.setattr(os, "link", refuse)
    return request.param is None


def write(path, content):
    """Whether this is the one that wrote the file."""
    try:
        with atomic_write(path, once=True) as file:
            file.write(content)
    except FileExistsError:
        return False
    return True


def test_of_several_that_write_a_file_once_one_does(links, tmp_path):
    for number in range(20):
        path, texts = tmp_path / f"{number}", [f"{who}".encode() * 1000 for who in range(8)]
        with ThreadPoolExecutor(8) as pool:
            wrote = list(pool.map(write, [path] * 8, texts))
        assert wrote.count(True) == 1
        assert path.read_bytes() == texts[wrote.index(True)]
        assert not write(path, b"late")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(map(str, range(20)))


def test_a_turn_of_a_killed_process_is_taken_over(tmp_path, monkeypatch):
    monkeypatch.setattr(atomic, "TURN", 0.3)
    error = OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    def refuse(*_):
        raise error

    monkeypatch.setattr(os, "link", refuse)
    (tmp_path / ".x.turn").mkdir()
    begin = time.monotonic()
    assert write(tmp_path / "x", b"mine")
    assert time.monotonic() - begin >= 0.3
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_corpora_are_prepared_and_written_without_hard_links(links, tmp_path):
    corpus = prepare(
        Records(["one", "two"]), Bytes(), tmp_path / "a", progress=False, num_workers=0
    )
    assert len(Corpus.open(corpus.directory)) == 2
    with Writer(tmp_path / "b") as writer:
        for tokens in (np.arange(5), np.arange(3)):
            writer.append(tokens)
            writer.seal()
        writer.finish()
    assert len(Corpus.open(tmp_path / "b")) == 2
    assert not list(tmp_path.glob("**/.*.turn"))


def test_a_storage_that_cannot_be_written_is_not_advised():
    with pytest.raises(ValueError, match=r"begins with s3://, gs:// or az://$"):
        as_path("nfs://server/data")
