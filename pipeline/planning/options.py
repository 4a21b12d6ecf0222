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
from pipeline.planning.balance import count_units
from pipeline.planning.bucket import Bucket, as_buckets
from pipeline.planning.exact import MOST_SUMS
from pipeline.planning.gaps import check_fill
from pipeline.planning.lengths import AnyLengths, Lengths
from pipeline.planning.packing import (
    ATTENTIONS,
    PACKERS,
    PACKINGS,
    Attention,
    Packing,
    row_cost,
)
from pipeline.planning.patterns import Packer, Rules
from pipeline.planning.pieces import OVERFLOWS, Overflow, Pieces

# The version of the planning algorithm. It goes up whenever a plan would change, so that a run
# never continues from a checkpoint with other batches.
VERSION = 11

WINDOW = 1 << 22

# With several corpora, each has windows of at least this many pieces, or of `window` if fewer.
LEAST_WINDOW = 1 << 16

LEAST = Fraction(1, 10**9)  # the least share above 0
MOST_COST = 1e9  # of a position

# An option that may differ between sides: a number, or numbers by name.
BySide = float | Mapping[str, float]

Curriculum = Literal["short_first"]
CURRICULA: tuple[Curriculum, ...] = get_args(Curriculum)

By = Literal["tokens", "examples"]
BY: tuple[By, ...] = get_args(By)


def list_keywords(function: Callable) -> tuple[str, ...]:
    """The names of a function's keyword-only arguments."""
    parameters = inspect.signature(function).parameters.values()
    return tuple(
        parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY
    )


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
    align: BySide
    cost: BySide
    attention: Attention
    width: int


class PlanOptions(PackingOptions, total=False):
    """The options of `Plan`."""

    seed: int
    shuffle: bool
    tiers: int
    curriculum: Curriculum | None
    cycles: int
    read_shares: int
    by: By


class Changes(PlanOptions, total=False):
    """The options that `Plan.after` changes."""

    buckets: Iterable[Bucket]


def by_side(name: str, value: Any, names: Sequence[str], default: Any = None) -> tuple[Any, ...]:
    """The value of an option for each side; without a default, all must be named.

    >>> by_side("align", {"patches": 4}, ("inputs", "patches"), 1)
    (1, 4)
    """
    if isinstance(value, tuple | list) and len(value) == len(names):
        return tuple(value)
    if not isinstance(value, Mapping):
        return (value,) * len(names)
    missing = [side for side in names if side not in value] if default is None else []
    if missing or not {*value} <= {*names}:
        lacking = f", but not {' and '.join(missing)}" if missing else ""
        free = "; give 0 for a side that costs nothing" if name == "cost" else ""
        raise InvalidValue(
            f"{name} names {' and '.join(map(str, value)) or 'no side'}{lacking}; the sides are "
            f"{', '.join(names)}{free or '; give a value for each of them'}"
        )
    return tuple(value.get(side, default) for side in names)


def whole_by_side(
    name: str, value: Any, names: Sequence[str], default: int | None = None
) -> tuple[int, ...]:
    """`by_side` of whole numbers of at least 1, checked."""
    return tuple(require_whole(name, number, 1) for number in by_side(name, value, names, default))


def as_costs(cost: Any, names: Sequence[str]) -> tuple[float, ...]:
    """What a position of each side costs, checked; whole numbers are integers."""
    costs = by_side("cost", cost, names)
    numeric = all(isinstance(number, int | float | np.number) for number in costs)
    if not numeric or not any(costs) or not all(0 <= number < MOST_COST for number in costs):
        raise InvalidValue(
            f"cost is {cost!r}; it must be a number of at least 0, and below {MOST_COST:g}, for "
            "each side, and above 0 for one: 0 for a side that costs nothing, such as a number of "
            "images"
        )
    return tuple(int(c) if c == int(c) else float(c) for c in costs)


def unify(values: Sequence[Any]) -> Any:
    """How a value for each side is written: as one, if all are the same.

    >>> unify((4, 4)), unify((4, 1))
    (4, (4, 1))
    """
    return values[0] if len({*values}) == 1 else values


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
    # Once checked, a tuple with a number for each side.
    align: Any = 1
    cost: Any = 1
    # Until checked, None stands for what the buckets were fitted for.
    attention: Any = None
    width: Any = None
    tiers: int = 1
    curriculum: Curriculum | None = None
    cycles: int = 1
    read_shares: int = 1
    by: By = "tokens"

    def __post_init__(self) -> None:
        def put(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)

        model = {"attention": "dense", "width": 1024, **getattr(self.buckets, "model", {})}
        for name, value in model.items():
            if getattr(self, name) is None:
                put(name, value)
        put("buckets", as_buckets(self.buckets))
        put("seed", require_whole("seed", self.seed, 0))
        put("window", require_whole("window", self.window, 1))
        put("tiers", require_whole("tiers", self.tiers, 1))
        put("cycles", require_whole("cycles", self.cycles, 1))
        if self.curriculum is not None:
            require_one_of("curriculum", self.curriculum, CURRICULA)
        elif self.cycles > 1:
            raise InvalidValue(
                f"cycles is {self.cycles}, how often in an epoch a curriculum begins; give "
                "curriculum= as well"
            )
        put("read_shares", require_whole("read_shares", self.read_shares, 1))
        if self.read_shares > self.window:
            raise InvalidValue(
                f"read_shares is {self.read_shares:,} and window is {self.window:,}; each share "
                "has some examples of every window, so give fewer shares: the largest power of "
                "two up to window // 16,384 keeps padding low"
            )
        put("width", require_whole("width", self.width, 1))
        require_one_of("attention", self.attention, ATTENTIONS)
        names = self.buckets[-1].names
        put("align", whole_by_side("align", self.align, names, 1))
        put("cost", as_costs(self.cost, names))
        if np.any(np.array([bucket.lengths for bucket in self.buckets]) % self.align):
            align = unify(self.align)
            raise InvalidValue(
                f"bucket lengths are {[bucket.length for bucket in self.buckets]}; with "
                f"align={align} each must be a multiple of {align}, as fit_buckets(…, "
                f"align={align}) chooses them"
            )
        if self.max_segments is not None:
            put("max_segments", require_whole("max_segments", self.max_segments, 1))
        if not isinstance(self.shuffle, bool | np.bool_):
            raise InvalidValue(f"shuffle is {self.shuffle!r}; it must be True or False")
        put("shuffle", bool(self.shuffle))
        require_one_of("packing", self.packing, PACKINGS)
        if self.overflow is None:
            put("overflow", "error" if self.vectors else "split")
        allowed = OVERFLOWS[1:] if self.vectors else OVERFLOWS
        if self.vectors and isinstance(self.overflow, str) and self.overflow == "split":
            raise InvalidValue(
                "overflow is 'split'; a piece would lose its other sides; give 'error', 'drop', or "
                "'truncate' for sides that nothing points to"
            )
        require_one_of("overflow", self.overflow, allowed)
        if self.cuts:
            check_fill(vectors=self.vectors, align=max(self.align))
        require_one_of("by", self.by, BY)

    @property
    def vectors(self) -> bool:
        """Whether examples have several sides."""
        return len(self.names) > 1

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the sides."""
        return self.buckets[-1].names

    @property
    def cuts(self) -> bool:
        """Whether examples are cut although they would fit in a row."""
        return PACKERS[self.packing].cuts

    @property
    def most_in_row(self) -> int | None:
        """The most segments in a row; None if there is no limit."""
        return 1 if self.packing == "none" else self.max_segments

    def count_units(self, bucket: Bucket) -> int:
        """The number of units of a batch, between which rows do not move; see `balance`."""
        return count_units(bucket.rows, self.read_shares)

    def price(self, bucket: Bucket) -> float:
        """The cost of a row of a bucket; `fit_buckets` explains the formula."""
        lengths = np.multiply(bucket.lengths, self.cost).tolist()
        if self.packing == "none":
            return sum(lengths)
        return row_cost(*lengths, attention=self.attention, width=self.width)

    def packer(
        self,
        sizes: np.ndarray,
        buckets: Sequence[Bucket] | None = None,
        used: Sequence[int] | None = None,
        *,
        exactly: bool = True,
    ) -> Packer:
        """Packs pieces of `sizes`, in units of `align` columns: int64 [sizes, sides].

        `buckets` are by default those of the options, of which `used` may have rows. Without
        `exactly`, rows are never filled exactly, which takes less time.
        """
        every = self.buckets if buckets is None else buckets
        rules = Rules(
            rooms=np.array([bucket.lengths for bucket in every]) // self.align,
            rows=tuple(bucket.rows for bucket in every),
            prices=tuple(map(self.price, every)),
            weights=tuple(np.multiply(self.cost, self.align).tolist()),
            max_segments=self.most_in_row,
            used=used,
            # The shares of a window may take as long together as one that is not divided.
            sums=MOST_SUMS // self.read_shares if exactly else 0,
        )
        return PACKERS[self.packing](rules, sizes)

    def cut(
        self,
        lengths: AnyLengths | Lengths,
        room: tuple[int, ...] | None = None,
        overflow: Overflow | None = None,
    ) -> Pieces:
        """The pieces of examples of these lengths; `room` and `overflow` replace the options'."""
        room = self.buckets[-1].lengths if room is None else room
        rule = self.overflow if overflow is None else overflow
        return Pieces(lengths, room, rule, align=self.align, costs=self.cost)

    def change(self, **changes: Unpack[Changes]) -> "Options":
        """The options with some values replaced."""
        names = [*Changes.__annotations__, "weights", "lengths", "exclude"]
        for name in changes:
            if name not in names:
                raise InvalidValue(
                    f"a plan has no option that can change {suggest_option(name, names)}"
                )
        # Of the wider types that `__post_init__` converts; new buckets may bring another model.
        model = getattr(changes.get("buckets"), "model", {})
        values: Any = {"align": unify(self.align), "cost": unify(self.cost), **model, **changes}
        if values.get("curriculum", self.curriculum) is None:
            values.setdefault("cycles", 1)
        return dataclasses.replace(self, **values)

    def as_json(self, names: Iterable[str] | None = None) -> dict[str, Any]:
        """Some options as JSON, by default all in use; a bucket is `[rows, length]`."""
        unused = {"curriculum", "cycles"} if self.curriculum is None else set()
        unused |= {"read_shares"} if self.read_shares == 1 else set()
        every = [field.name for field in dataclasses.fields(self) if field.name not in unused]
        values = {name: getattr(self, name) for name in (every if names is None else names)}
        if "buckets" in values:
            values["buckets"] = [bucket.as_json for bucket in self.buckets]
        values |= {n: unify(values[n]) for n in ("align", "cost") if n in values}
        return {
            n: list(value) if isinstance(value, tuple) else value for n, value in values.items()
        }


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
    for number, (start, shares) in enumerate(given):
        expected = names if number == len(given) - 1 else names[: len(shares)]
        if set(shares) != set(expected) or (phases and len(shares) < len(phases[-1][1])):
            seen, corpora = (", ".join(map(str, some)) or "nothing" for some in (shares, names))
            raise InvalidValue(
                f"the weights from step {start:,} on are for {seen}, and "
                f"the corpora are {corpora}; give each a weight, perhaps 0 (a corpus that "
                "joins later comes after the others, and every phase from then on names it)"
            )
        exact = {name: _as_fraction(shares[name]) for name in expected}
        if any(weight < 0 for weight in exact.values()) or not any(exact.values()):
            raise InvalidValue(
                f"the weights from step {start:,} on are {dict(shares)}; they must be at least 0, "
                "and at least one above 0"
            )
        total = sum(exact.values(), Fraction(0))
        if min(weight for weight in exact.values() if weight) < total * LEAST:
            raise InvalidValue(
                f"the weights from step {start:,} on are {dict(shares)}; a share is 0 or at least "
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
