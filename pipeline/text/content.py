"""Content: what a file holds, by its first bytes; and its text, unpacked as it is read."""

import bz2
import contextlib
import functools
import gzip
import io
import os
from collections.abc import Callable, Iterator
from typing import IO, Any, TypeAlias

import pyarrow as pa
from etils import epath

from pipeline.errors import InvalidValue, NotInstalled, UserError

# Bytes that are unpacked at once; of zstd, packed bytes, of which each may hold 32 KiB.
BUFFER, FED = 1 << 17, 1 << 12

# Text that has this is refused.
NULS = "it has NUL bytes, as a crash leaves in a file and as binary files have; remove them"

# A file may be packed this many times over.
LAYERS = 3

# Unpacking ends at this many bytes, unless they are less than `RATIO` times the packed ones.
LIMIT, RATIO = 1 << 30, 1000

# A text, and so a line, has at most this many bytes.
LONGEST = 1 << 30

# Bytes that are read at once to count lines.
COUNTED = 1 << 24

# The name of a format, and a function from a packed file to what is in it: a file, or chunks.
Packing: TypeAlias = tuple[str, Callable[[IO[bytes]], Any]]


def _chunks(file: Any) -> Iterator[bytes]:
    return iter(functools.partial(file.read, BUFFER), b"")


def _unpack_zstd(packed: IO[bytes]) -> Iterator[bytes]:
    try:
        import zstandard
    except ImportError:
        try:
            yield from _chunks(pa.CompressedInputStream(packed, "zstd"))
        except OSError as error:
            if "too much memory" not in str(error):
                raise
            raise NotInstalled(
                "it was written with zstd --long and a window above 128 MiB; to read it, pip "
                "install 'lockstep-pipeline[zstd]'"
            ) from error
        return
    unpacker = zstandard.ZstdDecompressor(max_window_size=1 << 31)
    frame = None
    while data := packed.read(FED):
        while data:
            frame = frame or unpacker.decompressobj()
            yield frame.decompress(data)
            data, frame = (frame.unused_data, None) if frame.eof else (b"", frame)
    if frame:
        raise EOFError("the last frame has no end")


# How a file with these first bytes is packed. Signs are as long as they can be, since a text may
# begin with the same letters: of bzip2, that of its first block, or of its end if it is empty.
PACKINGS: dict[bytes, Packing] = {
    b"\x1f\x8b\x08": ("gzip", lambda packed: gzip.GzipFile(fileobj=packed)),
    b"\x28\xb5\x2f\xfd": ("zstd", _unpack_zstd),
}
for _level in b"123456789":
    for _block in (b"1AY&SY", b"\x17rE8P\x90"):
        PACKINGS[b"BZh%c" % _level + _block] = ("bzip2", bz2.BZ2File)

# What a tar archive has after the name of its first file.
TARS = (b"ustar\x0000", b"ustar  \0")

_UNPACK = "unpack it first, since only gzip, bzip2 and zstd are read"
_RECODE = "convert it to UTF-8, for example with iconv -f {0} -t UTF-8"

# By the first bytes of a file that has no UTF-8 text in lines: what it is, and what to do.
OTHERS = {
    b"\xfd7zXZ\0": ("compressed as xz", _UNPACK),
    b"\x5d\0\0": ("compressed as lzma", _UNPACK),
    b"\x04\x22\x4d\x18": ("compressed as lz4", _UNPACK),
    b"PK\x03\x04": ("a zip archive", _UNPACK),
    b"PK\x05\x06": ("a zip archive", _UNPACK),
    b"\xff\xfe\0\0": ("UTF-32", _RECODE.format("UTF-32")),
    b"\0\0\xfe\xff": ("UTF-32", _RECODE.format("UTF-32")),
    b"\xff\xfe": ("UTF-16", _RECODE.format("UTF-16")),
    b"\xfe\xff": ("UTF-16", _RECODE.format("UTF-16")),
    b"version https://git-lfs.github.com/spec/": ("a Git LFS pointer", "run git lfs pull"),
    b"/annex/objects/": ("a git-annex pointer", "run git annex get"),
    b"PAR1\x15": ("Parquet", "name it .parquet, or give the kind parquet"),
    b"ARROW1\0\0": ("an Arrow file", "name it .arrow, or give the kind arrow"),
    b"\xff\xff\xff\xff": ("an Arrow stream", "name it .arrow, or give the kind arrow"),
    b"\x93NUMPY": ("a NumPy array", "give token ids to InPlace.npy or Corpus.from_arrays"),
    b"SQLite format 3\0": ("an SQLite database", "export its rows as JSON lines"),
    b"\x89HDF": ("HDF5", "export its rows as JSON lines"),
    b"\x1f\x9d": ("compressed as .Z", _UNPACK),
    b"7z\xbc\xaf\x27\x1c": ("a 7z archive", _UNPACK),
    b"Rar!\x1a\x07": ("a RAR archive", _UNPACK),
    b"LITPKDS\0": ("a packed file of LitGPT or TinyLlama", "give files of ids alone"),
    b"LITPKDS\1": ("a packed file of LitGPT or TinyLlama", "give files of ids alone"),
}
for _version in (*(b"1.%d" % minor for minor in range(8)), b"2.0"):
    for _end in (b"\n", b"\r", b" \n", b" \r"):
        OTHERS[b"%PDF-" + _version + _end] = ("a PDF", "extract its text first")


def _find_packing(head: bytes) -> Packing | None:
    """How a file with these first bytes is packed; None: it is not."""
    for magic, packing in PACKINGS.items():
        if head.startswith(magic) or (len(head) > 2 and magic.startswith(head)):  # cut short
            return packing
    if head[1:4] == b"\x2a\x4d\x18" and head[0] >> 4 == 5:  # a frame to skip, before others
        return PACKINGS[b"\x28\xb5\x2f\xfd"]
    return None


def describe(head: bytes) -> str:
    """The end of a message about a file that is not what its reader wants; "" if unknown."""
    if packing := _find_packing(head):
        return f"It is {packing[0]}; unpack it first"
    for magic, (what, advice) in OTHERS.items():
        if head.startswith(magic):
            return f"It is {what}; {advice}"
    return "It is a tar archive; unpack it first" if head[257:265] in TARS else ""


def read_head(path: epath.Path) -> bytes:
    """The first bytes of a file."""
    with path.open("rb") as file:
        return file.read(512)


def describe_binary(head: bytes) -> str:
    """Like `describe`, of a file of numbers, whose first ones may be like the shortest signs."""
    kinds = {magic: (name, "unpack it first") for magic, (name, _) in PACKINGS.items()} | OTHERS
    signs = (magic for magic in kinds if len(magic) > 2 and b"\0" not in magic[:4])
    sign = next(filter(head.startswith, signs), None)
    return "" if sign is None else f"It is {'; '.join(kinds[sign])}"


def is_packed(path: epath.Path) -> bool:
    """Whether a file can only be read from its start."""
    return _find_packing(read_head(path)) is not None


@contextlib.contextmanager
def open_text(path: epath.Path) -> Iterator[IO[bytes]]:
    """The UTF-8 content of a file, unpacked as its first bytes say; only a plain one can seek.

    Raises:
        ValueError: it is no text, or, while it is read, cannot be unpacked or ends at a limit.
    """
    with path.open("rb") as file:
        stream: Any = file
        head = b""
        for _ in range(LAYERS + 1):
            head = stream.peek(512)
            if (packing := _find_packing(head)) is None:
                break
            raw = _Unpacked(path, packing, stream, path.stat().length)
            stream = io.BufferedReader(raw, BUFFER)
        wrong = describe(head)
        if not wrong and 50 * head.rstrip(b"\0").count(0) > len(head):
            line = head.count(b"\n", 0, head.index(0)) + 1
            wrong = (
                "It has NUL bytes, as binary files have, and UTF-16 without a mark, the first in "
                f"line {line}; remove them from text in UTF-8. If it is UTF-16, "
                f"{_RECODE.format('UTF-16LE')}"
            )
        if wrong:
            raise InvalidValue(f"{os.fspath(path)} holds no lines of text. {wrong}")
        yield stream


def decode(content: bytes, at: int) -> str:
    """The text of bytes of a file, the first of which is byte `at` of it.

    Raises:
        ValueError: they are not UTF-8.
    """
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise InvalidValue(
            f"it is not UTF-8: byte {at + error.start:,} of the file is "
            f"0x{content[error.start]:02x} ({error.reason}). Convert the file to UTF-8, for "
            "example with iconv"
        ) from None


def count_lines(path: epath.Path, size: int) -> int:
    """The number of line ends in the first `size` bytes of the content of a file."""
    lines = 0
    with open_text(path) as content:
        while size and (data := content.read(min(size, COUNTED))):
            lines, size = lines + data.count(b"\n"), size - len(data)
    return lines


def fail_rest(error: InvalidValue) -> InvalidValue:
    """The error in place of the records that a file would have had."""
    return InvalidValue(f"the rest of the file cannot be read: {error}")


def skip(content: IO[bytes], at: int, now: int = 0) -> int:
    """Goes to byte `at` of a file, of which byte `now` is the next one; returns it."""
    if content.seekable():
        return content.seek(at)
    left = at - now
    while left and (data := content.read(min(left, COUNTED))):
        left -= len(data)
    return at


class _Unpacked(io.RawIOBase):
    """Unpacked bytes, up to the limit; errors name the file."""

    def __init__(self, path: epath.Path, packing: Packing, packed: IO[bytes], size: int):
        self._path, (self._format, unpack) = path, packing
        unpacked = unpack(packed)
        self._chunks = _chunks(unpacked) if hasattr(unpacked, "read") else unpacked
        self._rest, self._size, self._total = memoryview(b""), size, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        name = os.fspath(self._path)
        try:
            while not self._rest and (chunk := next(self._chunks, None)) is not None:
                self._rest = memoryview(chunk)
        except Exception as error:
            if isinstance(error, UserError):
                raise type(error)(f"{name}: {error}") from error
            if isinstance(error, OSError) and error.errno is not None:
                raise  # from the system, not from the content
            if "ictionary mismatch" in str(error):
                raise InvalidValue(
                    f"{name} was compressed with a dictionary; unpack it first, as with zstd -d -D"
                ) from error
            raise InvalidValue(
                f"{name} cannot be unpacked as {self._format}: {error}. It is damaged or cut "
                "short; fetch it again"
            ) from error
        count = min(len(buffer), len(self._rest))
        buffer[:count], self._rest = self._rest[:count], self._rest[count:]
        self._total += count
        if self._total > max(LIMIT, RATIO * self._size):
            raise InvalidValue(
                f"{name} holds more than {RATIO:,} times its {self._size:,} bytes once it is "
                f"decompressed, and above {LIMIT:,}; if that is right, decompress it first"
            )
        return count
