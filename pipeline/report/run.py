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
    place, lines = as_path(workdir), list[dict[str, Any]]()
    for line in read_log(place / NAME).splitlines():
        with contextlib.suppress(ValueError, KeyError, TypeError):  # cut short by a kill
            values = json.loads(line)
            operator.index(values["step"])
            lines.append(values)
    steps = sorted((each for each in lines if "loss" in each), key=lambda each: each["step"])
    if not steps:
        return None
    summary: Any = {}
    if (place / SUMMARY).exists():
        with contextlib.suppress(ValueError):
            summary = json.loads((place / SUMMARY).read_text())
    evaluations = [each for each in lines if each.get("eval_loss") is not None]
    columns = [part for part in np.array_split(np.arange(len(steps)), COLUMNS) if len(part)]
    parts = [[steps[number] for number in part] for part in columns]
    return Run(
        steps=[part[0]["step"] for part in parts],
        loss=[_mean_loss(part) for part in parts],
        waiting=[_divide(part, "waited", "seconds") for part in parts],
        tokens_per_second=[_divide(part, "tokens", "seconds") for part in parts],
        evaluations=[(each["step"], each["eval_loss"]) for each in evaluations],
        last_lines=lines[-LAST:],
        summary=summary if isinstance(summary, dict) else {},
    )


def _mean_loss(lines: Sequence[Mapping[str, Any]]) -> float | None:
    """The mean over the tokens of lines whose loss is finite."""
    known = [(each["loss"], each.get("tokens", 1)) for each in lines if each["loss"] is not None]
    weight = sum(tokens for _, tokens in known)
    return sum(loss * tokens for loss, tokens in known) / weight if weight else None


def _divide(lines: Sequence[Mapping[str, Any]], above: str, below: str) -> float | None:
    """The sum of one value over that of another, of lines that have both."""
    both = [(each[above], each[below]) for each in lines if {above, below} <= each.keys()]
    total = math.fsum(divisor for _, divisor in both)
    return math.fsum(dividend for dividend, _ in both) / total if total else None
