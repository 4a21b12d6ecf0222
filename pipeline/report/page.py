"""The page: the report as one HTML file that needs no network, no script and no other file."""

import datetime
import importlib.metadata
from collections.abc import Mapping
from html import escape
from typing import Any

from pipeline.report import charts, findings, tables

STYLE = """
:root{color-scheme:light dark}
*{box-sizing:border-box}
body{margin:0 auto;padding:20px;max-width:1080px;background:Canvas;color:CanvasText;
font:15px/1.5 system-ui,sans-serif;overflow-wrap:anywhere}
p{max-width:75ch}
.soft,dl,small{font-size:13px}
.grid{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,400px),1fr));gap:16px}
dl{display:grid;grid-template-columns:max-content 1fr;gap:4px 14px}
dd{margin:0}
figure{margin:0;min-width:0}
svg{display:block;width:100%;height:auto;max-width:520px}
text{fill:currentColor}
.scroll{overflow-x:auto}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;min-width:100%}
th,td{text-align:right;padding:6px 8px;border-bottom:1px solid GrayText;vertical-align:top;
white-space:nowrap}
th:first-child,td:first-child{text-align:left;position:sticky;left:0;background:Canvas;
white-space:normal;min-width:130px}
small{display:block;font-weight:400}
.ours td:first-child,dt{font-weight:600}
@media print{figure,tr{break-inside:avoid}}
"""


def format_page(figures: dict[str, Any], *, command: str, date: datetime.date) -> str:
    """The report of `measure` as an HTML document.

    `command` is the command that made it, and `date` the day.

    Raises:
        ImportError: matplotlib is not installed.
    """
    name = escape(figures["name"])
    points = "".join(f"<li>{escape(text)}</li>" for text in findings.findings(figures))
    version = importlib.metadata.version("lockstep-pipeline")
    options = {**figures["options"], "fingerprint": figures["plan"]["fingerprint"]}
    sides = {"corpus": "Inputs", "targets": "Targets"}
    if "targets" not in figures:
        sides = {"corpus": "The corpus"}
    sections = [
        _strategies(figures),
        _plan(figures),
        *(_side(title, figures[side]) for side, title in sides.items()),
        _details("Options of the plan", _definitions(options)),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<title>Lockstep: {name}</title><link rel="icon" href="data:,"><style>{STYLE}</style>'
        f"</head><body><h1>{name}</h1><ul>{points}</ul>"
        f'<p class="soft">Lockstep {escape(version)}, {date}: <code>{escape(command)}</code></p>'
        f"{''.join(sections)}</body></html>\n"
    )


def _section(title: str, *parts: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{''.join(parts)}</section>"


def _paragraph(text: str) -> str:
    return f'<p class="soft">{escape(text)}</p>'


def _details(summary: str, *parts: str) -> str:
    return f"<details><summary>{escape(summary)}</summary>{''.join(parts)}</details>"


def _definitions(pairs: Mapping[str, Any]) -> str:
    items = (
        f"<dt>{escape(name)}</dt><dd>{escape(str(value))}</dd>" for name, value in pairs.items()
    )
    return f"<dl>{''.join(items)}</dl>"


def _chart(title: str, draw, figures: dict[str, Any], height: int = 240) -> str:
    drawing = charts.svg(draw, figures, height, title)
    return f"<figure><h3>{escape(title)}</h3>{drawing}</figure>"


def _grid(*parts: str) -> str:
    return f'<div class="grid">{"".join(parts)}</div>'


def _strategies(figures: dict[str, Any]) -> str:
    cost, table = figures["cost"], tables.strategies(figures)
    bars = len(findings.rivals(figures)) + 2
    text = _paragraph(
        f"Work 1 is one position without attention. A row of L positions costs L + L² / (6 × "
        f"{cost['width']:,}) with attention over whole rows; attention that skips other segments "
        "costs the squares of the segments' lengths instead. Each bucket is one compilation of the "
        f"training step. {findings.about_strategies(figures)}"
    )
    if len(cost["curve"]) > 1:
        text = _chart("How many buckets are worth it", charts.bucket_curve, cost) + text
    chart = _chart("Work per real token", charts.strategies, figures, 36 * bars + 60)
    return _section(
        "Strategies compared",
        _grid(chart, f"<div>{text}</div>"),
        _details(
            f"All figures of {len(table.rows)} strategies",
            table.html(),
            _definitions(tables.explain_strategies(cost["width"])),
        ),
    )


def _plan(figures: dict[str, Any]) -> str:
    plan, parts = figures["plan"], []
    several = len(plan["buckets"]) > 1
    if several and "targets" not in figures:
        title = "Tokens by length, and the lengths of the buckets"
        parts.append(_chart(title, charts.tokens_by_length, figures))
    if several:
        height = 90 + 24 * len(plan["buckets"])
        parts.append(_chart("Buckets of the first steps", charts.bucket_order, plan, height))
    if len(plan["segments_per_row"]) > 1:
        parts.append(_chart("Segments in a row", charts.segments_per_row, plan))
    found = [tables.buckets(plan).html()]
    if over_ideal := plan["balance"]["over_ideal"]:
        found.append(tables.tiers(over_ideal).html())
    text = findings.about_balance(plan["balance"])
    if plan["walked"] < plan["batches"]:
        text += (
            " The order of buckets, documents a step and the balance of hosts are counted over the "
            f"first {plan['walked']:,} of {plan['batches']:,} batches; everything else over all."
        )
    return _section("The plan", *found, _paragraph(text), _grid(*parts))


def _side(title: str, corpus: dict[str, Any]) -> str:
    parts = [_vocabulary(corpus)]
    if corpus["shortest"] < corpus["longest"]:
        parts = [_chart("Examples by length", charts.lengths, corpus), *parts]
    sources = tables.sources(corpus).html() if len(corpus["sources"]) > 1 else ""
    return _section(title, _definitions(tables.corpus(corpus)), sources, _grid(*parts))


def _vocabulary(corpus: dict[str, Any]) -> str:
    parts = []
    names = [source["name"] for source in corpus["sources"]]
    if len(names) == 1 or len(names) > len(corpus["vocabulary"]):
        names = [""]
    for name, each in zip(names, corpus["vocabulary"], strict=False):
        title = f"Vocabulary of {name}" if name else "Vocabulary"
        facts = _definitions(tables.vocabulary(each))
        parts.append(f"<div><h3>{escape(title)}</h3>{facts}</div>")
    return "".join(parts)
