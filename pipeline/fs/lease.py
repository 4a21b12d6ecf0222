"""Lease: the lock of a directory in object storage, which its holder must renew."""

import contextlib
import ctypes
import json
import logging
import os
import pathlib
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

from pipeline.errors import InvalidState, InvalidValue
from pipeline.fs import objects

logger = logging.getLogger(__name__)

# Seconds between two signs of life of a holder, and after the last of which others take its place.
BEAT, SILENCE = 10.0, 45.0

_held: set[str] = set()  # the owners that are threads of this process


class _Lost(BaseException):
    """Raised in the thread that held a lock, wherever it is; no `except Exception` stops it."""


@contextlib.contextmanager
def hold_lease(directory: objects.ObjectPath, doing: str, *, wait: bool = True) -> Iterator[None]:
    """Holds the lock of a directory while the block runs; other processes wait, and say so.

    The lock is the object `.lock`. Its holder writes it again every ten seconds, and empties it in
    the end. Another process takes the lock when it has not changed for 45 seconds, or when its
    holder was a process of this boot of this machine, in the same container, that is gone. Each
    writes it only if it is as it was read, so one of them has it. The block of a holder that was
    stopped for so long, or could not write, ends with an error. Arguments are those of
    `directory_lock`.
    """
    lease = _Lease(directory / ".lock")
    _held.add(lease.owner)
    try:
        lease.acquire(f"another process is {doing} in {directory}", wait)
        renewing, watching = (
            threading.Thread(target=work, daemon=True) for work in (lease.renew, lease.watch)
        )
        try:
            renewing.start()
            watching.start()
            yield
        finally:
            lease.ended.set()
            watching.join()
            renewing.join(SILENCE)
            lease.release()
    except _Lost:
        raise InvalidState(
            f"this process lost the lock of {directory}: it could not renew it for {SILENCE:g} s, "
            f"and another may be {doing} there now; run again when that one has ended"
        ) from None
    finally:
        lease.ended.set()  # it may have been lost at the end of the block
        _held.discard(lease.owner)


class _Lease:
    """An object that one process writes, and the version that it wrote last."""

    def __init__(self, path: objects.ObjectPath):
        self.owner, self.ended = uuid.uuid4().hex, threading.Event()
        self._path, self._beat = path, 0
        self._version: objects.Version | None = None
        self._heard, self._taken, self._thread = 0.0, False, threading.get_ident()

    def acquire(self, said: str, wait: bool) -> None:
        """Returns once the lock is held; `said` is what its holder does, in words."""
        seen, last = self._read(), {}
        since, told = time.monotonic(), False
        while True:
            # Nobody holds a lock that is absent or empty.
            if not seen or _is_gone(seen) or time.monotonic() - since > SILENCE:
                # An answer that comes after others may have taken the lock is no answer.
                self._heard, held = time.monotonic(), self._write()
                while held and time.monotonic() - self._heard > SILENCE / 2:
                    self._heard, held = time.monotonic(), self._write()
                if held:
                    if seen:
                        logger.warning(
                            "the holder of the lock of %s is gone or silent; this process takes it",
                            self._path.parent,
                        )
                    return
            elif not told:
                told = True
                logger.warning(
                    "%s; waiting for it, or until it has been silent for %g s", said, SILENCE
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
                begun = time.monotonic()
                if not self._write():
                    self._taken = True
                    return
                self._heard = begun
            except OSError as error:
                logger.warning("the lock %s could not be renewed: %s", self._path, error)

    def watch(self) -> None:
        """Ends the work as soon as another process may have taken the lock over."""
        alive = time.monotonic()
        while not self.ended.wait(BEAT / 10):
            now = time.monotonic()
            if now - alive > BEAT:  # this process was stopped: `renew` asks what became of the lock
                self._heard = max(self._heard, now + BEAT - SILENCE)
            alive = now
            if self._taken or now - self._heard > SILENCE:
                thread = ctypes.c_ulong(self._thread)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(_Lost))
                return

    def release(self) -> None:
        """Makes the lock empty, if this process still holds it."""
        if self._version is not None:
            with contextlib.suppress(OSError):  # then it ends by itself
                objects.put(self._path, b"{}", if_version=self._version)

    def _write(self) -> bool:
        """Writes the lock; False if it is not as it was last read or written."""
        about = {"owner": self.owner, "place": _place(), "pid": os.getpid(), "beat": self._beat}
        # If this fails, the same is written the next time: it may have been heard.
        self._version = objects.put(
            self._path,
            json.dumps(about).encode(),
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
        with contextlib.suppress(ValueError):
            seen = json.loads(content)
            if seen == {} or _is_lock(seen):  # {}: nobody holds it
                return seen
        raise InvalidValue(
            f"{self._path} holds {content[:40]!r}, which is not a lock of Lockstep; delete it if "
            "nothing works in that directory, or use another one"
        )


def _is_lock(seen: Any) -> bool:
    """Whether JSON is what the holder of a lock writes."""
    return (
        isinstance(seen, dict)
        and seen.keys() >= {"owner", "place", "pid", "beat"}
        and isinstance(seen["owner"], str)
        and type(seen["pid"]) is int
        and 0 < seen["pid"] < 1 << 31
    )


def _place() -> str | None:
    """What gives processes their numbers: this boot, and this container; None: nobody knows."""
    try:
        boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None


def _is_gone(seen: Mapping[str, Any]) -> bool:
    """Whether a holder was a process beside this one that does not run any more."""
    if seen["place"] is None or seen["place"] != _place():
        return False
    if seen["pid"] == os.getpid():  # one before this had the same number
        return seen["owner"] not in _held
    with contextlib.suppress(PermissionError):  # it is of another user
        try:
            os.kill(seen["pid"], 0)
        except ProcessLookupError:
            return True
    return False
