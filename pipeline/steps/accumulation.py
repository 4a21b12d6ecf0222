"""Accumulation: one update from the gradients of several batches, as if they were one batch."""

from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax


class Accumulated(NamedTuple):
    """The state of an optimizer that accumulates.

    Attributes:
        inner: the state of the optimizer itself.
        gradients: Σ gradients of weighted losses since the last update, as the parameters.
        weight: Σ weights since the last update, a float32 scalar.
        batches: batches since the last update, an int32 scalar.
    """

    inner: Any
    gradients: Any
    weight: jax.Array
    batches: jax.Array


def accumulate(
    optimizer: optax.GradientTransformation, batches: int = 1
) -> optax.GradientTransformationExtraArgs:
    """The optimizer with one update for several batches, by Σ gradients ÷ Σ weights of them all.

    `optax.MultiSteps` divides by the number of batches instead, which is wrong if they have
    different numbers of tokens. `update` takes the gradients of a sum of weighted losses, and the
    sum of the weights:

    >>> optimizer = accumulate(optax.sgd(1.0), batches=2)
    >>> state = optimizer.init(jnp.float32(0))
    >>> for gradient, weight in ((3.0, 1.0), (5.0, 3.0)):
    ...     update, state = optimizer.update(jnp.float32(gradient), state, weight=weight)
    ...     print(float(update))  # the second is −(3 + 5) ÷ (1 + 3)
    0.0
    -2.0

    Args:
        optimizer: makes the update.
        batches: the number of batches in an update. With 1, the state is that of `optimizer`.
    """

    def mean(gradients: Any, weight: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf / jnp.maximum(weight, 1), gradients)

    def init(params: Any) -> Any:
        inner = optimizer.init(params)
        if batches == 1:
            return inner
        zeros = jax.tree.map(jnp.zeros_like, params)
        return Accumulated(inner, zeros, jnp.float32(0), jnp.int32(0))

    def update(gradients: Any, state: Any, params: Any = None, *, weight: Any) -> tuple[Any, Any]:
        if batches == 1:
            return optimizer.update(mean(gradients, weight), state, params)
        sums = jax.tree.map(jnp.add, state.gradients, gradients)
        weight = state.weight + weight
        zeros = jax.tree.map(jnp.zeros_like, sums)

        def apply() -> tuple[Any, Accumulated]:
            updates, inner = optimizer.update(mean(sums, weight), state.inner, params)
            return updates, Accumulated(inner, zeros, jnp.float32(0), jnp.int32(0))

        def wait() -> tuple[Any, Accumulated]:
            return zeros, Accumulated(state.inner, sums, weight, state.batches + 1)

        return jax.lax.cond(state.batches + 1 == batches, apply, wait)

    # The protocol of optax does not say that a keyword may be required.
    return optax.GradientTransformationExtraArgs(init, cast(Any, update))
