"""Seconds of a step of any shape, interpolated between measured shapes.

No formula is assumed: on one machine the best fit of `a + b·positions + c·positions·length` was off
by 17%, because times jump where data outgrow a cache. The logarithm of the seconds per position is
interpolated over the logarithms of lengths and positions, by ordinary kriging with a linear
variogram (Matheron, 1963); in one dimension, this is linear interpolation. Kriging also gives the
variance of each value: 0 at a measured shape, and more the farther away the nearest one is.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pipeline.planning.bucket import Bucket

# The least `roughness` of a surface, and the number of standard deviations within which a value is
# expected. In 60 simulations (costs with jumps of up to 35%, and 5% noise for each shape), no
# choice was worse than its certificate, with 6.9 of 12 shapes measured on average. With 0.1 and one
# standard deviation, ten choices were, with 5.3 shapes measured.
LEAST_ROUGHNESS, DEVIATIONS = 0.2, 2

# The median of the square of a standard normal variable.
MEDIAN_OF_SQUARES = 0.455


class Estimate(NamedTuple):
    """Seconds of a step of each of some shapes: float64 arrays `[shapes]`."""

    seconds: np.ndarray
    low: np.ndarray  # the least that are expected
    high: np.ndarray  # the most that are expected


class Surface:
    """Seconds of a step of any shape, from measured ones.

    >>> surface = Surface([Bucket(8, 128), Bucket(2, 512)], [1.0, 2.0])
    >>> surface.estimate([Bucket(8, 128), Bucket(4, 256)]).seconds.round(2).tolist()
    [1.0, 1.41]

    Args:
        shapes: the measured shapes, all different.
        seconds: the seconds of a step of each shape.
        low: lower bounds on these seconds, which are noisy; None: `seconds`.
        high: upper bounds on them; None: `seconds`.

    Attributes:
        roughness: the standard deviation of the logarithm of seconds per position over a factor
            of two in length, around straight lines between measured shapes.
    """

    def __init__(
        self,
        shapes: Sequence[Bucket],
        seconds: Sequence[float],
        low: Sequence[float] | None = None,
        high: Sequence[float] | None = None,
    ):
        self._places, self._positions = _places(shapes), _positions(shapes)
        self._low = np.array(seconds if low is None else low, float)
        self._high = np.array(seconds if high is None else high, float)
        self._seconds = np.array(seconds, float)
        self._values = np.log(self._seconds / self._positions)
        self.roughness = self._measure_roughness()

    def estimate(self, shapes: Sequence[Bucket]) -> Estimate:
        """The seconds of some shapes, and the interval in which they are expected."""
        places, positions = _places(shapes), _positions(shapes)
        value, variance = _krige(self._places, self._values, places)
        seconds = np.exp(value) * positions
        factor = np.exp(DEVIATIONS * self.roughness * np.sqrt(variance))
        low, high = seconds / factor, seconds * factor
        same = (places[:, None] == self._places).all(axis=-1)
        measured, which = same.any(axis=1), same.argmax(axis=1)
        values = (self._seconds, seconds), (self._low, low), (self._high, high)
        return Estimate(*(np.where(measured, known[which], other) for known, other in values))

    def _measure_roughness(self) -> float:
        """The roughness, from the errors of estimating each measured shape from all others."""
        squares, every = [], np.arange(len(self._values))
        for one in every if len(every) > 2 else ():
            others = every != one
            value, variance = _krige(
                self._places[others], self._values[others], self._places[one : one + 1]
            )
            squares.append((value[0] - self._values[one]) ** 2 / max(variance[0], 1e-9))
        typical = np.sqrt(np.median(squares) / MEDIAN_OF_SQUARES) if squares else 0.0
        return max(float(typical), LEAST_ROUGHNESS)


def spread_out(shapes: Sequence[Bucket], first: int, most: int) -> list[int]:
    """The numbers of up to `most` shapes to measure first, each far from those before it.

    The first is `first`. There are fewer than `most` if every other shape is already within a
    factor of two of one of them.

    >>> spread_out([Bucket(1, length) for length in (64, 128, 256, 512)], first=3, most=3)
    [3, 0, 1]
    """
    places = _places(shapes)
    found, far = [first], _distances(places, places[first : first + 1])[:, 0]
    while len(found) < most and far.max() >= 1:
        found.append(int(far.argmax()))
        far = np.minimum(far, _distances(places, places[found[-1] :][:1])[:, 0])
    return found


def _krige(
    places: np.ndarray, values: np.ndarray, wanted: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Values at `wanted`, and their variances, if differences over distance 1 have variance 1."""
    count = len(places)
    system = np.ones((count + 1, count + 1))
    system[:count, :count], system[count, count] = -_distances(places, places) / 2, 0
    right = np.ones((count + 1, len(wanted)))
    right[:count] = -_distances(places, wanted) / 2
    weights = np.linalg.solve(system, right)
    return values @ weights[:count], np.maximum(-(weights * right).sum(axis=0), 0)


def _places(shapes: Sequence[Bucket]) -> np.ndarray:
    """The logarithms, to base 2, of the lengths and of the positions of each shape."""
    return np.log2([[*shape.lengths, shape.positions] for shape in shapes])


def _positions(shapes: Sequence[Bucket]) -> np.ndarray:
    return np.array([shape.positions for shape in shapes], float)


def _distances(places: np.ndarray, others: np.ndarray) -> np.ndarray:
    return np.linalg.norm(places[:, None] - others[None], axis=-1)
