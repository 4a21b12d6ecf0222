import gzip
import itertools
import os
import pickle
import socket
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.text.sources import JsonLines, ParallelText, Slice, TextFiles, Tfds, files, lines
from pipeline.text.sources.source import read_texts, where
from tests.properties.questions import MORE, RECORDS, write_questions
from tests.text.record_files import compressed


@pytest.fixture
def scans(monkeypatch):
    """The places from which files are read, front to back."""
    found, scan = [], lines._scan
    monkeypatch.setattr(lines, "_scan", lambda *place: found.append(place) or scan(*place))
    return found


def test_the_members_of_a_gzip_file_are_one_text(tmp_path):
    text = [f"{number} {number**5:x}" for number in range(20_000)]
    parts = text[:9_000], [], text[9_000:], []  # members, some of them empty, and zeros after them
    members = (gzip.compress("".join(f"{line}\n" for line in part).encode()) for part in parts)
    path = tmp_path / "a.txt.gz"
    path.write_bytes(b"".join(members) + bytes(600))
    source = TextFiles(path)
    order = [19_999, *range(19_000, 5_000, -700), *range(0, 20_000, 999), 8_999, 9_000, 0]
    for each in (source, pickle.loads(pickle.dumps(source))):
        assert [each[number]["text"] for number in order] == [text[number] for number in order]
    assert source.__getitems__(range(20_000)) == [{"text": line} for line in text]


@pytest.mark.parametrize(
    ("suffix", "batches"),
    [
        (".gz", [range(at, at + 8) for at in range(0, 1000, 16)]),  # in order, with gaps
        (".zst", [range(at, at + 8) for at in range(0, 1000, 16)]),
        (".gz", [[at] for at in range(0, 1000, 99)]),
        (".zst", [np.random.default_rng(0).permutation(1000).tolist()]),
        (".zst", [[900]]),
    ],
)
def test_a_compressed_file_is_read_twice_in_all(suffix, batches, tmp_path, scans, monkeypatch):
    monkeypatch.setattr(lines, "BLOCK", 100)
    path = tmp_path / f"a.txt{suffix}"
    path.write_bytes(compressed("".join(f"{number}\n" for number in range(1000)).encode(), suffix))
    source = TextFiles(path)
    for numbers in batches:
        assert source.__getitems__(numbers) == [{"text": str(number)} for number in numbers]
    assert len(scans) == 2  # for the index, and for records in order


def test_line_ends_and_byte_order_marks_are_no_text(tmp_path):
    path = tmp_path / "windows.txt"
    path.write_bytes(b"\xef\xbb\xbffirst\r\n\r\nsecond\r\n\xef\xbb\xbfthird without end")
    texts = [record["text"] for record in TextFiles(path)]
    assert texts == ["first", "second", "\ufeffthird without end"]
    whole = TextFiles(path, sample_by="file")
    assert len(whole) == 1
    assert whole[0]["text"].startswith("first\r\n\r\n")
    assert whole.fingerprint != TextFiles(path).fingerprint
    with pytest.raises(ValueError, match="sample_by is 'word'; it must be one of line, file"):
        TextFiles(path, sample_by="word")


@pytest.fixture
def parallel(tmp_path):
    """Two texts of 100 lines in two files each, of which one is compressed, with blank lines."""
    sides = [
        [f"{side} {number}" if number % step else "" for number in range(100)]
        for side, step in (("de", 7), ("en", 11))
    ]
    for name, part in (("1", slice(0, 70)), ("2", slice(70, 100))):
        (tmp_path / f"{name}.de").write_text("\n".join(sides[0][part]) + "\n")
        text = "\r\n".join(sides[1][part]) + "\r\n"
        (tmp_path / f"{name}.en.gz").write_bytes(gzip.compress(text.encode()))
    (tmp_path / "3.en.gz").mkdir()  # which is no file
    return [tmp_path / "1.de", tmp_path / "2.de"], str(tmp_path / "[1-3].en.gz"), sides


def test_blank_lines_of_parallel_texts_keep_the_others_beside_each_other(parallel):
    *paths, sides = parallel
    source = ParallelText(*paths)
    records = [{"inputs": de, "targets": en} for de, en in zip(*sides, strict=True)]
    assert len(source) == 100
    assert source.__getitems__(range(100)) == records
    copy = pickle.loads(pickle.dumps(source))
    assert all(copy[index] == records[index] for index in (99, 0, 77, 70, 33))
    assert where(source, 77) == f"{paths[0][1]}, line 8 and {paths[1][:-11]}2.en.gz, line 8"
    assert ParallelText(paths[1], paths[0]).fingerprint != source.fingerprint
    kept, skipped = (TextFiles(paths[0], keep_blank=keep) for keep in (True, False))
    assert (len(kept), len(skipped)) == (100, 85)
    assert kept.fingerprint != skipped.fingerprint


def test_parallel_texts_with_other_numbers_of_lines_are_refused(parallel, tmp_path):
    *paths, sides = parallel
    (tmp_path / "2.de").write_text("\n".join(sides[0][70:99]) + "\n")
    (tmp_path / "1.de").write_text("\n".join([*sides[0][:70], "another"]))  # in all as many
    counts = r"1\.de has 71 lines and .*1\.en\.gz has 70, counting blank ones"
    with pytest.raises(ValueError, match=counts):
        len(ParallelText(*paths))
    with pytest.raises(ValueError, match="there are 1 files of inputs and 2 of targets"):
        ParallelText(paths[0][0], paths[1])


def test_fingerprints_depend_on_names_and_content_but_not_on_place_or_time(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "SAMPLE", 64)
    content = b"".join(b"line %05d\n" % number for number in range(1000))
    for place in ("here", "there"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "a.txt").write_bytes(content)
    os.utime(tmp_path / "there" / "a.txt", (1, 1))
    here = TextFiles(tmp_path / "here" / "a.txt").fingerprint
    assert TextFiles(tmp_path / "there" / "a.txt").fingerprint == here
    (tmp_path / "there" / "a.txt").write_bytes(content[:-2] + b"x\n")
    assert TextFiles(tmp_path / "there" / "a.txt").fingerprint != here
    (tmp_path / "here" / "b.txt").write_bytes(content)
    assert TextFiles(tmp_path / "here" / "b.txt").fingerprint != here
    assert TextFiles(tmp_path / "here" / "*.txt").fingerprint != here


@pytest.mark.parametrize(
    ("paths", "error", "sentence"),
    [
        ("nowhere.txt", FileNotFoundError, "there is no file .*nowhere.txt; check the path"),
        ("*.nothing", FileNotFoundError, r"no file matches .*\*.nothing; check"),
        (".", ValueError, r"is a directory; .* a glob such as .*data-\*\.arrow for a Hugging"),
    ],
)
def test_a_missing_file_is_named(tmp_path, paths, error, sentence):
    for kind in (TextFiles, JsonLines):
        with pytest.raises(error, match=sentence):
            kind(os.path.join(tmp_path, paths))
        with pytest.raises(ValueError, match="no files were given"):
            kind([])


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
        ("gut\n\nné\n".encode() + "schön\n".encode("latin-1"), 4, 12, "0xf6"),
        (b"\xef\xbb\xbfgood\nb\xffd", 2, 9, "0xff"),
        (b"\xef\xbb\xbf\xff", 1, 3, "0xff"),
    ],
)
def test_text_that_is_not_utf8_is_placed(tmp_path, content, line, byte, value):
    path = tmp_path / "latin.txt"
    path.write_bytes(content)
    sentence = f"{path}, line {line} is not UTF-8: byte {byte} of the file is {value}"
    for source in (TextFiles(path), TextFiles(path, sample_by="file"), JsonLines(path)):
        with pytest.raises(ValueError, match=sentence):
            source[len(source) - 1]


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ('{"text": "a"', "line 3 is not valid JSON: Expecting ',' delimiter at column 13"),
        ("[1, 2]", "line 3 holds a JSON list; each line must hold an object"),
        ('{"body": "a", "id": 1}', "line 3 has no field 'text' .its fields: body, id.; name"),
        ('{"text": 5}', "line 3: field 'text' holds int, not text"),
        ('{"text": null}', "line 3: field 'text' holds NoneType, not text"),
        ('{"a": ' * 1_000_000, "line 3 cannot be read: its JSON is nested too deeply, or has"),
        (f'{{"id": {"7" * 5000}}}', "line 3 cannot be read: .* limit .* for integer string"),
        ('{"text": "\\ud800"}', "line 3: field 'text' is not UTF-8 text"),
    ],
)
def test_a_broken_line_of_json_is_named(tmp_path, line, sentence):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n\n' + line + "\n")
    with pytest.raises(ValueError, match=f"{path}, {sentence}"):
        read_texts(JsonLines(path), [0, 1], "text")


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_damaged_compressed_file_is_named(tmp_path, suffix):
    path = tmp_path / f"a.txt{suffix}"
    whole = compressed(b"".join(b"%d\n" % number**3 for number in range(1000)), suffix)
    for content in (b"this is not compressed at all" * 10, whole[:-20]):
        path.write_bytes(content)
        for sample_by in ("line", "file"):
            with pytest.raises(ValueError, match=f"{path} cannot be decompressed"):
                TextFiles(path, sample_by=sample_by)[0]


def test_a_file_that_shrank_is_noticed(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one\ntwo\nthree\n")
    source = TextFiles(path)
    assert len(source) == 3
    path.write_text("one\n")
    with pytest.raises(ValueError, match="has fewer lines than when it was opened"):
        source[2]


@given(st.integers(1, 500), st.lists(st.integers(1, 99), max_size=3, unique=True))
def test_slices_divide_a_source(records, bounds):
    source = [{"text": str(number)} for number in range(records)]
    fractions = [0.0, *(bound / 100 for bound in sorted(bounds)), 1.0]
    slices = [Slice(source, *pair) for pair in itertools.pairwise(fractions)]
    seen = [record for each in slices for record in each.__getitems__(range(len(each)))]
    assert seen == source


def test_a_slice_names_records_as_its_source_does(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one\ntwo\nthree\nfour\n")
    hundred = [{"text": ""}] * 100
    counts = [len(Slice(hundred, 0, share / 100)) for share in range(1, 101)]
    assert counts == list(range(1, 101))  # in floating point, 0.29 * 100 is below 29
    half = Slice(TextFiles(path), 0.5, 1.0)
    assert half[0] == {"text": "three"}
    assert where(half, 1) == f"{path}, line 4"
    others = (Slice(TextFiles(path), *share).fingerprint for share in ((0.0, 0.5), (0.0, 1.0)))
    assert len({half.fingerprint, *others}) == 3
    with pytest.raises(IndexError, match="record 2 of 2"):
        half[2]
    for share in ((0.5, 0.5), (-0.1, 0.5), (0.5, 1.1)):
        with pytest.raises(ValueError, match=r"give 0.0 <= begin < end <= 1.0"):
            Slice(half, *share)


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    """Where a data set with two splits was prepared."""
    directory = tmp_path_factory.mktemp("tfds")
    write_questions(directory)
    return directory


def test_a_tfds_source_has_the_records_of_its_split_and_is_told_apart_by_content(data_dir):
    for split, records in (("train", RECORDS), ("validation", MORE)):
        source = Tfds("questions", split, data_dir)
        texts = read_texts(source, range(len(source)), "text")
        assert sorted(texts) == sorted(record["text"] for record in records)
    source = Tfds("questions", "train[:50%]", data_dir)
    again = pickle.loads(pickle.dumps(source))
    assert len(again) == 15
    assert again[7] == source[7]
    assert again.fingerprint == source.fingerprint
    others = {Tfds("questions", split, data_dir).fingerprint for split in ("train", "train[50%:]")}
    assert len({source.fingerprint, *others}) == 3
    assert where(source, 7) == "record 7 of questions, split train[:50%]"


def test_a_data_set_that_is_not_there_is_refused_at_once(data_dir):
    started = time.monotonic()
    for name in ("mnist", "wikipedia/20230601.en", "no_such_data_set", "questions/other"):
        with pytest.raises(FileNotFoundError, match=f"the data set {name} is not in {data_dir}"):
            Tfds(name, "train", data_dir)
    assert time.monotonic() - started < 60  # TFDS itself would retry for minutes
    with pytest.raises(ValueError, match="has no split 'test'; its splits are train, validation"):
        Tfds("questions", "test", data_dir)
