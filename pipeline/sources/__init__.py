"""Sources: records by number, from text and JSON files, TFDS, and the standard library itself."""

from pipeline.sources.json_lines import JsonLines
from pipeline.sources.python_stdlib import PythonStdlib
from pipeline.sources.slice import Slice
from pipeline.sources.source import Source
from pipeline.sources.text_files import TextFiles
from pipeline.sources.tfds import Tfds

__all__ = ["JsonLines", "PythonStdlib", "Slice", "Source", "TextFiles", "Tfds"]
