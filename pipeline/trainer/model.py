"""A model, as the functions that a training program needs of it."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

from pipeline.planning.planned import PlannedBatch


class Model(NamedTuple):
    """A model whose only state is its parameters: it has no dropout and no batch statistics.

    Attributes:
        init_params: makes the parameters, a pytree, from a key of `jax.random`.
        loss: from parameters and a batch to two scalars, Σ weight · loss and Σ weight. It is linear
            in `batch["loss_weights"]`, from which the losses of segments are computed.
        flops: the floating-point operations of a training step on a planned batch, for the
            utilisation in the log; 0.0 if unknown.
    """

    init_params: Callable[[jax.Array], Any]
    loss: Callable[[Any, Mapping[str, jax.Array]], tuple[jax.Array, jax.Array]]
    flops: Callable[[PlannedBatch], float]
