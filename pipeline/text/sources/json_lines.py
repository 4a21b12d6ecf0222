"""JSON lines: a JSON object per line."""

import json
from typing import Any

from pipeline.errors import InvalidValue
from pipeline.text.sources.lines import Line, LineSource


class JsonLines(LineSource):
    """Records from UTF-8 files, plain, `.gz` or `.zst`, that hold a JSON object per line.

    Args:
        paths: names or globs, one or several. Blank lines are skipped.

    Raises:
        FileNotFoundError: a file does not exist, or a glob matches none.
        ValueError: from reading, when a line is not UTF-8 or not a JSON object; names the line.
    """

    format, prefix = "JSON lines", "jsonl"

    def _parse(self, line: Line) -> dict[str, Any]:
        text = line.text()
        try:
            record = json.loads(text)
        except json.JSONDecodeError as error:
            raise InvalidValue(
                f"{line} is broken JSON: {error.msg} at column {error.colno}. Each line must hold "
                "one whole JSON object; mend or remove that line"
            ) from None
        except (RecursionError, ValueError) as error:  # as Python limits both
            raise InvalidValue(
                f"{line} cannot be read: its JSON is nested too deeply, or has a number of too "
                f"many digits ({error}). Mend or remove that line"
            ) from None
        if not isinstance(record, dict):
            raise InvalidValue(
                f"{line} holds a JSON {type(record).__name__}; each line must hold an object, such "
                'as {"text": "…"}'
            )
        return record
