"""The training step of a run, compiled for every bucket."""

from collections.abc import Callable, Mapping
from typing import Any

import jax

from pipeline.planning.bucket import Bucket
from pipeline.steps import Compiled

# For each bucket, a `jax.ShapeDtypeStruct` for each field of a batch.
Specs = Mapping[Bucket, Mapping[str, jax.ShapeDtypeStruct]]


def compile_training(config: Any, step: Callable, like: Any, specs: Specs) -> Compiled:
    """A training step for every bucket, which overwrites its state, whose shapes are `like`."""
    return Compiled(
        step,
        like,
        specs,
        donate=True,
        microbatches=config.microbatches or "auto",
        budget=config.memory_budget,
        out_shardings=(jax.tree.map(lambda leaf: leaf.sharding, like), jax.P()),
    )
