import functools
import pickle
import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest

from pipeline import Bucket, Plan
from pipeline.planning.cascade import pack
from pipeline.planning.layout import Layout
from pipeline.planning.pieces import Pieces
from pipeline.planning.tails import group_tails
from tests.planning.corpora import lognormal

BUCKETS = Bucket(1024, 128), Bucket(256, 512)
LENGTHS = lognormal(400_000, 4, 0.9, least=0, most=512).astype(np.uint32)


def layout_of(pieces, window, key=None, files=None):
    packing = functools.partial(pack, buckets=BUCKETS)
    return Layout(pieces, packing, group_tails(BUCKETS), key=key, window=window, files=files)


@pytest.mark.parametrize("overflow", ["split", "truncate", "drop"])
@pytest.mark.parametrize("files", [None, [5000, 0, 40, 40, 5000, 2265]])
@pytest.mark.parametrize("key", [None, 3])
def test_windows_partition_the_pieces(key, files, overflow):
    lengths = LENGTHS[:12_345]
    pieces = Pieces(lengths, (400,), overflow)
    layout = layout_of(pieces, 1000, key, None if files is None else np.array(files))
    numbers = [layout.numbers(window) for window in range(len(layout))]
    assert sorted(np.concatenate(numbers)) == [*range(len(pieces))]
    assert len(layout) >= 13
    for window, members in enumerate(numbers):
        assert len(members) <= layout.most_pieces <= 1500
        sizes = layout.keys(window)
        in_rows = sizes > 0
        np.testing.assert_array_equal(sizes[in_rows], pieces.locate(members[in_rows])[2][:, 0])
        assert layout.real[:, window].sum() == sizes.sum()
        if files is not None:
            examples = pieces.locate(members)[0]
            of = np.searchsorted(np.cumsum(files), examples, side="right")
            np.testing.assert_array_equal(np.unique(of), layout.files[window])
    counts = np.bincount(np.concatenate([layout.keys(w) for w in range(len(layout))]))
    np.testing.assert_array_equal(counts, layout.counts)
    # Only the longest bucket has rows that make no whole batch.
    assert (layout.rows[:-1].sum(axis=1) % [bucket.rows for bucket in BUCKETS[:-1]] == 0).all()


def test_windows_of_a_sorted_corpus_mix_it_and_have_the_same_lengths():
    lengths = np.sort(LENGTHS[:100_000])
    layout = layout_of(Pieces(lengths, (512,), "split"), 10_000, key=0)
    # A tenth of each window is from each tenth of the corpus.
    assert np.bincount(layout.numbers(3) // 10_000, minlength=10).min() > 500
    means = [layout.keys(window).mean() for window in range(len(layout))]
    assert max(means) < 1.03 * min(means)


def test_memory_is_that_of_windows_and_not_of_the_corpus(tmp_path):
    LENGTHS.tofile(tmp_path / "lengths")
    stored = SimpleNamespace(lengths=np.memmap(tmp_path / "lengths", np.uint32, "r"))
    tracemalloc.start()
    plan = Plan(stored, BUCKETS, window=10_000)
    plan.stages[0].streams[0].cache.capacity = 20_000  # by itself, it keeps four million pieces
    for step in range(0, plan.num_batches(), 40):
        plan.batch(step)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 3.1e6  # one int64 for each example would take 3.2 MB


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
