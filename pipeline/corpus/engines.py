"""Engines: what runs the work of a preparation, in this machine's processes, in Beam or in Ray."""

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

# Workers cost a second or two to start. Unless told how many to use, work starts without any, and
# continues with workers if more than `WORTH` seconds of it are left after the first `TRIAL`.
TRIAL, WORTH = 2.0, 15.0

GUARD = 'guard its main part with `if __name__ == "__main__":`'

# Seconds between two looks for new results.
POLL = 0.5
# Items that Ray knows of at a time: enough to occupy a cluster and to let it grow.
AHEAD = 1024


class Engine(Protocol):
    """Runs a function of many items somewhere, of one of them perhaps several times.

    Work that is done already costs little: the function finds its result on disk.
    """

    def run(self, function: Callable[[Any], Any], items: Sequence[Any]) -> Generator[Any]:
        """The result for each item, at least once and in any order; closing it ends the work.

        The function pickles and takes one item; items are small and pickle.
        """
        ...


class Processes:
    """Runs a function in processes of this machine: the default engine, which needs no extra.

    Args:
        number: how many; 0 or 1: this process alone. None: as many as there are CPUs, if there is
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
            # Two items for each worker are on their way.
            running = deque(map(submit, itertools.islice(waiting, 2 * number)))
            while running:
                yield running.popleft().result()
                running.extend(map(submit, itertools.islice(waiting, 1)))


def refuse_import() -> None:
    """Ends a worker that runs the script that started it, and would wait for it for ever."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise InvalidState(f"prepare was called by the import of a script: {GUARD}")


def _cpus() -> int:
    """The CPUs that this process may use, where the system says so."""
    allowed = getattr(os, "sched_getaffinity", None)
    return len(allowed(0)) if allowed else os.cpu_count() or 1


@contextlib.contextmanager
def workers(function: Callable[[Any], Any], number: int) -> Iterator[Callable[[Any], Future[Any]]]:
    """Processes that call a function with what they are given, until the block is left."""
    # The function goes through a file: what is sent to a worker as it starts must fit into a pipe
    # (64 KiB), or a worker that dies before it reads leaves this process waiting for ever. The file
    # has no name: the system removes it with the last process that has it open, even if killed.
    import cloudpickle  # also functions of a notebook, which workers cannot import

    with tempfile.TemporaryFile() as file:
        try:
            cloudpickle.dump(function, file)
        except Exception as error:  # of any object that a template or a source holds
            raise InvalidValue(
                f"the source, the tokenizer or the template cannot be sent to workers: {error}. "
                "Keep open files and locks out of it, or use one process"
            ) from error
        file.flush()
        # A connection, for to workers that start these are handed over with their open files.
        context, given = multiprocessing.get_context("spawn"), Connection(os.dup(file.fileno()))
        pool = ProcessPoolExecutor(number, context, initializer=_start, initargs=(given,))
        started_in = os.getpid()
        # The name of what was typed into `python -`, which workers would take for a file to import.
        main = vars(sys.modules["__main__"])
        typed = {"__file__": main.pop("__file__")} if main.get("__file__") == "<stdin>" else {}

        def submit(item: Any) -> Future[Any]:
            # This may start a worker. It inherits that ^C waits until `_start` ignores it.
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
    """Sets up a worker, which ends when the process that started it does, even if killed."""
    global _function
    # All workers share the position in the file, and a map has none.
    with given, mmap.mmap(given.fileno(), 0, access=mmap.ACCESS_READ) as content:
        _function = pickle.loads(content)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # a process for each CPU is enough
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started it will say so
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
            of options, as `{"runner": "DataflowRunner"}`. By default the runner of this machine.
        results: a directory that this process and all workers can write to; each item leaves a
            small file there for a while. Default: the option `temp_location`, or where there is
            none, a temporary directory of this machine.
    """

    def __init__(
        self,
        options: Sequence[str] | Mapping[str, Any] = (),
        *,
        results: epath.PathLike | None = None,
    ):
        self.options, self.results = options, results

    def run(self, function: Callable[[Any], Any], items: Sequence[Any]) -> Generator[Any]:
        """The results, as soon as they are there; see `Engine`."""
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

        # A thread, for some runners return only when all is done.
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        try:
            alive = True
            while alive:
                alive = thread.is_alive()  # before the look, so that the last look misses nothing
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
    """Stores the result for an item as a file, over that of another attempt."""
    number, item = numbered
    result = function(item)
    with atomic_write(as_path(place) / f"{number}.result", shared=True) as file:
        pickle.dump(result, file)


class Ray:
    """Runs a function on a Ray cluster (extra `ray`).

    Ray runs the work of a lost worker again, and all machines must have this package and see the
    directories of the source and of the corpus under the same paths. A cluster that this starts on
    this machine lasts as long as the process.

    Args:
        address: of a cluster, as for `ray.init`; "auto" finds a running one. None: the cluster that
            this process is connected to, or one of this machine's CPUs.
    """

    def __init__(self, address: str | None = None):
        self.address = address

    def run(self, function: Callable[[Any], Any], items: Sequence[Any]) -> Generator[Any]:
        """The results, those that come first first; see `Engine`."""
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
    """The function; a worker unpickles it once and not for every item."""
    return require("ray", extra="ray", purpose="engines.Ray").get(reference)
