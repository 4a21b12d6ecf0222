"""Files that are written whole, and those of ranges of steps."""

import errno
import os
import re
import stat
from contextlib import nullcontext

import pytest
from etils import epath

from pipeline.errors import StorageError
from pipeline.fs.atomic import atomic_write, make_directory, remove_files
from pipeline.history.step_files import StepFiles


def test_a_file_is_on_the_disk_before_it_has_its_name_and_then_its_name_is(tmp_path, monkeypatch):
    synced, sync = [], os.fsync

    def note(descriptor):
        found = os.fstat(descriptor)
        synced.append((found.st_ino, found.st_size, (tmp_path / "x").exists()))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    with atomic_write(tmp_path / "x") as file:
        file.write(b"bytes" * 100_000)
    (inode, size, named), (directory, _, then_named) = synced
    assert (inode, size, named) == ((tmp_path / "x").stat().st_ino, 500_000, False)
    assert (directory, then_named) == (tmp_path.stat().st_ino, True)


def test_a_directory_is_on_the_disk_whoever_made_it_and_before_others_are_in_it(
    tmp_path, monkeypatch
):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_ino))
    (tmp_path / "a").mkdir()  # by a process that was killed before it was on the disk
    make_directory(tmp_path / "a")
    make_directory(tmp_path / "a/b/c")
    folders = tmp_path, tmp_path, tmp_path / "a", tmp_path / "a/b"
    assert synced == [folder.stat().st_ino for folder in folders]
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="File exists"):
        make_directory(tmp_path / "file")


@pytest.mark.parametrize(("number", "raises"), [(errno.ENOSPC, True), (errno.EINVAL, False)])
def test_names_that_cannot_be_synced_are_told(number, raises, tmp_path, monkeypatch):
    sync = os.fsync

    def fail(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(number, os.strerror(number))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fail)
    # Network file systems raise EINVAL.
    expected = pytest.raises(StorageError, match="may not survive") if raises else nullcontext()
    with expected, atomic_write(tmp_path / "x") as file:
        file.write(b"bytes")


def test_a_folder_is_not_removed_with_what_came_after_a_look(tmp_path, monkeypatch):
    def look(path):
        (tmp_path / "a/new").touch()
        return []

    (tmp_path / "a").mkdir()
    monkeypatch.setattr(os, "listdir", look)
    remove_files(epath.Path(tmp_path / "a"), re.compile("old"))
    assert (tmp_path / "a/new").exists()


def test_files_of_steps_ignore_what_is_not_theirs(tmp_path):
    files = StepFiles(epath.Path(tmp_path), "arrow")
    files.write(range(3, 5), b"one")
    (tmp_path / "notes.arrow").write_text("not a range")
    (tmp_path / ".000000003-000000004-ab.arrow.1.tmp").write_text("interrupted")
    assert files.ranges() == [range(3, 5)]
    assert files.read(range(3, 5)) == b"one"
    files.remove(4)
    assert files.ranges() == [range(3, 5)]
    files.remove(3)
    assert files.ranges() == []


def test_a_file_that_another_wrote_meanwhile_is_there_whatever_else_it_removed(tmp_path):
    path = tmp_path / "file"

    def write():
        with atomic_write(path, once=True) as file:
            file.write(b"mine")
            (temporary,) = tmp_path.iterdir()
            temporary.unlink()  # as a leftover
            path.write_bytes(b"its")

    with pytest.raises(FileExistsError, match="another process wrote it meanwhile"):
        write()
    assert path.read_bytes() == b"its"
    assert [*tmp_path.iterdir()] == [path]
