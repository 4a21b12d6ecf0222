"""Weights: how much of each source a mixture has, and from which step on."""

import itertools
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction

import numpy as np

from pipeline.planning import lengths as lengths_lib

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
        if not all(math.isfinite(w) and w >= 0 for w in each.values()) or not any(each.values()):
            raise ValueError(
                f"the weights from step {start:,} on are {dict(each)}; they must be at least 0, "
                "and one of them above"
            )
        # By way of its text 0.7 is 7/10, as it was meant.
        exact = {name: Fraction(str(each[name])) for name in there}
        total = sum(exact.values())
        phases.append((int(start), {name: weight / total for name, weight in exact.items()}))
    return phases


def typical_lengths(joined, weights: Weights, by: str = "tokens") -> np.ndarray:
    """Lengths as they come in the mixture, for `fit_buckets`: about a million.

    Of each corpus as many examples as are its share over the phases, spread evenly over it, some
    several times; and its longest.
    """
    corpora = getattr(joined, "corpora", joined)
    phases = as_phases(weights, tuple(corpora))
    counts = {}  # of examples, in some unit
    for name, corpus in corpora.items():
        lengths = lengths_lib.as_lengths(corpus)
        mean = lengths.sum(dtype=np.int64) / max(len(lengths), 1) if by == "tokens" else 1
        shares = sum(each.get(name, Fraction(0)) for _, each in phases)
        counts[name] = float(shares) / max(mean, 1e-9)
    parts = []
    for name, count in counts.items():
        lengths = lengths_lib.as_lengths(corpora[name])
        number = round(SAMPLE * count / sum(counts.values()))
        parts.append(lengths[np.arange(number) * len(lengths) // max(number, 1)])
        if count:
            parts.append(lengths[np.argmax(lengths)][None])
    return np.concatenate(parts)
