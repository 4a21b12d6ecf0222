"""Terminal: the report as text, as wide as there is room for."""

import textwrap
from typing import Any

from pipeline.report import findings, tables

GREEN, BOLD, END = "\033[32m", "\033[1m", "\033[0m"
BLOCKS = " ▁▂▃▄▅▆▇█"


def terminal(figures: dict[str, Any], *, width: int = 120, colour: bool = False) -> str:
    """The report of `measure` as lines of at most `width` characters where that is possible.

    Args:
        figures: the report.
        width: characters in a line.
        colour: whether to use ANSI colours.
    """

    def bold(text: str) -> str:
        return f"{BOLD}{text}{END}" if colour else text

    def green(text: str) -> str:
        return f"{GREEN}{text}{END}" if colour else text

    def wrap(text: str, bullet: str = "") -> list[str]:
        return textwrap.wrap(
            text, width, initial_indent=bullet, subsequent_indent=" " * len(bullet)
        )

    lines = [bold(figures["name"])]
    for side, name in (("corpus", "inputs"), ("targets", "targets")):
        if side in figures:
            lines += [bold(name)] if "targets" in figures else []
            for text in _corpus(figures[side]):
                lines += wrap(text)
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


def _corpus(corpus: dict[str, Any]) -> list[str]:
    at = corpus["percentiles"]
    lines = [
        f"{corpus['examples']:,} examples, {corpus['tokens']:,} tokens to train on; "
        f"{corpus['empty']:,} too short, {corpus['overlong']:,} longer than a row of "
        f"{corpus['longest_row']:,}",
        f"lengths: mean {corpus['mean']:,.1f}, "
        + ", ".join(f"p{p} {at[p]:,}" for p in ("5", "50", "90", "99"))
        + f", longest {corpus['longest']:,}",
    ]
    for each in corpus["vocabulary"]:
        size = f" of {each['size']:,}" if each["size"] else ""
        lines.append(
            f"vocabulary: {each['used']:,}{size} ids used, {each['rare']:,} fewer than ten times; "
            f"{each['half']:,} make half of all tokens; entropy {each['entropy']:.2f} bits"
        )
    return lines


def _histogram(binned: dict[str, Any]) -> str:
    """Examples by length, from 1 to the longest on a logarithmic scale, as a line of blocks."""
    most = max(binned["examples"])
    blocks = "".join(
        BLOCKS[max(round(8 * value / most), value > 0)] for value in binned["examples"]
    )
    return f"1 ▕{blocks}▏ {binned['edges'][-1] - 1:,} positions (log)"
