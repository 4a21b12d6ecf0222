"""Options: how a plan is made, checked once; and weights, how much of each corpus there is."""

import dataclasses
import itertools
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from pipeline.packing.bucket import Bucket, as_buckets
from pipeline.packing.cascade import PACKINGS
from pipeline.planning import lengths as lengths_lib
from pipeline.planning.checks import require_one_of, require_whole, unknown
from pipeline.planning.pieces import OVERFLOWS

# The version of the planning algorithm. It goes up whenever the plan of a corpus would change, so
# that a checkpoint is never continued under another order of batches; and that of mixtures.
VERSION = 2
MIXTURE_VERSION = 2

WINDOW = 1 << 22

BY = ("tokens", "examples")
ENDINGS = ("repeat", "stop", "renormalise")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The keywords of `Plan`, but for the weights.

    >>> Options(buckets=[Bucket(2, 8)]).changed(seed=-1)
    Traceback (most recent call last):
        ...
    ValueError: seed is -1; it must be a whole number from 0 up

    Raises:
        ValueError: a value is not what `Plan` takes.
    """

    buckets: tuple[Bucket, ...]
    seed: int = 0
    shuffle: bool = True
    packing: str = "best_fit"
    overflow: str | None = None
    window: int = WINDOW
    max_segments: int | None = None
    by: str = "tokens"
    ending: str = "repeat"
    patterns: str | None = None

    def __post_init__(self):
        def put(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)

        put("buckets", as_buckets(self.buckets))
        put("seed", require_whole("seed", self.seed, 0))
        put("window", require_whole("window", self.window, 1))
        if self.max_segments is not None:
            put("max_segments", require_whole("max_segments", self.max_segments, 1))
        if not isinstance(self.shuffle, bool | np.bool_):
            raise ValueError(f"shuffle is {self.shuffle!r}; it must be True or False")
        put("shuffle", bool(self.shuffle))
        require_one_of("packing", self.packing, PACKINGS)
        if self.overflow is None:
            put("overflow", "error" if self.pairs else "split")
        known = OVERFLOWS[1:] if self.pairs else OVERFLOWS
        if self.pairs and self.overflow == "split":
            raise ValueError(
                "overflow is 'split'; a target cut in two would lose its inputs; for pairs it must "
                f"be one of {', '.join(known)}"
            )
        require_one_of("overflow", self.overflow, known)
        if self.pairs and self.packing == "optimal":
            raise ValueError("packing='optimal' is for one length; for pairs take 'best_fit'")
        require_one_of("by", self.by, BY)
        require_one_of("ending", self.ending, ENDINGS)
        if self.patterns is not None:
            put("patterns", os.fspath(self.patterns))

    @property
    def pairs(self) -> bool:
        """Whether the buckets are of pairs."""
        return len(self.buckets[-1].lengths) == 2

    def changed(self, **changes: Any) -> "Options":
        """The options with other values.

        Raises:
            ValueError: there is no such option, it cannot change, or a value is wrong.
        """
        known = [field.name for field in dataclasses.fields(self) if field.name != "ending"]
        for name in changes:
            if name not in known:
                every = [*known, "weights", "lengths", "leave_out"]
                raise ValueError(f"a plan has no option that can change {unknown(name, every)}")
        return dataclasses.replace(self, **changes)

    def as_json(self, names: Iterable[str]) -> dict[str, Any]:
        """The values of some options; a bucket as its rows and length."""
        values = {name: getattr(self, name) for name in names}
        if "buckets" in values:
            values["buckets"] = [bucket.as_json for bucket in self.buckets]
        return values

    def parts(self) -> dict[str, Any]:
        """What rows and batches depend on, by name, as a fingerprint has it."""
        return {
            "buckets": "+".join(map(str, self.buckets)),
            "seed": self.seed,
            "shuffle": "yes" if self.shuffle else "no",
            "packing": self.packing,
            "overflow": self.overflow,
            "max_segments": self.max_segments or "any",
        }


# Examples that stand for a mixture where buckets are fitted to it.
SAMPLE = 1 << 20

Weights = Mapping[str, float] | Sequence[tuple[int, Mapping[str, float]]]


def as_phases(weights: Weights, names: Sequence[str]) -> list[tuple[int, dict[str, Fraction]]]:
    """The phases that `weights` say, the weights of each as fractions of 1, by `names` in order.

    A name joins with the first phase that has it; after that, every phase has.

    >>> as_phases({"code": 3, "prose": 1}, ["code", "prose"])
    [(0, {'code': Fraction(3, 4), 'prose': Fraction(1, 4)})]

    Raises:
        ValueError: names differ, or join in another order than that of `names`; a weight is
            negative or not a number, or all are 0; or the first steps do not ascend from 0.
    """
    given = [(0, weights)] if isinstance(weights, Mapping) else [(s, w) for s, w in weights]
    starts = [start for start, _ in given]
    if not starts or starts[0] != 0 or any(b <= a for a, b in itertools.pairwise(starts)):
        raise ValueError(
            f"the phases of weights begin at steps {starts}; the first begins at 0, and each of "
            "the others after the one before, as in [(0, {…}), (2000, {…})]"
        )
    phases: list[tuple[int, dict[str, Fraction]]] = []
    for number, (start, each) in enumerate(given):
        there = names if number == len(given) - 1 else names[: len(each)]
        if set(each) != set(there) or (phases and len(each) < len(phases[-1][1])):
            raise ValueError(
                f"the weights from step {start:,} on are for {', '.join(each) or 'nothing'}, and "
                f"the corpora are {', '.join(names)}; give each a weight, 0 for none (those that "
                "join later come last, and are named from their first phase on)"
            )
        # By way of its text 0.7 is 7/10, as it was meant; a plan writes fractions as text.
        finite = all(isinstance(w, str) or math.isfinite(w) for w in each.values())
        exact = {name: Fraction(str(each[name])) for name in there} if finite else {}
        if any(weight < 0 for weight in exact.values()) or not any(exact.values()):
            raise ValueError(
                f"the weights from step {start:,} on are {dict(each)}; they must be at least 0, "
                "and one of them above"
            )
        total = sum(exact.values(), Fraction(0))
        phases.append((int(start), {name: weight / total for name, weight in exact.items()}))
    return phases


def typical_lengths(
    corpora: Mapping[str, lengths_lib.Lengths], weights: Weights, by: str
) -> np.ndarray:
    """Lengths as they come in batches of several corpora, to fit buckets to: about a million.

    Of each corpus as many examples as are its share over the phases, spread evenly over it, some
    several times; and its longest.
    """
    phases = as_phases(weights, tuple(corpora))
    counts = {}  # of examples, in some unit
    arrays = {name: lengths.array for name, lengths in corpora.items()}
    for name, lengths in arrays.items():
        mean = lengths.sum(dtype=np.int64) / max(len(lengths), 1) if by == "tokens" else 1
        shares = sum(each.get(name, Fraction(0)) for _, each in phases)
        counts[name] = float(shares) / max(mean, 1e-9)
    parts = []
    for name, count in counts.items():
        lengths = arrays[name]
        number = round(SAMPLE * count / sum(counts.values()))
        parts.append(lengths[np.arange(number) * len(lengths) // max(number, 1)])
        if count:
            total = lengths if lengths.ndim == 1 else lengths.sum(axis=1)
            parts.append(lengths[np.argmax(total)][None])
            if lengths.ndim == 2:  # no pair need have both the longest inputs and targets
                parts.append(lengths[lengths.argmax(axis=0)])
    return np.concatenate(parts)
