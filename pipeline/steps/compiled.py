"""A step compiled ahead of time for every bucket, in as many microbatches as memory requires."""

import contextlib
import dataclasses
import functools
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, TypeVar

import jax
from etils import epath
from jax.sharding import NamedSharding

from pipeline.bar import Bar
from pipeline.errors import DoesNotFit, InvalidValue
from pipeline.fs import is_local
from pipeline.planning.bucket import Bucket
from pipeline.planning.text_table import text_table
from pipeline.steps.hosts import maximum, require_agreement
from pipeline.steps.microbatches import allowed

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Programs that are compiled at the same time. Each takes host memory: gigabytes for large models.
AT_ONCE = 4


@dataclasses.dataclass(frozen=True)
class Program:
    """One compiled shape of a step."""

    run: Callable
    microbatches: int  # parts into which it splits a batch
    memory: int  # bytes on a device: arguments (donated ones once), results, temporaries, `held`


class Compiled:
    """`step(state, batch)` for a few static shapes, all compiled before the first call.

    Each program is compiled inside `jax.set_mesh` of the mesh that its specs have, which
    `pipeline.DynamicContext` makes for each bucket. The state stays on its own mesh, which has the
    same devices: then give `out_shardings`, or a step that is donated is refused.

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
            stays within `budget`, found by compiling, never by running out of memory. The search
            begins at the memory of the whole batch ÷ `budget`. None: `step` does not take
            microbatches.
        budget: bytes on a device that a program may need; None or 0: the memory that devices
            report, the least over all hosts. CPUs report none.
        held: other arrays on the devices, like `state`: for a step that takes parameters alone,
            the rest of the training state. They count as memory of every program.
        **jit_options: passed on to `jax.jit`, for example `out_shardings`. A `PartitionSpec` there
            is of the mesh of the specs.

    Raises:
        MemoryError: a bucket needs more than the budget, however it is split.
        ValueError: the state, here or at the first call, holds an array twice, and is donated; the
            state is on several devices and batches are on one, or on the same ones in another
            order; or buckets have several meshes, and there are no `out_shardings` for a donated
            state.
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
        _require_same_devices(state, specs)
        self._unchecked = donate  # whether the next state may still hold an array twice
        if donate:
            _require_own_arrays(state)
        self._meshes = {bucket: _find_mesh(fields.values()) for bucket, fields in specs.items()}
        for bucket, mesh in self._meshes.items():
            _require_order(state, mesh, bucket)
        if donate and len({*self._meshes.values()}) > 1 and "out_shardings" not in jit_options:
            raise InvalidValue(
                "buckets have several meshes, so each program would return the state on its own, "
                "and the next one could not take it; give out_shardings=, with the shardings of "
                "the state, as (jax.tree.map(lambda leaf: leaf.sharding, state), None)"
            )
        self.budget = budget or device_memory()
        self._step, self._state, self._held = step, state, bytes_on_device(held)
        self._options: dict[str, Any] = jit_options | {"donate_argnums": (0,) if donate else ()}
        choices = {bucket: self._choices(bucket, microbatches) for bucket in specs}
        shown = None if jax.process_index() == 0 else False
        bar = Bar(
            f"compiling {self.name}", total=len(specs), unit=" shape", shown=shown, log=logger
        )
        with bar, ThreadPoolExecutor(AT_ONCE) as pool:
            firsts = {}
            for bucket, (first, *_) in choices.items():
                # Tracing needs this thread's mesh and Python; XLA itself compiles without the lock.
                lowered = self._lower(bucket, first)
                firsts[bucket] = pool.submit(self._compile, lowered, bucket, first)
                firsts[bucket].add_done_callback(lambda _: bar.update())
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
        if microbatches != "auto":
            return [microbatches]
        return allowed(bucket.rows, next(iter(self.specs[bucket].values())).sharding)

    def _lower(self, bucket: Bucket, number: int) -> Any:
        step = self._step
        if number:
            step = functools.partial(step, microbatches=number)
            functools.update_wrapper(step, self._step)
        mesh = self._meshes[bucket]  # under explicit axes, arrays have theirs with them
        with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
            jitted = jax.jit(step, **self._options)
            return jitted.lower(self._state, dict(self.specs[bucket]))

    def _compile(self, lowered: Any, bucket: Bucket, number: int) -> Program:
        begin = time.perf_counter()
        run = lowered.compile()
        program = Program(run, max(number, 1), program_memory(run) + self._held)
        split = f" in {program.microbatches} microbatches" if program.microbatches > 1 else ""
        logger.info(
            f"{self.name} {bucket}{split}: compiled in {time.perf_counter() - begin:.1f} s, "
            f"{show_bytes(program.memory)}"
        )
        return program

    def _require_mesh(self, bucket: Bucket, batch: Mapping[str, Any]) -> None:
        """Refuses a batch on another mesh, which would run, and may be computed otherwise.

        Steps look at the axes of a mesh, such as a model that compares positions of columns only
        where `context` divides them.
        """
        wanted, found = self._meshes[bucket], _find_mesh(batch.values())
        if found is None or wanted is None or found is wanted or found == wanted:
            return
        sizes = [{n: k for n, k in mesh.shape.items() if k > 1} for mesh in (found, wanted)]
        if sizes[0] != sizes[1]:
            raise InvalidValue(
                f"{self.name}: the batch is on the mesh {sizes[0]}, and the program of {bucket} is "
                f"compiled for {sizes[1]}; give loader.specs of the loader of these batches, and "
                "the same sharding="
            )

    def _fit(self, bucket: Bucket, more: list[int], program: Program) -> Program:
        """`program`, or the first with more microbatches that fits the budget."""
        if self.budget is None or program.memory <= self.budget:
            return program
        # Microbatches divide a part of the memory at most, so fewer than this cannot fit. The last
        # number is tried in any case, for the message.
        least = -(-program.memory // self.budget)
        for number in [n for n in more if n >= least] or more[-1:]:
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
        return program

    def __call__(self, state: Any, batch: Mapping[str, Any]) -> Any:
        """Runs the program for the batch's shapes.

        Raises:
            ValueError: the fields of the batch, or their shapes or shardings, are not compiled, or
                its mesh is not that of its program.
            TypeError: a field has another dtype.
        """
        shapes = _shapes(batch)
        if self._unchecked:
            _require_own_arrays(state)
            self._unchecked = False
        for bucket, specs in self.specs.items():
            if _shapes(specs) == shapes:
                self._require_mesh(bucket, batch)
                return self.programs[bucket].run(state, dict(batch))
        raise InvalidValue(
            f"{self.name}: no program takes the shapes {shapes}; batches must come from a plan "
            f"with the buckets {', '.join(map(str, self.specs))}, and have the fields "
            f"{', '.join(next(iter(self.specs.values())))}"
        )


def on_batch_mesh(step: Callable[..., T]) -> Callable[..., T]:
    """A step of your own that runs inside `jax.set_mesh` of the mesh of each batch.

    `step` is a function of `jax.jit` or `nnx.jit`, whose last positional argument is a batch of a
    loader; it is compiled for each bucket. With `pipeline.DynamicContext`, give it `out_shardings`
    for the state, whose arrays would otherwise move to the mesh of each bucket.

    Raises:
        ValueError: no field of the batch is on a mesh.
    """

    @functools.wraps(step)
    def run(*arguments: Any, **options: Any) -> T:
        mesh = _find_mesh(arguments[-1].values())
        if mesh is None:
            raise InvalidValue(
                "no field of the batch, the last argument, is on a mesh with AxisType.Auto; load "
                "with sharding=, or call the step without on_batch_mesh"
            )
        with jax.set_mesh(mesh):
            return step(*arguments, **options)

    return run


def _find_mesh(arrays: Iterable[Any]) -> jax.sharding.Mesh | None:
    """The mesh of the first array or spec that has one; None: none, or with explicit axes."""
    for array in arrays:
        sharding = getattr(array, "sharding", None)
        if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, jax.sharding.Mesh):
            return None if sharding.mesh.explicit_axes else sharding.mesh
    return None


def _require_order(state: Any, mesh: jax.sharding.Mesh | None, bucket: Bucket) -> None:
    """Refuses a state on the devices of a mesh in another order, which no program can take."""
    own = _find_mesh(jax.tree.leaves(state))
    if own is None or mesh is None or own is mesh:
        return
    orders = [[device.id for device in each.devices.flat] for each in (own, mesh)]
    if orders[0] != orders[1] and sorted(orders[0]) == sorted(orders[1]):
        raise InvalidValue(
            f"the state is on devices in the order {orders[0]}, and batches of {bucket} in "
            f"{orders[1]}; make the shardings of both from one mesh"
        )


def _shapes(arrays: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: array.shape for name, array in arrays.items()}


def _require_same_devices(
    state: Any, specs: Mapping[Bucket, Mapping[str, jax.ShapeDtypeStruct]]
) -> None:
    """Refuses a state on several devices for batches on one, before JAX does."""
    placed = [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(state)]
    count = max((sharding.num_devices for sharding in placed if sharding), default=1)
    fields = [spec.sharding for each in specs.values() for spec in each.values()]
    if count > 1 and any(sharding and sharding.num_devices == 1 for sharding in fields):
        raise InvalidValue(
            f"the state is on {count} devices, as all arrays are that are made inside "
            "jax.set_mesh, and the batches are on one; load them with sharding=, the mesh"
        )


def _require_own_arrays(state: Any) -> None:
    """Refuses a state of which two leaves are one array, which a step cannot overwrite for both."""
    seen: dict[tuple[Any, int], str] = {}  # by device and place in its memory
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        if not isinstance(leaf, jax.Array) or not leaf.size:
            continue
        if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        own = jax.tree_util.keystr(path)
        for shard in leaf.addressable_shards:
            other = seen.setdefault((shard.device, shard.data.unsafe_buffer_pointer()), own)
            if other != own:
                raise InvalidValue(
                    f"state{own} is the same array as state{other}, so a step with donate=True "
                    f"would overwrite both; begin with a copy, as jax.tree.map(jnp.copy, …) makes, "
                    "or give donate=False"
                )


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
