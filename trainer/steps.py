"""The steps of a run, and their compilation for every bucket."""

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from ml_collections import ConfigDict

from pipeline.loading import Batches, Loader
from pipeline.steps import Compiled, programs_table

logger = logging.getLogger(__name__)


class Steps(NamedTuple):
    """The functions of a run.

    Attributes:
        init: from a key to the state, a dict with `params`; jitted, with the state's shardings.
        train: from state and batch to the next state, and a dict of values.
        eval: from parameters and batch to the two sums of the loss.
        finish: from the last state to one with an update by the gradients of an unfinished window
            of `accumulate`, if there is one.
    """

    init: Any
    train: Any
    eval: Any
    finish: Callable[[Any], Any]


def compile_steps(config: ConfigDict, steps: Steps, loader: Loader, evaluation: Batches) -> Steps:
    """The same functions, compiled for every bucket of training and of evaluation."""
    logger.info(f"{loader.plan}")
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
    finish = steps.finish
    if config.accumulate > 1:
        jitted = jax.jit(finish, donate_argnums=0, out_shardings=shardings)
        finish = jitted.lower(like).compile()
    logger.info(programs_table(train, evaluate))
    return Steps(steps.init, train, evaluate, finish)
