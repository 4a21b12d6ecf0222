"""The page: the report as one HTML file that needs no network, script or other file."""

import datetime
import importlib.metadata
import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from pipeline.planning.bucket import Bucket
from pipeline.report import findings
from pipeline.report.figures import Figures, Side
from pipeline.report.run import Run, describe_summary, number

STYLE = """
:root{color-scheme:light dark}
body{margin:0 auto;padding:20px;max-width:1080px;background:Canvas;color:CanvasText;
font:15px/1.5 system-ui,sans-serif;overflow-wrap:anywhere}
p,li{max-width:80ch}
.soft,dl,small,pre{font-size:13px}
dl{display:grid;grid-template-columns:max-content 1fr;gap:4px 14px}
dt{font-weight:600}
dd{margin:0}
.scroll{overflow-x:auto}
pre{white-space:pre-wrap}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}
th,td{text-align:right;padding:6px 10px;border-bottom:1px solid GrayText;vertical-align:top;
white-space:nowrap}
th:first-child,td:first-child{text-align:left;white-space:normal;min-width:140px;position:sticky;
left:0;background:Canvas}
.work{text-align:left;white-space:normal;min-width:230px}
small{display:block;font-weight:400}
.ours td:first-child{font-weight:600}
.bar{display:flex;overflow:hidden;margin:5px 0}
i{flex:none;height:.9em;display:inline-block;min-width:0}
.soft i{width:.9em;margin:0 4px 0 10px;vertical-align:-.1em}
.token{background:#4e79a7}.padding{background:#e8792b}.attention{background:#59a14f}
svg{display:block;width:100%;max-width:600px;overflow:visible}
text{fill:currentColor;font-size:11px;text-anchor:middle}
"""

KINDS = ("token", "padding", "attention")  # of the work for a token
WIDTH, HEIGHT = 400, 120  # of the histogram, in its own units


def format_page(figures: Figures, *, command: str, date: datetime.date) -> str:
    """The report as an HTML document, with the command that made it and the date."""
    name, version = escape(figures.name), importlib.metadata.version("lockstep-pipeline")
    points = "".join(f"<li>{escape(text)}</li>" for text in findings.findings(figures))
    options = {**figures.options, "fingerprint": figures.plan.fingerprint}
    body = [] if figures.run is None else [f"<h2>The run</h2>{_run(figures.run)}"]
    body += [f"<h2>Strategies compared</h2>{_strategies(figures)}"]
    body += [f"<h2>The plan</h2><pre>{escape(figures.plan.printed)}</pre>"]
    for index, side in enumerate(figures.sides):
        buckets = [Bucket(*b["bucket"]).lengths[index] for b in figures.plan.buckets]
        body.append(f"<h2>The {side.name}</h2>{_definitions(findings.describe_side(side))}")
        body.append(_histogram(side, sorted(set(buckets))))
    body.append(f"<details><summary>Options</summary>{_definitions(options)}</details>")
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<title>Lockstep: {name}</title><link rel="icon" href="data:,"><style>{STYLE}</style>'
        f"</head><body><h1>{name}</h1><ul>{points}</ul>"
        f'<p class="soft">Lockstep {escape(version)}, {date}: <code>{escape(command)}</code></p>'
        f"{''.join(body)}</body></html>\n"
    )


def _definitions(pairs: Mapping[str, Any]) -> str:
    items = (f"<dt>{escape(k)}</dt><dd>{escape(str(value))}</dd>" for k, value in pairs.items())
    return f"<dl>{''.join(items)}</dl>"


def _strategies(figures: Figures) -> str:
    """The comparison, with a bar for the work per token and its parts."""
    attention = figures.options["attention"]
    # Bars of the weakest strategies are cut off, so that the strongest can be compared.
    widest = 2.5 * min(way.work[attention] for way in figures.strategies)
    bars = ['<th class="work">work for each token</th>']
    for way in figures.strategies:
        positions = 1 / (1 - way.padding)
        shares = zip(KINDS, (1, positions - 1, way.work[attention] - positions), strict=True)
        pieces = (
            f'<i class="{kind}" style="width:{share / widest:.2%}"></i>' for kind, share in shares
        )
        about = f"<small>{escape(way.about)}</small>"
        bars.append(f'<td class="work"><div class="bar">{"".join(pieces)}</div>{about}</td>')
    ours, rows = findings.find_ours(figures).name, ""
    for (name, *cells), bar in zip(findings.tabulate_strategies(figures), bars, strict=True):
        tag = "td" if rows else "th"
        rows += '<tr class="ours">' if name == ours else "<tr>"
        rows += f"<{tag}>{escape(name)}</{tag}>{bar}"
        rows += "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"
    legend = "".join(f'<i class="{kind}"></i>{kind}' for kind in KINDS)
    return (
        f'<p class="soft">Work for each token with attention="{attention}":{legend}</p>'
        f'<div class="scroll"><table>{rows}</table></div>'
        f"{_definitions(findings.explain_strategies(figures))}"
    )


def _run(run: Run) -> str:
    """The losses of a run, its waits for batches, its speed, and the end of its log."""
    shown = _chart("Loss of training (line) and of evaluations (dots)", run.steps, run.loss, run)
    for title, values in (
        ("Waiting for batches, as a share of the time of the steps", run.waiting),
        ("Tokens a second", run.tokens_per_second),
    ):
        if any(value is not None for value in values):
            shown += _chart(title, run.steps, values, percentage=values is run.waiting)
    if "seconds" in run.summary:
        shown += _definitions(describe_summary(run.summary))
    names = [*dict.fromkeys(name for line in run.last_lines for name in line)]
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    rows = (
        f"<tr>{''.join(f'<td>{escape(number(line.get(n)))}</td>' for n in names)}</tr>"
        for line in run.last_lines
    )
    return (
        f"{shown}<details><summary>The last {len(run.last_lines):,} lines of its log</summary>"
        f'<div class="scroll"><table><tr>{head}</tr>{"".join(rows)}</table></div></details>'
    )


def _chart(
    title: str,
    steps: Sequence[int],
    values: Sequence[float | None],
    run: Run | None = None,
    *,
    percentage: bool = False,
) -> str:
    """A line of the values of some steps; with the evaluations of a run as dots."""
    dots = [(step, loss) for step, loss in run.evaluations if math.isfinite(loss)] if run else []
    points = [(step, value) for step, value in zip(steps, values, strict=True) if value is not None]
    heights = [value for _, value in (*points, *dots)]
    if not heights:
        return ""
    low, high = (0.0 if run is None else min(heights)), max(heights)
    last = max(1, *(step for step, _ in (*points, *dots)))

    def locate(step: int, value: float) -> tuple[str, str]:
        share = (value - low) / (high - low) if high > low else 0.5
        return f"{WIDTH * step / last:.1f}", f"{HEIGHT * (1 - share):.1f}"

    line = "L".join(" ".join(locate(*point)) for point in points)
    marks = (locate(*dot) for dot in dots)
    circles = "".join(f'<circle cx="{x}" cy="{y}" r="3" fill="#e8792b"/>' for x, y in marks)
    top, bottom = (f"{v:.1%}" if percentage else number(float(v)) for v in (high, low))
    return (
        f'<p class="soft">{title}, from {bottom} to {top}, by step:</p>'
        f'<svg role="img" aria-label="{title}" viewBox="-20 -6 {WIDTH + 40} {HEIGHT + 28}">'
        f'<path fill="none" stroke="#4e79a7" stroke-width="1.5" d="M{line or "0 0"}"/>{circles}'
        f'<path stroke="currentColor" opacity=".4" d="M0 {HEIGHT}H{WIDTH}"/>'
        f'<text x="0" y="{HEIGHT + 14}">0</text>'
        f'<text x="{WIDTH}" y="{HEIGHT + 14}">{last:,}</text></svg>'
    )


def _histogram(side: Side, buckets: list[int]) -> str:
    """Examples and tokens by length, and the lengths of the buckets."""
    most = max(side.edges[-1], *buckets)

    def locate(length: float) -> float:
        return WIDTH * math.log(length) / math.log(most)

    def outline(counts: list[int]) -> str:
        steps = zip(counts, side.edges[1:], strict=True)
        lines = (f"V{HEIGHT * (1 - n / max(1, *counts)):.1f}H{locate(end):.1f}" for n, end in steps)
        return f"M0 {HEIGHT}{''.join(lines)}V{HEIGHT}"

    powers = [10**n for n in range(math.ceil(math.log10(most)))]
    ticks = (f'<text x="{locate(n):.1f}" y="{HEIGHT + 14}">{n:,}</text>' for n in powers)
    dashes = (f'<path d="M{locate(length):.1f} 0V{HEIGHT}"/>' for length in buckets)
    listed = findings.list_words([f"{length:,}" for length in buckets])
    text = (
        "By length in positions, on a logarithmic scale: examples (grey) and tokens (line), each "
        f"over its fullest column; and the lengths of the buckets (dashed), {listed}."
    )
    return (
        f'<svg role="img" aria-label="{text}" viewBox="-20 -2 {WIDTH + 40} {HEIGHT + 22}">'
        f'<path fill="currentColor" opacity=".3" d="{outline(side.columns["examples"])}"/>'
        f'<path fill="none" stroke="currentColor" d="{outline(side.columns["tokens"])}"/>'
        f'<g stroke="#e8792b" stroke-dasharray="4 3">{"".join(dashes)}</g>{"".join(ticks)}</svg>'
        f'<p class="soft">{text}</p>'
    )
