"""Blocks: the few elements of HTML that the page is made of."""

from collections.abc import Sequence
from html import escape


def section(title: str, *parts: str) -> str:
    """Parts under a heading."""
    return f"<section><h2>{escape(title)}</h2>{''.join(parts)}</section>"


def text(text: str, kind: str = "") -> str:
    """A paragraph; nothing if there is no text."""
    return f'<p class="{kind}">{escape(text)}</p>' if text else ""


def figure(title: str, drawing: str) -> str:
    """A drawing under its title."""
    return f"<figure><h3>{escape(title)}</h3>{drawing}</figure>"


def figures(*each: str) -> str:
    """Figures side by side, or one under another on a phone."""
    return f'<div class="charts">{"".join(each)}</div>'


def tiles(tiles: Sequence[tuple[str, str]]) -> str:
    """Numbers, each with what it counts."""
    inside = "".join(
        f'<div class="tile"><b>{escape(value)}</b><span>{escape(name)}</span></div>'
        for value, name in tiles
    )
    return f'<div class="tiles">{inside}</div>'


def table(head: Sequence[tuple[str, str]], rows: Sequence[tuple[str, Sequence[str]]]) -> str:
    """A table of rows `(class, cells)`; cells are HTML. On a phone, each row becomes a card."""
    heads = "".join(f"<th>{escape(name)}<small>{escape(unit)}</small></th>" for name, unit in head)
    labels = [escape(f"{name}, {unit}" if unit else name) for name, unit in head]
    body = "".join(
        f'<tr class="{kind}">'
        + "".join(
            f'<td data-label="{label}"><span>{cell}</span></td>'
            for label, cell in zip(labels, cells, strict=True)
        )
        + "</tr>"
        for kind, cells in rows
    )
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>"
