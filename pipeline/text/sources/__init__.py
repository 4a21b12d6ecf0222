"""Sources: records from files of many kinds, TFDS and Python.

A source of files takes names or globs, and is read in order, as in `for record in source`. It
raises `FileNotFoundError` if a file does not exist or a glob matches none, and while reading
`ValueError` if a file is damaged or a record does not suit its kind. The message names the file
and, if possible, the record.
"""

import os
import re
from collections.abc import Callable, Sequence

from etils import epath

from pipeline.errors import InvalidValue, require_one_of
from pipeline.text.sources import files
from pipeline.text.sources.array_records import ArrayRecords, Tfds
from pipeline.text.sources.lines import JsonLines, ParallelText, TextFiles
from pipeline.text.sources.source import Concatenated, Records, Sharded, Slice, Source
from pipeline.text.sources.tables import ArrowFiles, ParquetFiles

__all__ = [
    "ArrayRecords",
    "ArrowFiles",
    "Concatenated",
    "JsonLines",
    "ParallelText",
    "ParquetFiles",
    "Records",
    "Sharded",
    "Slice",
    "Source",
    "TextFiles",
    "Tfds",
    "open_files",
]

KINDS: dict[str, Callable[..., Sharded]] = {
    "text": TextFiles,
    "jsonl": JsonLines,
    "parquet": ParquetFiles,
    "arrow": ArrowFiles,
    "array_record": ArrayRecords,
}

# The kind by the extension, which may come before `.gz`, `.zst` or a shard's `-00000-of-00010`.
EXTENSIONS = {f".{kind}": kind for kind in KINDS if kind != "text"} | {
    ".txt": "text",
    ".feather": "arrow",
    ".arrayrecord": "array_record",
}


def open_files(names: Sequence[str], kind: str = "") -> Sharded:
    """A source of files; their extensions decide its kind.

    Args:
        names: names or globs: `.txt` (a record a line), `.jsonl`, `.parquet`, `.array_record`,
            `.arrow` and `.feather`; `.txt` and `.jsonl` also as `.gz` and `.zst`.
        kind: "text", "jsonl", "parquet", "arrow" or "array_record", whatever the names are; default
            "": by the extensions.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: there is no such kind, or the extensions give none, or several.
    """
    if kind:
        require_one_of("kind", kind, KINDS)
    kinds = {kind} if kind else {kind_of(path) for path in files.find(names)}
    if len(kinds) > 1:
        raise InvalidValue(
            f"{', '.join(names)} have several kinds, {' and '.join(sorted(kinds))}; give files of "
            "one kind"
        )
    return KINDS[kinds.pop()](list(names))


def kind_of(path: epath.Path) -> str:
    """The kind of a file, by its extension.

    >>> kind_of(epath.Path("x.parquet/notes.txt.gz")), kind_of(epath.Path("a.arrow-00001-of-00002"))
    ('text', 'arrow')
    """
    name = re.sub(r"-\d+-of-\d+$", "", path.name.removesuffix(".gz").removesuffix(".zst"))
    extension = os.path.splitext(name)[1]
    if extension not in EXTENSIONS:
        raise InvalidValue(
            f"the name {os.fspath(path)} does not tell the kind of the file: it ends in none of "
            f"{', '.join(EXTENSIONS)} (for text and .jsonl, .gz or .zst may follow); rename it, or "
            f"give --kind, config.train.kind or kind= (one of {', '.join(KINDS)})"
        )
    return EXTENSIONS[extension]
