"""Charts: the report's figures as inline SVG for the page, and as a PNG."""

import io
import re
import textwrap
from collections.abc import Callable
from html import escape
from typing import Any

import numpy as np

from pipeline.errors import require
from pipeline.report.figures import length_of
from pipeline.report.findings import cost_key, ours, rivals
from pipeline.report.tables import percent

STEPS = 120  # that the order of buckets is shown for
WIDTH = 400  # of an SVG; text keeps about its size on a phone, where this is the whole width

PARAMETERS = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "lockstep",  # the same figures give the same file
    "font.size": 11,
    "legend.fontsize": 11,
    "legend.frameon": False,
}

Draw = Callable[[Any, dict[str, Any]], None]  # draws figures on axes


def require_matplotlib() -> Any:
    """The module `matplotlib`; an ImportError says how to install it."""
    return require("matplotlib", extra="report", purpose="drawing charts (--html and --png)")


def _draw(charts: list[tuple[Draw, dict[str, Any]]], size: tuple[float, float], **options) -> bytes:
    """Charts beside each other, in inches; `options` are those of `savefig`."""
    with require_matplotlib().rc_context(PARAMETERS):
        from matplotlib.figure import Figure

        drawing = Figure(figsize=size, layout="constrained")
        places = drawing.subplots(1, len(charts), squeeze=False)[0]
        for axes, (draw, figures) in zip(places, charts, strict=True):
            draw(axes, figures)
        file = io.BytesIO()
        drawing.savefig(file, **options)
    return file.getvalue()


def svg(draw: Draw, figures: dict[str, Any], height: int, label: str) -> str:
    """A chart as an SVG element, in which what is black takes the colour of the page's text.

    `height` is in pixels, beside a width of 400; `label` is for screen readers.
    """
    metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    size = WIDTH / 72, height / 72
    options = {"format": "svg", "transparent": True, "metadata": metadata}
    text = _draw([(draw, figures)], size, **options).decode()
    # Names of parts would repeat on the page.
    text = re.sub(r' (id="[\w.]+_\d+"|xmlns(:xlink)?="[^"]*"|version="1.1")', "", text)
    text = text[text.index("<svg") :].replace("xlink:href", "href")
    text = text.replace("#000000", "currentColor")
    return text.replace("<svg", f'<svg role="img" aria-label="{escape(label)}"', 1)


def draw_png(figures: dict[str, Any]) -> bytes:
    """Lengths and the work of each strategy as a PNG of 1,800 pixels width.

    Raises:
        ImportError: matplotlib is not installed.
    """
    charts: list[tuple[Draw, dict]] = [(lengths, figures["corpus"]), (strategies, figures)]
    return _draw(charts, (12, 7), format="png", dpi=150)


def lengths(axes, corpus: dict[str, Any]) -> None:
    """Examples by length, with their median and high percentiles."""
    at = corpus["percentiles"]
    marks = {f"{name}: {at[p]:,}": at[p] for name, p in (("median", "50"), ("99%", "99"))}
    _histogram(axes, corpus["histogram"], "examples", marks)


def tokens_by_length(axes, figures: dict[str, Any]) -> None:
    """Tokens by length of their example, with the lengths of the buckets."""
    marks = {f"{b['length']:,}": b["length"] for b in figures["plan"]["buckets"]}
    _histogram(axes, figures["corpus"]["histogram"], "tokens", marks)


def _histogram(axes, binned: dict[str, Any], values: str, marks: dict[str, int]) -> None:
    from matplotlib.ticker import EngFormatter

    axes.stairs(binned[values], binned["edges"], fill=True, color="silver")
    for index, (name, length) in enumerate(marks.items()):
        axes.axvline(length, color=f"C{index}", linestyle="--", label=name)
    axes.set_xscale("log")
    axes.set_xlabel("length, positions (log scale)")
    axes.set_ylabel(f"{values} in a column")
    _legend(axes, columns=4)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(EngFormatter(sep=""))


def strategies(axes, figures: dict[str, Any]) -> None:
    """Work per real token of other strategies and of the plan, divided into what causes it."""
    cost, mine = cost_key(figures), ours(figures)
    unpacked = [row for row in figures["strategies"] if row.get("packing") == "none"]
    rows = [mine, *(row for row in unpacked if row is not mine), *rivals(figures)]
    rows.sort(key=lambda row: row[cost], reverse=True)
    places = range(len(rows))
    positions = np.array([row["positions_per_token"] for row in rows])
    work = np.array([row[cost] for row in rows])
    axes.barh(places, np.ones(len(rows)), label="token")
    axes.barh(places, positions - 1, left=1, label="padding")
    axes.barh(places, work - positions, left=positions, label="attention")
    # Bars of the weakest strategies may run off the chart, so that the strongest can be compared.
    axes.set_xlim(0, min(work.max(), 2.5 * work.min()))
    names = [textwrap.fill(row["name"], 20, break_on_hyphens=False) for row in rows]
    axes.set_yticks(places, names)
    texts = [f"{row[cost]:.2f}\n{percent(row['padding'])} padding" for row in rows]
    axes.secondary_yaxis("right").set_yticks(places, texts)
    axes.get_yticklabels()[rows.index(mine)].set_fontweight("bold")
    axes.invert_yaxis()
    axes.set_xlabel("work per real token")
    _legend(axes, columns=3)


def bucket_curve(axes, cost: dict[str, Any]) -> None:
    """Work per token against the number of buckets, for both kinds of attention."""
    numbers = [point["buckets"] for point in cost["curve"]]
    for kind, label in (
        ("dense", "attention over whole rows"),
        ("segment", "skips other segments"),
    ):
        axes.plot(numbers, [point[kind] for point in cost["curve"]], marker="o", label=label)
    axes.set_xticks(numbers)
    axes.set_xlabel("buckets")
    axes.set_ylabel("work per real token")
    _legend(axes, columns=2)


def segments_per_row(axes, plan: dict[str, Any]) -> None:
    """The share of rows that hold each number of segments, without the fullest 1%."""
    held, rows = np.array(plan["segments_per_row"]).T
    share = 100 * rows / rows.sum()
    shown = np.searchsorted(np.cumsum(share), 99) + 1
    axes.bar(held[:shown], share[:shown])
    axes.locator_params(axis="x", integer=True)
    axes.set_xlabel("segments in a row")
    axes.set_ylabel("rows, % of all")


def bucket_order(axes, plan: dict[str, Any]) -> None:
    """The bucket of each of the first steps."""
    order = np.array(plan["order"][:STEPS])
    buckets = range(len(plan["buckets"]))
    axes.eventplot([np.flatnonzero(order == index) for index in buckets], linelengths=0.8)
    axes.set_yticks(buckets, [length_of(bucket["length"]) for bucket in plan["buckets"]])
    axes.set_xlabel("step of the epoch")
    axes.set_ylabel("bucket length, positions")


def _legend(axes, columns: int) -> None:
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=columns, columnspacing=1)
