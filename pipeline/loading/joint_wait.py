"""Joint waits: if several processes wait for a corpus to grow, all continue or all end.

Each process checks by itself whether a part is sealed. One process may see it just before its time
limit, and another just after. Then the first would continue to a step that the other never begins.
So processes tell one another how a wait has ended, through the key-value store of
`jax.distributed`. This takes no device, and may happen beside any collective.
"""

import collections
import logging
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from pipeline.errors import NotSealed, name_some
from pipeline.planning.identity import fingerprint_of

if TYPE_CHECKING:
    from jax.sharding import NamedSharding

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Seconds between two looks at the answers of the others: at first, and at most. The process with
# the store may end two seconds after it knows all answers; see `pipeline.steps.hosts`.
LOOK, SELDOM = 0.005, 0.5
# Seconds after which a message names the processes that are missing.
LONG = 10.0

# The number of joint waits that this process has made with the same others.
_made: collections.Counter[str] = collections.Counter()


class JointWait:
    """The waits of some processes; each wait ends in the same way for all of them.

    All processes make joint waits, and end their waits, in the same order, like collectives. If a
    process has died, JAX ends those that wait for it.

    Args:
        processes: their numbers; this one is among them.
    """

    def __init__(self, processes: Iterable[int]):
        self._processes = sorted(processes)
        group = fingerprint_of(self._processes)
        self._place, self._ended = f"pipeline/waits/{group}/{_made[group]}", 0
        _made[group] += 1

    @classmethod
    def of(cls, sharding: "NamedSharding") -> "JointWait | None":
        """That of the processes that share a batch; None if there is one process."""
        processes = {device.process_index for device in np.asarray(sharding.mesh.devices).flat}
        return cls(processes) if len(processes) > 1 else None

    def end(self, error: BaseException | None = None) -> None:
        """Ends a wait: returns once it has ended on every process.

        Args:
            error: how it ended on this process; None, or another error than `NotSealed`: well.

        Raises:
            NotSealed: on all processes, with the same message, if it ended so on any.
        """
        import jax
        from jax._src import distributed  # as orbax does; JAX has no other way to the store

        store: Any = distributed.global_state.client
        own, number = jax.process_index(), self._ended
        said = str(error) if isinstance(error, NotSealed) else ""
        # Overwrites, since this process may have been interrupted here before.
        store.key_value_set(f"{self._place}/{number}/{own}", said, allow_overwrite=True)
        begin, pause, told = time.monotonic(), LOOK, False
        while True:
            found = store.key_value_dir_get(f"{self._place}/{number}/")
            answers = {int(key.rpartition("/")[2]): answer for key, answer in found}
            if not (missing := [each for each in self._processes if each not in answers]):
                break
            if not told and time.monotonic() - begin > LONG:
                logger.info(f"waiting until the corpus has grown for process {name_some(missing)}")
                told = True
            time.sleep(pause)
            pause = min(1.5 * pause, SELDOM)
        if number:  # all have read the answers to the wait before
            store.key_value_delete(f"{self._place}/{number - 1}/{own}")
        self._ended += 1
        for process in self._processes:
            if answers[process]:
                raise NotSealed(f"process {process}: {answers[process]}") from error


def wait_together(sharding: "NamedSharding", work: Callable[..., T], *arguments: Any) -> T:
    """The result of `work(*arguments)`, a joint wait of the processes that share a batch.

    Raises:
        NotSealed: see `JointWait.end`.
    """
    if (joint := JointWait.of(sharding)) is None:
        return work(*arguments)
    try:
        result = work(*arguments)
    except NotSealed as error:
        joint.end(error)
        raise
    joint.end()
    return result
