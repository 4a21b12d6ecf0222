import pickle
import tracemalloc
from types import SimpleNamespace

import numpy as np

from pipeline import Bucket, Plan
from tests.planning.corpora import lognormal

BUCKETS = Bucket(1024, 128), Bucket(256, 512)
LENGTHS = lognormal(400_000, 4, 0.9, least=0, most=512).astype(np.uint32)


def test_windows_of_a_sorted_corpus_mix_it():
    plan = Plan(np.sort(LENGTHS[:100_000]), BUCKETS, window=10_000)
    some = np.concatenate([plan.batch(step).segments[:, 1] for step in range(5)])
    shares = np.bincount(some // 10_000, minlength=10) / len(some)
    assert shares[1:].min() > 0.05  # of each tenth of the corpus, the first of which is short


def test_memory_is_that_of_windows_and_not_of_the_corpus(tmp_path):
    LENGTHS.tofile(tmp_path / "lengths")
    stored = SimpleNamespace(lengths=np.memmap(tmp_path / "lengths", np.uint32, "r"))
    tracemalloc.start()
    plan = Plan(stored, BUCKETS, window=10_000)
    plan.stages[0].streams[0].cache.capacity = 20_000  # by itself, it keeps four million pieces
    for step in range(0, plan.num_batches(), 80):
        plan.batch(step)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 3.15e6  # one int64 for each example would take 3.2 MB


class Stored:
    """A corpus that a pickle only refers to."""

    def __init__(self, path):
        self.path, self.lengths = path, np.memmap(path, np.uint32, "r")

    def __reduce__(self):
        return Stored, (self.path,)


def test_a_pickled_plan_has_no_lengths(tmp_path):
    LENGTHS.tofile(tmp_path / "lengths")
    plan = Plan(Stored(tmp_path / "lengths"), BUCKETS, exclude=[7])
    pickled = pickle.dumps(plan)
    assert len(pickled) < len(LENGTHS) // 2  # bytes, where one length takes four
    again = pickle.loads(pickled)
    assert again.fingerprint == plan.fingerprint
    assert again.batch(5).digest == plan.batch(5).digest


def test_a_change_keeps_a_few_bytes_for_each_remaining_example(tmp_path):
    LENGTHS.tofile(tmp_path / "lengths")
    plan = Plan(Stored(tmp_path / "lengths"), BUCKETS)
    plan.after(3, exclude=[8]).batch(3)
    tracemalloc.start()
    after = plan.after(3, exclude=[9])
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert after.stages[-1].start == 3
    assert kept < 10 * len(LENGTHS)  # the number of each example, and its length
