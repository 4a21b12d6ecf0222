"""Corpora as plans see them: lengths that are drawn, and parts that are sealed."""

import hashlib
import threading

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


class SealedInMemory:
    """All parts of a finished corpus; `asked` is the number of parts that were asked for.

    Of one that grows, `sealed` parts are there, and others are waited for.
    """

    _changed = threading.Condition()  # of all of them, so that each can be pickled

    def __init__(self, parts, sealed=None):
        self.parts, self.asked = [np.asarray(part, np.uint32) for part in parts], 0
        self._sealed = len(parts) + 1 if sealed is None else sealed

    def seal(self, number):
        """Seals the first parts; one more than there are finishes the corpus."""
        with self._changed:
            self._sealed = number
            self._changed.notify_all()

    def lengths(self, number):
        with self._changed:
            self._changed.wait_for(lambda: number < self._sealed)
        self.asked = max(self.asked, number + 1)
        return self.parts[number] if number < len(self.parts) else None

    def digest(self, number):
        if number > len(self.parts):
            return None
        content = b"/".join(part.tobytes() for part in self.parts[:number])
        return hashlib.sha256(content).hexdigest()[:16] if number else ""

    def whole(self):
        return np.concatenate(self.parts)


def draw_parts(rng, number=40):
    """Parts of up to 15 examples, some of them without a position; of a seed or of a generator."""
    rng = np.random.default_rng(rng)
    return [rng.integers(0, 40, rng.integers(1, 16)) for _ in range(number)]


def histograms(most):
    """How many examples have each length up to 40: at most `most` of each, of a few lengths."""
    times = st.dictionaries(st.integers(1, 40), st.integers(1, most), min_size=1, max_size=12)
    return times.map(lambda n: np.bincount([*n], [*n.values()], 41).astype(np.int64))
