"""Token files that cannot be mapped are decoded once, and then mapped."""

import json
import shutil

import numpy as np
import pyarrow as pa
import pytest

from pipeline import InPlace
from pipeline.corpus import INPUTS, decoded
from pipeline.corpus import cache as store
from tests.corpus.files import documents_of
from tests.corpus.test_golden import EXPECTED, GOLDEN

DOCUMENTS = EXPECTED["mds"]["arrays"][0]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """The directory of decoded files."""
    monkeypatch.setattr(store, "default_directory", lambda: tmp_path / "cache")
    return tmp_path / "cache" / "files"


@pytest.fixture
def mds(tmp_path):
    """A folder of MDS, and its index."""
    folder = shutil.copytree(GOLDEN / "mds" / "arrays", tmp_path / "mds")
    return folder, json.loads((folder / "index.json").read_text())


@pytest.fixture
def levanter(tmp_path):
    """A cache of Levanter's, and its ledger."""
    folder = shutil.copytree(GOLDEN / "levanter" / "cache", tmp_path / "levanter")
    return folder, json.loads((folder / "shard_ledger.json").read_text())


@pytest.mark.parametrize("codec", ["zstd", "snappy", "brotli"])
def test_packed_shards_are_decoded_once_also_those_of_a_merged_index(codec, mds, tmp_path, cache):
    folder, index = mds
    for shard in index["shards"]:
        name, kind = shard["raw_data"]["basename"], {"brotli": "br"}.get(codec, codec)
        content = (folder / name).read_bytes()
        (folder / name).unlink()
        (folder / f"{name}.{kind}").write_bytes(pa.compress(content, codec, asbytes=True))
        shard["compression"] = kind
        shard["zip_data"] = {"basename": f"mds/{name}.{kind}"}
        shard["raw_data"]["basename"] = f"mds/{name}"
    (tmp_path / "index.json").write_text(json.dumps(index))
    corpus = InPlace.mds(tmp_path, task=INPUTS)
    assert documents_of(corpus) == DOCUMENTS
    (stored,) = cache.glob("*/*.arrow")
    before = stored.stat().st_mtime_ns
    assert InPlace.mds(tmp_path, task=INPUTS).identity == corpus.identity
    assert stored.stat().st_mtime_ns == before


def test_windows_and_their_masks_are_cut_where_documents_end():
    ids, mask = np.array([1, 2, 0, 3, 0, 4]), np.array([0, 1, 1, 0, 1, 1])
    columns = {"ids": (ids, np.array([3, 3])), "mask": (mask, np.array([3, 3]))}
    whole, rest = decoded._cut({"ids": ids[:1], "mask": mask[:1]}, columns, "ids", 0)
    assert [each.tolist() for each in whole["ids"]] == [[1, 1, 2, 0, 3, 0], [4, 2]]
    assert [each.tolist() for each in whole["mask"]] == [[0, 0, 1, 1, 0, 1], [4, 2]]
    assert (rest["ids"].tolist(), rest["mask"].tolist()) == ([4], [1])
    columns["n"] = np.array([1, 1]), np.array([1, 1])
    with pytest.raises(ValueError, match="end=0 cannot cut 'n', whose sizes are not those of ids"):
        decoded._cut({}, columns, "ids", 0)


def test_mds_that_is_not_whole_is_refused(mds):
    folder, index = mds
    with pytest.raises(ValueError, match="input_ids"):
        InPlace.mds(folder, "input_ids")
    (folder / "shard.00001.mds").unlink()
    with pytest.raises(FileNotFoundError, match="shard"):
        InPlace.mds(folder)
    index["shards"][0]["samples"] += 1
    for content, sentence in (
        (json.dumps({"shards": index["shards"][:1]}), r"shard\.00000\.mds is damaged, cut short"),
        ("{", "it does not list the shards of an MDS data set"),
    ):
        (folder / "index.json").write_text(content)
        with pytest.raises(ValueError, match=sentence):
            InPlace.mds(folder)


def test_a_cache_of_levanter_that_is_not_whole_is_refused(levanter, cache):
    folder, ledger = levanter
    for changes, sentence in (
        ({"is_finished": False}, "is not finished; let Levanter finish it"),
        ({"total_num_rows": 4}, "has 5 rows, the ledger 4"),
        ({"total_num_rows": "many"}, "no whole shard_ledger.json of Levanter's"),
    ):
        (folder / "shard_ledger.json").write_text(json.dumps(ledger | changes))
        with pytest.raises(ValueError, match=sentence):
            InPlace.levanter(folder, weights=())
    (folder / "shard_ledger.json").write_text(json.dumps(ledger))
    with pytest.raises(ValueError, match="it has no column 'tokens', but assistant_masks"):
        InPlace.levanter(folder, "tokens")
    (folder / "input_ids" / "data" / "c" / "0").unlink()  # it would read as zeros
    with pytest.raises(ValueError, match="is damaged"):
        InPlace.levanter(folder, weights=())
    assert not [*cache.glob("*/*.arrow")]


def test_a_cache_of_levanter_is_read_in_blocks_and_may_leave_its_rows_in_shards(
    levanter, tmp_path, monkeypatch
):
    monkeypatch.setattr(decoded, "BLOCK", 3)
    folder, ledger = levanter
    for name in ("part-0", "part-1"):
        shutil.copytree(folder, tmp_path / "cache" / name)
    ledger |= {"total_num_rows": 10, "shard_rows": {"part-0": 5, "part-1": 5}}
    (tmp_path / "cache" / "shard_ledger.json").write_text(json.dumps(ledger))
    corpus = InPlace.levanter(tmp_path / "cache", weights=(), task=INPUTS)
    assert documents_of(corpus) == 2 * DOCUMENTS
    ledger["shard_rows"]["part-1"] = 6
    (tmp_path / "cache" / "shard_ledger.json").write_text(json.dumps(ledger))
    with pytest.raises(ValueError, match="do not have the 10"):
        InPlace.levanter(tmp_path / "cache", weights=())
