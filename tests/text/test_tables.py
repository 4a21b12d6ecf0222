"""Tables give the rows that they hold, in every layout, and read only the columns asked for."""

import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa
import pytest

from pipeline.text import source as sizes
from pipeline.text import templates
from pipeline.text.notes import collect_notes
from pipeline.text.source import text_of
from pipeline.text.sources import ArrowFiles, arrow_files
from tests.text.record_files import save_to_disk, write_table

TURN = pa.struct([("role", pa.dictionary(pa.int8(), pa.string())), ("content", pa.string_view())])
CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
EXTENSION = pa.opaque(pa.string(), "name", "vendor")
TEXTS = ["one", "two", "two", "thrée"]
LAYOUTS = {
    **{kind: pa.array(TEXTS, kind) for kind in (pa.string(), pa.large_string(), pa.string_view())},
    **{kind: pa.array(TEXTS, kind) for kind in (pa.binary(), pa.large_binary(), pa.binary_view())},
    "dictionary": pa.array(TEXTS).dictionary_encode(),
    "dictionary of views": pa.DictionaryArray.from_arrays(
        [0, 1, 1, 2], pa.array(TEXTS[::2] + TEXTS[3:])
    ),
    "runs": pa.RunEndEncodedArray.from_arrays([1, 3, 4], ["one", "two", "thrée"]),
    "extension": pa.ExtensionArray.from_storage(EXTENSION, pa.array(TEXTS)),
    "fixed size": pa.array([b"one", b"two", b"two", b"oar"], pa.binary(3)),
    "sliced": pa.array(["zero", *TEXTS, "five"]).slice(1, 4),
}
LISTS = [pa.list_, pa.large_list, pa.list_view, pa.large_list_view, lambda of: pa.list_(of, 2)]


KINDS = ["parquet", "stream", "arrow", "lz4", "zstd"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_column_of_text_may_have_any_layout(layout, kind, tmp_path):
    column = LAYOUTS[layout]
    source = write_table(tmp_path / f"a.{kind}", pa.table({"n": range(4), "text": column}))
    if source is None:
        return  # Parquet has no such layout
    due = [str(each, "utf-8") if isinstance(each, bytes) else each for each in column.to_pylist()]
    assert [text_of(row, "text") for row in source] == due


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("outer", LISTS)
def test_a_column_of_turns_may_have_any_layout(outer, kind, tmp_path):
    plain = pa.struct([("role", pa.string()), ("content", pa.large_string())])
    column = pa.array([CHAT] * 3, outer(plain if kind == "parquet" else TURN))
    source = write_table(tmp_path / f"a.{kind}", pa.table({"messages": column}))
    texts = ["".join(templates.texts(templates.Chat(), row)) for row in source]
    assert texts == ["<|user|>\nhi<|end|>\n<|assistant|>\nyo<|end|>\n"] * 3


@pytest.mark.parametrize("of", [pa.float16(), pa.float32(), pa.float64()])
def test_numbers_of_a_width_have_the_notation_of_python(of, tmp_path):
    numbers = [60000.0, 2048.0, 0.0001, 0.00001, 0.25, -0.0]
    source = write_table(tmp_path / "a.arrow", pa.table({"n": pa.array(numbers, of)}))
    wanted = ["60000.0", "2048.0", "0.0001", "1e-05", "0.25", "-0.0"]
    assert [text_of(row, "n") for row in source] == wanted


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_that_stand_for_names_are_said(kind, tmp_path):
    labels = {
        "label": {"names": ["bad", "good"], "_type": "ClassLabel"},
        "text": {"_type": "Value"},
    }
    kept = {"huggingface": json.dumps({"info": {"features": labels}})}
    table = pa.table({"text": ["a", "b"], "label": [1, 0]})
    for metadata, said in ((kept, True), (None, False), ({"huggingface": "[]"}, False)):
        source = write_table(tmp_path / f"a.{kind}", table.replace_schema_metadata(metadata))
        for row in source:
            with collect_notes() as notes:
                assert text_of(row, "text") in "ab"
                assert not notes
                assert text_of(row, "label") in "01"
            about = (
                "have a number in 'label' whose name the file has, and a template gets the number"
            )
            assert [*notes] == [about] * said
            assert not said or "of ['bad', 'good']" in notes[about]


def test_numbers_that_stand_for_names_inside_of_a_column_are_said(tmp_path):
    label = {"names": ["no", "yes"], "_type": "ClassLabel"}
    text = {"dtype": "string", "_type": "Value"}
    of_list, of_lists = ({"feature": each, "_type": "List"} for each in (label, [label]))
    features = {
        "l": of_list,
        "ll": of_lists,
        "s": {"k": label, "names": text, "t": {"_type": of_list}},
        "names": {"names": text},
        "old": {"feature": {"k": label}, "_type": "Sequence"},
        "null": label,
    }
    row = {
        "l": [1],
        "ll": [[0]],
        "s": {"k": 1, "names": "a", "t": {"_type": [0]}},
        "names": {"names": "a"},
        "old": [{"k": 0}],
        "null": None,
    }
    described = {"huggingface": json.dumps({"info": {"features": features}})}
    table = pa.Table.from_pylist([row]).replace_schema_metadata(described)
    (record,) = write_table(tmp_path / "a.parquet", table)
    with collect_notes() as notes:
        assert dict(record) == row
    places = "l[]", "ll[][]", "s[k]", "s[t][_type][]", "old[][k]"
    assert [*notes] == [
        f"have a number in {place!r} whose name the file has, and a template gets the number"
        for place in places
    ]
    assert next(iter(notes.values())) == "it has [1] of ['no', 'yes']"


SHORT = [0.7, None, 0.1, 2.0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("of", [pa.float16(), pa.float32(), pa.float64()])
def test_numbers_print_with_the_digits_of_their_width_wherever_they_are(of, kind, tmp_path):
    numbers = np.array([0.7, 0, 0.1, 2.0], of.to_pandas_dtype())
    column = pa.array(numbers, of, mask=np.arange(4) == 1)
    values, inner = column.to_pylist(), pa.struct([("n", of)])
    columns = {
        "n": column,
        "dict": pa.array([{"a": {"n": each}} for each in values], pa.struct([("a", inner)])),
        "map": pa.array([[("a", each)] for each in values], pa.map_(pa.string(), of)),
        "list": pa.array([[each] for each in values], pa.list_(of)),
    }
    source = write_table(tmp_path / f"a.{kind}", pa.table(columns))
    for row, number, exact in zip(source, SHORT, values, strict=True):
        assert row["n"] == exact
        template = templates.Answer(
            prompt="{n} {dict[a][n]} ", answer="{list[0]} {map[0][1]}", null="-"
        )
        text = "-" if number is None else str(number)
        assert templates.texts(template, row) == [" ".join([text] * 4)]


@pytest.mark.parametrize("kind", KINDS)
def test_columns_that_nobody_asks_for_are_not_read_and_stop_nothing(kind, tmp_path):
    offsets, content = np.arange(4, dtype=np.int32), b"\xff\xfe\xfd"
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(content)]
    columns = {
        "when": pa.array([1, 2, 3], pa.timestamp("ns", tz="No/Where")),
        "day": pa.array([18262, 2**30, 18628], pa.int32()).view(pa.date32()),
        "bad": pa.Array.from_buffers(pa.string(), 3, buffers),
        "text": ["a", "b", "c"],
        "twice": [1, 2, 3],
    }
    table = pa.table(columns).append_column("twice", pa.array([1, 2, 3]))
    source = write_table(tmp_path / f"a.{kind}", table)
    rows = list(source)
    assert [row["text"] for row in rows] == ["a", "b", "c"]
    assert source.format._asked == {"text"}
    assert templates.fill(lambda row: [(row["text"], 1.0)], rows[0])["inputs"] == [[("a", 1.0, {})]]
    assert source.format._asked == {"text"}
    assert (len(rows[0]), list(rows[0])[2]) == (6, "bad")
    assert ("bad" in rows[0], "none" in rows[0]) == (True, False)
    for name in ("when", "day", "bad"):
        with pytest.raises(ValueError, match=r"its column of .* cannot be read: "):
            rows[1][name]
    assert [rows[row]["day"].year for row in (0, 2)] == [2020, 2021]  # that row alone
    with pytest.raises(ValueError, match="2 columns have the name 'twice'; rename them"):
        rows[1]["twice"]
    with pytest.raises(KeyError, match="none"):
        rows[1]["none"]


def test_a_row_group_is_read_in_batches_and_goes_on_when_other_columns_are_asked_for(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(sizes, "BLOCK", 2000)
    monkeypatch.setattr(sizes, "LEAST", 1 << 30)
    table = pa.table({name: [f"{name} {row} " * 9 for row in range(300)] for name in "abc"})
    source = write_table(tmp_path / "a.parquet", table, rows=300, use_dictionary=False)
    reads = []
    file = source.format.open_file(source.files[0])
    read = file.read
    monkeypatch.setattr(file, "read", lambda *how: reads.append(how) or read(*how))
    due = table.to_pylist()
    seen = []
    for block in source.read(source.shards()[0]):
        for record in block.records:
            names = ["b"] if len(seen) < 100 else ["b", "a"] if len(seen) < 250 else list("abc")
            assert all(record[name] == due[len(seen)][name] for name in names)
            seen.append(record)
    counts = {count for _, _, count, _ in reads}
    assert len(reads) > 20, "each batch is read once, and once more for each new column"
    assert max(counts) < 60
    assert seen == due  # from any place, again


def test_threads_read_the_same_file_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(sizes, "BLOCK", 2000)
    table = pa.table({"text": [f"{row} " * 9 for row in range(500)]})
    for kind in KINDS:
        source = write_table(tmp_path / f"a.{kind}", table, rows=500)
        with ThreadPoolExecutor(4) as pool:
            seen = list(pool.map(lambda _, s=source: [row["text"] for row in s], range(4)))
        assert seen == [table["text"].to_pylist()] * 4


def test_a_compressed_stream_is_read_a_batch_at_a_time(tmp_path):
    rows, batches = 1 << 14, 40
    schema = pa.schema([("text", pa.string()), ("n", pa.int64())])
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_stream(str(tmp_path / "a.arrow"), schema, options=options) as writer:
        for number in range(batches):
            columns = [["x" * 200] * rows, np.full(rows, number)]
            writer.write_batch(pa.record_batch(columns, schema=schema))
    pool = pa.default_memory_pool()
    source, before, most, seen = ArrowFiles(tmp_path / "a.arrow"), pool.bytes_allocated(), 0, 0
    for row in source:
        if seen % rows == 0:
            assert (row["n"], len(row["text"])) == (seen // rows, 200)
            most = max(most, pool.bytes_allocated() - before)
        seen += 1
    assert seen == rows * batches
    assert most < 4 * 200 * rows  # of forty


def test_a_batch_that_is_far_larger_than_its_file_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(arrow_files, "LIMIT", 1 << 20)
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    table = pa.table({"text": ["x" * (1 << 22)]})
    for name, new in (("a", pa.ipc.new_file), ("b", pa.ipc.new_stream)):
        with new(str(tmp_path / f"{name}.arrow"), table.schema, options=options) as writer:
            writer.write_table(table)
        with pytest.raises(ValueError, match=r"cannot be read as Arrow: record batch 0 holds"):
            [row["text"] for row in ArrowFiles(tmp_path / f"{name}.arrow")]


@pytest.mark.parametrize("kind", ["stream", "file"])
def test_batches_of_an_arrow_file_are_read_from_any_shard(kind, tmp_path, monkeypatch):
    for name, size in (("LEAST", 300), ("BLOCK", 100)):
        monkeypatch.setattr(sizes, name, size)
    new = pa.ipc.new_stream if kind == "stream" else pa.ipc.new_file
    schema = pa.schema([("text", pa.string())])
    counts = [0, 3, 1, 0, 40, 2, 0]
    with new(str(tmp_path / "a.arrow"), schema) as writer:
        for number, count in enumerate(counts):
            texts = [f"{number} {each}" for each in range(count)]
            writer.write_batch(pa.record_batch([texts], schema=schema))
    due = [f"{number} {each}" for number, count in enumerate(counts) for each in range(count)]
    source = ArrowFiles(tmp_path / "a.arrow")
    shards = source.shards()
    assert len(shards) > 1
    found = [
        [
            (row["text"], place[1])
            for block in source.read(each)
            for row, place in zip(block.records, block.places, strict=True)
        ]
        for each in reversed(shards)
    ]
    assert [each for of in reversed(found) for each in of] == list(zip(due, range(46), strict=True))


@pytest.mark.parametrize("name", ["../a.arrow", "/etc/passwd", "..", "", "a\\b.arrow"])
def test_a_saved_data_set_names_no_file_outside_of_it(name, tmp_path):
    folder = tmp_path / "saved"
    save_to_disk(folder, {"a.arrow": [{"text": "inside"}]})
    save_to_disk(tmp_path, {"a.arrow": [{"text": "outside"}]})
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))
    with pytest.raises(ValueError, match=r"state\.json names .*, which is no file or folder"):
        ArrowFiles(folder)
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": [name]}))
    with pytest.raises(ValueError, match=r"dataset_dict\.json names .*, which is no file"):
        ArrowFiles(folder)
