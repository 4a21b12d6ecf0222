"""Errors of files that are written name them; `tests.simulation` has disks that become full."""

import errno
import os

import numpy as np
import pytest

from pipeline.errors import StorageError
from pipeline.fs.atomic import _name_errors, atomic_write
from tests.properties.disk import Disk

PAGE = 4096


def test_an_error_of_a_source_is_not_told_as_one_of_the_file_that_is_written(tmp_path):
    def copy(error):
        with atomic_write(tmp_path / "copy") as file:
            file.write(b"begun")
            raise error

    gone = FileNotFoundError(2, "No such file or directory", "source.txt")
    for error in (gone, StorageError("s3://mine/x cannot be reached"), OSError(5, "I/O error")):
        with pytest.raises(OSError) as seen:
            copy(error)
        assert seen.value is error
        assert list(tmp_path.iterdir()) == []


def test_an_error_of_the_file_that_is_written_names_it(tmp_path):
    with pytest.raises(StorageError, match=r"could not write .*none/copy: No such file"):
        atomic_write(tmp_path / "none" / "copy").__enter__()
    owned = rf"user {os.getuid()} owns {tmp_path}, and you are user {os.getuid()}: ask"
    with pytest.raises(StorageError, match=owned), _name_errors(tmp_path / "none" / "copy"):
        raise PermissionError(errno.EACCES, "Permission denied")
    with Disk(tmp_path / "disk") as disk:
        place = disk.make(size=2 * PAGE)
        for write in (
            lambda file: file.write(bytes(9 * PAGE)),
            lambda file: np.save(file, np.zeros(9 * PAGE)),
        ):
            with (
                pytest.raises(StorageError, match=r"could not write .*copy: No space left"),
                atomic_write(place / "copy") as file,
            ):
                write(file)
            assert list(place.iterdir()) == []
