"""Processes of this machine."""

import contextlib
import dataclasses
import itertools
import mmap
import multiprocessing
import os
import pickle
import signal
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import reduction
from typing import Any

from pipeline.errors import InvalidState

# Workers cost a second or two to start. Unless told how many to use, work starts without any, and
# goes on with workers if more than `WORTH` seconds of it are left after the first `TRIAL`.
TRIAL, WORTH = 2.0, 15.0

GUARD = 'guard its main part with `if __name__ == "__main__":`'


class Processes:
    """Runs tasks in processes of this machine: the default engine, which needs no extra.

    Args:
        number: how many; 0 or 1: this process alone. None: as many as there are CPUs, if there is
            enough to do. They start by `spawn`, so a script must guard its main part with
            `if __name__ == "__main__":`.
    """

    def __init__(self, number: int | None = None):
        self.number = number

    def run(self, function: Callable[[Any], Any], tasks: Sequence[Any]) -> Generator[Any]:
        """The results in the order of the tasks; see `Engine`.

        Raises:
            RuntimeError: a worker died.
        """
        waiting, number = iter(tasks), self.number
        if number is None:
            number, started = 0, time.monotonic()
            for done, task in enumerate(waiting, 1):
                yield function(task)
                spent = time.monotonic() - started
                if spent > TRIAL:
                    left = spent * (len(tasks) - done) / done
                    number = _cpus() if left > WORTH else 0
                    break
        if number < 2 or len(tasks) < 2:
            yield from map(function, waiting)
            return
        with workers(function, min(number, len(tasks))) as submit:
            # Two tasks for each worker are on their way.
            running = deque(map(submit, itertools.islice(waiting, 2 * number)))
            while running:
                yield running.popleft().result()
                running.extend(map(submit, itertools.islice(waiting, 1)))


def _cpus() -> int:
    """The CPUs that this process may use, where the system says so."""
    allowed = getattr(os, "sched_getaffinity", None)
    return len(allowed(0)) if allowed else os.cpu_count() or 1


@contextlib.contextmanager
def workers(function: Callable[[Any], Any], number: int) -> Iterator[Callable[[Any], Future[Any]]]:
    """Processes that call a function with what they are given, until the block is left.

    Raises:
        RuntimeError: one of them died.
    """
    # The function goes through a file: what is sent to a worker as it starts must fit into a pipe
    # (64 KiB), or a worker that dies before it reads leaves this process waiting for ever. The file
    # has no name: the system removes it with the last process that has it open, even if killed.
    with tempfile.TemporaryFile() as file:
        pickle.dump(function, file)
        file.flush()
        context, given = multiprocessing.get_context("spawn"), (_Descriptor(file.fileno()),)
        pool = ProcessPoolExecutor(number, context, initializer=_start, initargs=given)
        started_in = os.getpid()
        try:
            yield lambda task: pool.submit(_run, task)
        except BrokenProcessPool as error:
            raise InvalidState(
                "a worker died while tokenising. If it was killed for want of memory, use fewer "
                f"num_workers; if this is a script, {GUARD}, and with python - or in a shell use "
                "num_workers=0. What is finished is kept: run again to go on"
            ) from error
        finally:
            if os.getpid() == started_in:  # in a forked child, the processes are its parent's
                pool.shutdown(wait=True, cancel_futures=True)


@dataclasses.dataclass(frozen=True)
class _Descriptor:
    """The number of an open file, which a worker that starts gets as one of its own."""

    number: int

    def __reduce__(self) -> tuple[Any, ...]:
        return _receive, (reduction.DupFd(self.number),)


def _receive(sent: Any) -> _Descriptor:
    return _Descriptor(sent.detach())


_function: Callable[[Any], Any]


def _start(given: _Descriptor) -> None:
    """Sets up a worker, which ends when the process that started it does, even if killed."""
    global _function
    # All workers share the position in the file, and a map has none.
    with mmap.mmap(given.number, 0, access=mmap.ACCESS_READ) as content:
        _function = pickle.loads(content)
    os.close(given.number)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # a process for each CPU is enough
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started it will say so

    def follow() -> None:
        if parent := multiprocessing.parent_process():
            parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def _run(task: Any) -> Any:
    return _function(task)
