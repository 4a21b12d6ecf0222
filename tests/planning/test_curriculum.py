"""Curricula: the order of buckets is sorted in each cycle, and nothing else changes."""

import itertools
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline import Bucket, Plan
from pipeline.planning.options import CURRICULA
from pipeline.planning.quota import ORDERS, Quota, ShortFirst
from tests.planning.corpora import lognormal

BUCKETS = (Bucket(8, 16), Bucket(4, 32), Bucket(2, 64))
LENGTHS = lognormal(400, 3, least=0, most=200)
CORPORA = {"code": LENGTHS, "prose": lognormal(150, 4, most=200, seed=1)}
CORPORA |= {"chat": lognormal(90, 2, most=16, seed=2)}
WEIGHTS = {"code": 5, "prose": 3, "chat": 1}


def test_each_curriculum_has_an_order():
    assert [*ORDERS] == [*CURRICULA]


def word(plan, steps):
    """The buckets of some steps, a letter each."""
    return "".join("sml"[BUCKETS.index(plan.batch(step).bucket)] for step in steps)


def sort(plain, steps, edges):
    """The batches of a plan without a curriculum, sorted by length between edges of cycles."""
    found = []
    for first, end in itertools.pairwise(edges):
        batches = [plain.batch(step) for step in range(max(first, steps.start), end)]
        found += sorted(batches, key=lambda batch: batch.bucket.sort_key)
    return found[: len(steps)]


def assert_same(plan, steps, expected):
    assert len(expected) == len(steps)
    for step, other in zip(steps, expected, strict=True):
        batch = plan.batch(step)
        assert batch.bucket == other.bucket
        np.testing.assert_array_equal(batch.segments, other.segments)
        assert batch.sources == other.sources


# ---- by eye


def test_short_batches_come_first_in_each_cycle():
    lengths = [8] * 3 + [4] * 12  # each is a row of its own: three batches of 8, six of 4
    buckets = [Bucket(2, 4), Bucket(1, 8)]

    def lengths_of(epochs=1, **options):
        plan = Plan(lengths, buckets, packing="none", **options)
        steps = range(epochs * plan.num_batches())
        return "".join(f"{plan.batch(step).bucket.length}" for step in steps)

    assert lengths_of(shuffle=False) == "484484484"
    short_first = {"shuffle": False, "curriculum": "short_first"}
    assert lengths_of(**short_first) == "444444888"
    assert lengths_of(**short_first, epochs=2) == "444444888" * 2
    assert lengths_of(**short_first, cycles=2) == "444844488"  # of four and of five steps
    assert lengths_of(**short_first, cycles=3) == "448448448"
    assert lengths_of(**short_first, cycles=10**6) == "484484484"  # of one step at most
    assert lengths_of(curriculum="short_first", seed=3) == "444444888"


def test_a_change_in_a_cycle_begins_with_the_short_rows_that_are_left():
    lengths = [8] * 4 + [4] * 8
    plan = Plan(
        lengths, [Bucket(1, 4), Bucket(1, 8)], packing="none", curriculum="short_first", cycles=2
    )
    assert [plan.batch(step).bucket.length for step in range(12)] == [4, 4, 4, 4, 8, 8] * 2
    # After three steps there are five rows of 4 and four of 8. Cycles have six steps as before.
    changed = plan.after(3, seed=1)
    assert [changed.batch(step).bucket.length for step in range(3, 12)] == [4, 4, 4, 8, 8, 8, *(
        [4, 4, 8]
    )]  # fmt: skip
    assert [changed.batch(step).bucket.length for step in range(12, 18)] == [4, 4, 4, 4, 8, 8]
    # Without the curriculum, or with more cycles.
    other = plan.after(3, curriculum=None)
    assert (other.options.curriculum, other.options.cycles) == (None, 1)
    assert plan.after(0, curriculum=None).fingerprint != plan.fingerprint
    again = plan.after(3, cycles=4)
    assert [again.batch(step).bucket.length for step in range(12, 24)] == [4, 4, 8] * 4


# ---- by definition: the plan without a curriculum, sorted cycle by cycle


@settings(max_examples=15)
@given(
    st.integers(0, 9),
    st.integers(1, 9),
    st.sampled_from([{}, {"shuffle": False}, {"packing": "none"}, {"window": 90}]),
)
def test_batches_are_those_of_the_plan_without_it_sorted_in_each_cycle(seed, cycles, options):
    options = {"seed": seed, **options}
    plain = Plan(LENGTHS, BUCKETS, **options)
    plan = Plan(LENGTHS, BUCKETS, curriculum="short_first", cycles=cycles, **options)
    count = plain.num_batches()
    assert plan.num_batches() == count
    for epoch in (0, 1, 5):
        edges = [epoch * count + number * count // cycles for number in range(cycles + 1)]
        steps = range(edges[0], edges[-1])
        assert_same(plan, steps, sort(plain, steps, edges))


def cycle_of(plan, cycles):
    """The steps of a cycle of a mixture, with fractions: those of as many tokens as there are."""
    per_step, total = Fraction(), 0
    for stream in plan.stages[-1].streams:
        size, weight = int(stream.lengths.array.sum()), plan.stages[-1].weights[stream.name]
        rows = stream.whole.counts.tolist()
        batches = sum(Fraction(n, b.rows) for n, b in zip(rows, plan.buckets, strict=True))
        per_step, total = per_step + batches * weight / size, total + size * (weight > 0)
    return round(per_step * total), cycles


@settings(max_examples=15)
@given(st.integers(0, 5), st.integers(1, 4), st.integers(0, 3), st.integers(0, 3))
def test_so_are_those_of_a_mixture(seed, cycles, prose, chat):
    weights = {"code": 2, "prose": prose, "chat": chat}
    plain = Plan(CORPORA, BUCKETS, weights=weights, seed=seed)
    options = {"curriculum": "short_first", "cycles": cycles}
    plan = Plan(CORPORA, BUCKETS, weights=weights, seed=seed, **options)
    assert (plan.batch(0).sources == {}) == (plain.batch(0).sources == {})
    steps, parts = cycle_of(plan, cycles)
    edges = [number * steps // parts for number in range(2 * cycles + 2)]
    expected = sort(plain, range(edges[-1]), edges)
    for step, other in enumerate(expected):
        batch = plan.batch(step)
        assert batch.bucket == other.bucket
        assert batch.sources == other.sources  # its rows, too, but placed by what else is there
        np.testing.assert_array_equal(np.sort(batch.segments[:, 1]), np.sort(other.segments[:, 1]))


@given(st.lists(st.integers(0, 9), min_size=1, max_size=4), st.data())
def test_an_order_sorts_the_places_of_each_cycle(counts, data):
    counts = [counts[0] + 1, *counts[1:]]
    places, cycles = sum(counts), data.draw(st.integers(1, 30))
    done = data.draw(st.integers(0, 40))
    quota = Quota(counts)
    order = ShortFirst(quota, places=places, cycles=cycles, done=done)
    takers = [quota.between(place, place + 1)[0][0] for place in range(3 * places)]
    cycle = [max(n for n in range(99 * cycles) if n * places // cycles <= done + place)
             for place in range(2 * places)]  # fmt: skip
    firsts = [place for place in range(2 * places) if not place or cycle[place] > cycle[place - 1]]
    expected = []
    for first, end in itertools.pairwise(firsts):
        expected += sorted(takers[first:end])
    assert [order.between(n, n + 1)[0][0] for n in range(len(expected))] == expected
    for place in range(len(expected)):
        assert order.before(place) == [expected[:place].count(n) for n in range(len(counts))]
        first = max(each for each in firsts if each <= place)
        assert order.done(place) == place - first + (done - cycle[0] * places // cycles) * (
            first == 0
        )


# ---- mixtures


def test_changes_of_weights_do_not_begin_a_cycle_again():
    options = {"weights": WEIGHTS, "curriculum": "short_first", "cycles": 1}
    plan = changed = Plan(CORPORA, BUCKETS, **options)
    steps, _ = cycle_of(plan, 1)
    assert steps > 60
    for step in range(3, 2 * steps, 3):
        changed = changed.after(step, weights={**WEIGHTS, "code": 5 + step % 2 / 100})
    assert word(changed, range(2 * steps)).count("l") == pytest.approx(
        word(plan, range(2 * steps)).count("l"), abs=2
    )
    assert word(changed, range(steps - 4, steps + 4))[:3] == "lll"
    assert "s" in word(changed, range(steps - 1, steps + 6))
    for at in range(steps, 2 * steps + 1, steps):
        shares = changed.count(0, at).shares
        assert shares == pytest.approx(plan.count(0, at).shares, abs=0.02)


def test_shares_are_met_over_cycles():
    total = sum(WEIGHTS.values())
    plan = Plan(CORPORA, BUCKETS, weights=WEIGHTS, curriculum="short_first", cycles=4)
    steps, _ = cycle_of(plan, 4)
    for cycle in range(12):
        shares = plan.count(cycle * steps // 4, (cycle + 1) * steps // 4).shares
        expected = {name: weight / total for name, weight in WEIGHTS.items()}
        assert shares == pytest.approx(expected, abs=0.05)


# ---- options


def test_without_a_curriculum_a_plan_does_not_name_it():
    plan = Plan(LENGTHS, BUCKETS)
    assert not {"curriculum", "cycles"} & ({*plan.identity} | {*plan.changes[0][1]})
    used = Plan(LENGTHS, BUCKETS, curriculum="short_first", cycles=2)
    assert (used.identity["curriculum"], used.identity["cycles"]) == ("short_first", 2)
    assert used.after(0, curriculum=None).identity[0] | {"from": 0} == {"from": 0, **used.identity}


def test_options_of_a_curriculum_are_checked():
    with pytest.raises(ValueError, match=r"cycles is 2, .* give curriculum= as well"):
        Plan(LENGTHS, BUCKETS, cycles=2)
    with pytest.raises(ValueError, match="curriculum is 'short'; it must be one of short_first"):
        Plan(LENGTHS, BUCKETS, curriculum="short")
    with pytest.raises(ValueError, match="cycles is 0"):
        Plan(LENGTHS, BUCKETS, curriculum="short_first", cycles=0)


def test_files_of_a_cycle_are_those_of_the_next_windows():
    rng = np.random.default_rng(0)
    files = rng.integers(1, 60, 40)
    lengths = np.clip(rng.normal(np.repeat(rng.integers(1, 64, 40), files), 9), 0, 64).astype(int)
    corpus = type("Filed", (), {"lengths": lengths, "files": files})()
    windows = -(-len(lengths) // 250)
    plan = Plan(corpus, BUCKETS, window=250, curriculum="short_first", cycles=windows)
    for step in range(2 * plan.num_batches()):
        segments = plan.batch(step).segments
        needed = {*np.searchsorted(np.cumsum(files), segments[:, 1], side="right").tolist()}
        assert needed <= {*np.concatenate(plan.files_ahead(step)[""][:4]).tolist()}
