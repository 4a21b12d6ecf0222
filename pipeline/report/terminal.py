"""Terminal: the report as text, as wide as there is room for."""

import textwrap
from typing import Any

from pipeline.report import findings, tables

GREEN, BOLD, END = "\033[32m", "\033[1m", "\033[0m"
BLOCKS = " ▁▂▃▄▅▆▇█"


def terminal(figures: dict[str, Any], *, width: int = 120, colour: bool = False) -> str:
    """The report of `measure` as lines of at most `width` characters where that is possible."""
    bold, green = (f"{code}{{}}{END}".format if colour else str for code in (BOLD, GREEN))

    def wrap(text: str, bullet: str = "") -> list[str]:
        return textwrap.wrap(
            text, width, initial_indent=bullet, subsequent_indent=" " * len(bullet)
        )

    lines = [bold(figures["name"])]
    for side, name in (("corpus", "inputs"), ("targets", "targets")):
        if side in figures:
            lines += [bold(name)] if "targets" in figures else []
            counted = [tables.vocabulary(each) for each in figures[side]["vocabulary"]]
            for facts in (tables.corpus(figures[side]), *counted):
                lines += wrap("; ".join(f"{value} {name}" for value, name in facts))
            if len(figures[side]["sources"]) > 1:
                lines += tables.sources(figures[side]).text()
            lines.append(_histogram(figures[side]["histogram"]))
    table = tables.strategies(figures)
    narrow = table.fit(width)
    lines += ["", *narrow.text(green), *wrap(findings.about_samples(figures))]
    if dropped := [each.name for each in table.columns if each not in narrow.columns]:
        lines += wrap(
            f"Left out for lack of room: {', '.join(dropped)}; --html and --json have it."
        )
    plan = figures["plan"]
    lines += ["", bold("The plan"), *tables.buckets(plan).text()]
    lines += [
        f"epoch: {plan['batches']:,} batches, {1 - plan['padding']:.2%} of positions used",
        "",
    ]
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
