"""Tables: columns of figures, as text for a terminal, as Markdown or as HTML."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

from pipeline.planning.text_table import text_table

Row = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        name: its heading.
        format: the text of a cell, from the figures of its row.
        unit: what is counted, under the heading.
        about: what the figure means, in a sentence.
        detail: more about a cell, which HTML shows in small print.
    """

    name: str
    format: Callable[[Row], str]
    unit: str = ""
    about: str = ""
    detail: Callable[[Row], str] | None = None


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows of figures under columns; the first column is a name and aligned left.

    >>> table = Table([Column("bucket", lambda row: row["name"]),
    ...                Column("fill", lambda row: f"{row['fill']:.0%}", "of positions")],
    ...               [{"name": "8 × 64", "fill": 0.5}])
    >>> print("\\n".join(table.text()))
    bucket            fill
              of positions
    8 × 64             50%
    >>> print("\\n".join(table.markdown()))
    | bucket | fill (of positions) |
    | :--- | ---: |
    | 8 × 64 | 50% |

    Attributes:
        columns: its columns.
        rows: the figures of each row.
        emphasized: whether a row is printed in bold or colour.
    """

    columns: Sequence[Column]
    rows: Sequence[Row]
    emphasized: Callable[[Row], bool] = lambda row: False

    def _cells(self) -> list[list[str]]:
        return [[column.format(row) for column in self.columns] for row in self.rows]

    def fit(self, width: int) -> "Table":
        """The table without as many of its last columns as lines of `width` need."""
        table = self
        while max(map(len, table.text())) > width and len(table.columns) > 2:
            table = dataclasses.replace(table, columns=table.columns[:-1])
        return table

    def text(self, paint: Callable[[str], str] = str) -> list[str]:
        """Lines of aligned text; `paint` colours the names of emphasized rows."""
        heads = [[column.name for column in self.columns]]
        if any(column.unit for column in self.columns):
            heads.append([column.unit for column in self.columns])
        cells = self._cells()
        lines = text_table([*heads, *cells])
        for number, (row, (name, *_)) in enumerate(zip(self.rows, cells, strict=True), len(heads)):
            if self.emphasized(row):
                lines[number] = paint(name) + lines[number][len(name) :]
        return lines

    def markdown(self) -> list[str]:
        """Lines of a Markdown table."""
        heads = [f"{c.name} ({c.unit})" if c.unit else c.name for c in self.columns]
        align = [":---", *["---:"] * (len(heads) - 1)]
        return [f"| {' | '.join(cells)} |" for cells in (heads, align, *self._cells())]

    def html(self) -> str:
        """An HTML table in a frame that scrolls sideways on a narrow screen."""
        heads = "".join(
            f"<th>{escape(column.name)}<small>{escape(column.unit)}</small></th>"
            for column in self.columns
        )
        body = ""
        for row, cells in zip(self.rows, self._cells(), strict=True):
            body += '<tr class="ours">' if self.emphasized(row) else "<tr>"
            for column, cell in zip(self.columns, cells, strict=True):
                detail = f"<small>{escape(column.detail(row))}</small>" if column.detail else ""
                body += f"<td>{escape(cell)}{detail}</td>"
            body += "</tr>"
        return (
            f'<div class="scroll"><table><thead><tr>{heads}</tr></thead>'
            f"<tbody>{body}</tbody></table></div>"
        )


def percent(share: float) -> str:
    """A share with as many digits as are worth reading.

    >>> percent(0.6818), percent(0.0312), percent(0.00052), percent(1e-9), percent(0)
    ('68.2%', '3.12%', '0.052%', '< 0.001%', '0%')
    """
    if share < 0.000005:
        return "< 0.001%" if share > 0 else "0%"
    digits = next((n for n, least in enumerate((0.0995, 0.00995)) if share >= least), 2)
    return f"{share:.{digits + 1}%}"


def length_of(length: int | Sequence[int]) -> str:
    """The length of a bucket; for pairs, of inputs and targets.

    >>> length_of(1024), length_of([512, 64])
    ('1,024', '512 + 64')
    """
    return " + ".join(f"{n:,}" for n in (length if isinstance(length, list | tuple) else [length]))


def number(value: float | None, digits: int = 0) -> str:
    """A number with thousands separators; a dash for None.

    >>> number(1234.5), number(None)
    ('1,234', '–')
    """
    return "–" if value is None else f"{value:,.{digits}f}"
