import concurrent.futures

import jax
import numpy as np
import pytest

import pipeline
from pipeline import Batches, Bucket, Plan
from pipeline.storage import buffers

LARGE = buffers.SMALL  # int32 entries: four times the bytes from which memory is used again


def address(array):
    return array.__array_interface__["data"][0]


def test_memory_is_used_again_once_nobody_holds_it():
    first = buffers.empty(LARGE, np.int32)
    second = buffers.empty(LARGE, np.int32)
    assert address(first) != address(second)
    where = address(first)
    del first
    assert address(buffers.empty(LARGE, np.float32)) == where
    view = second.reshape(2, -1)[:, 5:]
    where = address(second)
    del second
    assert address(buffers.empty(LARGE, np.int32)) != where
    del view
    assert where in {address(each) for each in [buffers.empty(LARGE, np.int32) for _ in range(2)]}


def test_batches_of_about_one_size_share_memory():
    first = buffers.empty(LARGE, np.int32)
    where = address(first)
    del first
    assert address(buffers.empty(LARGE - 1000, np.int32)) == where


def test_buffers_of_sizes_that_nobody_wants_any_more_make_room(monkeypatch):
    monkeypatch.setattr(buffers, "_held", {})
    monkeypatch.setattr(buffers, "ALL", 40 * buffers.SMALL)
    for _ in range(2):
        several = [buffers.empty(8 * buffers.SMALL, np.uint8) for _ in range(4)]
    del several
    where = address(first := buffers.empty(20 * buffers.SMALL, np.uint8))
    del first
    assert address(buffers.empty(20 * buffers.SMALL, np.uint8)) == where


def test_small_arrays_and_huge_ones_are_ordinary():
    assert buffers.empty(3, np.int32).base is None
    assert buffers.empty(buffers.LARGE + 1, np.uint8).base is None


@pytest.mark.parametrize("step", [0, 1])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_ramps_are_the_same_however_large(step, dtype):
    rng = np.random.default_rng(0)
    times = rng.integers(1, 2000, 700)
    first = rng.integers(0, 1000, 700)
    expected = np.concatenate(
        [start + step * np.arange(many) for start, many in zip(first, times, strict=True)]
    )
    assert expected.nbytes > buffers.SMALL
    for count in (0, 1, 5, 700):
        found = buffers.ramps(first[:count], times[:count], step, dtype)
        assert found.dtype == dtype
        np.testing.assert_array_equal(found, expected[: times[:count].sum()])


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """Batches of 4 × 65,536 positions, whose fields are in buffers."""
    rng = np.random.default_rng(0)
    examples = [rng.integers(0, 99, size, dtype=np.int32) for size in rng.integers(9, 30_000, 150)]
    corpus = pipeline.Corpus.from_arrays(examples, tmp_path_factory.mktemp("large"))
    return Batches(corpus, Plan(corpus, [Bucket(4, 65_536)])).repeat(6)


def test_batches_that_are_held_are_never_written_to(large):
    def digest(batch):
        return {name: int(np.asarray(values).sum()) for name, values in batch.items()}

    assert large[0]["inputs"].nbytes > buffers.SMALL
    expected = [digest(large[step]) for step in range(len(large))]
    held = [large[step] for step in range(8)]  # NumPy's own
    on_device = [jax.device_put(large[step]) for step in range(8)]  # may share their memory
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda step: digest(large[step]), range(len(large)))) == expected
    assert [digest(batch) for batch in held] == expected[:8]
    assert [digest(batch) for batch in on_device] == expected[:8]


def test_the_loader_hands_out_batches_that_stay(large):
    with pipeline.Loader(large) as loader:
        batches = list(loader)
    for step, batch in enumerate(batches):
        for name, values in large[step].items():
            np.testing.assert_array_equal(np.asarray(batch[name]), values)
