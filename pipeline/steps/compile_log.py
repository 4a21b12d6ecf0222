"""A log of XLA's compilations."""

import contextlib

import jax

EVENT = "/jax/core/compile/backend_compile_duration"


class CompileLog(contextlib.ExitStack):
    """The functions that XLA has compiled since the log was made, from JAX's own events.

    It listens until its `with` block ends, or `close()`. Programs from JAX's persistent cache count
    too: without it, the process would have compiled them.

    >>> @jax.jit
    ... def step(x):
    ...     return x + 1
    >>> with CompileLog() as log:
    ...     x = step(jax.numpy.zeros(3))
    ...     x = step(x)
    ...     log.names.count("jit(step)")
    1
    """

    def __init__(self) -> None:
        super().__init__()
        #: One name for each compilation so far, such as `jit(train_step)`, in their order.
        self.names: list[str] = []
        jax.monitoring.register_event_duration_secs_listener(self._listen)
        self.callback(jax.monitoring.unregister_event_duration_listener, self._listen)

    def _listen(self, event: str, duration_secs: float, **details: str | int) -> None:
        if event == EVENT:
            self.names.append(str(details.get("fun_name", "unknown")))
