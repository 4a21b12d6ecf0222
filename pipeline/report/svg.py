"""SVG: a drawing with axes, whose colours are the page's and so follow its light or dark theme."""

import html
import math
from collections.abc import Sequence

# All charts have one width, in the units of text of size `TEXT`. A page shows them about as wide
# as that on paper, on a phone and on a screen, so text is never scaled far.
WIDTH, TEXT = 400, 12


def short(value: float) -> str:
    """A number for an axis.

    >>> short(1500), short(0.25), short(2_000_000), short(12)
    ('1.5k', '0.25', '2M', '12')
    """
    for unit, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= unit:
            return f"{value / unit:.4g}{suffix}"
    return f"{value:.4g}"


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers from `low` to `high`, about `count` of them.

    >>> ticks(0, 10), ticks(1.02, 1.08, 3)
    ([0.0, 2.0, 4.0, 6.0, 8.0, 10.0], [1.02, 1.04, 1.06, 1.08])
    """
    step = (high - low) / max(count, 1) or 1
    unit = 10 ** math.floor(math.log10(step))
    step = next(unit * times for times in (1, 2, 5, 10) if unit * times >= step * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [float(f"{number * step:.10g}") for number in range(first, last + 1)]


def decades(low: float, high: float) -> list[float]:
    """Powers of ten from `low` to `high`, and twos and fives among them if there are few."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for times in ((1,), (1, 3), (1, 2, 5)):
        found = [t * 10.0**p for p in powers for t in times if low <= t * 10.0**p <= high]
        if len(found) > 3:
            break
    return found


class Scale:
    """Values to places along an axis, linear or logarithmic."""

    def __init__(self, low: float, high: float, start: float, end: float, *, log: bool = False):
        self.low, self.high, self.log = low, high if high > low else low + 1, log
        self._start, self._end = start, end

    def __call__(self, value: float) -> float:
        """The place of a value; what is beyond an end is placed at that end."""
        low, high, at = self.low, self.high, min(max(value, self.low), self.high)
        if self.log:
            low, high, at = math.log(low), math.log(high), math.log(at)
        return self._start + (at - low) / (high - low) * (self._end - self._start)

    def ticks(self, count: int = 5) -> list[float]:
        """Where to write numbers."""
        return decades(self.low, self.high) if self.log else ticks(self.low, self.high, count)


class Drawing:
    """An SVG under construction; every colour is a class of the page's style sheet."""

    def __init__(self, height: int, label: str):
        self.height, self._label = height, label
        self._parts: list[str] = []

    def rect(self, x: float, y: float, width: float, height: float, kind: str, title: str = ""):
        """A filled rectangle of class `kind`; `title` is shown while the pointer is on it."""
        inside = f"<title>{html.escape(title)}</title>" if title else ""
        self._parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0):.1f}" '
            f'height="{max(height, 0):.1f}" class="{kind}">{inside}</rect>'
        )

    def line(self, points: Sequence[tuple[float, float]], kind: str):
        """A line through points."""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self._parts.append(f'<polyline points="{path}" class="{kind}"/>')

    def dot(self, x: float, y: float, kind: str, title: str):
        """A point."""
        self._parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" class="{kind}">'
            f"<title>{html.escape(title)}</title></circle>"
        )

    def text(self, x: float, y: float, text: str, kind: str = "", anchor: str = "start"):
        """A line of text with its baseline at `y`."""
        self._parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{kind}">'
            f"{html.escape(text)}</text>"
        )

    def x_axis(self, scale: Scale, y: float, title: str, *, grid_to: float | None = None):
        """Numbers under the line at `y`, and what they count, with its unit."""
        for value in _apart(scale.ticks(), scale):
            x = scale(value)
            self.line([(x, y), (x, y + 4 if grid_to is None else grid_to)], "grid")
            self.text(x, y + 17, short(value), "tick", "middle")
        self.text(WIDTH / 2, y + 35, title, "axis", "middle")

    def y_axis(self, scale: Scale, left: float, right: float, title: str):
        """Numbers left of the plot, grid lines, and above them what they count."""
        for value in scale.ticks(4):
            y = scale(value)
            self.line([(left, y), (right, y)], "grid")
            self.text(left - 6, y + 4, short(value), "tick", "end")
        self.text(4, 13, title, "axis")

    def render(self) -> str:
        """The SVG element."""
        return (
            f'<svg viewBox="0 0 {WIDTH} {self.height:g}" role="img" '
            f'aria-label="{html.escape(self._label)}">{"".join(self._parts)}</svg>'
        )


def _apart(values: list[float], scale: Scale) -> list[float]:
    """Those values whose labels leave room for one another."""
    kept: list[float] = []
    for value in values:
        room = (len(short(value)) + 1) * 7.5
        if not kept or scale(value) - scale(kept[-1]) >= room:
            kept.append(value)
    return kept
