"""A log in object storage, which cannot append: each addition is a part beside the log.

The part of `NAME` is `NAME.BEGIN`, the byte of the log at which it begins, in 15 digits. In the
order of their names, the log and its parts are the whole log.
"""

import re

from etils import epath

from pipeline.fs.atomic import atomic_write
from pipeline.fs.objects import together


def read_log(path: epath.Path) -> bytes:
    """The bytes of a log and of its parts; none if there is no log.

    Parts that do not begin where those before them end are left out: the log has their bytes
    already, and a process was killed before it removed them.
    """
    content = bytearray(path.read_bytes() if path.exists() else b"")
    parts = _list_parts(path)
    for part, more in zip(parts, together(lambda part: part.read_bytes(), parts), strict=True):
        if int(part.suffix[1:]) == len(content):
            content += more
    return bytes(content)


def write_part(path: epath.Path, begin: int, content: bytes) -> int:
    """Writes the bytes of a log from byte `begin` on, unless there are none; returns their end."""
    if content:
        with atomic_write(path.with_name(f"{path.name}.{begin:015d}")) as file:
            file.write(content)
    return begin + len(content)


def remove_parts(path: epath.Path) -> None:
    """Removes the parts of a log that has their bytes itself."""
    together(lambda part: part.unlink(missing_ok=True), _list_parts(path))


def _list_parts(path: epath.Path) -> list[epath.Path]:
    """The parts of a log, in order."""
    found = path.parent.glob(f"{path.name}.*")
    return sorted(part for part in found if re.fullmatch(r"\.\d{15}", part.suffix))
