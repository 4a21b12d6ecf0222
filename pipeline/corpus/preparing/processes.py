"""Processes: the engine that runs the work of a preparation on this machine."""

import contextlib
import itertools
import mmap
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import Connection
from typing import Any, Protocol

from pipeline.errors import InvalidState, InvalidValue, require_whole
from pipeline.planning.processes import count_cpus

GUARD = 'guard its main part with `if __name__ == "__main__":`'


class Engine(Protocol):
    """Runs a function on many items, on some of them perhaps more than once.

    The function leaves its results on disk, so a repeated item costs little.
    """

    def run(self, function: Callable[[Any], Any], items: Sequence[Any]) -> Generator[Any]:
        """What the function returned, as far as that is known, in any order; for a progress bar.

        All items are done when it ends; closing it ends the work. The function takes one item. It
        must pickle, and so must the items, which are small.
        """
        ...


class Processes:
    """Runs a function in processes of this machine: the default engine, which needs no extra.

    Args:
        number: how many processes; 0 or 1: this one. None: as many as there are CPUs, if there are
            as many items. They start by `spawn`, so a script must guard its main part with
            `if __name__ == "__main__":`.
    """

    def __init__(self, number: int | None = None):
        self.number = None if number is None else require_whole("num_workers", number, 0)

    def run(self, function: Callable[[Any], Any], items: Sequence[Any]) -> Generator[Any]:
        """What the function returned, as items are done; see `Engine`."""
        number = min(count_cpus() if self.number is None else self.number, len(items))
        if number < 2:
            yield from map(function, items)
            return
        with workers(function, number) as submit:
            # Two items are queued for each worker.
            waiting = iter(items)
            running = set(map(submit, itertools.islice(waiting, 2 * number)))
            while running:
                done, running = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    running |= set(map(submit, itertools.islice(waiting, 1)))
                    yield future.result()


def worker_died(advice: str) -> InvalidState:
    """The error of work whose process was killed, as a system does that has no memory left."""
    return InvalidState(
        f"a worker died while tokenising. If it was killed for lack of memory, {advice}. Finished "
        "work is kept; run again to finish"
    )


def refuse_import() -> None:
    """Stops a worker that imports the script that started it: it would wait forever."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise InvalidState(f"prepare was called by the import of a script: {GUARD}")


@contextlib.contextmanager
def workers(function: Callable[[Any], Any], number: int) -> Iterator[Callable[[Any], Future[Any]]]:
    """A function that submits items to processes, which call `function` with each."""
    # The function goes through a file: all that a worker gets as it starts must fit into a pipe
    # (64 KiB), or this process waits forever for a worker that dies before it reads. The file has
    # no name: the system removes it with the last process that has it open, even if killed.
    import cloudpickle  # for functions of a notebook, which workers cannot import

    with tempfile.TemporaryFile() as file:
        try:
            cloudpickle.dump(function, file)
        except Exception as error:  # from any object in a template or a source
            raise InvalidValue(
                f"the source, the tokenizer or the template cannot be sent to workers: {error}. "
                "Keep open files and locks out of it, or use one process"
            ) from error
        file.flush()
        # A connection, because pickling one for a new worker hands over its open file.
        context = multiprocessing.get_context("spawn")
        connection = Connection(os.dup(file.fileno()))
        pool = ProcessPoolExecutor(number, context, initializer=_start, initargs=(connection,))
        started_in = os.getpid()
        # Code typed into `python -` has the file name <stdin>, which workers would try to import.
        main = vars(sys.modules["__main__"])
        typed = {"__file__": main.pop("__file__")} if main.get("__file__") == "<stdin>" else {}

        def submit(item: Any) -> Future[Any]:
            # This may start a worker, which inherits that ^C is blocked until `_start` ignores it.
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                return pool.submit(_call, item)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)

        try:
            yield submit
        except BrokenProcessPool as error:
            raise worker_died(f"use fewer workers; if this is a script, {GUARD}") from error
        finally:
            main.update(typed)
            if os.getpid() == started_in:  # in a forked child, the processes are its parent's
                pool.shutdown(wait=True, cancel_futures=True)


_function: Callable[[Any], Any]


def _start(connection: Connection) -> None:
    """Sets up a worker, which ends with the process that started it, even if that is killed."""
    global _function
    # Workers share the read position of the file; a memory map has none.
    with connection, mmap.mmap(connection.fileno(), 0, access=mmap.ACCESS_READ) as content:
        _function = pickle.loads(content)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # a process for each CPU is enough
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # its parent reports it
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

    def follow() -> None:
        if parent := multiprocessing.parent_process():
            parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def _call(item: Any) -> Any:
    return _function(item)
