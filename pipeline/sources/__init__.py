"""Sources: records by number, from files of many kinds, TFDS and Python."""

from pipeline.sources.array_records import ArrayRecords
from pipeline.sources.arrow import ArrowFiles, HuggingFaceDataset
from pipeline.sources.concatenated import Concatenated
from pipeline.sources.json_lines import JsonLines
from pipeline.sources.named import open_files
from pipeline.sources.parallel_text import ParallelText
from pipeline.sources.parquet import ParquetFiles
from pipeline.sources.records import Records
from pipeline.sources.slice import Slice
from pipeline.sources.source import Source
from pipeline.sources.text_files import TextFiles
from pipeline.sources.tfds import Tfds

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
