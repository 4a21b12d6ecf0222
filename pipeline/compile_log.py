"""What XLA compiles, by listening to JAX's own events."""

import threading

import jax

EVENT = "/jax/core/compile/backend_compile_duration"


class CompileLog:
    """The functions that XLA has compiled since this was made, by listening to JAX's own events.

    Programs found in JAX's persistent cache count too: the process would have compiled them.
    """

    def __init__(self):
        self._lock = threading.Lock()
        self._events: list[tuple[int, str]] = []
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **details: str | int):
        if event == EVENT:
            with self._lock:
                name = str(details.get("fun_name", "unknown"))
                self._events.append((threading.get_ident(), name))

    @property
    def names(self) -> list[str]:
        """One name for each compilation so far, such as `jit(train_step)`, in their order."""
        with self._lock:
            return [name for _, name in self._events]

    def count(self, name: str, thread: int) -> int:
        """Compilations of a function called `name` that `thread` has made."""
        with self._lock:
            return sum(thread == at and name in seen for at, seen in self._events)

    def close(self):
        """Stops listening."""
        jax.monitoring.unregister_event_duration_listener(self._listen)
