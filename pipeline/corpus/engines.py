"""Engines, which run the work of a preparation: processes of this machine, and Ray."""

import itertools
from collections.abc import Callable, Generator, Sequence
from typing import Any

from pipeline.corpus.preparing.processes import Engine, Processes, worker_died
from pipeline.errors import require

__all__ = ["Engine", "Processes", "Ray"]

# Items submitted to Ray at a time: enough to occupy a cluster and to let it grow.
AHEAD = 1024


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
        """What the function returned, as items are done; see `Engine`."""
        ray = require("ray", extra="ray", purpose="engines.Ray")
        if not ray.is_initialized():
            ray.init(self.address, log_to_driver=False)
        run, reference = ray.remote(_apply), ray.put(function)
        waiting = iter(items)
        running = [run.remote(reference, item) for item in itertools.islice(waiting, AHEAD)]
        try:
            while running:
                done, running = ray.wait(running)
                running += [run.remote(reference, item) for item in itertools.islice(waiting, 1)]
                yield ray.get(done[0])
        except ray.exceptions.RayTaskError as error:
            raise error.cause from error
        except ray.exceptions.RayError as error:  # of a worker or a machine, and of its memory
            raise worker_died(
                f"give Ray more of it, or fewer tasks at a time ({type(error).__name__}: {error})"
            ) from error
        finally:
            for task in running:
                ray.cancel(task)


def _apply(function: Callable[[Any], Any], item: Any) -> Any:
    return function(item)
