"""PartCache: parts of a corpus on the local disk, fetched before batches need them.

A plan knows every future read. So the part that is needed first is fetched first, and when there is
no room, the part that is needed last is evicted (Belády, 1966, whose rule fetches the fewest
bytes). A part that is read before it is there is fetched at once, while the reader waits.

All processes of a machine share the directory. Each fetches what it needs itself, and evicts no
part that another process, anywhere, needs as soon as the one it fetches. A process fetches a part
into a locked temporary file of its full size, and renames it when it is complete. So the sizes of
all files add up to the space used, and a killed process leaves nothing that is taken for a part.
"""

import contextlib
import functools
import logging
import os
import pathlib
import re
import shutil
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import numpy as np
from etils import epath

from pipeline.corpus.stored.manifest import Manifest, open_part
from pipeline.corpus.stored.memory import PartStore
from pipeline.corpus.stored.parts import PartFile, PartTable
from pipeline.corpus.stored.reader import LocalParts
from pipeline.errors import InvalidValue, Missing, UserError
from pipeline.fs import objects
from pipeline.fs.atomic import atomic_write, is_local, make_directory, open_locked, write_once
from pipeline.fs.fork import Handles
from pipeline.planning.identity import fingerprint_of
from pipeline.text.files import read_stamps

logger = logging.getLogger(__name__)

# The number of parts fetched at once; a large part takes many requests at once.
FETCHES = 4
# Seconds between looks at what the plan needs, and before a failed fetch is tried again.
PAUSE, AFTER_FAILURE = 0.1, 10.0
# The name of a part that is being fetched, and a pattern for the name of the part in it.
FETCHING = ".{}.fetching"
NAMES = re.compile(r"(part-[-\d]+\.arrow)|\.(part-[-\d]+\.arrow)\.fetching")
LOCK = ".lock"
# When a part is needed: at once, or by no window.
NOW, NEVER = -1, 1 << 40
# The most bytes of the parts of a corpus in its cache, by default.
MAX_BYTES = 20_000_000_000

T = TypeVar("T")


class Needs(NamedTuple):
    """The parts needed from now on, an array for each window."""

    here: Sequence[np.ndarray]  # by this process
    anywhere: Sequence[np.ndarray]  # by all processes, which may share the directory

    @classmethod
    def of(cls, windows: Sequence[np.ndarray]) -> "Needs":
        """Parts that every process needs."""
        return cls(windows, windows)


# Returns what is needed; None once nothing is.
Demand = Callable[[], Needs | None]


@functools.cache
def default_directory() -> pathlib.Path:
    """The directory `lockstep` in that of the user's caches; the log says so once."""
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    directory = pathlib.Path(caches).expanduser() / "lockstep"
    logger.info(
        "parts of corpora in object storage are kept in %s, up to %s bytes of each corpus "
        "(cache=, cache_bytes=)",
        *(directory, f"{MAX_BYTES:,}"),
    )
    return directory


def path_of(key: Any, name: str) -> epath.Path:
    """The path of the file `name` that belongs to a key, any JSON, in the user's caches."""
    return epath.Path(default_directory() / "files" / fingerprint_of(key)[:12] / name)


def local_copy(path: epath.Path) -> epath.Path:
    """A local file with the content of `path`: an object is copied into the user's caches, once.

    The copy belongs to the size and the entity tag that the object has now.
    """
    if is_local(path):
        return path
    (stamp,) = read_stamps([path])
    if not any(stamp):
        raise Missing(f"there is no object {os.fspath(path)}; check the path")
    copy = path_of([os.fspath(path), *stamp], path.name)
    return write_once(
        copy, "copying", lambda file: file.writelines(objects.read_pieces(path, stamp[0]))
    )


class PartCache(Handles, PartStore):
    """Parts of a corpus in a local directory, of up to `max_bytes` together.

    None: `MAX_BYTES`, or less if the disk has no room for them.

    Attributes:
        source: the directory of the corpus.
        directory: the local directory, of this corpus alone.
        evictions: how often files were removed that may have been opened.
        traffic: the cost of reading so far, in this process: the bytes `fetched`; `stalls`, which
            are reads that waited, and the seconds that they `waited`.
    """

    handles = ("_demands", "_threads")

    @classmethod
    def find(
        cls,
        source: epath.Path,
        manifest: Manifest,
        cache: pathlib.Path | None,
        max_bytes: int | None,
    ) -> "PartCache | LocalParts":
        """The parts of a manifest: in the directory of their digest in `cache`.

        Without a cache, the parts where they are.
        """
        if cache is None:
            return LocalParts(source, manifest.parts)
        return cls(source, manifest.parts, cache / manifest.digest, max_bytes)

    def __init__(
        self,
        source: epath.Path,
        parts: PartTable,
        directory: pathlib.Path,
        max_bytes: int | None = None,
    ):
        self.source, self.directory, self._parts = source, directory, parts
        self.num_parts = len(parts)
        make_directory(directory)
        self._sizes, self._names = parts.numbers("bytes"), parts.strings("file")
        self._numbers = {name: number for number, name in enumerate(self._names)}
        present, _ = self._scan()
        if max_bytes is None:
            free = shutil.disk_usage(directory).free
            max_bytes = min(MAX_BYTES, sum(present.values()) + free // 2)
        if max_bytes < min(2 * self._sizes.max(), self._sizes.sum()):
            raise InvalidValue(
                f"cache_bytes is {max_bytes:,}, but a part of {os.fspath(source)} has up to "
                f"{self._sizes.max():,} bytes; give room for two parts, or better for the files of "
                "two windows of the plan"
            )
        self.max_bytes = max_bytes
        super().__init__()

    def restart(self) -> None:
        """See `Handles`."""
        super().restart()
        self.traffic: defaultdict[str, float] = defaultdict(float)
        self.evictions = 0
        self._seen: set[str] = set()  # the parts that were there at the last look
        self._needed = np.full(self.num_parts, NEVER)
        self._demands: list[Demand] = []
        self._threads = 0
        self._logged: set[str] = set()

    @property
    def caches(self) -> tuple[tuple["PartCache", int], ...]:
        """See `PartStore`."""
        return ((self, 0),)

    def read_copy(self, name: str, read: Callable[[epath.Path], T]) -> T:
        """The result of `read` on a local copy of another file, outside of `max_bytes`."""
        path, source = epath.Path(self.directory / name), self.source / name
        with contextlib.suppress(OSError, ValueError):  # missing or damaged
            return read(path)
        with source.open("rb") as remote, atomic_write(path) as file:
            shutil.copyfileobj(remote, file, 1 << 26)
        try:
            return read(path)
        except InvalidValue as error:
            raise InvalidValue(str(error).replace(os.fspath(path), os.fspath(source))) from error

    def open(self, numbers: Sequence[int]) -> list[PartFile]:
        """The files of these parts, whose digests are right; waits for those that are not there."""
        files = {number: self._verify(number) for number in numbers}
        if missing := [number for number, file in files.items() if file is None]:
            begin = time.perf_counter()
            with ThreadPoolExecutor(FETCHES) as pool:
                files |= zip(missing, pool.map(self._wait, missing), strict=True)
            self.count(stalls=1, waited=time.perf_counter() - begin)
        return [file for file in files.values() if file is not None]

    def has(self, number: int) -> bool:
        """Whether a part is there."""
        return self._path(number).is_file()

    def _path(self, number: int) -> pathlib.Path:
        return self.directory / self._names[number]

    def _wait(self, number: int) -> PartFile:
        """A part that is fetched, by this thread unless another one does."""
        while True:
            needed = self._needed.copy()
            needed[number] = NOW
            file = self._verify(number, self._fetch([number], needed))
            if file is not None:
                return file
            time.sleep(PAUSE)

    def _open_local(self, number: int) -> PartFile | None:
        """A part, mapped, if it is there."""
        if not self._path(number).is_file():
            return None
        return open_part(epath.Path(self.directory), self._parts[number])

    def _verify(self, number: int, file: PartFile | None = None) -> PartFile | None:
        """A part whose digest is right; None if it is not there. A damaged one is removed.

        `file` is that part, if it is mapped already.
        """
        try:
            if file := file or self._open_local(number):
                file.verify()
            return file
        except ValueError as error:
            # If it is damaged there, too, it would be fetched forever.
            open_part(self.source, self._parts[number], verify=True)
            path = self._path(number)
            logger.warning("%s is removed and fetched again: %s", path, error)
            path.unlink(missing_ok=True)
            return None

    def count(self, **more: float) -> None:
        """Adds to entries of `traffic`."""
        with self._lock:
            for name, number in more.items():
                self.traffic[name] += number

    def follow(self, demand: Demand) -> None:
        """Fetches the parts that `demand` returns, in the background, until it returns None."""
        with self._lock:
            self._demands.append(demand)
            missing, self._threads = FETCHES - self._threads, FETCHES
        for _ in range(missing):
            threading.Thread(target=self._work, name="part-cache", daemon=True).start()

    # ---- in the background

    def _work(self) -> None:
        while (needs := self._ask()) is not None:
            needed_here, self._needed = needs
            try:
                self._tell(needed_here)
                order = np.argsort(needed_here, kind="stable")
                wanted = order[: np.count_nonzero(needed_here < NEVER)].tolist()
                if not self._fetch(wanted, self._needed):
                    time.sleep(PAUSE)
            except Exception as error:
                self._log_failure(error)
                time.sleep(AFTER_FAILURE)

    def _ask(self) -> list[np.ndarray] | None:
        """For each part the window that needs it first, or `NEVER`; None ends the thread.

        Needed here, and anywhere.
        """
        answers = [(demand, self._call(demand)) for demand in list(self._demands)]
        with self._lock:
            over = [demand for demand, needs in answers if needs is None]
            self._demands = [demand for demand in self._demands if demand not in over]
            if not self._demands:
                self._threads -= 1
                return None
        first = [np.full(self.num_parts, NEVER) for _ in Needs._fields]
        for _, needs in answers:
            for needed, windows in zip(first, needs or (), strict=False):
                for window, numbers in enumerate(windows):
                    needed[numbers] = np.minimum(needed[numbers], window)
        return first

    def _call(self, demand: Demand) -> Needs | None:
        """What a demand returns; nothing while it fails, so that later parts are fetched again."""
        try:
            return demand()
        except Exception as error:
            self._log_failure(error)
            return Needs.of(())

    def _is_new(self, text: str) -> bool:
        """Whether no thread has asked for this text before, so that each is logged once."""
        with self._lock:
            new = text not in self._logged
            self._logged.add(text)
            return new

    def _log_failure(self, error: Exception) -> None:
        """Logs a failure, once."""
        if self._is_new(str(error)):
            logger.warning(
                "fetching from %s into %s failed, and is tried again every %d s: %s",
                *(os.fspath(self.source), self.directory, AFTER_FAILURE, error),
                exc_info=not isinstance(error, OSError | UserError),
            )

    def _tell(self, needed: np.ndarray) -> None:
        """Logs that the first window has no room, once."""
        size = int(self._sizes[needed == 0].sum())
        if size > self.max_bytes and self._is_new("no room"):
            logger.warning(
                "the files of a window of %s have %s bytes, but %s has room for %s, so they are "
                "fetched again and again; raise cache_bytes, or give the plan a smaller window=",
                *(os.fspath(self.source), f"{size:,}", self.directory, f"{self.max_bytes:,}"),
            )

    def _fetch(self, wanted: Sequence[int], needed: np.ndarray) -> PartFile | None:
        """Fetches the first of the parts `wanted` that is not there; returns its file.

        None: all are there or are being fetched, or there is no room for that part yet.
        """
        with open_locked(self.directory / LOCK):
            present, fetching = self._scan()
            for other in [*fetching]:  # what a killed process left has no lock
                with contextlib.suppress(BlockingIOError):
                    with open_locked(self._fetching(other), wait=False):
                        self._fetching(other).unlink()
                    del fetching[other]
            self._note({*present})
            names = ((number, self._names[number]) for number in wanted)
            new = ((n, name) for n, name in names if name not in present and name not in fetching)
            if (first := next(new, None)) is None:
                return None
            number, name = first
            if not self._make_room(number, needed, present, sum(fetching.values())):
                return None
            temporary, size = self._fetching(name), int(self._sizes[number])
            file = open_locked(temporary)
            file.truncate(size)
        with file:
            objects.download(self.source / name, temporary, size=size)
            os.fsync(file.fileno())
            # So that no other process sees both names, or neither.
            with open_locked(self.directory / LOCK):
                temporary.replace(self.directory / name)
                self._seen.add(name)
                part = self._open_local(number)  # before another process can evict it
        self.count(fetched=size)
        return part

    def _note(self, present: set[str]) -> None:
        """Counts evictions by any process: files that were there at the last look, and are not."""
        if self._seen - present:
            self.evictions += 1
        self._seen = present

    def _fetching(self, name: str) -> pathlib.Path:
        """The path of a part while it is being fetched."""
        return self.directory / FETCHING.format(name)

    def _make_room(
        self, number: int, needed: np.ndarray, present: dict[str, int], reserved: int
    ) -> bool:
        """Evicts parts until part `number` has room; returns False, and evicts none, if that fails.

        `reserved` is the size of the parts that are being fetched.
        """
        room = self.max_bytes - sum(present.values()) - reserved
        # Parts that the corpus does not have are needed by nobody.
        numbers = {name: self._numbers.get(name) for name in present}
        when = {name: NEVER if n is None else int(needed[n]) for name, n in numbers.items()}
        later = [name for name in present if when[name] > needed[number]]
        out = sorted(later, key=lambda name: (when[name], name), reverse=True)
        sizes = np.cumsum([0, *(present[name] for name in out)])
        if room + sizes[-1] < self._sizes[number]:
            return False
        out = out[: int(np.searchsorted(sizes, self._sizes[number] - room))]
        for name in out:
            (self.directory / name).unlink(missing_ok=True)
        self._note({*present} - {*out})
        return True

    def _scan(self) -> tuple[dict[str, int], dict[str, int]]:
        """The file sizes of complete parts, and of those that are being fetched, by name."""
        complete: dict[str, int] = {}
        reserved: dict[str, int] = {}
        for entry in os.scandir(self.directory):
            if named := NAMES.fullmatch(entry.name):
                with contextlib.suppress(FileNotFoundError):
                    files = complete if named[1] else reserved
                    files[named[1] or named[2]] = entry.stat(follow_symlinks=False).st_size
        return complete, reserved
