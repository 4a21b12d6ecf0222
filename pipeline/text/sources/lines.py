"""Text files, and JSON lines."""

from typing import Any

from pipeline.errors import InvalidValue, require_one_of
from pipeline.text import files
from pipeline.text.content import NULS
from pipeline.text.lines import Lines, Whole
from pipeline.text.values import read_json


def _parse_text(text: str) -> dict[str, Any]:
    if "\0" in text:
        raise InvalidValue(NULS)
    return {"text": text}


def _parse_object(text: str) -> dict[str, Any]:
    try:
        record = read_json(text)
    except InvalidValue as error:
        raise InvalidValue(
            f"{error}. Each line must hold one whole JSON object; correct or remove that line, "
            "or convert an array with jq -c '.[]'"
        ) from None
    if not isinstance(record, dict):
        raise InvalidValue(
            f"it holds a JSON {type(record).__name__}; each line must hold an object, such as "
            '{"text": "…"}; convert an array with jq -c \'.[]\''
        )
    return record


class TextFiles(files.Files):
    """Records `{"text": …}` from UTF-8 files, plain or packed; see `content`.

    Args:
        paths: names or globs, one or several.
        sample_by: "line" makes a record of each line that is not blank, without its end; "file"
            makes one of each file.
    """

    extensions = (".txt",)

    def __init__(self, paths: files.Paths, *, sample_by: str = "line"):
        require_one_of("sample_by", sample_by, ("line", "file"))
        kind = Lines if sample_by == "line" else Whole
        name = f"text, a record per {sample_by},"
        super().__init__(kind(name, f"text-{sample_by}", _parse_text), paths)


class JsonLines(files.Files):
    """Records from UTF-8 files, plain or packed, that hold a JSON object per line.

    Args:
        paths: names or globs, one or several. Blank lines are skipped.
    """

    extensions = (".jsonl", ".json", ".ndjson")

    def __init__(self, paths: files.Paths):
        super().__init__(Lines("JSON lines", "jsonl", _parse_object), paths)
