"""Ray: tasks on a Ray cluster."""

import functools
import itertools
from collections.abc import Callable, Generator, Sequence
from typing import Any

from pipeline.errors import require

# Tasks that Ray knows of at a time: enough to occupy a cluster and to let it grow.
AHEAD = 1024


class Ray:
    """Runs tasks on a Ray cluster (extra `ray`).

    Ray runs the tasks of a lost worker again, and all machines must have this package and see the
    directories of the source and of the corpus under the same paths. A cluster that this starts on
    this machine lasts as long as the process.

    Args:
        address: of a cluster, as for `ray.init`; "auto" finds a running one. None: the cluster that
            this process is connected to, or one of this machine's CPUs.
    """

    def __init__(self, address: str | None = None):
        self.address = address

    def run(self, function: Callable[[Any], Any], tasks: Sequence[Any]) -> Generator[Any]:
        """The results, those that come first first; see `Engine`.

        Raises:
            ImportError: Ray is not installed.
            Exception: what the function raised.
        """
        ray = require("ray", extra="ray", purpose="engines.Ray")
        if not ray.is_initialized():
            ray.init(self.address, log_to_driver=False)
        run, held = ray.remote(_run), [ray.put(function)]
        waiting = iter(tasks)
        running = [run.remote(held, task) for task in itertools.islice(waiting, AHEAD)]
        try:
            while running:
                done, running = ray.wait(running)
                running += [run.remote(held, task) for task in itertools.islice(waiting, 1)]
                yield ray.get(done[0])
        except ray.exceptions.RayTaskError as error:
            raise error.cause from error
        finally:
            for each in running:
                ray.cancel(each)


def _run(held: list[Any], task: Any) -> Any:
    return _fetch(held[0])(task)


@functools.lru_cache(1)
def _fetch(reference: Any) -> Callable[[Any], Any]:
    """The function; a worker unpickles it once and not for every task."""
    return require("ray", extra="ray", purpose="engines.Ray").get(reference)
