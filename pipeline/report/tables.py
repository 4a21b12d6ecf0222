"""The report's tables, and the single figures of a dataset, for a terminal and for the page."""

import operator
from collections.abc import Sequence
from typing import Any

from pipeline.planning.balance import tiers_table
from pipeline.report.table import Column, Row, Table, length_of, number, percent


def strategies(figures: dict[str, Any]) -> Table:
    """The comparison: a row for each strategy."""
    corpus = figures["corpus"]
    documents = corpus["examples"] - corpus["empty"]
    width = figures["options"]["width"]
    hosts = len(figures["strategies"][0]["batches_per_host"])

    def estimate(row: Row, text: str) -> str:
        return f"≈ {text}" if row["sample"] else text

    def per_host(row: Row) -> str:
        least, most = min(row["batches_per_host"]), max(row["batches_per_host"])
        return f"{least:,}" if row["equal"] else f"{least:,} to {most:,}"

    columns = [
        Column("strategy", lambda row: row["name"], detail=lambda row: row["about"]),
        Column(
            "padding",
            lambda row: percent(row["padding"]),
            "of positions",
            "The share of all computed positions that hold no token.",
        ),
        Column(
            "shapes",
            lambda row: number(row["shapes"]),
            "compiled",
            "Different batch shapes, each of which is compiled once.",
        ),
        Column(
            f"{hosts} hosts",
            per_host,
            "batches each",
            f"Batches on each of {hosts} hosts that share a batch (a row each at least). Where the "
            "numbers differ, one host waits for the others for ever.",
        ),
        Column(
            "work",
            lambda row: number(row["cost"], 3),
            "a token",
            "Work of a layer with attention over whole rows, for each real token; 1 is the work at "
            "a position without attention.",
        ),
        Column(
            "batches",
            lambda row: estimate(row, number(row["batches"])),
            "an epoch",
            "Batches of an epoch on one host.",
        ),
        Column(
            "cut",
            lambda row: estimate(row, percent(row["cut"] / documents)) if row["cut"] else "0",
            "documents",
            "Documents that lie in more than one segment.",
        ),
        Column(
            "read again",
            lambda row: number(row["reread"]),
            "examples",
            "Examples to read again to resume exactly after an interruption, at most.",
        ),
        Column(
            "attention",
            lambda row: number(row["attention_flops_per_token"] / 1e6, 2),
            "MFLOP a token",
            f"Scores and their use in one layer of width {width:,}, forward, over whole rows, for "
            "each real token.",
        ),
    ]
    return Table(columns, figures["strategies"], emphasized=lambda row: "packing" in row)


def buckets(plan: dict[str, Any]) -> Table:
    """A row for each bucket of a plan."""
    columns = [
        Column(
            "bucket",
            lambda row: f"{row['rows']:,} × {length_of(row['length'])}",
            "rows × positions",
        ),
        Column("batches", lambda row: number(row["batches"]), "an epoch"),
        Column(
            "fill",
            lambda row: "–" if row["fill"] is None else f"{row['fill']:.2%}",
            "of positions",
        ),
        Column("tokens", lambda row: number(row["tokens_per_step"]), "a step"),
        Column("documents", lambda row: number(row["documents_per_step"], 1), "a step"),
        Column("segments", lambda row: number(row["segments"]), "an epoch"),
    ]
    return Table(columns, plan["buckets"])


def tiers(over_ideal: Sequence[dict[str, Any]]) -> Table:
    """A row for each number of tiers, a column for each number of groups of rows."""
    heads, *rows = tiers_table(over_ideal) or [["time over ideal"]]
    columns = [Column(name, operator.itemgetter(name)) for name in heads]
    return Table(columns, [dict(zip(heads, row, strict=True)) for row in rows])


def sources(corpus: dict[str, Any]) -> Table:
    """A row for each source of a dataset."""
    columns = [
        Column("source", lambda row: row["name"]),
        Column("examples", lambda row: number(row["examples"])),
        Column("tokens", lambda row: number(row["tokens"])),
        Column("share", lambda row: percent(row["share_of_tokens"]), "of tokens"),
    ]
    return Table(columns, corpus["sources"])


def corpus(corpus: dict[str, Any]) -> list[tuple[str, str]]:
    """The figures of a dataset, each with what it counts."""
    shown = ("5", "50", "90", "99")
    percentiles = " · ".join(f"{corpus['percentiles'][p]:,}" for p in shown)
    return [
        (f"{corpus['examples']:,}", "examples"),
        (f"{corpus['tokens']:,}", "tokens to train on"),
        (f"{corpus['mean']:,.1f}", "mean length"),
        (percentiles, f"percentiles {', '.join(shown)}"),
        (f"{corpus['longest']:,}", "longest"),
        (f"{corpus['overlong']:,}", f"over {corpus['longest_row']:,} positions"),
        (f"{corpus['empty']:,}", "with nothing to train on"),
    ]


def vocabulary(counted: dict[str, Any]) -> list[tuple[str, str]]:
    """The figures of the use of a vocabulary, each with what it counts."""
    size = counted["size"]
    share = f" of {size:,} ({counted['used'] / size:.1%})" if size else ""
    found = [
        (f"{counted['used']:,}", f"ids used{share}"),
        (f"{counted['rare']:,}", "ids used fewer than ten times"),
        (f"{counted['half']:,}", "ids make half of all tokens"),
        (f"{counted['entropy']:.2f} bits", "entropy of single tokens"),
    ]
    if text := counted["text_bytes_per_token"]:
        found.append((f"{text:.2f} bytes", "of text a token"))
    if counted["tokens"] < counted["of"]:
        found.append((f"{counted['tokens']:,}", "tokens counted"))
    return found
