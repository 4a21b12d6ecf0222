"""Options of a plan, checked once; and weights, the share of each corpus."""

import dataclasses
import inspect
import itertools
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any, Literal, TypedDict, Unpack, get_args

import numpy as np

from pipeline.errors import InvalidValue, require_one_of, require_whole, suggest_option
from pipeline.planning.bucket import Bucket, as_buckets
from pipeline.planning.cascade import PACKINGS, Packing
from pipeline.planning.gaps import check_fill
from pipeline.planning.lengths import AnyLengths, Lengths
from pipeline.planning.pieces import OVERFLOWS, Overflow, Pieces
from pipeline.planning.tails import group_tails

# The version of the planning algorithm. It goes up whenever a plan would change, so that a run
# never continues from a checkpoint with other batches.
VERSION = 8

WINDOW = 1 << 22

# With several corpora, each has windows of at least this many pieces, or of `window` if fewer.
LEAST_WINDOW = 1 << 16

LEAST = Fraction(1, 10**9)  # the least share above 0

By = Literal["tokens", "examples", "loss"]
BY: tuple[By, ...] = get_args(By)

Ending = Literal["repeat", "stop"]
ENDINGS: tuple[Ending, ...] = get_args(Ending)


def list_keywords(function: Callable) -> tuple[str, ...]:
    """The names of a function's keyword-only arguments."""
    parameters = inspect.signature(function).parameters.values()
    return tuple(each.name for each in parameters if each.kind is each.KEYWORD_ONLY)


def select_options(names: Iterable[str], options: Mapping[str, Any]) -> dict[str, Any]:
    """The options whose names are in `names`."""
    return {name: options[name] for name in names if name in options}


# The fields of `Options`, for editors and type checkers; `Plan` describes them.
class PackingOptions(TypedDict, total=False):
    """Options of `Plan` that do not reorder examples."""

    packing: Packing
    overflow: Overflow | None
    window: int
    max_segments: int | None
    align: int


class PlanOptions(PackingOptions, total=False):
    """The options of `Plan`."""

    seed: int
    shuffle: bool
    tiers: int
    by: By
    ending: Ending


class Changes(PlanOptions, total=False):
    """The options that `Plan.after` changes: all but `ending`."""

    buckets: Iterable[Bucket]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Buckets, and the options of `PlanOptions` with their defaults, checked."""

    buckets: tuple[Bucket, ...]
    seed: int = 0
    shuffle: bool = True
    packing: Packing = "best_fit"
    overflow: Overflow | None = None
    window: int = WINDOW
    max_segments: int | None = None
    align: int = 1
    tiers: int = 1
    by: By = "tokens"
    ending: Ending = "repeat"

    def __post_init__(self) -> None:
        def put(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)

        put("buckets", as_buckets(self.buckets))
        put("seed", require_whole("seed", self.seed, 0))
        put("window", require_whole("window", self.window, 1))
        put("tiers", require_whole("tiers", self.tiers, 1))
        put("align", require_whole("align", self.align, 1))
        if any(length % self.align for bucket in self.buckets for length in bucket.lengths):
            raise InvalidValue(
                f"bucket lengths are {[bucket.length for bucket in self.buckets]}; with "
                f"align={self.align} each must be a multiple of {self.align}, as fit_buckets(…, "
                f"align={self.align}) chooses them"
            )
        if self.max_segments is not None:
            put("max_segments", require_whole("max_segments", self.max_segments, 1))
        if not isinstance(self.shuffle, bool | np.bool_):
            raise InvalidValue(f"shuffle is {self.shuffle!r}; it must be True or False")
        put("shuffle", bool(self.shuffle))
        require_one_of("packing", self.packing, PACKINGS)
        if self.overflow is None:
            put("overflow", "error" if self.pairs else "split")
        allowed = OVERFLOWS[1:] if self.pairs else OVERFLOWS
        if self.pairs and isinstance(self.overflow, str) and self.overflow == "split":
            raise InvalidValue(
                "overflow is 'split'; a target cut in two would lose its inputs; for pairs it must "
                f"be one of {', '.join(allowed)}"
            )
        require_one_of("overflow", self.overflow, allowed)
        if self.pairs and self.packing == "optimal":
            raise InvalidValue("packing='optimal' is for one length; for pairs use 'best_fit'")
        if self.packing == "fill":
            check_fill(pairs=self.pairs, align=self.align)
        require_one_of("by", self.by, BY)
        require_one_of("ending", self.ending, ENDINGS)

    @property
    def groups(self) -> tuple[tuple[Bucket, ...], ...]:
        """The buckets of each length: the one that is packed, and its tails."""
        return group_tails(self.buckets)

    @property
    def pairs(self) -> bool:
        """Whether the buckets are for pairs."""
        return len(self.buckets[-1].lengths) == 2

    def cut(self, lengths: AnyLengths | Lengths) -> Pieces:
        """The pieces of examples of these lengths."""
        return Pieces(lengths, self.buckets[-1].lengths, self.overflow, align=self.align)

    def change(self, **changes: Unpack[Changes]) -> "Options":
        """The options with some values replaced."""
        names = [name for name in Changes.__annotations__ if name != "ending"]
        names += ["weights", "lengths", "exclude"]
        for name in changes:
            if name not in names:
                raise InvalidValue(
                    f"a plan has no option that can change {suggest_option(name, names)}"
                )
        values: dict[str, Any] = {**changes}  # of the wider types that `__post_init__` converts
        return dataclasses.replace(self, **values)

    def as_json(self, names: Iterable[str] | None = None) -> dict[str, Any]:
        """Some options as JSON, by default all; a bucket is `[rows, length]`."""
        values = {name: getattr(self, name) for name in (vars(self) if names is None else names)}
        if "buckets" in values:
            values["buckets"] = [bucket.as_json for bucket in self.buckets]
        return values


Weights = Mapping[str, float] | Sequence[tuple[int, Mapping[str, float]]]


def as_phases(weights: Weights, names: Sequence[str]) -> list[tuple[int, dict[str, Fraction]]]:
    """The phases of `weights`: the first step of each, and the share of each corpus, summing to 1.

    A corpus joins with the first phase that names it, and every later phase names it too.

    >>> as_phases({"code": 3, "prose": 1}, ["code", "prose"])
    [(0, {'code': Fraction(3, 4), 'prose': Fraction(1, 4)})]
    """
    given: Any = [(0, weights)] if isinstance(weights, Mapping) else weights
    if not isinstance(given, Sequence) or not all(map(_is_phase, given)):
        raise InvalidValue(
            f"weights is {weights!r:.80}; it must be numbers by name, as in {{'code': 3, 'prose': "
            "1}, or phases of first steps and such numbers, as in [(0, {…}), (2000, {…})]"
        )
    starts = [start for start, _ in given]
    if not starts or starts[0] != 0 or any(b <= a for a, b in itertools.pairwise(starts)):
        raise InvalidValue(
            f"the phases of weights begin at steps {starts}; the first begins at 0, and each "
            "other one later than the one before, as in [(0, {…}), (2000, {…})]"
        )
    phases: list[tuple[int, dict[str, Fraction]]] = []
    for number, (start, each) in enumerate(given):
        expected = names if number == len(given) - 1 else names[: len(each)]
        if set(each) != set(expected) or (phases and len(each) < len(phases[-1][1])):
            seen = ", ".join(map(str, each)) or "nothing"
            raise InvalidValue(
                f"the weights from step {start:,} on are for {seen}, and "
                f"the corpora are {', '.join(names)}; give each a weight, perhaps 0 (a corpus that "
                "joins later comes after the others, and every phase from then on names it)"
            )
        exact = {name: _as_fraction(each[name]) for name in expected}
        if any(weight < 0 for weight in exact.values()) or not any(exact.values()):
            raise InvalidValue(
                f"the weights from step {start:,} on are {dict(each)}; they must be at least 0, "
                "and at least one above 0"
            )
        total = sum(exact.values(), Fraction(0))
        if min(weight for weight in exact.values() if weight) < total * LEAST:
            raise InvalidValue(
                f"the weights from step {start:,} on are {dict(each)}; a share is 0 or at least "
                f"{float(LEAST):g} of all, for steps are counted in 64 bits"
            )
        phases.append((start, {name: weight / total for name, weight in exact.items()}))
    return phases


def _is_phase(given: Any) -> bool:
    is_pair = isinstance(given, Sequence) and len(given) == 2
    return is_pair and isinstance(given[0], numbers.Integral) and hasattr(given[1], "values")


def _as_fraction(weight: Any) -> Fraction:
    """The exact value of a weight, from its text: 7/10 for 0.7; −1 if it is no finite number.

    It may be text itself, as fractions are in a plan's `changes`.
    """
    try:
        return Fraction(str(weight))
    except (ValueError, ZeroDivisionError):
        return Fraction(-1)
