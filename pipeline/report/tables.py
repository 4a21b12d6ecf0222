"""Tables: the report's figures in columns, as text for a terminal, as Markdown or as HTML."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

from pipeline.planning.text_table import text_table
from pipeline.report.figures import HOSTS, length_of

Row = Mapping[str, Any]


class Column(NamedTuple):
    """Its heading, the text of a cell from the figures of its row, and what is counted."""

    name: str
    format: Callable[[Row], str]
    unit: str = ""


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

    Rows that have `packing`, which are Lockstep's own, are printed in bold or colour; HTML shows
    `about`, where rows have it, in small print.
    """

    columns: Sequence[Column]
    rows: Sequence[Row]

    def _cells(self) -> list[list[str]]:
        return [[column.format(row) for column in self.columns] for row in self.rows]

    def fit(self, width: int) -> "Table":
        """The table without as many of its last columns as lines of `width` need."""
        table = self
        while max(map(len, table.text())) > width and len(table.columns) > 2:
            table = Table(table.columns[:-1], self.rows)
        return table

    def text(self, paint: Callable[[str], str] = str) -> list[str]:
        """Lines of aligned text; `paint` colours the names of Lockstep's rows."""
        heads = [[column.name for column in self.columns]]
        if any(column.unit for column in self.columns):
            heads.append([column.unit for column in self.columns])
        cells = self._cells()
        lines = text_table([*heads, *cells])
        for number, (row, (name, *_)) in enumerate(zip(self.rows, cells, strict=True), len(heads)):
            if "packing" in row:
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
        for row, (name, *others) in zip(self.rows, self._cells(), strict=True):
            detail = f"<small>{escape(row['about'])}</small>" if "about" in row else ""
            body += '<tr class="ours">' if "packing" in row else "<tr>"
            body += f"<td>{escape(name)}{detail}</td>"
            body += "".join(f"<td>{escape(cell)}</td>" for cell in others) + "</tr>"
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


def number(name: str, digits: int = 0) -> Callable[[Row], str]:
    """Formats a figure of a row with thousands separators, and None as a dash."""
    return lambda row: "–" if row[name] is None else f"{row[name]:,.{digits}f}"


def strategies(figures: dict[str, Any]) -> Table:
    """The comparison: a row for each strategy."""
    documents = figures["corpus"]["examples"] - figures["corpus"]["empty"]

    def per_host(row: Row) -> str:
        least, most = min(row["batches_per_host"]), max(row["batches_per_host"])
        return f"{least:,}" if row["equal"] else f"{least:,} to {most:,}"

    def cut(row: Row) -> str:
        return percent(row["cut"] / documents) if row["cut"] else "0"

    def attention(row: Row) -> str:
        return f"{row['attention_flops_per_token'] / 1e6:,.2f}"

    columns = [
        Column("strategy", lambda row: row["name"]),
        Column("padding", lambda row: percent(row["padding"]), "of positions"),
        Column("shapes", number("shapes"), "compiled"),
        Column(f"{HOSTS} hosts", per_host, "batches each"),
        Column("work", number("cost", 3), "a token"),
        Column("batches", number("batches"), "an epoch"),
        Column("cut", cut, "documents"),
        Column("read again", number("reread"), "examples"),
        Column("attention", attention, "MFLOP a token"),
    ]
    return Table(columns, figures["strategies"])


def explain_strategies(width: int) -> dict[str, str]:
    """What each column of the comparison means, for a model of this width."""
    return {
        "padding": "The share of all computed positions that hold no token.",
        "shapes": "Different batch shapes, each of which is compiled once.",
        f"{HOSTS} hosts": f"Batches on each of {HOSTS} hosts that share a batch (a row each at "
        "least). Where the numbers differ, one host waits for the others for ever.",
        "work": "Work of a layer with attention over whole rows, for each real token; 1 is the "
        "work at a position without attention.",
        "batches": "Batches of an epoch on one host.",
        "cut": "Documents that lie in more than one segment.",
        "read again": "Examples to read again to resume exactly after an interruption, at most.",
        "attention": f"Scores and their use in one layer of width {width:,}, forward, over whole "
        "rows, for each real token.",
    }


def buckets(plan: dict[str, Any]) -> Table:
    """A row for each bucket of a plan."""

    def shape(row: Row) -> str:
        return f"{row['rows']:,} × {length_of(row['length'])}"

    def fill(row: Row) -> str:
        return "–" if row["fill"] is None else f"{row['fill']:.2%}"

    columns = [
        Column("bucket", shape, "rows × positions"),
        Column("batches", number("batches"), "an epoch"),
        Column("fill", fill, "of positions"),
        Column("tokens", number("tokens_per_step"), "a step"),
        Column("documents", number("documents_per_step", 1), "a step"),
        Column("segments", number("segments"), "an epoch"),
    ]
    return Table(columns, plan["buckets"])


def tiers(over_ideal: Sequence[dict[str, Any]]) -> Table:
    """A row for each number of tiers, a column for each number of groups of rows."""
    rows: dict[int, dict[str, Any]] = {}
    for each in over_ideal:
        row = rows.setdefault(each["tiers"], {"tiers": each["tiers"]})
        row[f"{each['groups']:,} groups"] = each["ratio"]
    groups = [name for name in next(iter(rows.values()), {}) if name != "tiers"]
    first = Column("time over ideal", lambda row: f"tiers={row['tiers']}")
    return Table([first, *(Column(name, number(name, 3)) for name in groups)], [*rows.values()])


def sources(corpus: dict[str, Any]) -> Table:
    """A row for each source of a dataset."""
    columns = [
        Column("source", lambda row: row["name"]),
        Column("examples", number("examples")),
        Column("tokens", number("tokens")),
        Column("share", lambda row: percent(row["share_of_tokens"]), "of tokens"),
    ]
    return Table(columns, corpus["sources"])


def corpus(corpus: dict[str, Any]) -> dict[str, str]:
    """The figures of a dataset, by what they count."""
    shown = ("5", "50", "90", "99")
    return {
        "examples": f"{corpus['examples']:,}",
        "tokens to train on": f"{corpus['tokens']:,}",
        "mean length": f"{corpus['mean']:,.1f}",
        f"percentiles {', '.join(shown)}": " · ".join(
            f"{corpus['percentiles'][p]:,}" for p in shown
        ),
        "longest": f"{corpus['longest']:,}",
        f"over {corpus['longest_row']:,} positions": f"{corpus['overlong']:,}",
        "with nothing to train on": f"{corpus['empty']:,}",
    }


def vocabulary(counted: dict[str, Any]) -> dict[str, str]:
    """The figures of the use of a vocabulary, by what they count."""
    size = counted["size"]
    share = f" of {size:,} ({counted['used'] / size:.1%})" if size else ""
    found = {
        f"ids used{share}": f"{counted['used']:,}",
        "ids used fewer than ten times": f"{counted['rare']:,}",
        "ids make half of all tokens": f"{counted['half']:,}",
        "entropy of single tokens": f"{counted['entropy']:.2f} bits",
    }
    if counted["learnt"] is not None and counted["learnt"] < counted["of"]:
        found["tokens that carry loss"] = f"{counted['learnt']:,} of {counted['of']:,}"
    if text := counted["text_bytes_per_token"]:
        found["of text a token that carries loss"] = f"{text:.2f} bytes"
    if counted["tokens"] < counted["of"]:
        found["tokens counted"] = f"{counted['tokens']:,}"
    return found
