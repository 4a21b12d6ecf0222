"""PartCache: parts of a corpus on the local disk, fetched before batches need them.

A plan knows every future read. So the part that is needed first is fetched first, and when there is
no room, the part that is needed last is evicted (Belády, 1966, whose rule fetches the fewest
bytes). Parts that are not there yet are read by ranges; see `reader.Reader`.

All processes of a machine share the directory. One of them fetches a part into a locked temporary
file of its full size, and renames it when it is complete. So the sizes of all files add up to the
space used, and a killed process leaves nothing that is taken for a part.
"""

import contextlib
import logging
import os
import pathlib
import re
import shutil
import stat
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import IO, TypeVar

import numpy as np
from etils import epath

from pipeline.corpus.manifest import open_part
from pipeline.corpus.parts import Maps, Part, PartFile
from pipeline.errors import InvalidValue, UserError
from pipeline.fs import objects
from pipeline.fs.atomic import atomic_write, make_directory, open_locked
from pipeline.fs.fork import Handles

logger = logging.getLogger(__name__)

# The number of parts fetched at once; a large part takes many requests at once.
FETCHES = 4
# Seconds between looks at what the plan needs, and before a failed fetch is tried again.
PAUSE, AFTER_FAILURE = 0.1, 10.0
# The name of a part that is being fetched, and a pattern for the number in both names.
FETCHING = ".{}.fetching"
FETCHED = re.compile(r"\.(.*)\.fetching")
LOCK = ".lock"
NEVER = 1 << 40

T = TypeVar("T")

# Returns the parts needed from now on, an array for each window; None once none are.
Demand = Callable[[], Sequence[np.ndarray] | None]


class PartCache(Handles):
    """Parts of a corpus in a local directory, of up to `max_bytes` together.

    None: the bytes that are in the directory now, and half of those free on its disk.
    """

    handles = ("_files", "_maps", "_demands", "_threads")

    def __init__(
        self,
        source: epath.Path,
        parts: Sequence[Part],
        directory: pathlib.Path,
        max_bytes: int | None,
    ):
        self._source, self._parts, self.directory = source, parts, directory
        self.num_parts = len(parts)
        self._numbers = {part.file: number for number, part in enumerate(parts)}
        make_directory(directory)
        self._sizes = np.array([part.bytes for part in parts], np.int64)
        here, _ = self._scan()
        if max_bytes is None:
            max_bytes = sum(here.values()) + shutil.disk_usage(directory).free // 2
        if max_bytes < min(2 * self._sizes.max(), self._sizes.sum()):
            raise InvalidValue(
                f"cache_bytes is {max_bytes:,}, but a part of {os.fspath(source)} has up to "
                f"{self._sizes.max():,} bytes; give room for two parts, or better for the files of "
                "two windows of the plan"
            )
        self.max_bytes = max_bytes
        self.__setstate__({})

    def restart(self) -> None:
        """See `Handles`."""
        super().restart()
        # The cost of reading so far, in this process: bytes `fetched` as whole parts, and `ranged`
        # before these are there; `hits` and `misses` of pieces; `stalls`, which are reads that
        # waited, and the seconds that they `waited`.
        self.traffic: defaultdict[str, float] = defaultdict(float)
        self._files: dict[int, PartFile] = {}
        self._maps: Maps | None = None  # of `_files`, until these change
        self._demands: list[Demand] = []
        self._threads, self._told = 0, 0
        self._failures: set[str] = set()

    def read_copy(self, name: str, read: Callable[[epath.Path], T]) -> T:
        """The result of `read` on a local copy of another file, outside of `max_bytes`."""
        path, source = epath.Path(self.directory / name), self._source / name
        with contextlib.suppress(OSError, ValueError):  # missing or damaged
            return read(path)
        with source.open("rb") as there, atomic_write(path, shared=True) as file:
            shutil.copyfileobj(there, file, 1 << 26)
        try:
            return read(path)
        except InvalidValue as error:
            raise InvalidValue(str(error).replace(os.fspath(path), os.fspath(source))) from error

    def maps(self, parts: np.ndarray) -> Maps:
        """The mapped parts, with those of `parts` that are in the cache."""
        for number in np.unique(parts).tolist():
            self.file(number)
        with self._lock:
            maps = self._maps = self._maps or Maps(dict(self._files), self._parts)
        hits = int(np.count_nonzero(maps.has[parts]))
        self.count(hits=hits, misses=len(parts) - hits)
        return maps

    def file(self, number: int) -> PartFile | None:
        """The part with this number, mapped if its digest is right; None if it is not there."""
        if (file := self._files.get(number)) is None:
            part = self._parts[number]
            path = self.directory / part.file
            if not path.is_file():
                return None
            try:
                file = open_part(epath.Path(self.directory), part, verify=True)
            except ValueError as error:
                open_part(self._source, part, verify=True)  # or it would be fetched damaged forever
                logger.warning("%s is removed and fetched again: %s", path, error.__cause__)
                path.unlink(missing_ok=True)
                return None
            with self._lock:
                self._files[number], self._maps = file, None
        return file

    def _unmap(self, numbers: Iterable[int]) -> None:
        """Forgets parts whose files are removed, so that their space on disk becomes free."""
        with self._lock:
            for number in numbers:
                if self._files.pop(number, None) is not None:
                    self._maps = None

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
        while (needed := self._ask()) is not None:
            try:
                if not self._fetch_next(needed):
                    time.sleep(PAUSE)
            except Exception as error:
                with self._lock:  # a failure is logged once, by one thread
                    new = str(error) not in self._failures
                    self._failures.add(str(error))
                if new:
                    logger.warning(
                        "fetching from %s into %s failed, and is tried again every %d s; until it "
                        "succeeds, batches read ranges: %s",
                        *(os.fspath(self._source), self.directory, AFTER_FAILURE, error),
                        exc_info=not isinstance(error, OSError | UserError),
                    )
                time.sleep(AFTER_FAILURE)

    def _ask(self) -> np.ndarray | None:
        """For each part the window that needs it first, or `NEVER`; None ends the thread."""
        said = [(demand, demand()) for demand in list(self._demands)]
        with self._lock:
            over = [demand for demand, windows in said if windows is None]
            self._demands = [demand for demand in self._demands if demand not in over]
            if not self._demands:
                self._threads -= 1
                return None
        needed = np.full(len(self._parts), NEVER)
        for _, windows in said:
            for place, numbers in enumerate(windows or ()):
                needed[numbers] = np.minimum(needed[numbers], place)
        return needed

    def _tell(self, needed: np.ndarray, here: dict[int, int]) -> None:
        """Logs that the first window is being fetched, that it is there, or that it has no room."""
        now = np.flatnonzero(needed == 0)
        size, missing = int(self._sizes[now].sum()), {*now.tolist()} - {*here}
        names = os.fspath(self._source), self.directory
        if size > self.max_bytes and not self._told:
            self._told = 2
            logger.warning(
                "the files of a window of %s have %s bytes, but %s has room for %s, so the rest is "
                "read by ranges, which is slower; raise cache_bytes, or give the plan a smaller "
                "window=",
                *(names[0], f"{size:,}", names[1], f"{self.max_bytes:,}"),
            )
        elif missing and not self._told:
            self._told = 1
            logger.info("batches read ranges of %s until a window of it is in %s", *names)
        elif not missing and self._told == 1:
            self._told = 2
            logger.info("a window of %s is in %s: %s bytes", *names, f"{size:,}")

    def _fetch_next(self, needed: np.ndarray) -> bool:
        """Fetches the part that is needed first; False if it has no room yet, or all are there."""
        with self._exclusively():
            here, fetching = self._scan()
            for other in [*fetching]:  # what a killed process left has no lock
                with contextlib.suppress(BlockingIOError):
                    with open_locked(self._fetching(other), wait=False):
                        self._fetching(other).unlink()
                    del fetching[other]
            self._tell(needed, here)
            self._unmap({*self._files} - {*here})  # those that another process has removed
            wanted = (
                number
                for number in np.argsort(needed, kind="stable").tolist()
                if needed[number] < NEVER and number not in here and number not in fetching
            )
            if (number := next(wanted, None)) is None:
                return False
            if not self._make_room(number, needed, here, sum(fetching.values())):
                return False
            name, size = self._parts[number].file, int(self._sizes[number])
            temporary = self._fetching(number)
            file = open_locked(temporary)
            try:
                if hasattr(os, "posix_fallocate"):  # not on macOS
                    os.posix_fallocate(file.fileno(), 0, size)
            except OSError:
                temporary.unlink()
                raise
        with file:
            objects.download(self._source / name, temporary, size=size)
            os.fsync(file.fileno())
            with self._exclusively():  # so that no other process sees both names, or neither
                temporary.replace(self.directory / name)
        self.count(fetched=size)
        return True

    def _exclusively(self) -> IO[bytes]:
        """The lock of the directory, released when it is closed, or with the process."""
        return open_locked(self.directory / LOCK)

    def _fetching(self, number: int) -> pathlib.Path:
        """The path of a part while it is being fetched."""
        return self.directory / FETCHING.format(self._parts[number].file)

    def _make_room(
        self, number: int, needed: np.ndarray, here: dict[int, int], reserved: int
    ) -> bool:
        """Evicts parts until part `number` has room; returns False, and evicts none, if that fails.

        `reserved` is the size of the parts that are being fetched.
        """
        room = self.max_bytes - sum(here.values()) - reserved
        later = [other for other in here if needed[other] > needed[number]]
        out = sorted(later, key=lambda other: (needed[other], other), reverse=True)
        sizes = np.cumsum([0, *(here[other] for other in out)])
        if room + sizes[-1] < self._sizes[number]:
            return False
        out = out[: int(np.searchsorted(sizes, self._sizes[number] - room))]
        for other in out:
            (self.directory / self._parts[other].file).unlink(missing_ok=True)
        self._unmap(out)
        return True

    def _scan(self) -> tuple[dict[int, int], dict[int, int]]:
        """The file sizes of complete parts, and of those that are being fetched.

        Refuses anything else that has the name of a part or of the lock: no fetch could succeed.
        """
        whole: dict[int, int] = {}
        reserved: dict[int, int] = {}
        for entry in os.scandir(self.directory):
            found = FETCHED.fullmatch(entry.name)
            number = self._numbers.get(found[1] if found else entry.name, self.num_parts)
            if number == self.num_parts and entry.name != LOCK:
                continue
            with contextlib.suppress(FileNotFoundError):
                about = entry.stat(follow_symlinks=False)
                if not stat.S_ISREG(about.st_mode):
                    raise InvalidValue(
                        f"{entry.path} is not a regular file, but has the name of a part of the "
                        "corpus or of the lock; remove it, or give another cache"
                    )
                if entry.name == LOCK:
                    continue
                files = reserved if entry.name.startswith(".") else whole
                files[number] = about.st_size
        return whole, reserved
