"""A run: what its log says of losses, of waiting for batches, and of speed."""

import contextlib
import dataclasses
import json
import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath

from pipeline.fs.atomic import as_path
from pipeline.history.log_parts import read_log
from pipeline.history.metrics_files import NAME

COLUMNS = 300  # of the charts, at most
LAST = 100  # lines of the log that are shown
SUMMARY = "summary.json"

# What the entries of a summary are, in the words of a table.
WORDS = {
    "eval_loss_first": "loss of the first evaluation",
    "eval_loss_last": "loss of the last evaluation",
    "bits_per_byte": "bits per byte of text, in the last evaluation",
    "steps": "steps",
    "tokens": "tokens trained on",
    "padding": "share of the positions that were padding",
    "shares": "share of the tokens from each corpus",
    "tokens_per_second": "tokens a second",
    "flop_utilisation": "share of the FLOP/s of the devices that the model used",
    "skipped_steps": "steps without an update",
    "compiles_after_start": "compilations of steps after the first step",
    "other_compiles": "other compilations after the first step",
    "goodput": "share of all time that went into steps",
    "waiting": "share of the steps' time spent waiting for batches",
    "seconds": "seconds",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """The steps of a run, in columns of as many steps each; None stands for what nobody logged."""

    steps: list[int]  # the first step of each column
    loss: list[float | None]  # the mean over the tokens of its steps
    waiting: list[float | None]  # the share of the steps' time in which they waited for batches
    tokens_per_second: list[float | None]
    evaluations: list[tuple[int, float]]  # the steps done, and the loss
    last_lines: list[dict[str, Any]]  # of the log
    summary: dict[str, Any]  # that train.py writes at the end of a run; else empty


def read_run(workdir: epath.PathLike) -> Run | None:
    """What the log in a work directory says; None if it has no step."""
    folder, lines = as_path(workdir), list[dict[str, Any]]()
    for line in read_log(folder / NAME).splitlines():
        with contextlib.suppress(ValueError, KeyError, TypeError):  # cut short by a kill
            values = json.loads(line)
            operator.index(values["step"])
            lines.append(values)
    steps = sorted((line for line in lines if "loss" in line), key=operator.itemgetter("step"))
    if not steps:
        return None
    summary: Any = {}
    if (folder / SUMMARY).exists():
        with contextlib.suppress(ValueError):
            summary = json.loads((folder / SUMMARY).read_text())
    evaluations = [line for line in lines if line.get("eval_loss") is not None]
    numbers = [run for run in np.array_split(np.arange(len(steps)), COLUMNS) if len(run)]
    columns = [[steps[number] for number in run] for run in numbers]
    return Run(
        steps=[column[0]["step"] for column in columns],
        loss=[_mean_loss(column) for column in columns],
        waiting=[_divide(column, "waited", "seconds") for column in columns],
        tokens_per_second=[_divide(column, "tokens", "seconds") for column in columns],
        evaluations=[(line["step"], line["eval_loss"]) for line in evaluations],
        last_lines=lines[-LAST:],
        summary=summary if isinstance(summary, dict) else {},
    )


def _mean_loss(lines: Sequence[Mapping[str, Any]]) -> float | None:
    """The mean over the tokens of lines whose loss is finite."""
    finite = [(line["loss"], line.get("tokens", 1)) for line in lines if line["loss"] is not None]
    weight = sum(tokens for _, tokens in finite)
    return sum(loss * tokens for loss, tokens in finite) / weight if weight else None


def _divide(lines: Sequence[Mapping[str, Any]], above: str, below: str) -> float | None:
    """The sum of one value over that of another, of lines that have both."""
    both = [(line[above], line[below]) for line in lines if {above, below} <= line.keys()]
    total = math.fsum(divisor for _, divisor in both)
    return math.fsum(dividend for dividend, _ in both) / total if total else None


def describe_summary(summary: Mapping[str, Any]) -> dict[str, str]:
    """The entries of the summary of a run, in words; those without a value are left out.

    >>> describe_summary({"goodput": 0.51237, "bits_per_byte": None, "seconds": {"train": 61.2}})
    {'share of all time that went into steps': '0.5124', 'seconds': '61 train'}
    """
    described = {}
    for name, value in summary.items():
        if value in (None, {}):
            continue
        if name == "seconds":
            text = " · ".join(f"{seconds:,.0f} {phase}" for phase, seconds in value.items())
        else:
            text = number(value)
        described[WORDS.get(name, name.replace("_", " "))] = text
    return described


def number(value: Any) -> str:
    """A value of a log, with up to four digits.

    >>> [number(value) for value in (0.00012344, 4573.27, 150, None, "16x256")]
    ['0.0001234', '4,573', '150', '–', '16x256']
    """
    if isinstance(value, float) and math.isfinite(value):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {number(inner)}" for name, inner in value.items()) or "–"
    return "–" if value is None else f"{value:,}" if isinstance(value, int) else f"{value}"
