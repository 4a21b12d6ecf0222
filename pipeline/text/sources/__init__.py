"""Sources: records from files of many kinds, and from Python.

A source of files takes names or globs, and is read in order, as in `for record in source`. It
raises `FileNotFoundError` if a file does not exist or a glob matches none, and while reading
`ValueError` if a file is damaged or a record does not suit its kind. The message names the file
and, if possible, the record.
"""

import os
import re
from collections.abc import Callable

from etils import epath

from pipeline.errors import InvalidValue, name_some, require_one_of
from pipeline.text.sources.files import Paths, find
from pipeline.text.sources.lines import JsonLines, TextFiles
from pipeline.text.sources.source import Records, Sharded, Source
from pipeline.text.sources.tables import ArrowFiles, ParquetFiles, is_saved

__all__ = [
    "ArrowFiles",
    "JsonLines",
    "ParquetFiles",
    "Records",
    "Sharded",
    "Source",
    "TextFiles",
    "open_files",
]

KINDS: dict[str, Callable[..., Sharded]] = {
    "text": TextFiles,
    "jsonl": JsonLines,
    "parquet": ParquetFiles,
    "arrow": ArrowFiles,
}

# The kind by the extension, which may come before one of `PACKED`, or a shard's `-00000-of-00010`.
EXTENSIONS = {f".{kind}": kind for kind in KINDS if kind != "text"} | {
    ".txt": "text",
    ".json": "jsonl",
    ".ndjson": "jsonl",
    ".feather": "arrow",
}
# Content that cannot be unpacked is refused by its first bytes.
PACKED = re.compile(r"(\.(gz|zst|bz2|xz|lz4|zip))+$")


def open_files(names: Paths, kind: str = "") -> Sharded:
    """A source of files; their extensions decide its kind.

    Args:
        names: names or globs, one or several: `.txt` (a record a line), `.jsonl`, `.json`,
            `.ndjson`, `.parquet`, `.arrow` and `.feather`; text and JSON lines also compressed. Or
            the folder of a Hugging Face data set that was saved to disk.
        kind: "text", "jsonl", "parquet" or "arrow", whatever the names are; default "": by the
            extensions.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: there is no such kind, or the extensions give none, or several.
    """
    if kind:
        require_one_of("kind", kind, KINDS)
    if kind == "arrow" or is_saved(names):
        return ArrowFiles(names)
    found = find(names)
    kinds = {kind} if kind else set(map(kind_of, found))
    if len(kinds) > 1:
        raise InvalidValue(
            f"{name_some([*map(os.fspath, found)])} have several kinds, "
            f"{' and '.join(sorted(kinds))}; give files of one kind"
        )
    return KINDS[kinds.pop()](found)


def kind_of(path: epath.Path) -> str:
    """The kind of a file, by its extension.

    >>> kind_of(epath.Path("x.parquet/notes.txt.gz")), kind_of(epath.Path("a.arrow-00001-of-00002"))
    ('text', 'arrow')
    """
    name = re.sub(r"-\d+-of-\d+$", "", PACKED.sub("", path.name.lower()))
    extension = os.path.splitext(name)[1]
    if extension not in EXTENSIONS:
        raise InvalidValue(
            f"the name {os.fspath(path)} does not tell the kind of the file: it ends in none of "
            f"{', '.join(EXTENSIONS)} (for text and JSON lines, .gz, .zst or .bz2 may follow); "
            "rename it, or give kind= (in a config, train.kind), one of "
            f"{', '.join(KINDS)}"
        )
    return EXTENSIONS[extension]
