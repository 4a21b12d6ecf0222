"""Exchange: small values that processes tell one another through JAX's key-value store.

The store is that of `jax.distributed`. It needs no device, so an exchange may happen in any thread,
beside any collective. A single process needs no store.
"""

import collections
import json
import time
from collections.abc import Iterable
from typing import Any, cast

from pipeline.errors import InvalidState, Late, NotInstalled
from pipeline.planning.identity import fingerprint_of

# Seconds of one request to the store; signals are handled between requests.
REQUEST = 1.0

# The number of exchanges that this process has made with the same others.
_made: collections.Counter[str] = collections.Counter()


class Exchange:
    """Rounds in which each of some processes gives a value and gets those of all.

    All of them make their exchanges, and take the rounds of each, in the same order, like
    collectives. Each exchange numbers its keys, so those of two exchanges never meet. If a process
    dies, JAX ends those that wait for it.

    Args:
        processes: their numbers, with that of this process; None: all.
        seconds: the longest wait for the value of a process.
    """

    def __init__(self, processes: Iterable[int] | None = None, *, seconds: float = 600.0):
        import jax

        try:  # as orbax does; JAX has no other way to the store
            from jax._src import distributed

            store = distributed.global_state.client
        except (ImportError, AttributeError) as error:
            raise NotInstalled(
                f"JAX {jax.__version__} keeps its key-value store elsewhere than in jax._src."
                "distributed, by which hosts tell one another small values; use JAX 0.10 to 0.12"
            ) from error

        every = range(jax.process_count()) if processes is None else processes
        self._processes, self._seconds, self._round = sorted(every), seconds, 0
        self._me, self._store = jax.process_index(), cast(Any, store)
        group = fingerprint_of(self._processes)
        self._place = f"pipeline/exchange/{group}/{_made[group]}"
        self._closed = False
        _made[group] += 1

    def close(self) -> None:
        """Ends a wait in another thread within a second; there are no further rounds."""
        self._closed = True

    def gather(self, value: Any) -> list[Any]:
        """The values of all processes in this round, in the order of their numbers.

        `value` is small JSON. After an error, the next call takes the same round again: give it the
        same value.

        Raises:
            Late: a process, which the message names, gave no value in time.
            InvalidState: the exchange is closed.
        """
        text = json.dumps(value)
        if len(self._processes) == 1:
            return [json.loads(text)]
        self._store.key_value_set(self._key(self._round, self._me), text, allow_overwrite=True)
        values = [json.loads(self._get(process)) for process in self._processes]
        if self._round:  # all are in this round, so they have read the one before
            self._store.key_value_delete(self._key(self._round - 1, self._me))
        self._round += 1
        return values

    def _key(self, number: int, process: int) -> str:
        return f"{self._place}/{number}/{process}"

    def _get(self, process: int) -> str:
        """The value that a process gave in this round, once it is there."""
        key, end = self._key(self._round, process), time.monotonic() + self._seconds
        while (left := end - time.monotonic()) > 0:
            if self._closed:
                raise InvalidState("the exchange was closed while a thread waited for a value")
            try:
                return self._store.blocking_key_value_get(key, int(1000 * min(REQUEST, left)))
            except RuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
        raise Late(
            f"process {process} gave no value within {self._seconds:g} s; see its output, and call "
            "again, or start all processes again"
        )
