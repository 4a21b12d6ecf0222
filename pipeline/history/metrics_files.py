"""The files of a run's log: `metrics.jsonl`, and the same numbers as TensorBoard events."""

import contextlib
import json
import operator
import os
import shutil
import tempfile
from collections.abc import Collection, Mapping
from typing import Any

from etils import epath

from pipeline.errors import require
from pipeline.fs.atomic import atomic_write, is_local, make_directory, name_full_disk


class MetricsFiles:
    """Appends lines to `metrics.jsonl`, and their numbers to TensorBoard events.

    A run that resumes from a step removes the lines of the steps that it will run again, whose
    seconds are `lost`, and of evaluations of steps that are not in `evaluated`. Object storage
    cannot append, so for it, the files are kept on this machine, and `flush` uploads them whole.
    """

    def __init__(self, workdir: epath.Path, step: int, evaluated: Collection[str]):
        board = require("tensorboardX", extra="train", purpose="RunLog")
        self._path, self.lost = workdir / "metrics.jsonl", 0.0
        kept: list[bytes] = []
        for line in self._path.read_bytes().splitlines() if step and self._path.exists() else []:
            with contextlib.suppress(ValueError, KeyError, TypeError):  # cut short by a kill
                values = json.loads(line)
                at = operator.index(values["step"])
                if str(at) in evaluated if "eval_loss" in values else at < step:
                    kept.append(line + b"\n")
                elif "eval_loss" not in values:
                    self.lost += values.get("seconds", 0.0)
        self._scratch = None if is_local(workdir) else tempfile.TemporaryDirectory()
        self._here = epath.Path(self._scratch.name) if self._scratch else workdir
        make_directory(self._here)
        with atomic_write(self._here / "metrics.jsonl") as file:
            file.writelines(kept)
        self._file = open(os.fspath(self._here / "metrics.jsonl"), "a")  # noqa: SIM115
        # An evaluation after `step` steps stays there.
        self._board = board.SummaryWriter(
            os.fspath(self._here / "tensorboard"), purge_step=step + 1, flush_secs=30
        )

    def write(self, values: Mapping[str, Any]) -> None:
        """Writes a line; `step` is among its values."""
        with name_full_disk(self._path):
            self._file.write(json.dumps(values) + "\n")
            for name, value in values.items():
                if name != "step" and isinstance(value, (int, float)):
                    self._board.add_scalar(name, value, values["step"])

    def flush(self) -> None:
        """Saves everything written so far beyond the life of the process."""
        with name_full_disk(self._path):
            self._file.flush()
            self._board.flush()
        if self._scratch:
            copy_files(self._here, self._path.parent)

    def close(self) -> None:
        """Flushes and closes all files, even if some fail."""
        scratch = self._scratch or contextlib.nullcontext()
        with name_full_disk(self._path), scratch, contextlib.closing(self._board), self._file:
            self.flush()


def copy_files(here: epath.Path, there: epath.Path) -> None:
    """Copies the files below one directory to the same places in another, each whole."""
    for folder, _, names in here.walk():
        for name in names:
            copied = there / (folder / name).relative_to(here)
            make_directory(copied.parent)
            with (folder / name).open("rb") as content, atomic_write(copied) as file:
                shutil.copyfileobj(content, file)
