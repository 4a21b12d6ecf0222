"""Files of corpora, waiting for them, and what two corpora have alike."""

import time

import numpy as np

from pipeline.fs import as_path
from tests.loading.definition import require_same


def contents(folder):
    """The names and bytes of all files in a local folder or in a bucket, but for locks."""
    found, folder = {}, as_path(folder)
    for path in folder.iterdir() if folder.exists() else ():
        if path.is_dir():
            found |= {f"{path.name}/{name}": each for name, each in contents(path).items()}
        elif path.name != ".lock":
            found[path.name] = path.read_bytes()
    return found


def wait_for(condition, seconds=60):
    """Waits until something is true."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.01)


def require_equal(corpus, other):
    """Both have the same examples, number by number."""
    np.testing.assert_array_equal(corpus.lengths, other.lengths)
    for one, two in zip(corpus, other, strict=True):
        require_same(one, two)
