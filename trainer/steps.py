"""The steps of a run, and their compilation for every bucket."""

import functools
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from ml_collections import ConfigDict

from pipeline.loading import Batches, DynamicContext, Loader, batch_sharding
from pipeline.planning.figures import warn_of_positions
from pipeline.steps import Compiled, flush, programs_table

logger = logging.getLogger(__name__)


class Steps(NamedTuple):
    """The functions of a run.

    Attributes:
        init: from a key to the state, a dict with `params`; jitted, with the state's shardings.
        train: from state and batch to the next state, and a dict of values.
        eval: from parameters and batch to the two sums of the loss.
        optimizer: that of `make_train_step`.
    """

    init: Any
    train: Callable
    eval: Callable
    optimizer: Any


class CompiledSteps(NamedTuple):
    """The functions of `Steps`, compiled for every bucket.

    `finish` makes an update by what an unfinished window of `accumulate` has added up.
    """

    init: Any
    train: Compiled
    eval: Compiled
    finish: Callable[[Any], Any]


def share_batches(config: ConfigDict, mesh: Mesh) -> NamedSharding | DynamicContext:
    """How devices share batches: alike, or with `config.dynamic_context` by shape."""
    return DynamicContext(mesh) if config.dynamic_context else batch_sharding(mesh)


def compile_steps(
    config: ConfigDict, steps: Steps, loader: Loader, evaluation: Batches
) -> CompiledSteps:
    """The functions compiled for every bucket of training and of evaluation."""
    logger.info(f"{loader.plan}")
    if warning := warn_of_positions(loader.plan.stages[-1]):
        logger.warning(
            f"{warning}; if token files have no marks between documents, give the id that ends "
            "each, config.train.options.end"
        )
    like = steps.init.eval_shape(jax.random.key(0))
    shardings = jax.tree.map(lambda leaf: leaf.sharding, like)
    train = Compiled(
        steps.train,
        like,
        loader.specs,
        donate=True,
        microbatches=config.microbatches or "auto",
        budget=config.memory_budget,
        out_shardings=(shardings, jax.P()),
    )
    evaluate = Compiled(
        steps.eval,
        like["params"],
        evaluation.specs,
        held={name: leaf for name, leaf in like.items() if name != "params"},
        microbatches="auto",
        budget=config.memory_budget,
    )
    logger.info(programs_table(train, evaluate))

    def finish(state: Any) -> Any:
        window = state["optimizer"]
        params, moments = flush(steps.optimizer, window, state["params"])
        # If steps follow, their window ends where this one would have, with a block of tiers.
        after = {**state, "params": params, "optimizer": moments._replace(batches=window.batches)}
        return jax.tree.map(functools.partial(jnp.where, window.weight > 0), after, state)

    if config.accumulate == 1:  # no window is ever unfinished
        return CompiledSteps(steps.init, train, evaluate, lambda state: state)
    jitted = jax.jit(finish, donate_argnums=0, out_shardings=shardings)
    return CompiledSteps(steps.init, train, evaluate, jitted.lower(like).compile())


def warn_of_window(config: ConfigDict, state: Any, step: int) -> None:
    """Warns if a run is to end where it was saved, in the middle of `config.accumulate` steps."""
    window = state["optimizer"]
    if config.accumulate > 1 and step == config.steps and float(window.weight) > 0:
        logger.warning(
            f"the run ends at step {step:,}, where it was saved: the last steps wait for the rest "
            f"of their update (config.accumulate={config.accumulate}), and are in no parameters; "
            f"give --config.steps={step + 1} or more to have it made"
        )
