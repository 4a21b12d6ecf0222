"""Picture: one batch as an SVG drawing."""

import itertools
from collections.abc import Iterator
from html import escape

import numpy as np

from pipeline.cli.show import Segment, Shown, printable
from pipeline.errors import counted

WIDTH, MARGIN, GAP = 800, 10, 8  # pixels: the drawing, its margin, between the sides of a pair
TOP = 42  # pixels above the first row, for the caption
LETTER = 0.6  # the width of a letter of a monospaced font, for a size of one pixel
SMALLEST, LARGEST = 9, 12  # sizes of the text in segments, in pixels

# The segments of a row take these colours in turn.
LIGHT = "#a9d3f5", "#f8d48b", "#c5e3a1", "#f2b8c6", "#d3c3f1", "#a5e0d7"
DARK = "#1f5f94", "#7d5a12", "#4a6b1e", "#8a3b52", "#5b4694", "#1c6e64"


class Picture(str):
    """A drawing as SVG; a notebook displays it."""

    def _repr_svg_(self) -> str:
        return str(self)


def draw(shown: Shown, *, row: int | None = None) -> Picture:
    """The batch, or one row of it, with the text of each segment as far as it fits.

    Each segment has a colour, which is pale where positions have no loss. The grey rest of a row is
    padding. Readers who prefer dark pages see darker colours.
    """
    rows = shown.rows(row)
    lengths = [bucket.length for _, bucket, _ in shown.sides]
    unit = (WIDTH - 2 * MARGIN - GAP * (len(lengths) - 1)) / sum(lengths)  # pixels of a position
    pitch = min(28, max(4, 1200 // len(rows)))  # pixels from row to row
    shapes = []
    for y, number in zip(itertools.count(TOP, pitch), rows):
        left = float(MARGIN)
        for side, length in enumerate(lengths):
            shapes.append(_rectangle("row", left, y, length * unit, pitch - 3))
            for segment in shown.segments(number, side):
                text = printable(shown.text(segment, side)).replace("\n", "⏎")
                shapes += _draw_segment(segment, text, left, y, unit, pitch - 3)
            left += length * unit + GAP
    caption = (
        f"{shown.shape} positions · {counted(len(shown.planned.segments), 'segment')} · "
        f"{shown.padding:.2%} padding · step {shown.step:,}"
    )
    height = TOP + pitch * len(rows) + MARGIN
    return Picture(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" role="img" xml:space="preserve">\n<title>{caption}</title>\n'
        f'<style>{_style()}</style>\n<rect class="page" width="{WIDTH}" height="{height}" rx="6"/>'
        f'\n<text class="caption" x="{MARGIN}" y="28">{caption}</text>\n' + "\n".join(shapes) + "\n"
        "</svg>\n"
    )


def _draw_segment(
    segment: Segment, text: str, left: float, y: int, unit: float, height: int
) -> Iterator[str]:
    first, last = segment.columns
    x, width = left + first * unit, (last - first) * unit
    yield _rectangle(f"c{segment.number % len(LIGHT)}", x, y, width, height)
    edges = np.flatnonzero(np.diff(segment.loss, prepend=True, append=True)).tolist()
    for begin, end in zip(edges[::2], edges[1::2], strict=True):
        yield _rectangle("pale", x + begin * unit, y, (end - begin) * unit, height)
    size = min(LARGEST, max(SMALLEST, unit / LETTER))
    room = int(width / (LETTER * size))
    if height > LARGEST and room > 2:
        text = text if len(text) <= room else f"{text[: room - 1]}…"
        baseline = y + height / 2 + size / 3
        yield f'<text x="{x:.1f}" y="{baseline:.1f}" font-size="{size:.1f}">{escape(text)}</text>'


def _rectangle(kind: str, x: float, y: int, width: float, height: int) -> str:
    width = max(width - 1, 0.5)  # a line between neighbours
    return f'<rect class="{kind}" x="{x:.1f}" y="{y}" width="{width:.1f}" height="{height}"/>'


def _style() -> str:
    def colours(page: str, row: str, ink: str, segments: tuple[str, ...]) -> str:
        fills = {".page,.pale": page, ".row": row, "text": ink}
        fills |= {f".c{number}": colour for number, colour in enumerate(segments)}
        return "".join(f"{name}{{fill:{colour}}}" for name, colour in fills.items())

    return (
        "text{font-family:ui-monospace,Menlo,Consolas,monospace}.pale{opacity:.55}"
        ".caption{font:20px system-ui,sans-serif}"
        + colours("#fff", "#e6e6e6", "#222", LIGHT)
        + f"@media(prefers-color-scheme:dark){{{colours('#16181d', '#33363d', '#eee', DARK)}}}"
    )
