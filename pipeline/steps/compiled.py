"""A step compiled ahead of time for every bucket, in as many microbatches as memory requires."""

import dataclasses
import functools
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import jax
from etils import epath

from pipeline.errors import DoesNotFit, InvalidValue
from pipeline.fs import is_local
from pipeline.planning.bucket import Bucket
from pipeline.planning.text_table import text_table
from pipeline.steps.compile_log import CompileLog
from pipeline.steps.hosts import maximum, require_agreement
from pipeline.steps.microbatches import allowed

logger = logging.getLogger(__name__)

# Programs that are compiled at the same time. Each takes host memory: gigabytes for large models.
AT_ONCE = 4

# A bucket that needs more than this share of the memory is logged as a warning.
TIGHT = 0.9


@dataclasses.dataclass(frozen=True)
class Program:
    """One compiled shape of a step."""

    run: Callable
    microbatches: int  # parts into which it splits a batch
    compiles: int  # compilations of the step that JAX reported while it was made
    memory: int  # bytes on a device: arguments (donated ones once), results, temporaries, `held`


class Compiled:
    """`step(state, batch)` for a few static shapes, all compiled before the first call.

    >>> import jax.numpy as jnp
    >>> specs = {Bucket(rows=2, length=4): {"inputs": jax.ShapeDtypeStruct((2, 4), jnp.int32)}}
    >>> def add(state, batch):
    ...     return state + batch["inputs"].sum()
    >>> add = Compiled(add, jnp.zeros(()), specs)
    >>> float(add(jnp.zeros(()), {"inputs": jnp.ones((2, 4), jnp.int32)}))
    8.0

    Args:
        step: a function of a state and a batch, both pytrees; with `microbatches` also of the
            keyword `microbatches`, a whole number that is static for each bucket.
        state: the state, or a pytree of `jax.ShapeDtypeStruct` with its shardings.
        specs: for each bucket, a `jax.ShapeDtypeStruct` for each field of a batch.
        donate: whether the step may overwrite its state.
        microbatches: the number for every bucket; "auto": for each bucket the fewest whose program
            stays within `budget`, found by compiling, never by running out of memory; None: `step`
            does not take microbatches.
        budget: bytes on a device that a program may need; None or 0: the memory that devices
            report, the least over all hosts. CPUs report none.
        held: other arrays on the devices, like `state`: for a step that takes parameters alone,
            the rest of the training state. They count as memory of every program.
        **jit_options: passed on to `jax.jit`, for example `out_shardings`.

    Raises:
        ValueError: the rows of a bucket do not split into `microbatches`.
        MemoryError: a bucket needs more than the budget, however it is split.
    """

    def __init__(
        self,
        step: Callable,
        state: Any,
        specs: Mapping[Bucket, Mapping[str, jax.ShapeDtypeStruct]],
        *,
        donate: bool = False,
        microbatches: int | Literal["auto"] | None = None,
        budget: int | None = None,
        held: Any = None,
        **jit_options: Any,
    ):
        self.name, self.specs = step.__name__, dict(specs)
        self.budget = budget or device_memory()
        self._step, self._state, self._held = step, state, bytes_on_device(held)
        self._options: dict[str, Any] = jit_options | {"donate_argnums": (0,) if donate else ()}
        choices = {bucket: self._choices(bucket, microbatches) for bucket in specs}
        with CompileLog() as self._events, ThreadPoolExecutor(AT_ONCE) as pool:
            # Tracing needs this thread's mesh and Python; XLA itself compiles without the lock.
            firsts = {
                bucket: pool.submit(self._compile, self._lower(bucket, first), bucket, first)
                for bucket, (first, *_) in choices.items()
            }
            self.programs = {
                bucket: self._fit(bucket, choices[bucket][1:], future.result())
                for bucket, future in firsts.items()
            }
        # Hosts that split batches differently would wait for each other in different places.
        split = {f"{self.name} {b}": p.microbatches for b, p in self.programs.items()}
        require_agreement({"microbatches": split})

    def _choices(self, bucket: Bucket, microbatches: int | Literal["auto"] | None) -> list[int]:
        """Numbers of microbatches to try, the fewest first; 0: a step without microbatches."""
        if microbatches is None:
            return [0]
        sharding = next(iter(self.specs[bucket].values())).sharding
        numbers = allowed(bucket.rows, sharding)
        if microbatches == "auto":
            return numbers
        if microbatches not in numbers:
            raise InvalidValue(
                f"bucket {bucket} does not split into microbatches={microbatches!r}; each device "
                f"splits its own rows, so it must be one of {', '.join(map(str, numbers))}, or "
                "'auto'"
            )
        return [int(microbatches)]

    def _lower(self, bucket: Bucket, number: int) -> Any:
        step = self._step
        if number:
            step = functools.partial(step, microbatches=number)
            functools.update_wrapper(step, self._step)
        return jax.jit(step, **self._options).lower(self._state, dict(self.specs[bucket]))

    def _compile(self, lowered: Any, bucket: Bucket, number: int) -> Program:
        thread, begin = threading.get_ident(), time.perf_counter()
        before = self._events.count(self.name, thread)
        run = lowered.compile()
        program = Program(
            run=run,
            microbatches=max(number, 1),
            compiles=self._events.count(self.name, thread) - before,
            memory=program_memory(run) + self._held,
        )
        split = f" in {program.microbatches} microbatches" if program.microbatches > 1 else ""
        logger.info(
            f"{self.name} {bucket}{split}: compiled in {time.perf_counter() - begin:.1f} s, "
            f"{show_bytes(program.memory)}"
        )
        return program

    def _fit(self, bucket: Bucket, more: list[int], program: Program) -> Program:
        """`program`, or the first with more microbatches that fits the budget."""
        if self.budget is None:
            return program
        for number in more:
            if program.memory <= self.budget:
                break
            program = self._compile(self._lower(bucket, number), bucket, number)
        if program.memory > self.budget:
            raise DoesNotFit(
                f"{self.name} needs {show_bytes(program.memory)} a device for bucket {bucket} in "
                f"{program.microbatches} microbatches, and there are {show_bytes(self.budget)}; "
                "use fewer rows or positions, microbatches='auto', a smaller model, remat, or more "
                "devices to share the state"
            )
        if program.memory > TIGHT * self.budget:
            share = f"{program.memory / self.budget:.0%} of {show_bytes(self.budget)}"
            logger.warning("%s %s needs %s", self.name, bucket, share)
        return program

    def __call__(self, state: Any, batch: Mapping[str, Any]) -> Any:
        """Runs the program for the batch's shapes.

        Raises:
            ValueError: the batch has a shape, dtype or sharding that was not compiled; the message
                names the field, its value and the compiled one.
        """
        bucket = max(self.specs, key=lambda each: _alike(batch, self.specs[each]))
        specs = self.specs[bucket]
        for name in dict.fromkeys([*specs, *batch]):
            given, spec = batch.get(name), specs.get(name)
            if not _as_compiled(given, spec):
                raise InvalidValue(
                    f"{self.name}: {name} is {_describe(given)}, and was compiled for "
                    f"{_describe(spec)}; batches must come from a plan with the buckets "
                    f"{', '.join(map(str, self.specs))}, and from pipeline.to_global"
                )
        return self.programs[bucket].run(state, dict(batch))


def device_memory() -> int | None:
    """Bytes of memory of a device, the least over all hosts; None if devices do not report it."""
    stats = jax.local_devices()[0].memory_stats() or {}
    least = -maximum(-float(stats.get("bytes_limit", math.inf)))
    return None if least == math.inf else int(least)


def program_memory(program: Any) -> int:
    """Bytes on a device that a compiled program needs, as XLA reports them."""
    memory = program.memory_analysis()
    return (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        + memory.temp_size_in_bytes
        - memory.alias_size_in_bytes
    )


def keep_programs(directory: epath.PathLike) -> None:
    """Keeps compiled programs in `directory`, JAX's persistent cache, for a fast second start.

    A directory that JAX was given (JAX_COMPILATION_CACHE_DIR) has precedence. Programs are not kept
    in object storage, for which JAX would need other libraries.
    """
    told = getattr(jax.config, "jax_compilation_cache_dir")  # noqa: B009 (set at run time)
    if not told and is_local(directory):
        jax.config.update("jax_compilation_cache_dir", os.fspath(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def bytes_on_device(tree: Any) -> int:
    """Bytes of arrays, or of `jax.ShapeDtypeStruct`s, on a device that holds its part of each."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape) if leaf.sharding else leaf.shape)
        * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def programs_table(*steps: Compiled) -> str:
    """A table of the microbatches and memory of the program of each step and bucket."""
    rows = [["step", "bucket", "microbatches", "memory", "of limit"]]
    for step in steps:
        for bucket, program in step.programs.items():
            share = f"{program.memory / step.budget:.0%}" if step.budget else "–"
            number, size = f"{program.microbatches}", show_bytes(program.memory)
            rows.append([step.name, f"{bucket}", number, size, share])
    return "\n".join(text_table(rows))


def show_bytes(count: int) -> str:
    """A number of bytes, in MiB or GiB."""
    return f"{count / 2**30:,.2f} GiB" if count >= 2**30 else f"{count / 2**20:,.1f} MiB"


def _alike(batch: Mapping[str, Any], specs: Mapping[str, jax.ShapeDtypeStruct]) -> int:
    return sum(name in batch and batch[name].shape == spec.shape for name, spec in specs.items())


def _as_compiled(array: Any, spec: Any) -> bool:
    if array is None or spec is None or (array.shape, array.dtype) != (spec.shape, spec.dtype):
        return False
    if spec.sharding is None:
        return True
    return (
        isinstance(array, jax.Array)
        and array.committed
        and array.sharding.is_equivalent_to(spec.sharding, array.ndim)
    )


def _describe(array: Any) -> str:
    if array is None:
        return "missing"
    text = f"{array.dtype}{list(array.shape)}"
    if isinstance(array, jax.Array) and not array.committed:
        return f"{text}, not committed to a device"
    placed: Any = getattr(array, "sharding", "NumPy")
    return f"{text} of {getattr(placed, 'spec', placed)}"
