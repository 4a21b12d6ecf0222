"""Token files that cannot be mapped are decoded once, and then mapped."""

import json

import numpy as np
import pytest

from pipeline import InPlace
from pipeline.corpus import INPUTS, decoded
from pipeline.corpus import cache as store
from tests.corpus.files import documents_of, split_at, weights_of
from tests.corpus.token_writers import write_levanter, write_mds

RNG = np.random.default_rng(0)
ROWS = [RNG.integers(1, 99, size) for size in (*RNG.integers(1, 20, 9), 300)]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """The directory of decoded files."""
    monkeypatch.setattr(store, "default_directory", lambda: tmp_path / "cache")
    return tmp_path / "cache" / "files"


@pytest.mark.parametrize("compression", [None, "zstd", "snappy", "gzip", "brotli"])
@pytest.mark.parametrize(
    ("encoding", "dtype"),
    [("bytes", "int64"), ("ndarray", "int64"), ("ndarray:int32", "int32"), ("ndarray", "uint16")],
)
def test_samples_of_mds_are_read(encoding, dtype, compression, tmp_path, cache):
    samples = [
        {"tokens": each.astype(dtype), "text": b"x" * (number % 4), "n": number}
        for number, each in enumerate(ROWS)
    ]
    if encoding == "bytes":
        samples = [each | {"tokens": each["tokens"].tobytes()} for each in samples]
    encodings = {"tokens": encoding, "text": "str", "n": "int"}
    write_mds(tmp_path / "mds", samples, encodings, compression)
    corpus = InPlace.mds(tmp_path / "mds", task=INPUTS)
    assert documents_of(corpus) == [each.tolist() for each in ROWS]
    (stored,) = cache.glob("*/*.arrow")
    before = stored.stat().st_mtime_ns
    assert InPlace.mds(tmp_path / "mds", task=INPUTS).identity == corpus.identity
    assert stored.stat().st_mtime_ns == before


def test_windows_of_mds_are_one_text_of_documents(tmp_path):
    flat = np.concatenate([ROWS[0], *(np.append(0, each) for each in ROWS)])
    windows = np.array_split(flat, 9)
    samples = [{"tokens": each, "loss_mask": each % 2} for each in windows]
    write_mds(tmp_path / "mds", samples, {"tokens": "ndarray", "loss_mask": "ndarray"})
    options = {"end": 0, "weights": "loss_mask"}
    corpus = InPlace.mds(tmp_path / "mds", **options)
    due = split_at(flat.tolist(), 0, ends=True)
    assert documents_of(InPlace.mds(tmp_path / "mds", task=INPUTS, **options)) == due
    assert weights_of(corpus) == [[each % 2 for each in document[1:]] for document in due]
    with pytest.raises(ValueError, match="give weights='loss_mask', or weights"):
        InPlace.mds(tmp_path / "mds", end=0)


def test_damaged_mds_is_refused(tmp_path, cache):
    folder = tmp_path / "mds"
    write_mds(folder, [{"tokens": each} for each in ROWS], {"tokens": "ndarray"}, "zstd")
    shard, index = folder / "shard.00001.mds.zstd", folder / "index.json"
    good, about = shard.read_bytes(), json.loads(index.read_text())
    for content in (good[:-3], good[: len(good) // 2], b""):
        shard.write_bytes(content)
        with pytest.raises(ValueError, match=r"shard\.00001\.mds\.zstd is damaged"):
            InPlace.mds(folder)
    assert not [*cache.glob("*/*.arrow")]
    shard.write_bytes(good)
    with pytest.raises(ValueError, match="input_ids"):
        InPlace.mds(folder, "input_ids")
    about["shards"][1]["samples"] += 1
    index.write_text(json.dumps(about))
    with pytest.raises(ValueError, match="is damaged, cut short"):
        InPlace.mds(folder)
    shard.unlink()
    with pytest.raises(FileNotFoundError, match="shard"):
        InPlace.mds(folder)
    index.write_text("{")
    with pytest.raises(ValueError, match="it does not list the shards of an MDS data set"):
        InPlace.mds(folder)


def test_rows_of_levanter_are_read(tmp_path, monkeypatch, cache):
    masks = [np.zeros(len(each), np.int32) for each in ROWS[:-1]] + [ROWS[-1] % 2]
    columns = {"input_ids": [each.astype(np.int32) for each in ROWS], "assistant_masks": masks}
    write_levanter(tmp_path / "levanter", columns)
    monkeypatch.setattr(decoded, "BLOCK", 30)
    with pytest.raises(ValueError, match="give weights='assistant_masks', or weights"):
        InPlace.levanter(tmp_path / "levanter")
    plain = InPlace.levanter(tmp_path / "levanter", weights=(), task=INPUTS)
    assert documents_of(plain) == [each.tolist() for each in ROWS]
    corpus = InPlace.levanter(tmp_path / "levanter", weights="assistant_masks")
    assert weights_of(corpus) == [each[1:].tolist() for each in masks]
    assert len([*cache.glob("*/*.arrow")]) == 1


def test_a_cache_of_levanter_that_is_not_whole_is_refused(tmp_path, cache):
    folder = tmp_path / "levanter"
    write_levanter(folder, {"input_ids": [each.astype(np.int32) for each in ROWS]})
    ledger = folder / "shard_ledger.json"
    good = json.loads(ledger.read_text())
    for changes, sentence in (
        ({"is_finished": False}, "is not finished; let Levanter finish it"),
        ({"total_num_rows": 9}, "has 10 rows, the ledger 9"),
        ({"total_num_rows": 11}, "is damaged"),
        ({"total_num_rows": "many"}, "no whole shard_ledger.json of Levanter's"),
    ):
        ledger.write_text(json.dumps(good | changes))
        with pytest.raises(ValueError, match=sentence):
            InPlace.levanter(folder)
    ledger.write_text(json.dumps(good))
    with pytest.raises(ValueError, match="it has no column 'tokens', but input_ids"):
        InPlace.levanter(folder, "tokens")
    chunks = [path for path in (folder / "input_ids" / "data" / "c").rglob("*") if path.is_file()]
    lost = min(chunks)
    content = lost.read_bytes()
    lost.unlink()  # it would read as zeros
    with pytest.raises(ValueError, match="is damaged"):
        InPlace.levanter(folder)
    assert not [*cache.glob("*/*.arrow")]
    lost.write_bytes(content)
    assert len(InPlace.levanter(folder)) == 10


def test_shards_that_a_merged_index_of_mds_names_by_folder_are_unpacked(tmp_path):
    shards = []
    for name, rows in (("0", ROWS[:4]), ("1", ROWS[4:])):
        samples = [{"tokens": each} for each in rows]
        write_mds(tmp_path / name, samples, {"tokens": "ndarray"}, "zstd")
        for shard in json.loads((tmp_path / name / "index.json").read_text())["shards"]:
            for of in ("raw_data", "zip_data"):
                shard[of]["basename"] = f"{name}/{shard[of]['basename']}"
            shards.append(shard)
    (tmp_path / "index.json").write_text(json.dumps({"version": 2, "shards": shards}))
    assert documents_of(InPlace.mds(tmp_path, task=INPUTS)) == [each.tolist() for each in ROWS]


def test_a_cache_of_levanter_may_leave_its_rows_in_shards(tmp_path):
    rows = [each.astype(np.int32) for each in ROWS]
    shards = {"part-0": rows[:3], "part-1": rows[3:]}
    for name, some in shards.items():
        write_levanter(tmp_path / name, {"input_ids": some})
    counts = {name: len(some) for name, some in shards.items()}
    ledger = {"total_num_rows": 10, "is_finished": True, "shard_rows": counts}
    (tmp_path / "shard_ledger.json").write_text(json.dumps(ledger))
    assert documents_of(InPlace.levanter(tmp_path, task=INPUTS)) == [each.tolist() for each in ROWS]
    for changes, sentence in (({"part-2": 0}, "part-2"), ({"part-1": 6}, "do not have the 10")):
        content = json.dumps(ledger | {"shard_rows": counts | changes})
        (tmp_path / "shard_ledger.json").write_text(content)
        with pytest.raises(ValueError, match=sentence):
            InPlace.levanter(tmp_path)
