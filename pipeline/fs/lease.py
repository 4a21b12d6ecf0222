"""Lease: the lock of a directory in object storage, which its holder must renew."""

import contextlib
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

# Seconds between two signs of life of a holder, and of silence after which others take its lock.
BEAT, SILENCE = 10.0, 45.0

_held: set[str] = set()  # the owners that are threads of this process


@contextlib.contextmanager
def hold_lease(directory: objects.ObjectPath, doing: str, *, wait: bool) -> Iterator[None]:
    """Holds the lock of a directory while the block runs; other processes wait, and log that.

    The lock is the object `.lock`. Its holder writes it every ten seconds, and empties it at the
    end. Another process takes the lock if it has not changed for 45 seconds; or for ten, in which
    its last requests arrive, if its holder was a process of this boot of this machine, in the same
    container, and is gone. A process writes it only if it has not changed since it read it, so only
    one process has the lock.

    A holder that was stopped, or has had no answer for 35 seconds, renews its lock before it writes
    or deletes anything else in the directory, also when it repeats a request. If another process
    has taken the lock, that fails, or else the end of the block. Only a request that was in flight
    when the process was stopped may arrive later. Arguments are those of `directory_lock`.
    """
    lease = _Lease(directory, doing)
    guard = f"{directory}/", lease.require
    _held.add(lease.owner)
    try:
        lease.acquire(wait)
        renewing = threading.Thread(target=lease.renew, daemon=True)
        try:
            objects.guards.append(guard)
            renewing.start()
            yield
        finally:
            lease.ended.set()
            objects.guards.remove(guard)
            renewing.join()
            lease.release()
        if lease.lost:
            raise lease.describe_loss()
    finally:
        _held.discard(lease.owner)


class _Lease:
    """An object that one process writes, and the version that it wrote last.

    Attributes:
        owner: the holder, among all processes and threads.
        ended: set when the holder has ended.
        lost: whether another process has taken the lock.
    """

    def __init__(self, directory: objects.ObjectPath, doing: str):
        self.owner, self.ended = uuid.uuid4().hex, threading.Event()
        self._directory, self._path, self._doing = directory, directory / ".lock", doing
        self._version: objects.Version | None = None
        self._beat, self.lost = 0, False
        self._begun: float | None = None  # when this beat was first sent, if it was
        self._heard = 0.0  # when the last beat that was heard was first sent
        self._writing = threading.Lock()

    def acquire(self, wait: bool) -> None:
        """Returns once the lock is held."""
        said = f"another process is {self._doing} in {self._directory}"
        seen, last = self._read(), {}
        since, told = _now(), False
        while True:
            # Nobody holds a lock that is absent or empty.
            if not seen or _now() - since > (BEAT if _is_gone(seen) else SILENCE):
                self._heard, self.lost = -SILENCE, False
                if self._hold():
                    if seen:
                        logger.warning(
                            "the holder of the lock of %s is gone or silent; this process takes it",
                            self._directory,
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
                since = _now()

    def require(self) -> None:
        """Returns if this process holds the lock for at least a beat; raises if it has lost it."""
        if not self._hold():
            raise self.describe_loss()

    def describe_loss(self) -> InvalidState:
        """The error of a process whose lock another one has taken."""
        return InvalidState(
            f"this process lost the lock of {self._directory}: it did not renew it for "
            f"{SILENCE:g} s, and another process may be {self._doing} there now; run again when "
            "that has ended"
        )

    def renew(self) -> None:
        """Writes the lock at each beat, until its holder ends or another process has taken it."""
        while not self.ended.wait(BEAT):
            try:
                with self._writing:
                    self.lost = self.lost or not self._write()
            except OSError as error:
                logger.warning("the lock %s could not be renewed: %s", self._path, error)
            if self.lost:
                logger.error("%s", self.describe_loss())
                return

    def release(self) -> None:
        """Makes the lock empty, if this process still holds it."""
        if self._version is not None:
            with contextlib.suppress(OSError):  # then the lock ends by itself
                objects.put(self._path, b"{}", if_version=self._version)

    def _hold(self) -> bool:
        """Whether this process has the lock for at least another beat; renews an old one."""
        with self._writing:
            while not self.lost and _now() - self._heard > SILENCE - BEAT:
                self.lost = not self._write()
            return not self.lost

    def _write(self) -> bool:
        """Writes the lock; False if it has changed since this process read or wrote it."""
        about = {"owner": self.owner, "place": _place(), "pid": os.getpid(), "beat": self._beat}
        # If this fails, the next attempt writes the same. The storage may have received the first
        # one, and then others count the silence from there.
        self._begun = begun = self._begun or _now()
        self._version = objects.put(
            self._path,
            json.dumps(about).encode(),
            if_absent=self._version is None,
            if_version=self._version,
        )
        self._beat, self._begun, self._heard = self._beat + 1, None, begun
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
            "no process works in that directory, or use another directory"
        )


def _is_lock(seen: Any) -> bool:
    """Whether JSON is the content of a lock that is held."""
    return (
        isinstance(seen, dict)
        and seen.keys() >= {"owner", "place", "pid", "beat"}
        and isinstance(seen["owner"], str)
        and type(seen["pid"]) is int
        and 0 < seen["pid"] < 1 << 31
    )


def _now() -> float:
    """Seconds of a clock that runs on while the machine sleeps."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def _place() -> str | None:
    """The boot and the container, within which process ids are unique; None if unknown."""
    try:
        boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None


def _is_gone(seen: Mapping[str, Any]) -> bool:
    """Whether a holder was a process of the same boot and container, and no longer runs."""
    if seen["place"] is None or seen["place"] != _place():
        return False
    if seen["pid"] == os.getpid():  # an earlier process had the same id
        return seen["owner"] not in _held
    with contextlib.suppress(PermissionError):  # a process of another user
        try:
            os.kill(seen["pid"], 0)
        except ProcessLookupError:
            return True
    return False
