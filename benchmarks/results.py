"""Results: the lines that are printed, and `RESULTS.md`, which keeps the latest of each section."""

import dataclasses
import datetime
import os
import pathlib
import platform
from collections.abc import Sequence
from typing import NamedTuple

PATH = pathlib.Path(__file__).with_name("RESULTS.md")

INTRODUCTION = """# Results

`python -m benchmarks` writes this file. Each section says when and where it was measured. All
figures of a section come from one run, in which contenders took turns, so compare ratios.
"""


class Line(NamedTuple):
    """One thing that was measured: what, the figure with its unit, and the figure compared."""

    what: str
    figure: str
    compared: str = ""


@dataclasses.dataclass(frozen=True)
class Section:
    """The lines of one benchmark, under a name and a sentence about how it was measured.

    Attributes:
        columns: their names, one for each entry of a line.
    """

    name: str
    about: str
    lines: Sequence[tuple[str, ...]]
    columns: tuple[str, ...] = ("measured", "figure", "compared")

    def __str__(self) -> str:
        # A table of Line explains itself.
        table = self.lines if len(self.columns) == 3 else [self.columns, *self.lines]
        first, *others = (max(map(len, column)) for column in zip(*table, strict=True))
        rows = []
        for what, *figures, last in table:
            middle = (f"{each:>{width}}" for each, width in zip(figures, others, strict=False))
            rows.append("  ".join([f"  {what:<{first}}", *middle, last]).rstrip())
        return "\n".join([f"{self.name}: {self.about}", *rows])

    def as_markdown(self) -> str:
        """The section as it stands in `RESULTS.md`."""
        rows = [f"| {' | '.join(line)} |" for line in self.lines]
        return "\n".join(
            [
                f"## {self.name}",
                "",
                f"{self.about} {datetime.date.today()}, {machine()}.",
                "",
                f"| {' | '.join(self.columns)} |",
                f"| --- | {'---: | ' * (len(self.columns) - 2)}:--- |",
                *rows,
                "",
            ]
        )


def machine() -> str:
    """The CPU model, the number of cores and the version of Python."""
    model = platform.processor() or platform.machine()
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    return f"{model}, {os.cpu_count()} cores, Python {platform.python_version()}"


def write(sections: list[Section], path: pathlib.Path = PATH) -> None:
    """Puts `sections` into the file, in place of older ones of the same names."""
    kept: dict[str, str] = {}
    if path.exists():
        for text in path.read_text().split("\n## ")[1:]:
            kept[text.partition("\n")[0]] = f"## {text.rstrip()}\n"
    kept |= {section.name: section.as_markdown() for section in sections}
    path.write_text("\n".join([INTRODUCTION, *(kept[name] for name in sorted(kept))]))
