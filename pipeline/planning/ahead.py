"""The files that come next: which files of a corpus the batches after a step need, and when."""

import numpy as np

from pipeline.planning.source import Source
from pipeline.planning.stages import Stages
from pipeline.planning.windows import Windows


def files_ahead(plan: Stages, step: int) -> dict[str, list[np.ndarray]]:
    """The files that batches need from a step on, for each corpus that has files, by name.

    Each array (int64) has the numbers of the files of one window. The list has the window of the
    step, those after it, and all windows of the next epoch. A corpus that is planned as a whole is
    one window. Later changes of the plan are not looked at.
    """
    stage = plan.stage_at(step)
    begin = stage.tiers.block(step).start
    rows = stage.timetable.before(begin - stage.start)[1]
    found = {}
    for number, source in enumerate(stage.sources):
        if source.lengths.files is not None:
            every = np.arange(len(source.lengths.files))
            found[source.name] = _of_source(source, rows[:, number], every)
    return found


def _of_source(source: Source, rows: np.ndarray, every: np.ndarray) -> list[np.ndarray]:
    """See `files_ahead`, for a source with the files `every` after some rows of each bucket."""
    found = []
    rest, in_epoch = rows - source.remainder_rows, source.whole.rows
    if source.remainder is not None and (rest < 0).any():
        for runs in _windows_from(source.remainder, source.epoch - 1, rows):
            found.append(every if runs is None else np.unique(source.remainder_files[runs]))
        rest = 0 * rest
    epochs = int((rest[in_epoch > 0] // in_epoch[in_epoch > 0]).min())
    for more, before in ((0, rest - epochs * in_epoch), (1, 0 * rest)):
        for files in _windows_from(source.whole, source.epoch + epochs + more, before):
            found.append(every if files is None else files)
    return found


def _windows_from(windows: Windows, epoch: int, rows: np.ndarray) -> list[np.ndarray | None]:
    """The files of each window of an epoch, from the first with later rows on; None for all."""
    order = windows.order(epoch)
    place = int(np.count_nonzero((order.rows[:, 1:] <= rows[:, None]).all(axis=0)))
    if windows.files is None:
        return [None] * (place < len(windows))
    return [windows.files[window] for window in order.windows[place:].tolist()]
