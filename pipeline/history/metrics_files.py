"""The file of a run's log, `metrics.jsonl`; and writers for trackers."""

import contextlib
import json
import operator
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from etils import epath

from pipeline.fs.atomic import atomic_write, is_local, make_directory, name_full_disk

# Called with a step and the numbers of a line of that step, by name.
Writer = Callable[[int, dict[str, float]], object]


class Past(NamedTuple):
    """What `metrics.jsonl` has when a run begins or resumes.

    `lines` are those that stay, `evaluations` the values of those with `eval_loss`, by step, and
    `lost` the sum of `seconds` in the others.
    """

    lines: list[bytes]
    evaluations: dict[int, dict[str, float | None]]
    lost: float


def read_past(workdir: epath.Path, step: int) -> Past:
    """The past of a run that resumes from a step, or begins: lines of steps before that stay.

    So does an evaluation after exactly `step` steps.
    """
    path, past, lost = workdir / "metrics.jsonl", Past([], {}, 0.0), 0.0
    for line in path.read_bytes().splitlines() if step and path.exists() else []:
        with contextlib.suppress(ValueError, KeyError, TypeError):  # cut short by a kill
            values = json.loads(line)
            at = operator.index(values.pop("step"))
            if "eval_loss" in values:
                if at > step or at in past.evaluations:
                    continue
                past.evaluations[at] = values
            elif at >= step:
                lost += values.get("seconds", 0.0)
                continue
            past.lines.append(line + b"\n")
    return past._replace(lost=lost)


class MetricsFiles(contextlib.ExitStack):
    """Appends lines to `metrics.jsonl`, and calls writers with their numbers.

    The file begins with `lines`. Object storage cannot append, so for it, the file is on this
    machine, and `flush` uploads it whole.
    """

    def __init__(self, workdir: epath.Path, lines: Iterable[bytes], writers: Iterable[Writer] = ()):
        super().__init__()
        self._path = workdir / "metrics.jsonl"
        self.enter_context(name_full_disk(self._path))
        self._here = workdir
        if not is_local(workdir):
            self._here = epath.Path(self.enter_context(tempfile.TemporaryDirectory()))
        path = make_directory(self._here) / "metrics.jsonl"
        with atomic_write(path) as file:
            file.writelines(lines)
        self._file = self.enter_context(path.open("a"))
        self._writers = [*writers]
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
        if self._here != self._path.parent:
            copy_files(self._here, self._path.parent)


def copy_files(here: epath.Path, there: epath.Path) -> None:
    """Copies the files below one directory to the same places in another, each whole."""
    for folder, _, names in here.walk():
        for name in names:
            copied = there / (folder / name).relative_to(here)
            make_directory(copied.parent)
            with (folder / name).open("rb") as content, atomic_write(copied) as file:
                shutil.copyfileobj(content, file)
