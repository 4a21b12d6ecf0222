"""Evaluation: sums over the positions of held-out data, the same on every host."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from pipeline.corpus.interface import AnyCorpus
from pipeline.errors import InvalidValue
from pipeline.loading import Batches, Loader
from pipeline.planning import Plan
from pipeline.planning.options import Options


def evaluation_batches(corpus: AnyCorpus, options: Options, **layout: Any) -> Batches:
    """One epoch of held-out data, in order, in batches of the shapes of training.

    `options` are those of the training plan, of which evaluations use buckets, packing (best fit
    instead of "fill", which cuts examples) and, for pairs and groups, overflow; other examples that
    are too long are split. `layout` is that of `Run`.
    """
    whole = np.ndim(corpus.lengths) == 2 or corpus.trees is not None  # these cannot be split
    plan = Plan(
        corpus,
        options.buckets,
        shuffle=False,
        packing="best_fit" if options.packing == "fill" else options.packing,
        align=options.align,
        overflow=options.overflow if whole else "split",
    )
    return Batches(corpus, plan, **layout)


def sum_over_batches(batches: Batches, step: Callable, params: Any) -> tuple[float, float]:
    """The sums of weighted losses and of weights over all batches, by `make_eval_step`'s step."""
    total = weight = 0.0
    with Loader(batches) as loader:
        for batch in loader:
            sums = jax.device_get(step(params, batch))
            total, weight = total + float(sums[0]), weight + float(sums[1])
    if not weight:
        raise InvalidValue(
            "no held-out example has a position that carries loss, so nothing can be evaluated; "
            "give longer examples, or a template whose weights are above 0"
        )
    return total, weight
