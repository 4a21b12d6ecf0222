"""Lengths: the input of every plan. This module checks, counts and hashes them."""

import base64
import functools
import hashlib
import types
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, SupportsIndex, runtime_checkable

import numpy as np

from pipeline.errors import InvalidValue
from pipeline.planning.bucket import PAIR

# Large arrays are read in chunks of this many examples: a memory-mapped array of a billion lengths
# is never copied at once.
CHUNK = 1 << 22

# Lengths below this are counted in an array with an entry for each, which is fast.
COUNTED = 1 << 20

NO_EXAMPLES = np.zeros(0, np.int64)

# The columns of `Lengths` that groups have.
COLUMNS = "paths", "continuations", "work"


@runtime_checkable
class Corpus(Protocol):
    """A corpus: anything with the lengths of its examples.

    Plans use these too, if a corpus has them:

    - `files`: int64, the number of examples in each file, if files can be fetched one by one; or
      None.
    - `trees`: int64 [examples, 3], if some examples are groups, which are never split: for each,
      the positions of its longest path, its continuations, and its cost in attention; or None.
    - `silent`: int64, the examples that have positions, but no loss; they are left out.
    - `side_names`, of several sides; `loss`, the name of the one with loss, or None; and
      `unpriced`, the names of sides whose cost must be given.
    - `partly_learnt`: whether some positions may carry no loss.
    - `lengths_digest`: the `digest` of its lengths, so that they are not hashed again.
    - `corpora`, if several act as one and number their examples consecutively: each by its name;
      and `begin(examples)`: the corpora with the first `examples` examples, or the only one.
    """

    @property
    def lengths(self) -> np.ndarray:
        """Positions of each example."""
        ...


class HasArray(Protocol):
    """An array of any library, which NumPy can read."""

    def __array__(self) -> np.ndarray: ...


# Lengths of examples, or a corpus; or several of these by name: sides of the same examples or, with
# weights, corpora.
OneLengths = Corpus | HasArray | Sequence[SupportsIndex] | Sequence[Sequence[SupportsIndex]]
AnyLengths = OneLengths | Mapping[str, OneLengths]

# Examples to leave out: their numbers, a bool for each, or a function of the corpus or the lengths
# that returns one of these; see `select`.
Exclude = Sequence[SupportsIndex] | HasArray | Callable[[Any], Any]


def take_first(given: Any, examples: int) -> Any:
    """The part of some lengths, or of a corpus, that has the first `examples` examples."""
    if hasattr(given, "corpora"):
        return given.begin(examples)
    array = as_lengths(given)
    if len(array) == examples:
        return given
    if len(array) < examples:
        raise InvalidValue(
            f"lengths has {len(array):,} examples, and the plan is of {examples:,}; give the "
            "lengths of all of them"
        )
    if isinstance(given, Mapping):
        return dict(zip(given, array[:examples].T, strict=True))
    begin = types.SimpleNamespace(lengths=array[:examples])
    if hasattr(given, "partly_learnt"):
        begin.partly_learnt = given.partly_learnt
    if (silent := getattr(given, "silent", None)) is not None:
        begin.silent = silent[: int(np.searchsorted(silent, examples))]
    if (files := getattr(given, "files", None)) is not None:
        begin.files = files[: int(np.searchsorted(np.cumsum(files), examples, side="right"))]
    if (trees := getattr(given, "trees", None)) is not None:
        begin.trees = trees[:examples]
    return begin if len(vars(begin)) > 1 else begin.lengths


class Lengths:
    """The lengths of a corpus, and which of its examples stay in a plan.

    >>> lengths = Lengths([5, 3, 7], stays=np.array([True, False, True]))
    >>> lengths.positions_from(0).tolist(), lengths.num_left_out
    ([[5], [0], [7]], 1)

    A pickle has no copy of the lengths of a corpus.

    Attributes:
        given: an integer array `[n]` or `[n, sides]`; arrays `[n]` by side; or a corpus.
        array: the lengths [n, sides], also of examples that are left out.
        names: the names of the sides, if they are given.
        loss: the name of the side with loss; if that is not known, "targets", "inputs" or the last;
            None if sides have no names.
        stays: bool [n], whether each example stays; others are left out.
        num_excluded: the number of the others.
        files: int64, the examples in each file of a corpus of files; else None.
        indivisible: bool [n], whether each example is a group, which is never cut.
        has_groups: whether the corpus may have groups. If it has, these are int64 [n]:
        paths: the positions of the longest path in each example;
        continuations: the continuations of each; and
        work: the cost of each in attention, of groups.
    """

    def __init__(self, given: Any, stays: np.ndarray | None = None):
        self.given = given
        self.files: np.ndarray | None = getattr(given, "files", None)
        named = given if isinstance(given, Mapping) else getattr(given, "side_names", ())
        self.names: tuple[str, ...] = tuple(map(str, named))
        names = [getattr(given, "loss", None), *reversed(PAIR), *reversed(self.names)]
        self.loss: str | None = next((name for name in names if name in self.names), None)
        array = as_lengths(given)
        self.array = array[:, None] if array.ndim == 1 else array
        self.stays = everywhere(True, len(array)) if stays is None else stays
        self._trees: np.ndarray | None = getattr(given, "trees", None)
        self.has_groups = self._trees is not None
        self.indivisible = everywhere(False, len(array))
        if self._trees is not None:
            self.paths, self.continuations, self.work = self._trees.T
            self.indivisible = self.continuations > 0
        self.num_excluded = 0 if stays is None else len(stays) - int(np.count_nonzero(stays))

    def __getstate__(self) -> dict[str, Any]:
        taken = ("array", "stays", "files", "_trees", "indivisible", *COLUMNS)  # from `given`
        state = {name: value for name, value in vars(self).items() if name not in taken}
        return state | {"stays": store_mask(self.stays) if self.num_excluded else None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        stored = state.pop("stays")
        stays = None if stored is None else load_mask(stored)
        self.__init__(state["given"], stays)  # type: ignore[misc]
        vars(self).update(state)

    @classmethod
    def of(cls, given: Any) -> "Lengths":
        """`given` as `Lengths`; returned unchanged if it is one, so that it is hashed once."""
        if isinstance(given, Lengths):
            return given
        silent = getattr(given, "silent", NO_EXAMPLES)
        if not len(silent):
            return cls(given)
        stays = np.ones(len(as_lengths(given)), bool)
        stays[silent] = False
        return cls(given, stays)

    def __len__(self) -> int:
        return len(self.array)

    @property
    def num_sides(self) -> int:
        """The number of sides."""
        return self.array.shape[1]

    def of_parts(self, examples: np.ndarray, sizes: np.ndarray) -> "Lengths":
        """The lengths of parts of some examples: `sizes`, [n, sides]."""
        trees = None if self._trees is None else self._trees[examples]
        return Lengths(types.SimpleNamespace(lengths=sizes, trees=trees))

    @functools.cached_property
    def _digest(self) -> str:
        return self._digest_of(len(self))

    def _digest_of(self, count: int) -> str:
        """The digest of the first `count` examples."""
        if self._trees is not None and self.indivisible[:count].any():
            trees = hashlib.sha256(self._trees[:count].astype("<i8").tobytes()).hexdigest()[:16]
            return f"{digest(self.array[:count])} with groups ({trees})"
        stored = getattr(self.given, "lengths_digest", None) if count == len(self) else None
        return stored or digest(self.array[:count])

    @property
    def digest(self) -> str:
        """A short hash of the lengths and of which examples are left out."""
        if not self.num_excluded:
            return self._digest
        which = hashlib.sha256(np.packbits(self.stays).data).hexdigest()[:8]
        return f"{self._digest} without {self.num_excluded} ({which})"

    @property
    def num_left_out(self) -> int:
        """The number of examples left out that have a position."""
        if not self.num_excluded:
            return 0
        return int(np.count_nonzero(self.array[~self.stays].any(axis=1)))

    @property
    def num_silent(self) -> int:
        """The number of examples left out since they have no loss."""
        return int(np.count_nonzero(~self.stays[getattr(self.given, "silent", NO_EXAMPLES)]))

    @property
    def partly_learnt(self) -> bool:
        """Whether some positions may carry no loss, and the corpus says so."""
        return getattr(self.given, "partly_learnt", False)

    def count_by(self, unit: str, positions: Any, costs: Sequence[float], examples: int) -> int:
        """What some positions of each side, of so many examples, count in a unit of weights.

        Of sides that are no pair, tokens of the one with the loss count.
        """
        if unit == "examples":
            return examples
        if self.names in ((), PAIR[: self.num_sides]):
            return round(weigh(positions, costs))
        return round(positions[-1 if self.loss is None else self.names.index(self.loss)])

    @property
    def included(self) -> np.ndarray:
        """The lengths of the examples that are not left out: [examples, sides]."""
        return self.array[self.stays] if self.num_excluded else self.array

    def positions_from(self, first: int) -> np.ndarray:
        """The positions of each example from `first` on: int64 [examples, sides].

        They are 0 for examples that are left out.
        """
        sizes = self.array[first:].astype(np.int64)
        sizes[~self.stays[first:]] = 0
        return sizes

    def exclude(self, examples: np.ndarray) -> "Lengths":
        """The same lengths without further `examples`, a bool for each."""
        if not (self.stays & examples).any():
            return self
        return Lengths(self.given, self.stays & ~examples)

    def extend(self, given: Any) -> "Lengths":
        """The lengths of `given`, which has new examples after these; leaves out the same ones."""
        more = Lengths.of(given)
        first = more.array[: len(self)]
        if first.shape != self.array.shape or more._digest_of(len(self)) != self._digest:
            raise InvalidValue(
                f"the {len(more):,} lengths given do not begin with the {len(self):,} that the "
                "plan has; put new examples after them, as in Corpora({'first': corpus, 'new': …})"
            )
        if not self.num_excluded:
            return more
        return more.exclude(np.pad(~self.stays, (0, len(more) - len(self))))

    def equals(self, other: "Lengths") -> bool:
        """Whether both have the same lengths, regardless of the examples left out."""
        return self._digest == other._digest


def select(exclude: Exclude, given: Any, count: int) -> np.ndarray:
    """Whether `exclude` selects each of `count` examples: bool [count].

    >>> select(lambda lengths: lengths > 6, np.arange(9), 9).nonzero()[0].tolist()
    [7, 8]

    `exclude` has numbers of examples, or a bool for each of `count` examples, or is a function of
    `given` that returns one of these; or it is the JSON of `store_mask`.
    """
    chosen = exclude(given) if callable(exclude) else exclude
    if isinstance(chosen, Mapping):  # of the changes of a plan
        chosen = load_mask(chosen)
    try:
        array = np.asarray(chosen)
    except ValueError:  # lists of unequal lengths
        array = np.array([chosen], object)
    if array.shape == (0,):
        return everywhere(False, count)
    if array.dtype == bool and array.shape == (count,):
        return array
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise InvalidValue(
            f"exclude gives {array.dtype} of shape {array.shape}; it must be a list of numbers "
            f"of examples or a bool for each of {count:,} examples, or a function that gives one"
        )
    if array.min() < 0 or array.max() >= count:
        wrong = array[(array < 0) | (array >= count)][0]
        raise InvalidValue(f"exclude holds {wrong}; examples are numbered from 0 to {count - 1:,}")
    if len(array) == count > 2 and array.max() <= 1:
        raise InvalidValue(
            f"exclude gives {count:,} whole numbers that are 0 or 1, one for each example; give "
            "bools for a mask, such as mask.astype(bool), or the numbers of examples, each once"
        )
    selected = np.zeros(count, bool)
    selected[array] = True
    return selected


def everywhere(value: bool, count: int) -> np.ndarray:
    """The same bool `count` times, without memory for each."""
    return np.broadcast_to(np.bool_(value), count)


def store_mask(mask: np.ndarray) -> dict[str, Any]:
    """A bool array as JSON: its length, and its bits, compressed.

    >>> load_mask(store_mask(np.array([True, False, True, True]))).tolist()
    [True, False, True, True]
    """
    bits = zlib.compress(np.packbits(mask).tobytes())
    return {"length": len(mask), "bits": base64.b64encode(bits).decode()}


def load_mask(stored: Mapping[str, Any]) -> np.ndarray:
    """The bool array that `store_mask` stored.

    Raises:
        ValueError: it was not stored by `store_mask`, or altered.
    """
    try:
        packed = zlib.decompress(base64.b64decode(stored["bits"], validate=True))
        return np.unpackbits(np.frombuffer(packed, np.uint8), count=stored["length"]).astype(bool)
    except (zlib.error, KeyError, TypeError) as error:
        raise InvalidValue(f"{stored!r:.80} is not a mask of examples") from error


def as_lengths(lengths: Any) -> np.ndarray:
    """The lengths as an array of non-negative integers, `[n]` or `[n, sides]`."""
    if isinstance(lengths, Lengths):
        return lengths.array
    if isinstance(lengths, Mapping):
        sides = {name: as_lengths(side) for name, side in lengths.items()}
        if len({side.shape for side in sides.values()}) != 1 or next(iter(sides.values())).ndim > 1:
            shapes = ", ".join(f"{name} {side.shape}" for name, side in sides.items())
            raise InvalidValue(
                f"lengths has arrays of the shapes {shapes or 'of no side'}; the sides of examples "
                "have one length per example, all of shape [n] (give weights= for several corpora)"
            )
        return np.stack([*sides.values()], axis=1)
    try:
        array = np.asarray(lengths.lengths if isinstance(lengths, Corpus) else lengths)
    except (ValueError, TypeError, OverflowError) as error:
        raise InvalidValue(
            f"lengths is {lengths!r:.80}, not an array: {error}; a plan takes an integer array"
        ) from error
    if array.ndim not in (1, 2) or 0 in array.shape[1:]:
        raise InvalidValue(
            f"lengths has shape {array.shape}; a plan takes one integer per example, shape [n], "
            "or one for each side, shape [n, sides], as inputs and targets of pairs, [n, 2]"
        )
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.size == 0:
        array = array.astype(np.uint32)
    if not np.issubdtype(array.dtype, np.integer):
        raise InvalidValue(
            f"lengths has dtype {array.dtype}; lengths are whole numbers of positions, so pass "
            "an integer array"
        )
    # Small unsigned dtypes cannot hold a bad length, so a billion numbers need not be read.
    safe = array.dtype.kind == "u" and array.dtype.itemsize <= 4
    for chunk in () if safe else chunks(array):
        low, high = int(chunk.min()), int(chunk.max())
        if low < 0 or high >= 1 << 32:
            seen = low if low < 0 else high
            raise InvalidValue(f"lengths holds {seen:,}; a length is at least 0 and below 2**32")
    # NumPy makes floats of uint64 and int64 together.
    is_wide = array.dtype.kind == "u" and array.dtype.itemsize == 8  # of either byte order
    return array.view(array.dtype.str.replace("u", "i")) if is_wide else array


def chunks(lengths: np.ndarray) -> Iterator[np.ndarray]:
    """Consecutive slices of `lengths` of up to `CHUNK` examples."""
    for start in range(0, len(lengths), CHUNK):
        yield lengths[start : start + CHUNK]


def digest(lengths: np.ndarray) -> str:
    """A short hash of the lengths, [n] or [n, sides], the same for every integer dtype.

    >>> digest(np.array([3, 1, 2])) == digest(np.array([3, 1, 2], np.uint16))
    True
    """
    sha = hashlib.sha256()
    for chunk in chunks(as_lengths(lengths)):
        sha.update(np.ascontiguousarray(chunk, "<u4").data)
    return sha.hexdigest()[:16]


def histogram(lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The distinct lengths, ascending, and the number of examples of each: two arrays, int64.

    The memory depends on the number of distinct lengths, not on the longest.

    >>> [each.tolist() for each in histogram(np.array([3, 1, 3, 1 << 31]))]
    [[1, 3, 2147483648], [1, 2, 1]]
    """
    histograms = [(NO_EXAMPLES, NO_EXAMPLES)]
    for chunk in chunks(lengths):
        if chunk.max() < COUNTED:
            counts = np.bincount(chunk.astype(np.int64, copy=False))
            sizes = np.flatnonzero(counts)
            histograms.append((sizes, counts[sizes]))
        else:
            sizes, counts = np.unique(chunk, return_counts=True)
            histograms.append((sizes.astype(np.int64), counts))
    every, counts = map(np.concatenate, zip(*histograms, strict=True))
    sizes, which = np.unique(every, return_inverse=True)
    totals = np.zeros(len(sizes), np.int64)
    np.add.at(totals, which, counts)
    return sizes, totals


def weigh(lengths: Any, costs: Sequence[float]) -> Any:
    """The cost of some lengths [..., sides]: of each position of a side, its entry of `costs`.

    >>> weigh(np.array([[4, 8, 1], [2, 0, 3]]), (1, 0.5, 0)).tolist()
    [8.0, 2.0]
    """
    lengths = np.asarray(lengths)
    return sum(lengths[..., side] * cost for side, cost in enumerate(costs))
