"""From the names of files to the source that reads them."""

from collections.abc import Callable, Sequence

from etils import epath

from pipeline.sources.array_records import ArrayRecords
from pipeline.sources.arrow import ArrowFiles, HuggingFace
from pipeline.sources.json_lines import JsonLines
from pipeline.sources.parquet import ParquetFiles
from pipeline.sources.source import Source
from pipeline.sources.text_files import TextFiles

# The kind is told by the first of these that a name contains; others are text.
KINDS: tuple[tuple[str, Callable[..., Source]], ...] = (
    (".jsonl", JsonLines),
    (".parquet", ParquetFiles),
    (".array_record", ArrayRecords),
    (".arrayrecord", ArrayRecords),
    (".arrow", ArrowFiles),
    (".feather", ArrowFiles),
)


def open_files(names: Sequence[str], split: str | None = None) -> Source:
    """The source of files, of a kind that their names tell.

    Args:
        names: names or globs; `.jsonl`, `.parquet`, `.array_record`, `.arrow` and `.feather` files
            are what they say, others text, a record a line; `.jsonl` and text also as `.gz` and
            `.zst`. Or one directory, of a Hugging Face data set that was saved to disk.
        split: of such a data set.

    Raises:
        ValueError: files of several kinds are mixed, or as the source raises.
    """
    if len(names) == 1 and epath.Path(names[0]).expanduser().is_dir():
        return HuggingFace(names[0], split or None)
    kinds = {next((kind for end, kind in KINDS if end in name), TextFiles) for name in names}
    if len(kinds) > 1:
        raise ValueError(
            f"{', '.join(names)} are of several kinds; give files of one kind, told by their ends: "
            f"{', '.join(end for end, _ in KINDS)}, or any other for text"
        )
    return kinds.pop()(list(names))
