"""Each kind of source gives the same records as the list they were written from."""

import csv
import json
import pickle

import grain
import numpy as np
import pyarrow as pa
import pytest

from pipeline.text import source as sizes
from pipeline.text.config import open_source
from pipeline.text.source import sharded
from pipeline.text.sources import ArrowFiles, ParquetFiles, Records, open_files
from tests.text.record_files import make

RECORDS = [
    {"text": f"né {number}", "turns": [{"role": "user", "content": "x" * (number % 5)}]}
    for number in range(60)
]


KINDS = [
    *("parquet", "feather", "arrow", "jsonl", "jsonl.gz", "jsonl.zst"),
    *("hugging_face", "list", "map_dataset", "array_record"),
]


@pytest.fixture(scope="module", params=KINDS)
def source(request, tmp_path_factory):
    return make(request.param, tmp_path_factory.mktemp(request.param), RECORDS)


def test_a_source_has_its_records_and_goes_on_from_any_block_of_any_shard(source, monkeypatch):
    for name, size in (("LEAST", 500), ("BLOCK", 60)):
        monkeypatch.setattr(sizes, name, size)
    source, blocks = sharded(source), []
    assert list(source) == RECORDS
    again = pickle.loads(pickle.dumps(source))
    assert again.fingerprint == source.fingerprint
    assert list(again) == RECORDS
    assert len(str(source)) < 200
    for shard in pickle.loads(pickle.dumps(source.shards())):
        mine = list(source.read(shard))
        assert [block.next is None for block in mine] == [False] * (len(mine) - 1) + [True]
        for number, block in enumerate(mine[:-1]):
            assert (
                list(source.read(shard, json.loads(json.dumps(block.next)))) == mine[number + 1 :]
            )
        blocks += mine
    assert len({place for block in blocks for place in block.places}) == len(RECORDS)
    told = [block.where(n) for block in blocks for n in range(len(block.records))]
    place = [block.place(n) for block in blocks for n in range(len(block.records))][30]
    if "byte" in place:
        assert ", line 11 (byte " in told[30]
    else:
        assert told[30].endswith(("record 5", "row 5", "record 30"))
    assert list(place)[-1] in ("byte", "row", "record")


@pytest.mark.parametrize("suffix", ["csv", "csv.gz"])
def test_csv_is_read_like_json_lines(suffix, tmp_path):
    texts = [{"text": f"né\n{number}", "n": f"{number:03}"} for number in range(60)]
    assert list(make(suffix, tmp_path, texts)) == texts


def test_the_end_of_a_name_alone_says_what_a_file_holds(tmp_path):
    folder = tmp_path / "x.parquet"
    folder.mkdir()
    (folder / "notes.txt").write_text("one\ntwo\n")
    assert len(list(open_files([str(folder / "notes.txt")]))) == 2
    for name in ("tokens.bin", "records.gz", "README"):
        (folder / name).write_text('{"text": "one"}\n')
        sentence = (
            rf"{name} does not tell the kind .*\.jsonl.* give kind= \(in a config, train\.kind"
        )
        with pytest.raises(ValueError, match=sentence):
            open_files([str(folder / name)])
        assert len(list(open_files([str(folder / name)], kind="jsonl"))) == 1
    for name in (
        *("a.json", "a.ndjson", "A.JSONL", "a.JSON.gz", "a.jsonl.bz2", "a.jsonl-00000-of-00002"),
        "more.jsonl",
    ):
        (folder / name).write_text('{"text": "one"}\n')
        assert [record["text"] for record in open_files([str(folder / name)])] == ["one"]
    (folder / "other.txt").write_text("three\n")
    fields = {"files": [f"{folder}/notes.txt", f"{folder}/other.txt"], "split": ""}
    assert len(list(open_source(fields, "config.train"))) == 3
    with pytest.raises(ValueError, match="several kinds, jsonl and text"):
        open_files([str(folder / "notes.txt"), str(folder / "more.jsonl")])


def test_only_the_columns_that_are_wanted_are_read(tmp_path):
    for kind, cls in (("parquet", ParquetFiles), ("feather", ArrowFiles)):
        make(kind, tmp_path, RECORDS)
        source = cls(tmp_path / f"*.{kind}", columns=["text"])
        assert list(source)[59] == {"text": "né 59"}
        assert source.fingerprint != cls(source.files).fingerprint


def test_records_in_python_are_told_apart_by_content():
    several = ["a", "b"], ["a", "c"], ["a"], ["a"] * 2000, ["a"] * 3000  # two have equal samples
    more = [{"text": "a", "ids": np.arange(3)}]
    assert len({Records(entries).fingerprint for entries in (*several, more)}) == 6
    same = [{"text": "a", "ids": {0, 8}}, {"ids": {8, 0}, "text": "a"}]  # in other orders
    assert Records(same[:1]).fingerprint == Records(same[1:]).fingerprint
    with pytest.raises(ValueError, match=r"<object object at .* whose address differs"):
        _ = Records([{"text": "a", "id": object()}]).fingerprint
    with pytest.raises(ValueError, match=r"have no fingerprint: .*; the keys of a record, and of"):
        _ = Records([*csv.DictReader(["text", "a,b"])]).fingerprint
    assert Records([b"a", b"b"]).fingerprint == Records(["a", "b"]).fingerprint
    assert Records(["a"], fingerprint="mine").fingerprint == "mine"
    for given in ("abc", {"text": ["a"]}, pa.table({"text": ["a"]})):
        with pytest.raises(ValueError, match=r"not records by number; give a list of them, or of"):
            Records(given)
    filtered = grain.MapDataset.source(["a", "b"]).filter(lambda text: text == "a")
    with pytest.raises(ValueError, match=r"it is a NoneType.*give a list of it"):
        Records(filtered)[1]
