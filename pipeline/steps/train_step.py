"""A training step: from the loss of a model and an optimizer to one function of state and batch.

Gradients are divided once, by the sum of all weights in an update: of all rows, microbatches,
accumulated steps, devices and hosts. An average of averages, as in `optax.MultiSteps`, is wrong if
these hold different numbers of tokens.
"""

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import jax
import jax.numpy as jnp

from pipeline.errors import InvalidType, InvalidValue, require_whole
from pipeline.steps.microbatches import Sharding, add_to, summed, wide, zeros
from pipeline.steps.segments import by_segment, position_losses

if TYPE_CHECKING:
    import optax

# From parameters and a batch to a sum and its divisor, float32 scalars.
Loss = Callable[[Any, Mapping[str, Any]], tuple[Any, Any]]


class Accumulated(NamedTuple):
    """The state of an optimizer that accumulates; all sums are since its last update."""

    inner: Any  # the state of the optimizer itself
    gradients: Any  # Σ gradients of weighted losses, as the parameters, in float32 at least
    weight: jax.Array  # Σ weights, a float32 scalar
    value: jax.Array  # Σ weights × the values that `update` was given, a float32 scalar
    batches: jax.Array  # an int32 scalar


def accumulate(
    optimizer: "optax.GradientTransformation", batches: int = 1
) -> "optax.GradientTransformationExtraArgs":
    """The optimizer with one update for several batches, by Σ gradients ÷ Σ weights over them.

    `update` takes the gradients of a sum of weighted losses, and the sum of the weights:

    >>> import optax
    >>> optimizer = accumulate(optax.sgd(1.0), batches=2)
    >>> state = optimizer.init(jnp.float32(0))
    >>> for gradient, weight in ((3.0, 1.0), (5.0, 3.0)):
    ...     update, state = optimizer.update(jnp.float32(gradient), state, weight=weight)
    ...     print(float(update))  # the second is −(3 + 5) ÷ (1 + 3)
    0.0
    -2.0

    With one batch in an update, the state is that of `optimizer`. If `value=` is given, the mean
    loss of each batch, the optimizer gets that of all batches of an update.
    """
    import optax

    batches = require_whole("batches", batches, 1)
    inner_optimizer = optax.with_extra_args_support(optimizer)

    def init(params: Any) -> Any:
        inner = optimizer.init(params)
        if batches == 1:
            return inner
        return Accumulated(inner, zeros(params), jnp.float32(0), jnp.float32(0), jnp.int32(0))

    def update(gradients: Any, state: Any, params: Any = None, **more: Any) -> tuple[Any, Any]:
        if (weight := more.pop("weight", None)) is None:
            raise InvalidValue(
                "update needs weight=, the sum of the weights of these gradients; flush needs the "
                "optimizer that accumulate was given"
            )
        if batches == 1:
            return inner_optimizer.update(_divided(gradients, weight), state, params, **more)
        now = _add(state, gradients, weight, more.get("value", 0))

        def apply() -> tuple[Any, Accumulated]:
            return _apply(inner_optimizer, now, gradients, params, more)

        def wait() -> tuple[Any, Accumulated]:
            # An update may have another dtype than its gradient.
            none = jax.tree.map(
                lambda own, like: jnp.zeros_like(own, like.dtype),
                gradients,
                jax.eval_shape(apply)[0],
            )
            return none, now

        return jax.lax.cond(now.batches == batches, apply, wait)

    # The protocol of optax does not say that a keyword may be required.
    return optax.GradientTransformationExtraArgs(init, cast(Any, update))


def flush(
    optimizer: "optax.GradientTransformation", state: Any, params: Any, **more: Any
) -> tuple[Any, Any]:
    """The parameters, and the optimizer's state, after an update by what is accumulated.

    At the end of the data, the last batches may be too few for an update, and their gradients
    would be lost. If nothing is accumulated, both are returned as they are.

    >>> import optax
    >>> accumulating = accumulate(optax.sgd(1.0), batches=3)
    >>> state = accumulating.init(jnp.float32(0))
    >>> _, state = accumulating.update(jnp.float32(6), state, weight=2.0)
    >>> params, state = flush(optax.sgd(1.0), state, jnp.float32(0))
    >>> float(params), int(state.batches)
    (-3.0, 0)

    `optimizer` is the argument of `accumulate` or `make_train_step`; `state` is that of the
    accumulating optimizer, with `make_train_step` `state["optimizer"]`. `more` is for the
    optimizer, which gets `value=` as in each update.
    """
    import optax

    if not isinstance(state, Accumulated):  # each batch has an update
        inside = jax.tree.leaves(state, is_leaf=lambda each: isinstance(each, Accumulated))
        if any(isinstance(each, Accumulated) for each in inside):
            raise InvalidType(
                "state holds that of an optimizer that accumulates; give it alone, which is "
                "state['optimizer'] with make_train_step"
            )
        return params, state
    inner_optimizer = optax.with_extra_args_support(optimizer)
    updates, new = _apply(inner_optimizer, state, params, params, {"value": None, **more})
    after = optax.apply_updates(params, updates), new
    return jax.tree.map(functools.partial(jnp.where, state.batches > 0), after, (params, state))


def _add(state: Accumulated, gradients: Any, weight: Any, value: Any) -> Accumulated:
    """The state with one more batch in its sums."""
    return Accumulated(
        inner=state.inner,
        gradients=jax.tree.map(add_to, state.gradients, gradients),
        weight=add_to(state.weight, weight),
        value=add_to(state.value, weight * value),
        batches=state.batches + 1,
    )


def _apply(
    optimizer: Any, state: Accumulated, like: Any, params: Any, more: Mapping[str, Any]
) -> tuple[Any, Accumulated]:
    """The update by what is accumulated, in dtypes as those of `like`, and the state after it."""
    mean = _divided(state.gradients, state.weight)
    mean = jax.tree.map(lambda leaf, own: leaf.astype(own.dtype), mean, like)
    if "value" in more:
        more = {**more, "value": state.value / _divisor(state.weight)}
    updates, inner = optimizer.update(mean, state.inner, params, **more)
    none = jnp.float32(0)
    return updates, Accumulated(inner, zeros(mean), none, none, jnp.int32(0))


def _update_if(
    finite: jax.Array,
    optimizer: "optax.GradientTransformation",
    batches: int,
    gradients: Any,
    params: Any,
    state: Any,
    more: Mapping[str, Any],
) -> tuple[Any, Any]:
    """The parameters and the optimizer's state after a batch; if it is not finite, as they were.

    With `where` around the update of `accumulate`, the old state would live beside the new one:
    9 copies of the parameters for Adam. Here only the sums are chosen by `where`, in place, and a
    batch that is not finite completes no update: 6 copies.
    """
    import optax

    if batches == 1:
        updates, new = accumulate(optimizer).update(gradients, state, params, **more)
        after = optax.apply_updates(params, updates), new
        return jax.tree.map(functools.partial(jnp.where, finite), after, (params, state))
    inner_optimizer = optax.with_extra_args_support(optimizer)
    weight, others = more["weight"], {k: v for k, v in more.items() if k != "weight"}
    choose: Any = functools.partial(jnp.where, finite)
    now = _add(state, gradients, weight, more["value"])
    now = now._replace(
        gradients=jax.tree.map(choose, now.gradients, state.gradients),
        weight=choose(now.weight, state.weight),
        value=choose(now.value, state.value),
        batches=choose(now.batches, state.batches),
    )

    def apply() -> tuple[Any, Accumulated]:
        updates, new = _apply(inner_optimizer, now, gradients, params, others)
        return optax.apply_updates(params, updates), new

    return jax.lax.cond(now.batches == batches, apply, lambda: (params, now))


def _divided(gradients: Any, weight: jax.Array) -> Any:
    """Gradients ÷ weight, in their own dtypes; if the weight is 0, so are the gradients."""
    return _over(gradients, _divisor(weight))


def _over(arrays: Any, number: Any) -> Any:
    def divide(leaf: jax.Array) -> jax.Array:
        kind = wide(leaf.dtype)
        return (leaf.astype(kind) / jnp.asarray(number, kind)).astype(leaf.dtype)

    return jax.tree.map(divide, arrays)


def _divisor(weight: jax.Array) -> jax.Array:
    return jnp.where(weight > 0, weight, 1)


def make_train_step(
    loss: Loss,
    optimizer: "optax.GradientTransformation",
    *,
    accumulated: int = 1,
    learning_rate: Callable[[jax.Array], jax.Array] | None = None,
    loss_scale: float | None = None,
    most_segments: int | None = None,
    sharding: Sharding = None,
) -> tuple[Callable[[Any], dict[str, Any]], Callable[..., tuple[dict, dict[str, jax.Array]]]]:
    """The state of training from parameters, and a step of it: `init` and `train_step`.

    >>> import optax
    >>> def loss(params, batch):
    ...     errors = (params - batch["targets"]) ** 2
    ...     return (errors * batch["loss_weights"]).sum(), batch["loss_weights"].sum()
    >>> init, train_step = make_train_step(loss, optax.sgd(0.25))
    >>> batch = {"targets": jnp.array([[4.0, 9.0]]), "loss_weights": jnp.array([[1.0, 0.0]])}
    >>> state, values = train_step(init(jnp.float32(2)), batch)
    >>> float(state["params"]), float(values["loss"])
    (3.0, 4.0)

    Args:
        loss: from parameters and a batch to a sum and its divisor (Σ weights: of tokens, pairs or
            rollouts). With `most_segments` it must be linear in `loss_weights`.
        optimizer: of optax; gets the gradients of the mean loss of an update, and that as `value=`.
        accumulated: the number of steps whose gradients make one update.
        learning_rate: that of the optimizer, a function of the number of updates, for the values.
        loss_scale: for float16: the initial factor of losses, so that small gradients do not
            vanish. It adjusts itself. None: no factor.
        most_segments: the most segments in a row, from `plan.most_segments()`: the step returns
            the loss of each segment. None: it does not.
        sharding: the `NamedSharding` of the fields of a batch, or the `DynamicContext`; None on one
            device.

    Returns:
        `init(params)`: the state, a dict of `params`, `optimizer`, `steps` (the number of finite
        steps, an int32 scalar) and, if given, `loss_scale`.
        `train_step(state, batch, microbatches=1)`: the new state, and a dict of scalars: `loss`,
        the mean; `gradient_norm`; `finite`, whether both are (if not, the state does not change);
        and, if requested, `learning_rate`, `loss_scale`, and `segments`, as from `sum_segments`.
    """
    import optax

    accumulating = accumulate(optimizer, require_whole("accumulated", accumulated, 1))

    def init(params: Any) -> dict[str, Any]:
        state = {"params": params, "optimizer": accumulating.init(params), "steps": jnp.int32(0)}
        if loss_scale is not None:
            from flax.training.dynamic_scale import DynamicScale

            scale: Any = jnp.float32(loss_scale)  # declared a float, it is an array in any state
            state["loss_scale"] = DynamicScale(scale=scale)
        return state

    def train_step(
        state: dict[str, Any], batch: Mapping[str, jax.Array], microbatches: int = 1
    ) -> tuple[dict[str, Any], dict[str, jax.Array]]:
        # The scale is for mean losses, and these are sums.
        scale: Any = 1.0
        if "loss_scale" in state:
            scale = state["loss_scale"].scale / batch["loss_weights"].size
        sums = loss
        if most_segments is not None:
            sums, batch = by_segment(loss, batch, most_segments)

        def scaled(params: Any, microbatch: Mapping[str, Any]) -> tuple[jax.Array, Any]:
            total, others = sums(params, microbatch)
            return total * scale, others

        with_gradients = jax.value_and_grad(scaled, has_aux=True)
        (total, others), gradients = summed(
            with_gradients, state["params"], batch, microbatches=microbatches, sharding=sharding
        )
        weight, segments = (others, None) if most_segments is None else others
        gradients = _over(gradients, scale)
        mean = total / (_divisor(weight) * scale)
        # In float16, the square of 256 is infinite.
        longer = jax.tree.map(lambda leaf: leaf.astype(wide(leaf.dtype)), gradients)
        norm = optax.global_norm(longer) / _divisor(weight)
        finite = jnp.isfinite(mean) & jnp.isfinite(norm)
        more = {"weight": weight, "value": mean}
        params, moments = _update_if(
            finite, optimizer, accumulated, gradients, state["params"], state["optimizer"], more
        )
        steps = state["steps"] + finite.astype(jnp.int32)
        new = {"params": params, "optimizer": moments, "steps": steps}
        values = {"loss": mean, "gradient_norm": norm, "finite": finite}
        if segments is not None:
            values["segments"] = segments
        if learning_rate is not None:
            values["learning_rate"] = learning_rate(state["steps"] // accumulated)
        if "loss_scale" in state:
            # A scale adjusts itself to the gradient that it computes: here 1, or NaN.
            slope = jnp.where(finite, 1.0, jnp.nan)
            probe = state["loss_scale"].value_and_grad(lambda x: slope * x)
            new["loss_scale"] = probe(jnp.float32(0)).dynamic_scale
            values["loss_scale"] = state["loss_scale"].scale
        return new, values

    return init, train_step


def make_eval_step(loss: Loss, *, sharding: Sharding = None) -> Callable[..., Any]:
    """`eval_step(params, batch, microbatches=1)`: the two sums of the loss of a batch.

    `loss` and `sharding` are as for `make_train_step`.
    """

    def eval_step(params: Any, batch: Mapping[str, jax.Array], microbatches: int = 1) -> Any:
        return summed(loss, params, batch, microbatches=microbatches, sharding=sharding)

    return eval_step


def make_score_step(loss: Loss) -> Callable[[Any, Mapping[str, jax.Array]], dict[str, jax.Array]]:
    """`score_step(params, batch)`: `nll`, weight · nll, and `weight`, float32 `[rows, length]`.

    `loss` is as for `make_train_step`, and linear in `loss_weights`.
    """

    def score_step(params: Any, batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        _, _, nll = position_losses(loss, params, batch)
        return {"nll": nll, "weight": batch["loss_weights"]}

    return score_step
