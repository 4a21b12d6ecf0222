"""The storage: buckets with conditional writes, whose requests and answers may be lost or late."""

import datetime
import io
import types
from collections.abc import Callable
from typing import Any

from tests.simulation.scheduler import Killed, Scheduler

# Seconds of a request: usually, and at most. A request is in flight for less time than the rest of
# a lock whose holder was silent (10 s); see `pipeline.fs.lease.hold_lease`.
USUAL, LATE = 0.02, 8.0


class Storage:
    """All buckets of a world.

    Attributes:
        objects: content, version and time, by bucket and key.
        flaky: the share of requests and of answers that are lost.
        late: the share of requests that arrive late.
        tokens: by key, the beginnings of what was written, in the order in which it arrived; not
            of processes that were dead by then, whose last request may arrive at any time.
    """

    def __init__(self, scheduler: Scheduler):
        self._scheduler = scheduler
        self.objects: dict[tuple[str, str], tuple[bytes, int, float]] = {}
        self.flaky = self.late = 0.0
        self.tokens: dict[str, list[bytes]] = {}
        self._versions = 0

    def request(self, kind: str, key: str, act: Callable[[], Any]) -> Any:
        """What `act` returns when the request arrives; it arrives even if its sender dies."""
        from obstore import exceptions

        scheduler, chance = self._scheduler, self._scheduler.random
        lost, unheard = chance.random() < self.flaky, chance.random() < self.flaky
        found = list[tuple[Any, BaseException | None]]()

        def arrive() -> None:
            try:
                found.append((act(), None))
            except Exception as error:
                found.append((None, error))

        late = chance.random() < self.late
        seconds = chance.uniform(0, LATE) if late else USUAL * chance.expovariate(1)
        sent = chance.random() < 0.5  # if the sender dies now
        try:
            scheduler.point(kind, key)
        except Killed:
            if sent and not lost:
                scheduler.at(seconds, arrive)
            raise
        if not lost:
            scheduler.at(seconds, arrive)
            scheduler.wait(lambda: found)
            scheduler.wait(None, USUAL * chance.expovariate(1))
        if lost or unheard:
            scheduler.note(f"{'the request' if lost else 'the answer'} is lost: {kind} {key}")
            raise exceptions.GenericError("connection reset by the simulation")
        result, error = found[0]
        if error is not None:
            raise error
        return result

    def write(self, at: tuple[str, str], content: bytes) -> dict[str, Any]:
        """Replaces an object; its metadata."""
        self._versions += 1
        self.objects[at] = content, self._versions, self._scheduler.now
        return self.describe(at)

    def describe(self, at: tuple[str, str]) -> dict[str, Any]:
        """The metadata of an object."""
        if at not in self.objects:
            raise FileNotFoundError(f"there is no object {at[1]}")
        content, version, seconds = self.objects[at]
        time = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
        about = {"path": at[1], "size": len(content), "e_tag": f"{version}", "version": None}
        return about | {"last_modified": time}


class Bucket:
    """The methods of an obstore client that the project calls."""

    def __init__(self, storage: Storage, name: str):
        self._storage, self._name = storage, name

    def put(self, key: str, file: Any, *, mode: Any, **_: Any) -> dict[str, Any]:
        from obstore import exceptions

        storage, at, content = self._storage, (self._name, key), file.read()
        scheduler = storage._scheduler
        sender = scheduler.me.process

        def act() -> dict[str, Any]:
            there = storage.objects.get(at)
            if mode == "create" and there is not None:
                raise exceptions.AlreadyExistsError(f"{key} exists")
            if isinstance(mode, dict) and (there is None or mode["e_tag"] != f"{there[1]}"):
                raise exceptions.PreconditionError(f"{key} has changed")
            scheduler.note(f"{key} is written for {sender.name}", "storage")
            if sender.alive:
                storage.tokens.setdefault(key, []).append(content[:40])
            return storage.write(at, content)

        return storage.request("lock" if key.endswith(".lock") else "put", key, act)

    def delete(self, key: str) -> None:
        def act() -> None:
            self._storage.objects.pop((self._name, key), None)
            self._storage._scheduler.note(f"{key} is deleted", "storage")

        self._storage.request("delete", key, act)

    def get(self, key: str) -> Any:
        def act() -> Any:
            at = self._name, key
            meta, content = self._storage.describe(at), self._storage.objects[at][0]
            return types.SimpleNamespace(meta=meta, bytes=lambda: content)

        return self._storage.request("get", key, act)

    def get_range(self, key: str, *, start: int, end: int) -> bytes:
        return self.get(key).bytes()[start:end]

    def head(self, key: str) -> dict[str, Any]:
        at = self._name, key
        return self._storage.request("head", key, lambda: self._storage.describe(at))

    def list(self, prefix: str | None, chunk_size: int = 0) -> "Listing":
        del chunk_size
        folder = f"{prefix}/" if prefix else ""
        found = self._storage.request("list", folder, lambda: self._below(folder))
        return Listing([found] if found else [])

    def list_with_delimiter(self, prefix: str) -> dict[str, Any]:
        folder = f"{prefix}/" if prefix else ""
        every = self._storage.request("list", folder, lambda: self._below(folder))
        rest = {each["path"]: each["path"][len(folder) :] for each in every}
        return {
            "objects": [each for each in every if "/" not in rest[each["path"]]],
            "common_prefixes": sorted(
                {folder + name.partition("/")[0] for name in rest.values() if "/" in name}
            ),
        }

    def _below(self, folder: str) -> Any:
        keys = [key for name, key in self._storage.objects if name == self._name]
        mine = [key for key in keys if key.startswith(folder)]
        return [self._storage.describe((self._name, key)) for key in sorted(mine)]


class Listing(list):
    """The answer to a request for a list: in one chunk, or all of it."""

    def collect(self) -> Any:
        return [each for chunk in self for each in chunk]


def open_reader(bucket: Bucket, key: str, **_: Any) -> io.BytesIO:
    """What stands in for `obstore.open_reader`."""
    return io.BytesIO(bucket.get(key).bytes())
