"""The training program on several hosts, of which number 1 loses its disk in the middle."""

import itertools
import runpy

import jax

import pipeline
from pipeline.errors import StorageError

read, calls = pipeline.Corpus.read, itertools.count()


def fail(*arguments):
    """As `Corpus.read`, for some calls."""
    if jax.process_index() == 1 and next(calls) == 12:
        raise StorageError("the disk is gone; mount it again")
    return read(*arguments)


if __name__ == "__main__":
    pipeline.Corpus.read = fail
    runpy.run_path("train.py", run_name="__main__")
