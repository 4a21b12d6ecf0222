"""Sealed parts: the lengths of a corpus that grows, part by part, which are waited for."""

import collections
import logging
import os
import time
from typing import Any

import numpy as np
from etils import epath

from pipeline.corpus.growing import Growing
from pipeline.corpus.log import Entry, Log
from pipeline.errors import InvalidState, InvalidValue, Missing, NotSealed
from pipeline.fs.fork import Handles

logger = logging.getLogger(__name__)

# Seconds between two looks at the log: at first, and at most.
LOOK, SELDOM = 0.02, 2.0

# Entries that are kept; others are read again.
KEPT = 1 << 13


# By directory, why the writer in this process has stopped.
_failures: dict[str, BaseException] = {}


def fail_growing(directory: epath.PathLike, error: BaseException) -> None:
    """Says that the writer of a corpus has failed; who waits for it in this process ends."""
    _failures[os.fspath(directory)] = error


def _require_writer(directory: epath.PathLike) -> None:
    if (error := _failures.pop(os.fspath(directory), None)) is not None:
        raise error


def open_growing(directory: epath.PathLike, wait_seconds: float | None = None) -> Growing:
    """The corpus that grows in `directory`, once something is sealed there.

    Raises:
        NotSealed: nothing is, after so many seconds.
    """
    begin, look, said = time.monotonic(), LOOK, False
    while True:
        try:
            return Growing(directory)
        except Missing as error:
            if not said:
                said = True
                logger.info(f"waiting for a first part in {os.fspath(directory)} to be sealed")
            if wait_seconds is not None and time.monotonic() - begin >= wait_seconds:
                raise NotSealed(f"{error} (waited {wait_seconds:g} s)") from error
        _require_writer(directory)
        time.sleep(look)
        look = min(1.5 * look, SELDOM)


class SealedParts(Handles):
    """The sealed parts of a corpus, as `pipeline.planning.FollowedPlan` asks for them.

    Any number of threads may ask. A part that is not yet sealed is waited for.

    Args:
        corpus: of `Corpus.open(directory, follow=True)`.
        wait_seconds: the longest wait for a part, in seconds; None: as long as it takes.

    Attributes:
        waiting: the number of the part that a thread waits for; None if none does.
    """

    handles = ("_log", "_entries", "_recent", "_closed", "waiting")

    def __init__(self, corpus: Growing, wait_seconds: float | None = None):
        if wait_seconds is not None and not wait_seconds >= 0:
            raise InvalidValue(
                f"wait_seconds is {wait_seconds!r}; it must be a number of seconds from 0 up, or "
                "None to wait as long as it takes"
            )
        self.corpus, self.wait_seconds = corpus, wait_seconds
        self.__setstate__({})

    def restart(self) -> None:
        """Reads the log anew; see `Handles`."""
        super().restart()
        self._log = Log(self.corpus.directory)
        self._entries: collections.OrderedDict[int, Entry] = collections.OrderedDict()
        # The ranges of parts that were held last.
        self._recent: collections.deque[range] = collections.deque(maxlen=2)
        self._closed = False
        self.waiting: int | None = None

    def lengths(self, number: int) -> np.ndarray | None:
        """See `pipeline.planning.growing.Parts`.

        Raises:
            NotSealed: no part was sealed within `wait_seconds`, or `close` was called.
        """
        entry = self._wait(number)
        if entry is None:
            return None
        with self._lock:
            return self._log.lengths(entry)

    def digest(self, number: int) -> str | None:
        """See `pipeline.planning.growing.Parts`."""
        if not number:
            return ""
        if (entry := self._find(number)[0]) is not None:
            return entry.before  # its writer may have deleted the part before
        entry = self._find(number - 1)[0]
        return None if entry is None else entry.after

    def whole(self) -> Any:
        """The finished corpus."""
        from pipeline.corpus.corpus import Corpus  # it opens corpora that grow

        return Corpus.open(self.corpus.directory, memory_map=self.corpus.in_memory)

    def hold(self, parts: range) -> None:
        """Lets the corpus read these parts, and those held before; it forgets older ones.

        Of a finished corpus, no parts stand for all of them.
        """
        if not parts:
            self._find(0)
            with self._lock:
                parts = range(self._log.entries(0)[-1].number + 1)
        with self._lock:
            if any(parts.start == each.start and parts.stop <= each.stop for each in self._recent):
                return
            others = [each for each in self._recent if each.start != parts.start]
            self._recent.clear()
            self._recent.extend([*others, parts])
            begin = min(each.start for each in self._recent)
            end = max(each.stop for each in self._recent)
            if any(each.stop < parts.start or parts.stop < each.start for each in others):
                self._recent.clear()
                self._recent.append(parts)
                begin, end = parts.start, parts.stop
        found = [self._find(number)[0] for number in range(begin, end)]
        self.corpus.hold([entry for entry in found if entry is not None])

    def keep(self, reader: str, number: int) -> None:
        """Says that a reader needs the parts from a number on: its writer keeps them."""
        with self._lock:
            self._log.hold(reader, number)

    def hold_one(self) -> None:
        """Lets the corpus read one part, if it reads none yet, so that it knows its columns."""
        if self.corpus.entries:
            return
        with self._lock:
            entry = self._log.tail()
        if entry is None:
            entry = self._wait(0)
        if entry is not None:
            self.corpus.hold([entry])

    def close(self) -> None:
        """Ends the wait of all threads, with an error there."""
        self._closed = True

    def open(self) -> None:
        """Lets threads wait again."""
        self._closed = False

    def _find(self, number: int) -> tuple[Entry | None, bool]:
        """A part, if it is sealed, and whether the corpus is finished."""
        with self._lock:
            if (entry := self._entries.get(number)) is not None:
                return entry, False
            finished = self._log.finished
            last = next(reversed(self._entries), -1)
            found = self._log.entries(last + 1 if number == last + 1 else number)
            if found and found[0].number != last + 1:
                self._entries.clear()
            for each in found:
                self._entries[each.number] = each
            while len(self._entries) > KEPT and next(iter(self._entries)) < number:
                self._entries.popitem(last=False)
            return self._entries.get(number), finished

    def _wait(self, number: int) -> Entry | None:
        """A part, once it is sealed; None if the corpus is finished without it."""
        begin, look, said = time.monotonic(), LOOK, False
        try:
            while True:
                entry, finished = self._find(number)
                if entry is not None or finished:
                    return entry
                self.waiting = number
                _require_writer(self.corpus.directory)
                waited = time.monotonic() - begin
                if waited > 1 and not said:
                    said = True
                    logger.info(f"waiting for part {number:,} of {self.corpus!r} to be sealed")
                if self.wait_seconds is not None and waited >= self.wait_seconds:
                    raise NotSealed(
                        f"no part was added to {self.corpus!r} for {self.wait_seconds:g} s "
                        f"(wait_seconds): it has {number:,}, and is not finished. Start its "
                        "writer again, or finish it, and continue from the last checkpoint"
                    )
                if self._closed:
                    raise InvalidState("the loader was closed while it waited for a part")
                left = look if self.wait_seconds is None else self.wait_seconds - waited
                time.sleep(min(look, max(left, LOOK)))
                look = min(1.5 * look, SELDOM)
        finally:
            self.waiting = None
