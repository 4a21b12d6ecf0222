"""What a step of any shape takes, interpolated between shapes that were measured.

No formula is assumed: on one machine the best `a + b·positions + c·positions·length` was off by
17%, because caches make jumps. The logarithm of the seconds per position is interpolated over the
logarithms of lengths and positions: between two measured lengths along a straight line, in more
dimensions by ordinary kriging with a linear variogram (Matheron, 1963), which is its generalisation
to points anywhere. Kriging also says how uncertain each value is: 0 at a measured shape, and more
the farther the next one is.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pipeline.planning.bucket import Bucket

# The least that seconds per position are taken to vary over a factor of two in length, and the
# standard deviations within which a value is expected. Of 60 drawn costs with jumps of up to 35%,
# and 5% at random for each shape, no choice was then worse than its certificate, after 6.9 of 12
# shapes in the mean. With 0.1 and one standard deviation ten choices were, after 5.3 shapes.
LEAST_ROUGHNESS, DEVIATIONS = 0.2, 2

# The median of the square of a standard normal variable.
MEDIAN_OF_SQUARES = 0.455


class Estimate(NamedTuple):
    """Seconds of a step of each of some shapes: float64 arrays `[shapes]`."""

    seconds: np.ndarray
    low: np.ndarray  # they may be as few as this
    high: np.ndarray  # or as many as this


class Surface:
    """Seconds of a step of any shape, from measured ones.

    >>> surface = Surface([Bucket(8, 128), Bucket(2, 512)], [1.0, 2.0])
    >>> surface.estimate([Bucket(8, 128), Bucket(4, 256)]).seconds.round(2).tolist()
    [1.0, 1.41]

    Args:
        shapes: the measured shapes, all different.
        seconds: of a step of each.
        low: what a step of each takes at least, as far as noise can be told; None: `seconds`.
        high: and at most.

    Attributes:
        roughness: the standard deviation of the logarithm of seconds per position over a factor
            of two in length, beside what straight lines between measured shapes explain.
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
        """From the errors of the estimates of each measured shape from all others."""
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
    """Numbers of shapes from which a surface may begin: each far from those before it.

    The first is `first`. There are up to `most`, and from no other shape is it farther to one of
    them than a factor of two.

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
    """Values at the places that are wanted, and their variances where a unit of distance has 1."""
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
