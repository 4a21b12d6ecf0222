"""Sources of files: what their records are, where, and how they are cut into shards and blocks."""

import itertools
import os
import pickle
import re
import resource
import socket
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.text.sources import (
    KINDS,
    Concatenated,
    JsonLines,
    ParallelText,
    ParquetFiles,
    Records,
    Slice,
    TextFiles,
    Tfds,
    files,
    lines,
)
from pipeline.text.sources import source as sizes
from pipeline.text.sources.source import text_of
from tests.properties.questions import MORE, RECORDS, write_questions
from tests.text.record_files import compressed, make

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
    keep_blank=st.booleans(),
)
def test_each_line_is_in_one_shard_wherever_files_are_cut(
    contents, ended, least, block, suffix, keep_blank, tmp_path_factory
):
    folder, due = tmp_path_factory.mktemp("lines"), []
    for number, ends in enumerate(contents):
        whole = "".join(line + end for line, end in ends).encode()
        whole = whole if ended else whole.removesuffix(b"\n")
        (folder / f"{number}.txt{suffix}").write_bytes(compressed(whole, suffix))
        parts = whole.split(b"\n")
        for line in parts if parts[-1] else parts[:-1]:
            text = line.rstrip(b"\r").decode() if line.strip() else ""
            text = text.removeprefix("\ufeff")
            due += [text] if text or keep_blank else []
    if not contents:
        return
    with pytest.MonkeyPatch.context() as patch:
        cut(patch, least, block)
        source = TextFiles(str(folder / "*"), keep_blank=keep_blank)
        shards = source.shards()
        assert sum(shard.bytes for shard in shards) == sum(f.stat().length for f in source.files)
        assert texts_of(source) == due


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


@pytest.mark.parametrize("kind", ["parquet", "array_record"])
def test_more_files_are_read_than_may_be_open(kind, tmp_path):
    records = [{"text": f"{number}"} for number in range(150)]
    for number, record in enumerate(records):
        folder = tmp_path / f"{number:03}"
        folder.mkdir()
        make(kind, folder, [record] * 26)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (held + 60, hard))
    try:
        source = KINDS[kind](str(tmp_path / f"*/*.{kind}"))
        assert sum(1 for _ in source) == 26 * len(records)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_an_error_of_the_system_is_not_told_as_damage(tmp_path, monkeypatch):
    source = make("parquet", tmp_path, [{"text": "a"}] * 26)

    def fail(path):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(source, "_open", fail)
    with pytest.raises(OSError, match="Too many open files"):
        list(source)


def test_a_record_of_parallel_texts_is_at_a_line_of_its_inputs(tmp_path):
    for name, text in {"1.de": "a\n", "1.en": "w\n", "2.de": "\nc\n", "2.en": "x\ny\n"}.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "3.de").mkdir()  # which is no file
    sides = [str(tmp_path / f"*.{side}") for side in ("de", "en")]
    source = ParallelText(*sides)
    (block,) = source.read(source.shards()[0])
    assert block.where(2) == f"{tmp_path}/2.de, line 2 (byte 1)"
    assert ParallelText(*sides[::-1]).fingerprint != source.fingerprint


@given(
    given_pairs=st.lists(st.tuples(st.text("aé ", max_size=9), st.text("bc", max_size=30))),
    least=st.integers(1, 99),
    block=st.integers(1, 50),
    counted=st.integers(1, 40),
    suffixes=st.sampled_from([("", ""), ("", ".gz"), (".zst", "")]),
    ended=st.booleans(),
)
def test_parallel_texts_stay_beside_each_other_wherever_they_are_cut(
    given_pairs, least, block, counted, suffixes, ended, tmp_path_factory
):
    folder, pairs = tmp_path_factory.mktemp("parallel"), given_pairs
    for side, suffix in enumerate(suffixes):
        text = "".join(f"{pair[side]}\n" for pair in pairs).encode()
        text = text if ended or (pairs and not all(pairs[-1])) else text.removesuffix(b"\n")
        (folder / f"{side}.txt{suffix}").write_bytes(compressed(text, suffix))
    paths = [folder / f"{side}.txt{suffix}" for side, suffix in enumerate(suffixes)]
    with pytest.MonkeyPatch.context() as patch:
        cut(patch, least, block)
        patch.setattr(lines, "COUNTED", counted)
        source = ParallelText(*paths)
        due = [tuple(text if text.strip() else "" for text in pair) for pair in pairs]
        assert [(each["inputs"], each["targets"]) for each in source] == due
        for shard in source.shards():
            blocks = list(source.read(shard))
            for number, each in enumerate(blocks[:-1]):
                assert list(source.read(shard, each.next)) == blocks[number + 1 :]


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("change", [["another"], []])
def test_parallel_texts_with_other_numbers_of_lines_are_refused(change, suffix, tmp_path):
    texts = [f"line {number}" for number in range(70)]
    for name, of in (("de", texts), ("en", [*texts[:-1], *change, *change])):
        path = tmp_path / f"1.{name}{suffix}"
        path.write_bytes(compressed("".join(f"{text}\n" for text in of).encode(), suffix))
    counts = rf"1\.de.* has 70 lines and .*1\.en.* has {69 + 2 * len(change)}, counting blank ones"
    with pytest.raises(ValueError, match=counts):
        list(ParallelText(tmp_path / f"1.de{suffix}", tmp_path / f"1.en{suffix}"))
    with pytest.raises(ValueError, match="there are 1 files of inputs and 2 of targets"):
        ParallelText(tmp_path / f"1.de{suffix}", [tmp_path / f"1.en{suffix}"] * 2)


def test_fingerprints_depend_on_names_and_content_but_not_on_place_or_time(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "SAMPLE", 64)
    content = b"".join(b"line %05d\n" % number for number in range(1000))
    for place in ("here", "there"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "a.txt").write_bytes(content)
    os.utime(tmp_path / "there" / "a.txt", (1, 1))
    here = TextFiles(tmp_path / "here" / "a.txt").fingerprint
    assert TextFiles(tmp_path / "there" / "a.txt").fingerprint == here
    for options in ({"sample_by": "file"}, {"keep_blank": True}):
        assert TextFiles(tmp_path / "here" / "a.txt", **options).fingerprint != here
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


@given(st.integers(1, 500), st.lists(st.integers(1, 99), max_size=3, unique=True))
def test_slices_divide_a_source(records, bounds):
    source = Records([str(number) for number in range(records)])
    fractions = [0.0, *(bound / 100 for bound in sorted(bounds)), 1.0]
    slices = [texts_of(Slice(source, *pair)) for pair in itertools.pairwise(fractions)]
    assert sorted(map(int, itertools.chain(*slices))) == list(range(records))
    assert all(list(map(int, each)) == sorted(map(int, each)) for each in slices)
    for (begin, end), found in zip(itertools.pairwise(fractions), slices, strict=True):
        # Within six deviations of a binomial distribution.
        assert abs(len(found) - records * (end - begin)) <= 6 * records**0.5


def test_records_stay_in_their_slice_when_files_are_added_or_cut_otherwise(tmp_path, monkeypatch):
    def write(name):
        path = tmp_path / "data" / f"{name}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"{name} {number}\n" for number in range(200)))

    def take(begin, end, folder="data"):
        return texts_of(Slice(TextFiles(str(tmp_path / folder / "*.txt")), begin, end))

    write("b")
    alone = take(0.0, 0.3)
    for name in ("a", "c"):
        write(name)
    assert [text for text in take(0.0, 0.3) if text[0] == "b"] == alone
    cut(monkeypatch, 50, 7)
    assert [text for text in take(0.0, 0.3) if text[0] == "b"] == alone
    (tmp_path / "data").rename(tmp_path / "moved")  # the folder of all files does not count
    assert [text for text in take(0.0, 0.3, "moved") if text[0] == "b"] == alone
    (tmp_path / "moved" / "b.txt").rename(tmp_path / "moved" / "d.txt")
    assert [text for text in take(0.0, 0.3, "moved") if text[0] == "b"] != alone


def test_a_slice_names_records_as_its_source_does(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("".join(f"{number}\n" for number in range(100)))
    half = Slice(Concatenated([TextFiles(path)]), 0.5, 1.0)
    (block,) = half.read(half.shards()[0])
    number = int(block.records[7]["text"])
    assert block.where(7).startswith(f"{path}, line {number + 1} (byte ")
    assert half.files == [path]
    others = (Slice(TextFiles(path), *share).fingerprint for share in ((0.0, 0.5), (0.0, 1.0)))
    assert len({half.fingerprint, *others}) == 3
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
        assert sorted(text_of(record, "text") for record in source) == sorted(
            record["text"] for record in records
        )
    source = Tfds("questions", "train[:50%]", data_dir)
    again = pickle.loads(pickle.dumps(source))
    assert len(list(again)) == 15
    assert list(again) == list(source)
    assert again.fingerprint == source.fingerprint
    others = {Tfds("questions", split, data_dir).fingerprint for split in ("train", "train[50%:]")}
    assert len({source.fingerprint, *others}) == 3
    block = next(source.read(source.shards()[0]))
    assert block.where(7) == "record 7"


def test_a_data_set_that_is_not_there_is_refused_at_once(data_dir):
    started = time.monotonic()
    for name in ("mnist", "wikipedia/20230601.en", "no_such_data_set", "questions/other"):
        with pytest.raises(FileNotFoundError, match=f"the data set {name} is not in {data_dir}"):
            Tfds(name, "train", data_dir)
    assert time.monotonic() - started < 60  # TFDS itself would retry for minutes
    with pytest.raises(ValueError, match="has no split 'test'; its splits are train, validation"):
        Tfds("questions", "test", data_dir)
