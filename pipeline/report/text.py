"""Text: the report for a terminal."""

import textwrap
from collections.abc import Mapping
from typing import Any

from pipeline.planning.text_table import text_table
from pipeline.report import findings
from pipeline.report.figures import Figures, Side
from pipeline.report.run import describe_summary

GREEN, BOLD, END = "\033[32m", "\033[1m", "\033[0m"
BLOCKS = " ▁▂▃▄▅▆▇█"


def format_text(figures: Figures, *, width: int = 120, colour: bool = False) -> str:
    """The report as lines of at most `width` characters; only tables may be wider."""
    bold, green = (f"{code}{{}}{END}".format if colour else str for code in (BOLD, GREEN))

    lines = [bold(figures.name)]
    for side in figures.sides:
        lines += [bold(side.name)] if len(figures.sides) > 1 else []
        lines += _define(findings.describe_side(side), width)
        lines.append(_histogram(side))
    ours = findings.find_ours(figures).name
    lines.append("")
    for line in text_table(findings.tabulate_strategies(figures)):
        lines.append(line.replace(ours, green(ours)) if line.startswith(f"{ours}  ") else line)
    lines += ["", *_define(findings.explain_strategies(figures), width)]
    lines += ["", *_define({way.name: way.about for way in figures.strategies}, width)]
    lines += ["", bold("The plan")]
    for line in figures.plan.printed.splitlines():
        lines += textwrap.wrap(line, width)
    lines.append("")
    for text in findings.findings(figures):
        lines += _hang("· ", text, width)
    return "\n".join(lines)


def format_summary(summary: Mapping[str, Any]) -> str:
    """The summary that train.py writes at the end of a run, as lines of words and values.

    >>> print(format_summary({"steps": 30, "waiting": 0.0123}))
    steps                                              30
    share of the steps' time spent waiting for batches  0.0123
    """
    return "\n".join(_define(describe_summary(summary), 120))


def _define(facts: Mapping[str, str], width: int) -> list[str]:
    """Lines of names, each with its text in a second column."""
    longest = max(map(len, facts), default=0)
    return [
        line for name, text in facts.items() for line in _hang(f"{name:{longest}}  ", text, width)
    ]


def _hang(label: str, text: str, width: int) -> list[str]:
    """Lines of a text after a label, indented alike."""
    indent = " " * len(label)
    return textwrap.wrap(text, width, initial_indent=label, subsequent_indent=indent)


def _histogram(side: Side) -> str:
    """Examples by length, from 1 to the longest on a logarithmic scale, as a line of blocks."""
    examples = side.columns["examples"]
    blocks = "".join(BLOCKS[max(round(8 * n / max(1, *examples)), n > 0)] for n in examples)
    return f"by length: 1 ▕{blocks}▏ {side.longest:,} positions, on a logarithmic scale"
