"""Sources: records from files of many kinds, and from Python.

A source of files takes names or globs, and is read in order, as in `for record in source`. It
raises `FileNotFoundError` if a file does not exist or a glob matches none, and while reading
`ValueError` if a file is damaged or a record does not suit its kind. The message names the file
and, if possible, the record.
"""

import os
import re
from typing import Any

from etils import epath

from pipeline import registry
from pipeline.errors import InvalidValue, name_some
from pipeline.text.files import Paths, find
from pipeline.text.source import Records, Sharded, Source
from pipeline.text.sources.csv_files import Csv
from pipeline.text.sources.lines import JsonLines, TextFiles
from pipeline.text.sources.tables import ArrowFiles, ParquetFiles, Tables, is_saved, saved_files

__all__ = [
    "ArrowFiles",
    "Csv",
    "JsonLines",
    "ParquetFiles",
    "Records",
    "Sharded",
    "Source",
    "Tables",
    "TextFiles",
    "is_saved",
    "open_files",
    "saved_files",
]

# What may follow the extension, before which a shard has its `-00000-of-00010`. Content that cannot
# be unpacked is refused by its first bytes.
PACKED = re.compile(r"(\.(gz|zst|bz2|xz|lz4|zip))+$")


def open_files(names: Paths, kind: str = "", **options: Any) -> Sharded:
    """A source of files; their extensions decide its kind.

    Args:
        names: names or globs, one or several: `.txt` (a record a line), `.jsonl`, `.json`,
            `.ndjson`, `.csv`, `.parquet`, `.arrow` and `.feather`; text, JSON lines and CSV also
            compressed. Or the folder of a Hugging Face data set that was saved to disk.
        kind: "text", "jsonl", "csv", "parquet", "arrow" or a kind of another package (see
            `pipeline.registry`), whatever the names are; default "": by the extensions.
        **options: those of the kind, such as `columns` of "parquet".

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: there is no such kind, or the extensions give none, or several.
        TypeError: the kind has no such option.
    """
    found: Any = names
    if not kind:
        kind = next((each.name for each in _kinds() if _recognises(each, names)), "")
    if not kind:
        found = find(names)
        several = {*map(kind_of, found)}
        if len(several) > 1:
            raise InvalidValue(
                f"{name_some([*map(os.fspath, found)])} have several kinds, "
                f"{' and '.join(sorted(several))}; give files of one kind"
            )
        (kind,) = several
    chosen = registry.find("records", kind, "kind")
    chosen.check(options, "the kind")
    return chosen.make(found, **options)


def _kinds() -> list[registry.Kind]:
    return [*registry.kinds("records")]


def _recognises(kind: registry.Kind, names: Paths) -> bool:
    """Whether a kind takes these names for its own, such as a folder that it knows."""
    return getattr(kind.make, "recognises", lambda names: False)(names)


def kind_of(path: epath.Path) -> str:
    """The kind of a file, by its extension.

    >>> kind_of(epath.Path("x.parquet/notes.txt.gz")), kind_of(epath.Path("a.arrow-00001-of-00002"))
    ('text', 'arrow')
    """
    name = re.sub(r"-\d+-of-\d+$", "", PACKED.sub("", path.name.lower()))
    extension = os.path.splitext(name)[1]
    known = {end: kind.name for kind in _kinds() for end in getattr(kind.make, "extensions", ())}
    if extension not in known:
        raise InvalidValue(
            f"the name {os.fspath(path)} does not tell the kind of the file: it ends in none of "
            f"{', '.join(known)} (for text, JSON lines and CSV, .gz, .zst or .bz2 may follow); "
            "rename it, or give kind= (in a config, train.kind), one of "
            f"{', '.join(registry.names('records'))}"
        )
    return known[extension]
