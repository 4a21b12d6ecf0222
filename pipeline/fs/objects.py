"""Objects of object storage (`s3://`, `gs://`, `az://`): as paths, whole, and by ranges of bytes.

A path names a bucket and a key, as `s3://mine/corpus/lengths.npy`. An object is whole or absent;
nobody sees a part of it. obstore makes the requests. A request that fails for a reason that may
pass (status 5xx or 429, a connection that is cut or silent for 30 seconds) is made up to 15 times
within about a minute. Other errors are sentences:

    Missing        there is no such object
    NotAllowed     there are no credentials, or they do not suffice
    StorageError   there is no such bucket, or the storage cannot be reached
    NotInstalled   the extra `cloud` is not installed

Credentials are found where each cloud's own programs find them; see docs/scale.md. Nothing is
registered in etils or fsspec, so other libraries of the process open such paths as before.
"""

import contextlib
import datetime
import fnmatch
import functools
import io
import os
import random
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from etils import epath
from etils.epath.gpath import PosixGPath
from etils.epath.stat_utils import StatResult

from pipeline.errors import (
    Exists,
    InvalidState,
    InvalidValue,
    Missing,
    NotAllowed,
    StorageError,
    require,
)

# The kinds of object storage. Another one needs that etils has paths of its scheme, that obstore
# opens its URLs (`_open_store`), and that it writes on conditions: an object that must not exist or
# must have a version (`put`). Files that are created once, and locks, rest on these. A server that
# speaks S3 is one already, by AWS_ENDPOINT_URL. `_no_credentials` says how users give credentials,
# and `tests/fs/object_servers.py` runs servers.
SCHEMES = ("s3://", "gs://", "az://")

# obstore repeats a request so often, within so many seconds: fewer than after which others take a
# lock over. All of that is repeated in rounds, with a pause of at most `LONGEST` seconds.
RETRIES, WITHIN, ROUNDS, LONGEST = 2, 10.0, 5, 60.0
# Errors of requests that fail again however often they are made, but for those that can succeed if
# they are made from their beginning.
FINAL = r"status code: (3|4(?!08|25|29))\d|redirect without LOCATION"
AGAIN = "response body|code: 41[26]|NoSuchUpload|InvalidBlockList"
# Large objects are read and written in pieces of `PIECE` bytes, `REQUESTS` at once.
PIECE, REQUESTS = 8 << 20, 16
# Bytes that an open file requests at once, and that a file keeps in memory while it is written.
READ, WRITTEN = 1 << 20, 64 << 20

Buffer = Any  # bytes, or another object with the buffer protocol
Version = Mapping[str, str]  # identifies the content of an object among all that it had


# ---- buckets and requests


def split(path: epath.PathLike) -> tuple[str, str]:
    """The bucket of a path, as `s3://mine`, and the key."""
    scheme, _, rest = os.fspath(path).partition("://")
    bucket, _, key = rest.partition("/")
    return f"{scheme}://{bucket}", key.strip("/")


_users: set[int] = set()  # the process that made requests; its forks inherit this, not its threads


def _open(path: epath.PathLike) -> tuple[Any, str]:
    """The store of a path's bucket, and its key."""
    bucket, key = split(path)
    if _users - {os.getpid()}:
        raise InvalidState(
            "this process is a fork of one that used object storage, whose client has threads; "
            "start processes by multiprocessing.get_context('spawn')"
        )
    require("obstore", extra="cloud", purpose=f"reading {bucket}")
    _users.add(os.getpid())
    return _open_store(bucket), key


@functools.lru_cache(maxsize=64)
def _open_store(bucket: str) -> Any:
    """The client of a bucket, with the credentials of its cloud's own programs."""
    from obstore import store

    config: dict[str, Any] = {}
    if bucket.startswith("s3://"):
        # Not all servers delete several objects with one request.
        config = {"disable_bulk_delete": True} | _profile()
    config["client_options"] = {
        "timeout": "10 minutes",
        "connect_timeout": "10s",
        "read_timeout": "30s",
        "allow_http": True,  # if the environment names such a server
    }
    pauses = min(0.1, LONGEST), min(1.0, LONGEST), WITHIN
    first, most, within = (datetime.timedelta(seconds=seconds) for seconds in pauses)
    backoff = {"init_backoff": first, "max_backoff": most, "base": 4}
    retries = {"max_retries": RETRIES, "retry_timeout": within, "backoff": backoff}
    make: Any = store.from_url  # has a signature for each cloud
    try:
        return make(bucket, retry_config=retries, **config)
    except _error() as error:
        problem = f"the environment does not say how to open {bucket}"
        raise _no_credentials(problem, _reason(error)) from error


def _profile() -> dict[str, Any]:
    """Credentials and region of a profile in ~/.aws, if boto3 is installed to read it."""
    if "AWS_ACCESS_KEY_ID" in os.environ or "AWS_SKIP_SIGNATURE" in os.environ:
        return {}
    try:
        import boto3
        from obstore.auth.boto3 import Boto3CredentialProvider

        return {"credential_provider": Boto3CredentialProvider(boto3.Session())}
    except (ImportError, ValueError):  # the latter without credentials
        return {}


def _request(
    path: epath.PathLike, call: Callable[[Any, str], Any], *, in_bucket: bool = False
) -> Any:
    """The result of a request, `call(store, key)`; with `in_bucket`, a 404 is a missing bucket."""
    store, key = _open(path)
    with _told(path, in_bucket):
        for number in range(ROUNDS):
            try:
                return call(store, key)
            except (_error(), FileNotFoundError) as error:
                # obstore repeats neither conditional writes nor a list whose answer is cut. It
                # requests the rest of an answer that was cut; the object may have changed since.
                # The last request of a large write finds no parts if its answer was lost or, on
                # Azure, if another process has written the object meanwhile.
                if number == ROUNDS - 1 or _is_final(error):
                    raise
            time.sleep(random.uniform(0.5, 1) * min(LONGEST, 4.0**number))
    raise AssertionError("the last attempt returns or raises")


def _is_final(error: Exception) -> bool:
    """Whether a request that failed so would fail again."""
    reason = str(error)
    if re.search(AGAIN, reason):
        return False
    never = isinstance(error, FileNotFoundError) or _asks_machine(reason)
    return never or re.search(FINAL, reason) is not None


def together(call: Callable[..., Any], *arguments: Iterable[Any]) -> list[Any]:
    """Results of concurrent calls, in order; after an error, no other call begins."""
    with ThreadPoolExecutor(2 * REQUESTS) as pool:
        return list(pool.map(call, *arguments))


def _error() -> type[Exception]:
    from obstore import exceptions

    return exceptions.BaseError


def _asks_machine(reason: str) -> bool:
    """Whether a request for credentials of the machine failed, which has no others."""
    return any(sign in reason for sign in ("/latest/", "metadata.google", "token request"))


@contextlib.contextmanager
def _told(path: epath.PathLike, in_bucket: bool = False) -> Iterator[None]:
    """Raises errors of obstore inside the block as sentences."""
    try:
        yield
    except (_error(), OSError) as error:
        raise _sentence(os.fspath(path), error, in_bucket) from error


def _reason(error: Exception) -> str:
    return str(error).partition("\n\nDebug source")[0][:300]


def _sentence(path: str, error: Exception, in_bucket: bool) -> OSError:
    bucket, kind, reason = split(path)[0], type(error).__name__, _reason(error)
    match = re.search(r"status code: (\d{3})", reason)
    status = int(match[1]) if match else None
    if _asks_machine(reason):
        return _no_credentials(f"there are no credentials for {bucket}", reason)
    account = ""
    if bucket.startswith("az://"):
        name = os.environ.get("AZURE_STORAGE_ACCOUNT_NAME")
        account = f"; AZURE_STORAGE_ACCOUNT_NAME is {name}"
    if "NoSuchBucket" in reason or "NoSuchContainer" in reason or (in_bucket and status == 404):
        return StorageError(
            f"there is no bucket {bucket} for {path}; create it, or check its name and the "
            f"address of the storage{account}"
        )
    if isinstance(error, FileNotFoundError):
        return Missing(f"there is no object {path}; check the path")
    if kind == "UnauthenticatedError" or status == 401:
        return NotAllowed(
            f"the credentials for {bucket} are refused; renew them{account} ({reason})"
        )
    if kind == "PermissionDeniedError" or status == 403:
        return NotAllowed(
            f"the credentials do not allow this for {path}; they need permission to list the "
            f"bucket and to read and write in it{account} ({reason})"
        )
    moved = status in (301, 307, 308) or "redirect without LOCATION" in str(error)
    if moved and bucket.startswith("s3://"):
        return StorageError(f"{bucket} is in another region; set AWS_REGION to that one ({reason})")
    if status == 416:
        return _ends_before(path)
    if status is not None and 400 <= status < 500 and status not in (408, 425, 429):
        return StorageError(f"the storage refused a request for {path}: {reason}")
    return StorageError(
        f"{path} cannot be reached: {reason}. Check the network and the address of the storage, "
        "and run again to continue"
    )


def _no_credentials(problem: str, reason: str) -> NotAllowed:
    return NotAllowed(
        f"{problem}; set the credentials of its cloud: for s3:// AWS_ACCESS_KEY_ID and "
        "AWS_SECRET_ACCESS_KEY, for gs:// GOOGLE_APPLICATION_CREDENTIALS, for "
        f"az:// AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY ({reason})"
    )


def _ends_before(path: str) -> StorageError:
    return StorageError(f"{path} is shorter than it was; let nothing write to it, and run again")


# ---- reading


def get(path: epath.PathLike) -> bytes:
    """The bytes of an object."""
    return get_version(path)[0]


def get_version(path: epath.PathLike) -> tuple[bytes, Version]:
    """The bytes of an object, and their version."""

    def read(store: Any, key: str) -> tuple[bytes, Version]:
        result = store.get(key)
        return bytes(result.bytes()), _version(result.meta)

    return _request(path, read)


def download(path: epath.PathLike, file: epath.PathLike, *, size: int | None = None) -> int:
    """Copies an object, or any other file, into a local file; returns its size in bytes.

    The file has that size at once, but is complete only at the end: give a temporary name.
    """
    length: int = head(path)["size"] if size is None else size
    with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666), "wb") as target:
        target.truncate(length)
        for piece in read_pieces(path, length):
            target.write(piece)
    return length


def read_pieces(path: epath.PathLike, size: int) -> Iterator[Buffer]:
    """The bytes of an object, or of any other file, in order."""
    begins = range(0, size, PIECE)
    # The first piece comes alone, so that a storage that always fails gets only one request.
    later = [begins[at : at + REQUESTS] for at in range(1, len(begins), REQUESTS)]
    for batch in (begins[:1], *later):
        yield from get_ranges([path] * len(batch), batch, [min(b + PIECE, size) for b in batch])


def get_ranges(
    paths: Sequence[epath.PathLike], begins: Sequence[int], ends: Sequence[int]
) -> list[Buffer]:
    """Bytes of objects, or of other files, from each of `begins` up to each of `ends`."""
    return together(_read_range, [os.fspath(path) for path in paths], begins, ends)


def _read_range(path: str, begin: int, end: int) -> Buffer:
    if begin == end:
        return b""
    if path.startswith(SCHEMES):
        which = {"start": begin, "end": end}
        content = _request(path, lambda store, key: store.get_range(key, **which))
    else:
        with epath.Path(path).open("rb") as file:
            file.seek(begin)
            content = file.read(end - begin)
    if len(content) != end - begin:
        raise _ends_before(path)
    return content


def head(path: epath.PathLike) -> Mapping[str, Any]:
    """The metadata of an object: its `size` in bytes, the time `last_modified`, and more."""
    return _request(path, lambda store, key: store.head(key))


def heads(paths: Sequence[epath.PathLike]) -> list[Mapping[str, Any] | None]:
    """The metadata of objects, as `head`; None for those that are missing.

    Many objects of a folder take one list of it, a request for each thousand that it holds.
    """
    folders: dict[str, list[str]] = {}
    for path in [os.fspath(path) for path in paths]:
        folders.setdefault(path.rpartition("/")[0], []).append(path)
    few = [path for names in folders.values() if len(names) <= REQUESTS for path in names]
    many = [folder for folder, names in folders.items() if len(names) > REQUESTS]
    metadata = dict(zip(few, together(_find, few), strict=True))
    for folder, listed in zip(many, together(_list, many), strict=True):
        metadata |= {
            f"{folder}/{entry['path'].rpartition('/')[2]}": entry for entry in listed["objects"]
        }
    return [metadata.get(os.fspath(path)) for path in paths]


def _find(path: epath.PathLike) -> Mapping[str, Any] | None:
    with contextlib.suppress(FileNotFoundError):
        return head(path)
    return None


def _list(path: epath.PathLike) -> Any:
    """The objects and the folders of a folder."""
    return _request(path, lambda store, key: store.list_with_delimiter(key), in_bucket=True)


def children(path: epath.PathLike) -> tuple[dict[str, int], list[str]]:
    """The sizes of the objects in a folder, by name, and the names of the folders in it."""
    listing = _list(path)
    sizes = {entry["path"].rpartition("/")[2]: entry["size"] for entry in listing["objects"]}
    return sizes, [folder.rstrip("/").rpartition("/")[2] for folder in listing["common_prefixes"]]


def keys(path: epath.PathLike) -> list[str]:
    """The paths of all objects in a folder and in those within it."""
    entries = _request(path, lambda store, key: store.list(key or None).collect(), in_bucket=True)
    return [f"{split(path)[0]}/{entry['path']}" for entry in entries]


# ---- writing

# The beginnings of paths, and a function to call before an object there changes: the holder of the
# lock of a directory adds one.
guards: list[tuple[str, Callable[[], None]]] = []


def _guard(path: epath.PathLike) -> None:
    """Raises if this process has lost the lock of the object's directory."""
    name = os.fspath(path)
    for directory, check in [*guards]:
        if name.startswith(directory) and not name.endswith("/.lock"):
            check()


def put(
    path: epath.PathLike,
    content: Buffer,
    *,
    if_absent: bool = False,
    if_version: Version | None = None,
) -> Version | None:
    """Writes an object, whole or not at all; of concurrent conditional writes, one succeeds.

    Args:
        path: of the object.
        content: bytes, or a binary file, which is read from its start.
        if_absent: whether to write only if there is no such object.
        if_version: the version that the object must have, from `get_version` or `put`; None: any.

    Returns:
        Its version; None if the condition does not hold, and nothing is written.
    """
    file = content if hasattr(content, "read") else io.BytesIO(content)
    size = file.seek(0, os.SEEK_END)
    conditional = if_absent or if_version is not None
    mode = "create" if if_absent else dict(if_version) if if_version else "overwrite"
    pieces = {"use_multipart": size > 2 * PIECE and not conditional, "chunk_size": 2 * PIECE}

    def write(store: Any, key: str) -> Version | None:
        _guard(path)
        file.seek(0)
        try:
            return _version(store.put(key, file, mode=mode, **pieces))
        except _error() as error:
            if type(error).__name__ not in ("AlreadyExistsError", "PreconditionError"):
                raise
            file.seek(0)
            with contextlib.suppress(FileNotFoundError):  # an earlier attempt may have succeeded
                result = store.get(key)
                if result.meta["size"] == size and result.bytes() == file.read():
                    return _version(result.meta)
            return None

    return _request(path, write, in_bucket=True)


def _version(meta: Mapping[str, Any]) -> Version:
    return {name: meta[name] for name in ("e_tag", "version") if meta[name]}


def delete(paths: Sequence[epath.PathLike]) -> None:
    """Deletes objects, in this order; missing objects count as deleted."""

    def remove(store: Any, key: str) -> None:
        _guard(path)
        store.delete(key)

    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            _request(path, remove)


def was_written(path: epath.PathLike) -> Exists:
    """The error of a process that writes a file once after another has written it."""
    return Exists(f"{os.fspath(path)} exists already: another process wrote it meanwhile")


# ---- paths and open files


class ObjectPath(PosixGPath):
    """A path of object storage with the methods of `etils.epath.Path`, except those that rename.

    Object storage has no directories: one exists while there are objects whose keys begin with its
    name. So `mkdir` does nothing, and an empty directory does not exist. A file that is open for
    writing becomes the object when it is closed; if the block raises, the old object stays. Files
    cannot be appended to.
    """

    def exists(self) -> bool:
        """Whether it is an object, or a directory with objects."""
        return self.is_file() or self.is_dir()

    def is_file(self) -> bool:
        """Whether it is an object."""
        return bool(split(self)[1]) and _find(self) is not None

    def is_dir(self) -> bool:
        """Whether there are objects in it, or it is a bucket."""

        def first(store: Any, key: str) -> list[Any]:
            return next(iter(store.list(key or None, chunk_size=1)), [])

        return bool(_request(self, first, in_bucket=True)) or not split(self)[1]

    def iterdir(self) -> "Iterator[ObjectPath]":
        """The objects and directories in it."""
        objects, folders = children(self)
        return iter([self / name for name in (*folders, *objects)])

    def glob(self, pattern: str) -> "Iterator[ObjectPath]":
        """Objects and directories whose paths match; as in a shell, `*` omits hidden ones."""
        if "**" in pattern:
            raise InvalidValue(f"{pattern} has **, which does not work in object storage; use *")
        first, _, rest = pattern.partition("/")
        objects, folders = children(self)
        for name in folders if rest else (*folders, *objects):
            hidden = name[0] == "." != first[0]
            if fnmatch.fnmatchcase(name, first) and not hidden:
                yield from (self / name).glob(rest) if rest else [self / name]

    def stat(self) -> StatResult:
        """The size in bytes and the time of the last change; for a directory, zeros."""
        try:
            seen = head(self)
            size, changed = seen["size"], int(seen["last_modified"].timestamp())
        except FileNotFoundError:
            if not self.is_dir():
                raise
            size = changed = None
        about = {"owner": None, "group": None, "mode": None}
        return StatResult(is_directory=size is None, length=size or 0, mtime=changed or 0, **about)

    def open(
        self, mode: str = "r", *, encoding: str | None = None, once: bool = False, **options: Any
    ) -> Any:
        """A file to read (`r`, `rb`) or to write (`w`, `wb`); see `atomic_write` for `once`."""
        if mode.replace("b", "") not in ("r", "w") or any(options.values()):
            raise InvalidValue(f"mode is {mode!r}; objects can be read or written, not appended to")
        encoding = None if "b" in mode else encoding or "utf-8"
        if mode[0] == "w":
            return _Writer(self, encoding, once)
        file = io.BufferedReader(_Reader(self))
        return io.TextIOWrapper(file, encoding) if encoding else file

    def read_bytes(self) -> bytes:
        """Its content."""
        return get(self)

    def mkdir(self, mode: int | None = None, parents: bool = False, exist_ok: bool = False) -> None:
        """Does nothing, or raises a `FileExistsError` for a path that must not exist."""
        del mode, parents
        if not exist_ok and self.exists():
            raise Exists(f"{self} exists")

    def rmtree(self, missing_ok: bool = False) -> None:
        """Deletes all objects in it."""
        paths = keys(self)
        if not paths and not missing_ok:
            raise Missing(f"there is nothing in {self}")
        delete(paths)

    def unlink(self, missing_ok: bool = False) -> None:
        """Deletes the object."""
        if not missing_ok:
            head(self)
        delete([self])


class _Reader(io.RawIOBase):
    """obstore's reader of an object, with errors that are sentences."""

    def __init__(self, path: ObjectPath):
        import obstore

        self._path = path
        self._file = _request(path, lambda *at: obstore.open_reader(*at, buffer_size=READ))

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self._file.seek(offset, whence)

    def readinto(self, buffer: Any) -> int:
        with _told(self._path):
            content = self._file.read(len(buffer))
        buffer[: len(content)] = content
        return len(content)


class _Writer(tempfile.SpooledTemporaryFile):
    """A file that becomes an object when it is closed, but not after an error."""

    def __init__(self, path: ObjectPath, encoding: str | None, once: bool):
        super().__init__(WRITTEN, "w+" if encoding else "w+b", encoding=encoding)
        self._path, self._once = path, once

    def close(self) -> None:
        if not self.closed:
            try:
                self.flush()
                content = getattr(self._file, "buffer", self)  # the bytes of text
                if put(self._path, content, if_absent=self._once) is None:
                    raise was_written(self._path)
            finally:
                self.discard()

    def discard(self) -> None:
        """Closes the file, and writes nothing."""
        super().close()

    def __exit__(self, kind: Any, *_: object) -> None:
        self.close() if kind is None else self.discard()

    def __del__(self) -> None:  # which would write it
        self.discard()
