"""The storage: a bucket with conditional writes, whose requests and answers may be lost or late."""

import functools
import io
from collections.abc import Callable
from typing import Any

from tests.simulation.scheduler import Killed, Scheduler

# Seconds of a request: usually, and at most. A request is in flight for less time than the rest of
# a lock whose holder was silent (10 s); see `pipeline.fs.lease.hold_lease`.
USUAL, LATE = 0.02, 8.0


class Storage:
    """The bucket of a world.

    Attributes:
        memory: what is in it.
        flaky: the share of requests and of answers that are lost.
        late: the share of requests that arrive late.
        tokens: by key, the beginnings of what was written, in the order in which it arrived; not
            of processes that were dead by then, whose last request may arrive at any time.
    """

    def __init__(self, scheduler: Scheduler):
        from obstore.store import MemoryStore

        self.scheduler, self.memory = scheduler, MemoryStore()
        self.flaky = self.late = 0.0
        self.tokens: dict[str, list[bytes]] = {}

    def request(self, kind: str, key: str, act: Callable[[], Any]) -> Any:
        """What `act` returns when the request arrives; it arrives even if its sender dies."""
        from obstore import exceptions

        scheduler, chance = self.scheduler, self.scheduler.random
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


class Bucket:
    """An obstore client whose requests are those of a world."""

    def __init__(self, storage: Storage):
        self._storage = storage

    def put(self, key: str, file: Any, *, mode: Any, **_: Any) -> Any:
        storage, content = self._storage, file.read()
        sender = storage.scheduler.me.process

        def act() -> Any:
            found = storage.memory.put(key, content, mode=mode)
            storage.scheduler.note(f"{key} is written for {sender.name}", "storage")
            if sender.alive:
                storage.tokens.setdefault(key, []).append(content[:40])
            return found

        return storage.request("lock" if key.endswith(".lock") else "put", key, act)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        call = getattr(self._storage.memory, name)

        def asked(key: str | None, **options: Any) -> Any:
            act = functools.partial(call, key, **options)
            return self._storage.request(name.partition("_")[0], key or "", act)

        return asked


def open_reader(bucket: Bucket, key: str, **_: Any) -> io.BytesIO:
    """What stands in for `obstore.open_reader`."""
    return io.BytesIO(bytes(bucket.get(key).bytes()))
