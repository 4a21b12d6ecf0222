"""Results: the lines that are printed, and `RESULTS.md`, which keeps the latest of each section."""

import dataclasses
import datetime
import os
import pathlib
import platform

PATH = pathlib.Path(__file__).with_name("RESULTS.md")

INTRODUCTION = """# Results

Written by `python -m benchmarks`; do not edit. Each section says when and where it was measured.
All figures of a section come from one run, contenders taking turns, so compare ratios.
"""


@dataclasses.dataclass(frozen=True)
class Line:
    """One thing that was measured: what, the figure with its unit, and the figure compared."""

    what: str
    figure: str
    compared: str = ""


@dataclasses.dataclass(frozen=True)
class Section:
    """The lines of one benchmark, under a heading and a sentence about how it was measured."""

    name: str
    about: str
    lines: list[Line]

    def __str__(self) -> str:
        widths = [
            max(len(getattr(line, field)) for line in self.lines) for field in ("what", "figure")
        ]
        rows = [
            f"  {line.what:<{widths[0]}}  {line.figure:>{widths[1]}}  {line.compared}".rstrip()
            for line in self.lines
        ]
        return "\n".join([f"{self.name}: {self.about}", *rows])

    def as_markdown(self) -> str:
        """The section as it stands in `RESULTS.md`."""
        rows = [f"| {line.what} | {line.figure} | {line.compared} |" for line in self.lines]
        return "\n".join(
            [
                f"## {self.name}",
                "",
                f"{self.about} {datetime.date.today()}, {machine()}.",
                "",
                "| measured | figure | compared |",
                "| --- | ---: | :--- |",
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
