"""Docstrings: what functions of the standard library say of themselves, and how they are called."""

import ast
import functools
import warnings
from typing import Any

from etils import epath

from pipeline.sources.python_stdlib import PythonStdlib
from pipeline.sources.source import read_texts


class Docstrings:
    """Records `{"docstring", "signature"}`: every function of the standard library that has both.

    Pairs for sequence to sequence that need no download. All are read when the first is asked for,
    which takes some seconds. Splits and where the data set lies are those of `PythonStdlib`.

    Args:
        split: as TFDS spells it: `train`, `validation`, `train[:50%]`.
        data_dir: where to keep the data set; by default where TFDS keeps its own.
    """

    def __init__(self, split: str = "train", data_dir: epath.PathLike | None = None):
        self._functions = PythonStdlib(split, data_dir)

    @functools.cached_property
    def _records(self) -> list[dict[str, str]]:
        texts = read_texts(self._functions, range(len(self._functions)), "text")
        return [record for record in map(documented, texts) if record]

    @property
    def fingerprint(self) -> str:
        """See `Source`."""
        return f"docstrings-{self._functions.fingerprint}"

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._records[index]

    def __str__(self) -> str:
        return f"docstrings and signatures of {self._functions}"


def documented(function: str) -> dict[str, str] | None:
    """The docstring of a function and its signature; None if it has no docstring.

    >>> documented("def half(x: int = 2) -> float:\\n    'Divides by two.'\\n    return x / 2\\n")
    {'docstring': 'Divides by two.', 'signature': 'half(x: int=2) -> float'}
    """
    # A method keeps its indentation where a line of a string in it has none.
    indented = function[:1].isspace()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about escapes in old strings
        tree = ast.parse(f"if True:\n{function}" if indented else function)
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    node = next(node for node in ast.walk(tree) if isinstance(node, kinds))
    docstring = ast.get_docstring(node)
    if not docstring:
        return None
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    signature = f"{node.name}({ast.unparse(node.args)}){returns}"
    return {"docstring": docstring, "signature": signature}
