"""Page: the report as one HTML file that needs no network, no script and no other file."""

from html import escape
from typing import Any

from pipeline.report import blocks, charts, findings
from pipeline.report.style import COLOURS, STYLE
from pipeline.report.table import columns, length_of, percent


def page(figures: dict[str, Any]) -> str:
    """The report of `measure` as an HTML document."""
    said = "".join(f"<li>{escape(each)}</li>" for each in findings.findings(figures))
    name = escape(figures["name"])
    sections = "".join(
        section(figures) for section in (_corpus, _comparison, _cost, _plan, _options)
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<title>Lockstep: {name}</title><link rel="icon" href="data:,"><style>{STYLE}</style>'
        f'</head><body><header><p class="soft">Lockstep report</p><h1>{name}</h1>'
        f'<ul class="findings">{said}</ul></header>{sections}</body></html>\n'
    )


def _corpus(figures: dict[str, Any]) -> str:
    if "targets" not in figures:
        return _side("The corpus", figures["corpus"])
    return _side("Inputs", figures["corpus"]) + _side("Targets", figures["targets"])


def _side(title: str, corpus: dict[str, Any]) -> str:
    at = corpus["percentiles"]
    tiles = [
        (f"{corpus['examples']:,}", "examples"),
        (f"{corpus['tokens']:,}", "tokens to train on"),
        (f"{corpus['mean']:,.1f}", "positions, mean length"),
        *((f"{at[p]:,}", f"positions, {p}th percentile") for p in ("5", "50", "90", "99")),
        (f"{corpus['longest']:,}", "positions, longest"),
        (f"{corpus['overlong']:,}", f"too long (over {corpus['longest_row']:,} positions)"),
        (f"{corpus['empty']:,}", "too short (nothing to train on)"),
    ]
    marks = [(f"{name} {at[p]:,}", at[p]) for name, p in _MARKS]
    histograms = [
        blocks.figure(
            "Examples by length, logarithmic" if log else "Examples by length, up to 99.9%",
            charts.histogram(
                corpus["histograms"]["log" if log else "linear"],
                "examples",
                log=log,
                marks=marks,
                label="Examples by length",
            ),
        )
        for log in (False, True)
    ]
    return blocks.section(
        title,
        blocks.tiles(tiles),
        blocks.figures(*histograms),
        _sources(corpus),
        _vocabulary(corpus),
    )


_MARKS = (("p50", "50"), ("p90", "90"), ("p99", "99"))


def _sources(corpus: dict[str, Any]) -> str:
    if len(corpus["sources"]) < 2:
        return ""
    head = [("source", ""), ("examples", ""), ("tokens", ""), ("share", "of tokens")]
    rows = [
        (
            "",
            [
                escape(each["name"]),
                f"{each['examples']:,}",
                f"{each['tokens']:,}",
                percent(each["share_of_tokens"]),
            ],
        )
        for each in corpus["sources"]
    ]
    return "<h3>Sources</h3>" + blocks.table(head, rows)


def _vocabulary(corpus: dict[str, Any]) -> str:
    parts = []
    for source, each in zip(corpus["sources"], corpus["vocabulary"], strict=False):
        size = each["size"]
        share = f" of {size:,} ({each['used'] / size:.1%})" if size else ""
        title = "Vocabulary" if len(corpus["sources"]) < 2 else f"Vocabulary of {source['name']}"
        text = each["text_bytes_per_token"]
        tiles = [
            (f"{each['used']:,}", f"ids used{share}"),
            (f"{each['rare']:,}", "ids used fewer than ten times"),
            (f"{each['half']:,}", "ids make half of all tokens"),
            (f"{each['entropy']:.2f} bits", "entropy of single tokens"),
            *([(f"{text:.2f} bytes", "of text a token")] if text else []),
        ]
        counted = "" if each["tokens"] == each["of"] else f"Counted over {each['tokens']:,} tokens."
        parts += [f"<h3>{escape(title)}</h3>", blocks.tiles(tiles), blocks.text(counted, "about")]
    return "".join(parts)


def _comparison(figures: dict[str, Any]) -> str:
    shown = figures["strategies"]
    kinds = ["ours" if each["name"].startswith("Lockstep") else "bar" for each in shown]
    padding = [
        (each["name"], 100 * each["padding"], percent(each["padding"]), kind)
        for each, kind in zip(shown, kinds, strict=True)
    ]
    cost = [
        (each["name"], each["cost"], f"{each['cost']:.3f}", kind)
        for each, kind in zip(shown, kinds, strict=True)
    ]
    most = max(each["cost"] for each in shown)
    written = columns(figures)
    rows = []
    for each, kind in zip(shown, kinds, strict=True):
        cells = [escape(column.write(each)) for column in written]
        if not each["equal"]:
            cells[-1] = f'<span class="no">{cells[-1]}</span>'
        about = each["about"].replace(" rows × ", "\u00a0rows\u00a0×\u00a0")
        name = f"{escape(each['name'])}<small>{escape(about)}</small>"
        rows.append((kind, [name, *cells]))
    about = "".join(
        f"<dt>{escape(column.name)}</dt><dd>{escape(column.about)}</dd>" for column in written
    )
    return blocks.section(
        "Ways to make batches of it",
        blocks.text(findings.about_samples(figures)),
        blocks.figures(
            blocks.figure(
                "Padding",
                charts.bars(padding, unit="padding, % of positions", most=100, label="Padding"),
            ),
            blocks.figure(
                "Work, with attention over whole rows",
                charts.bars(
                    cost,
                    unit="work per real token (1 = a position without attention)",
                    most=most,
                    label="Work per real token",
                ),
            ),
        ),
        blocks.table([("strategy", ""), *((column.name, column.unit) for column in written)], rows),
        f"<dl>{about}</dl>",
    )


def _cost(figures: dict[str, Any]) -> str:
    cost = figures["cost"]
    said = (
        f"A row of L positions costs L + L²/(6 × {cost['width']:,}) with attention over whole "
        "rows, and with attention that skips other segments L and the squares of its segments "
        "over the same. Each bucket more is one more compilation of the training step."
    )
    drawing = charts.lines(
        [(point["buckets"], (point["dense"], point["segment"])) for point in cost["curve"]],
        kinds=[("dense attention", "c1"), ("skips other segments", "c0")],
        x_unit="buckets",
        y_unit="work per real token (1 = a position without attention)",
        whole=True,
        label="Work per real token against the number of buckets",
    )
    advice = "".join(f"<li>{escape(each)}</li>" for each in findings.about_buckets(cost))
    return blocks.section(
        "How many buckets",
        blocks.figures(
            blocks.figure("Work against the number of buckets", drawing),
            f'<div><ul class="findings">{advice}</ul>{blocks.text(said, "soft")}</div>',
        ),
    )


def _plan(figures: dict[str, Any]) -> str:
    plan = figures["plan"]
    lengths = [length_of(bucket) for bucket in plan["buckets"]]
    walked = ""
    if plan["walked"] < plan["batches"]:
        walked = (
            f"The order of buckets, documents a step and balance are counted over the first "
            f"{plan['walked']:,} of {plan['batches']:,} batches; everything else over all."
        )
    balance = plan["balance"]
    drawings = []
    if "histogram" in plan:
        ends = [bucket["length"] for bucket in plan["buckets"]]
        drawings.append(
            blocks.figure(
                "Tokens by length, and the bucket that they need",
                charts.histogram(
                    plan["histogram"],
                    "tokens",
                    marks=[(f"{end:,}", end) for end in ends],
                    buckets=ends,
                    label="Tokens by length",
                ),
            )
        )
    drawings += [
        blocks.figure(
            "Segments in a row",
            charts.columns(
                _segments(plan),
                x_unit="segments in a row",
                y_unit="rows, % of all",
                label="Segments in a row",
            ),
        ),
        blocks.figure("Buckets of the first steps", charts.order_lanes(plan["order"], lengths)),
        blocks.figure("Buckets over the epoch", charts.order_shares(plan["order"], lengths)),
    ]
    if balance["hosts"] > 1:
        pairs = zip(
            balance["tokens"]["over_epoch"], balance["attention"]["over_epoch"], strict=True
        )
        stretch = plan["walked"] / len(balance["tokens"]["over_epoch"])
        drawings.append(
            blocks.figure(
                f"Work of the busiest of {balance['hosts']} hosts",
                charts.lines(
                    [((number + 0.5) * stretch, pair) for number, pair in enumerate(pairs)],
                    kinds=[("real positions", "c1"), ("attention in segments", "c2")],
                    x_unit="step of the epoch",
                    y_unit="busiest host's work / the mean host's",
                    ends=(1, 1.05),
                    label="Work of the busiest host",
                ),
            )
        )
    return blocks.section(
        "The plan",
        _bucket_table(plan),
        blocks.text(walked, "about"),
        blocks.figures(*drawings, blocks.text(findings.about_balance(balance))),
    )


def _segments(plan: dict[str, Any]) -> list[tuple[int, float]]:
    total = sum(rows for _, rows in plan["segments_per_row"])
    return [(held, 100 * rows / total) for held, rows in plan["segments_per_row"]]


def _bucket_table(plan: dict[str, Any]) -> str:
    head = [
        ("bucket", "rows × positions"),
        ("batches", "an epoch"),
        ("fill", "of positions"),
        ("tokens", "a step, mean"),
        ("documents", "a step, mean"),
        ("segments", "an epoch"),
    ]
    rows = []
    for index, each in enumerate(plan["buckets"]):
        swatch = f'<i class="swatch c{index % COLOURS}"></i>'
        documents = each["documents_per_step"]
        rows.append(
            (
                "",
                [
                    f"{swatch}{each['rows']:,} × {length_of(each)}",
                    f"{each['batches']:,}",
                    "–" if each["fill"] is None else f"{each['fill']:.2%}",
                    "–" if each["batches"] == 0 else f"{each['tokens_per_step']:,.0f}",
                    "–" if documents is None else f"{documents:,.1f}",
                    f"{each['segments']:,}",
                ],
            )
        )
    return blocks.table(head, rows)


def _options(figures: dict[str, Any]) -> str:
    pairs = "".join(
        f"<dt>{escape(name)}</dt><dd>{escape(str(value))}</dd>"
        for name, value in figures["options"].items()
    )
    print_ = f"<dt>fingerprint</dt><dd><code>{escape(figures['plan']['fingerprint'])}</code></dd>"
    return blocks.section("Options of the plan", f"<dl>{pairs}{print_}</dl>")
