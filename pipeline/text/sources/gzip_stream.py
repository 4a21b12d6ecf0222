"""GzipStream: the content of a `.gz` file, at random."""

import bisect
import io
import zlib
from typing import IO, Any, NamedTuple

# Compressed bytes that are read at once. They have at most a thousand times as many inside.
BLOCK = 1 << 16

# Points, of 40 KB each, are `STEP` bytes of content apart, and from `CLOSE` points on further: 4 GB
# have 1,000 points, the last ones 8 MB apart. A seek decompresses up to as much.
STEP, CLOSE = 1 << 21, 256


class Point(NamedTuple):
    """A place in the content where decompression can go on: a copy of its state there."""

    offset: int  # in the content
    place: int  # of the next byte in the file
    state: Any  # a decompressor of zlib


class GzipStream(io.RawIOBase):
    """The content of a `.gz` file with one or several members, which can seek.

    A seek goes on from one of `points`, ascending; reading beyond the last adds more. If they are
    None, a seek backward starts at the beginning.

    Raises:
        OSError: from reading and seeking, when the file is damaged or cut short; it has no `errno`.
    """

    def __init__(self, file: IO[bytes], points: list[Point] | None = None):
        self._file, self._points = file, points
        self._go_on_from(Point(0, 0, _begin()))

    def _go_on_from(self, point: Point) -> None:
        self._file.seek(point.place)
        self._offset, self._state = point.offset, point.state.copy()
        self._within = point.offset > 0  # whether a member has begun, and has not ended
        self._content, self._rest = memoryview(b""), b""  # decompressed; not yet decompressed

    def readable(self) -> bool:
        """True."""
        return True

    def seekable(self) -> bool:
        """True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Reads up to the size of `buffer`; 0 at the end."""
        taken = self._take(len(buffer))
        buffer[: len(taken)] = taken
        return len(taken)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Goes to a byte of the content, or to its end if it is shorter."""
        if whence == io.SEEK_CUR:
            offset += self._offset
        elif whence != io.SEEK_SET:
            raise io.UnsupportedOperation("the size of the content is unknown")
        points = self._points or []
        number = bisect.bisect_right(points, offset, key=lambda each: each.offset)
        point = points[number - 1] if number else Point(0, 0, _begin())
        if offset < self._offset or point.offset > self._offset:
            self._go_on_from(point)
        while self._offset < offset and self._take(offset - self._offset):
            pass
        return self._offset

    def _take(self, size: int) -> memoryview:
        """The next bytes, at most `size`; none at the end."""
        if not self._content:
            self._decompress()
        taken, self._content = self._content[:size], self._content[size:]
        self._offset += len(taken)
        return taken

    def _decompress(self) -> None:
        """Fills `_content`, unless the file ends."""
        self._add_point()
        while not self._content:
            block = self._rest or self._file.read(BLOCK)
            self._rest = b""
            if not block:
                if self._within:
                    raise OSError("it ends in the middle")
                return
            if not self._within:
                block = block.lstrip(b"\0")  # zeros may stand between members, and at the end
            if block:
                self._within = True
                try:
                    self._content = memoryview(self._state.decompress(block))
                except zlib.error as error:
                    raise OSError(str(error)) from error
            if self._state.eof:
                self._rest, self._state, self._within = self._state.unused_data, _begin(), False

    def _add_point(self) -> None:
        points = self._points
        if points is None or not self._within:
            return
        apart = STEP * max(len(points), CLOSE) // CLOSE
        if self._offset >= (points[-1].offset if points else 0) + apart:
            points.append(Point(self._offset, self._file.tell(), self._state.copy()))


def _begin() -> Any:
    return zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
