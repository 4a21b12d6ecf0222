"""Transfers: objects whole, in ranges, into files; and what is known of them."""

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

from etils import epath

from pipeline.errors import StorageError
from pipeline.fs.requests import SCHEMES, client, request, split

# A request reads at most `PIECE` bytes. Ranges with at most `GAP` between them are read as one: at
# 200 MB/s, 256 KiB take as long as each of 32 requests that wait 40 ms for their answers together.
PIECE, GAP = 8 << 20, 1 << 18

Buffer = Any  # bytes, or anything that shares its memory as they do


class Head(NamedTuple):
    """What is known of an object: its size in bytes, and the time of its last change in seconds."""

    size: int
    changed: float


def get(path: str | os.PathLike) -> memoryview:
    """The bytes of an object."""

    def begin(store: Any, key: str) -> tuple[int, Any]:
        result = store.get(key)
        size = result.meta["size"]
        return size, result.bytes() if size <= PIECE else None

    size, content = request(path, begin)
    return memoryview(content) if content is not None else get_ranges(path, [0], [size])[0]


def get_ranges(
    path: str | os.PathLike | Sequence[str | os.PathLike],
    begins: Sequence[int],
    ends: Sequence[int],
) -> list[memoryview]:
    """Bytes of objects from each of `begins` up to each of `ends`, with as few requests as pay off.

    Args:
        path: of the object, or of any other file; or a sequence, of the object of each range.
        begins: the first byte of each range.
        ends: the byte after the last of each range.

    Raises:
        OSError: an object ends before the end of a range.
    """
    if isinstance(path, str | os.PathLike):
        path = [path] * len(begins)
    places = [os.fspath(each) for each in path]
    wanted = [(p, int(b), int(e)) for p, b, e in zip(places, begins, ends, strict=True)]
    found: list[memoryview] = [memoryview(b"")] * len(wanted)
    runs = _merge(wanted)
    pieces = [
        (wanted[run[0]][0], at, min(at + PIECE, end))
        for run, begin, end in runs
        for at in range(begin, end, PIECE)
    ]
    contents = iter(client.map(_get_piece, pieces))
    for run, begin, end in runs:
        parts = [next(contents) for _ in range(begin, end, PIECE)]
        whole = memoryview(parts[0] if len(parts) == 1 else b"".join(parts))
        for number in run:
            found[number] = whole[wanted[number][1] - begin : wanted[number][2] - begin]
    return found


def _merge(wanted: Sequence[tuple[str, int, int]]) -> list[tuple[list[int], int, int]]:
    """Ranges as runs of neighbours: their numbers, and the bytes where each run begins and ends."""
    runs: list[tuple[list[int], int, int]] = []
    order = sorted(range(len(wanted)), key=wanted.__getitem__)
    for number in order:
        place, begin, end = wanted[number]
        if begin >= end:
            continue
        if runs:
            run, first, last = runs[-1]
            if wanted[run[0]][0] == place and begin <= last + GAP:
                runs[-1] = [*run, number], first, max(last, end)
                continue
        runs.append(([number], begin, end))
    return runs


def _get_piece(piece: tuple[str, int, int]) -> Buffer:
    path, begin, end = piece
    if not path.startswith(SCHEMES):
        with epath.Path(path).open("rb") as file:
            file.seek(begin)
            content = file.read(end - begin)
    else:
        content = request(path, lambda store, key: store.get_range(key, start=begin, end=end))
    if len(content) != end - begin:
        raise StorageError(
            f"{path} ends before byte {end:,}, up to which it is to be read; it changed since"
        )
    return content


def download(path: str | os.PathLike, file: str | os.PathLike, *, size: int | None = None) -> int:
    """Copies an object into a local file; returns its size in bytes.

    The file has that size at once, and is whole only in the end. So give a temporary name, and
    rename it.

    Args:
        path: of the object.
        file: the name of the local file; made if there is none.
        size: of the object; None: it is asked for.
    """
    place, size = os.fspath(path), head(path).size if size is None else size
    with open(file, "ab") as whole:
        whole.truncate(size)

    def copy(begin: int) -> None:
        content = _get_piece((place, begin, min(begin + PIECE, size)))
        # Opened for each piece: if one fails, this ends while others still write.
        with open(file, "r+b") as whole:
            whole.seek(begin)
            whole.write(content)

    for _ in client.map(copy, range(0, size, PIECE)):
        pass
    return size


def put(path: str | os.PathLike, content: Buffer, *, if_absent: bool = False) -> bool:
    """Writes an object, whole or not at all; nobody sees a part of it.

    Args:
        path: of the object.
        content: bytes, or a binary file, of which all is taken.
        if_absent: whether to leave an object alone that is there. Of several processes that write
            one at the same time, exactly one then writes it.

    Returns:
        Whether it was written.
    """
    if hasattr(content, "read"):
        large = content.seek(0, os.SEEK_END) > 2 * PIECE
    else:
        content = memoryview(content).cast("B")
        large = len(content) > 2 * PIECE
    options: dict[str, Any] = {"use_multipart": False}
    if if_absent:
        options["mode"] = "create"
    elif large:
        options = {"use_multipart": True, "chunk_size": 2 * PIECE}
    attempts = 0

    def attempt(store: Any, key: str) -> None:
        nonlocal attempts
        attempts += 1
        if hasattr(content, "read"):
            content.seek(0)
        store.put(key, content, **options)

    try:
        # The parts of a large object are sent again by themselves, not all of them.
        request(path, attempt, patient="chunk_size" in options, bucket_only=True)
    except FileExistsError:
        # An attempt whose answer was lost may have written it.
        return attempts > 1 and _holds(path, content)
    return True


def _holds(path: str | os.PathLike, content: Buffer) -> bool:
    """Whether this is what an object holds."""
    if hasattr(content, "read"):
        content.seek(0)
        content = content.read()
    try:
        return get(path) == content
    except FileNotFoundError:
        return False


def head(path: str | os.PathLike) -> Head:
    """The size of an object, and the time of its last change."""
    meta = request(path, lambda store, key: store.head(key))
    return Head(meta["size"], meta["last_modified"].timestamp())


def children(path: str | os.PathLike) -> tuple[dict[str, Head], list[str]]:
    """What is in a folder: the objects there, by name, and the names of the folders there."""
    found = request(
        path, lambda store, key: store.list_with_delimiter(key or None), bucket_only=True
    )
    objects = {
        each["path"].rpartition("/")[2]: Head(each["size"], each["last_modified"].timestamp())
        for each in found["objects"]
    }
    return objects, [each.rstrip("/").rpartition("/")[2] for each in found["common_prefixes"]]


def keys(path: str | os.PathLike, *, limit: int | None = None) -> list[str]:
    """The paths of all objects in a folder and in those within it; of the first ones by `limit`."""
    root = "/".join(os.fspath(path).split("/", 3)[:3])

    def attempt(store: Any, key: str) -> list[str]:
        stream = store.list(key or None, chunk_size=limit or 1000)
        metas = stream.collect() if limit is None else next(iter(stream), [])[:limit]
        return [f"{root}/{each['path']}" for each in metas]

    return request(path, attempt, bucket_only=True)


def copy(path: str | os.PathLike, other: str | os.PathLike) -> None:
    """Copies an object under another key, in the same bucket or elsewhere."""
    (bucket, _), (to, key) = split(path), split(other)
    if bucket == to:
        request(path, lambda store, of: store.copy(of, key))
    else:
        put(other, get(path))


def delete(paths: Sequence[str | os.PathLike]) -> None:
    """Deletes objects; those that are not there count as deleted."""

    def attempt(path: str | os.PathLike) -> None:
        try:
            request(path, lambda store, key: store.delete(key))
        except FileNotFoundError:
            return

    for _ in client.map(attempt, paths):
        pass
