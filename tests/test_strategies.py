import grain
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.planning.cascade import PACKINGS
from pipeline.planning.lengths import Lengths
from pipeline.report import Options, simulations
from pipeline.report.lockstep import compare, simulation
from pipeline.report.simulations import Simulation
from pipeline.report.strategies import HOSTS, Strategy, figures, simulate, strategies
from pipeline.report.stream import Stream, draw, stream_of


def stream(*lengths, longest=1000):
    return Stream(np.array(lengths), longest)


def pieces_of(documents, longest):
    """Each document cut every `longest` positions."""
    sizes = [(size, at) for size in documents.tolist() for at in range(0, size, longest)]
    return np.array([min(size - at, longest) for size, at in sizes])


def shapes(made):
    return list(zip(made.rows.tolist(), made.lengths.tolist(), strict=True))


# ---- one example in a row


def test_padded_to_the_longest_of_all():
    made = simulations.pad_batches(stream(2, 5, 3, 1, 4), rows=2, window=2, length=5)
    assert shapes(made) == [(2, 5), (2, 5), (1, 5)]
    assert (made.tokens, made.positions, made.shapes) == (15, 25, 2)
    assert made.scores == 5 * 25
    assert made.squares == 4 + 25 + 9 + 1 + 16
    assert (made.cut, made.reread) == (0, 0)


def test_padded_to_the_longest_in_the_batch():
    # Batches are [2, 5], [3, 1] and [4].
    made = simulations.pad_batches(stream(2, 5, 3, 1, 4), rows=2, window=2)
    assert shapes(made) == [(2, 5), (2, 3), (1, 4)]
    assert (made.tokens, made.positions, made.shapes) == (15, 20, 3)
    assert made.reread == 0


def test_windows_are_sorted_before_they_are_cut():
    # Windows [7, 1, 6, 2] and [5, 3] become 1 2 | 6 7 and 3 5.
    made = simulations.pad_batches(stream(7, 1, 6, 2, 5, 3), rows=2, window=4)
    assert shapes(made) == [(2, 2), (2, 7), (2, 5)]
    assert made.tokens / made.positions == 24 / 28
    assert made.reread == 4


def test_a_token_budget_cuts_as_many_rows_as_the_longest_left_allows():
    # The window 9 4 4 3 3 under a budget of 12: one row of 9, three of 4, and one of 3 is left.
    # The next window is 6 1: two rows of 6.
    made = simulations.token_budget(stream(3, 9, 4, 3, 4, 1, 6), budget=12, window=5)
    assert shapes(made) == [(1, 9), (3, 4), (1, 3), (2, 6)]
    assert (made.tokens, made.positions) == (30, 36)
    assert made.reread == 5


def test_an_example_over_the_budget_has_a_batch_to_itself():
    assert shapes(simulations.token_budget(stream(9, 8), budget=5, window=2)) == [(1, 9), (1, 8)]


def test_examples_wait_in_the_bucket_of_their_length():
    # Buckets up to 4 (three rows) and up to 8 (one row). 2 4 3 fill the first; 1 is left over.
    made = simulations.bucket_by_length(stream(2, 7, 4, 3, 5, 1), budget=12, ends=(4, 8))
    assert shapes(made) == [(3, 4), (1, 4), (1, 8), (1, 8)]
    assert (made.tokens, made.positions, made.shapes) == (22, 32, 3)
    # When 7 comes out, 2 waits, and before 3 is read, 2 7 4 must be read again.
    assert made.reread == 3


def test_what_waits_longest_decides_what_is_read_again():
    # Two rows up to 10 make a batch, or four up to 5: the first 9 waits for the other.
    made = simulations.bucket_by_length(stream(9, 1, 1, 1, 1, 9), budget=20, ends=(5, 10))
    assert shapes(made) == [(4, 5), (2, 10)]
    assert made.reread == 5


# ---- several examples in a row


def test_concatenate_and_split_cuts_every_so_many_positions():
    # Documents 3 4 2 6 in rows of 5: 3+2 | 2+2+1 | 5; the second and the fourth are cut.
    made = simulations.concatenate_and_split(stream(3, 4, 2, 6), rows=2, length=5)
    assert shapes(made) == [(2, 5), (1, 5)]
    assert (made.tokens, made.positions, made.cut) == (15, 15, 2)
    assert made.squares == 9 + 4 + 4 + 4 + 1 + 25
    assert made.reread == 1


def test_a_long_document_fills_whole_rows():
    made = simulations.concatenate_and_split(stream(1, 13), rows=1, length=5)  # 1+4 | 5 | 4
    assert (len(made.rows), made.tokens, made.cut) == (3, 14, 1)
    assert made.squares == 1 + 16 + 25 + 16


def test_first_fit_takes_the_first_row_with_room():
    # Two rows of 10: 6+4 and 5+5; 3 fits nowhere, so two more are opened: 3 and 8.
    made = simulations.first_fit(stream(6, 5, 4, 5, 3, 8), rows=2, length=10, open_rows=2)
    assert shapes(made) == [(2, 10), (2, 10)]
    assert made.reread == 4
    # 3 comes before 4: it takes the 4 positions left beside 6, and 4 goes beside 5.
    assert len(simulations.first_fit(stream(6, 5, 3, 4), rows=1, length=10, open_rows=2).rows) == 2


def test_best_fit_takes_the_row_with_least_room():
    # 4 goes beside the 6 and fills it; 5 beside 5. First fit puts 4 beside 5 and must open more.
    order = stream(5, 6, 4, 5)
    assert len(simulations.best_fit(order, rows=1, length=10, open_rows=2).rows) == 2
    assert len(simulations.first_fit(order, rows=1, length=10, open_rows=2).rows) == 3


PACKERS = {"first fit": simulations.first_fit, "best fit": simulations.best_fit}
GRAIN = {
    "first fit": grain.experimental.FirstFitPackIterDataset,
    "best fit": grain.experimental.BestFitPackIterDataset,
}


@pytest.mark.parametrize("name", GRAIN)
@pytest.mark.parametrize("open_rows", [3, 8])
def test_the_packers_make_as_many_rows_as_grains(name, open_rows):
    lengths = np.random.default_rng(open_rows).integers(1, 33, 250)
    data = grain.MapDataset.source([{"x": np.ones(n, np.int32)} for n in lengths])
    rows = GRAIN[name](
        data.to_iter_dataset(grain.ReadOptions(0, 1)),
        length_struct={"x": 32},
        num_packing_bins=open_rows,
    )
    made = PACKERS[name](stream(*lengths), rows=1, length=32, open_rows=open_rows)
    assert len(made.rows) == sum(1 for _ in rows)


def test_a_token_budget_makes_the_batches_of_infinibatch():
    iterators = pytest.importorskip("infinibatch.iterators")
    lengths = np.random.default_rng(0).integers(1, 400, 5000)
    theirs = iterators.BucketedReadaheadBatchIterator(
        iterators.NativeCheckpointableIterator(lengths.tolist()),
        read_ahead=700,
        key=int,
        batch_size=lambda longest: 2048 // longest,
        seed=0,
    )
    made = simulations.token_budget(stream(*lengths), budget=2048, window=700)
    assert sorted(shapes(made)) == sorted((len(batch), max(batch)) for batch in theirs)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=60), st.integers(1, 9))
def test_first_fit_agrees_with_a_plain_loop(lengths, open_rows):
    used, room = 0, [20] * open_rows
    for size in lengths:
        at = next((at for at, left in enumerate(room) if left >= size), None)
        if at is None:
            used += sum(left < 20 for left in room)
            room, at = [20] * open_rows, 0
        room[at] -= size
    used += sum(left < 20 for left in room)
    made = simulations.first_fit(stream(*lengths), rows=1, length=20, open_rows=open_rows)
    assert len(made.rows) == used


# ---- streams


def test_long_documents_are_split_and_counted_as_cut():
    made = simulations.pad_batches(stream(3, 9, 2, longest=4), rows=2, window=2)  # pieces 3 4 4 1 2
    assert shapes(made) == [(2, 4), (2, 4), (1, 2)]
    assert (made.tokens, made.cut) == (14, 1)


@given(st.lists(st.integers(0, 30), min_size=1, max_size=50))
def test_a_stream_holds_every_document_and_its_shards_share_it(lengths):
    whole = stream_of(draw(np.array(lengths), 100, seed=1), 8, "split")
    assert sorted(whole.documents.tolist()) == sorted(n for n in lengths if n)
    shards = list(whole.shards(3))
    for part in (whole, *shards):
        np.testing.assert_array_equal(part.pieces, pieces_of(part.documents, 8))
    together = np.concatenate([shard.documents for shard in shards])
    assert sorted(together) == sorted(whole.documents)


def test_truncated_and_dropped_documents_are_no_longer_in_the_stream():
    lengths = np.array([3, 9, 0, 2])
    assert stream_of(lengths, 4, "truncate").pieces.tolist() == [3, 4, 2]
    assert stream_of(lengths, 4, "drop").pieces.tolist() == [3, 2]


def test_the_order_depends_on_the_seed_alone():
    lengths = np.arange(1, 200)
    for sample in (50, 1000):
        same = [draw(lengths, sample, seed).tolist() for seed in (0, 0, 1)]
        assert same[0] == same[1] != same[2]


def test_a_sample_is_of_all_lengths_pairs_included():
    pairs = np.stack([np.arange(10_000), np.arange(10_000)], axis=1)
    sample = draw(pairs, 1000, seed=0)
    assert sample.shape == (1000, 2)
    assert abs(sample[:, 0].mean() - 5000) < 500
    assert (sample[:, 0] == sample[:, 1]).all()


# ---- figures


def test_figures_of_two_batches_worked_by_hand():
    # Batches of 2 × 4 and 1 × 2 with the segments 4, 1, 2.
    made = Simulation(
        rows=np.array([2, 1]), lengths=np.array([4, 2]), tokens=7, squares=21, cut=0, reread=5
    )
    seen = figures("a", "b", made, width=10, hosts=[2, 3])
    assert seen["padding"] == pytest.approx(3 / 10)
    assert (seen["batches"], seen["shapes"], seen["reread"]) == (2, 2, 5)
    assert seen["positions_per_token"] == pytest.approx(10 / 7)
    # Scores: 2·4² + 2² = 36 pairs, each with 2·10 multiplications and additions, twice.
    assert seen["attention_flops_per_token"] == pytest.approx(36 * 4 * 10 / 7)
    assert seen["segment_attention_flops_per_token"] == pytest.approx(21 * 4 * 10 / 7)
    assert seen["cost"] == pytest.approx((10 + 36 / 60) / 7)
    assert seen["segment_cost"] == pytest.approx((10 + 21 / 60) / 7)
    assert not seen["equal"]


def test_a_sample_is_said_to_be_one_and_batches_are_scaled_up():
    strategy = Strategy("n", "a", simulations.pad_batches, {"rows": 1, "window": 1})
    seen = simulate(strategy, Stream(np.full(25, 5), 8, scale=4), width=8)
    assert (seen["sample"], seen["batches"]) == (25, 100)
    assert seen["batches_per_host"] == [4] + [3] * 7  # of the sample
    assert not seen["equal"]
    assert simulate(strategy, Stream(np.full(100, 5), 8), width=8)["sample"] is None


def test_every_strategy_counts_all_tokens_and_works_on_fewer_examples_than_hosts():
    for lengths in ([7], [3, 1, 4, 1, 5], list(range(1, 200))):
        every = stream(*lengths, longest=200)
        for strategy in strategies(budget=256, longest=200, longest_example=max(lengths)):
            made = strategy.run(every, 1)
            assert made.tokens == sum(lengths), strategy.name
            assert made.positions >= made.tokens
            assert all(strategy.run(shard, HOSTS).tokens >= 0 for shard in every.shards(HOSTS))


def compared(lengths, options, longest, **more):
    array = np.array(lengths)
    return compare(Lengths(array), array, Options(options), (longest,), **more)


def test_lockstep_is_the_plan_itself():
    lengths = np.random.default_rng(0).integers(1, 500, 3000)
    options = {"tokens_per_batch": 2048, "length_multiple": 64}
    seen, _ = compared(lengths, options, 512)
    assert {each["packing"] for each in seen} == set(PACKINGS)
    for each in seen:
        plan = Options({**options, "packing": each["packing"]}).plan(lengths, _buckets(each))
        assert each["padding"] == pytest.approx(plan.padding)
        assert each["batches"] == plan.num_batches()
        assert simulation(plan).tokens == lengths.sum()
        assert each["equal"]
        assert len(each["batches_per_host"]) == HOSTS
    numbers = [len(each["buckets"]) for each in seen if each["packing"] == "best_fit"]
    assert numbers == sorted(set(numbers))


def _buckets(each):
    from pipeline import Bucket

    return tuple(Bucket(*bucket) for bucket in each["buckets"])


def test_a_way_of_packing_that_is_not_installed_is_left_out_aloud(monkeypatch):
    def plan(self, *arguments):
        if self["packing"] == "none":
            raise ImportError("that needs something")
        return real(self, *arguments)

    real = Options.plan
    monkeypatch.setattr(Options, "plan", plan)
    seen, excluded = compared(range(1, 100), {"tokens_per_batch": 256}, 128)
    assert {each["packing"] for each in seen} == set(PACKINGS) - {"none"}
    assert excluded == ["that needs something"]


@pytest.mark.skipif("optimal" not in PACKINGS, reason="there is no such packing yet")
def test_optimal_packing_is_simulated_where_it_takes_seconds_or_when_asked(monkeypatch):
    monkeypatch.setattr("pipeline.report.lockstep.OPTIMAL_LENGTHS", 5)
    for lengths, asked, expected in ((6, False, False), (5, False, True), (6, True, True)):
        options = {"tokens_per_batch": 256}
        seen, excluded = compared(range(1, lengths + 1), options, 128, optimal=asked)
        assert ("optimal" in {each["packing"] for each in seen}) == expected
        assert any("ask for it with --optimal" in each for each in excluded) != expected
