"""Charts: the report's figures as inline SVG for the page, and as a PNG."""

import io
import itertools
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

# Name, light colour, dark colour. Charts are drawn in the light ones; on the page each becomes the
# variable of its name.
COLOURS = {
    "paper": ("#ffffff", "#12161c"),
    "panel": ("#f6f7f9", "#1b2129"),
    "ink": ("#1c2430", "#e7ebf1"),
    "soft": ("#566072", "#a3adbc"),
    "line": ("#d8dde5", "#323b47"),
    "bar": ("#97a1b2", "#6f7b8d"),
    "over": ("#c2410c", "#fb923c"),
    "c0": ("#0b7a5c", "#3ccf9f"),
    "c1": ("#2f6fde", "#74a5ff"),
    "c2": ("#b7791f", "#e8b04b"),
    "c3": ("#9a3fb5", "#cf8be6"),
    "c4": ("#cf3d5b", "#ff7d98"),
    "c5": ("#4c8f1f", "#97d05f"),
}
LIGHT, DARK = ({name: pair[shade] for name, pair in COLOURS.items()} for shade in (0, 1))

STEPS = 120  # that the order of buckets is shown for
WIDTH = 400  # of an SVG; text keeps about its size on a phone, where this is the whole width
SERIES = [LIGHT[f"c{index}"] for index in range(6)]

PARAMETERS = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "lockstep",  # the same figures give the same file
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": LIGHT["line"],
    "axes.labelcolor": LIGHT["soft"],
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": LIGHT["line"],
    "grid.linewidth": 0.6,
    "text.color": LIGHT["ink"],
    "xtick.color": LIGHT["soft"],
    "ytick.color": LIGHT["soft"],
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "xtick.minor.size": 0,
    "legend.frameon": False,
    "legend.fontsize": 11,
    "legend.handlelength": 1,
}


def require_matplotlib() -> Any:
    """The module `matplotlib`; an ImportError says how to install it."""
    return require("matplotlib", extra="report", purpose="drawing charts (--html and --png)")


def svg(draw: Callable[[Any, dict], None], figures: dict[str, Any], height: int, label: str) -> str:
    """A chart as an SVG element, whose colours follow the light or dark style of the page.

    `draw` is one of the functions below, and draws `figures`; `height` is in pixels, beside a width
    of 400; `label` is for screen readers.
    """
    with require_matplotlib().rc_context(PARAMETERS):
        from matplotlib.figure import Figure

        drawing = Figure(figsize=(WIDTH / 72, height / 72), layout="constrained")
        draw(drawing.subplots(), figures)
        file = io.StringIO()
        metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        drawing.savefig(file, format="svg", transparent=True, metadata=metadata)
    text = file.getvalue()
    # Names of parts would repeat on the page; its font is the page's own.
    text = re.sub(r' (id="[\w.]+_\d+"|xmlns(:xlink)?="[^"]*"|version="1.1")', "", text)
    text = re.sub(r" font-family: [^;\"]+;?| ?transform=\"rotate\(-0 [^)]*\)\"", "", text)
    text = text[text.index("<svg") :].replace("xlink:href", "href")
    for name, colour in LIGHT.items():
        text = text.replace(colour, f"var(--{name})")
    return text.replace("<svg", f'<svg role="img" aria-label="{escape(label)}"', 1)


def draw_png(figures: dict[str, Any]) -> bytes:
    """Lengths and the work of each strategy as a PNG of 1,800 pixels width.

    Raises:
        ImportError: matplotlib is not installed.
    """
    with require_matplotlib().rc_context(PARAMETERS):
        from matplotlib.figure import Figure

        drawing = Figure(figsize=(12, 7), dpi=150, layout="constrained")
        left, right = drawing.subplots(1, 2)
        lengths(left, figures["corpus"])
        strategies(right, figures)
        file = io.BytesIO()
        drawing.savefig(file, format="png")
    return file.getvalue()


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

    axes.stairs(binned[values], binned["edges"], fill=True, color=LIGHT["bar"])
    for (name, length), colour in zip(marks.items(), itertools.cycle(SERIES), strict=False):
        axes.axvline(length, color=colour, linestyle="--", label=name)
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
    colours = [LIGHT["c0"] if row is mine else LIGHT["bar"] for row in rows]
    axes.barh(places, np.ones(len(rows)), color=colours, label="token")
    axes.barh(places, positions - 1, left=1, color=LIGHT["over"], label="padding")
    axes.barh(places, work - positions, left=positions, color=LIGHT["c1"], label="attention")
    # Bars of the weakest strategies may run off the chart, so that the strongest can be compared.
    axes.set_xlim(0, min(work.max(), 2.5 * work.min()))
    names = [textwrap.fill(row["name"], 20, break_on_hyphens=False) for row in rows]
    axes.set_yticks(places, names, color=LIGHT["ink"])
    values = axes.secondary_yaxis("right")
    texts = [f"{row[cost]:.2f}\n{percent(row['padding'])} padding" for row in rows]
    values.set_yticks(places, texts, color=LIGHT["ink"])
    values.spines["right"].set_visible(False)
    axes.get_yticklabels()[rows.index(mine)].set_fontweight("bold")
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("work per real token")
    _legend(axes, columns=3)


def bucket_curve(axes, cost: dict[str, Any]) -> None:
    """Work per token against the number of buckets, for both kinds of attention."""
    numbers = [point["buckets"] for point in cost["curve"]]
    for kind, label, colour in (
        ("dense", "attention over whole rows", LIGHT["c1"]),
        ("segment", "skips other segments", LIGHT["c0"]),
    ):
        work = [point[kind] for point in cost["curve"]]
        axes.plot(numbers, work, color=colour, marker="o", label=label)
    axes.set_xticks(numbers)
    axes.set_xlabel("buckets")
    axes.set_ylabel("work per real token")
    _legend(axes, columns=2)


def segments_per_row(axes, plan: dict[str, Any]) -> None:
    """The share of rows that hold each number of segments, without the fullest 1%."""
    held, rows = np.array(plan["segments_per_row"]).T
    share = 100 * rows / rows.sum()
    shown = np.searchsorted(np.cumsum(share), 99) + 1
    axes.bar(held[:shown], share[:shown], color=LIGHT["c0"])
    axes.locator_params(axis="x", integer=True)
    axes.set_xlabel("segments in a row")
    axes.set_ylabel("rows, % of all")


def bucket_order(axes, plan: dict[str, Any]) -> None:
    """The bucket of each of the first steps."""
    order = np.array(plan["order"][:STEPS])
    buckets = range(len(plan["buckets"]))
    colours = [SERIES[index % len(SERIES)] for index in buckets]
    steps = [np.flatnonzero(order == index) for index in buckets]
    axes.eventplot(steps, lineoffsets=list(buckets), linelengths=0.8, colors=colours)
    axes.set_yticks(buckets, [length_of(bucket["length"]) for bucket in plan["buckets"]])
    axes.set_xlabel("step of the epoch")
    axes.set_ylabel("bucket length, positions")
    axes.grid(visible=False, axis="y")


def _legend(axes, columns: int) -> None:
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=columns, columnspacing=1)
