"""From the names of files to the source that reads them."""

import os
import re
from collections.abc import Callable, Sequence

from etils import epath

from pipeline.sources import files
from pipeline.sources.array_records import ArrayRecords
from pipeline.sources.arrow import ArrowFiles, HuggingFace
from pipeline.sources.json_lines import JsonLines
from pipeline.sources.parquet import ParquetFiles
from pipeline.sources.source import Source
from pipeline.sources.text_files import TextFiles

KINDS: dict[str, Callable[..., Source]] = {
    "text": TextFiles,
    "jsonl": JsonLines,
    "parquet": ParquetFiles,
    "arrow": ArrowFiles,
    "array_record": ArrayRecords,
}

# What the end of a name says, after `.gz` or `.zst` and a shard's `-00000-of-00010`.
ENDS = {
    ".txt": "text",
    ".jsonl": "jsonl",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".array_record": "array_record",
    ".arrayrecord": "array_record",
}


def open_files(names: Sequence[str], split: str | None = None, kind: str = "") -> Source:
    """The source of files, of a kind that the ends of their names tell.

    Args:
        names: names or globs: `.txt` (a record a line), `.jsonl`, `.parquet`, `.array_record`,
            `.arrow` and `.feather`; `.txt` and `.jsonl` also as `.gz` and `.zst`. Or one
            directory, of a Hugging Face data set that was saved to disk.
        split: of such a data set.
        kind: "text", "jsonl", "parquet", "arrow" or "array_record", whatever the names are; empty:
            told by their ends.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: there is no such kind, the end of a name is unknown, files of several kinds are
            mixed, or as the source raises.
    """
    if len(names) == 1 and epath.Path(names[0]).expanduser().is_dir():
        return HuggingFace(names[0], split or None)
    kinds = {kind} if kind else {kind_of(path) for path in files.find(names)}
    if kind and kind not in KINDS:
        raise ValueError(f"kind is {kind!r}; it must be one of {', '.join(KINDS)}")
    if len(kinds) > 1:
        raise ValueError(
            f"{', '.join(names)} are of several kinds, {' and '.join(sorted(kinds))}; give files "
            "of one kind"
        )
    return KINDS[kinds.pop()](list(names))


def kind_of(path: epath.Path) -> str:
    """The kind of a file, by the end of its name.

    >>> kind_of(epath.Path("x.parquet/notes.txt.gz")), kind_of(epath.Path("a.arrow-00001-of-00002"))
    ('text', 'arrow')

    Raises:
        ValueError: the end is unknown.
    """
    name = re.sub(r"-\d+-of-\d+$", "", path.name.removesuffix(".gz").removesuffix(".zst"))
    end = os.path.splitext(name)[1]
    if end not in ENDS:
        raise ValueError(
            f"{os.fspath(path)} does not say by its end what it holds; it must be one of "
            f"{', '.join(ENDS)} (also .gz or .zst for text and .jsonl), or say it: --kind=text, "
            f"config.train.kind, or kind= (one of {', '.join(KINDS)})"
        )
    return ENDS[end]
