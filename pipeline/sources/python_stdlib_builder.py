"""The TFDS builder behind `PythonStdlib`."""

import ast
import io
import platform
import textwrap
import tokenize
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import tensorflow_datasets as tfds

from pipeline.sources.python_stdlib import library_digest, library_files

# One module in twenty is held out: those whose hash leaves 7, which are 5.0% of the text of
# Python 3.11 (modules differ in size, and the twenty remainders run from 2.2% to 9.0%).
SHARES, HELD_OUT = 20, 7


class PythonStdlibBuilder(tfds.core.GeneratorBasedBuilder):
    """Functions and methods of the standard library; modules are divided between the splits."""

    name = "python_stdlib"
    VERSION = tfds.core.Version("1.0.0")
    BUILDER_CONFIGS: ClassVar = [
        tfds.core.BuilderConfig(
            name=f"py{platform.python_version()}-{library_digest()}",
            description=f"Python {platform.python_version()}",
            version=VERSION,
        )
    ]
    # TFDS looks for checksums and a citation beside the module; there are none.
    pkg_dir_path = Path(__file__).parent

    def _info(self) -> tfds.core.DatasetInfo:
        return self.dataset_info_from_configs(
            description="Functions and methods of the Python standard library, with their source.",
            features=tfds.features.FeaturesDict(
                {
                    "text": tfds.features.Text(),
                    "name": tfds.features.Text(),
                    "module": tfds.features.Text(),
                }
            ),
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Iterator]:
        del dl_manager  # nothing to download
        return {
            "train": self._generate_examples(held_out=False),
            "validation": self._generate_examples(held_out=True),
        }

    def _generate_examples(self, held_out: bool) -> Iterator[tuple[str, dict[str, str]]]:
        for relative, path in library_files():
            module = relative.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            if (zlib.crc32(module.encode()) % SHARES == HELD_OUT) == held_out:
                for line, name, text in functions(path.read_bytes()):
                    record = {"text": text, "name": name, "module": module}
                    yield f"{module}:{line}:{name}", record


def functions(source: bytes) -> Iterator[tuple[int, str, str]]:
    """The (line, qualified name, text) of each function and method of a module.

    Functions inside functions belong to the text of the outer one. Decorators are included, and
    indentation common to all lines is taken away.

    >>> list(functions(b"class A:\\n    @property\\n    def b(self):\\n        return 1\\n"))
    [(2, 'A.b', '@property\\ndef b(self):\\n    return 1\\n')]
    """
    encoding = tokenize.detect_encoding(io.BytesIO(source).readline)[0]
    text = io.TextIOWrapper(io.BytesIO(source), encoding).read()
    # Lines as the parser counts them: str.splitlines would also cut at form feeds.
    lines = text.split("\n")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tree = ast.parse(text)

    def found(body: list[ast.stmt], outer: str) -> Iterator[tuple[int, str, str]]:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
                inside = "\n".join(lines[first - 1 : node.end_lineno])
                yield first, outer + node.name, textwrap.dedent(inside) + "\n"
            elif isinstance(node, ast.ClassDef):
                yield from found(node.body, f"{outer}{node.name}.")
            elif isinstance(node, ast.If | ast.Try | ast.With):
                for field in ("body", "orelse", "finalbody"):
                    yield from found(getattr(node, field, []), outer)
                for handler in getattr(node, "handlers", []):
                    yield from found(handler.body, outer)

    yield from found(tree.body, "")
