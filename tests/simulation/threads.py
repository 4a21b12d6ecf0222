"""What stands in for the threads, locks, futures and pools that the project uses, in a simulation.

Outside of one, nothing blocks.
"""

import threading
import types
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from typing import Any

from tests.simulation.scheduler import Killed, Scheduler, Task


def running() -> Scheduler | None:
    """The scheduler of the simulated thread that calls this; None: there is none."""
    scheduler = Scheduler.active
    return None if scheduler is None or scheduler.current is None else scheduler


def wait(ready: Callable[[], Any], seconds: float | None = None) -> bool:
    """See `Scheduler.wait`; it does not hand over if it is ready."""
    if (scheduler := running()) is None:
        return bool(ready())
    if not scheduler.me.process.alive:
        raise Killed
    return bool(ready()) or scheduler.wait(ready, seconds)


def start(name: str, work: Callable[[], Any]) -> Task:
    """Starts a thread of the running process."""
    scheduler = running()
    assert scheduler is not None
    process = scheduler.me.process
    return scheduler.start(process, f"{process.name}/{name}", work)


class Lock:
    """In place of `threading.Lock`."""

    reentrant = False

    def __init__(self) -> None:
        self._owner: Any = None
        self._depth = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        scheduler = running()
        me = scheduler.me if scheduler else None
        if not (self.reentrant and self._depth and self._owner is me):
            limit = 0 if not blocking else None if timeout < 0 else timeout
            if not wait(lambda: not self._depth, limit):
                return False
        self._owner, self._depth = me, self._depth + 1
        return True

    def release(self) -> None:
        self._depth -= 1

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class RLock(Lock):
    """In place of `threading.RLock`."""

    reentrant = True


class Event:
    """In place of `threading.Event`."""

    def __init__(self) -> None:
        self._set = False

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True

    def wait(self, timeout: float | None = None) -> bool:
        return wait(self.is_set, timeout)


class Thread:
    """In place of `threading.Thread`."""

    def __init__(
        self,
        target: Callable[..., Any],
        name: str = "thread",
        args: tuple = (),
        daemon: bool = False,
    ):
        self._name, self._work = name, lambda: target(*args)
        self._task: Task | None = None

    def start(self) -> None:
        self._task = start(self._name, self._work)

    def join(self, timeout: float | None = None) -> None:
        task = self._task
        wait(lambda: task is None or task.done, timeout)


class Future:
    """In place of `concurrent.futures.Future`."""

    def __init__(self) -> None:
        self._results: list[Any] = []
        self._error: BaseException | None = None

    def set_result(self, result: Any) -> None:
        self._results.append(result)

    def set_exception(self, error: BaseException) -> None:
        self._error = error

    def cancel(self) -> None:
        self._error = CancelledError()

    def result(self) -> Any:
        wait(lambda: self._results or self._error is not None)
        if self._error is not None:
            raise self._error
        return self._results[0]


class Pool:
    """In place of `concurrent.futures.ThreadPoolExecutor`, with three threads at most."""

    def __init__(self, number: int):
        self._number = min(number, 3)

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def map(self, call: Callable[..., Any], *arguments: Any) -> Iterator[Any]:
        items = list(zip(*arguments, strict=False))
        if len(items) < 2 or running() is None:
            return iter([call(*item) for item in items])
        results, errors = dict[int, Any](), dict[int, Exception]()
        waiting = iter(enumerate(items))

        def work() -> None:
            for number, item in waiting:
                try:
                    results[number] = call(*item)
                except Exception as error:
                    errors[number] = error
                if errors:
                    return

        run_together([work] * min(self._number, len(items)))
        if errors:
            raise errors[min(errors)]
        return iter([results[number] for number in range(len(items))])


def run_together(works: list[Callable[[], Any]]) -> None:
    """Runs functions in threads of the running process; raises the first of their errors."""
    errors = list[Exception]()

    def guarded(work: Callable[[], Any]) -> None:
        try:
            work()
        except Exception as error:
            errors.append(error)

    tasks = [start(f"{n}", lambda work=work: guarded(work)) for n, work in enumerate(works)]
    wait(lambda: all(task.done for task in tasks))
    if errors:
        raise errors[0]


# In place of the module `threading`.
MODULE = types.SimpleNamespace(**vars(threading))
MODULE.Lock, MODULE.RLock, MODULE.Event, MODULE.Thread = Lock, RLock, Event, Thread
