"""Streams of passes: independent orders, and windows made once, of few files, in little memory."""

import concurrent.futures
import contextlib
import gc
import itertools
import pickle
import threading
import tracemalloc
import weakref
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest

from pipeline import Bucket, Plan
from pipeline.planning import stage
from pipeline.planning.cache import WindowCache
from pipeline.planning.options import Options
from pipeline.planning.rows import Rows
from pipeline.planning.tiers import Tiers
from tests.planning.corpora import digests, lognormal
from tests.properties.accounts import batches_of

EQUAL, ANY = np.full(400, 8), np.random.default_rng(5).integers(1, 30, 400)
MIXTURE = {"a": np.tile(ANY, 5), "b": np.tile(EQUAL, 5)}


def overlap(some, others):
    """How many numbers two lists of sets of numbers have in common, step by step, over chance."""
    common = sum(len(a & b) for a, b in zip(some, others, strict=True))
    return common / sum(len(a) * len(b) / 400 for a, b in zip(some, others, strict=True))


@pytest.mark.parametrize("lengths", [EQUAL, ANY])
@pytest.mark.parametrize("window", [1 << 22, 100])
def test_epochs_and_corpora_of_a_mixture_are_shuffled_independently(lengths, window):
    corpora = {"a": lengths, "b": lengths}
    mixture = Plan(corpora, [Bucket(16, 32)], weights={"a": 1, "b": 1}, window=window)
    batches = [mixture.batch(step).segments[:, 1] for step in range(60)]
    first, second = ([{*each[(each // 400) == n] % 400} for each in batches] for n in (0, 1))
    assert 0.5 < overlap(first, second) < 1.6
    plan = Plan(lengths, [Bucket(8, 32)])
    first, second = ([{*each.segments[:, 1]} for each in batches_of(plan, n)] for n in (0, 1))
    assert 0.5 < overlap(first, second) < 1.6


@pytest.fixture
def fills(monkeypatch):
    """The pass, epoch and place of each window that is filled, and the thread that fills it."""
    found, fill = {}, Rows._fill

    def noting(self, epoch, place):
        assert (self, epoch, place) not in found, "a window is filled twice"
        found[self, epoch, place] = threading.current_thread()
        return fill(self, epoch, place)

    monkeypatch.setattr(Rows, "_fill", noting)
    return found


@pytest.mark.parametrize(
    ("lengths", "options", "windows"),
    [
        (np.tile(ANY, 10), {"window": 400}, 10),
        (np.tile(ANY, 10), {"window": 3000}, 2),
        (MIXTURE, {"window": 500, "weights": {"a": 1, "b": 2}}, 8),
    ],
)
def test_each_window_is_filled_once_whatever_threads_ask_in_whatever_order(
    fills, lengths, options, windows
):
    plan = Plan(lengths, [Bucket(8, 16), Bucket(8, 32)], **options)
    steps = np.random.default_rng(0).permutation(plan.num_batches()).tolist()
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        found = [batch.digest for batch in pool.map(plan.batch, steps)]
    assert len([each for each in fills if each[1] == 0]) == windows
    fresh = pickle.loads(pickle.dumps(plan))
    fills.clear()
    assert found == digests(fresh, steps)


def test_the_next_window_is_filled_in_the_background(fills):
    batches_of(Plan(np.tile(ANY, 10), [Bucket(2, 32)], window=400))
    here = [each[1:] for each, thread in fills.items() if thread is threading.current_thread()]
    assert here == [(0, 0)]
    assert {(0, place) for place in range(10)} <= {each[1:] for each in fills}


def test_threads_sort_a_block_of_tiers_once():
    plan, deal = Plan(ANY, [Bucket(2, 32)], tiers=8), Tiers._deal
    with (
        mock.patch.object(Tiers, "_deal", autospec=True, side_effect=deal) as noted,
        concurrent.futures.ThreadPoolExecutor(8) as pool,
    ):
        list(pool.map(plan.batch, [*range(8)] * 8))
    assert noted.call_count == 1


def test_windows_of_old_stages_are_forgotten(monkeypatch):
    monkeypatch.setattr(stage, "CACHED", 1)
    plan = Plan(ANY, [Bucket(8, 32)])
    for change in range(1, 9):
        plan = plan.after(2 * change, seed=change)
        plan.batch(2 * change)
    cache = plan.stages[-1].streams[0].cache
    assert sum(pieces for pieces, _ in cache._entries.values()) <= cache.capacity < 20 * len(ANY)
    assert len(cache._entries) < 20  # of nine stages with two passes each


def test_small_shares_are_not_starved_by_many_intervals():
    # Forty corpora end what is left of their epochs at forty different steps.
    corpora = {f"c{n}": ANY[: 100 + 7 * n] for n in range(40)} | {"small": EQUAL}
    weights = {name: 0.02 if name == "small" else 1 for name in corpora}
    plan = Plan(corpora, [Bucket(4, 32)], weights=weights).after(50, seed=2)
    rows = plan.stages[1].schedule.before(2000).rows[0]
    assert abs(int(rows[-1]) - 2000 * 4 * 0.02 / 40.02) < 2


def test_windows_of_what_is_left_are_in_the_identity():
    plan = Plan([8] * 60, [Bucket(4, 1)], seed=1)
    changed = [plan.after(60, buckets=[Bucket(4, 8)], window=window) for window in (100, 10_000)]
    assert changed[0].batch(60).digest != changed[1].batch(60).digest
    assert changed[0].fingerprint != changed[1].fingerprint


def test_an_interrupted_thread_leaves_its_window_to_those_that_wait():
    cache, begun, go_on = WindowCache(100), threading.Event(), threading.Event()

    def interrupted():
        begun.set()
        go_on.wait()
        raise KeyboardInterrupt

    with concurrent.futures.ThreadPoolExecutor() as pool:
        one = pool.submit(cache.get, "window", 1, interrupted)
        begun.wait()
        other = pool.submit(cache.get, "window", 1, lambda: "made")
        go_on.set()
        assert other.result() == "made"
        assert isinstance(one.exception(), KeyboardInterrupt)


def test_a_value_that_cannot_be_made_takes_no_place_and_the_value_used_last_stays():
    cache, made = WindowCache(2), []
    with pytest.raises(ZeroDivisionError):
        cache.get("a", 2, lambda: 1 / 0)
    for key in "abacab":
        cache.get(key, 1, made.append, key)
    assert made == [*"abcb"]


@pytest.mark.parametrize(("window", "each"), [(1 << 20, 1 << 19), (99_999, 1 << 16), (500, 500)])
def test_two_corpora_have_half_a_window_each_but_not_a_small_one(window, each):
    options = Options(buckets=(Bucket(8, 32),), window=window)
    assert stage.options_of_streams(options, 2).window == each


def test_where_no_thread_can_start_windows_are_made_when_they_are_needed(monkeypatch):
    expected = digests(Plan(ANY, [Bucket(8, 32)], window=50), range(40))
    start = mock.Mock(side_effect=RuntimeError("can't start new thread"))
    monkeypatch.setattr(threading.Thread, "start", start)
    assert digests(Plan(ANY, [Bucket(8, 32)], window=50), range(40)) == expected


def mix(tiers):
    corpora, weights = {"a": EQUAL, "b": ANY}, {"a": 1, "b": 1}
    return Plan(corpora, [Bucket(8, 32)], weights=weights, tiers=tiers)


@pytest.mark.parametrize("tiers", [1, 4])
def test_a_batch_that_is_changed_changes_no_other(tiers):
    mixture = mix(tiers)
    before = mixture.batch(1)
    expected = before.digest
    for step in range(8):
        batch = mixture.batch(step)
        batch.segments[:], batch.epochs[:] = -1, -1
        batch.sources["a"] = 0
    assert mixture.batch(1).digest == expected
    assert mixture.batch(1).sources == before.sources


@pytest.mark.parametrize("tiers", [1, 4])
def test_a_plan_that_is_dropped_is_freed_at_once(tiers):
    plan = mix(tiers)
    later = plan.after(60, seed=2)
    digests(plan, range(90)), digests(later, range(90))
    parts = [part for each in (*plan.stages, *later.stages) for part in (each, each.assembly)]
    kept = [weakref.ref(part) for part in (*parts, plan.stages[0].streams[0])]
    gc.disable()
    try:
        del plan, later, parts
        assert not any(each() for each in kept)
    finally:
        gc.enable()


# ---- windows of whole files: batches need few of them

FILED = Bucket(8, 32), Bucket(6, 64), Bucket(4, 128)


def some_files():
    """40 files of up to 59 examples, which differ much from one another in their lengths."""
    rng = np.random.default_rng(0)
    files = rng.integers(1, 60, 40)
    typical = np.repeat(rng.integers(1, 128, 40), files)
    lengths = np.clip(rng.normal(typical, 9), 0, 128).astype(np.uint32)
    return SimpleNamespace(lengths=lengths, files=files)


def files_of(corpus, batch):
    """The numbers of the files that have the examples of a batch."""
    return {*np.searchsorted(np.cumsum(corpus.files), batch.segments[:, 1], side="right")}


def test_batches_need_the_files_of_a_window_and_seldom_of_the_next_ones():
    corpus = some_files()
    plan = Plan(corpus, FILED, window=250)
    order, rows = [], 0
    for step in range(2 * plan.num_batches()):
        ahead, needed = plan.files_ahead(step)[""], files_of(corpus, plan.batch(step))
        # A bucket with few rows may take those of several windows for a batch.
        assert needed <= {*np.concatenate(ahead[:4])}
        rows += needed <= {*ahead[0]}
        if step < plan.num_batches() and (not order or list(ahead[0]) != order[-1]):
            order.append(list(ahead[0]))
    assert rows > 1.1 * plan.num_batches()
    assert sorted(itertools.chain(*order)) == list(range(40))
    # Also of steps that share their rows, and of the windows of what is left after a change.
    tiers = Plan(corpus, FILED, window=250, tiers=6)
    others = [(tiers, step) for step in range(tiers.num_batches())]
    for at in (5, plan.num_batches() // 2):
        changed = plan.after(at, buckets=[Bucket(5, 48), Bucket(3, 128)], window=257)
        others.append((changed, at))
    for other, step in others:
        ahead = np.concatenate(other.files_ahead(step)[""][:4])
        assert files_of(corpus, other.batch(step)) <= {*ahead}


def test_files_decide_the_fingerprint():
    corpus = some_files()
    files = np.append(corpus.files[:-2], corpus.files[:-3:-1])
    others = SimpleNamespace(lengths=corpus.lengths, files=files)
    plans = [Plan(given, FILED, window=250) for given in (corpus, others)]
    assert plans[0].fingerprint != plans[1].fingerprint
    small = [Plan(given, FILED, window=9999) for given in (corpus, corpus.lengths)]
    assert small[0].fingerprint == small[1].fingerprint


# ---- memory is that of windows

LARGE = Bucket(1024, 128), Bucket(256, 512)
MANY = lognormal(600_000, 4, 0.9, least=0, most=512).astype(np.uint32)


def test_windows_of_a_sorted_corpus_mix_it():
    plan = Plan(np.sort(MANY[:100_000]), LARGE, window=10_000)
    some = np.concatenate([plan.batch(step).segments[:, 1] for step in range(5)])
    shares = np.bincount(some // 10_000, minlength=10) / len(some)
    assert shares[1:].min() > 0.05  # of each tenth of the corpus, the first of which is short


class Stored:
    """A corpus whose lengths are in a file; a pickle only refers to it."""

    def __init__(self, path):
        self.path, self.lengths = path, np.memmap(path, np.uint32, "r")

    def __reduce__(self):
        return Stored, (self.path,)


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    MANY.tofile(path := tmp_path_factory.mktemp("stored") / "lengths")
    return Stored(path)


@contextlib.contextmanager
def traced():
    """A function that returns the bytes now, and the most bytes, since the block began."""
    tracemalloc.start()
    yield tracemalloc.get_traced_memory
    tracemalloc.stop()


@pytest.mark.slow
def test_memory_is_that_of_windows_and_not_of_the_corpus(stored):
    with traced() as memory:
        plan = Plan(stored, LARGE, window=10_000)
        plan.stages[0].streams[0].cache.capacity = 20_000  # by itself, it keeps four million pieces
        for step in range(0, plan.num_batches(), 120):
            plan.batch(step)
        _, most = memory()
    # About 3 MB, and 4.2 MB where a process imports while it plans; one int64 for each takes 4.8.
    assert most < 4.6e6


def test_a_change_keeps_a_few_bytes_for_each_remaining_example_and_a_pickle_no_lengths(stored):
    plan = Plan(stored, LARGE, exclude=[7])
    plan.after(3, exclude=[8]).batch(3)
    with traced() as memory:
        after = plan.after(3, exclude=[9])
        kept, _ = memory()
    assert after.stages[-1].start == 3
    assert kept < 10 * len(MANY)  # the number of each example, and its length
    pickled = pickle.dumps(plan)
    assert len(pickled) < len(MANY) // 2  # bytes, where one length takes four
    again = pickle.loads(pickled)
    assert again.fingerprint == plan.fingerprint
    assert again.batch(5).digest == plan.batch(5).digest
