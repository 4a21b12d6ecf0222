"""Lease: the lock of a directory in object storage, which ends when its holder says no more."""

import contextlib
import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

from pipeline.errors import InvalidState
from pipeline.fs import objects

logger = logging.getLogger(__name__)

# Seconds between two signs of life of a holder, and after the last of which others take its place.
BEAT, SILENCE = 10.0, 45.0

_held: set[str] = set()  # the owners that are threads of this process


def is_running(pid: int) -> bool:
    """Whether a process of this machine has this number, be it of another user."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


@contextlib.contextmanager
def hold_lease(directory: objects.ObjectPath, doing: str, *, wait: bool = True) -> Iterator[None]:
    """Holds the lock of a directory while the block runs; other processes wait, and say so.

    The lock is the object `.lock`, whose holder writes it anew every ten seconds, and empty in the
    end. When it has not changed for 45 seconds, or its holder was a process of this machine that is
    gone, another process takes its place. Each writes it only if it is as it was read, so two
    processes never both hold it. A holder that was stopped for so long and goes on logs that it
    lost the lock. Arguments are those of `directory_lock`.
    """
    lease = _Lease(directory / ".lock")
    _held.add(lease.owner)
    try:
        lease.acquire(f"another process is {doing} in {directory}", wait)
        beats = threading.Thread(target=lease.renew, daemon=True)
        beats.start()
        try:
            yield
        finally:
            lease.ended.set()
            beats.join()
            lease.release()
    finally:
        _held.discard(lease.owner)


class _Lease:
    """An object that one process writes, and the version that it wrote last."""

    def __init__(self, path: objects.ObjectPath):
        self.owner, self.ended = uuid.uuid4().hex, threading.Event()
        self._path, self._beat = path, 0
        self._version: objects.Version | None = None

    def acquire(self, said: str, wait: bool) -> None:
        """Returns once the lock is held; `said` is what its holder does, in words."""
        seen, last = self._read(), {}
        since, told = time.monotonic(), False
        while True:
            # Nobody holds a lock that is absent or empty.
            if not seen or _is_gone(seen) or time.monotonic() - since > SILENCE:
                # An answer so late that others may have waited in vain is no answer.
                begun, held = time.monotonic(), self._write()
                while held and time.monotonic() - begun > SILENCE / 2:
                    begun, held = time.monotonic(), self._write()
                if held:
                    if seen:
                        logger.warning("%s no more: its lock is taken over", said)
                    return
            else:
                if not told:
                    told = True
                    logger.warning(
                        "%s; waiting for it, or until it says nothing for %g s", said, SILENCE
                    )
                time.sleep(BEAT / 10)
            seen, last = self._read(), seen
            if seen != last:
                if seen and seen["owner"] == last.get("owner") and not wait:
                    raise InvalidState(f"{said}; stop it first, or use another directory")
                since = time.monotonic()

    def renew(self) -> None:
        """Says that its holder lives, until it ends or another process has taken the lock over."""
        while not self.ended.wait(BEAT):
            try:
                if not self._write():
                    break
            except OSError as error:
                logger.warning("%s could not be written anew: %s", self._path, error)
        if not self.ended.is_set():
            logger.error("%s is lost: another process took it over; stop one of both", self._path)

    def release(self) -> None:
        """Makes the lock empty, if this process still holds it."""
        if self._version is not None:
            with contextlib.suppress(OSError):  # then it ends by itself
                objects.put(self._path, b"{}", if_version=self._version)

    def _write(self) -> bool:
        """Writes the lock; False if it is not as it was last read or written."""
        about = {"owner": self.owner, "host": socket.gethostname(), "pid": os.getpid()}
        # If this fails, the same is written the next time: it may have been heard.
        self._version = objects.put(
            self._path,
            json.dumps({**about, "beat": self._beat}).encode(),
            if_absent=self._version is None,
            if_version=self._version,
        )
        self._beat += 1
        return self._version is not None

    def _read(self) -> dict[str, Any]:
        try:
            content, self._version = objects.get_version(self._path)
        except FileNotFoundError:
            self._version = None
            return {}
        return json.loads(content)


def _is_gone(seen: Mapping[str, Any]) -> bool:
    """Whether a holder was a process of this machine that does not run any more."""
    if seen["host"] != socket.gethostname():
        return False
    if seen["pid"] == os.getpid():  # in a container, of which a new one has the same numbers
        return seen["owner"] not in _held
    return not is_running(seen["pid"])
