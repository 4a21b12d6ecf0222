"""Leftovers: what is left to plan when examples are left out, or an epoch is half done."""

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from pipeline.planning import lengths as lengths_lib
from pipeline.planning.bucket import Bucket

# The data state names up to this many examples that are left out; of more it has a digest.
NAMED = 32


class Reduced:
    """The lengths of a corpus in which some examples have nothing to train on: what a plan takes.

    Args:
        lengths: those of all examples: an integer array `[n]`, of pairs `[n, 2]`, or a corpus.
        left_out: the examples that are left out, int64, ascending.
    """

    def __init__(self, lengths: Any, left_out: np.ndarray):
        self.lengths = np.array(lengths_lib.as_lengths(lengths))
        #: How many examples are left out that had something to train on.
        trained = self.lengths if self.lengths.ndim == 1 else self.lengths[:, 1]
        self.num_left_out = int(np.count_nonzero(trained[left_out]))
        self.lengths[left_out] = 0
        ids = hashlib.sha256(left_out.astype("<i8").tobytes()).hexdigest()[:8]
        self.lengths_digest = f"{lengths_lib.digest(lengths)} without {len(left_out)} ({ids})"
        #: Where packing="optimal" keeps what it found; None for lengths alone.
        self.kept = getattr(lengths, "kept", None)


class Leftover:
    """Runs of positions that an epoch still has to train on, as the lengths that a plan takes.

    Pieces of an example that follow one another are one run, so that longer buckets can take what
    shorter ones had split.

    >>> some = Leftover(np.array([3, 7, 7]), np.array([0, 4, 8]), np.array([5, 4, 2]))
    >>> some.examples.tolist(), some.starts.tolist(), some.lengths.tolist()
    ([3, 7], [0, 4], [5, 6])

    Args:
        examples, starts, sizes: example, first position and positions of each piece, int64; of
            pairs, whose pieces are whole examples, sizes are [n, 2].
        kept: as that of a corpus: where packing="optimal" keeps what it found.
        epochs: the epoch of each piece, int64; pieces of different epochs are not one run. None:
            all are of one.
    """

    def __init__(
        self,
        examples: np.ndarray,
        starts: np.ndarray,
        sizes: np.ndarray,
        kept: Any = None,
        epochs: np.ndarray | None = None,
    ):
        self.kept = kept
        if epochs is None:
            epochs = np.broadcast_to(np.int64(0), len(examples))
        if starts.any() or (np.diff(examples) <= 0).any():
            order = np.lexsort((starts, examples, epochs))
            examples, starts, sizes = examples[order], starts[order], sizes[order]
            epochs = epochs[order]
            follows = (np.diff(examples) == 0) & (starts[:-1] + sizes[:-1] == starts[1:])
            follows &= np.diff(epochs) == 0
            first = np.flatnonzero(np.append(True, ~follows))
            examples, starts, sizes = examples[first], starts[first], np.add.reduceat(sizes, first)
            epochs = epochs[first]
        #: Of each run, int64: the example, its first position, and the epoch.
        self.examples, self.starts, self.epochs = examples, starts, epochs
        #: Positions of each run, uint32; of pairs [n, 2].
        self.lengths = sizes.astype(np.uint32)

    def __len__(self) -> int:
        return len(self.lengths)

    def fit(self, longest: Bucket, overflow: str) -> bool:
        """Whether any run is in a batch of a plan with this longest bucket."""
        if overflow != "drop":
            return len(self) > 0
        fits = self.lengths.reshape(len(self), len(longest.lengths)) <= longest.lengths
        return bool(fits.all(axis=1).any())

    def cut(self, longest: Bucket, overflow: str) -> "Leftover":
        """The runs as `overflow` leaves them to this longest bucket: all of them, where it splits.

        >>> some = Leftover(np.array([3, 7]), np.array([0, 4]), np.array([5, 9]))
        >>> some.cut(Bucket(1, 6), "drop").lengths.tolist()
        [5]
        >>> some.cut(Bucket(1, 6), "truncate").lengths.tolist()
        [5, 6]
        """
        fits, sizes = self.lengths <= longest.length, self.lengths.astype(np.int64)
        if overflow == "split" or fits.all():
            return self
        stays = fits if overflow == "drop" else np.full(len(fits), True)
        sizes = np.minimum(sizes, longest.length)
        parts = (self.examples, self.starts, sizes, self.epochs)
        examples, starts, sizes, epochs = (each[stays] for each in parts)
        return Leftover(examples, starts, sizes, self.kept, epochs)

    def max_position(self, longest: Bucket, overflow: str) -> int:
        """The largest position that a batch of such a plan holds."""
        sizes = self.lengths.astype(np.int64)
        if overflow != "split":
            sizes = np.minimum(sizes, longest.length)
        return int((self.starts + sizes.T).max()) - 1

    def locate(self, runs: np.ndarray, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The examples of some runs, and where in them the positions `starts` of the runs are."""
        return self.examples[runs], self.starts[runs] + starts


def grown(lengths: Any, more: Any) -> np.ndarray:
    """The lengths that `more` has beyond those of `lengths`, with which it must begin.

    >>> grown([5, 3], [5, 3, 7, 1]).tolist()
    [7, 1]

    Raises:
        ValueError: it does not begin with them.
    """
    before, after = lengths_lib.as_lengths(lengths), lengths_lib.as_lengths(more)
    same = lengths_lib.digest(lengths) == lengths_lib.digest(after[: len(before)])
    if before.ndim != after.ndim or not same:
        raise ValueError(
            f"the {len(after):,} lengths given do not begin with the {len(before):,} that the plan "
            "has; put new examples after those there are, as in Joined({'first': corpus, 'new': …})"
        )
    return after[len(before) :]


def chosen(asked: Any, lengths: Any) -> np.ndarray:
    """The examples to leave out: int64, ascending, each once.

    >>> chosen([5, 2], np.arange(9)).tolist()
    [2, 5]
    >>> chosen(lambda lengths: lengths > 6, np.arange(9)).tolist()
    [7, 8]

    Args:
        asked: numbers of examples; or a function of `lengths` (of the corpus, if a plan was made
            from one) that gives them, or a bool for each example.
        lengths: what the plan was made from: an integer array `[n]`, or a corpus.

    Raises:
        ValueError: it is none of these, or there is no such example.
    """
    count = len(lengths_lib.as_lengths(lengths))
    found = np.asarray(asked(lengths) if callable(asked) else asked)
    if found.size == 0:
        return np.zeros(0, np.int64)
    if found.dtype == bool and found.shape == (count,):
        return np.flatnonzero(found)
    if found.ndim != 1 or not np.issubdtype(found.dtype, np.integer):
        raise ValueError(
            f"leave_out gives {found.dtype} of shape {found.shape}; it must be a list of numbers "
            f"of examples, or a function that gives one or a bool for each of {count:,} examples"
        )
    if found.min() < 0 or found.max() >= count:
        wrong = found[(found < 0) | (found >= count)][0]
        raise ValueError(f"leave_out holds {wrong}; examples are numbered from 0 to {count - 1:,}")
    return np.unique(found.astype(np.int64))


def short(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Some changes; of examples that are left out, if they are many, their count and a digest."""
    found = dict(changes)
    if len(numbers := found.get("leave_out", ())) > NAMED:
        digest = hashlib.sha256(np.array(numbers, "<i8").tobytes()).hexdigest()[:16]
        found["leave_out"] = {"number": len(numbers), "digest": digest}
    return found
