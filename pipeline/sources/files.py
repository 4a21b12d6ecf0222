"""Files of a source: found by name or glob, decompressed while read, told apart by content."""

import bisect
import gzip
import hashlib
import io
import os
import zlib
from collections.abc import Iterable, Sequence
from contextlib import contextmanager
from typing import Any, BinaryIO

from etils import epath

from pipeline.extras import require

# A fingerprint reads this many samples of a file, spread evenly; smaller files are read whole.
SAMPLES, SAMPLE = 16, 1 << 16

Paths = str | os.PathLike | Sequence[str | os.PathLike]


def find(paths: Paths) -> list[epath.Path]:
    """The files that `paths` (names or globs, one or several) stand for; globs in sorted order.

    Raises:
        FileNotFoundError: a file does not exist, or a glob matches none.
        ValueError: a path is a directory, or there is none at all.
    """
    several = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    if not several:
        raise ValueError("no files were given; name one or more, or a glob such as data/*.txt")
    return [file for each in several for file in _find(os.fspath(each))]


def _find(name: str) -> list[epath.Path]:
    path = epath.Path(name).expanduser()
    if path.is_dir():
        raise ValueError(f"{name} is a directory; name its files with a glob such as {name}/*.txt")
    if path.exists():
        return [path]
    wild = next((n for n, part in enumerate(path.parts) if any(c in part for c in "*?[")), None)
    if wild is None:
        raise FileNotFoundError(f"there is no file {name}; check the path")
    base = epath.Path(*path.parts[:wild])
    files = sorted(f for f in base.glob("/".join(path.parts[wild:])) if not f.is_dir())
    if not files:
        raise FileNotFoundError(f"no file matches {name}; check the path and the pattern")
    return files


def is_compressed(path: epath.Path) -> bool:
    """Whether `opened` decompresses this file, and so cannot jump in it."""
    return path.suffix in (".gz", ".zst")


def opened(path: epath.Path) -> BinaryIO:
    """The content of a file, decompressed if its name ends in `.gz` or `.zst`."""
    raw = path.open("rb")
    if path.suffix == ".gz":
        return io.BufferedReader(gzip.GzipFile(fileobj=raw), 1 << 18)
    if path.suffix == ".zst":
        zstandard = require("zstandard", extra="zstd", purpose=f"decompressing {os.fspath(path)}")
        return io.BufferedReader(_Frames(raw, zstandard.ZstdDecompressor()), 1 << 18)
    return raw


class _Frames(io.RawIOBase):
    """What the zstandard frames of a file hold, one after another.

    The reader that comes with `zstandard` takes a file that was cut short for a whole one.
    """

    def __init__(self, raw: BinaryIO, decompressor: Any):
        self._raw, self._decompressor = raw, decompressor
        self._frame: Any = None
        self._left, self._ready = b"", memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            compressed = self._left or self._raw.read(1 << 17)
            if not compressed:
                if self._frame is not None:
                    raise EOFError("it ends within a frame")
                return 0
            self._frame = self._frame or self._decompressor.decompressobj()
            self._ready = memoryview(self._frame.decompress(compressed))
            self._left = self._frame.unused_data
            if self._frame.eof:
                self._frame = None
        size = min(len(buffer), len(self._ready))
        buffer[:size], self._ready = self._ready[:size], self._ready[size:]
        return size

    def close(self) -> None:
        self._raw.close()
        super().close()


@contextmanager
def naming(path: epath.Path):
    """Turns what decompressors raise on a broken file into a sentence with its name."""
    try:
        yield
    except Exception as error:
        broken = isinstance(error, EOFError | zlib.error | gzip.BadGzipFile)
        if not broken and type(error).__name__ != "ZstdError":
            raise
        raise ValueError(
            f"{os.fspath(path)} cannot be decompressed: {error}. It is damaged or cut short; "
            "fetch it again"
        ) from error


def digest(files: Iterable[epath.Path]) -> str:
    """A short hash of the names, sizes and content samples of files, as they are stored.

    Times and directories do not count. An edit that leaves the size of a file above 1 MiB as it
    was, and touches none of the 16 samples of 64 KiB, goes unnoticed.
    """
    sha = hashlib.sha256()
    for path in files:
        size = path.stat().length
        sha.update(f"{path.name}\n{size}\n".encode())
        with path.open("rb") as file:
            if size <= SAMPLES * SAMPLE:
                sha.update(file.read())
                continue
            for number in range(SAMPLES):
                file.seek((size - SAMPLE) * number // (SAMPLES - 1))
                sha.update(file.read(SAMPLE))
    return sha.hexdigest()[:12]


def locate(first: Sequence[int], index: int) -> tuple[int, int]:
    """Which of many holds record `index`, and its number there.

    >>> locate([0, 3, 3, 5], 4)
    (2, 1)

    Args:
        first: the number of the first record of each, ascending from 0, and of all records.
        index: the record.

    Raises:
        IndexError: there is no such record.
    """
    if not 0 <= index < first[-1]:
        raise IndexError(f"record {index} of {first[-1]:,}")
    number = bisect.bisect_right(first, index) - 1
    return number, index - first[number]


def described(paths: Sequence[epath.Path]) -> str:
    """The first file, and how many others there are."""
    more = f" and {len(paths) - 1:,} more" if len(paths) > 1 else ""
    return os.fspath(paths[0]) + more
