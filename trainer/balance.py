"""The choice of tiers, for a run that does not say how many it has."""

import logging
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from models.attention import skips_segments
from pipeline.corpus.interface import AnyCorpus
from pipeline.loading.sharding import parts, sharding_of
from pipeline.planning.bucket import Bucket
from pipeline.planning.packing import row_cost
from pipeline.planning.planned import PlannedBatch
from pipeline.report.tiers import row_costs, time_with_tiers
from trainer.model import transformer_config
from trainer.schedule import Schedule

logger = logging.getLogger(__name__)

LEAST = 0.01  # the share of the time of steps that tiers must save


def fit_schedule(
    config: ConfigDict, schedule: Schedule, corpus: AnyCorpus, sharding: Any
) -> Schedule:
    """The schedule with the buckets of its new entries, as of `Schedule.fit`, and with tiers.

    The number of tiers is its own, if it has one, as a run has that continues. Else it is
    `config.accumulate` if attention skips other segments, and tiers save over 1% of the time of
    steps; or 1. The time is that of `time_with_tiers`. Tiers over the steps of an update change no
    update.
    """
    schedule = schedule.fit(corpus)
    if "tiers" in schedule.entries[0].options:
        return schedule
    tiers = config.accumulate
    if tiers > 1:
        time = _time_with_tiers(config, schedule, corpus, sharding, tiers)
        chosen = tiers if time < 1 - LEAST else 1
        logger.info(
            f"tiers={chosen}: with tiers={tiers}, steps take {time:.3f} times as long, by the cost "
            "of their rows; updates are the same"
        )
        tiers = chosen
    return schedule.begin_with(tiers=tiers)


def _time_with_tiers(
    config: ConfigDict, schedule: Schedule, corpus: AnyCorpus, sharding: Any, tiers: int
) -> float:
    """The time of steps with tiers over that without, as the schedule begins."""
    first, trees, width = schedule.entries[0], corpus.trees, config.model.width
    sizes = transformer_config(config, corpus)

    def skips(length: int) -> bool:
        kind, dtype, grouped = sizes.attention, sizes.compute_dtype, trees is not None
        return skips_segments(kind, dtype, length, head_width=sizes.head_width, grouped=grouped)

    buckets = [Bucket(*shape) for shape in first.plan["buckets"]]
    groups = {bucket: parts(sharding_of(sharding, bucket.rows))[0] for bucket in buckets}
    uneven = {
        bucket for bucket in buckets if groups[bucket] > 1 and any(map(skips, bucket.lengths))
    }
    if not uneven:
        return 1.0
    plan = Schedule((first,), schedule.mixture).plan(corpus)

    def time_of(batch: PlannedBatch) -> float:
        bucket, costs = batch.bucket, plan.options.cost
        if bucket in uneven:
            rows = row_costs(bucket, batch.segments, width, trees, costs=costs)
        else:
            lengths = np.multiply(bucket.lengths, costs).tolist()
            rows = np.full(bucket.rows, row_cost(*lengths, width=width))
        return float(rows.reshape(groups[bucket], -1).sum(axis=1).max())

    return float(time_with_tiers(plan, tiers, time_of))
