"""Lengths, the one thing a plan is made from: checked, counted and digested."""

import functools
import hashlib
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np

# Big arrays are walked in pieces of this many examples, so that a memory-mapped array of a
# billion lengths is never copied whole.
PIECE = 1 << 22

NONE = np.zeros(0, np.int64)


@runtime_checkable
class HasLengths(Protocol):
    """A corpus, as planning sees it."""

    @property
    def lengths(self) -> np.ndarray:
        """Positions of each example."""


@runtime_checkable
class Keeps(Protocol):
    """A corpus that stores files of a plan."""

    def keep(self, name: str, make: Callable[[], bytes]) -> bytes:
        """The file `name` beside the corpus; if there is none, what `make` gives, then stored."""


@runtime_checkable
class HasCorpora(Protocol):
    """Several corpora by name, as one: their examples one after another."""

    corpora: Mapping[str, Any]

    def begin(self, examples: int) -> Any:
        """Those that have the first `examples` examples; of the first alone, itself."""


def begin(given: Any, examples: int) -> Any:
    """What `given`, lengths or corpora, has of the first `examples` examples."""
    if isinstance(given, HasCorpora):
        return given.begin(examples)
    if isinstance(given, Mapping):
        ends = np.cumsum([len(Lengths.of(each)) for each in given.values()])
        return dict(list(given.items())[: int(np.searchsorted(ends, examples)) + 1])
    array = as_lengths(given)
    return given if len(array) == examples else array[:examples]


class Lengths:
    """The lengths of some examples, of which some may be left out.

    >>> lengths = Lengths([5, 3, 7], left_out=np.array([1]))
    >>> lengths.array.tolist(), lengths.num_left_out
    ([5, 0, 7], 1)

    Args:
        given: an integer array `[n]`, of pairs `[n, 2]`; or a corpus.
        left_out: the examples that are left out: int64, ascending.

    Attributes:
        given: as given.
        array: the lengths; 0 for examples that are left out.
        left_out: as given.

    Raises:
        ValueError: `given` is not as above.
    """

    def __init__(self, given: Any, left_out: np.ndarray = NONE):
        self.given, self.left_out = given, left_out
        self._all = as_lengths(given)
        self.array = self._all
        if len(left_out):
            self.array = np.array(self._all)
            self.array[left_out] = 0

    @classmethod
    def of(cls, given: Any) -> "Lengths":
        """`given` itself if it is `Lengths`, so that lengths of many plans are digested once."""
        return given if isinstance(given, Lengths) else cls(given)

    def __len__(self) -> int:
        return len(self._all)

    @functools.cached_property
    def _digest(self) -> str:
        return digest(self._all)

    @property
    def digest(self) -> str:
        """A short hash of the lengths, with what is left out."""
        if not len(self.left_out):
            return self._digest
        ids = hashlib.sha256(self.left_out.astype("<i8").tobytes()).hexdigest()[:8]
        return f"{self._digest} without {len(self.left_out)} ({ids})"

    @property
    def num_left_out(self) -> int:
        """How many examples are left out that had something to train on."""
        trained = self._all if self._all.ndim == 1 else self._all[:, 1]
        return int(np.count_nonzero(trained[self.left_out]))

    @property
    def keep(self) -> Callable[[str, Callable[[], bytes]], bytes]:
        """As `Keeps.keep`; of lengths alone, nothing is stored."""
        if isinstance(self.given, Keeps):
            return self.given.keep
        return lambda name, make: make()

    def without(self, examples: np.ndarray) -> "Lengths":
        """The same lengths without some more examples: int64, ascending."""
        left_out = np.union1d(self.left_out, examples)
        return self if len(left_out) == len(self.left_out) else Lengths(self.given, left_out)

    def grown(self, given: Any) -> "Lengths":
        """The lengths of `given`, which begins with these examples, without those left out.

        Raises:
            ValueError: it does not begin with them.
        """
        more = Lengths(given, self.left_out)
        begin = more._all[: len(self)]
        if begin.shape != self._all.shape or digest(begin) != self._digest:
            raise ValueError(
                f"the {len(more):,} lengths given do not begin with the {len(self):,} that the "
                "plan has; put new examples after them, as in Corpora({'first': corpus, 'new': …})"
            )
        return more

    def same(self, other: "Lengths") -> bool:
        """Whether both are of the same lengths, whatever is left out."""
        return self._digest == other._digest


def select(asked: Any, given: Any, count: int) -> np.ndarray:
    """The examples that `leave_out=asked` names: int64, ascending, each once.

    >>> select(lambda lengths: lengths > 6, np.arange(9), 9).tolist()
    [7, 8]

    Args:
        asked: numbers of examples; or a function of `given` that gives them, or a bool for each.
        given: the lengths or the corpus.
        count: how many examples there are.

    Raises:
        ValueError: it is none of these, or there is no such example.
    """
    found = np.asarray(asked(given) if callable(asked) else asked)
    if found.size == 0:
        return NONE
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


def as_lengths(lengths: Any) -> np.ndarray:
    """`lengths` as an array of non-negative integers, without a copy where none is needed.

    Accepts an integer array `[n]`, of pairs `[n, 2]`, or a corpus.

    Raises:
        ValueError: it is of another shape, not of integers, or holds a negative number.
    """
    if isinstance(lengths, Lengths):
        return lengths.array
    array = np.asarray(lengths.lengths if isinstance(lengths, HasLengths) else lengths)
    if array.ndim != 1 and array.shape[1:] != (2,):
        raise ValueError(
            f"lengths has shape {array.shape}; a plan takes one integer per example, shape [n], "
            "or inputs and targets of pairs, shape [n, 2]"
        )
    if array.size == 0:
        array = array.astype(np.uint32)
    if not np.issubdtype(array.dtype, np.integer):
        raise ValueError(
            f"lengths has dtype {array.dtype}; lengths are whole numbers of positions, so pass "
            "an integer array"
        )
    # The dtype promises enough for most arrays: no need to look at a billion numbers.
    safe = array.dtype.kind == "u" and array.dtype.itemsize <= 4
    for piece in () if safe else pieces(array):
        low, high = int(piece.min()), int(piece.max())
        if low < 0 or high >= 1 << 32:
            seen = low if low < 0 else high
            raise ValueError(f"lengths holds {seen:,}; a length is at least 0 and below 2**32")
    return array


def pieces(lengths: np.ndarray):
    """Consecutive slices of `lengths`, none longer than `PIECE`."""
    for start in range(0, len(lengths), PIECE):
        yield lengths[start : start + PIECE]


def digest(lengths: np.ndarray) -> str:
    """A short hash of the lengths, the same for every integer dtype that holds them.

    >>> digest(np.array([3, 1, 2])) == digest(np.array([3, 1, 2], np.uint16))
    True
    """
    sha = hashlib.sha256()
    for piece in pieces(as_lengths(lengths)):
        sha.update(np.ascontiguousarray(piece, "<u4").data)
    return sha.hexdigest()[:16]


def histogram(lengths: np.ndarray) -> np.ndarray:
    """How many examples have each length: int64, shape [longest + 1].

    >>> histogram(np.array([3, 1, 3])).tolist()
    [0, 1, 0, 2]
    """
    counts = np.zeros(1, np.int64)
    for piece in pieces(lengths):
        more = np.bincount(piece.astype(np.int64, copy=False), minlength=len(counts))
        more[: len(counts)] += counts
        counts = more
    return counts
