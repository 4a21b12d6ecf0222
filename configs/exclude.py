"""Excludes the documents whose loss stays above a quantile in each of the first two epochs.

    python train.py --config=configs/exclude.py:runs/clean --workdir=runs/clean
    python train.py --config=configs/exclude.py:runs/clean --workdir=runs/clean --config.steps=300
    lockstep audit runs/clean

Repeat the work directory after the colon. The first command finds no losses there, and trains on
all documents. The second continues without those whose losses were too high; `audit` names them.
"""

import contextlib

import numpy as np
from ml_collections import ConfigDict

from configs import quickstart
from pipeline.history import losses, read_history
from pipeline.planning.lengths import load_mask

EPOCHS = 2
QUANTILE = 0.99


def get_config(workdir: str = "") -> ConfigDict:
    """The configuration that `python train.py --config=configs/exclude.py:WORKDIR` runs."""
    config = quickstart.get_config()
    config.train.split = "validation"  # few documents, so that 150 steps are more than two epochs
    config.hold_out = 0.1
    with contextlib.suppress(FileNotFoundError):  # of losses: the run has not begun
        config.schedule = leave_out_worst(workdir)
    return config


def leave_out_worst(workdir: str) -> tuple[tuple[int, dict], ...]:
    """The schedule of a run that excludes its worst documents after the last step with losses.

    If the run has excluded documents already, it keeps that list. Before the end of `EPOCHS` epochs
    the schedule is empty.
    """
    found = losses(workdir)
    _, plan = read_history(workdir)
    if past := [each for each in plan.changes[1:] if "exclude" in each[1]]:
        masks = [(step, load_mask(changes["exclude"])) for step, changes in past]
        return tuple((step, {"exclude": np.flatnonzero(mask).tolist()}) for step, mask in masks)
    step, high = int(found.step[-1]) + 1, []
    if step < plan.first_step(EPOCHS):
        return ()
    for epoch in range(EPOCHS):
        numbers, _, above = found.select(found.epoch == epoch).documents()
        high.append(set(numbers[above > np.quantile(above, QUANTILE)].tolist()))
    return ((step, {"exclude": sorted(set.intersection(*high))}),)
