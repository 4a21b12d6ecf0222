import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline import Bucket
from pipeline.planning.surface import Surface, spread_out

LENGTHS = [128, 256, 512, 1024]
SHAPES = [Bucket(8192 // length, length) for length in LENGTHS]


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=4))
def test_measured_shapes_have_the_seconds_and_the_interval_that_were_measured(seconds):
    seconds, shapes = np.array(seconds), SHAPES[: len(seconds)]
    found = Surface(shapes, seconds, seconds * 0.9, seconds * 1.2).estimate(shapes)
    for values, factor in zip(found, (1, 0.9, 1.2), strict=True):
        np.testing.assert_allclose(values, seconds * factor)


def test_between_two_lengths_seconds_per_position_are_a_straight_line_of_logarithms():
    surface = Surface(SHAPES, [1.0, 1.0, 4.0, 8.0])
    between = [Bucket(8192 // length, length) for length in (181, 362, 724)]
    rates = surface.estimate(between).seconds / [bucket.positions for bucket in between] * 8192
    # Halfway between the logarithms: geometric means.
    np.testing.assert_allclose(rates, [1, 2, 32**0.5], rtol=0.01)


def test_the_interval_is_wider_the_farther_measured_shapes_are():
    found = Surface([SHAPES[0], SHAPES[3]], [1.0, 1.0]).estimate(SHAPES[:3])
    width = np.log(found.high / found.low)
    assert width[0] == 0 < width[1]
    near = Surface([SHAPES[0], SHAPES[2], SHAPES[3]], [1.0] * 3).estimate(SHAPES[1:2])
    assert np.log(near.high / near.low)[0] < width[1]


def test_jumps_between_measured_shapes_make_the_others_less_certain():
    lengths = [128, 181, 256, 362, 512, 724, 1024]
    shapes = [Bucket(8192 // length, length) for length in lengths]
    smooth = Surface(shapes, [length / 128 for length in lengths])
    jumps = Surface(shapes, [1, 3, 1, 3, 1, 3, 1])
    assert jumps.roughness > 3 * smooth.roughness
    shape = [Bucket(27, 300)]
    assert jumps.estimate(shape).low < smooth.estimate(shape).low


@pytest.mark.parametrize("seed", range(5))
def test_a_surface_of_pairs_finds_what_it_has_not_seen(seed):
    sizes = 64, 128, 256, 512
    every = [Bucket(8192 // (i + t), (i, t)) for i in sizes for t in sizes]

    def cost(bucket):
        inputs, targets = bucket.length
        return bucket.rows * (inputs + 2 * targets + (inputs + targets) ** 2 / 4000)

    seconds = np.array([cost(each) for each in every])
    some = np.random.default_rng(seed).permutation(len(every))[:9]
    found = Surface([every[n] for n in some], seconds[some]).estimate(every)
    assert np.all(found.low <= seconds * 1.001)
    assert np.all(found.high >= seconds * 0.999)
    assert np.exp(np.abs(np.log(found.seconds / seconds)).max()) < 1.35


def test_the_first_shapes_are_far_from_one_another():
    shapes = [Bucket(1, length) for length in range(64, 1025, 64)]
    found = spread_out(shapes, first=15, most=5)
    assert sorted(shapes[number].length for number in found) == [64, 128, 256, 512, 1024]
    assert spread_out(shapes[14:], first=1, most=5) == [1]  # the other one is near
