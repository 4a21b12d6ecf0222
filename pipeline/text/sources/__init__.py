"""Sources: records by number, from files of many kinds, TFDS and Python."""

from pipeline.text.sources.array_records import ArrayRecords
from pipeline.text.sources.arrow import ArrowFiles, HuggingFaceDataset
from pipeline.text.sources.concatenated import Concatenated
from pipeline.text.sources.json_lines import JsonLines
from pipeline.text.sources.named import open_files
from pipeline.text.sources.parallel_text import ParallelText
from pipeline.text.sources.parquet import ParquetFiles
from pipeline.text.sources.records import Records
from pipeline.text.sources.slice import Slice
from pipeline.text.sources.source import Source
from pipeline.text.sources.text_files import TextFiles
from pipeline.text.sources.tfds import Tfds

__all__ = [
    "ArrayRecords",
    "ArrowFiles",
    "Concatenated",
    "HuggingFaceDataset",
    "JsonLines",
    "ParallelText",
    "ParquetFiles",
    "Records",
    "Slice",
    "Source",
    "TextFiles",
    "Tfds",
    "open_files",
]
