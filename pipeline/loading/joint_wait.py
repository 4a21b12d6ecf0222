"""Joint waits: if several processes wait for a corpus to grow, all continue or all end.

Each process checks by itself whether a part is sealed. One may see it just before its time limit,
and another just after. Then the first would continue to a step that the other never begins. So the
first process decides, and tells the others through the key-value store of `jax.distributed`. This
takes no device, and may happen beside any collective.
"""

import collections
import functools
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from pipeline.errors import InvalidState, NotSealed
from pipeline.planning.identity import fingerprint_of

if TYPE_CHECKING:
    from jax.sharding import NamedSharding

T = TypeVar("T")

# The most seconds by which a process may see a part later than the first process.
LAG = 600.0
# Seconds of one request to the store; signals are handled between requests.
REQUEST = 1.0

# The number of joint waits that this process has made with the same others.
_made: collections.Counter[str] = collections.Counter()


class JointWait:
    """The waits of some processes; each wait ends on all of them as on the first.

    All processes make joint waits, and end their waits, in the same order, like collectives. If a
    process has died, JAX ends those that wait for it.

    Args:
        processes: their numbers; this one is among them.
    """

    def __init__(self, processes: Iterable[int]):
        self._processes = sorted(processes)
        group = fingerprint_of(self._processes)
        self._place, self._ended = f"pipeline/waits/{group}/{_made[group]}", 0
        self._late: float | None = None  # when this process began to lag behind the first one
        _made[group] += 1

    @classmethod
    def of(cls, sharding: "NamedSharding") -> "JointWait | None":
        """That of the processes that share a batch; None if there is one process."""
        processes = {device.process_index for device in np.asarray(sharding.mesh.devices).flat}
        return cls(processes) if len(processes) > 1 else None

    def run(self, work: Callable[[], T], waits: Callable[[T], bool] = lambda result: True) -> T:
        """The result of `work()`, after a joint wait if `waits(result)`.

        Raises:
            NotSealed: see `end`.
        """
        while True:
            try:
                result = work()
                break
            except (NotSealed, StopIteration) as error:
                if self.end(error):
                    raise
        if waits(result):
            self.end()
        return result

    def end(self, error: BaseException | None = None) -> bool:
        """Ends a wait as it ends on the first process; returns whether it has ended.

        It has not if the first process saw parts that this one did not see in its time. Then this
        one waits again, for up to `LAG` seconds.

        Args:
            error: how it ended on this process; None, or another error than `NotSealed`: well.

        Raises:
            NotSealed: on all processes, with the same message, if it ended so on the first.
            InvalidState: this process does not see the parts of the first one.
        """
        import jax
        from jax._src import distributed  # as orbax does; JAX has no other way to the store

        store: Any = distributed.global_state.client
        first, key = self._processes[0], f"{self._place}/{self._ended}"
        said = decision = str(error) if isinstance(error, NotSealed) else ""
        if jax.process_index() == first:
            # Overwrites, since this process may have been interrupted here before. Keys stay: they
            # are few, and nobody tells how far the others have read.
            store.key_value_set(key, decision, allow_overwrite=True)
        elif (decision := _ask(store, key)) != said and not decision:
            self._late = self._late or time.monotonic()
            if time.monotonic() - self._late > LAG:
                raise InvalidState(
                    f"process {first} sees parts of the corpus that this one has not seen for "
                    f"{LAG:g} s: {said}. Let both read the same directory, or copies that are as "
                    "new, and continue from the last checkpoint"
                ) from error
            return False
        self._ended, self._late = self._ended + 1, None
        if decision:
            # The first process has the store, and may end now: all read it before.
            store.wait_at_barrier(key, int(1000 * LAG), self._processes)
            raise NotSealed(f"process {first}: {decision}") from error
        return True


def _ask(store: Any, key: str) -> str:
    """The value of a key, once it is set."""
    import jax

    while True:
        try:
            return store.blocking_key_value_get(key, int(1000 * REQUEST))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise


def wait_together(sharding: "NamedSharding", work: Callable[..., T], *arguments: Any) -> T:
    """The result of `work(*arguments)`, a joint wait of the processes that share a batch.

    Raises:
        NotSealed: see `JointWait.end`.
    """
    joint = JointWait.of(sharding)
    work = functools.partial(work, *arguments)
    return work() if joint is None else joint.run(work)
