"""Shares of files: which files the rows of a host need, and what holds for plans with shares."""

import functools
import os
import signal
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline import Bucket, Plan
from pipeline.planning import processes, shares
from tests.planning.corpora import costs_of, lognormal

ONE, TWO = (Bucket(16, 128),), (Bucket(32, 64), Bucket(16, 128))


def filed(lengths, per_file):
    """A corpus in files of so many examples."""
    edges = [*range(0, len(lengths), per_file), len(lengths)]
    return SimpleNamespace(lengths=lengths, files=np.diff(edges))


CORPUS = filed(lognormal(12_000, 3.2, 0.9, most=128), 300)
OTHER = filed(lognormal(8_000, 2.8, 0.7, most=128, seed=1), 250)


def rows_of(plan, host, hosts):
    """The rows that one of several hosts builds: an equal part of each batch."""
    return {
        bucket: np.arange(host * bucket.rows // hosts, (host + 1) * bucket.rows // hosts)
        for bucket in plan.buckets
    }


def files_of(corpus, examples):
    """The numbers of the files of some examples, counted file by file."""
    owner = np.repeat(np.arange(len(corpus.files)), corpus.files)
    return {*owner[examples].tolist()}


def needed(plan, corpus, steps, rows, first=0):
    """The files of all examples in some rows, of a corpus whose examples begin at `first`."""
    found = set()
    for batch in map(plan.batch, steps):
        examples = batch.segments[np.isin(batch.segments[:, 0], rows[batch.bucket]), 1] - first
        found |= files_of(corpus, examples[(examples >= 0) & (examples < len(corpus.lengths))])
    return found


def asked(plan, step, rows, name=""):
    """The files of the rest of the epoch and of the next one."""
    return {*np.concatenate(plan.files_ahead(step, rows)[name]).tolist()}


# ---- by hand


def test_rows_come_from_one_share_in_the_order_of_the_shares():
    # Four files of three examples: the first two are one share, the others another one.
    corpus = SimpleNamespace(lengths=np.array([4, 4, 8, 5, 3, 8, 6, 2, 8, 7, 1, 8]), files=[3] * 4)
    corpus.files = np.array(corpus.files)
    plan = Plan(corpus, [Bucket(2, 8)], read_shares=2, shuffle=False)
    rows = [[[], []] for _ in range(plan.num_batches())]
    for step, batch in enumerate(map(plan.batch, range(len(rows)))):
        for row, example, start, length in batch.segments.tolist():
            assert (start, length) == (0, corpus.lengths[example])
            rows[step][row].append(example)
    assert rows == [[[0, 1], [6, 7]], [[2], [8]], [[3, 4], [9, 10]], [[5], [11]]]
    assert [list(n) for n in plan.files_ahead(0)[""]] == [[0, 1, 2, 3]] * 2
    for row, files in enumerate([[0, 1], [2, 3]]):
        mine = plan.files_ahead(0, {Bucket(2, 8): np.array([row])})[""]
        assert [list(n) for n in mine] == [files] * 2


def test_one_share_is_no_option_and_others_are_part_of_the_fingerprint():
    plain, one, two, four = (
        Plan(CORPUS, TWO, **options)
        for options in ({}, *({"read_shares": number} for number in (1, 2, 4)))
    )
    assert "read_shares" not in plain.identity
    assert "read_shares" not in plain.changes[0][1]
    assert one.fingerprint == plain.fingerprint
    assert len({plain.fingerprint, two.fingerprint, four.fingerprint}) == 3
    assert Plan.replay(CORPUS, four.changes).fingerprint == four.fingerprint
    changed = plain.after(7, read_shares=4).after(30, read_shares=1)
    assert Plan.replay(CORPUS, changed.changes).fingerprint == changed.fingerprint
    # Files decide the batches, also where all examples are in one window.
    others = Plan(filed(CORPUS.lengths, 400), TWO, read_shares=4)
    assert others.fingerprint != four.fingerprint


@pytest.mark.parametrize("value", [0, -2, 2.5, "many", None])
def test_shares_that_are_no_number_are_refused_by_name(value):
    with pytest.raises(ValueError, match=r"read_shares is .*whole number from 1 up"):
        Plan([3, 4], ONE, read_shares=value)


def test_more_shares_than_a_window_has_examples_are_refused():
    with pytest.raises(ValueError, match=r"read_shares is 65 and window is 64; .* fewer shares"):
        Plan([3, 4], ONE, read_shares=65, window=64)


# ---- the files of a host

KINDS = {
    "one bucket": (ONE, {}),
    "two buckets": (TWO, {}),
    "windows": (TWO, {"window": 3000}),
    "tiers": (TWO, {"window": 3000, "tiers": 4}),
    "cut to fill": (ONE, {"packing": "fill"}),
    "in order": (TWO, {"shuffle": False}),
    "examples left out": (ONE, {"exclude": range(0, 12_000, 3)}),
    "rows that the shares do not divide": ((Bucket(12, 64), Bucket(6, 128)), {}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_a_host_have_only_files_that_it_is_told(kind):
    buckets, options = KINDS[kind]
    plan = Plan(CORPUS, buckets, read_shares=16, **options)
    assert asked(plan, 0, None) == {*range(40)}
    end = plan.num_batches()
    for hosts in (1, 2, 3, 4, 6, 16):
        if any(bucket.rows % hosts for bucket in buckets):
            continue
        total = extra = 0
        for host in range(hosts):
            rows = rows_of(plan, host, hosts)
            told, has = asked(plan, 0, rows), needed(plan, CORPUS, range(end), rows)
            assert has <= told
            total, extra = total + len(told), extra + len(told - has)
            for step in (end // 3, end - 2):
                windows = plan.files_ahead(step, rows)[""]
                rest = {*np.concatenate(windows[: max(len(windows) // 2, 1)]).tolist()}
                assert needed(plan, CORPUS, [step], rows) <= rest
        # Each host also has files at both ends of its share, and of each bucket and window.
        windows = 1 if "window" not in options else 4
        assert total <= 40 + 3 * hosts * windows * len(buckets)
        assert extra <= 0.1 * total


def test_hosts_read_the_corpus_about_once_and_without_shares_once_each():
    plans = [Plan(CORPUS, ONE), Plan(CORPUS, ONE, read_shares=16)]
    read = [
        [
            sum(len(asked(plan, 0, rows_of(plan, host, hosts))) for host in range(hosts)) / 40
            for hosts in (1, 2, 4, 8)
        ]
        for plan in plans
    ]
    assert read[0] == [1, 2, 4, 8]
    assert read[1][0] == 1
    assert max(read[1][1:3]) <= 1.15
    assert read[1][3] <= 1.4


def test_hosts_are_told_their_files_after_changes():
    plan = Plan(CORPUS, ONE, read_shares=16, window=4000)
    for at in (9, plan.num_batches() - 20):
        changed = plan.after(at, buckets=TWO, exclude=range(100, 400), seed=3)
        steps = range(at, changed.first_step(2))
        for host in range(4):
            rows = rows_of(changed, host, 4)
            told, has = asked(changed, at, rows), needed(changed, CORPUS, steps, rows)
            assert has <= told
            assert len(told) <= 0.7 * 40  # of two epochs, whose shares differ


def test_hosts_of_a_mixture_are_told_their_files():
    buckets, corpora = (Bucket(64, 128),), {"a": CORPUS, "b": OTHER}
    plan = Plan(corpora, buckets, weights={"a": 2, "b": 1}, read_shares=16)
    plan = plan.after(20, weights={"a": 1, "b": 1})
    for name, first in (("a", 0), ("b", 12_000)):
        told = 0
        for host in range(4):
            rows = rows_of(plan, host, 4)
            mine = asked(plan, 20, rows, name)
            assert needed(plan, corpora[name], range(20, 140), rows, first) <= mine
            told += len(mine)
        assert told <= 2.2 * len(corpora[name].files)


# ---- what holds for plans with shares


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=60).filter(any),
    per_file=st.integers(1, 9),
    number=st.integers(1, 9),
    rows=st.integers(1, 12),
    window=st.sampled_from([9, 20, 1000]),
    seed=st.integers(0, 5),
)
def test_each_example_is_there_once_and_every_batch_but_the_last_is_full(
    lengths, per_file, number, rows, window, seed
):
    buckets = Bucket(rows, 16), Bucket(max(rows // 2, 1), 40)
    corpus = filed(np.array(lengths), per_file)
    plan = Plan(corpus, buckets, read_shares=number, window=window, seed=seed)
    for epoch in (0, 1):
        batches = [*map(plan.batch, range(plan.first_step(epoch), plan.first_step(epoch + 1)))]
        segments = np.concatenate([batch.segments for batch in batches])
        found = sorted((example, length) for _, example, _, length in segments.tolist())
        assert found == [(n, length) for n, length in enumerate(lengths) if length]
        for batch in batches:
            filled = np.bincount(batch.segments[:, 0], batch.segments[:, 3], batch.bucket.rows)
            assert filled.max() <= batch.bucket.length
        lacking = [batch for batch in batches if len({*batch.segments[:, 0]}) < batch.bucket.rows]
        assert len(lacking) <= 1


def test_batches_are_even_in_cost_and_in_segments():
    lengths = lognormal(60_000, 3, 1, most=256)
    corpus, buckets = filed(lengths, 1000), [Bucket(64, 256)]
    evenness = []
    for number in (1, 16):
        plan = Plan(corpus, buckets, read_shares=number)
        batches = [*map(plan.batch, range(plan.num_batches() - 1))]
        devices = [costs_of(batch).reshape(4, -1).sum(axis=1) for batch in batches]
        over = sum(costs.max() for costs in devices) / sum(costs.mean() for costs in devices)
        segments = np.array([len(batch.segments) for batch in batches])
        evenness.append((over, segments.std() / segments.mean()))
    assert evenness[1][0] < 1.08
    assert evenness[1][1] < 0.12  # rows in random order have 0.15
    tiers = Plan(corpus, buckets, read_shares=16, tiers=8)
    devices = np.array([costs_of(tiers.batch(step)).reshape(16, -1).sum(1) for step in range(64)])
    assert devices.max(axis=1).sum() / devices.mean(axis=1).sum() < 1.25


def test_rows_come_in_other_batches_in_each_epoch_and_from_the_same_files():
    plan = Plan(CORPUS, ONE, read_shares=16)
    end, rows = plan.num_batches(), rows_of(plan, 1, 4)
    first, second = ([plan.batch(step).digest for step in range(n, n + end)] for n in (0, end))
    assert not {*first} & {*second}
    files = [needed(plan, CORPUS, range(n, n + end), rows) for n in (0, end)]
    assert files[0] == files[1]


# ---- processes that pack


def _double(number):
    return 2 * number


def _die_once(path, survivor):
    if os.getpid() != survivor and not os.path.exists(path):
        open(path, "x").close()
        os.kill(os.getpid(), signal.SIGKILL)
    return os.getpid()


def _fail(number):
    raise ValueError(f"not {number}")


def test_processes_return_what_this_one_does_in_order(monkeypatch):
    monkeypatch.setattr(processes, "count_cpus", lambda: 3)
    with processes.spread(_double, 3) as call:
        assert call(range(50)) == [2 * number for number in range(50)]
        assert call([]) == []
    with processes.spread(_fail, 2) as call, pytest.raises(ValueError, match="not 7"):
        call([7])


def test_a_process_that_is_killed_leaves_its_work_to_this_one(monkeypatch, tmp_path):
    monkeypatch.setattr(processes, "count_cpus", lambda: 2)
    die = functools.partial(_die_once, survivor=os.getpid())
    with processes.spread(die, 2) as call:
        found = call([os.fspath(tmp_path / "died")] * 8)
    assert len(found) == 8
    assert os.getpid() in found


def test_plans_do_not_depend_on_the_processes_that_pack(monkeypatch):
    options = {"read_shares": 8, "window": 5000}
    alone = Plan(CORPUS, TWO, **options)
    monkeypatch.setattr(processes, "count_cpus", lambda: 2)
    monkeypatch.setattr(shares, "PER_PROCESS", 100)
    together = Plan(CORPUS, TWO, **options)
    assert together.num_batches() == alone.num_batches()
    assert str(together) == str(alone)
    for step in range(0, 2 * alone.num_batches(), 7):
        assert together.batch(step).digest == alone.batch(step).digest
