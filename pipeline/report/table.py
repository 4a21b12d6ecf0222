"""Table: the columns of the comparison and how their figures are written."""

import dataclasses
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of the comparison.

    Attributes:
        name: its heading, short.
        unit: what is counted.
        about: what it says, in a sentence.
        write: the text of its cell, from a strategy's figures.
    """

    name: str
    unit: str
    about: str
    write: Callable[[dict[str, Any]], str]


def percent(share: float) -> str:
    """A share with as many digits as are worth reading.

    >>> percent(0.6818), percent(0.0312), percent(0.00052), percent(1e-9), percent(0)
    ('68.2%', '3.12%', '0.052%', '< 0.001%', '0%')
    """
    if share < 0.000005:
        return "< 0.001%" if share > 0 else "0%"
    digits = next((n for n, least in enumerate((0.0995, 0.00995)) if share >= least), 2)
    return f"{share:.{digits + 1}%}"


def length_of(bucket: dict[str, Any]) -> str:
    """The length of a bucket; of pairs, those of inputs and targets.

    >>> length_of({"length": 1024}), length_of({"length": [512, 64]})
    ('1,024', '512 + 64')
    """
    length = bucket["length"]
    both = length if isinstance(length, list | tuple) else (length,)
    return " + ".join(f"{each:,}" for each in both)


def hosts(strategy: dict[str, Any]) -> str:
    """Batches on each host, and whether they are equal."""
    least, most = min(strategy["batches_per_host"]), max(strategy["batches_per_host"])
    return f"{least:,} each" if strategy["equal"] else f"{least:,} to {most:,}"


def batches(strategy: dict[str, Any]) -> str:
    """Batches of an epoch; an estimate is marked as one."""
    return f"{'≈ ' if strategy['sample'] else ''}{strategy['batches']:,}"


def columns(figures: dict[str, Any]) -> list[Column]:
    """The columns of the comparison, after the strategy's name."""
    documents = figures["corpus"]["examples"] - figures["corpus"]["empty"]
    width = figures["options"]["width"]
    number = len(figures["strategies"][0]["batches_per_host"])
    return [
        Column(
            "padding",
            "of positions",
            "The share of all computed positions that hold no token.",
            lambda each: percent(each["padding"]),
        ),
        Column("batches", "an epoch", "Batches of an epoch, on one host.", batches),
        Column(
            "shapes",
            "different",
            "Different batch shapes, each of which is compiled once.",
            lambda each: f"{each['shapes']:,}",
        ),
        Column(
            "positions",
            "a token",
            "Computed positions for each real token.",
            lambda each: f"{each['positions_per_token']:.3f}",
        ),
        Column(
            "attention",
            "MFLOP a token",
            f"Scores and their use in one layer of width {width:,}, forward, over whole rows, for "
            "each real token.",
            lambda each: f"{each['attention_flops_per_token'] / 1e6:,.2f}",
        ),
        Column(
            "cut",
            "documents",
            "Documents that lie in more than one segment.",
            lambda each: (
                f"{'≈ ' if each['sample'] and each['cut'] else ''}"
                + (f"{each['cut'] / documents:.1%}" if each["cut"] else "0")
            ),
        ),
        Column(
            "resuming",
            "examples read again",
            "Examples that must be read again to go on exactly after an interruption, at most.",
            lambda each: f"{each['reread']:,}",
        ),
        Column(
            f"{number} hosts",
            "batches on each",
            f"Batches on each of {number} hosts that share a batch (a row each at least); where "
            "they differ, a host waits for ever for the others.",
            hosts,
        ),
    ]
