"""Figure: the report's comparison as a PNG, for a README."""

import itertools
import os
from typing import Any

from etils import epath

from pipeline.extras import require
from pipeline.report.table import percent

ACCENT, BAR, INK, SOFT = "#0b7a5c", "#97a1b2", "#1c2430", "#566072"


def require_matplotlib() -> Any:
    """The module `matplotlib`, set up to draw into files; an ImportError says how to install it."""
    matplotlib = require("matplotlib", extra="report", purpose="drawing a PNG")
    matplotlib.use("agg")
    return matplotlib


def figure(figures: dict[str, Any], path: epath.PathLike) -> None:
    """Draws lengths, and padding and work of each strategy, into a PNG of about 1,800 × 1,100.

    Raises:
        ImportError: matplotlib is not installed.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    shown = figures["strategies"]
    drawn = Figure(figsize=(12, 2.9 + 0.3 * len(shown)), dpi=150, layout="constrained")
    grid = drawn.add_gridspec(2, 2, height_ratios=[2.1, 0.3 * len(shown)])
    _lengths(drawn.add_subplot(grid[0, :]), figures["corpus"])
    names = [each["name"] for each in shown]
    colours = [ACCENT if "packing" in each else BAR for each in shown]
    padding, work = drawn.add_subplot(grid[1, 0]), drawn.add_subplot(grid[1, 1])
    for axes, values, texts, unit in (
        (
            padding,
            [100 * each["padding"] for each in shown],
            [percent(each["padding"]) for each in shown],
            "padding, % of positions",
        ),
        (
            work,
            [each["cost"] for each in shown],
            [f"{each['cost']:.2f}" for each in shown],
            f"work per real token, dense attention at width {figures['options']['width']:,}",
        ),
    ):
        bars = axes.barh(range(len(shown)), values, color=colours, height=0.7)
        axes.bar_label(bars, labels=texts, padding=4, fontsize=8, color=INK)
        axes.set_xlim(0, max(values) * 1.15)
        axes.invert_yaxis()
        axes.set_xlabel(unit, color=SOFT, fontsize=8)
        _plain(axes)
    padding.set_yticks(range(len(shown)), names, fontsize=8.5, color=INK)
    work.set_yticks([])
    with epath.Path(os.fspath(path)).open("wb") as file:
        drawn.savefig(file, format="png")


def _lengths(axes, corpus: dict[str, Any]) -> None:
    binned = corpus["histograms"]["linear"]
    edges = binned["edges"]
    axes.bar(
        edges[:-1],
        binned["examples"],
        width=[after - before for before, after in itertools.pairwise(edges)],
        align="edge",
        color=BAR,
        edgecolor="white",
        linewidth=0.4,
    )
    for name, p in (("median", "50"), ("90%", "90"), ("99%", "99")):
        at = corpus["percentiles"][p]
        axes.axvline(at, color=ACCENT, linewidth=1, linestyle=":")
        place = ("data", "axes fraction")
        axes.annotate(f" {name}: {at:,}", (at, 0.93), xycoords=place, fontsize=8, color=INK)
    axes.set_title(
        f"{corpus['examples']:,} examples, {corpus['tokens']:,} tokens", loc="left", fontsize=10
    )
    axes.set_xlabel("length, positions", color=SOFT, fontsize=8)
    axes.set_ylabel("examples in a column", color=SOFT, fontsize=8)
    axes.yaxis.set_major_formatter("{x:,.0f}")
    _plain(axes)


def _plain(axes) -> None:
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(length=0, labelsize=8, colors=SOFT)
    axes.grid(axis="x", color="#d8dde5", linewidth=0.6)
    axes.set_axisbelow(True)
