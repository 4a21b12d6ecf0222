"""Files and memory of corpora, waiting for them, and what two corpora have alike."""

import contextlib
import mmap
import time
import tracemalloc

import numpy as np
import pyarrow

from pipeline.fs import as_path
from tests.loading.definition import require_same


def contents(folder):
    """The names and bytes of all files in a local folder or in a bucket, but for locks."""
    files, folder = {}, as_path(folder)
    for path in folder.iterdir() if folder.exists() else ():
        if path.is_dir():
            files |= {f"{path.name}/{name}": content for name, content in contents(path).items()}
        elif path.name != ".lock":
            files[path.name] = path.read_bytes()
    return files


def wait_for(condition, seconds=60):
    """Waits until something is true."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.01)


@contextlib.contextmanager
def few_bytes(most):
    """What Python and NumPy hold at a time inside the block is less than so many bytes."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < most
    finally:
        tracemalloc.stop()


def map_apart():
    """Puts memory that nobody may read, which there may be anyway, between two maps."""
    held, memory_map = [], pyarrow.memory_map

    def apart(path):
        held[:] = [*held[-20:], mmap.mmap(-1, 1 << 26, prot=0)]
        return memory_map(path)

    pyarrow.memory_map = apart


def read_all(side, lengths, epoch=0):
    """All examples of a corpus, or of one side of pairs, in one read."""
    every = np.arange(len(lengths))
    return side.read(every, 0 * every, lengths, epoch=epoch)


def require_equal(corpus, other):
    """Both have the same examples, number by number."""
    np.testing.assert_array_equal(corpus.lengths, other.lengths)
    for one, two in zip(corpus, other, strict=True):
        require_same(one, two)


def flip(path, at=None, bit=0):
    """Flips a bit of a file, which may be mapped; by default in its middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if at is None else at] ^= 1 << bit
    path.with_name(".flipped").write_bytes(content)
    path.with_name(".flipped").replace(path)


def documents_of(corpus):
    """The ids of each example of a corpus that was opened with `task=INPUTS`."""
    return [corpus[number]["inputs"].tolist() for number in range(len(corpus))]


def weights_of(corpus):
    """The loss weights of all positions."""
    return [corpus[number]["loss_weights"].tolist() for number in range(len(corpus))]


def split_at(ids, mark, *, ends):
    """Documents that each end, or begin, with a mark."""
    documents = [[]]
    for id_ in ids:
        if id_ == mark and not ends and documents[-1]:
            documents.append([])
        documents[-1].append(id_)
        if id_ == mark and ends:
            documents.append([])
    return documents if documents[-1] else documents[:-1]
