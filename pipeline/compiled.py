"""A step compiled ahead of time for every bucket, and a count of what XLA compiles."""

import dataclasses
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

from pipeline.bucket import Bucket

EVENT = "/jax/core/compile/backend_compile_duration"


class CompileLog:
    """The functions that XLA has compiled since this was made, by listening to JAX's own events.

    Programs found in JAX's persistent cache count too: the process would have compiled them.
    """

    def __init__(self):
        self._lock = threading.Lock()
        self._names: list[str] = []
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **details: str | int):
        if event == EVENT:
            with self._lock:
                self._names.append(str(details.get("fun_name", "unknown")))

    @property
    def names(self) -> list[str]:
        """One name for each compilation so far, such as `jit(train_step)`, in their order."""
        with self._lock:
            return list(self._names)

    def close(self):
        """Stops listening."""
        jax.monitoring.unregister_event_duration_listener(self._listen)


@dataclasses.dataclass(frozen=True)
class Program:
    """One compiled shape of a step.

    Attributes:
        run: the executable.
        compiles: how many compilations of the step JAX reported while it was made.
        seconds: what making it took.
        flops: floating-point operations of one call, as XLA estimates them; 0 where it does not.
        memory: bytes of arguments, results and temporaries, without what is donated twice.
    """

    run: Callable
    compiles: int
    seconds: float
    flops: float
    memory: int

    def __str__(self) -> str:
        return (
            f"compiled in {self.seconds:.1f} s, {self.flops / 1e9:,.2f} GFLOP a step, "
            f"{self.memory / 2**20:,.0f} MiB"
        )


class Compiled:
    """`step(state, batch)` for a few static shapes, all compiled before the first call.

    >>> import jax.numpy as jnp
    >>> specs = {Bucket(rows=2, length=4): {"inputs": jax.ShapeDtypeStruct((2, 4), jnp.int32)}}
    >>> def add(state, batch):
    ...     return state + batch["inputs"].sum()
    >>> add = Compiled(add, jnp.zeros(()), specs, report=None)
    >>> float(add(jnp.zeros(()), {"inputs": jnp.ones((2, 4), jnp.int32)}))
    8.0

    Args:
        step: a function of a state and a batch, both pytrees; compiled with the state donated if
            `donate`.
        state: the state, or a pytree of `jax.ShapeDtypeStruct` with its shardings.
        specs: for each bucket, a `jax.ShapeDtypeStruct` for each field of a batch.
        donate: let the step overwrite its state.
        report: called with a line for each bucket; None for silence.
        **jit_options: passed on to `jax.jit`, for example `out_shardings`.
    """

    def __init__(
        self,
        step: Callable,
        state: Any,
        specs: Mapping[Bucket, Mapping[str, jax.ShapeDtypeStruct]],
        *,
        donate: bool = False,
        report: Callable[[str], None] | None = print,
        **jit_options,
    ):
        self.name = step.__name__
        self.specs = dict(specs)
        self.programs: dict[Bucket, Program] = {}
        jitted = jax.jit(step, donate_argnums=(0,) if donate else (), **jit_options)
        for bucket, spec in specs.items():
            program = self.programs[bucket] = self._compile(jitted, state, spec)
            if report:
                report(f"{self.name} {bucket}: {program}")
        self._by_shape: dict[tuple[int, ...], Any] = {
            bucket.shape: self.programs[bucket].run for bucket in specs
        }

    def _compile(self, jitted: Any, state: Any, spec: Mapping[str, Any]) -> Program:
        log, begin = CompileLog(), time.perf_counter()
        run = jitted.lower(state, dict(spec)).compile()
        log.close()
        memory, costs = run.memory_analysis(), run.cost_analysis()
        return Program(
            run=run,
            compiles=sum(self.name in name for name in log.names),
            seconds=time.perf_counter() - begin,
            flops=(costs or {}).get("flops", 0.0),
            memory=memory.argument_size_in_bytes
            + memory.output_size_in_bytes
            + memory.temp_size_in_bytes
            - memory.alias_size_in_bytes
            if memory
            else 0,
        )

    def __call__(self, state: Any, batch: Mapping[str, jax.Array]):
        """Runs the step of the batch's shape.

        Raises:
            ValueError: the batch is of no compiled shape or dtype; names the field and both.
        """
        first = next(iter(batch.values()))
        run = self._by_shape.get(first.shape)
        if run is None:
            shapes = ", ".join(str(bucket) for bucket in self.specs)
            raise ValueError(
                f"{self.name} was compiled for {shapes} and got a batch of shape {first.shape}; "
                "batches must come from a plan with the same buckets"
            )
        spec = self.specs[Bucket(*first.shape)]
        for name in dict.fromkeys([*spec, *batch]):
            seen, wanted = batch.get(name), spec.get(name)
            if (
                seen is None
                or wanted is None
                or (seen.shape, seen.dtype) != (wanted.shape, wanted.dtype)
            ):
                raise ValueError(
                    f"{self.name}: {name} is {_describe(seen)}, and was compiled for "
                    f"{_describe(wanted)}"
                )
        return run(state, dict(batch))


def _describe(array) -> str:
    return "missing" if array is None else f"{array.dtype}{list(array.shape)}"
