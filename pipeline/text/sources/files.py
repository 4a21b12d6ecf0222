"""Files of a source: found by name or glob, decompressed while read, with a fingerprint."""

import gzip
import hashlib
import io
import os
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO, Any, TypeAlias

import pyarrow as pa
from etils import epath

from pipeline.errors import InvalidValue, Missing
from pipeline.fs import objects
from pipeline.fs.atomic import as_path, is_local
from pipeline.fs.fork import Handles
from pipeline.fs.objects import ObjectPath
from pipeline.text.sources.source import Shard, Sharded, shard_bytes

# A fingerprint reads this many samples of a file, spread evenly; smaller files are read whole.
SAMPLES, SAMPLE = 16, 1 << 16

COMPRESSED = (".gz", ".zst")
BUFFER = 1 << 17

# The size of a file, and its time or entity tag.
Stamp: TypeAlias = tuple[int, int | str]

Paths = str | os.PathLike | Sequence[str | os.PathLike]


class FileSource(Sharded, Handles):
    """A source that reads files; the base of one class for each format.

    All files lie end to end on one axis of bytes, which is cut into equal shards. A span of a shard
    is the number of a file, and the bytes there at which its records begin.
    """

    format: str  # the name of the format in messages
    prefix: str  # of fingerprints

    def __init__(self, paths: Paths):
        self.files = find(paths)
        # The stamps of the files when the fingerprint was first computed, and their digest.
        self._known: tuple[list[Stamp], str] | None = None
        self.__setstate__({})

    @property
    def fingerprint(self) -> str:
        """See `Source`; the `digest` of the files, which may not change."""
        stamps = read_stamps(self.files)
        if self._known is None:
            self._known = stamps, digest(self.files)
        for path, then, now in zip(self.files, self._known[0], stamps, strict=True):
            if then != now:
                seen = f"has {now[0]:,}, written at another time" if any(now) else "is gone"
                raise InvalidValue(
                    f"{os.fspath(path)} changed after this source was first used: it had "
                    f"{then[0]:,} bytes, and {seen}. Let nothing write to files while they are "
                    "read, and open the source again"
                )
        return f"{self.prefix}-{self._known[1]}"

    def _is_whole(self, path: epath.Path) -> bool:
        """Whether a file belongs to the shard in which it begins, as it is read from its start."""
        return path.suffix in COMPRESSED

    def shards(self) -> list[Shard]:
        """See `Sharded`; nothing but the sizes of the files decides them."""
        sizes = [size for size, _ in read_stamps(self.files)]
        step, at = shard_bytes(sum(sizes)), 0
        spans: dict[int, list[tuple[int, int, int]]] = {}
        for file, (path, size) in enumerate(zip(self.files, sizes, strict=True)):
            first = at // step
            last = first if self._is_whole(path) or not size else (at + size - 1) // step
            for shard in range(first, last + 1):
                begin = max(shard * step - at, 0)
                end = size if shard == last else (shard + 1) * step - at
                spans.setdefault(shard, []).append((file, begin, end))
            at += size
        return [Shard(each, sum(end - begin for _, begin, end in each)) for each in spans.values()]

    def _guard(self, path: epath.Path, function: Callable, *arguments: Any) -> Any:
        """The result of a library's function; its errors become one that names the file."""
        try:
            return function(*arguments)
        except (pa.ArrowException, OSError, RuntimeError, ValueError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise  # from the system, not from the content
            raise InvalidValue(
                f"{os.fspath(path)} cannot be read as {self.format}: {error}. It is damaged or of "
                "another format; fetch it again, or check its name"
            ) from error

    def __str__(self) -> str:
        more = f" and {len(self.files) - 1:,} more" if len(self.files) > 1 else ""
        return f"{self.format} of {os.fspath(self.files[0])}{more}"


def find(paths: Paths) -> list[epath.Path]:
    """The files that `paths` (names or globs, one or several) name; globs in sorted order."""
    names = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    if not names:
        raise InvalidValue("no files were given; name one or more, or a glob such as data/*.txt")
    texts = [os.fspath(name) for name in names]
    remote = any(text.startswith(objects.SCHEMES) for text in texts)
    matches = objects.together(_match, texts) if remote else map(_match, texts)
    files = [file for found in matches for file in found]
    for file in files:
        mode = os.stat(file).st_mode if is_local(file) and os.path.exists(file) else 0
        if stat.S_ISSOCK(mode) or stat.S_ISFIFO(mode):
            raise InvalidValue(
                f"{os.fspath(file)} is a socket or a pipe, which cannot be read in shares; copy "
                "its content to a file"
            )
    return files


def _match(name: str) -> list[epath.Path]:
    path = as_path(name)
    if isinstance(path, ObjectPath) and path.is_file():  # one request
        return [path]
    if path.is_dir():
        raise InvalidValue(
            f"{name} is a directory; name its files with a glob such as {name}/*.txt, or "
            f"{name}/data-*.arrow for a Hugging Face data set that was saved to disk"
        )
    if path.exists():
        return [path]
    wild = next((n for n, part in enumerate(path.parts) if any(c in part for c in "*?[")), None)
    if wild is None:
        raise Missing(f"there is no file {name}; check the path")
    base = path.parents[len(path.parts) - wild - 1]
    files = sorted(base.glob("/".join(path.parts[wild:])))
    if isinstance(path, ObjectPath):
        known = zip(files, objects.heads(files), strict=True)
        files = [file for file, head in known if head is not None]
    else:
        files = [file for file in files if not file.is_dir()]
    if not files:
        raise Missing(f"no file matches {name}; check the path and the pattern")
    return files


@contextmanager
def open_file(path: epath.Path) -> Iterator[IO[bytes]]:
    """The content of a file, decompressed if its name ends in `.gz` or `.zst`.

    Only a `.zst` file cannot seek; a `.gz` file seeks by reading on, or from its start.
    """
    try:
        with path.open("rb") as raw:
            stream: Any = raw
            if path.suffix == ".gz":
                stream = io.BufferedReader(gzip.GzipFile(fileobj=raw), BUFFER)
            elif path.suffix == ".zst":
                stream = io.BufferedReader(pa.CompressedInputStream(raw, "zstd"), BUFFER)
            yield stream
    except (OSError, EOFError, zlib.error) as error:
        if path.suffix not in COMPRESSED or getattr(error, "errno", None) is not None:
            raise  # from the system, not from the content
        raise InvalidValue(
            f"{os.fspath(path)} cannot be decompressed: {error}. It is damaged or cut short; "
            "fetch it again"
        ) from error


def digest(files: Iterable[epath.Path]) -> str:
    """A short hash of the names, sizes and samples of the content of files, as they are stored.

    Times and directories do not count. An edit goes unnoticed if it keeps the size of a file above
    1 MiB and misses all 16 samples of 64 KiB. Of an object, its entity tag counts in place of
    samples, which a cloud gives to each version: a copy may have another one.
    """
    sha, paths = hashlib.sha256(), list(files)
    for path, (size, change) in zip(paths, read_stamps(paths), strict=True):
        sha.update(f"{path.name}\n{size}\n".encode())
        if isinstance(path, ObjectPath):
            sha.update(f"{change}\n".encode())
            continue
        with path.open("rb") as file:
            if size <= SAMPLES * SAMPLE:
                sha.update(file.read())
                continue
            for number in range(SAMPLES):
                file.seek((size - SAMPLE) * number // (SAMPLES - 1))
                sha.update(file.read(SAMPLE))
    return sha.hexdigest()[:12]


def read_stamps(paths: Sequence[epath.Path]) -> list[Stamp]:
    """The size of each file and what changes with it: the time, or the entity tag of an object.

    Both are 0 if the file is gone.
    """
    remote = [path for path in paths if isinstance(path, ObjectPath)]
    heads: dict[Any, Any] = dict(zip(remote, objects.heads(remote), strict=True))
    return [_stamp(path, heads.get(path)) for path in paths]


def _stamp(path: epath.Path, head: Mapping[str, Any] | None) -> Stamp:
    try:
        if isinstance(path, ObjectPath):  # some clouds quote tags in one answer, and not in others
            return (0, 0) if head is None else (head["size"], str(head["e_tag"]).strip('"'))
        if is_local(path):
            status = os.stat(path)
            return status.st_size, status.st_mtime_ns
        return path.stat().length, path.stat().mtime
    except FileNotFoundError:
        return 0, 0
