"""Transfer: global jax.Arrays made from the rows of this process, and the specs of their fields."""

import contextlib
import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.errors import InvalidType, InvalidValue, require_type
from pipeline.loading.dynamic_context import DynamicContext
from pipeline.loading.sharding import batch_sharding, block_of_sharding, parts, sharding_of
from pipeline.planning.bucket import Bucket
from pipeline.text.features import Feature

if TYPE_CHECKING:
    import jax
    from jax.sharding import Mesh, NamedSharding


def field_specs(
    batch: Mapping[str, np.ndarray],
    sharding: "NamedSharding",
    bucket: Bucket | None = None,
    features: Mapping[str, Feature] | None = None,
) -> "dict[str, jax.ShapeDtypeStruct]":
    """The global shape, dtype and sharding of each field; `batch` is the part of this process.

    A field of positions has the sharding of batches. A field of whole rows has that of rows alone.
    `features` decides for a feature, of tokens or of examples. Other fields are of positions if
    they have two dimensions.
    """
    import jax

    features = {} if features is None else features
    require_type("features", features, Mapping, "a dict of Feature by name, as Batches.features")
    whole = parts(sharding)
    held = block_of_sharding(sharding, whole).shape  # of an array of one element for each part
    sides = bucket.sides if bucket else ()
    blocks = [block_of_sharding(sharding, side.shape).shape for side in sides]
    rows = jax.sharding.PartitionSpec(*sharding.spec[:1])
    by_row = jax.sharding.NamedSharding(sharding.mesh, rows)
    specs = {}
    for name, local in batch.items():
        dtype = _require_numbers(name, local)
        feature = features.get(name)
        by_position = local.ndim == 2 if feature is None else not feature.per_example
        axes, placed = (2, sharding) if by_position else (1, by_row)
        sizes = list(zip(local.shape[:axes], held, whole, strict=False))
        fits = bool(sizes) and not any(size % here for size, here, _ in sizes)
        if not fits or (blocks and local.shape[:axes] not in [block[:axes] for block in blocks]):
            ours = " or ".join(map(str, blocks)) or f"multiples of {held}"
            raise InvalidValue(
                f"{name} has shape {local.shape}, but this process holds {ours} of "
                f"{bucket or 'a global batch'}; build batches with Batches(…, sharding=…) for the "
                "same sharding, and let transforms keep rows and positions; a field with a value "
                "for each segment must have the name of a feature of examples"
            )
        shape = (*(size // here * count for size, here, count in sizes), *local.shape[axes:])
        specs[name] = jax.ShapeDtypeStruct(shape, dtype, sharding=placed)
    return specs


def require_specs(
    specs: "Mapping[str, jax.ShapeDtypeStruct]",
    wanted: "Mapping[str, jax.ShapeDtypeStruct]",
    what: str,
) -> None:
    """Refuses fields that differ from those that programs are compiled for; `what` names them."""

    def describe(spec: Any) -> str:
        return "not there" if spec is None else f"{spec.dtype} {[*spec.shape]}"

    for name in dict.fromkeys([*wanted, *specs]):
        was, now = (describe(each.get(name)) for each in (wanted, specs))
        if was != now:
            raise InvalidValue(
                f"{name} of {what} is {now}, and was {was} in an empty batch, whose fields "
                "loader.specs has; let the transform return the same fields, dtypes and shapes for "
                "every batch of a bucket, or each other one would be compiled anew, on this host "
                "alone"
            )


def _require_numbers(name: str, local: Any) -> np.dtype:
    """The dtype that a field has on a device."""
    import jax

    if isinstance(local, np.ndarray | jax.Array) and not isinstance(local, np.ma.MaskedArray):
        dtype = local.dtype.newbyteorder("=")
        with contextlib.suppress(TypeError, ValueError):  # JAX knows no such dtype
            return jax.dtypes.canonicalize_dtype(jax.numpy.promote_types(dtype, dtype))
    raise InvalidType(
        f"{name} is {_describe(local)}, which no device can hold; let the transform return arrays "
        "of numbers alone, without a mask"
    )


def _describe(field: Any) -> str:
    kind = f"a {type(field).__name__}"
    return f"{kind} of {field.dtype}" if isinstance(field, np.ndarray) else kind


def _convert(name: str, local: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """A field in the dtype that it has on a device; an error if its numbers do not fit."""
    if local.dtype == dtype:
        return local
    if local.size and np.issubdtype(dtype, np.integer):
        least, most, limits = int(local.min()), int(local.max()), np.iinfo(dtype)
        if least < limits.min or most > limits.max:
            raise InvalidValue(
                f"{name} has numbers from {least:,} to {most:,} as {local.dtype}, and JAX makes "
                f"them {dtype}, which ends at {limits.max:,}; give numbers that fit, or set "
                "jax.config.update('jax_enable_x64', True)"
            )
    with np.errstate(over="ignore"):
        converted = local.astype(dtype)
    if np.isinf(converted).sum() > np.isinf(local).sum():
        raise InvalidValue(
            f"{name} has numbers as {local.dtype} that are infinite as {dtype}, which JAX makes of "
            "them; give numbers that fit, or set jax.config.update('jax_enable_x64', True)"
        )
    return converted


def to_global(
    batch: Mapping[str, Any],
    sharding: "Mesh | NamedSharding | DynamicContext",
    *,
    bucket: Bucket | None = None,
    features: Mapping[str, Feature] | None = None,
) -> "dict[str, jax.Array]":
    """Global jax.Arrays made from the rows of this process; each device holds its own part.

    Args:
        batch: arrays `[rows, positions]` of this process, as `Batches(…, sharding=…)` builds them;
            or `[rows, …]` with other dimensions, which are sharded by rows alone.
        sharding: a `Mesh`, a `NamedSharding` of `[rows, length]`, or a `DynamicContext`, as for
            `pipeline.load`.
        bucket: the bucket of the batch, whose shape is then checked; None: any that divides, not
            with a `DynamicContext`.
        features: the features of the batch, by name: `Batches.features`. Those of tokens are
            sharded by rows and length, those of examples by rows alone. None: there are none.

    Returns:
        A dict of jax.Arrays with the dtypes of `batch` and the global shape `[rows, length]`.
        Without `jax_enable_x64`, dtypes of 64 bits become those of 32.

    Raises:
        TypeError: `sharding` or `features` has another type, or a `DynamicContext` has no bucket.
        ValueError: an array does not have the shape of this process's part, or holds whole numbers
            of 64 bits that do not fit into 32.
    """
    sharding = batch_sharding(sharding)
    if isinstance(sharding, DynamicContext):
        if bucket is None:
            raise InvalidType("to_global() needs bucket=, whose rows decide the mesh of the batch")
        sharding = sharding.of(bucket.rows)
    # A device may read arrays of NumPy later, or use them as its own memory.
    copies = {name: copy.copy(field) for name, field in batch.items()}
    return place(copies, field_specs(batch, sharding, bucket, features))


def place(
    batch: Mapping[str, Any], specs: "Mapping[str, jax.ShapeDtypeStruct]", *, commit: bool = True
) -> "dict[str, jax.Array]":
    """`to_global` for arrays that nobody writes to any more, without a copy of them.

    `specs` are those of `field_specs`. Without `commit`, arrays are on the default device as those
    that JAX makes itself are, and may be used beside arrays on any device. `jax.jit` compiles a
    function again for arrays that differ in this alone.
    """
    import jax

    local = [_convert(name, batch[name], spec.dtype) for name, spec in specs.items()]
    if not commit:
        return dict(zip(specs, jax.device_put(local), strict=True))
    shardings = [spec.sharding for spec in specs.values()]
    shapes = [spec.shape for spec in specs.values()]
    # One call for all fields takes half of the time of a call for each.
    arrays = jax.make_array_from_process_local_data(shardings, local, shapes)
    return dict(zip(specs, arrays, strict=True))


class Transfer:
    """Puts batches on the devices, as programs were compiled for; holds no loader.

    A loader's thread has it, and would keep the loader alive.
    """

    def __init__(
        self,
        sharding: Any,
        specs: Mapping[Bucket, Any],
        features: Mapping[str, Feature],
        *,
        commit: bool,
    ):
        self._sharding, self._specs, self._features = sharding, specs, features
        self._commit = commit
        self._layouts: dict[Bucket, list] = {}  # of batches that have these specs

    def __call__(self, step: int, bucket: Bucket, batch: Mapping[str, Any]) -> Any:
        """The batch of a step, a dict of jax.Arrays; a `ValueError` if it has other fields."""
        layout = [
            (name, type(field), getattr(field, "shape", None), getattr(field, "dtype", None))
            for name, field in batch.items()
        ]
        if self._layouts.get(bucket) != layout:
            on = sharding_of(self._sharding, bucket.rows)
            specs = field_specs(batch, on, bucket, self._features)
            require_specs(specs, self._specs[bucket], f"the batch of step {step:,}")
            self._layouts[bucket] = layout
        return place(batch, self._specs[bucket], commit=self._commit)
