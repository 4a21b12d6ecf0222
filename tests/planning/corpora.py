"""Lengths of corpora that are drawn, and what plans make of them."""

import numpy as np
from hypothesis import strategies as st


def lognormal(count, mean=2.5, sigma=0.8, *, least=1, most=64, seed=0):
    """Lengths of examples, most of them short."""
    sizes = np.random.default_rng(seed).lognormal(mean, sigma, count)
    return np.clip(sizes, least, most).astype(np.int64)


def digests(plan, steps):
    return [plan.batch(step).digest for step in steps]


def costs_of(batch):
    """The cost of each row of a batch with attention that skips other segments."""
    squares = (batch.segments[:, 3:] ** 2).sum(axis=1)
    return np.bincount(batch.segments[:, 0], squares, batch.bucket.rows)


def change(plan, changes):
    """The plan with changes, each some steps after the one before; and the step of the last."""
    step = 0
    for later, options in changes:
        step = plan.next_block(step + later)
        plan = plan.after(step, **options)
    return plan, step


def histograms(most):
    """How many examples have each length up to 40: at most `most` of each, of a few lengths."""
    times = st.dictionaries(st.integers(1, 40), st.integers(1, most), min_size=1, max_size=12)
    return times.map(lambda n: np.bincount([*n], [*n.values()], 41).astype(np.int64))
