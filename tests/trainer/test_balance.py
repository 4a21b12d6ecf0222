"""The choice of tiers: where attention skips segments and devices would wait."""

import json

import jax
import numpy as np
import pytest

import pipeline
from models.attention import skips_segments
from pipeline import Bucket, Plan
from pipeline.loading import batch_sharding
from pipeline.report.tiers import row_costs, time_with_tiers
from tests.meshes import mesh_of
from tests.planning.corpora import lognormal
from tests.runs.runs import messages, tiny
from trainer import fit_schedule
from trainer.schedule import Schedule

LENGTHS = lognormal(600, 4, 1.2, most=512)


def corpus_of(lengths):
    return pipeline.Examples([np.arange(length + 1) % 50 for length in lengths], vocab_size=50)


@pytest.mark.parametrize(
    ("fields", "lengths", "devices", "expected"),
    [
        ({"model__attention": "auto"}, LENGTHS, 4, 8),  # blocked, on a CPU
        ({"model__attention": "blocked"}, LENGTHS, 4, 8),
        ({"model__attention": "blocked"}, LENGTHS, 1, 1),  # which waits for no other
        ({"model__attention": "blocked"}, [64] * 600, 4, 1),  # rows cost the same
        ({"model__attention": "dense"}, LENGTHS, 4, 1),
        ({"model__attention": "blocked", "accumulate": 1}, LENGTHS, 4, 1),
        ({"model__attention": "blocked", "batches__tiers": 3}, LENGTHS, 4, 3),
        ({"model__attention": "dense", "batches__tiers": 3}, LENGTHS, 4, 3),
    ],
)
def test_tiers_are_those_of_an_update_where_devices_would_wait(
    text, fields, lengths, devices, expected
):
    config = tiny(text, **{"accumulate": 8, **fields})
    config.batches.update(tokens_per_batch=2048, max_length=512, length_multiple=512)
    mesh, corpus = mesh_of(data=devices), corpus_of(lengths)
    begin = {"seed": 0, **json.loads(config.batches.to_json())}
    with jax.set_mesh(mesh), messages() as said:
        schedule = Schedule.make(begin).fit(corpus)
        chosen = fit_schedule(config, schedule, corpus, batch_sharding(mesh))
        again = fit_schedule(config, chosen, corpus, batch_sharding(mesh))
    assert chosen.plan(corpus).options.tiers == expected
    assert again == chosen
    asks = config.accumulate > 1 and config.batches.tiers is None
    assert (f"tiers={expected}: with tiers=8, steps take" in str(said)) == asks
    # Stored: a run that continues has it without asking.
    resumed = Schedule.make(begin).resume(json.loads(json.dumps(chosen.as_json())), 8)
    assert resumed.options(0)["tiers"] == expected
    assert resumed.plan(corpus).fingerprint == chosen.plan(corpus).fingerprint


def test_the_time_with_tiers_is_that_of_the_plan_that_has_them():
    buckets = [Bucket(8, 64), Bucket(4, 512)]
    plans = {tiers: Plan(LENGTHS, buckets, tiers=tiers) for tiers in (1, 2, 5)}

    def time_of(batch):
        costs = row_costs(batch.bucket, batch.segments, width=8)
        return np.array([costs.reshape(groups, -1).sum(axis=1).max() for groups in (2, 4)])

    def total(plan):
        return sum(time_of(plan.batch(step)) for step in range(plan.num_batches()))

    for have, get in ((1, 5), (2, 5), (1, 2)):
        expected = total(plans[get]) / total(plans[have])
        np.testing.assert_allclose(time_with_tiers(plans[have], get, time_of), expected)
    of_two, of_four = total(plans[5]) / total(plans[1])
    assert of_four < 0.9 < of_two < 1


def test_which_attention_skips_segments():
    def skips(kind, length, **options):
        return skips_segments(kind, "float32", length, head_width=32, **options)

    assert [skips(kind, 512) for kind in ("blocked", "dense", "cudnn")] == [True, False, False]
    assert skips("auto", 512)  # on a CPU, the blocked one
    assert skips("cudnn_packed", 512)  # which takes its place here
