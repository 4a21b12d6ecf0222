"""The file of a run's log, `metrics.jsonl`; and writers for trackers."""

import contextlib
import io
import json
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import IO, Any, NamedTuple

from etils import epath

from pipeline.fs.atomic import atomic_write, is_local, make_directory, name_full_disk
from pipeline.history.log_parts import read_log, remove_parts, write_part

NAME = "metrics.jsonl"

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
    past, lost = Past([], {}, 0.0), 0.0
    for line in read_log(workdir / NAME).splitlines() if step else []:
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

    The file begins with `lines`. Object storage cannot append, so there, each `flush` writes the
    lines since the last one as a part; `read_log` reads all of them.
    """

    def __init__(self, workdir: epath.Path, lines: Iterable[bytes], writers: Iterable[Writer] = ()):
        super().__init__()
        self._path = make_directory(workdir) / NAME
        self.enter_context(name_full_disk(self._path))
        past = b"".join(lines)
        with atomic_write(self._path) as file:
            file.write(past)
        remove_parts(self._path)
        self._size = len(past)  # for object storage: of what is there
        self._new: IO[bytes] = self.enter_context(
            self._path.open("ab") if is_local(workdir) else io.BytesIO()
        )
        self._writers = [*writers]
        self.callback(self.flush)

    def write(self, values: Mapping[str, Any]) -> None:
        """Writes a line; `step` is among its values."""
        with name_full_disk(self._path):
            self._new.write(f"{json.dumps(values)}\n".encode())
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
            self._new.flush()
        if isinstance(self._new, io.BytesIO):
            self._size = write_part(self._path, self._size, self._new.getvalue())
            self._new.seek(0)
            self._new.truncate()
