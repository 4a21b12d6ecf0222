"""Processes: a function of many items, called in processes of this machine.

Packing is a loop of Python, of which a process runs one at a time, so threads would not help. A
program that plans need not be importable: these processes import this package alone.
"""

import contextlib
import os
import pickle
import queue
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

# The most processes: several programs may plan on a machine at a time.
MOST = 16

SERVE = "from pipeline.planning.processes import serve; serve()"

Call = Callable[[Any], Any]


@contextlib.contextmanager
def spread(function: Call, number: int) -> Iterator[Callable[[Sequence[Any]], list[Any]]]:
    """A function from items to the results of `function`, in `number` processes; up to `MOST`.

    The function and the items must pickle. With one process, or where none can start, this process
    calls it. The processes end with the program, even if that is killed: their input ends.
    """
    number = min(number, MOST, count_cpus())
    content, idle = pickle.dumps(function), queue.SimpleQueue[Any]()
    started = list[subprocess.Popen]()
    with contextlib.suppress(OSError):
        while sys.executable and number > 1 and len(started) < number:
            started.append(_start())
    if not started:
        yield lambda items: [*map(function, items)]
        return

    def begin(process: subprocess.Popen) -> None:
        assert process.stdin is not None
        with contextlib.suppress(OSError):  # it was killed
            process.stdin.write(content)
        idle.put(process)

    def call(item: Any) -> Any:
        process = idle.get()
        try:
            return _exchange(process, item)
        except (OSError, EOFError, pickle.UnpicklingError):  # it was killed
            return function(item)
        finally:
            idle.put(process)

    try:
        with ThreadPoolExecutor(len(started)) as threads:
            for process in started:
                threads.submit(begin, process)
            yield lambda items: [*threads.map(call, items)]
    finally:
        for process in started:
            process.kill()
            with contextlib.suppress(BrokenPipeError):  # of one that was killed before
                process.communicate()


def count_cpus() -> int:
    """The number of CPUs that this process may use, or of all if the system does not tell."""
    allowed = getattr(os, "sched_getaffinity", None)
    return len(allowed(0)) if allowed else os.cpu_count() or 1


def _start() -> subprocess.Popen:
    """A process that serves. ^C does not reach it: it is in a session of its own."""
    path = os.pathsep.join(folder or os.curdir for folder in sys.path)
    return subprocess.Popen(
        [sys.executable, "-c", SERVE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
        start_new_session=True,
    )


def _exchange(process: subprocess.Popen, item: Any) -> Any:
    assert process.stdin is not None
    assert process.stdout is not None
    pickle.dump(item, process.stdin)
    process.stdin.flush()
    error, result = pickle.load(process.stdout)
    if error is not None:
        raise error
    return result


def serve() -> None:
    """Calls a function with the items that come, until there are no more."""
    items, results = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr  # what is printed is no result
    with contextlib.suppress(EOFError, BrokenPipeError):
        function = pickle.load(items)
        while True:
            item = pickle.load(items)
            raised: Exception | None = None
            result: Any = None
            try:
                result = function(item)
            except Exception as error:
                raised = error
            pickle.dump((raised, result), results)
            results.flush()
