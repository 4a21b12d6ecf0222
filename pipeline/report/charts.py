"""Charts: the report's figures as drawings, each with its units on its axes."""

import itertools
from collections.abc import Sequence

from pipeline.report.svg import WIDTH, Drawing, Scale, short

LEFT, RIGHT, BOTTOM = 48, 12, 44  # margins of a plot
STEPS = 120  # that the order of buckets is shown for
STRETCHES = 40  # of an epoch, in each of which buckets are counted


def histogram(
    binned: dict,
    values: str,
    *,
    log: bool = False,
    marks: Sequence[tuple[str, float]] = (),
    buckets: Sequence[int] = (),
    label: str,
) -> str:
    """Columns over length.

    Args:
        binned: `edges`, and `examples` and `tokens` between them; and, if columns are of unequal
            width, the usual `width`.
        values: which of the two to draw.
        log: logarithmic axes.
        marks: lines to draw at lengths, with their names.
        buckets: lengths of buckets; each column has the colour of the shortest that holds it.
        label: what it is, for those who do not see it.
    """
    edges, counted, wide = binned["edges"], binned[values], binned.get("width")
    # Where columns are of unequal width, their heights are for one of the usual width.
    sizes = [end - start for start, end in itertools.pairwise(edges)]
    heights = [n * (wide or size) / size for n, size in zip(counted, sizes, strict=True)]
    low = 1 if log else 0
    x = Scale(low, edges[-1], LEFT, WIDTH - RIGHT, log=log)
    names = _rows_of_names(marks, x)
    top = 28 + 15 * (1 + max((row for _, _, row in names), default=-1))
    height = top + 190
    drawing = Drawing(height + BOTTOM - 8, label)
    least = 0.5 if log else 0
    y = Scale(least, max(max(heights), 1), height - 8, top, log=log)
    unit = f"per {short(wide)} positions of length" if wide else "in a column"
    drawing.y_axis(y, LEFT, WIDTH - RIGHT, f"{values} {unit}")
    for (start, end), value, number in zip(
        itertools.pairwise(edges), heights, counted, strict=True
    ):
        if value:
            inside = next((i for i, longest in enumerate(buckets) if end - 1 <= longest), None)
            kind = "bar" if not buckets else f"c{inside}" if inside is not None else "over"
            name = f"{start:,}" if end == start + 1 else f"{start:,} to {end - 1:,}"
            width = max(x(end) - x(start) - 0.5, 0.7)
            title = f"length {name}: {number:,} {values}"
            drawing.rect(x(start), y(value), width, y(least) - y(value), kind, title)
    drawing.x_axis(x, height - 8, f"length, positions{' (log scale)' if log else ''}")
    for (name, value), (_, start, row) in zip(marks, names, strict=True):
        drawing.line([(x(value), top), (x(value), height - 8)], "mark")
        drawing.text(start, top - 8 - 15 * row, name, "note")
    return drawing.render()


def _rows_of_names(marks: Sequence[tuple[str, float]], x: Scale) -> list[tuple[str, float, int]]:
    """Where the names of marks start, and in which row above the plot, so that none overlap."""
    ends: list[float] = []
    placed = []
    for name, value in marks:
        wide = len(name) * 7.0
        start = min(max(x(value) - wide / 2, LEFT), WIDTH - RIGHT - wide)
        row = next((row for row, end in enumerate(ends) if start > end + 5), len(ends))
        ends[row : row + 1] = [start + wide]
        placed.append((name, start, row))
    return placed


def bars(rows: Sequence[tuple[str, float, str, str]], *, unit: str, most: float, label: str) -> str:
    """Horizontal bars, each under its name.

    Args:
        rows: name, value, what to write behind the bar, and the class of its colour.
        unit: what the values are, with their unit, for the axis.
        most: the end of the axis.
        label: what it is, for those who do not see it.
    """
    step, left = 36, 8
    bottom = step * len(rows) + 4
    drawing = Drawing(bottom + BOTTOM, label)
    x = Scale(0, most, left, WIDTH - 74)
    for value in x.ticks():
        drawing.line([(x(value), 4), (x(value), bottom)], "grid")
    for index, (name, value, text, kind) in enumerate(rows):
        y = step * index + 16
        drawing.text(left, y, name, "name")
        drawing.rect(left, y + 5, max(x(value) - left, 1), 11, kind, f"{name}: {text}")
        drawing.text(max(x(value), left + 1) + 6, y + 15, text, "value")
    drawing.x_axis(x, bottom, unit)
    return drawing.render()


def columns(values: Sequence[tuple[int, float]], *, x_unit: str, y_unit: str, label: str) -> str:
    """Upright columns, one at each whole number.

    Args:
        values: the number and its value, numbers ascending.
        x_unit: what the numbers count.
        y_unit: what the values are.
        label: what it is, for those who do not see it.
    """
    top, height = 30, 230
    drawing = Drawing(height + BOTTOM - 8, label)
    x = Scale(values[0][0] - 0.5, values[-1][0] + 0.5, LEFT, WIDTH - RIGHT)
    y = Scale(0, max(value for _, value in values), height - 8, top)
    drawing.y_axis(y, LEFT, WIDTH - RIGHT, y_unit)
    wide = min((x(x.low + 1) - x(x.low)) * 0.8, 60)
    for number, value in values:
        title = f"{number} {x_unit}: {short(value)} {y_unit}"
        drawing.rect(x(number) - wide / 2, y(value), wide, y(0) - y(value), "ours", title)
    drawing.line([(LEFT, y(0)), (WIDTH - RIGHT, y(0))], "grid")
    step = next(s for s in (1, 2, 5, 10, 20, 50, 100, 200, 500, 10**9) if x.high - x.low <= 12 * s)
    for number in range(values[0][0], values[-1][0] + 1):
        if number % step == 0:
            drawing.text(x(number), height + 9, str(number), "tick", "middle")
    drawing.text(WIDTH / 2, height + 27, x_unit, "axis", "middle")
    return drawing.render()


def lines(
    points: Sequence[tuple[float, Sequence[float]]],
    *,
    kinds: Sequence[tuple[str, str]],
    x_unit: str,
    y_unit: str,
    ends: tuple[float, float] | None = None,
    whole: bool = False,
    label: str,
) -> str:
    """A line for each kind.

    Args:
        points: where along the axis, and a value for each kind.
        kinds: the name and the class of each kind.
        x_unit: what is along the axis.
        y_unit: what the values are.
        ends: of the upright axis, at least; None: as far as the values go, and a little beyond.
        whole: whether `x` counts things: then each has a dot and a number of its own.
        label: what it is, for those who do not see it.
    """
    top, height = 56, 240
    drawing = Drawing(height + BOTTOM, label)
    every = [value for _, group in points for value in group]
    margin = 0 if ends else (max(every) - min(every)) * 0.08 or 0.01
    low, high = min(*every, *(ends or ())) - margin, max(*every, *(ends or ())) + margin
    y = Scale(low, high, height, top)
    beside = 0.3 if whole else 0
    x = Scale(points[0][0] - beside, points[-1][0] + beside, LEFT, WIDTH - RIGHT)
    drawing.y_axis(y, LEFT, WIDTH - RIGHT, y_unit)
    _legend(drawing, kinds, 32)
    for index, (name, kind) in enumerate(kinds):
        drawing.line([(x(at), y(group[index])) for at, group in points], f"line {kind}")
        for at, group in points if whole else ():
            drawing.dot(x(at), y(group[index]), kind, f"{name}, {at:g}: {group[index]:.4f}")
    if whole:
        for at, _ in points:
            drawing.text(x(at), height + 17, f"{at:g}", "tick", "middle")
        drawing.text(WIDTH / 2, height + 35, x_unit, "axis", "middle")
    else:
        drawing.x_axis(x, height, x_unit)
    return drawing.render()


def order_lanes(order: Sequence[int], lengths: Sequence[str]) -> str:
    """The bucket of each of the first steps: a lane for each bucket, the shortest at the top."""
    shown = order[:STEPS]
    top, lane = 24, max(22, 170 // len(lengths))
    bottom = top + lane * len(lengths)
    drawing = Drawing(bottom + BOTTOM, f"The bucket of each of the first {len(shown)} steps")
    x = Scale(0, len(shown), LEFT, WIDTH - RIGHT)
    drawing.text(4, 13, "bucket length, positions", "axis")
    for index, length in enumerate(lengths):
        y = top + lane * index
        drawing.text(LEFT - 6, y + lane / 2 + 4, f"{length}", "tick", "end")
        drawing.line([(LEFT, y + lane), (WIDTH - RIGHT, y + lane)], "grid")
    for step, bucket in enumerate(shown):
        width = max(x(step + 1) - x(step) - 0.4, 0.6)
        title = f"step {step}: length {lengths[bucket]}"
        drawing.rect(x(step), top + lane * bucket + 3, width, lane - 6, f"c{bucket}", title)
    drawing.x_axis(x, bottom, "step of the epoch")
    return drawing.render()


def order_shares(order: Sequence[int], lengths: Sequence[str]) -> str:
    """The share of each bucket among the batches, stretch by stretch of the epoch."""
    top, height = 48, 210
    drawing = Drawing(height + BOTTOM, "Share of each bucket's batches over the epoch")
    number = min(STRETCHES, len(order))
    x = Scale(0, len(order), LEFT, WIDTH - RIGHT)
    y = Scale(0, 100, height, top)
    drawing.y_axis(y, LEFT, WIDTH - RIGHT, "batches, %")
    _legend(drawing, [(length, f"c{i}") for i, length in enumerate(lengths)])
    for stretch in range(number):
        start, end = (len(order) * at // number for at in (stretch, stretch + 1))
        below = 0.0
        for bucket, length in enumerate(lengths):
            share = 100 * sum(step == bucket for step in order[start:end]) / (end - start)
            title = f"steps {start:,} to {end - 1:,}: {share:.1f}% of length {length}"
            if share:
                high = y(below) - y(below + share)
                wide = x(end) - x(start)
                drawing.rect(x(start), y(below + share), wide, high, f"c{bucket}", title)
            below += share
    drawing.x_axis(x, height, "step of the epoch")
    return drawing.render()


def _legend(drawing: Drawing, kinds: Sequence[tuple[str, str]], y: float = 29):
    at = float(LEFT)
    for name, kind in kinds:
        drawing.rect(at, y - 9, 10, 10, kind)
        drawing.text(at + 14, y, name, "note")
        at += 26 + len(name) * 6.8
