"""Files of a source: found by name or glob, cut into shards, with a fingerprint."""

import fnmatch
import hashlib
import itertools
import logging
import os
import re
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, cast

import pyarrow as pa
from etils import epath

from pipeline.errors import (
    InvalidValue,
    Missing,
    NotAllowed,
    StorageError,
    UserError,
    counted,
    name_some,
)
from pipeline.fs import objects
from pipeline.fs.atomic import as_path, is_local
from pipeline.fs.objects import ObjectPath
from pipeline.text.content import describe, read_head
from pipeline.text.source import Piece, Shard, Sharded, shard_bytes

logger = logging.getLogger(__name__)

# Words of the names of files, or of their folders, that have one split of a data set.
SPLITS = "train", "test", "valid", "validation", "val", "dev", "eval"

# A fingerprint reads this many samples of a file, spread evenly; smaller files are read whole.
SAMPLES, SAMPLE = 16, 1 << 16

# The size of a file, and its time or entity tag.
Stamp: TypeAlias = tuple[int, int | str]

Paths = str | os.PathLike | Sequence[str | os.PathLike]


class Format(Protocol):
    """How the files of a kind are read; it pickles."""

    @property
    def name(self) -> str:
        """Its name in messages."""
        ...

    @property
    def prefix(self) -> str:
        """The beginning of fingerprints; it has the options that decide the records."""
        ...

    @property
    def unit(self) -> str:
        """What the place of a record in its file counts: "byte", "row" or "record".

        "" if a file is one record.
        """
        ...

    def is_whole(self, path: epath.Path) -> bool:
        """Whether a file can be read from its start alone, as a compressed one, or one record.

        One worker then reads all of it. Other files are cut into spans of bytes, for several.
        """
        ...

    def read(
        self, path: epath.Path, begin: int, end: int, start: Any, size: int
    ) -> Iterator[Piece]:
        """The records of a file whose first byte is at `begin` or later, and before `end`.

        So each record is in one span, wherever files are cut. A piece has the records of about
        `size` bytes, and `next`, any JSON: where to go on after it, or None at the end of the span.
        `start` is the `next` of the last piece that was read before; None: none was.
        """
        ...


class Files(Sharded):
    """Records of files of a format.

    All files lie end to end on one axis of bytes, which is cut into equal shards. A span of a shard
    is the number of a file, and the bytes there at which its records begin.

    Args:
        format: how the files are read.
        paths: names or globs, one or several.
    """

    def __init__(self, format: Format, paths: Paths):
        self.format, self.files = format, leave_out_repeats(find(paths))
        # The stamps of the files when the fingerprint was first computed, and their digest.
        self._state: tuple[list[Stamp], str] | None = None

    @property
    def unit(self) -> str:  # type: ignore[override]  # others have an attribute
        """See `Block`."""
        return self.format.unit

    def _read_span(self, span: Any, start: Any, size: int) -> Iterator[Piece]:
        file, begin, end = span
        return self.format.read(self.files[file], begin, end, start, size)

    @property
    def fingerprint(self) -> str:
        """See `Source`; the `digest` of the files, which may not change."""
        stamps = read_stamps(self.files)
        if self._state is None:
            self._state = stamps, digest(self.files)
        before, content = self._state
        if stamps != before and all(map(any, stamps)) and digest(self.files) == content:
            self._state = stamps, content  # files were touched, or replaced by copies
        for path, then, now in zip(self.files, self._state[0], stamps, strict=True):
            if then != now:
                seen = f"has {now[0]:,}, written at another time" if any(now) else "is gone"
                raise InvalidValue(
                    f"{os.fspath(path)} changed after this source was first used: it had "
                    f"{then[0]:,} bytes, and {seen}. Let nothing write to files while they are "
                    "read, and open the source again"
                )
        return f"{self.format.prefix}-{content}"

    def shards(self) -> list[Shard]:
        """See `Sharded`; the sizes of the files decide them, and whether large ones are packed."""
        sizes = [size for size, _ in read_stamps(self.files)]
        step, at = shard_bytes(sum(sizes)), 0
        spans: dict[int, list[tuple[int, int, int]]] = {}
        for file, size in enumerate(sizes):
            first = at // step
            last = (at + max(size, 1) - 1) // step
            last = first if last > first and self.format.is_whole(self.files[file]) else last
            for shard in range(first, last + 1):
                begin = max(shard * step - at, 0)
                end = size if shard == last else (shard + 1) * step - at
                spans.setdefault(shard, []).append((file, begin, end))
            at += size
        return [
            Shard(of_shard, sum(end - begin for _, begin, end in of_shard))
            for of_shard in spans.values()
        ]

    def __str__(self) -> str:
        more = f" and {len(self.files) - 1:,} more" if len(self.files) > 1 else ""
        return f"{self.format.name} of {os.fspath(self.files[0])}{more}"


def guard(path: epath.Path, format: str, function: Callable, *arguments: Any) -> Any:
    """The result of a library's function; its errors become one that names the file."""
    try:
        return function(*arguments)
    except (pa.ArrowException, OSError, RuntimeError, StopIteration, ValueError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # from the system, not from the content
        advice = describe(read_head(path))
        if isinstance(error, UnicodeEncodeError):
            advice = "Its name is not UTF-8; rename it"
        elif not advice or format in advice:
            advice = "It is damaged or of another format; fetch it again, or check its name"
        raise InvalidValue(
            f"{os.fspath(path)} cannot be read as {format}: {error}. {advice}"
        ) from error


def find(paths: Paths) -> list[epath.Path]:
    """The files that `paths` (names or globs, one or several) name; globs in sorted order.

    A name that exists is that file or folder, whatever characters it has. In a glob, `**` stands
    for any number of folders; a linked folder is read once, and not under its link if it is found
    without. Hidden files are only found by a pattern that begins with a dot.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a name is that of a directory, a socket or a pipe.
        OSError: a file cannot be read.
    """
    is_one = isinstance(paths, str | bytes | os.PathLike) or not isinstance(paths, Iterable)
    names: list[Any] = [paths] if is_one else [*cast(Iterable[Any], paths)]
    if not names:
        raise InvalidValue("no files were given; name one or more, or a glob such as data/*.txt")
    for name in names:
        if not isinstance(name, str | os.PathLike) or not os.fspath(name):
            raise InvalidValue(
                f"{name!r:.80} is no name of a file; give a text such as 'data/*.txt', or a list "
                "of them"
            )
    texts = [os.fspath(name) for name in names]
    remote = any(text.startswith(objects.SCHEMES) for text in texts)
    matches = objects.together(_match, texts) if remote else map(_match, texts)
    files = [file for of_name in matches for file in of_name]
    for text in map(os.fspath, files):
        if is_local(text):
            _require_readable(text)
    return files


def leave_out_repeats(files: Sequence[epath.Path]) -> list[epath.Path]:
    """The files, each once whatever its names are; a warning tells of the others."""
    once: dict[Any, epath.Path] = {}
    repeats = []
    for path in files:
        first = once.setdefault(_identify(path), path)
        if first is not path:
            repeats.append(f"{os.fspath(path)} (first as {os.fspath(first)})")
    if repeats:
        text = "%s given twice, by overlapping globs, links or spellings, and read once: %s"
        logger.warning(text, counted(len(repeats), "file"), name_some(repeats, 3))
    unique = [*once.values()]
    _warn_of_missing(unique)
    _warn_of_splits(unique)
    return unique


def _warn_of_missing(files: Sequence[epath.Path]) -> None:
    """Warns if files of a set are missing, whose names are as `text-00000-of-00003.parquet`."""
    sets = Counter(re.sub(r"-\d+(-of-\d+)", r"-*\1", os.fspath(file)) for file in files)
    for name, count in sets.items():
        total = re.search(r"-\*-of-(\d+)", name)
        if total and count < int(total[1]):
            text = "%s: only %s of the %s files are read; are the others missing, or left out?"
            logger.warning(text, name, count, int(total[1]))


def _warn_of_splits(files: Sequence[epath.Path]) -> None:
    """Warns if files have names or folders of a split for training, and others of another one."""
    paths = [file.parts for file in files]
    columns = zip(*paths, strict=False)
    shared = [*itertools.takewhile(lambda names: len({*names}) == 1, columns)]
    splits = Counter[str]()
    for names in paths:
        words = re.findall(r"[a-z]+", "/".join(names[len(shared) :]).lower())
        splits.update([word for word in words if word in SPLITS][:1])
    if len(splits) > 1 and "train" in splits:
        text = "files of several splits are read together: %s; is that wanted?"
        counts = [f"{counted(count, 'file')} of {name!r}" for name, count in splits.items()]
        logger.warning(text, ", ".join(counts))


def _identify(file: epath.Path) -> Any:
    """What is the same for all names of a file."""
    name = os.fspath(file)
    status = os.stat(name) if is_local(name) else None
    return (status and status.st_ino and (status.st_dev, status.st_ino)) or name


def _match(name: str) -> list[epath.Path]:
    path = as_path(name)
    if isinstance(path, ObjectPath) and path.is_file():  # one request
        return [path]
    try:
        if path.is_dir():
            raise _no_files([path], name)
        if path.exists() or (is_local(path) and os.path.lexists(path)):
            return [path]
        files = _expand(path)
    except OSError as error:
        raise _unreadable(name, error) from error
    if not files:
        braces = ". {…} is no pattern; give a list of names" if "{" in name else ""
        raise Missing(f"no file matches {name}; check the path and the pattern{braces}")
    return files


def _no_files(folders: Sequence[epath.Path], name: str) -> InvalidValue:
    """The error of folders in place of files."""
    inside = [path for folder in folders for path in sorted(folder.iterdir())]
    saved = [os.fspath(path) for path in [*folders, *inside] if (path / "state.json").exists()]
    if saved:
        return InvalidValue(
            f"{name_some(saved)}: a data set that was saved to disk is given alone, by its folder; "
            "prepare each into a corpus of its own, or save them as one by "
            "datasets.concatenate_datasets"
        )
    return InvalidValue(
        f"{name} is a directory, and no Hugging Face data set that was saved to disk; name its "
        f"files with a glob such as {name}/*.txt"
    )


def _expand(path: epath.Path) -> list[epath.Path]:
    """The files that match a glob, whose pattern begins with the first folder that is no name."""
    folders = (*reversed(path.parents), path)
    wild = (folder for folder in folders if re.search(r"[*?[{]", folder.name))
    first = next((folder for folder in wild if not folder.exists()), None)
    if first is None:
        raise Missing(f"there is no file {os.fspath(path)}; check the path")
    base, patterns = first.parent, path.parts[len(first.parts) - 1 :]
    if isinstance(path, ObjectPath):
        files = sorted(base.glob("/".join(patterns)))
        heads = zip(files, objects.heads(files), strict=True)
        return [file for file, head in heads if head is not None]
    matches = sorted({*_walk(os.fspath(base), *patterns)}, key=lambda name: name.split("/"))
    names = [name for name in matches if not os.path.isdir(name)]
    if matches and not names:
        raise _no_files([*map(epath.Path, matches)], os.fspath(path))
    return [*map(epath.Path, names)]


def _walk(folder: str, first: str, *others: str) -> Iterator[str]:
    """The paths in a folder that match some patterns, one for each name in them."""
    names = os.listdir(folder)
    names = [name for name in names if name[0] != "." or first[0] == "."]
    if first != "**":
        names = [name for name in names if name == first or fnmatch.fnmatchcase(name, first)]
        for path in (os.path.join(folder, name) for name in names):
            if not others:
                yield path
            elif os.path.isdir(path):
                yield from _walk(path, *others)
        return
    for inner in _folders_in(folder):
        yield from _walk(inner, *(others or "*"))


def _folders_in(folder: str) -> list[str]:
    """A folder and all folders in it, each once; those behind links come last."""
    folders, links, seen = list[str](), [folder], set[str]()
    while links:
        waiting = [links.pop(0)]
        while waiting:
            path = waiting.pop()
            if (real := os.path.realpath(path)) in seen:
                continue
            seen.add(real)
            folders.append(path)
            entries = [entry.path for entry in os.scandir(path) if entry.name[0] != "."]
            inner = sorted(filter(os.path.isdir, entries), reverse=True)
            waiting += [entry for entry in inner if not os.path.islink(entry)]
            links += [entry for entry in inner[::-1] if os.path.islink(entry)]
    return folders


def _require_readable(name: str) -> None:
    """Refuses what cannot be read as a file."""
    try:
        mode = os.stat(name).st_mode
    except OSError as error:
        raise _unreadable(name, error) from error
    if stat.S_ISSOCK(mode) or stat.S_ISFIFO(mode):
        raise InvalidValue(
            f"{name} is a socket or a pipe, which cannot be read in shares; copy its content to a "
            "file"
        )
    if not os.access(name, os.R_OK):
        raise NotAllowed(f"{name} cannot be read: permission denied; change its mode or owner")


def _unreadable(name: str, error: OSError) -> Exception:
    """A sentence for an error of the system about a path."""
    if isinstance(error, UserError):
        return error
    if isinstance(error, FileNotFoundError) and os.path.islink(name):
        return Missing(
            f"{name} is a link to {os.readlink(name)}, which does not exist; restore it, or remove "
            "the link"
        )
    kinds = {PermissionError: NotAllowed, FileNotFoundError: Missing}
    kind = kinds.get(type(error), StorageError)
    at = f", at {os.fsdecode(error.filename)}" if error.filename else ""
    return kind(f"{name} cannot be opened: {error.strerror or error}{at}; check the path")


def digest(files: Iterable[epath.Path]) -> str:
    """A short hash of the names, sizes and samples of the content of files, as they are stored.

    Times and directories do not count. An edit goes unnoticed if it keeps the size of a file above
    1 MiB and misses all 16 samples of 64 KiB. Of an object, its entity tag counts in place of
    samples, which a cloud gives to each version: a copy may have another one.
    """
    sha, paths = hashlib.sha256(), list(files)
    for path, (size, change) in zip(paths, read_stamps(paths), strict=True):
        sha.update(f"{path.name}\n{size}\n".encode(errors="surrogateescape"))
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
        if is_local(name := os.fspath(path)):
            status = os.stat(name)
            return status.st_size, status.st_mtime_ns
        return path.stat().length, path.stat().mtime
    except FileNotFoundError:
        return 0, 0
