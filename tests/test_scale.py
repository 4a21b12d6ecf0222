import tracemalloc

import numpy as np
import pytest

from pipeline import Bucket, Plan
from pipeline.planning.partition import MANY, Partition
from pipeline.planning.pieces import cut

BUCKETS = Bucket(1024, 128), Bucket(256, 512)


def some_lengths(count, seed=0):
    rng = np.random.default_rng(seed)
    return np.clip(rng.lognormal(4, 0.9, count), 0, 512).astype(np.uint32)


def ranks(lengths, order):
    """For each piece, how many of its length come before it in `order`."""
    seen = np.zeros(int(lengths.max()) + 1, np.int64)
    found = np.empty(len(lengths), np.int64)
    for piece in order:
        found[piece] = seen[lengths[piece]]
        seen[lengths[piece]] += 1
    return found


@pytest.mark.parametrize("overflow", ["split", "truncate", "drop"])
@pytest.mark.parametrize("count", [700, 12_345])
def test_members_are_the_pieces_of_the_ranks(count, overflow):
    lengths = some_lengths(count)
    pieces = cut(lengths, (400,), overflow)
    sizes = pieces.sizes()
    for seed in (None, 3):
        partition = Partition(pieces, 1000, seed)
        np.testing.assert_array_equal(partition.counts, np.bincount(sizes))
        assert partition._rare.any() == (count > MANY * 1000)
        share = partition.counts // 3
        share[0] = 0
        every = [partition.members(part * share, share) for part in range(3)]
        rest = partition.counts - 3 * share
        rest[0] = 0
        every.append(partition.members(3 * share, rest))
        for members, found in every:
            np.testing.assert_array_equal(sizes[members], found)
        for (members, _), wanted in zip(every, [share, share, share, rest], strict=True):
            np.testing.assert_array_equal(
                np.bincount(sizes[members], minlength=len(wanted)), wanted
            )
        whole = np.concatenate([members for members, _ in every])
        assert sorted(whole) == np.flatnonzero(sizes).tolist()
        if seed is None:  # in their own order, ranks are plain to see
            rank = ranks(sizes, np.arange(len(sizes)))
            for part, (members, found) in enumerate(every[:3]):
                assert (rank[members] // share[found] == part).all()


def test_a_window_mixes_the_whole_corpus():
    # Examples sorted by where they come from: a tenth of each window is from each tenth of them.
    pieces = cut(np.full(100_000, 7, np.uint32), (7,), "split")
    share = np.array([0] * 7 + [10_000])
    members, _ = Partition(pieces, 10_000, seed=0).members(3 * share, share)
    tenths = np.bincount(members // 10_000, minlength=10)
    assert tenths.min() > 500


def test_every_epoch_of_many_windows_is_a_partition_and_any_step_is_at_hand():
    lengths = some_lengths(400_000)
    plan = Plan(lengths, BUCKETS, window=20_000, seed=5)
    steps = plan.num_batches()
    digests = {}
    for epoch in (0, 3):
        seen = np.zeros(len(lengths), np.int64)
        for step in range(epoch * steps, (epoch + 1) * steps):
            batch = plan.batch(step)
            np.add.at(seen, batch.segments[:, 1], batch.segments[:, 3])
            digests[step] = batch.digest
        np.testing.assert_array_equal(seen, lengths)
    assert plan.padding < 0.005
    fresh = Plan(lengths, BUCKETS, window=20_000, seed=5)
    for step in (4 * steps - 1, steps // 2, 3 * steps + 7, 0):
        assert fresh.batch(step).digest == digests[step]


def test_left_overs_too_many_for_one_window_make_several():
    lengths = np.random.default_rng(0).integers(1, 400, 3000)  # seven of each, in 30 windows
    plan = Plan(lengths, [Bucket(2, 400)], window=100)
    assert len(plan.stages[0].sources[0].whole.kinds) > 2
    seen = np.zeros(len(lengths), np.int64)
    for step in range(plan.num_batches()):
        np.add.at(seen, plan.batch(step).segments[:, 1], plan.batch(step).segments[:, 3])
    np.testing.assert_array_equal(seen, lengths)


def test_memory_is_that_of_windows_and_not_of_the_corpus(tmp_path):
    count = 2_000_000
    some_lengths(count).tofile(tmp_path / "lengths")

    class Stored:
        lengths = np.memmap(tmp_path / "lengths", np.uint32, "r")

    tracemalloc.start()
    plan = Plan(Stored, BUCKETS, window=50_000)
    for step in range(0, plan.num_batches(), 40):
        plan.batch(step)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 12e6  # one int64 for each example would take 16 MB
