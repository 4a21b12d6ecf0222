"""Token files that the programs themselves wrote are read as these programs read them.

`golden/write.py` wrote them, and what is expected.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from pipeline import InPlace
from pipeline.corpus import INPUTS, cache, decoded
from pipeline.corpus.links import guess
from pipeline.errors import UserError
from tests.corpus.files import documents_of
from tests.text.record_files import save_to_disk

GOLDEN = Path(__file__).parent / "golden"
EXPECTED = json.loads((GOLDEN / "expected.json").read_text())

# How each data set is opened, and with its masks.
OPENED = {
    ("arrow", "rows"): ("arrow", {}, {"labels": "labels"}),
    ("arrow", "splits"): ("arrow", {"split": "test"}, None),
    ("megatron", "text"): ("megatron", {}, None),
    ("megatron", "sentences"): ("megatron", {}, None),
    ("datatrove", "two"): ("datatrove", {}, {"weights": "loss"}),
    ("datatrove", "four"): ("datatrove", {}, {"weights": "loss"}),
    ("mds", "windows"): ("mds", {}, None),
    ("mds", "arrays"): ("mds", {}, None),
    ("mds", "typed"): ("mds", {}, None),
    ("mds", "packed"): ("mds", {}, None),
    ("levanter", "cache"): ("levanter", {}, {"weights": "assistant_masks"}),
    ("olmo", "part-0.npy"): ("flat", {"dtype": "uint16"}, None),
    ("olmo", "masked"): ("flat", {"dtype": "uint16"}, {"weights": "masked/labels_mask*"}),
    ("flat", "train.bin"): ("flat", {"dtype": "uint16", "end": 50256}, None),
    ("flat", "gpt2"): ("flat", {}, None),
    ("flat", "llama3"): ("flat", {}, None),
}
PATHS = {"masked": "masked/token_ids*.npy", "gpt2": "gpt2_*.bin", "llama3": "llama3_*.bin"}
PATHS |= {"two": "two/*.ds"}


@pytest.fixture(autouse=True)
def store(tmp_path, monkeypatch):
    """The directory of decoded files."""
    monkeypatch.setattr(cache, "default_directory", lambda: tmp_path / "cache")
    return tmp_path / "cache" / "files"


def open_golden(of, monkeypatch, golden=GOLDEN, twice=False, **options):
    """The corpus of a data set, whose files may be given twice."""
    form, some, _ = OPENED[of]
    monkeypatch.chdir(golden / of[0])
    given = PATHS.get(of[1], of[1])
    return InPlace(form, [given, f"./{given}"] if twice else given, **some, **options)


@pytest.mark.parametrize(
    "of", [(folder, name) for folder, names in EXPECTED.items() for name in names], ids="-".join
)
def test_documents_and_masks_are_those_of_the_programs_own_reader(of, monkeypatch):
    documents, masks = EXPECTED[of[0]][of[1]]
    masked = OPENED[of][2]
    plain = {"weights": ()} if masked or of == ("arrow", "splits") else {}
    plain |= {"twice": of[1] in ("text", "two", "part-0.npy")}  # then each file is read once
    corpus = open_golden(of, monkeypatch, task=INPUTS, vocab_size=128001, **plain)
    assert documents_of(corpus) == documents
    corpus.verify()
    if masked:
        weighted = open_golden(of, monkeypatch, task=INPUTS, **masked)
        assert [each["loss_weights"].tolist() for each in weighted] == masks
        assert weighted.num_learnt == sum(map(sum, masks))
        assert weighted.silent.tolist() == [at for at, mask in enumerate(masks) if not any(mask)]
        causal = open_golden(of, monkeypatch, **masked)
        assert [each["loss_weights"].tolist() for each in causal] == [mask[1:] for mask in masks]
        with pytest.raises(ValueError, match=r"on which tokens to train; give (weights|labels)="):
            open_golden(of, monkeypatch)


def test_formats_are_told_by_the_files(tmp_path):
    for (folder, name), (form, *_) in OPENED.items():
        assert guess(GOLDEN / folder / PATHS.get(name, name)) == form
    save_to_disk(tmp_path / "texts", {"a.arrow": [{"text": "no ids"}]})
    (tmp_path / "texts" / "a.ds").touch()
    np.save(tmp_path / "array.npy", [1, 2])
    for path, form in (
        (GOLDEN / "megatron" / "text.idx", "megatron"),
        (tmp_path / "array.npy", "npy"),
        (tmp_path / "texts", ""),
        (tmp_path / "texts" / "a.arrow", ""),
        (tmp_path / "nowhere.bin", ""),
    ):
        assert guess(path) == form


def test_windows_of_mds_are_divided_at_the_end_of_documents(monkeypatch):
    corpus = open_golden(("mds", "windows"), monkeypatch, end=50256, task=INPUTS)
    assert documents_of(corpus) == EXPECTED["flat"]["train.bin"][0]


@pytest.mark.parametrize("of", OPENED, ids="-".join)
def test_a_file_that_is_cut_short_is_refused_or_not_needed(of, tmp_path, monkeypatch):
    """Ids alone, without an index or a count, are the only ones that nobody can tell from whole."""
    if of == ("flat", "train.bin"):
        return
    golden = shutil.copytree(GOLDEN, tmp_path / "golden")
    masked = OPENED[of][2] or ({"weights": ()} if of == ("arrow", "splits") else {})
    options = {"task": INPUTS, **masked}
    due = documents_of(open_golden(of, monkeypatch, golden, **options))
    refused = 0
    for path in sorted(path for path in (golden / of[0]).rglob("*") if path.is_file()):
        content = path.read_bytes()
        for size in {0, 1, len(content) // 2, len(content) - 2, len(content) - 1}:
            path.write_bytes(content[: max(size, 0)])
            try:
                corpus = open_golden(of, monkeypatch, golden, **options)
                assert documents_of(corpus) == due, (path, size)
            except (UserError, FileNotFoundError):
                refused += 1
        path.write_bytes(content)
    assert refused


# ---- files that are decoded once, and then mapped

DOCUMENTS = EXPECTED["mds"]["arrays"][0]


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
def test_packed_shards_are_decoded_once_also_those_of_a_merged_index(codec, mds, tmp_path, store):
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
    (stored,) = store.glob("*/*.arrow")
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
    (folder / "shard.00001.mds").unlink()
    with pytest.raises(FileNotFoundError, match="shard"):
        InPlace.mds(folder)
    index["shards"][0]["samples"] += 1
    (folder / "index.json").write_text(json.dumps({"shards": index["shards"][:1]}))
    with pytest.raises(ValueError, match=r"shard\.00000\.mds is damaged, cut short"):
        InPlace.mds(folder)


def test_a_cache_of_levanter_that_is_not_whole_is_refused(levanter, store):
    folder, ledger = levanter
    for changes, sentence in (
        ({"is_finished": False}, "is not finished; let Levanter finish it"),
        ({"total_num_rows": 4}, "has 5 rows, the ledger 4"),
    ):
        (folder / "shard_ledger.json").write_text(json.dumps(ledger | changes))
        with pytest.raises(ValueError, match=sentence):
            InPlace.levanter(folder, weights=())
    (folder / "shard_ledger.json").write_text(json.dumps(ledger))
    (folder / "input_ids" / "data" / "c" / "0").unlink()  # it would read as zeros
    with pytest.raises(ValueError, match="is damaged"):
        InPlace.levanter(folder, weights=())
    assert not [*store.glob("*/*.arrow")]


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
