"""Files that are whole or absent, and work that one process does while the others wait."""

import contextlib
import errno
import fcntl
import io
import logging
import os
import pathlib
import re
import time
import uuid
from collections.abc import Callable, Iterator
from typing import IO, Any

from etils import epath

from pipeline.errors import InvalidState, InvalidType, InvalidValue, StorageError
from pipeline.fs.lease import hold_lease
from pipeline.fs.objects import SCHEMES, ObjectPath, was_written

logger = logging.getLogger(__name__)

FULL = errno.ENOSPC, errno.EDQUOT, errno.EFBIG
# Errors of network file systems on which names cannot be synced.
UNABLE = errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF
# Errors of file systems without hard links, as of buckets that are mounted, and of SMB; and the
# seconds after which a turn to rename counts as left by a killed process.
NO_LINKS = errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK
TURN = 30.0


def is_local(path: epath.PathLike) -> bool:
    """Whether `path` is on a file system of this machine (`gs://…` and the like are not)."""
    return "://" not in os.fspath(path)


def absolute(path: epath.PathLike) -> str:
    """The whole path of a local file or directory; one in object storage is whole."""
    return os.path.abspath(path) if is_local(path) else os.fspath(path)


def as_path(path: epath.PathLike) -> epath.Path:
    """A path that a user gave: local, with `~` expanded, or of object storage."""
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise InvalidType(f"{path!r:.80} is not a path; give that of a directory or a file")
    if os.fspath(path).startswith(SCHEMES):
        return ObjectPath(path)
    try:
        return epath.Path(path).expanduser()
    except KeyError as error:
        raise InvalidValue(
            f"{os.fspath(path)} is on no storage that Lockstep knows; give a local path, or one "
            f"that begins with {', '.join(SCHEMES[:-1])} or {SCHEMES[-1]}"
        ) from error


def make_directory(path: epath.PathLike) -> epath.Path:
    """Makes a directory and its parents, unless they exist; returns its path.

    Their names reach the disk itself, so that a loss of power does not take what is in them. That
    of the last one that exists may not be there yet: who made it may have been killed.
    """
    path = as_path(path)
    if not is_local(path):
        return path
    missing = [folder for folder in (path, *path.parents) if not folder.exists()][::-1]
    existing = missing[0].parent if missing else path
    with _name_errors(path):
        existing.mkdir(exist_ok=True)  # which refuses a file
        with contextlib.suppress(PermissionError):  # of a directory of others
            _sync_directory(existing.parent)
        for folder in missing:
            folder.mkdir(exist_ok=True)
            _sync_directory(folder.parent)
    return path


def _sync_directory(path: epath.Path) -> None:
    """Returns when the names of the files in a directory are on the disk itself."""
    directory = os.open(path, os.O_RDONLY)
    try:
        os.fsync(directory)
    except OSError as error:
        if error.errno not in UNABLE:
            raise StorageError(
                error.errno,
                f"names in {os.fspath(path)} may not survive a loss of power: {error.strerror}; "
                "make room or check the disk, and run again",
            ) from error
    finally:
        os.close(directory)


def list_folder(folder: epath.Path) -> list[epath.Path]:
    """What is in a folder, which another process may remove; nothing if it does not exist."""
    with contextlib.suppress(FileNotFoundError):
        return [*folder.iterdir()]
    return []


def remove_files(folder: epath.Path, names: re.Pattern[str]) -> None:
    """Removes the files with such names, and the folder if it then is empty."""
    for path in list_folder(folder):
        if names.fullmatch(path.name):
            path.unlink(missing_ok=True)
    if is_local(folder):
        with contextlib.suppress(OSError):
            os.rmdir(folder)  # that of epath also removes what came after it looked


@contextlib.contextmanager
def atomic_write(path: epath.PathLike, *, once: bool = False) -> Iterator[IO[bytes]]:
    """A binary file to write, which appears under its name only when it is whole.

    Bytes go to a temporary file beside it, `.NAME.DIGITS.tmp`, and reach the disk itself before the
    file is renamed, so that it is whole even after a loss of power. If the block raises, nothing is
    left; the temporary file of a killed process stays. In object storage, the object is written
    when the block ends.

    Args:
        path: the file.
        once: whether an existing file is an error. If several processes create a file at the same
            time, one succeeds.

    Raises:
        FileExistsError: with `once`, the file is there.
        StorageError: the disk is full or cannot be written; the message names the file. Other
            errors of the block stay what they are.
    """
    path = as_path(path)
    if isinstance(path, ObjectPath):
        with path.open("wb", once=once) as content:
            yield content
        return
    temporary = path.parent / f".{path.name}.{uuid.uuid4().hex}.tmp"
    try:
        raw = _Temporary(path, temporary)
        with io.BufferedWriter(raw) as file:
            yield file
            file.flush()
            raw.sync()
        if once:
            _link(temporary, path)
        else:
            with _name_errors(path):
                temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    _sync_directory(path.parent)


def _link(temporary: epath.Path, path: epath.Path) -> None:
    """Gives a file its name, unless that is taken."""
    try:
        os.link(temporary, path)
        temporary.unlink()
    except OSError as error:
        # Who wrote it may also have removed this one's temporary file, as a leftover.
        if isinstance(error, FileExistsError | FileNotFoundError) and path.exists():
            raise was_written(path) from None
        if error.errno not in NO_LINKS:
            raise _write_error(path, error) from error
        _rename_once(temporary, path)


def _rename_once(temporary: epath.Path, path: epath.Path) -> None:
    """Gives a file its name, unless that is taken, where there are no hard links.

    A folder beside it gives one process its turn: any file system makes a folder once, a mounted
    bucket as well, for processes of all machines. A turn takes as long as a rename.
    """
    turn, begin = path.parent / f".{path.name}.turn", time.monotonic()
    while not path.exists():
        try:
            os.mkdir(turn)
        except FileExistsError:
            if time.monotonic() - begin > TURN:  # it is of a killed process
                with contextlib.suppress(OSError):
                    os.rmdir(turn)
                begin = time.monotonic()
            time.sleep(0.01)
            continue
        except OSError as error:
            raise _write_error(path, error) from error
        try:
            if not path.exists():  # nobody did it before this turn
                with _name_errors(path):
                    temporary.replace(path)
                return
        finally:
            with contextlib.suppress(OSError):
                os.rmdir(turn)
    raise was_written(path)


class _Temporary(io.FileIO):
    """A file to write under a temporary name, whose errors name the file that it becomes."""

    def __init__(self, path: epath.Path, temporary: epath.Path):
        self._path = path
        with _name_errors(path):
            super().__init__(os.fspath(temporary), "wb")

    def write(self, data: Any) -> int:
        with _name_errors(self._path):
            return super().write(data)

    def fileno(self) -> int:  # by which NumPy would write past `write`
        raise io.UnsupportedOperation

    def sync(self) -> None:
        """Returns when the bytes are on the disk itself."""
        with _name_errors(self._path):
            os.fsync(super().fileno())


@contextlib.contextmanager
def _name_errors(path: epath.PathLike) -> Iterator[None]:
    """Turns the error of a file operation inside the block into one that names `path`."""
    try:
        yield
    except OSError as error:
        raise _write_error(path, error) from error


@contextlib.contextmanager
def name_full_disk(path: epath.PathLike) -> Iterator[None]:
    """Names `path` if an error of a library, of any type, says that the disk is full."""
    try:
        yield
    except Exception as error:
        for number in FULL:
            if os.strerror(number) in str(error):
                raise _write_error(path, OSError(number, os.strerror(number))) from error
        raise


def _write_error(path: epath.PathLike, error: OSError) -> OSError:
    remedy = "check the path, and that you may write there, and run again"
    if error.errno in FULL:
        remedy = "make room and run again, which keeps finished work"
    elif error.errno in (errno.EACCES, errno.EPERM):
        parents = pathlib.Path(path).absolute().parents
        folder = next(parent for parent in parents if os.path.exists(parent))
        owner = f"user {folder.stat().st_uid} owns {folder}, and you are user {os.getuid()}"
        remedy = f"{owner}: ask for permission to write there, or give another directory"
    what = f"could not write {os.fspath(path)}: {error.strerror or error}. Nothing of it is left"
    return StorageError(error.errno, f"{what}; {remedy}")


def remove_leftovers(folder: epath.Path, names: re.Pattern[str]) -> None:
    """Removes local temporary files with such names; only a late process may be writing one."""
    for left in list_folder(folder) if is_local(folder) else ():
        if names.fullmatch(left.name):
            with contextlib.suppress(OSError):  # the folder may be read-only
                left.unlink(missing_ok=True)


@contextlib.contextmanager
def directory_lock(directory: epath.PathLike, doing: str, *, wait: bool = True) -> Iterator[None]:
    """Holds the lock of `directory` while the block runs; other processes wait, and log that.

    The lock ends with the process that holds it, even if that is killed; in object storage, within
    a minute (see `hold_lease`).

    Args:
        directory: a path; the directory is made if it does not exist.
        doing: the work in words, for the processes that wait.
        wait: whether to wait for a process that holds the lock, or to raise.

    Raises:
        RuntimeError: another process holds the lock, and `wait` is False.
        ValueError: the lock file is a symbolic link.
    """
    directory = make_directory(directory)
    if isinstance(directory, ObjectPath):
        with hold_lease(directory, doing, wait=wait):
            yield
        return
    lock = directory / ".lock"
    try:
        file = open_locked(lock, wait=False)
    except BlockingIOError:
        said = f"another process is {doing} in {os.fspath(directory)}"
        if not wait:
            raise InvalidState(f"{said}; stop it first, or use another directory") from None
        logger.warning("%s; waiting for it", said)
        file = open_locked(lock)
    with file:
        yield


def write_once(path: epath.Path, doing: str, write: Callable[[IO[bytes]], object]) -> epath.Path:
    """A file that `write` makes, if it is missing; one process does, and others wait."""
    if not path.exists():
        with directory_lock(path.parent, doing):
            if not path.exists():
                with atomic_write(path) as file:
                    write(file)
    return path


def open_locked(path: epath.PathLike, *, wait: bool = True) -> IO[bytes]:
    """A local file to write, which this process alone has locked until it closes it.

    The file is made if it does not exist. It is not truncated, nor followed if it is a link, since
    it may be anybody's. Without `wait`, a `BlockingIOError` means that another process has locked
    it.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        file = os.fdopen(os.open(os.fspath(path), flags, 0o666), "wb")
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise _write_error(path, error) from error
        raise InvalidValue(
            f"{os.fspath(path)} is a symbolic link; remove it, so that Lockstep can make a lock"
        ) from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        file.close()
        raise
    return file
