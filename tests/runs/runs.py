"""Runs of the training program in this process, which share its imports and compiled programs."""

import contextlib
import io
import json
import logging
import math
import os

import numpy as np
import pytest

import train
from pipeline.cli.commands import main
from pipeline.fs.atomic import as_path
from pipeline.history import losses
from pipeline.history.log_parts import read_log
from tests.runs import tiny_config
from trainer.launch import LOGGERS

# What depends on the clock.
CLOCK = {"waited", "seconds", "tokens_per_second", "goodput", "waiting"}


def tiny(text, kind="", **fields):
    """The tiny config of a kind for the text in a file; names of fields have __ for dots."""
    os.environ["TINY_TEXT"] = str(text)
    config = tiny_config.get_config(kind)
    config.update_from_flattened_dict({k.replace("__", "."): v for k, v in fields.items()})
    return config


class Messages(logging.Handler):
    """Keeps what is logged."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())

    def __str__(self):
        return "\n".join(self.lines)


@contextlib.contextmanager
def messages():
    """What train.py and the library log inside the block."""
    found, root = Messages(), logging.getLogger()
    loggers = [logging.getLogger(name) for name in LOGGERS]
    levels = [logger.level for logger in loggers]
    root.addHandler(found)
    for logger in loggers:
        logger.setLevel(logging.INFO)
    try:
        yield found
    finally:
        root.removeHandler(found)
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def run(config, workdir):
    """Runs a config to its end; returns what was logged."""
    with messages() as found:
        train.train(config, as_path(workdir))
    return str(found)


def audited(workdir):
    """What the audit of a run says, which must pass."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
        code = main(["audit", str(workdir)])
    assert code == 0, out.getvalue()
    return out.getvalue()


def lines(workdir):
    """The lines of steps and of evaluations, without what depends on the clock."""
    whole = read_log(workdir / "metrics.jsonl").split(b"\n")[:-1]
    parsed = [json.loads(line) for line in whole if line]
    return [{k: v for k, v in line.items() if k not in CLOCK} for line in parsed]


def steps(workdir):
    """The lines of steps that ran."""
    return [line for line in lines(workdir) if "loss" in line]


def segment_losses(workdir):
    """The losses of segments, which add up to the loss of each step in the log."""
    found = losses(workdir)
    logged = {line["step"]: line["loss"] for line in steps(workdir)}
    assert sorted(set(found.step.tolist())) == sorted(logged)
    for step, loss in logged.items():
        here = found.select(found.step == step)
        mean = here.loss.sum(dtype=float) / here.weight.sum(dtype=float)
        assert math.isnan(mean) if loss is None else mean == pytest.approx(loss, rel=1e-6)
    return found


def assert_same_losses(one, other, rtol=1e-5):
    """Two runs have the same batches and, up to rounding, losses of steps and of segments."""
    ours, theirs = steps(one), steps(other)
    assert [line["batch"] for line in ours] == [line["batch"] for line in theirs]
    for name, error in (("loss", rtol), ("gradient_norm", 1e-4)):
        np.testing.assert_allclose(
            [line[name] for line in ours], [line[name] for line in theirs], rtol=error
        )
    for mine, its in zip(segment_losses(one), segment_losses(other), strict=True):
        np.testing.assert_allclose(mine, its, rtol=1e-4)
    for name in ("eval_loss_first", "eval_loss_last"):
        assert summary(one)[name] == pytest.approx(summary(other)[name], rel=rtol)


def summary(workdir):
    """The summary without what depends on the clock."""
    values = json.loads((workdir / "summary.json").read_text())
    return {k: v for k, v in values.items() if k not in CLOCK}
