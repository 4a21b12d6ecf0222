"""A hook of mkdocs: the reference, a page for the command and one for the names of each room.

Names are read from the code, without running it. Each is described once, under its shortest path.
"""

import os
import pathlib
from collections.abc import Iterator
from typing import NamedTuple
from unittest import mock

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from pipeline.cli.arguments import parser

ROOT = pathlib.Path(__file__).parent.parent
# In the order in which a batch comes about; then the rooms that look at a run, and the others.
ROOMS = (
    *("text", "corpus", "planning", "loading", "fields", "steps"),
    *("history", "scoring", "report", "fs"),
)


class Name(NamedTuple):
    """A public name: its path, what it names, and the level of its heading."""

    path: str
    object: griffe.Object
    level: int

    @property
    def place(self) -> str:
        """Where it is defined, which is the same for all its paths."""
        return self.object.canonical_path

    def section(self, described: set[str]) -> str:
        """Its section of a page; names of a module, and bases, have sections of their own."""
        options = f"heading_level: {self.level}"
        if self.object.is_module and self.object.exports:
            options += ", members: false"
        if self.object.is_class and any(e.canonical_path in described for e in self.object.mro()):
            options += ", inherited_members: false"
        return f"::: {self.path}\n    options: {{{options}}}\n"

    def row(self) -> str:
        """Its row of a table: a link, and the first line of its docstring."""
        docstring = self.object.docstring
        about = docstring.lines[0].replace("|", r"\|") if docstring else ""
        return f"| [`{self.path.removeprefix('pipeline.')}`][{self.path}] | {about} |"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages of the reference."""
    package = griffe.load("pipeline", search_paths=[str(ROOT)], resolve_aliases=True)
    top: dict[str, Name] = {}
    for name in _names("pipeline", package, 0):
        top.setdefault(name.place, name)
    index = ["# Names", "", *_table("The names of `pipeline`", list(top.values())[1:])]
    pages, described = {"command": _command()}, set()
    for room in ROOMS:
        names = []
        for name in _names(f"pipeline.{room}", package[room], 1):
            if name.place not in described:
                described.add(name.place)
                names.append(name._replace(path=top.get(name.place, name).path))
        pages[room] = "\n".join(name.section(described) for name in names)
        index += _table(f"pipeline.{room}", [name for name in names if name.place not in top])
    pages["index"] = "\n".join(index)
    for title, content in pages.items():
        files.append(File.generated(config, f"reference/{title}.md", content=content))
    return files


def _names(path: str, module: griffe.Object, level: int) -> Iterator[Name]:
    """A module and its public names, with those of the modules among them."""
    yield Name(path, module, level)
    for name in module.exports or ():
        if module[name].is_module:
            yield from _names(f"{path}.{name}", module[name], level + 1)
        else:
            yield Name(f"{path}.{name}", module[name], level + 1)


def _table(title: str, names: list[Name]) -> list[str]:
    rows = [name.row() for name in names]
    return [f"## {title}", "", "| name | what it is |", "| --- | --- |", *rows, ""]


def _command() -> str:
    """The page of the command: what each `lockstep COMMAND --help` prints."""
    whole = parser()
    (commands,) = (each for each in whole._actions if isinstance(each.choices, dict))
    with mock.patch.dict(os.environ, COLUMNS="80", NO_COLOR="1"):
        helps = {"The command": whole.format_help()}
        helps |= {name: each.format_help() for name, each in commands.choices.items()}
    sections = [f"## {name}\n\n```text\n{text}```\n" for name, text in helps.items()]
    return "\n".join(["# lockstep, the command", "", *sections])
