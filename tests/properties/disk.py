"""A disk that is full."""

import gc
import subprocess

import pytest

from pipeline.errors import describe

MANY = 100_000


class Disk:
    """A small disk in memory, at `place`."""

    def __init__(self, place):
        self.place = place
        place.mkdir()

    def _mount(self, how, size, files):
        how = f"{how}size={size},nr_inodes={files}"
        command = ["mount", "-t", "tmpfs", "-o", how, "tmpfs", str(self.place)]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("only root can make a small disk")

    def make(self, size=1 << 20, files=MANY):
        """Makes it anew, with room for so many bytes and files."""
        self.close()
        self._mount("", size, files)
        return self.place

    def grow(self):
        """Gives it all the room that is needed."""
        self._mount("remount,", 1 << 26, MANY)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
        # Tasks of orbax that failed here complain when they are collected. Within `ast.parse` of a
        # later test, the complaint makes Python up to 3.11.7 raise a SystemError (gh-106905). Some
        # of them wait for writes that end later, so what is not collected now never is.
        gc.collect()
        gc.freeze()

    def close(self):
        while self.place.is_mount():
            subprocess.run(["umount", "--lazy", str(self.place)], check=True)


def fails(work, *arguments):
    """Whether the disk is too small for `work`; if so, a command ends with a sentence about it."""
    try:
        work(*arguments)
    except OSError as caught:
        error = caught
    else:
        return False
    assert describe(error, command="train.py") == 2
    assert "No space left" in f"{error}"
    assert "make room" in f"{error}" or error.filename
    return True
