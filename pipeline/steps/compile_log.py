"""A log of XLA's compilations, and a guard for steps that must not be compiled again."""

import contextlib
import logging
import re
import threading

import jax

from pipeline.errors import InvalidState

EVENT = "/jax/core/compile/backend_compile_duration"

# The loggers to which JAX explains, on request, why it traces a function again, and then also how
# it uses its persistent cache.
EXPLANATIONS = (
    "jax._src.interpreters.partial_eval",
    "jax._src.compiler",
    "jax._src.compilation_cache",
)
EXPLAINS = ("CACHE MISS", "persistent compilation cache", "persistent cache entry")


class CompileLog(contextlib.ExitStack):
    """The functions that XLA has compiled since the log was made, from JAX's own events.

    It listens until its `with` block ends, or `close()`. Programs from JAX's persistent cache count
    too: without it, the process would have compiled them.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._events: list[tuple[int, str]] = []
        jax.monitoring.register_event_duration_secs_listener(self._listen)
        self.callback(jax.monitoring.unregister_event_duration_listener, self._listen)

    def _listen(self, event: str, duration_secs: float, **details: str | int) -> None:
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
        """The number of compilations of a function called `name` by `thread`."""
        with self._lock:
            return sum((thread, f"jit({name})") == event for event in self._events)


class CompileGuard(CompileLog):
    """Raises if a step is compiled after the start; counts other compilations.

    >>> @jax.jit
    ... def step(x):
    ...     return x + 1
    >>> x = step(jax.numpy.zeros(3))
    >>> with CompileGuard("step") as guard:
    ...     x = step(x)
    ...     guard.check("at step 1")
    ...     guard.again
    0

    Args:
        *names: of the functions to watch.

    Attributes:
        again: the number of compilations of the steps since the guard was made.
        others: the number of all others.
    """

    def __init__(self, *names: str):
        self._watched = re.compile(rf"(?<!\w)({'|'.join(map(re.escape, names))}) (defined at|id=)")
        super().__init__()
        self._compiled = {f"jit({name})" for name in names}
        self.again = self.others = 0
        self._reason = ""
        self._explained = bool(jax.config.values["jax_explain_cache_misses"])
        jax.config.update("jax_explain_cache_misses", True)
        self.callback(jax.config.update, "jax_explain_cache_misses", self._explained)
        for logs in map(logging.getLogger, EXPLANATIONS):
            logs.addFilter(self._note)
            self.callback(logs.removeFilter, self._note)

    def _note(self, record: logging.LogRecord) -> bool:
        """Keeps JAX's reason for tracing a watched function, instead of printing it."""
        text = record.getMessage()
        if not any(each in text for each in EXPLAINS):
            return True
        if self._watched.search(text):
            self._reason = " ".join(text.split("\n", 1)[-1].split())
        return self._explained

    def check(self, when: str) -> None:
        """Checks the compilations since the last check; `when` is for the message.

        Raises:
            RuntimeError: a step was compiled; the message names it and what has changed.
        """
        names = self.names
        again = [name for name in names if name in self._compiled]
        self.others, before, self.again = len(names) - len(again), self.again, len(again)
        if len(again) == before:
            return
        text = f"compiled {when}, after the start: {again[-1]}, for a shape, dtype or sharding "
        text += "that was not compiled before"
        raise InvalidState(text + (f"; JAX says: {self._reason}" if self._reason else ""))
