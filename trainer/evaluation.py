"""Evaluation: sums over the positions of held-out data, the same on every host."""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from ml_collections import ConfigDict

from pipeline.bar import Bar
from pipeline.corpus.interface import AnyCorpus
from pipeline.errors import InvalidValue
from pipeline.loading import Batches, Loader
from pipeline.planning import Plan
from pipeline.planning.options import Options
from pipeline.steps import hosts


def evaluation_batches(corpus: AnyCorpus, options: Options, **layout: Any) -> Batches:
    """One epoch of held-out data, in order, in batches of the shapes of training.

    `options` are those of the training plan, of its last stage, so that all evaluations of a run
    whose shapes change compare. Evaluations use of them buckets, packing (best fit
    instead of "fill", which cuts examples) and, for pairs and groups, overflow; other examples that
    are too long are split. `layout` has `sharding` and `context_order`, as for `Batches`.
    """
    whole = np.ndim(corpus.lengths) == 2 or corpus.trees is not None  # these cannot be split
    plan = Plan(
        corpus,
        options.buckets,
        shuffle=False,
        packing="best_fit" if options.cuts else options.packing,
        align=options.align,
        overflow=options.overflow if whole else "split",
    )
    return Batches(corpus, plan, **layout)


def require_same_data(training: Batches, evaluation: Batches) -> None:
    """Raises an error on every host if hosts have other plans or corpora."""
    identities = {"plan": training.plan.identity, "corpus": training.corpus.identity}
    identities["held-out plan"] = evaluation.plan.identity
    identities["held-out corpus"] = evaluation.corpus.identity
    hosts.require_agreement(identities)


class Evaluation(NamedTuple):
    """The sums of an evaluation; `text_bytes` is the size of its text, if that is known."""

    total: float  # Σ weighted loss, in nats
    weight: float
    text_bytes: int | None


def evaluate(
    config: ConfigDict,
    batches: Batches,
    step: Callable,
    params: Any,
    *,
    stop: Callable[[], bool] = lambda: False,
) -> Evaluation | None:
    """The sums over all batches, or over `config.eval_batches`; None if `stop()` ended them.

    `step` is that of `make_eval_step`. `stop` is asked after each batch. The sums of all batches
    stay on the devices until the last one.
    """
    count = config.eval_batches
    whole = count is None or count >= len(batches)
    sums: list[Any] = []
    total_batches = len(batches) if whole else count
    shown = None if jax.process_index() == 0 else False
    with Loader(batches, num_threads=config.num_threads) as loader:
        some = itertools.islice(loader, count)
        for batch in Bar("evaluating", some, total=total_batches, unit=" batch", shown=shown):
            sums.append(step(params, batch))
            if len(sums) > 1:  # so that no more than two batches are in flight
                jax.block_until_ready(sums[-2])
            if stop():
                return None
    total = weight = 0.0
    for one in jax.device_get(sums):
        total, weight = total + float(one[0]), weight + float(one[1])
    if not weight:
        raise InvalidValue(
            "no held-out example has a position that carries loss, so nothing can be evaluated; "
            "give longer examples, or a template whose weights are above 0"
        )
    return Evaluation(total, weight, batches.corpus.text_bytes if whole else None)
