"""The files of a run's log, `metrics.jsonl` and TensorBoard events; and writers for trackers."""

import contextlib
import json
import logging
import operator
import os
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from etils import epath

from pipeline.fs.atomic import atomic_write, is_local, make_directory, name_full_disk

logger = logging.getLogger(__name__)

# Called with a step and the numbers of a line of that step, by name.
Writer = Callable[[int, dict[str, float]], object]


class MetricsFiles(contextlib.ExitStack):
    """Appends lines to `metrics.jsonl`, and calls writers, TensorBoard's first, with their numbers.

    A run that resumes from a step removes the lines of the steps that it will run again, whose
    seconds are `lost`, and of evaluations that are not in `evaluated`. Object storage cannot
    append, so for it, the files are on this machine, and `flush` uploads them whole.
    """

    def __init__(
        self,
        workdir: epath.Path,
        step: int,
        evaluated: Collection[str],
        writers: Iterable[Writer] = (),
    ):
        super().__init__()
        self._path, self.lost = workdir / "metrics.jsonl", 0.0
        lines: list[bytes] = []
        for line in self._path.read_bytes().splitlines() if step and self._path.exists() else []:
            with contextlib.suppress(ValueError, KeyError, TypeError):  # cut short by a kill
                values = json.loads(line)
                at = operator.index(values["step"])
                if str(at) in evaluated if "eval_loss" in values else at < step:
                    lines.append(line + b"\n")
                elif "eval_loss" not in values:
                    self.lost += values.get("seconds", 0.0)
        self.enter_context(name_full_disk(self._path))
        self._here = workdir
        if not is_local(workdir):
            self._here = epath.Path(self.enter_context(tempfile.TemporaryDirectory()))
        path = make_directory(self._here) / "metrics.jsonl"
        with atomic_write(path) as file:
            file.writelines(lines)
        self._file = self.enter_context(path.open("a"))
        self._writers = [*writers]
        # An evaluation after `step` steps stays there.
        self._board = _open_board(self._here / "tensorboard", purge_step=step + 1)
        if self._board:
            self.callback(self._board.close)
            self._writers.insert(0, self._write_events)
        self.callback(self.flush)

    def write(self, values: Mapping[str, Any]) -> None:
        """Writes a line; `step` is among its values."""
        with name_full_disk(self._path):
            self._file.write(json.dumps(values) + "\n")
            numbers: dict[str, float] = {
                name: value
                for name, value in values.items()
                if name != "step" and isinstance(value, (int, float))
            }
            for writer in self._writers if numbers else ():
                writer(values["step"], numbers)

    def flush(self) -> None:
        """Saves everything written so far beyond the life of the process."""
        with name_full_disk(self._path):
            self._file.flush()
            if self._board:
                self._board.flush()
        if self._here != self._path.parent:
            copy_files(self._here, self._path.parent)

    def _write_events(self, step: int, values: Mapping[str, float]) -> None:
        """The writer of TensorBoard."""
        for name, value in values.items():
            self._board.add_scalar(name, value, step)


def _open_board(directory: epath.Path, purge_step: int) -> Any:
    """Opens TensorBoard events, those from a step on removed; None if it is not installed."""
    try:
        import tensorboardX
    except ImportError:
        logger.info("tensorboardX is not installed, so there are no TensorBoard events")
        return None
    return tensorboardX.SummaryWriter(os.fspath(directory), purge_step=purge_step, flush_secs=30)


def copy_files(here: epath.Path, there: epath.Path) -> None:
    """Copies the files below one directory to the same places in another, each whole."""
    for folder, _, names in here.walk():
        for name in names:
            copied = there / (folder / name).relative_to(here)
            make_directory(copied.parent)
            with (folder / name).open("rb") as content, atomic_write(copied) as file:
                shutil.copyfileobj(content, file)
