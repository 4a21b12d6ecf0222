"""Notebooks: their cells, executed without Jupyter.

`python -m tests.notebook` executes the notebook of examples/ and keeps its outputs.
"""

import ast
import contextlib
import io
import json
import os
import pathlib
import tempfile

from tests.processes import ROOT

TOUR = ROOT / "examples/tour.ipynb"


def read_cells(path):
    """The cells of a notebook, as dicts."""
    return json.loads(path.read_text())["cells"]


def execute(cells):
    """The outputs of each cell, executed in order in one namespace: [] for text.

    A cell shows what it prints, and the value of its last line: a picture, or else as Python does.
    """
    namespace = {"__name__": "__main__"}
    for cell in cells:
        yield _outputs("".join(cell["source"]), namespace) if cell["cell_type"] == "code" else []


def _outputs(code, namespace):
    tree, value = ast.parse(code), None
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, "<cell>", "exec"), namespace)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), namespace)
    outputs = []
    if text := printed.getvalue():
        outputs.append({"name": "stdout", "output_type": "stream", "text": _lines(text)})
    if value is not None:
        svg = hasattr(value, "_repr_svg_")
        data = {"image/svg+xml": _lines(value._repr_svg_())} if svg else {}
        data["text/plain"] = ["<a picture>"] if svg else _lines(repr(value))
        outputs.append({"data": data, "metadata": {}, "output_type": "display_data"})
    return outputs


def _lines(text):
    return text.splitlines(keepends=True)


def keep_outputs(path: pathlib.Path) -> None:
    """Executes a notebook in an empty folder, and writes its outputs into it."""
    notebook = json.loads(path.read_text())
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        all_outputs = list(execute(notebook["cells"]))
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for cell, outputs in zip(notebook["cells"], all_outputs, strict=True):
        if cell["cell_type"] == "code":
            cell |= {"execution_count": code.index(cell) + 1, "outputs": outputs}
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + os.linesep)


if __name__ == "__main__":
    keep_outputs(TOUR)
