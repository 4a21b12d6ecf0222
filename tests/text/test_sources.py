"""Sources of files: what their records are, where, and how they are cut into shards and blocks."""

import json
import os
import pickle
import re
import resource
import socket

import grain
import pytest
import tensorflow_datasets as tfds
from hypothesis import assume, given
from hypothesis import strategies as st

from pipeline.text import files
from pipeline.text import source as sizes
from pipeline.text.content import describe
from pipeline.text.source import sharded, text_of
from pipeline.text.sources import JsonLines, ParquetFiles, Records, TextFiles
from tests.properties.questions import MORE, RECORDS, write_questions
from tests.text.record_files import compressed, make, write_array_record

# Without NUL bytes, which make a file look like UTF-16.
LINE = st.binary(max_size=12).map(lambda line: re.sub(rb"[\n\0]", b"", line).decode("latin-1"))


def cut(monkeypatch, least, block):
    """Shards and blocks of these sizes."""
    for name, size in (("LEAST", least), ("BLOCK", block)):
        monkeypatch.setattr(sizes, name, size)


def texts_of(source):
    return [record["text"] for record in source]


@given(
    contents=st.lists(st.lists(st.tuples(LINE, st.sampled_from(["\n", "\r\n"]))), max_size=5),
    ended=st.booleans(),
    least=st.integers(1, 60),
    block=st.integers(1, 40),
    suffix=st.sampled_from(["", ".gz", ".zst"]),
)
def test_each_line_is_in_one_shard_wherever_files_are_cut(
    contents, ended, least, block, suffix, tmp_path_factory
):
    folder, due = tmp_path_factory.mktemp("lines"), []
    for number, ends in enumerate(contents):
        whole = "".join(line + end for line, end in ends).encode()
        whole = whole if ended else whole.removesuffix(b"\n")
        assume(not describe(whole))  # such as PAR1
        assume(b"\n" in whole or b"\r" not in whole.strip())  # see the test below
        (folder / f"{number}.txt{suffix}").write_bytes(compressed(whole, suffix))
        parts = whole.split(b"\n")
        for line in parts if parts[-1] else parts[:-1]:
            text = line.rstrip(b"\r").decode().removeprefix("\ufeff") if line.strip() else ""
            due += [text] if text else []
    if not contents:
        return
    with pytest.MonkeyPatch.context() as patch:
        cut(patch, least, block)
        source = TextFiles(str(folder / "*"))
        shards = source.shards()
        assert sum(shard.bytes for shard in shards) == sum(f.stat().length for f in source.files)
        assert texts_of(source) == due


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_file_whose_lines_end_in_carriage_returns_is_not_one_line(suffix, tmp_path):
    for name, kind in (("a.txt", TextFiles), ("a.jsonl", JsonLines)):
        path = tmp_path / f"{name}{suffix}"
        path.write_bytes(compressed(b'{"text": 1}\r{"text": 2}\r', suffix))
        with pytest.raises(
            ValueError, match=r"line 1 .*only line has carriage returns; if they end"
        ):
            list(kind(path))
    for content, lines in ((b"a\rb\n", ["a\rb"]), (b"a\r", ["a"]), (b"a\nb\rc", ["a", "b\rc"])):
        path.write_bytes(compressed(content, suffix))
        assert texts_of(TextFiles(path)) == lines


def test_a_shard_is_found_from_sizes_alone(tmp_path, monkeypatch):
    cut(monkeypatch, 100, 10)
    for number, size in enumerate((30, 30, 350, 0, 5)):
        (tmp_path / f"{number}.parquet").write_bytes(bytes(size))
    spans = [shard.spans for shard in ParquetFiles(str(tmp_path / "*")).shards()]
    assert spans == [
        [(0, 0, 30), (1, 0, 30), (2, 0, 40)],
        [(2, 40, 140)],
        [(2, 140, 240)],
        [(2, 240, 340)],
        [(2, 340, 350), (3, 0, 0), (4, 0, 5)],
    ]
    monkeypatch.setattr(sizes, "SHARE", 4)
    assert [sizes.shard_bytes(n) for n in (10, 1000, 1 << 40)] == [100, 250, sizes.MOST]


def test_more_files_are_read_than_may_be_open(tmp_path):
    records = [{"text": f"{number}"} for number in range(150)]
    for number, record in enumerate(records):
        folder = tmp_path / f"{number:03}"
        folder.mkdir()
        make("parquet", folder, [record] * 26)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (held + 60, hard))
    try:
        source = ParquetFiles(str(tmp_path / "*/*.parquet"))
        assert sum(1 for _ in source) == 26 * len(records)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_an_error_of_the_system_is_not_told_as_damage(tmp_path, monkeypatch):
    source = make("parquet", tmp_path, [{"text": "a"}] * 26)

    def fail(path):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(source.format, "_open", fail)
    with pytest.raises(OSError, match="Too many open files"):
        list(source)


def test_fingerprints_depend_on_names_and_content_but_not_on_place_or_time(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "SAMPLE", 64)
    content = b"".join(b"line %05d\n" % number for number in range(1000))
    for place in ("here", "there"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "a.txt").write_bytes(content)
    os.utime(tmp_path / "there" / "a.txt", (1, 1))
    here = TextFiles(tmp_path / "here" / "a.txt").fingerprint
    assert TextFiles(tmp_path / "there" / "a.txt").fingerprint == here
    assert TextFiles(tmp_path / "here" / "a.txt", sample_by="file").fingerprint != here
    (tmp_path / "there" / "a.txt").write_bytes(content[:-2] + b"x\n")
    assert TextFiles(tmp_path / "there" / "a.txt").fingerprint != here
    (tmp_path / "here" / "b.txt").write_bytes(content)
    assert TextFiles(tmp_path / "here" / "b.txt").fingerprint != here
    assert TextFiles(tmp_path / "here" / "*.txt").fingerprint != here


def test_a_socket_or_a_pipe_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the name of a socket is short
    with socket.socket(socket.AF_UNIX) as made:
        made.bind("a.txt")
        os.mkfifo("b.txt")
        for paths in ("a.txt", "b.txt", "*.txt"):
            with pytest.raises(ValueError, match=r"[ab]\.txt is a socket or a pipe"):
                TextFiles(paths)


@pytest.mark.parametrize(
    ("content", "line", "byte", "value"),
    [
        (b"{}\n\n{}\n" + "schön\n".encode("latin-1"), 4, 10, "0xf6"),
        (b"\xef\xbb\xbf\xff", 1, 3, "0xff"),
    ],
)
def test_text_that_is_not_utf8_is_placed(tmp_path, content, line, byte, value):
    path = tmp_path / "latin.txt"
    path.write_bytes(content)
    sentence = rf"line {line} \(byte \d+\): it is not UTF-8: byte {byte} of the file is {value}"
    for source in (TextFiles(path), JsonLines(path)):
        with pytest.raises(ValueError, match=f"{path}, {sentence}"):
            text_of(list(source)[-1], "text")
    with pytest.raises(ValueError, match=f"{path}: it is not UTF-8: byte {byte} of the file"):
        list(TextFiles(path, sample_by="file"))


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ('{"text": "a"', r"it is not valid JSON: Expecting ',' delimiter at column 13"),
        ("[1, 2]", r"it holds a JSON list; each line must hold an object.* jq -c '\.\[\]'"),
        ('{"a": ' * 1_000_000, "it cannot be read: its JSON is nested too deeply, or has"),
        (f'{{"id": {"7" * 5000}}}', "it cannot be read: .* limit .* for integer string"),
        ('{"a": [{"b": 1, "b": 1}]}', "it has the key 'b' twice; keep one"),
    ],
)
def test_a_broken_line_of_json_is_named(tmp_path, line, sentence):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n\n' + line + "\n")
    with pytest.raises(ValueError, match=rf"{path}, line 3 \(byte 15\): {sentence}"):
        list(JsonLines(path))


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    """Where a data set with two splits was prepared."""
    directory = tmp_path_factory.mktemp("tfds")
    write_questions(directory)
    return directory


def test_a_split_of_tfds_and_array_records_are_records_of_their_own(data_dir, tmp_path):
    for split, records in (("train", RECORDS), ("validation", MORE)):
        source = Records(open_split(data_dir, split))
        assert sorted(text_of(record, "text") for record in sharded(source)) == sorted(
            record["text"] for record in records
        )
    source = Records(open_split(data_dir, "train[:50%]"))
    again = pickle.loads(pickle.dumps(source))
    assert [again[number] for number in range(15)] == list(sharded(source))
    assert again.fingerprint == source.fingerprint
    others = {Records(open_split(data_dir, each)).fingerprint for each in ("train", "train[50%:]")}
    assert len({source.fingerprint, *others}) == 3
    (shard,) = sharded(source).shards()
    assert next(sharded(source).read(shard)).where(7) == "record 7"
    write_array_record(tmp_path / "a.array_record", RECORDS)
    stored = Records(grain.sources.ArrayRecordDataSource(str(tmp_path / "a.array_record")))
    assert [json.loads(record["text"]) for record in sharded(pickle.loads(pickle.dumps(stored)))]


def test_records_are_asked_for_many_at_once_where_their_source_can():
    asked = []

    class Stored(list):
        def __getitems__(self, numbers):
            asked.append(len(numbers))
            return [self[number] for number in numbers]

    source = Records(Stored(f"record {number}" for number in range(1200)))
    assert texts_of(sharded(source)) == source.records
    assert max(asked) == sizes.REQUEST


def open_split(data_dir, split):
    builder = tfds.core.read_only_builder.builder_from_files("questions", data_dir=data_dir)
    return builder.as_data_source(split)


def test_splits_that_are_read_together_are_told(tmp_path, caplog):
    names = "train/a.txt", "test/a.txt", "b/train-00000.txt", "b/valid-00000.txt", "c/training.txt"
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x\n")
    for pattern in ("**/a.txt", "b/*.txt"):
        caplog.clear()
        TextFiles(tmp_path / pattern)
        assert "files of several splits are read together: 1 file of " in caplog.text
    caplog.clear()
    for pattern in ("train/*.txt", "test/*", "b/train*", "c/*"):
        TextFiles(tmp_path / pattern)
    TextFiles([tmp_path / "train/a.txt", tmp_path / "c/training.txt"])
    assert not caplog.text
