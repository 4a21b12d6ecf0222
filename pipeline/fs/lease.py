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
from pipeline.fs import transfers
from pipeline.fs.object_path import ObjectPath
from pipeline.fs.pid import is_running

logger = logging.getLogger(__name__)

# Seconds between two signs of life of a holder, and after the last of which others take its place.
BEAT, SILENCE = 10.0, 45.0

_held: set[str] = set()  # the owners that are threads of this process


@contextlib.contextmanager
def hold_lease(directory: ObjectPath, doing: str, *, wait: bool = True) -> Iterator[None]:
    """Holds the lock of a directory while the block runs; other processes wait, and say so.

    The lock is the object `.lock`, which only one process can make. Its holder writes it anew every
    ten seconds. When it has not changed for 45 seconds, or its holder was a process of this machine
    that is gone, another process takes its place. A holder that was stopped for so long and goes on
    logs that it lost the lock.

    Args:
        directory: whose lock it is.
        doing: the work in words, for the processes that wait.
        wait: whether to wait for a process that holds the lock, or to raise.

    Raises:
        RuntimeError: another process holds the lock, and `wait` is False.
    """
    path = directory / ".lock"
    mine: dict[str, Any] = {
        "owner": uuid.uuid4().hex,
        "host": socket.gethostname(),
        "pid": os.getpid(),
    }
    _held.add(mine["owner"])
    _acquire(path, mine, f"another process is {doing} in {directory}", wait)
    ended = threading.Event()
    beats = threading.Thread(target=_renew, args=(path, mine, ended), daemon=True)
    beats.start()
    try:
        yield
    finally:
        ended.set()
        beats.join()
        with contextlib.suppress(OSError):  # then it ends by itself
            if _is_mine(_read(path), mine):
                transfers.delete([path])
        _held.discard(mine["owner"])


def _acquire(path: ObjectPath, mine: Mapping[str, Any], said: str, wait: bool) -> None:
    last: dict[str, Any] = {}
    since, told = time.monotonic(), False
    while not transfers.put(path, _content(mine, 0), if_absent=True):
        if (seen := _read(path)) is None:
            continue
        if seen != last:
            if _is_mine(seen, last) and not wait:  # its holder has just written it anew
                raise InvalidState(f"{said}; stop it first, or use another directory")
            last, since = seen, time.monotonic()
        if _is_gone(seen) or time.monotonic() - since > SILENCE:
            logger.warning("%s no more: its lock is taken over", said)
            transfers.delete([path])
            continue
        if not told:
            told = True
            logger.warning("%s; waiting for it, or until it says nothing for %g s", said, SILENCE)
        time.sleep(BEAT / 10)


def _renew(path: ObjectPath, mine: Mapping[str, Any], ended: threading.Event) -> None:
    beat = 0
    while not ended.wait(BEAT):
        beat += 1
        try:
            if not _is_mine(_read(path), mine):
                logger.error("%s is lost: another process took it over; stop one of both", path)
                return
            transfers.put(path, _content(mine, beat))
        except OSError as error:
            logger.warning("%s could not be written anew: %s", path, error)


def _content(mine: Mapping[str, Any], beat: int) -> bytes:
    return json.dumps({**mine, "beat": beat}).encode()


def _read(path: ObjectPath) -> dict[str, Any] | None:
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        return None


def _is_mine(seen: Mapping[str, Any] | None, mine: Mapping[str, Any]) -> bool:
    return seen is not None and seen["owner"] == mine.get("owner")


def _is_gone(seen: Mapping[str, Any]) -> bool:
    """Whether a holder was a process of this machine that does not run any more."""
    if seen["host"] != socket.gethostname():
        return False
    if seen["pid"] == os.getpid():  # in a container, of which a new one has the same numbers
        return seen["owner"] not in _held
    return not is_running(seen["pid"])
