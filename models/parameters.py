"""How each kind of parameter is split over a mesh, and whether weight decay applies to it.

One table by name, instead of notes on every parameter, also fits trees that mirror the parameters
(gradients, optimiser moments).
"""

import functools
import logging
from collections.abc import Callable
from typing import Any

import jax
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

# Mesh axes for each dimension. `fsdp` splits the residual width D of every matrix; `tensor` splits
# what a layer computes in parallel: heads, feed-forward width, vocabulary.
AXES: dict[str, tuple[str | None, ...]] = {
    "table": ("tensor", "fsdp"),  # V, D
    "patches": (None, "fsdp"),  # P, D
    "query": ("fsdp", "tensor", None),  # D, N, K
    "key": ("fsdp", "tensor", None),  # D, G, K
    "value": ("fsdp", "tensor", None),  # D, G, K
    "out": ("tensor", None, "fsdp"),  # N, K, D
    "gate": ("fsdp", "tensor"),  # D, F
    "up": ("fsdp", "tensor"),  # D, F
    "down": ("tensor", "fsdp"),  # F, D
    "scale": (None,),  # D
}


def jit_init(init: Callable[[Array], Any], mesh: Mesh) -> Any:
    """`init`, from a key to parameters or a state, jitted: each device makes its part of them."""
    shapes = jax.eval_shape(init, jax.random.key(0))
    return jax.jit(init, out_shardings=parameter_shardings(shapes, mesh))


def parameter_shardings(tree: Any, mesh: Mesh) -> Any:
    """Return a tree of `NamedSharding` with the structure of `tree`.

    A dimension stays whole if the mesh lacks its axis, or the axis does not divide it; the second
    is logged, once for each kind of parameter, since it takes memory and time. So do leaves
    that are not parameters (step counters), leaves with fewer dimensions than the parameter that
    they are named after (the factors of Adafactor, the sums of SM3), and the leading dimension of
    layers stacked by `scan_layers`.

    Args:
        tree: `nnx.state(model)`, its `jax.eval_shape`, optimiser state that mirrors it, or all
            of these in one tree; leaves have a shape.
        mesh: any mesh; axes named `fsdp` and `tensor` are used.
    """

    def sharding(path, leaf):
        axes = AXES.get(_name(path), ())
        if len(leaf.shape) < len(axes):  # a factor, with the name of its parameter
            axes = ()
        whole = (None,) * (len(leaf.shape) - len(axes))
        fitting: list[str | None] = []
        for axis, size in zip(whole + axes, leaf.shape, strict=True):
            parts = mesh.shape.get(axis, 0)
            fits = bool(parts) and size % parts == 0
            fitting.append(axis if fits else None)
            if parts and not fits:
                _say(_name(path), leaf.shape, size, str(axis), parts)
        return NamedSharding(mesh, PartitionSpec(*fitting))

    return jax.tree_util.tree_map_with_path(sharding, tree)


@functools.cache
def _say(name: str, shape: tuple[int, ...], size: int, axis: str, parts: int) -> None:
    """Log once that a dimension of a parameter stays whole."""
    logging.getLogger(__name__).warning(
        "%r %s stays whole on the %d devices of the axis %r, since %d does not divide %d; %d would "
        "be divided.",
        name, list(shape), parts, axis, parts, size, -(-size // parts) * parts,
    )  # fmt: skip


def decay_mask(tree: Any) -> Any:
    """Return a tree of bools for optax: True for matrices, False for the norms' scales.

    By name, because a scale that `scan_layers` has stacked is two-dimensional as well. A matrix
    that `AXES` does not name is logged once.
    """

    def decays(path, leaf):
        if _name(path) not in AXES and len(getattr(leaf, "shape", ())) > 1:
            _say_unnamed(_name(path))
        return _name(path) in _MATRICES

    return jax.tree_util.tree_map_with_path(decays, tree)


@functools.cache
def _say_unnamed(name: str) -> None:
    """Log once that a parameter is in no table."""
    logging.getLogger(__name__).warning(
        "%r is not in AXES of models/parameters.py: it has no weight decay, and is whole on every "
        "device; add it there.",
        name,
    )


_MATRICES = {name for name, axes in AXES.items() if len(axes) > 1}


def _name(path: tuple[Any, ...]) -> str:
    """Return the last name in a key path, as nnx and optax build them: a parameter's own, or ''."""
    names = [entry.key for entry in path if isinstance(entry, jax.tree_util.DictKey)]
    return str(names[-1]) if names else ""
