"""Text: the report for a terminal."""

import textwrap
from collections.abc import Mapping

from pipeline.planning.text_table import text_table
from pipeline.report import findings
from pipeline.report.figures import Figures, Side

GREEN, BOLD, END = "\033[32m", "\033[1m", "\033[0m"
BLOCKS = " ▁▂▃▄▅▆▇█"


def format_text(figures: Figures, *, width: int = 120, colour: bool = False) -> str:
    """The report as lines of at most `width` characters; only tables may be wider."""
    bold, green = (f"{code}{{}}{END}".format if colour else str for code in (BOLD, GREEN))

    def wrap(text: str, bullet: str = "") -> list[str]:
        indent = " " * len(bullet)
        return textwrap.wrap(text, width, initial_indent=bullet, subsequent_indent=indent)

    def listed(facts: Mapping[str, str], form: str) -> list[str]:
        return wrap("; ".join(form.format(name, value) for name, value in facts.items()))

    lines = [bold(figures.name)]
    for side in figures.sides:
        lines += [bold(side.name)] if len(figures.sides) > 1 else []
        lines += listed(findings.describe_side(side), "{1} {0}")
        if len(side.sources) > 1:
            lines += text_table(findings.tabulate_sources(side))
        lines.append(_histogram(side))
    ours = findings.find_ours(figures).name
    lines.append("")
    for line in text_table(findings.tabulate_strategies(figures)):
        lines.append(line.replace(ours, green(ours)) if line.startswith(f"{ours}  ") else line)
    lines += listed(findings.explain_strategies(figures), "{0}: {1}")
    lines += ["", bold("The plan")]
    for line in figures.plan.printed.splitlines():
        lines += wrap(line)
    lines.append("")
    for text in findings.findings(figures):
        lines += wrap(text, "· ")
    if figures.plan.over_ideal:
        lines += ["", *text_table(findings.tabulate_tiers(figures.plan))]
    return "\n".join(lines)


def _histogram(side: Side) -> str:
    """Examples by length, from 1 to the longest on a logarithmic scale, as a line of blocks."""
    examples = side.columns["examples"]
    blocks = "".join(BLOCKS[max(round(8 * n / max(1, *examples)), n > 0)] for n in examples)
    return f"1 ▕{blocks}▏ {side.longest:,} positions (log)"
