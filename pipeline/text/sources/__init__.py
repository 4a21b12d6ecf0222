"""Sources: records by number, from files of many kinds, TFDS and Python."""

from pipeline.text.sources.array_records import ArrayRecords, Tfds
from pipeline.text.sources.lines import JsonLines, ParallelText, TextFiles
from pipeline.text.sources.named import open_files
from pipeline.text.sources.source import Concatenated, Records, Slice, Source
from pipeline.text.sources.tables import ArrowFiles, HuggingFaceDataset, ParquetFiles

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
