"""Data that ships with Python: its standard library and its language reference, as sources.

A config names one as `config.train.source = "configs.python_data:Functions"`. It may name any
function or class that takes a split and returns a source; these need no download.
"""

import ast
import functools
import hashlib
import io
import itertools
import os
import platform
import sysconfig
import textwrap
import tokenize
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Function = ast.FunctionDef | ast.AsyncFunctionDef

SPLITS = ("train", "validation")

# One module in twenty is held out: those whose hash leaves 7, which are 5.0% of the text of
# Python 3.11 (modules differ in size, and the twenty remainders run from 2.2% to 9.0%).
SHARES, HELD_OUT = 20, 7

# Directories of tests and of packages outside the library, and one file of plain data.
SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
SKIPPED_FILES = {"pydoc_data/topics.py"}

TURNS = 3  # functions that one dialogue is about


class Library:
    """Records made from the standard library when the first is read, which takes some seconds.

    A module is in one split only, so training sees nothing of a module in `validation` (about 5%).
    The fingerprint has a hash of the library's files, since each Python has its own.

    Args:
        split: "train" or "validation".

    Raises:
        ValueError: there is no such split.
    """

    def __init__(self, split: str):
        if split not in SPLITS:
            raise ValueError(f"split is {split!r}; it must be one of {', '.join(SPLITS)}")
        self.split = split

    def _make(self) -> Iterator[dict[str, Any]]:
        raise NotImplementedError

    @functools.cached_property
    def _records(self) -> list[dict[str, Any]]:
        return list(self._make())

    @functools.cached_property
    def fingerprint(self) -> str:
        """See `pipeline.sources.Source`; from the library and this file, not from the records."""
        sha = hashlib.sha256(Path(__file__).read_bytes())
        for relative, path in library_files():
            sha.update(f"{relative}\n".encode())
            sha.update(hashlib.sha256(path.read_bytes()).digest())
        name = type(self).__name__.lower()
        return f"python-{platform.python_version()}-{name}-{self.split}-{sha.hexdigest()[:12]}"

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(f"record {index} of {len(self):,}")
        return self._records[index]

    def __str__(self) -> str:
        name = type(self).__name__.lower()
        return f"{name} of the library of Python {platform.python_version()}, split {self.split}"


class Functions(Library):
    """Records `{"text", "name", "module"}`: every function and method of the standard library."""

    def _make(self) -> Iterator[dict[str, Any]]:
        for module, name, text, _ in functions(self.split):
            yield {"text": text, "name": name, "module": module}


class Docstrings(Library):
    """Records `{"docstring", "signature"}`: each function of the library that has a docstring."""

    def _make(self) -> Iterator[dict[str, Any]]:
        for _, _, _, node in functions(self.split):
            if docstring := ast.get_docstring(node):
                yield {"docstring": docstring, "signature": signature(node)}


class Dialogues(Docstrings):
    """Records `{"messages": [{"role", "content"}, …]}`: chats about up to three functions each.

    In each turn the user quotes a docstring, and the assistant names the function with its
    signature.
    """

    def _make(self) -> Iterator[dict[str, Any]]:
        pairs = super()._make()
        while turns := list(itertools.islice(pairs, TURNS)):
            messages = [{"role": "system", "content": "You know the Python standard library."}]
            for number, pair in enumerate(turns):
                question = "And this?" if number else "Which function does this?"
                messages += [
                    {"role": "user", "content": f"{question}\n{pair['docstring']}"},
                    {"role": "assistant", "content": pair["signature"]},
                ]
            yield {"messages": messages}


class Reference(Library):
    """Records `{"text", "name"}`: each topic of Python's help, such as "classes", in every split.

    Raises:
        FileNotFoundError: on reading, if this Python was installed without the topics.
    """

    def _make(self) -> Iterator[dict[str, Any]]:
        try:
            from pydoc_data.topics import topics
        except ImportError as error:
            raise FileNotFoundError(
                "this Python has no pydoc_data.topics; install its documentation package, or use "
                "another source"
            ) from error
        for name, text in sorted(topics.items()):
            yield {"text": text, "name": name}


def library_files() -> list[tuple[str, Path]]:
    """The (path below the library, file) of each module of the standard library, sorted."""
    root = Path(sysconfig.get_path("stdlib"))
    found = []
    for directory, below, names in os.walk(root):
        below[:] = [name for name in below if name not in SKIPPED]
        for name in names:
            path = Path(directory, name)
            relative = path.relative_to(root).as_posix()
            if path.suffix == ".py" and relative not in SKIPPED_FILES:
                found.append((relative, path))
    return sorted(found)


def functions(split: str) -> Iterator[tuple[str, str, str, Function]]:
    """The (module, qualified name, text, node) of each function in a split of the library."""
    for relative, path in library_files():
        module = relative.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        if (zlib.crc32(module.encode()) % SHARES == HELD_OUT) == (split == "validation"):
            for name, text, node in definitions(path.read_bytes()):
                yield module, name, text, node


def definitions(source: bytes) -> Iterator[tuple[str, str, Function]]:
    """The (qualified name, text, node) of each function and method of a module.

    Functions inside functions belong to the text of the outer one. Decorators are included, and
    indentation common to all lines is taken away.

    >>> code = b"class A:\\n    @property\\n    def b(self):\\n        return 1\\n"
    >>> [(name, text) for name, text, _ in definitions(code)]
    [('A.b', '@property\\ndef b(self):\\n    return 1\\n')]
    """
    encoding = tokenize.detect_encoding(io.BytesIO(source).readline)[0]
    text = io.TextIOWrapper(io.BytesIO(source), encoding).read()
    # Lines as the parser counts them: str.splitlines would also cut at form feeds.
    lines = text.split("\n")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about escapes in old strings
        tree = ast.parse(text)

    def walk(body: list[ast.stmt], outer: str) -> Iterator[tuple[str, str, Function]]:
        for node in body:
            if isinstance(node, Function):
                first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
                inside = "\n".join(lines[first - 1 : node.end_lineno])
                yield outer + node.name, textwrap.dedent(inside) + "\n", node
            elif isinstance(node, ast.ClassDef):
                yield from walk(node.body, f"{outer}{node.name}.")
            elif isinstance(node, ast.If | ast.Try | ast.With):
                for field in ("body", "orelse", "finalbody"):
                    yield from walk(getattr(node, field, []), outer)
                for handler in getattr(node, "handlers", []):
                    yield from walk(handler.body, outer)

    yield from walk(tree.body, "")


def signature(node: Function) -> str:
    """How a function is called.

    >>> signature(ast.parse("def half(x: int = 2) -> float: ...").body[0])
    'half(x: int=2) -> float'
    """
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"{node.name}({ast.unparse(node.args)}){returns}"
