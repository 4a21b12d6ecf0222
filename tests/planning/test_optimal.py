import errno
import itertools
import json
import types

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pipeline
from pipeline import Bucket, Plan
from pipeline.planning import solution
from pipeline.planning.columns import Knapsack
from tests.planning.corpora import histograms, lognormal
from tests.properties.accounts import assert_each_position_once


def pack_both(lengths, bucket, most=None):
    given = {"lengths": lengths, "buckets": [bucket], "max_segments": most}
    return Plan(**given), Plan(**given, packing="optimal")


def bound_of(plan):
    """Proven: no packing of the plan's corpus uses a greater share of positions."""
    (source,) = plan.stages[-1].streams
    return source.solution.bound


# ---- the knapsack


@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=4, unique=True).map(sorted),
    st.lists(st.integers(0, 9), min_size=4, max_size=4),
    st.integers(1, 16),
    st.one_of(st.none(), st.integers(1, 4)),
)
def test_the_knapsack_is_exact(sizes, values, longest, most):
    values = np.array(values[: len(sizes)], float)
    sack = Knapsack(np.array(sizes), values, longest, most)
    for room in range(longest + 1):
        times = (range(min(room // size, most or room) + 1) for size in sizes)
        rows = [
            row
            for row in itertools.product(*times)
            if np.dot(row, sizes) <= room and (most is None or sum(row) <= most)
        ]
        assert sack.worth[room] == max(np.dot(row, values) for row in rows)
        found = sack.rows(room).T
        assert len(found) == sum(size <= room for size in sizes)
        for number, row in enumerate(found):
            assert row[number]
            assert tuple(row) in rows
            assert row @ values == max(np.dot(each, values) for each in rows if each[number])


# ---- plans


def test_two_rows_where_best_fit_needs_three():
    # 4+4 | 3+3+3 | 3, or 4+3+3 | 4+3+3
    simple, optimal = pack_both([4, 4, 3, 3, 3, 3], Bucket(1, 10))
    assert (simple.num_batches(), optimal.num_batches()) == (3, 2)
    assert "padding 0.000%; no packing can have less than 0.000%" in str(optimal)


@settings(max_examples=25)
@given(histograms(40), st.one_of(st.none(), st.integers(1, 4)))
def test_it_is_never_worse_than_best_fit_and_never_better_than_the_bound(counts, most):
    lengths = np.repeat(np.arange(41), counts)
    simple, optimal = pack_both(lengths, Bucket(1, 40), most)
    assert optimal.padding <= simple.padding
    assert 1 - optimal.padding <= bound_of(optimal) <= 1
    assert_each_position_once(optimal, lengths)


@settings(max_examples=25)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=7))
def test_the_bound_holds_for_the_best_of_all_packings(lengths):
    def fewest(left, rows):  # tries every row for each segment
        if not left:
            return len(rows)
        size, rest = left[0], left[1:]
        fits = {room: at for at, room in enumerate(rows) if room >= size}
        tries = [
            fewest(rest, [*rows[:at], room - size, *rows[at + 1 :]]) for room, at in fits.items()
        ]
        return min([*tries, fewest(rest, [*rows, 12 - size])])

    plan = Plan(lengths, [Bucket(1, 12)], packing="optimal")
    assert sum(lengths) / (12 * fewest(lengths, [])) <= bound_of(plan)


@pytest.mark.parametrize(("window", "most"), [(1 << 20, 3), (900, None)])
def test_several_buckets_and_windows_make_a_partition_close_to_the_bound(window, most):
    lengths = lognormal(4000)
    buckets = Bucket(4, 16), Bucket(3, 32), Bucket(2, 64)
    plan = Plan(lengths, buckets, packing="optimal", window=window, max_segments=most)
    assert_each_position_once(plan, lengths, epochs=3)
    assert 1 - plan.padding <= bound_of(plan)
    assert plan.padding < 0.02
    assert all(plan.batches_per_bucket.values())


# ---- solved once, then an input


def test_patterns_beside_a_corpus_are_an_input_and_wrong_ones_are_refused(tmp_path, monkeypatch):
    def plan(**options):
        return Plan(pipeline.Corpus.open(tmp_path), [Bucket(1, 10)], packing="optimal", **options)

    examples = [np.arange(length + 1) for length in (4, 4, 3, 3, 3, 3)]
    pipeline.Corpus.from_arrays(examples, tmp_path)
    optimal = plan()
    (file,) = tmp_path.glob("packing-*.json")
    few = plan(max_segments=2)  # has patterns of its own
    assert [*few.most_segments().values(), *optimal.most_segments().values()] == [2, 3]
    stored = json.loads(file.read_text())
    assert stored["bound"] == pytest.approx(1)
    simple = [[[1, [[4, 2]]], [1, [[3, 3]]], [1, [[3, 1]]]]]
    file.write_text(json.dumps(stored | {"patterns": simple}))
    assert (optimal.num_batches(), plan().num_batches()) == (2, 3)
    assert plan().fingerprint != optimal.fingerprint
    file.write_text("{")
    with pytest.raises(ValueError, match=r"does not hold the patterns of a plan: .*; delete it"):
        plan()
    file.unlink()
    assert plan().fingerprint == optimal.fingerprint
    monkeypatch.setattr(solution, "_search", None)  # nothing is searched again
    assert plan(seed=3).identity == optimal.identity | {"seed": 3}


def test_a_corpus_that_has_grown_has_the_patterns_of_its_beginning(buckets, monkeypatch):
    kept: dict[str, bytes] = {}

    def corpus(lengths):
        def cached_file(name, make):
            return kept[name] if name in kept else kept.setdefault(name, make())

        return types.SimpleNamespace(lengths=lengths, cached_file=cached_file)

    lengths = lognormal(400)
    plan = Plan(corpus(lengths[:300]), buckets, packing="optimal").after(3, lengths=corpus(lengths))
    monkeypatch.setattr(solution, "_search", None)  # nothing is searched again
    assert Plan.replay(corpus(lengths), plan.changes).fingerprint == plan.fingerprint


def test_a_corpus_that_cannot_be_written_is_solved_each_time(tmp_path, monkeypatch):
    codes = iter([errno.EACCES, errno.EROFS])

    def refuse(path, **options):
        raise OSError(next(codes), "no", str(path))

    corpus = pipeline.Corpus.from_arrays([np.arange(n) for n in (5, 5, 4, 4, 4, 4)], tmp_path)
    monkeypatch.setattr("pipeline.fs.atomic.atomic_write", refuse)  # root may write anywhere
    first, second = (Plan(corpus, [Bucket(1, 10)], packing="optimal") for _ in range(2))
    assert first.fingerprint == second.fingerprint
    assert [*codes, *tmp_path.glob("packing-*")] == []


def test_a_plan_with_optimal_packing_is_aligned_and_knows_its_bound():
    lengths, buckets = lognormal(600, 3, 1, most=120), [Bucket(8, 64), Bucket(4, 128)]
    plans = [Plan(lengths, buckets, align=16, packing=each) for each in ("best_fit", "optimal")]
    assert_each_position_once(plans[1], lengths)
    places = (-(-lengths // 16) * 16).sum()  # of documents, none of which is cut
    assert plans[1].padding <= plans[0].padding
    assert 1 - lengths.sum() / places - 1e-5 <= 1 - bound_of(plans[1]) <= plans[1].padding


def test_tails_change_no_pattern():
    lengths, plans = lognormal(300), []
    for tails in ([], [Bucket(2, 32)]):
        plans.append(Plan(lengths, [Bucket(8, 32), *tails, Bucket(16, 64)], packing="optimal"))
    assert plans[0].identity["patterns"] == plans[1].identity["patterns"]
