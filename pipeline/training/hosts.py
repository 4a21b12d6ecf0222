"""Several hosts as one: who works first, and whether all of them agree.

With one process every function here does nothing but what it says on the tin.
"""

import contextlib
import hashlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import numpy as np

from pipeline.loading.checkpoint import differences

T = TypeVar("T")

# Seconds that process 0 leaves the others for their last words.
GRACE = 2.0


def one_after_another(what: str, work: Callable[[], T]) -> T:
    """`work()` on process 0, and when it is done, on all the others at once.

    So that what one host writes to a shared file system is there when the others look for it,
    while hosts with disks of their own each do the work themselves.

    Raises:
        RuntimeError: on every other process, when process 0 failed.
    """
    import jax

    failure: BaseException | None = None
    result: list[T] = []

    def attempt():
        nonlocal failure
        try:
            result.append(work())
        except Exception as error:
            failure = error

    if jax.process_index() == 0:
        attempt()
    _require_all(what, failure)
    if jax.process_index() != 0:
        attempt()
    _require_all(what, failure)
    return result[0]


def _require_all(what: str, failure: BaseException | None):
    """Raises on every process when any has failed, so that none waits for one that is gone."""
    failed = np.flatnonzero(_gather(np.array([failure is not None])))
    if failure is not None:
        raise failure
    if len(failed):
        raise RuntimeError(
            f"{what} failed on process {failed[0]}; its own output says why. This process stops "
            "as well, because no step can run without all of them"
        )


def require_agreement(values: Mapping[str, str]):
    """Compares named values over all processes, such as fingerprints of `name=value;…` parts.

    Each process sends 32 bytes, a hash, and receives 64, however many there are: the least and the
    greatest of all. Only when these differ do the values themselves travel.

    Raises:
        ValueError: on every process, when any differs from process 0; names the processes, what
            differs and both values.
    """
    text = json.dumps(dict(values), sort_keys=True).encode()
    digest = np.frombuffer(hashlib.sha256(text).digest(), np.uint8)
    least, greatest = _extremes(digest)
    if (least == greatest).all():
        return
    hashes = _gather(digest)
    other = np.flatnonzero((hashes != hashes[0]).any(axis=1))
    size = int(_extremes(np.array([len(text)]))[1][0])
    texts = [
        json.loads(row.tobytes()) for row in _gather(np.frombuffer(text.ljust(size), np.uint8))
    ]
    said = [
        f"process {index}: "
        + "; ".join(
            f"{name}: {change}"
            for name in texts[0]
            for change in differences(texts[0][name], texts[index][name])
        )
        for index in other[:4]
    ]
    raise ValueError(
        f"{len(other)} of {len(hashes)} processes disagree with process 0 (“was” is process 0's "
        f"value): {' / '.join(said)}. Hosts that disagree would train on different batches, so "
        "none starts; give all of them the same data, configuration and version"
    )


def _gather(array: np.ndarray) -> np.ndarray:
    """`array` of every process, stacked: [processes, …]."""
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(array)).reshape(-1, *array.shape)


def smallest(number: int | None) -> int | None:
    """The smallest of a number that each process has, as bytes of memory; None: it has none.

    Rounded down to a multiple of 1,024.
    """
    limit = np.iinfo(np.int32).max  # what JAX passes on without x64
    least, _ = _extremes(np.array([limit if number is None else min(number >> 10, limit)]))
    return None if least[0] == limit else int(least[0]) << 10


def _extremes(array: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The least and the greatest value of each entry of `array` [n] over all processes."""
    import jax
    from jax.experimental import multihost_utils

    if jax.process_count() == 1:
        return array, array
    devices = np.array(jax.devices()).reshape(jax.process_count(), -1)
    mesh = jax.sharding.Mesh(devices, ("processes", "devices"))
    rows, whole = jax.sharding.PartitionSpec("processes"), jax.sharding.PartitionSpec()
    every = multihost_utils.host_local_array_to_global_array(array[None], mesh, rows)
    with jax.set_mesh(mesh):
        found = jax.jit(_over_rows, out_shardings=(whole, whole))(every)
    least, greatest = (np.asarray(each.addressable_data(0)) for each in found)
    return least, greatest


def _over_rows(array):
    return array.min(0), array.max(0)


def connect(coordinator: str | None, num_processes: int | None, process_id: int | None, wait: int):
    """Joins the processes of this run, if there are several.

    Args:
        coordinator: `HOST:PORT` of process 0; None: JAX finds the others itself where it knows the
            platform (TPU pods, SLURM, Open MPI, Kubernetes), and elsewhere this is the only one.
        num_processes: how many there are.
        process_id: which of them this is.
        wait: seconds without a sign of life after which a process counts as gone.

    Raises:
        ValueError: only some of the three are given.
    """
    import jax

    given = [value is not None for value in (coordinator, num_processes, process_id)]
    if any(given) and not all(given):
        raise ValueError(
            f"coordinator={coordinator}, num_processes={num_processes}, process_id={process_id}: "
            "give all three, or none where the platform provides them"
        )
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    options: dict[str, Any] = {"heartbeat_timeout_seconds": wait}
    if coordinator is not None:
        jax.distributed.initialize(coordinator, num_processes, process_id, **options)
        return
    try:
        jax.distributed.initialize(**options)
    except ValueError as error:
        if "coordinator_address should be defined" not in str(error):
            raise  # the platform is known, and what it says is not enough


def say(text: object):
    """Prints on process 0 only."""
    import jax

    if jax.process_index() == 0:
        print(text, flush=True)


class StopSignals:
    """SIGINT and SIGTERM as a wish to stop after a step on which all processes agree.

    A second SIGINT ends the process at once; so does a second SIGTERM if it is the only one.
    """

    def __init__(self):
        import jax

        self.reason, self._several = "", jax.process_count() > 1
        signal.signal(signal.SIGINT, self._note)
        if not self._several:  # with several processes JAX itself listens for SIGTERM
            signal.signal(signal.SIGTERM, self._note)

    def _note(self, number: int, _):
        self.reason = signal.Signals(number).name
        signal.signal(number, signal.SIG_DFL)
        if self._several:
            os.kill(os.getpid(), signal.SIGTERM)

    def asked(self, step: int) -> bool:
        """Whether to stop after `step` steps; the same answer on every process."""
        if not self._several:
            return bool(self.reason)
        from jax.experimental import multihost_utils

        if multihost_utils.reached_preemption_sync_point(step):
            self.reason = self.reason or "SIGTERM"
            return True
        return False


@contextlib.contextmanager
def leaving_together() -> Iterator[None]:
    """Ends this process at once after the block, when there are others.

    An ordinary end would first wait for all the others, and those that are gone never come; and
    JAX's own hangs when a SIGTERM comes just then.
    """
    import jax

    code = 1
    try:
        yield
        if jax.process_count() == 1:
            return
        _require_all("the run", None)  # nobody leaves before all are done
        code = 0
    except Exception as error:
        if jax.process_count() == 1:
            raise
        traceback.print_exc()
        if isinstance(error, jax.errors.JaxRuntimeError) or "Gloo" in str(error):
            print(
                f"process {jax.process_index()} of {jax.process_count()} stops: work that takes "
                "all processes has failed, most likely because another has gone (see above, and "
                "their output). Start again with the hosts that are left; the run goes on from its "
                "last checkpoint",
                file=sys.stderr,
            )
    sys.stdout.flush()
    sys.stderr.flush()
    if jax.process_index() == 0:
        time.sleep(GRACE)  # it leads the others, which could not even say why they stop
    os._exit(code)
