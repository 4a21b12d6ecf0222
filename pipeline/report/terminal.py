"""Terminal: the report as text, as wide as there is room for."""

from typing import Any

from pipeline.report import findings
from pipeline.report.table import Column, columns, length_of, percent

# Columns that give way first on a narrow terminal.
GIVE_WAY = ("attention", "positions", "resuming", "cut", "batches")
NAME = 38
GREEN, RED, BOLD, END = "\033[32m", "\033[31m", "\033[1m", "\033[0m"
BLOCKS = " ▁▂▃▄▅▆▇█"


def terminal(figures: dict[str, Any], *, width: int = 120, colour: bool = False) -> str:
    """The report of `measure` as lines of at most `width` characters where that is possible.

    Args:
        figures: the report.
        width: characters in a line.
        colour: whether to use ANSI colours.
    """

    def paint(text: str, code: str) -> str:
        return f"{code}{text}{END}" if colour else text

    lines = [paint(figures["name"], BOLD)]
    for name in ("corpus", "targets"):
        if name not in figures:
            continue
        if "targets" in figures:
            lines.append(paint("targets" if name == "targets" else "inputs", BOLD))
        for line in _corpus(figures[name]):
            lines += _wrapped(line, width)
        lines.append(_histogram(figures[name]["histograms"]["log"]))
    lines.append("")
    shown, left_out = _fitting(figures, width)
    lines += _comparison(figures, shown, paint)
    lines += _wrapped(findings.about_samples(figures), width)
    if left_out:
        lines += _wrapped(
            f"Left out for want of room: {', '.join(left_out)}; --html and --json have them.", width
        )
    lines += ["", paint("The plan", BOLD), *_plan(figures["plan"]), ""]
    for said in (
        findings.about_balance(figures["plan"]["balance"]),
        *findings.findings(figures),
    ):
        lines += _wrapped(said, width, "· ") if said else []
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
    if len(corpus["sources"]) > 1:
        lines += [
            f"  {percent(each['share_of_tokens']):>8} of tokens, {each['examples']:,} examples: "
            f"{each['name']}"
            for each in corpus["sources"]
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


def _widths(figures: dict[str, Any], shown: list[Column]) -> list[int]:
    return [
        max(
            len(column.name),
            *(len(part) for part in column.unit.split(" ")),
            *(len(column.write(each)) for each in figures["strategies"]),
        )
        + 2
        for column in shown
    ]


def _fitting(figures: dict[str, Any], width: int) -> tuple[list[Column], list[str]]:
    """The columns that there is room for, and the names of those there is not."""
    shown, left_out = columns(figures), []
    for name in GIVE_WAY:
        if NAME + sum(_widths(figures, shown)) <= width:
            break
        shown = [column for column in shown if column.name != name]
        left_out.append(name)
    return shown, left_out


def _comparison(figures: dict[str, Any], shown: list[Column], paint) -> list[str]:
    widths = _widths(figures, shown)
    units = [_lines(column.unit, wide - 2) for column, wide in zip(shown, widths, strict=True)]
    deep = max(map(len, units))
    heads = [
        [column.name, *unit, *[""] * (deep - len(unit))]
        for column, unit in zip(shown, units, strict=True)
    ]
    lines = []
    for depth in range(deep + 1):
        name = "strategy" if depth == 0 else ""
        cells = [f"{head[depth]:>{wide}}" for head, wide in zip(heads, widths, strict=True)]
        lines.append(f"{name:<{NAME}}" + "".join(cells))
    lines[0] = paint(lines[0], BOLD)
    for each in figures["strategies"]:
        texts = [
            f"{column.write(each):>{wide}}" for column, wide in zip(shown, widths, strict=True)
        ]
        if not each["equal"]:
            texts[-1] = paint(texts[-1], RED)
        name = f"{each['name']:<{NAME}}"
        lines.append((paint(name, GREEN) if "packing" in each else name) + "".join(texts))
    return lines


def _plan(plan: dict[str, Any]) -> list[str]:
    rows = [("rows × positions", "batches", "fill", "tokens/step", "documents/step", "segments")]
    for each in plan["buckets"]:
        documents = each["documents_per_step"]
        rows.append(
            (
                f"{each['rows']:,} × {length_of(each)}",
                f"{each['batches']:,}",
                "–" if each["fill"] is None else f"{each['fill']:.2%}",
                "–" if each["tokens_per_step"] is None else f"{each['tokens_per_step']:,.0f}",
                "–" if documents is None else f"{documents:,.1f}",
                f"{each['segments']:,}",
            )
        )
    rows.append(("epoch", f"{plan['batches']:,}", f"{1 - plan['padding']:.2%}", "", "", ""))
    widths = [max(len(row[at]) for row in rows) + 2 for at in range(1, 6)]
    return [
        f"{name:<18}" + "".join(f"{cell:>{wide}}" for cell, wide in zip(cells, widths, strict=True))
        for name, *cells in rows
    ]


def _lines(text: str, width: int) -> list[str]:
    lines = [""]
    for word in text.split(" "):
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width:
            lines.append(word)
        else:
            lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


def _wrapped(text: str, width: int, bullet: str = "") -> list[str]:
    first, *others = _lines(text, width - len(bullet))
    return [bullet + first, *(" " * len(bullet) + line for line in others)]
