"""`python -m tests.private_names`: the names that tests take from inside a room, as a table.

A name is from inside if neither its module nor its room has it in `__all__`: a refactoring that
keeps what is public may have to change the test. Names with an underscore are listed last.
"""

import ast
import importlib
from collections import defaultdict
from collections.abc import Iterator

from tests.processes import ROOT


def inside(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """The room and the name of each import of a test module from inside a room."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("pipeline."):
            _, room, *within = node.module.split(".")
            modules = [node.module, ".".join(["pipeline", room])]
            public = {name for each in modules for name in _exported(each)}
            for name in (alias.name for alias in node.names):
                if name not in public and (ROOT / "pipeline" / room).is_dir():
                    yield room, ".".join([*within, name])


def underscored(tree: ast.AST) -> Iterator[str]:
    """The attributes of a test module that begin with one underscore, but those of `self`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_"):
            own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            if not node.attr.startswith("__") and not own:
                yield node.attr


def _exported(module: str) -> list[str]:
    return getattr(importlib.import_module(module), "__all__", [])


def main() -> None:
    names, files = defaultdict(set), defaultdict(set)
    for path in sorted((ROOT / "tests").rglob("*.py")):
        tree = ast.parse(path.read_text())
        found = [*inside(tree), *(("with `_`", name) for name in underscored(tree))]
        for room, name in found:
            names[room].add(name)
            files[room].add(path)
    print("| room | test files | names |\n| --- | --- | --- |")
    for room in sorted(names):
        print(f"| {room} | {len(files[room])} | {', '.join(sorted(names[room]))} |")


if __name__ == "__main__":
    main()
