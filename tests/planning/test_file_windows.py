"""Windows of whole files: a corpus of many files is planned in windows that need few of them."""

import dataclasses
import itertools

import numpy as np

from pipeline import Bucket, Plan

BUCKETS = Bucket(8, 32), Bucket(6, 64), Bucket(4, 128)


@dataclasses.dataclass
class Filed:
    """Lengths whose examples lie in files of some numbers of examples."""

    lengths: np.ndarray
    files: np.ndarray


def some_files(seed=0, number=40, most=60, longest=128):
    """Files that differ much from one another in their lengths."""
    rng = np.random.default_rng(seed)
    files = rng.integers(1, most, number)
    typical = np.repeat(rng.integers(1, longest, number), files)
    lengths = np.clip(rng.normal(typical, 9), 0, longest).astype(np.uint32)
    return Filed(lengths, files)


def file_of(corpus, examples):
    return np.searchsorted(np.cumsum(corpus.files), examples, side="right")


def test_lengths_alone_have_no_files():
    corpus = some_files()
    assert Plan(corpus.lengths, BUCKETS, window=250).stages[0].streams[0].whole.layout.files is None
    for window, of_files in [(5000, False), (250, True), (200, True)]:
        layout = Plan(corpus, BUCKETS, window=window).stages[0].streams[0].whole.layout
        assert (layout.files is not None) == of_files, window
    layout = Plan(corpus, BUCKETS, window=250).stages[0].streams[0].whole.layout
    assert sorted(np.concatenate(layout.files)) == list(range(40))
    assert len(layout) == -(-len(corpus.lengths) // 250)


def test_batches_need_the_files_of_a_window_and_seldom_of_the_next_ones():
    corpus = some_files()
    plan = Plan(corpus, BUCKETS, window=250)
    order, rows = [], 0
    for step in range(2 * plan.num_batches()):
        ahead = plan.files_ahead(step)[""]
        needed = np.unique(file_of(corpus, plan.batch(step).segments[:, 1]))
        # A bucket with few rows may take those of several windows for a batch.
        assert set(needed) <= set(np.concatenate(ahead[:4]))
        rows += set(needed) <= set(ahead[0])
        if step < plan.num_batches() and (not order or list(ahead[0]) != order[-1]):
            order.append(list(ahead[0]))
    assert rows > 1.1 * plan.num_batches()
    assert sorted(itertools.chain(*order)) == list(range(40))
    # Also of the windows of what is left after a change.
    for at in (5, plan.num_batches() // 2):
        changed = plan.after(at, buckets=[Bucket(5, 48), Bucket(3, 128)], window=257)
        ahead = changed.files_ahead(at)[""]
        needed = file_of(corpus, changed.batch(at).segments[:, 1])
        assert set(needed) <= set(np.concatenate(ahead[:4]))


def test_a_step_needs_the_files_of_all_steps_that_share_its_rows():
    corpus = some_files()
    plan = Plan(corpus, BUCKETS, window=250, tiers=6)
    for step in range(plan.num_batches()):
        needed = file_of(corpus, plan.batch(step).segments[:, 1])
        assert set(needed) <= set(np.concatenate(plan.files_ahead(step)[""][:3]))


def test_files_decide_the_fingerprint():
    corpus = some_files()
    others = np.concatenate([corpus.files[:-2], corpus.files[:-3:-1]])
    plans = [Plan(given, BUCKETS, window=250) for given in (corpus, Filed(corpus.lengths, others))]
    assert plans[0].fingerprint != plans[1].fingerprint
    small = [Plan(given, BUCKETS, window=9999).fingerprint for given in (corpus, corpus.lengths)]
    assert small[0] == small[1]


def test_mixtures_have_windows_of_files_too():
    corpora = {"a": some_files(1), "b": some_files(2)}
    plan = Plan(corpora, BUCKETS, window=500, weights={"a": 1, "b": 2})
    assert all(stream.whole.layout.files is not None for stream in plan.stages[0].streams)
    ahead = plan.files_ahead(3)
    assert [*ahead] == ["a", "b"]
