"""Text: the report for a terminal, and a plan as Markdown for TensorBoard."""

import itertools
import textwrap
from typing import Any

from pipeline.planning.plan import Plan
from pipeline.report import findings, tables
from pipeline.report.figures import length_of, measure_epoch

GREEN, BOLD, END = "\033[32m", "\033[1m", "\033[0m"
BLOCKS = " ▁▂▃▄▅▆▇█"

# Batches that are built for the Markdown, at most: a run should not wait for it.
MOST_BATCHES = 500


def format_text(figures: dict[str, Any], *, width: int = 120, colour: bool = False) -> str:
    """The report of `measure` as lines of at most `width` characters where that is possible."""
    bold, green = (f"{code}{{}}{END}".format if colour else str for code in (BOLD, GREEN))

    def wrap(text: str, bullet: str = "") -> list[str]:
        indent: Any = {"initial_indent": bullet, "subsequent_indent": " " * len(bullet)}
        return textwrap.wrap(text, width, **indent)

    lines = [bold(figures["name"])]
    for side, name in (("corpus", "inputs"), ("targets", "targets")):
        if side in figures:
            lines += [bold(name)] if "targets" in figures else []
            counted = [tables.vocabulary(each) for each in figures[side]["vocabulary"]]
            for facts in (tables.corpus(figures[side]), *counted):
                lines += wrap("; ".join(f"{value} {name}" for name, value in facts.items()))
            if len(figures[side]["sources"]) > 1:
                lines += tables.sources(figures[side]).text()
            lines.append(_histogram(figures[side]["histogram"]))
    table = tables.strategies(figures)
    narrow = table.fit(width)
    lines += ["", *narrow.text(green), *wrap(findings.about_strategies(figures))]
    if dropped := [each.name for each in table.columns[len(narrow.columns) :]]:
        names = ", ".join(dropped)
        lines += wrap(f"Left out for lack of room: {names}; --html and --json have it.")
    plan = figures["plan"]
    lines += ["", bold("The plan"), *tables.buckets(plan).text()]
    used = f"{1 - plan['padding']:.2%} of positions used"
    lines += [f"epoch: {plan['batches']:,} batches, {used}", ""]
    for text in (*findings.findings(figures), findings.about_balance(plan["balance"])):
        lines += wrap(text, "· ")
    if over_ideal := plan["balance"]["over_ideal"]:
        lines += ["", *tables.tiers(over_ideal).text()]
    return "\n".join(lines)


def _histogram(binned: dict[str, Any]) -> str:
    """Examples by length, from 1 to the longest on a logarithmic scale, as a line of blocks."""
    most = max(binned["examples"])
    blocks = "".join(
        BLOCKS[max(round(8 * value / most), value > 0)] for value in binned["examples"]
    )
    return f"1 ▕{blocks}▏ {binned['edges'][-1] - 1:,} positions (log)"


def markdown(plan: Plan) -> str:
    """The plan's figures as a Markdown table and sentences.

    For `SummaryWriter.add_text("plan", markdown(plan), 0)`. Documents a step, the order of
    buckets and the balance of hosts are those of the epoch's first batches.
    """
    figures = measure_epoch(plan, MOST_BATCHES)
    rows = sum(count for _, count in figures["segments_per_row"])
    segments = sum(held * count for held, count in figures["segments_per_row"])
    runs = [(bucket, len([*same])) for bucket, same in itertools.groupby(figures["order"])]
    order = ", ".join(
        f"{count} × {length_of(figures['buckets'][bucket]['length'])}"
        for bucket, count in runs[:12]
    )
    paragraphs = [
        f"**{figures['batches']:,} batches** an epoch, **{figures['padding']:.3%} padding**, "
        f"{figures['tokens']:,} tokens",
        "\n".join(tables.buckets(figures).markdown()),
        f"{segments / rows:.2f} segments a row. The epoch begins with batches of length {order}, …",
        findings.about_balance(figures["balance"]),
        *findings.about_sources(figures),
        *findings.about_losses(figures),
    ]
    return "\n\n".join([*paragraphs, f"`{figures['fingerprint']}`"])
