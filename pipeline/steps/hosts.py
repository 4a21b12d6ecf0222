"""Many hosts as one run: joining, a mesh, agreement, shared directories, signals, a common end.

With one process, every function here only does its local part.
"""

import contextlib
import hashlib
import json
import math
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import jax
import numpy as np
from etils import epath
from jax.experimental import multihost_utils
from jax.experimental.mesh_utils import create_hybrid_device_mesh

from pipeline.errors import InvalidState, InvalidValue, UserError, describe
from pipeline.planning.identity import differences

T = TypeVar("T")

# Seconds for which a process that fails, and process 0, the coordinator, let the others write their
# last messages.
GRACE = 2.0

# The key of JAX's store under which the first process that fails leaves its sentence.
FAILURE = "pipeline/failure"


def main_process_first(what: str, work: Callable[[], T]) -> T:
    """The result of `work()`, which process 0 does first, and then the others, all at once.

    On a shared file system, the others find the files of process 0; on their own disks they do the
    work themselves. If process 0 fails, the others raise a RuntimeError that names `what`.
    """
    failure: BaseException | None = None
    result: list[T] = []
    for first in (True, False):
        if first == (jax.process_index() == 0):
            try:
                result.append(work())
            except Exception as error:
                failure = error
        _require_all(what, failure)
    return result[0]


def _require_all(what: str, failure: BaseException | None) -> None:
    """Raises on every process if any has failed, so that none waits for one that is gone."""
    failed = np.flatnonzero(_gather(np.array([failure is not None])))
    if failure is not None:
        raise failure
    if len(failed):
        raise InvalidState(
            f"{what} failed on process {failed[0]}; its own output says why. This process stops, "
            "too, since no step can run without all of them"
        )


def require_shared(directory: epath.Path) -> None:
    """Raises a ValueError on every process if one does not see the files of process 0 there."""
    if jax.process_count() == 1:
        return
    name = f".shared.{int(_gather(np.frombuffer(os.urandom(4), np.uint32) >> 1)[0, 0])}"
    leads = jax.process_index() == 0
    if leads:
        (directory / name).touch()
    _require_all("writing to the work directory", None)
    sees = _gather(np.array([(directory / name).exists()]))[:, 0]
    if leads:
        (directory / name).unlink()
    if not sees.all():
        raise InvalidValue(
            f"processes {', '.join(map(str, np.flatnonzero(~sees)))} do not see the files of "
            f"process 0 in {os.fspath(directory)}; give all of them a --workdir on a shared file "
            "system, since each writes its part of every checkpoint there"
        )


def require_agreement(values: Mapping[str, Any]) -> None:
    """Raises a ValueError on every process if named JSON, such as plans, differs between them.

    Each process sends a hash of 32 bytes, and its values only if the hashes differ. The message
    names the processes, and each difference from process 0.
    """
    text = json.dumps(dict(values), sort_keys=True).encode()
    hashes = _gather(np.frombuffer(hashlib.sha256(text).digest(), np.uint8))
    other = np.flatnonzero((hashes != hashes[0]).any(axis=1))
    if not len(other):
        return
    padded = text.ljust(int(_gather(np.array(len(text))).max()))
    texts = [json.loads(row.tobytes()) for row in _gather(np.frombuffer(padded, np.uint8))]
    said = [
        f"process {index}: "
        + "; ".join(
            f"{name}: {change}"
            for name in texts[0]
            for change in differences(texts[0][name], texts[index][name])
        )
        for index in other[:4]
    ]
    raise InvalidValue(
        f"{len(other)} of {len(hashes)} processes disagree with process 0 (“was” is process 0's "
        f"value): {' / '.join(said)}. Hosts that disagree would train on different batches, so "
        "none starts; give all of them the same data, configuration and version"
    )


def _gather(array: np.ndarray) -> np.ndarray:
    """`array` of every process, stacked: [processes, …]."""
    return np.asarray(multihost_utils.process_allgather(array)).reshape(-1, *array.shape)


def maximum(number: float) -> float:
    """The greatest of the processes' numbers."""
    if jax.process_count() == 1:
        return number
    # JAX sends no 64 bits, unless that is configured.
    return float(_gather(np.array([number], np.float64).view(np.uint8)).view(np.float64).max())


def make_mesh(axes: Mapping[str, int]) -> jax.sharding.Mesh:
    """A mesh of all devices of all hosts, from the size of each axis by name.

    One size may be -1, for all remaining devices. If the devices are in several slices, which a
    slower network joins, the first axis whose size the slices divide goes over that network.
    """
    devices = jax.device_count()
    given = math.prod(size for size in axes.values() if size != -1)
    sizes = {name: devices // max(given, 1) if n == -1 else n for name, n in axes.items()}
    several = [*axes.values()].count(-1) > 1
    if several or min(sizes.values(), default=1) < 1 or math.prod(sizes.values()) != devices:
        raise InvalidValue(
            f"mesh {dict(axes)} does not fit {devices} devices; sizes are whole numbers from 1 up, "
            "whose product is the number of devices, and one may be -1, for all remaining ones"
        )
    auto = (jax.sharding.AxisType.Auto,) * len(sizes)
    shape, names = tuple(sizes.values()), tuple(sizes)
    slices = len({getattr(device, "slice_index", 0) for device in jax.devices()})
    if slices == 1:
        return jax.make_mesh(shape, names, axis_types=auto)
    across = next((n for n, size in enumerate(shape) if size % slices == 0), None)
    if across is None:
        raise InvalidValue(
            f"mesh {sizes} does not fit {slices} slices; make the size of one axis a multiple of "
            f"{slices}, which then goes over the network between slices"
        )
    over = [slices if number == across else 1 for number in range(len(shape))]
    inside = [size // count for size, count in zip(shape, over, strict=True)]
    grid = create_hybrid_device_mesh(inside, over, jax.devices())
    return jax.sharding.Mesh(grid, names, axis_types=auto)


def connect(
    coordinator: str | None, num_processes: int | None, process_id: int | None, wait: int
) -> None:
    """Joins the processes of this run, if there are several.

    Args:
        coordinator: `HOST:PORT` of process 0; None: JAX finds the processes itself if it knows the
            platform (TPU pods, SLURM, Open MPI, Kubernetes); otherwise this is the only process.
        num_processes: the number of processes, given with `coordinator`.
        process_id: the number of this process, from 0, given with `coordinator`.
        wait: seconds to wait for a process that does not join, or that joined and is silent. If a
            process does not join, this one ends with a message and exit code 2.
    """
    given = [value is not None for value in (coordinator, num_processes, process_id)]
    if any(given) and not all(given):
        raise InvalidValue(
            f"coordinator={coordinator}, num_processes={num_processes}, process_id={process_id}: "
            "give all three, or none where the platform provides them"
        )
    if coordinator is not None and not re.fullmatch(r".+:\d+", coordinator):
        raise InvalidValue(
            f"coordinator is {coordinator!r}; it must be HOST:PORT, such as 10.0.0.1:1234"
        )
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # A timeout of JAX's own would end the process without a readable message.
    options: dict[str, Any] = {"initialization_timeout": wait + 600}
    options["heartbeat_timeout_seconds"] = wait
    timer = threading.Timer(wait, _give_up, [wait])
    timer.start()
    try:
        jax.distributed.initialize(coordinator, num_processes, process_id, **options)
    except ValueError as error:
        if coordinator or "coordinator_address should be defined" not in str(error):
            raise  # the platform is known, but does not provide all of it
    finally:
        timer.cancel()
    if jax.process_count() > 1:
        threading.Thread(target=_follow_failure, name="failure", daemon=True).start()


def _store() -> Any:
    """JAX's key-value store, which needs no device; see `pipeline.loading.exchange`."""
    from jax._src import distributed

    return distributed.global_state.client


def _publish_failure(sentence: str, code: int) -> bool:
    """Leaves the sentence and exit code with which all processes end; False if one is there."""
    try:
        _store().key_value_set(FAILURE, json.dumps([jax.process_index(), sentence, code]))
    except Exception:  # of a class of its own: another process was first, or is gone
        return False
    return True


def _follow_failure() -> None:
    """Ends this process when another one fails, whatever it waits for, with the same sentence."""
    while True:
        try:
            index, sentence, code = json.loads(_store().blocking_key_value_get(FAILURE, 60_000))
        except Exception as error:  # of a class of its own
            if "DEADLINE_EXCEEDED" in str(error):  # nobody has failed
                continue
            return  # the coordinator is gone
        if index == jax.process_index():
            return  # it says more itself
        sys.stdout.flush()
        print(sentence, file=sys.stderr, flush=True)
        if jax.process_index() == 0:
            time.sleep(GRACE)  # without the coordinator, others would not know
        os._exit(code)


def _give_up(wait: int) -> None:
    said = (
        f"not all processes of the run joined within {wait} s, so this one ends; see the output "
        "of the others, and start all of them with the same --coordinator, and with a larger "
        "--wait if they begin at different times"
    )
    print(said, file=sys.stderr, flush=True)
    os._exit(2)


class StopSignals(contextlib.ExitStack):
    """SIGINT and SIGTERM as requests to stop, at the same call of `received` on all processes.

    A second SIGINT ends the process at once; so does a second SIGTERM in a run of one process.
    `reason` is the name of the signal, empty before it comes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reason, self._several = "", jax.process_count() > 1
        self._calls, self._stops = 0, False
        # With several processes, JAX itself listens for SIGTERM.
        for number in [signal.SIGINT] if self._several else [signal.SIGINT, signal.SIGTERM]:
            self.callback(signal.signal, number, signal.signal(number, self._note))

    def _note(self, number: int, _: object) -> None:
        self.reason = signal.Signals(number).name
        signal.signal(number, signal.SIG_DFL)
        if self._several:
            os.kill(os.getpid(), signal.SIGTERM)

    def received(self) -> bool:
        """Whether to stop now: the same answer on every process, if all ask equally often.

        Call it between the batches of every loop. Once it is true, it stays true. JAX lets
        processes agree on the number of a call. So with several processes, nothing else may call
        `multihost_utils.reached_preemption_sync_point`, as orbax's `CheckpointManager` does: give
        it a subclass whose `reached_preemption` returns False.
        """
        if not self._several:
            return bool(self.reason)
        self._calls += 1
        if not self._stops and multihost_utils.reached_preemption_sync_point(self._calls):
            self.reason, self._stops = self.reason or "SIGTERM", True
        return self._stops


@contextlib.contextmanager
def exit_together(command: str) -> Iterator[None]:
    """Ends this process if the block raises; with other processes, also when the block ends.

    An ordinary exit would wait for all other processes, even for those that are gone, and JAX's own
    exit hangs if a SIGTERM comes at that moment. The code of `sys.exit` inside the block is that of
    the process. `command` begins the message of a user's mistake.

    If one process raises while others wait for it in a step, all that `connect` has joined end with
    its sentence.
    """
    code = 0
    try:
        try:
            yield
        except SystemExit as ending:
            code = int(ending.code or 0)
        _require_all("the run", None)  # nobody leaves before all are done
    except Exception as error:
        code = describe(error, command=command)
        lost = isinstance(error, jax.errors.JaxRuntimeError) or "Gloo" in str(error)
        if jax.process_count() > 1 and not lost:
            what = (
                str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
            )
            sentence = f"{command}: process {jax.process_index()} of {jax.process_count()}: {what}"
            if _publish_failure(sentence, code):
                print(sentence, file=sys.stderr, flush=True)
                time.sleep(GRACE)
        elif jax.process_count() > 1:
            print(
                f"process {jax.process_index()} of {jax.process_count()} stops: work that needs "
                "all processes failed, most likely because another is gone (see above, and their "
                "output). Start again with the remaining hosts; the run continues from its last "
                "checkpoint",
                file=sys.stderr,
            )
    if jax.process_count() == 1:
        if code:
            sys.exit(code)
        return
    sys.stdout.flush()
    sys.stderr.flush()
    if jax.process_index() == 0:
        time.sleep(GRACE)  # without the coordinator, others could not print why they stop
    os._exit(code)
