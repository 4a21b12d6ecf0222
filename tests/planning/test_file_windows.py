"""Windows of whole files: a corpus of many files is planned in windows that need few of them."""

import itertools
from types import SimpleNamespace

import numpy as np

from pipeline import Bucket, Plan

BUCKETS = Bucket(8, 32), Bucket(6, 64), Bucket(4, 128)


def some_files(seed=0):
    """40 files of up to 59 examples, which differ much from one another in their lengths."""
    rng = np.random.default_rng(seed)
    files = rng.integers(1, 60, 40)
    typical = np.repeat(rng.integers(1, 128, 40), files)
    lengths = np.clip(rng.normal(typical, 9), 0, 128).astype(np.uint32)
    return SimpleNamespace(lengths=lengths, files=files)


def files_of(corpus, batch):
    """The numbers of the files that have the examples of a batch."""
    return {*np.searchsorted(np.cumsum(corpus.files), batch.segments[:, 1], side="right")}


def test_batches_need_the_files_of_a_window_and_seldom_of_the_next_ones():
    corpus = some_files()
    plan = Plan(corpus, BUCKETS, window=250)
    order, rows = [], 0
    for step in range(2 * plan.num_batches()):
        ahead, needed = plan.files_ahead(step)[""], files_of(corpus, plan.batch(step))
        # A bucket with few rows may take those of several windows for a batch.
        assert needed <= {*np.concatenate(ahead[:4])}
        rows += needed <= {*ahead[0]}
        if step < plan.num_batches() and (not order or list(ahead[0]) != order[-1]):
            order.append(list(ahead[0]))
    assert rows > 1.1 * plan.num_batches()
    assert sorted(itertools.chain(*order)) == list(range(40))
    # Also of the windows of what is left after a change.
    for at in (5, plan.num_batches() // 2):
        changed = plan.after(at, buckets=[Bucket(5, 48), Bucket(3, 128)], window=257)
        ahead = np.concatenate(changed.files_ahead(at)[""][:4])
        assert files_of(corpus, changed.batch(at)) <= {*ahead}


def test_a_step_needs_the_files_of_all_steps_that_share_its_rows():
    corpus = some_files()
    plan = Plan(corpus, BUCKETS, window=250, tiers=6)
    for step in range(plan.num_batches()):
        ahead = np.concatenate(plan.files_ahead(step)[""][:3])
        assert files_of(corpus, plan.batch(step)) <= {*ahead}


def test_files_decide_the_fingerprint():
    corpus = some_files()
    files = np.append(corpus.files[:-2], corpus.files[:-3:-1])
    others = SimpleNamespace(lengths=corpus.lengths, files=files)
    plans = [Plan(given, BUCKETS, window=250) for given in (corpus, others)]
    assert plans[0].fingerprint != plans[1].fingerprint
    small = [Plan(given, BUCKETS, window=9999) for given in (corpus, corpus.lengths)]
    assert small[0].fingerprint == small[1].fingerprint
    assert small[0].batch(0).digest == small[1].batch(0).digest
