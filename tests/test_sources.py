import gzip
import itertools
import json
import os
import pickle
import subprocess
import sys
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.sources import JsonLines, PythonStdlib, Slice, TextFiles, Tfds, files, lines
from pipeline.sources.python_stdlib_builder import functions
from pipeline.sources.source import read_texts, where

zstandard = pytest.importorskip("zstandard")


def compressed(content, suffix):
    if suffix == ".gz":
        return gzip.compress(content)
    if suffix == ".zst":
        # Two frames, as parallel compressors write them.
        half = len(content) // 2
        one = zstandard.ZstdCompressor()
        return one.compress(content[:half]) + one.compress(content[half:])
    return content


@pytest.fixture(params=["", ".gz", ".zst"], ids=["plain", "gz", "zst"])
def text_files(request, tmp_path):
    """200 lines in two files, with a blank one after every tenth."""
    texts = [f"line {number} " + "é" * (number % 7) for number in range(200)]
    for name, mine in (("a", texts[:120]), ("b", texts[120:])):
        content = "".join(t + ("\n \n" if at % 10 == 9 else "\n") for at, t in enumerate(mine))
        path = tmp_path / f"{name}.txt{request.param}"
        path.write_bytes(compressed(content.encode(), request.param))
    return str(tmp_path / f"*.txt{request.param}"), texts


def test_a_record_is_a_line_and_blank_lines_are_counted(text_files):
    pattern, texts = text_files
    source = TextFiles(pattern)
    assert len(source) == 200
    assert [record["text"] for record in source.__getitems__(range(200))] == texts
    assert source.blank_lines == 20
    assert where(source, 15).endswith(", line 17")
    assert "2 files" in str(source) or "and 1 more" in str(source)


@settings(deadline=None, max_examples=40)
@given(order=st.lists(st.integers(0, 199), max_size=20))
def test_lines_are_the_same_in_any_order(tmp_path_factory, order):
    for suffix in ("", ".gz", ".zst"):
        path = tmp_path_factory.getbasetemp() / f"any-order.txt{suffix}"
        texts = [f"{number} {'x' * (number % 90)}" for number in range(200)]
        if not path.exists():
            path.write_bytes(compressed("\n".join(texts).encode(), suffix))
        source = TextFiles(path)
        assert [source[index]["text"] for index in order] == [texts[index] for index in order]
        copy = pickle.loads(pickle.dumps(source))
        assert [record["text"] for record in copy.__getitems__(order)] == [texts[i] for i in order]


def test_reading_in_order_decompresses_once(text_files, monkeypatch):
    source = TextFiles(text_files[0])
    assert len(source) == 200
    scans = []
    scan = lines._scan
    monkeypatch.setattr(lines, "_scan", lambda *place: scans.append(place) or scan(*place))
    for begin in range(0, 200, 16):
        source.__getitems__(range(begin, min(begin + 8, 200)))
    assert len(scans) == 2


def test_line_ends_and_byte_order_marks_are_no_text(tmp_path):
    path = tmp_path / "windows.txt"
    path.write_bytes(b"\xef\xbb\xbffirst\r\n\r\nsecond\r\nthird without end")
    source = TextFiles(path)
    assert [record["text"] for record in source.__getitems__(range(3))] == [
        "first",
        "second",
        "third without end",
    ]
    assert TextFiles(path, sample_by="file")[0]["text"].startswith("first\r\n\r\n")


def test_a_record_may_be_a_whole_file(text_files):
    source = TextFiles(text_files[0], sample_by="file")
    assert len(source) == 2
    assert source[1]["text"].startswith("line 120 ")
    assert source[0]["text"].count("\n") == 132
    assert source.fingerprint != TextFiles(text_files[0]).fingerprint
    with pytest.raises(ValueError, match="sample_by is 'word'; it must be 'line' or 'file'"):
        TextFiles(text_files[0], sample_by="word")


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


def test_json_lines_are_records(tmp_path):
    records = [{"text": f"né {number}", "n": [number]} for number in range(40)]
    content = "\n\n".join(json.dumps(record, ensure_ascii=False) for record in records)
    for suffix in ("", ".gz", ".zst"):
        path = tmp_path / f"a.jsonl{suffix}"
        path.write_bytes(compressed(content.encode(), suffix))
        source = JsonLines(path)
        assert source.__getitems__(range(40)) == records
        assert read_texts(source, [3, 4], "text") == ["né 3", "né 4"]
        assert where(source, 2) == f"{path}, line 5"


@pytest.mark.parametrize(
    ("paths", "error", "sentence"),
    [
        ("nowhere.txt", FileNotFoundError, "there is no file .*nowhere.txt; check the path"),
        ("*.nothing", FileNotFoundError, r"no file matches .*\*.nothing; check"),
        (".", ValueError, r"is a directory; name its files with a glob such as"),
    ],
)
def test_a_missing_file_is_named(tmp_path, paths, error, sentence):
    for kind in (TextFiles, JsonLines):
        with pytest.raises(error, match=sentence):
            kind(os.path.join(tmp_path, paths))
        with pytest.raises(ValueError, match="no files were given"):
            kind([])


def test_text_that_is_not_utf8_is_placed(tmp_path):
    path = tmp_path / "latin.txt"
    path.write_bytes("gut\n\nné\n".encode() + "schön\n".encode("latin-1"))
    sentence = f"{path}, line 4 is not UTF-8: byte 12 of the file is 0xf6"
    for source in (TextFiles(path), TextFiles(path, sample_by="file"), JsonLines(path)):
        with pytest.raises(ValueError, match=sentence):
            source[len(source) - 1]


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ('{"text": "a"', "line 3 is broken JSON: Expecting ',' delimiter at column 13"),
        ("[1, 2]", "line 3 holds a JSON list; each line must hold an object"),
        ('{"body": "a", "id": 1}', "line 3 has no field 'text' .its fields: body, id.; name"),
        ('{"text": 5}', "line 3: field 'text' holds int, not text"),
        ('{"text": null}', "line 3: field 'text' holds NoneType, not text"),
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
    path.write_bytes(b"this is not compressed at all" * 10)
    with pytest.raises(ValueError, match=f"{path} cannot be decompressed"):
        len(TextFiles(path))
    whole = compressed(b"".join(b"%d\n" % number**3 for number in range(1000)), suffix)
    path.write_bytes(whole[:-20])
    with pytest.raises(ValueError, match=f"{path} cannot be decompressed"):
        TextFiles(path, sample_by="file")[0]
    with pytest.raises(ValueError, match=f"{path} cannot be decompressed"):
        len(TextFiles(path))


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
    half = Slice(TextFiles(path), 0.5, 1.0)
    assert half[0] == {"text": "three"}
    assert where(half, 1) == f"{path}, line 4"
    assert half.fingerprint != Slice(TextFiles(path), 0.0, 0.5).fingerprint
    with pytest.raises(IndexError, match="record 2 of 2"):
        half[2]
    with pytest.raises(ValueError, match=r"it takes 0.0 <= begin < end <= 1.0"):
        Slice(half, 0.5, 0.5)


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    """Where two processes made the data set of the standard library at once."""
    directory = tmp_path_factory.mktemp("tfds")
    script = (
        "import sys; from pipeline.sources import PythonStdlib; "
        "print(PythonStdlib('train', sys.argv[1]).fingerprint)"
    )
    command = [sys.executable, "-c", script, str(directory)]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    seen = [process.communicate(timeout=120)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert seen[0] == seen[1] != ""
    return directory


def test_the_standard_library_divides_into_modules_of_train_and_validation(data_dir):
    train, validation = PythonStdlib("train", data_dir), PythonStdlib("validation", data_dir)
    sets = [source.__getitems__(range(len(source))) for source in (train, validation)]
    modules = [{record["module"] for record in records} for records in sets]
    assert not modules[0] & modules[1]
    assert {b"ast", b"json.decoder"} <= modules[0] | modules[1]
    assert not any(b"test" in name.split(b".") for name in modules[0] | modules[1])
    sizes = [sum(len(record["text"]) for record in records) for records in sets]
    assert 0.02 < sizes[1] / sum(sizes) < 0.1
    assert sum(sizes) > 4_000_000
    keys = [(r["module"], r["name"], r["text"]) for records in sets for r in records]
    assert len(keys) > 10_000
    assert all(text.lstrip(b"@").strip() for _, _, text in keys)


def test_a_tfds_source_pickles_and_is_told_apart_by_content(data_dir):
    source = PythonStdlib("train[:5%]", data_dir)
    again = pickle.loads(pickle.dumps(source))
    assert again[7] == source[7]
    assert again.fingerprint == source.fingerprint != PythonStdlib("train", data_dir).fingerprint
    assert "standard library of Python" in str(source)
    name = f"python_stdlib/{source._builder.builder_config.name}"
    plain = Tfds(name, "train[:5%]", data_dir)
    assert len(plain) == len(source)
    assert plain[7] == source[7]
    assert plain.fingerprint != Tfds(name, "train[5%:10%]", data_dir).fingerprint
    assert where(plain, 7) == f"record 7 of {name}, split train[:5%]"


def test_a_data_set_that_is_not_there_is_refused_at_once(data_dir):
    started = time.monotonic()
    for name in ("mnist", "wikipedia/20230601.en", "no_such_data_set", "python_stdlib/other"):
        with pytest.raises(FileNotFoundError, match=f"the data set {name} is not in {data_dir}"):
            Tfds(name, "train", data_dir)
    assert time.monotonic() - started < 60  # TFDS itself would retry for minutes
    with pytest.raises(ValueError, match="has no split 'test'; its splits are train, validation"):
        PythonStdlib("test", data_dir)


def test_functions_are_taken_with_their_decorators_and_without_their_indentation():
    source = b'''
if True:
    def a(): return 1
class B:
    @property
    # comment
    def c(self):
        def inner():
            return "\\x0c"
        return inner
    class D:
        async def e(self): ...
try: pass
except ValueError:
    def f():
        """One
    two."""
'''
    found = list(functions(source))
    assert [(line, name) for line, name, _ in found] == [
        (3, "a"),
        (5, "B.c"),
        (12, "B.D.e"),
        (15, "f"),
    ]
    assert found[0][2] == "def a(): return 1\n"
    assert found[1][2].startswith("@property\n# comment\ndef c(self):\n    def inner():\n")
    assert found[1][2].endswith("    return inner\n")
