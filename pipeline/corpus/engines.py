"""Engines, which run the work of a preparation: processes of this machine, Beam and Ray."""

import contextlib
import functools
import itertools
import mmap
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import Connection
from typing import Any, Protocol

from etils import epath

from pipeline.errors import InvalidState, InvalidValue, require
from pipeline.fs.atomic import as_path, atomic_write

__all__ = ["Beam", "Engine", "Processes", "Ray"]

# Workers take a second or two to start. By default, work starts without any, and continues with
# workers if more than `WORTH` seconds of it are left after the first `TRIAL` seconds.
TRIAL, WORTH = 2.0, 15.0

GUARD = 'guard its main part with `if __name__ == "__main__":`'

# Seconds between polls for new results.
POLL = 0.5
# Items submitted to Ray at a time: enough to occupy a cluster and to let it grow.
AHEAD = 1024


class Engine(Protocol):
    """Runs a function on many items, on some of them perhaps more than once.

    A repeated item costs little: the function finds its result on disk.
    """

    def run(self, function: Callable[[Any], Any], items: Sequence[Any]) -> Generator[Any]:
        """The result for each item, at least once and in any order; closing it ends the work.

        The function takes one item. It must pickle, and so must the items, which are small.
        """
        ...


class Processes:
    """Runs a function in processes of this machine: the default engine, which needs no extra.

    Args:
        number: how many processes; 0 or 1: this one. None: as many as there are CPUs, if there is
            enough to do. They start by `spawn`, so a script must guard its main part with
            `if __name__ == "__main__":`.
    """

    def __init__(self, number: int | None = None):
        self.number = number

    def run(self, function: Callable[[Any], Any], items: Sequence[Any]) -> Generator[Any]:
        """The results in the order of the items; see `Engine`."""
        waiting, number = iter(items), self.number
        if number is None:
            number, started = 0, time.monotonic()
            for done, item in enumerate(waiting, 1):
                yield function(item)
                spent = time.monotonic() - started
                if spent > TRIAL:
                    left = spent * (len(items) - done) / done
                    number = _cpus() if left > WORTH else 0
                    break
        if number < 2 or len(items) < 2:
            yield from map(function, waiting)
            return
        with workers(function, min(number, len(items))) as submit:
            # Two items are queued for each worker.
            running = deque(map(submit, itertools.islice(waiting, 2 * number)))
            while running:
                yield running.popleft().result()
                running.extend(map(submit, itertools.islice(waiting, 1)))


def refuse_import() -> None:
    """Stops a worker that imports the script that started it: it would wait forever."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise InvalidState(f"prepare was called by the import of a script: {GUARD}")


def _cpus() -> int:
    """The number of CPUs that this process may use, or of all if the system does not tell."""
    allowed = getattr(os, "sched_getaffinity", None)
    return len(allowed(0)) if allowed else os.cpu_count() or 1


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
        context, given = multiprocessing.get_context("spawn"), Connection(os.dup(file.fileno()))
        pool = ProcessPoolExecutor(number, context, initializer=_start, initargs=(given,))
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
            raise InvalidState(
                "a worker died while tokenising. If it was killed for lack of memory, use fewer "
                f"workers; if this is a script, {GUARD}. Finished work is kept; run again to finish"
            ) from error
        finally:
            main.update(typed)
            if os.getpid() == started_in:  # in a forked child, the processes are its parent's
                pool.shutdown(wait=True, cancel_futures=True)


_function: Callable[[Any], Any]


def _start(given: Connection) -> None:
    """Sets up a worker, which ends with the process that started it, even if that is killed."""
    global _function
    # Workers share the read position of the file; a memory map has none.
    with given, mmap.mmap(given.fileno(), 0, access=mmap.ACCESS_READ) as content:
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


class Beam:
    """Runs a function as an Apache Beam pipeline (extra `beam`).

    All workers must have this package and see the directories of the source and of the corpus under
    the same paths.

    Args:
        options: flags of a pipeline, as `["--runner=DataflowRunner", "--project=mine"]`, or a dict
            of options, as `{"runner": "DataflowRunner"}`. Default: the runner of this machine.
        results: a directory that this process and all workers can write to; the result of each item
            is a small file there until it is read. Default: the option `temp_location`, or else a
            temporary directory of this machine.
    """

    def __init__(
        self,
        options: Sequence[str] | Mapping[str, Any] = (),
        *,
        results: epath.PathLike | None = None,
    ):
        self.options, self.results = options, results

    def run(self, function: Callable[[Any], Any], items: Sequence[Any]) -> Generator[Any]:
        """The results, in the order in which they arrive; see `Engine`."""
        beam = require("apache_beam", extra="beam", purpose="engines.Beam")
        from apache_beam.options.pipeline_options import GoogleCloudOptions, PipelineOptions

        if isinstance(self.options, Mapping):
            options = PipelineOptions.from_dictionary(dict(self.options))
        else:
            options = PipelineOptions(list(self.options))
        pipeline = beam.Pipeline(options=options)
        if shared := self.results or options.view_as(GoogleCloudOptions).temp_location:
            place = as_path(shared) / f"lockstep-{os.urandom(8).hex()}"
            place.mkdir(parents=True)
        else:  # readable by this user alone
            place = epath.Path(tempfile.mkdtemp(prefix="lockstep-"))
        numbered = pipeline | beam.Create(list(enumerate(items))) | beam.Reshuffle()
        numbered | beam.Map(functools.partial(_record, function, os.fspath(place)))
        errors: list[BaseException] = []

        def work() -> None:
            try:
                pipeline.run().wait_until_finish()
            except BaseException as error:
                errors.append(error)

        # In a thread, because some runners return only when all is done.
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        try:
            alive = True
            while alive:
                alive = thread.is_alive()  # before the poll, so that the last one misses nothing
                for path in place.glob("*.result"):
                    result = pickle.loads(path.read_bytes())
                    path.unlink()
                    yield result
                if alive:
                    time.sleep(POLL)
        finally:
            place.rmtree(missing_ok=True)
        if errors:
            raise errors[0]


def _record(function: Callable[[Any], Any], place: str, numbered: tuple[int, Any]) -> None:
    """Stores the result for an item as a file, in place of that of another attempt."""
    number, item = numbered
    result = function(item)
    with atomic_write(as_path(place) / f"{number}.result", shared=True) as file:
        pickle.dump(result, file)


class Ray:
    """Runs a function on a Ray cluster (extra `ray`).

    Ray repeats the work of a lost worker. All machines must have this package and see the
    directories of the source and of the corpus under the same paths. A cluster that this starts on
    this machine lasts as long as the process.

    Args:
        address: a cluster, as for `ray.init`; "auto" finds a running one. None: the cluster that
            this process is connected to, or a new one on this machine.
    """

    def __init__(self, address: str | None = None):
        self.address = address

    def run(self, function: Callable[[Any], Any], items: Sequence[Any]) -> Generator[Any]:
        """The results, in the order in which they arrive; see `Engine`."""
        ray = require("ray", extra="ray", purpose="engines.Ray")
        if not ray.is_initialized():
            ray.init(self.address, log_to_driver=False)
        run, held = ray.remote(_call_held), [ray.put(function)]
        waiting = iter(items)
        running = [run.remote(held, item) for item in itertools.islice(waiting, AHEAD)]
        try:
            while running:
                done, running = ray.wait(running)
                running += [run.remote(held, item) for item in itertools.islice(waiting, 1)]
                yield ray.get(done[0])
        except ray.exceptions.RayTaskError as error:
            raise error.cause from error
        finally:
            for each in running:
                ray.cancel(each)


def _call_held(held: list[Any], item: Any) -> Any:
    return _fetch(held[0])(item)


@functools.lru_cache(1)
def _fetch(reference: Any) -> Callable[[Any], Any]:
    """The function, which a worker unpickles once rather than for every item."""
    return require("ray", extra="ray", purpose="engines.Ray").get(reference)
