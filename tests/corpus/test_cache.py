"""The cache of parts: fetched before batches need them, bounded, and shared by processes."""

import fcntl
import itertools
import json
import pathlib
import pickle
import shutil
import threading
import time
from unittest import mock

import numpy as np
import pytest

from pipeline import Batches, Bucket, Corpora, Corpus, Feature, Plan
from pipeline.corpus.stored import cache as cache_module
from pipeline.corpus.stored.cache import Needs
from pipeline.fs import objects
from tests.corpus import share_worker
from tests.corpus.files import flip, read_all, wait_for
from tests.loading.definition import require_same
from tests.processes import Group, environment

BUCKETS = Bucket(16, 128), Bucket(8, 256)
SMALL = {"TOKENS_PER_PART": 5000}
WINDOW = 400  # five parts or so


def examples(seed, number=2400):
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(4, 0.8, number), 2, 256).astype(int)
    return [rng.integers(1, 1000, length).astype(np.int32) for length in lengths]


@pytest.fixture(autouse=True)
def _fetching_ends(monkeypatch):
    """Threads that fetch for a test end with it: else they ask for work beside all later tests."""
    follow, over = cache_module.PartCache.follow, []
    monkeypatch.setattr(
        cache_module.PartCache,
        "follow",
        lambda self, demand: follow(self, lambda: None if over else demand()),
    )
    yield
    over.append(True)
    for thread in threading.enumerate():
        if thread.name == "part-cache":
            thread.join(10)
            assert not thread.is_alive()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A corpus of some thirty parts of about 20 kB."""
    made = Corpus.from_arrays(examples(0), tmp_path_factory.mktemp("cache") / "corpus")
    assert 25 < len(made.files) < 60
    assert 4 * max(made.files) <= WINDOW
    return made


def size_of(corpus):
    return sum(path.stat().length for path in corpus.directory.glob("part-*"))


def cached(corpus, directory, share=0.25):
    """The corpus with a cache that has room for a share of it, and the cache."""
    room = int(share * size_of(corpus))
    opened = Corpus.open(corpus.directory, cache=directory, cache_bytes=room)
    return opened, opened.caches[0][0]


def used(directory):
    (folder,) = directory.iterdir()
    with (folder / ".lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return sum(path.stat().st_size for path in folder.glob("*part-*"))


def parts_in(directory):
    """The numbers of the parts in a cache."""
    return {int(path.name[12:17]) for path in directory.glob("*/part-*")}


def test_batches_of_three_epochs_are_those_of_the_corpus_within_the_room(corpus, tmp_path):
    mine, cache = cached(corpus, tmp_path, 0.45)
    plan = Plan(mine, BUCKETS, window=WINDOW)
    whole, batches = Batches(corpus, plan), Batches(mine, plan)
    assert plan.fingerprint == Plan(corpus, BUCKETS, window=WINDOW).fingerprint
    require_same(mine.read([7], [0], [2]), corpus.read([7], [0], [2]))
    assert cache.traffic["stalls"] == 1  # nothing was there
    ends = []
    for step in range(3 * plan.num_batches()):
        windows = plan.files_ahead(step)[""]
        require_same(batches[step], whole[step])
        now = np.concatenate(windows[:2]).tolist()
        wait_for(lambda now=now: all(cache.has(part) for part in now))
        if step == 0:
            warm = cache.traffic["stalls"]
        assert used(tmp_path) <= cache.max_bytes
        if step % plan.num_batches() == 0:
            ends.append(cache.traffic["fetched"])
    assert cache.traffic["stalls"] - warm <= 0.02 * step
    # Some parts were kept from one epoch for the next.
    assert cache.traffic["fetched"] - ends[1] < 1.95 * size_of(corpus)


def test_the_part_that_is_not_needed_for_longest_makes_way(corpus, tmp_path):
    _, cache = cached(corpus, tmp_path, 0.5)
    order = np.random.default_rng(3).permutation(len(corpus.files))
    demand = [[part] for part in order]
    cache.follow(lambda: Needs.of([np.array(numbers) for numbers in demand]))
    wait_for(lambda: used(tmp_path) > 0.45 * size_of(corpus))
    time.sleep(0.5)
    here = parts_in(tmp_path)
    assert set(order[: len(here) - 1].tolist()) <= here
    fetched = cache.traffic["fetched"]
    demand.insert(0, demand.pop())
    wait_for(lambda: cache.has(order[-1]))
    time.sleep(0.5)
    assert cache.traffic["fetched"] - fetched < 2.5 * max(cache._sizes)
    demand.append(demand.pop(0))
    demand.reverse()
    wait_for(lambda: cache.has(order[-1]))
    wait_for(lambda: {*order[-len(here) + 2 :].tolist()} <= parts_in(tmp_path))
    assert used(tmp_path) <= cache.max_bytes
    demand.clear()


def test_a_window_larger_than_the_room_is_read_and_the_log_says_so(corpus, tmp_path, caplog):
    mine, cache = cached(corpus, tmp_path, 0.08)
    plan = Plan(mine, BUCKETS, window=WINDOW)
    whole, batches = Batches(corpus, plan), Batches(mine, plan)
    for step in range(40):
        require_same(batches[step], whole[step])
    wait_for(lambda: "give the plan a smaller window=" in caplog.text)
    assert used(tmp_path) <= cache.max_bytes


def follow(cache):
    every = np.arange(cache.num_parts)
    cache.follow(lambda: Needs.of([every]))
    return every.tolist()


@pytest.mark.parametrize("at_its_source", [False, True])
def test_a_damaged_part_is_noticed_when_it_is_first_mapped(corpus, at_its_source, tmp_path, caplog):
    source, name = tmp_path / "corpus", "part-000000-00003.arrow"
    shutil.copytree(corpus.directory, source)
    mine = Corpus.open(source, cache=tmp_path / "cache")
    cache, content = mine.caches[0][0], (source / name).read_bytes()
    at = source if at_its_source else cache.directory
    (at / name).write_bytes(content)
    flip(at / name, len(content) // 2)  # of a token
    follow(cache)
    wait_for((cache.directory / name).exists)
    if at_its_source:
        with pytest.raises(ValueError, match=f"damaged at {source}/{name}: its digest"):
            read_all(mine, mine.lengths)
    else:
        require_same(read_all(mine, mine.lengths), read_all(corpus, corpus.lengths))
        assert "part-000000-00003.arrow is removed and fetched again" in caplog.text
        assert cache.has(3)


def test_corpora_and_mixtures_use_the_caches_of_all(corpus, tmp_path):
    both = {"a": corpus, "b": Corpus.from_arrays(examples(7, 1500), tmp_path / "second")}
    mine = Corpora({name: cached(corpus, tmp_path / "c")[0] for name, corpus in both.items()})
    assert [first for _, first in mine.caches] == [0, len(corpus.files)]
    batches = Batches(mine, Plan(mine, BUCKETS, window=2 * WINDOW, weights={"a": 1, "b": 3}))
    require_same(batches[0], Batches(Corpora(both), batches.plan)[0])
    for cache, _ in mine.caches:
        wait_for(lambda cache=cache: cache.traffic["fetched"] > 0)


def test_a_pickled_corpus_has_the_same_caches_which_share_the_room(corpus, tmp_path):
    values = {"reward": [np.arange(n + 1.0) for n in corpus.lengths]}
    plain, cache = cached(corpus, tmp_path)
    mine = plain.with_features(values, features={"reward": Feature("targets")})
    again = pickle.loads(pickle.dumps(mine))
    assert len({one.directory for corpora in (mine, again) for one, _ in corpora.caches}) == 2
    for corpora in (mine, again):
        assert -4 <= sum(one.max_bytes for one, _ in corpora.caches) - cache.max_bytes <= 0
    assert again.read([9], [0], [1])["reward"].tolist() == [1]
    batches = Batches(again, Plan(again, BUCKETS, window=WINDOW))
    first = next(iter(pickle.loads(pickle.dumps(batches)).to_iter_dataset()))
    require_same(first, batches[0])


OTHER = "part-000000-99999.arrow"


def test_files_of_somebody_else_in_a_cache_stay_and_the_rest_is_fetched(corpus, tmp_path):
    for share in (2, 0.3):  # where parts must make way for others, too
        _, cache = cached(corpus, tmp_path / str(share), share)
        (cache.directory / "notes").write_bytes(b"mine")
        (cache.directory / OTHER).write_bytes(b"of another corpus")
        (cache.directory / ".part-000000-00001.arrow.fetching").write_bytes(b"of a killed process")
        order = [*range(cache.num_parts)]
        cache.follow(lambda order=order: Needs.of([np.array([part]) for part in order]))
        wait_for(lambda cache=cache, order=order: all(map(cache.has, order[:5])))
        order.reverse()
        wait_for(lambda cache=cache, order=order: all(map(cache.has, order[:5])))
        assert (cache.directory / "notes").read_bytes() == b"mine"
        assert (cache.directory / OTHER).exists() == (share == 2)


def test_fetching_goes_on_after_an_error_of_any_kind(corpus, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(cache_module, "AFTER_FAILURE", 0.1)
    fail_first = itertools.chain([KeyError("a defect")] * 8, itertools.repeat(mock.DEFAULT))
    download = mock.Mock(wraps=objects.download, side_effect=fail_first)
    monkeypatch.setattr(objects, "download", download)
    _, cache = cached(corpus, tmp_path, 2)
    every = follow(cache)
    wait_for(lambda: all(cache.has(part) for part in every))
    assert "is tried again every" in caplog.text
    assert "KeyError: 'a defect'" in caplog.text


def test_fetching_goes_on_after_a_demand_that_fails(corpus, tmp_path, caplog):
    _, cache = cached(corpus, tmp_path, 2)
    every, errors = np.arange(cache.num_parts), [KeyError("a defect")] * 20

    def demand():
        if errors:
            raise errors.pop()
        return Needs.of([every])

    cache.follow(demand)
    wait_for(lambda: not errors and all(map(cache.has, every.tolist())))
    assert caplog.text.count("KeyError: 'a defect'") == 1


def test_a_demand_that_always_fails_leaves_others_alone(corpus, tmp_path):
    _, cache = cached(corpus, tmp_path, 2)

    def fail():
        raise ValueError("always")

    cache.follow(fail)
    every = follow(cache)
    wait_for(lambda: all(cache.has(part) for part in every))


def test_damaged_lengths_are_fetched_again_and_those_of_the_corpus_are_named(corpus, tmp_path):
    _, cache = cached(corpus, tmp_path / "cache", 2)
    copy, source = cache.directory / "lengths.npy", tmp_path / "corpus"
    whole = copy.read_bytes()
    copy.write_bytes(whole[:-8] + whole[-4:] + whole[-8:-4])  # with the same sum
    again, _ = cached(corpus, tmp_path / "cache", 2)
    np.testing.assert_array_equal(again.lengths, corpus.lengths)
    shutil.copytree(corpus.directory, source)
    whole = (source / "lengths.npy").read_bytes()
    (source / "lengths.npy").write_bytes(whole[:-4] + b"abcd")
    with pytest.raises(ValueError, match=f"damaged at {source}/lengths.npy: its digest differs"):
        Corpus.open(source, cache=tmp_path / "other")


# ---- each host has a share of the parts


def test_hosts_fetch_about_their_share_and_only_what_they_are_told(corpus, tmp_path):
    buckets, options = [Bucket(16, 256)], {"read_shares": 8}
    whole = Batches(corpus, Plan(corpus, buckets, **options))
    total = 0
    for host in range(4):
        mine, cache = cached(corpus, tmp_path / str(host), 2)
        plan = Plan(mine, buckets, **options)
        assert plan.fingerprint == whole.plan.fingerprint
        batches = Batches(mine, plan, process_index=host, process_count=4)
        rows = {bucket: np.arange(4 * host, 4 * host + 4) for bucket in buckets}
        told = {*np.concatenate(plan.files_ahead(0, rows)[""]).tolist()}
        for step in range(plan.num_batches()):
            expected = {name: field[4 * host : 4 * host + 4] for name, field in whole[step].items()}
            require_same(batches[step], expected)
        wait_for(lambda cache=cache, told=told: all(map(cache.has, told)))
        assert parts_in(tmp_path / str(host)) == told
        total += cache.traffic["fetched"]
        batches.ahead.stop()
    assert 1 <= total / size_of(corpus) <= 1.5


@pytest.mark.parametrize("hosts", [1, 2, 4])
def test_processes_with_caches_of_their_own_fetch_their_shares(corpus, hosts, tmp_path):
    program = pathlib.Path(__file__).with_name("share_worker.py")
    commands = [
        [program, corpus.directory, tmp_path / f"{n}", n, hosts, tmp_path / f"host{n}"]
        for n in range(hosts)
    ]
    Group(commands, tmp_path / "logs", environment()).end_with(0)
    plan = Plan(corpus, [share_worker.BUCKET], read_shares=share_worker.SHARES)
    whole = Batches(corpus, plan)
    ids = [np.load(tmp_path / f"host{n}.npy") for n in range(hosts)]
    for step in range(plan.num_batches()):
        assert np.array_equal(np.concatenate([of[step] for of in ids]), whole[step]["inputs"])
    told = [json.loads((tmp_path / f"host{n}.json").read_text()) for n in range(hosts)]
    assert {entry["fingerprint"] for entry in told} == {plan.fingerprint}
    fetched = sum(entry["fetched_bytes"] for entry in told) / size_of(corpus)
    assert fetched <= 1.5


def test_processes_that_share_a_directory_keep_what_the_others_need(corpus, tmp_path):
    numbers = np.arange(20).reshape(2, 2, 5)  # of each window and process
    caches = [cached(corpus, tmp_path, 11 / len(corpus.files))[1] for _ in range(2)]
    windows = [numbers.reshape(2, -1)]
    for process, cache in enumerate(caches):
        cache.follow(
            lambda process=process: Needs(
                [of_window[process] for of_window in numbers][-len(windows[-1]) :], windows[-1]
            )
        )
    wait_for(lambda: all(caches[0].has(part) for part in range(10)))
    time.sleep(0.5)
    fetched = sum(cache.traffic["fetched"] for cache in caches)
    assert fetched < 16.5 * max(caches[0]._sizes)  # 5 of the next window may make way once
    assert all(caches[0].has(part) for part in range(10))
    windows.append(windows[0][1:])  # the first window is over
    wait_for(lambda: all(caches[0].has(part) for part in range(10, 20)))
