"""The training program with a source so slow that a test can stop it midway."""

import runpy
import time

import pipeline

read = pipeline.Corpus.read


def slowly(*arguments):
    """As `Corpus.read`, a moment later."""
    time.sleep(0.08)
    return read(*arguments)


if __name__ == "__main__":
    pipeline.Corpus.read = slowly
    runpy.run_path("train.py", run_name="__main__")
