"""Requests: calls of a bucket's store, made again while the storage fails; errors as sentences."""

import errno
import functools
import logging
import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pipeline.errors import Exists, InvalidState, Missing, StorageError, require
from pipeline.fs.fork import restart_in_children
from pipeline.fs.stores import find_address, open_bucket

logger = logging.getLogger(__name__)

SCHEMES = ("s3://", "gs://", "az://")

TRIES = 12  # of a request: the last is some 75 seconds after the first, and the time they take
LONGEST = 15.0  # seconds between two of them
QUIET = 10.0  # seconds between messages about requests that failed
CONNECTIONS = 32


def split(path: str | os.PathLike) -> tuple[str, str]:
    """The bucket of a path, as `s3://mine`, and the key."""
    scheme, _, rest = os.fspath(path).partition("://")
    bucket, _, key = rest.partition("/")
    return f"{scheme}://{bucket}", key.strip("/")


def request(
    path: str | os.PathLike,
    call: Callable[[Any, str], Any],
    *,
    patient: bool = False,
    bucket_only: bool = False,
) -> Any:
    """What `call(store, key)` returns, made again while the storage fails.

    Args:
        path: gives the bucket, whose store it is, and the key.
        call: makes one request.
        patient: whether `call` makes many, each of which is to be made again by itself; the log
            says nothing of those.
        bucket_only: whether it lists or writes, so that "not found" means the bucket.

    Raises:
        FileNotFoundError: there is no such object.
        FileExistsError: there is one.
        OSError: there is no such bucket, the credentials do not suffice, or the storage cannot be
            reached.
    """
    place = os.fspath(path)
    bucket, key = split(place)
    store, errors = client.store(bucket, patient)
    for attempt in range(1, TRIES + 1):
        try:
            return call(store, key)
        except (errors, OSError) as error:
            reason = str(error).partition("\n\nDebug source")[0][:300]
            if refusal := _refusal(place, bucket, error, reason, attempt, bucket_only):
                raise refusal from error
            if attempt == TRIES:
                raise StorageError(
                    f"{place} cannot be reached, after {TRIES} attempts: {reason}. Check the "
                    "network and the address of the storage, and run again to go on"
                ) from error
            client.report(place, attempt, reason)
        time.sleep(min(0.1 * 2 ** (attempt - 1), LONGEST) * random.uniform(0.5, 1.5))
    raise AssertionError("the last attempt returns or raises")


def _refusal(
    place: str, bucket: str, error: Exception, reason: str, attempt: int, bucket_only: bool
) -> OSError | None:
    """The sentence for an error that will not pass; None of one that may."""
    kind, found = type(error).__name__, re.search(r"status code: (\d{3})", reason)
    status = int(found[1]) if found else None
    # Machines of the clouds ask for credentials there, and these may be late.
    if any(each in reason for each in ("/latest/", "metadata.google", "token request")):
        if attempt < 3:
            return None
        return _permission(
            f"there are no credentials for {bucket}. Set those of its cloud: for s3:// "
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, for gs:// "
            "GOOGLE_APPLICATION_CREDENTIALS, for "
            f"az:// AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY ({reason})"
        )
    if "NoSuchBucket" in reason or "NoSuchContainer" in reason or (bucket_only and status == 404):
        return StorageError(
            f"there is no bucket {bucket}, in which {place} is to be; create it, or check its name "
            "and the address of the storage"
        )
    if kind == "AlreadyExistsError":
        return Exists(f"there is an object {place} already")
    if isinstance(error, FileNotFoundError):
        return Missing(f"there is no object {place}; check the path")
    if kind == "UnauthenticatedError":
        return _permission(f"the credentials for {bucket} are refused; renew them ({reason})")
    if kind == "PermissionDeniedError":
        return _permission(
            f"the credentials do not allow this of {place}; they need the right to list the bucket "
            f"and to read and write in it ({reason})"
        )
    if status in (301, 307, 308):
        return StorageError(f"{bucket} is in another region; set AWS_REGION to that one ({reason})")
    if status == 416:
        return StorageError(f"{place} ends before what is to be read of it; it changed since")
    if status is not None and 400 <= status < 500 and status not in (408, 425, 429):
        return StorageError(f"the storage refused a request for {place}: {reason}")
    return None


def _permission(text: str) -> PermissionError:
    error = PermissionError(text)
    error.errno = errno.EACCES  # and the text stays the whole message
    return error


class Client:
    """Connections to buckets, threads that use them, and messages about requests that failed."""

    def __init__(self) -> None:
        self._used = self._forked = False
        self.restart()
        restart_in_children(self)

    def restart(self) -> None:
        """See `pipeline.fs.fork`."""
        self._forked = self._used  # its threads are those of the parent
        self._lock = threading.Lock()
        self._threads: ThreadPoolExecutor | None = None
        self._failures, self._said = 0, -QUIET
        self._open = functools.lru_cache(maxsize=64)(open_bucket)

    def store(self, bucket: str, patient: bool) -> tuple[Any, type[Exception]]:
        """The store of a bucket, and what it raises; a patient one repeats requests itself."""
        if self._forked:
            raise InvalidState(
                "this process is a fork of one that used object storage, whose client has threads; "
                "start processes by multiprocessing.get_context('spawn')"
            )
        obstore = require("obstore", extra="cloud", purpose=f"reading {bucket}")
        self._used = True
        return self._open(
            bucket, TRIES if patient else 0, find_address(bucket)
        ), obstore.exceptions.BaseError

    def map(self, function: Callable[[Any], Any], things: Sequence[Any]) -> Iterable[Any]:
        """Results of a function, in order, in several threads."""
        if len(things) <= 1:
            return map(function, things)
        with self._lock:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(CONNECTIONS, thread_name_prefix="objects")
        return self._threads.map(function, things)

    def report(self, place: str, attempt: int, reason: str) -> None:
        """Logs that requests failed, now and then."""
        with self._lock:
            self._failures += 1
            if (now := time.monotonic()) - self._said < QUIET:
                return
            count, self._failures, self._said = self._failures, 0, now
        logger.warning(
            "object storage: %s since the last message, and will be made again; the last was "
            "attempt %d of %s: %s",
            "a request failed" if count == 1 else f"{count:,} requests failed",
            attempt,
            place,
            reason,
        )


client = Client()
