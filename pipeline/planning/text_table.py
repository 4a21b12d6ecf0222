"""Tables as text, for plans, compiled steps and reports."""

from collections.abc import Sequence


def text_table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of cells in columns, the first aligned left and all others right.

    >>> print("\\n".join(text_table([["bucket", "rows"], ["8x64", "1,024"], ["all", ""]])))
    bucket   rows
    8x64    1,024
    all
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *others in rows:
        cells = (f"  {cell:>{width}}" for cell, width in zip(others, widths[1:], strict=True))
        lines.append(f"{first:<{widths[0]}}{''.join(cells)}".rstrip())
    return lines
