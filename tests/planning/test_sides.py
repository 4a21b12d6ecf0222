"""Plans and buckets of examples with any number of named lengths."""

import numpy as np
import pytest

from pipeline import Bucket, Plan, fit_buckets
from pipeline.planning.figures import count_losses
from pipeline.planning.vectors import best_fit_vectors
from tests.properties.accounts import batches_of

NAMES = "inputs", "patches", "images"
PICTURES = Bucket(2, {"inputs": 8, "patches": 16, "images": 3})
FREE = {"inputs": 1, "patches": 0.5, "images": 0}


def draw_pictures(count):
    """Lengths of texts with pictures: inputs, patches and images."""
    rng = np.random.default_rng(0)
    images = rng.choice([0, 1, 1, 2, 3], count)
    text = np.clip(np.round(rng.lognormal(4, 0.8, count)), 4, 600)
    patches = images * np.clip(np.round(rng.lognormal(4, 0.4, count)), 16, 200)
    return dict(zip(NAMES, np.stack([text, patches, images]).astype(int), strict=True))


def test_a_plan_of_three_sides_by_hand():
    lengths = {"inputs": [5, 3, 2, 6, 0, 4], "patches": [8, 8, 12, 4, 0, 0]}
    lengths["images"] = [1, 1, 2, 1, 0, 0]
    plan = Plan(lengths, [PICTURES], shuffle=False, cost=FREE)
    assert [batch.segments.tolist() for batch in batches_of(plan)] == [
        [  # row, example, start, inputs, patches, images
            # 2 + 6 inputs, 12 + 4 patches, 2 + 1 images
            [0, 2, 0, 2, 12, 2],
            [0, 3, 0, 6, 4, 1],
            # 5 + 3 inputs, 8 + 8 patches, 1 + 1 images
            [1, 0, 0, 5, 8, 1],
            [1, 1, 0, 3, 8, 1],
        ],
        # Text alone. An example without any position is in no row.
        [[0, 5, 0, 4, 0, 0]],
    ]
    assert plan.num_tokens == 20 + 32 / 2
    assert plan.padding == pytest.approx(1 - 36 / (4 * 8 + 4 * 16 / 2))
    head, line, *_ = str(plan).splitlines()
    assert head.split() == ["bucket", "batches", "rows", *NAMES]
    assert line.split() == ["2x8/16/3", "2", "3", "62.50%", "50.00%", "41.67%"]
    found = count_losses(
        plan.after(0, exclude=[0, 4]).stages[-1]
    )  # of which 4 is in no batch anyway
    assert (found["excluded"], found["empty"]) == (1, 1)


def test_a_bucket_names_its_sides():
    assert eval(repr(PICTURES)) == PICTURES
    assert Bucket(4, {"inputs": 8}) == Bucket(4, 8)
    assert Bucket(4, {"inputs": 8, "targets": 6}) == Bucket(4, (8, 6))
    assert Bucket(4, {"patches": 8}) != Bucket(4, 8)
    with pytest.raises(ValueError, match="lengths of more than two sides have names"):
        Bucket(2, (8, 16, 3))
    with pytest.raises(ValueError, match="give more than two sides by name"):
        fit_buckets([[8, 16, 3]], tokens_per_batch=64, max_buckets=1)


def test_buckets_have_the_ratio_of_the_data_and_room_for_what_costs_nothing():
    lengths = draw_pictures(3000)
    options = {"tokens_per_batch": 32_768, "max_buckets": 1, "length_multiple": 16}
    (bucket,) = fit_buckets(lengths, **options, cost=FREE)
    plan = Plan(lengths, [bucket], cost=FREE, overflow="drop")
    assert count_losses(plan.stages[-1])["overlong"] == 0  # although only a sample was packed
    assert plan.padding < 0.03
    *filled, images = plan.count(*plan.epoch_steps).buckets[bucket][2:] / (
        plan.num_batches() * bucket.rows * np.array(bucket.lengths)
    )
    assert min(filled) > 0.9
    assert 0.6 < images < 0.85


def test_unlike_sides_are_mixed_by_the_one_that_carries_the_loss():
    sides = {"inputs": [8] * 40, "patches": [4] * 40}
    more = {"inputs": [8] * 40, "patches": [16] * 40}
    buckets = [Bucket(2, {"inputs": 16, "patches": 32})]
    plan = Plan({"few": sides, "many": more}, buckets, weights={"few": 1, "many": 1})
    segments = np.concatenate([plan.batch(step).segments for step in range(60)])
    inputs = np.bincount(segments[:, 1] // 40, segments[:, 3])
    assert inputs[0] == pytest.approx(inputs[1], rel=0.05)


def test_a_limit_on_segments_costs_hardly_any_rows():
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(4.3, 1, 5000), 1, 2048).astype(int)  # 17 fill a row
    for limit in (16, 24):
        plan = Plan(lengths, [Bucket(1, 2048)], max_segments=limit)
        bound = max(lengths.sum() / 2048, len(lengths) / limit)
        assert plan.num_batches() <= 1.02 * bound
        assert plan.most_segments()[plan.buckets[0]] <= limit


def test_rows_of_four_sides_are_near_the_bound():
    rng = np.random.default_rng(0)
    sizes = np.exp(rng.uniform(3, 8, (3000, 4))).astype(int)
    sizes = np.concatenate([np.zeros((1, 4), int), sizes[np.argsort(sizes.sum(axis=1))]])
    counts = (np.arange(len(sizes)) > 0).astype(int)
    found = best_fit_vectors(counts.copy(), (6000,) * 4, sizes, counts > 0, sizes.sum(axis=1))
    assert sorted(size for p in found for size, _ in p.pieces) == [*range(1, len(sizes))]
    for pattern in found:
        numbers, times = np.transpose(pattern.pieces)
        assert (times @ sizes[numbers] <= 6000).all()
    assert sum(p.rows for p in found) <= 1.03 * sizes.sum(axis=0).max() / 6000
