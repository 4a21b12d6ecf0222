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
from pipeline.text.source import Sharded, Source
from pipeline.text.sources.arrow_files import ArrowFiles, is_saved, saved_files
from pipeline.text.sources.csv_files import Csv
from pipeline.text.sources.lines import JsonLines, TextFiles
from pipeline.text.sources.parquet_files import ParquetFiles
from pipeline.text.sources.records import Records
from pipeline.text.tables import Tables

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
    paths: Any = names
    if not kind:
        # A kind may recognise names as its own, such as a folder that it knows.
        makes = ((k.name, getattr(k.make, "recognises", None)) for k in registry.kinds("records"))
        kind = next((name for name, recognises in makes if recognises and recognises(names)), "")
    if not kind:
        paths = find(names)
        kinds = {*map(kind_of, paths)}
        if len(kinds) > 1:
            raise InvalidValue(
                f"{name_some([*map(os.fspath, paths)])} have several kinds, "
                f"{' and '.join(sorted(kinds))}; give files of one kind"
            )
        (kind,) = kinds
    source_kind = registry.find("records", kind, "kind")
    source_kind.check(options, "the kind")
    return source_kind.make(paths, **options)


def kind_of(path: epath.Path) -> str:
    """The kind of a file, by its extension.

    >>> kind_of(epath.Path("x.parquet/notes.txt.gz")), kind_of(epath.Path("a.arrow-00001-of-00002"))
    ('text', 'arrow')
    """
    name = re.sub(r"-\d+-of-\d+$", "", PACKED.sub("", path.name.lower()))
    extension = os.path.splitext(name)[1]
    kinds = {
        ending: kind.name
        for kind in registry.kinds("records")
        for ending in getattr(kind.make, "extensions", ())
    }
    if extension not in kinds:
        raise InvalidValue(
            f"the name {os.fspath(path)} does not tell the kind of the file: it ends in none of "
            f"{', '.join(kinds)} (for text, JSON lines and CSV, .gz, .zst or .bz2 may follow); "
            "rename it, or give kind= (in a config, train.kind), one of "
            f"{', '.join(registry.names('records'))}"
        )
    return kinds[extension]
