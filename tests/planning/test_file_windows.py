"""Windows of whole files: a corpus of many files is planned in windows that need few of them."""

import dataclasses
import itertools
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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


def seen_in(plan, steps, count):
    seen = np.zeros(count, np.int64)
    for step in steps:
        _, example, _, length = plan.batch(step).segments.T
        np.add.at(seen, example, length)
    return seen


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


@pytest.mark.parametrize("shuffle", [True, False])
def test_an_epoch_is_a_partition_with_one_batch_that_is_not_full(shuffle):
    corpus = some_files()
    plan = Plan(corpus, BUCKETS, window=250, shuffle=shuffle)
    steps = plan.num_batches()
    for epoch in range(3):
        assert plan.num_batches(epoch) == steps
        mine = range(epoch * steps, (epoch + 1) * steps)
        np.testing.assert_array_equal(seen_in(plan, mine, len(corpus.lengths)), corpus.lengths)
        not_full = [
            planned.bucket
            for planned in map(plan.batch, mine)
            if len(np.unique(planned.segments[:, 0])) < planned.bucket.rows
        ]
        assert not_full in ([], [BUCKETS[-1]])
    again = pickle.loads(pickle.dumps(plan))
    for step in np.random.default_rng(1).permutation(2 * steps).tolist():
        assert again.batch(step).digest == plan.batch(step).digest
    same = plan.batch(0).digest == plan.batch(steps).digest
    assert same != shuffle


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
    assert rows > 1.2 * plan.num_batches()
    assert sorted(itertools.chain(*order)) == list(range(40))


def test_files_decide_the_fingerprint():
    corpus = some_files()
    others = np.concatenate([corpus.files[:-2], corpus.files[:-3:-1]])
    plans = [Plan(given, BUCKETS, window=250) for given in (corpus, Filed(corpus.lengths, others))]
    assert plans[0].fingerprint != plans[1].fingerprint
    small = [Plan(given, BUCKETS, window=9999).fingerprint for given in (corpus, corpus.lengths)]
    assert small[0] == small[1]


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 99),
    number=st.integers(8, 40),
    longest=st.sampled_from([20, 100, 128, 300]),
    max_segments=st.sampled_from([None, 1, 2]),
    tiers=st.sampled_from([1, 3]),
    change=st.floats(0, 2.5),
    window=st.sampled_from([240, 400]),
)
def test_a_change_in_mid_epoch_loses_and_repeats_nothing(
    seed, number, longest, max_segments, tiers, change, window
):
    corpus = some_files(seed, number, longest=longest)
    corpus.lengths[0] = max(corpus.lengths[0], 1)
    plan = Plan(corpus, BUCKETS, window=window, max_segments=max_segments, tiers=tiers, seed=seed)
    steps = plan.num_batches()
    at = plan.next_block(int(change * steps))
    changed = plan.after(at, buckets=[Bucket(5, 48), Bucket(3, 128)], window=window + 7)
    end = changed.first_step(at // steps + 2)
    for step in {0, at // 2, max(at - 1, 0)}:
        assert step >= at or changed.batch(step).digest == plan.batch(step).digest
    seen = seen_in(changed, range(end), len(corpus.lengths))
    np.testing.assert_array_equal(seen, corpus.lengths.astype(np.int64) * (at // steps + 2))
    first = changed.files_ahead(at)[""]
    needed = file_of(corpus, changed.batch(at).segments[:, 1])
    assert set(needed) <= set(np.concatenate(first[:4]))


def test_mixtures_have_windows_of_files_too():
    corpora = {"a": some_files(1), "b": some_files(2)}
    plan = Plan(corpora, BUCKETS, window=500, weights={"a": 1, "b": 2})
    assert all(stream.whole.layout.files is not None for stream in plan.stages[0].streams)
    ahead = plan.files_ahead(3)
    assert [*ahead] == ["a", "b"]
    seen = seen_in(plan, range(plan.num_batches()), 10_000)
    first = len(corpora["a"].lengths)
    assert seen[first:][: len(corpora["b"].lengths)].sum() >= corpora["b"].lengths.sum()
