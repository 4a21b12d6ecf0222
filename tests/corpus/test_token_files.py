"""Token files of other programs are read in place: tokens, documents and masks as written."""

import contextlib
import gzip
import pickle
import struct

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline import InPlace, load
from pipeline.corpus import INPUTS
from pipeline.corpus.stored import cache
from pipeline.corpus.tokens import flat
from tests.corpus.files import documents_of, split_at, weights_of
from tests.corpus.token_writers import write_flat, write_llm_c, write_megatron

END = 50256


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_files_whose_ids_begin_at_odd_bytes_are_read_right(dtype, tmp_path):
    ids = np.arange(1, 40).astype(dtype)
    for number, some in enumerate(np.split(ids, 3)):
        (tmp_path / f"{number}.bin").write_bytes(b"x" + some.tobytes())
    corpus = InPlace.flat(tmp_path / "*.bin", dtype=dtype, skip=1, end=())
    read = corpus.read([0, 2, 1], [0, 3, 1], [12, 9, 2])
    assert read["inputs"].tolist() == [*range(1, 13), *range(30, 39), 15, 16]
    assert read["targets"].tolist() == [*range(2, 14), *range(31, 40), 16, 17]


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32", "int64"])
def test_a_document_of_megatron_may_have_several_sequences(dtype, tmp_path):
    write_megatron(tmp_path / "text_sentence", [[[1, 2], [3]], [], [[4, 5, 6]], [[], [7]]], dtype)
    corpus = InPlace.megatron(tmp_path / "text_sentence", task=INPUTS)
    assert documents_of(corpus) == [[1, 2, 3], [], [4, 5, 6], [7]]
    assert documents_of(pickle.loads(pickle.dumps(corpus))) == documents_of(corpus)
    assert documents_of(InPlace.megatron(f"{tmp_path}/*.bin", task=INPUTS)) == documents_of(corpus)
    write_megatron(tmp_path / "b.bin", [[[8, 9]]], "int16")  # some writers append to a name
    for name in ("b.bin.idx", "b.bin.bin", "*.bin.bin"):
        assert documents_of(InPlace.megatron(tmp_path / name, task=INPUTS)) == [[8, 9]]
    with pytest.raises(ValueError, match="give them the same type"):
        InPlace.megatron(tmp_path / "*.idx")
    index = tmp_path / "text_sentence.idx"
    index.write_bytes(index.read_bytes() + bytes(5))  # a mode of each sequence: all are text
    again = InPlace.megatron(tmp_path / "text_sentence", task=INPUTS)
    assert again.fingerprint != corpus.fingerprint


OUTSIDE = b'0,2,"a,\n""b",x,1\n5,7,"c",x,2\n'


@pytest.mark.parametrize(
    ("form", "end", "change", "sentence"),
    [
        ("megatron", ".idx", lambda it: it[:9] + b"\2" + it[10:], "it has version 2"),
        ("megatron", ".idx", lambda it: it + b"\0\1\0", "has other modes than text"),
        ("megatron", ".idx", lambda it: it[:34] + b"\3" + it[35:], "do not lie end to end"),
        ("megatron", ".idx", lambda it: it[:78] + b"\4" + it[79:], "into 3 sequences"),
        ("megatron", ".bin", lambda it: it + it[:4], "a.idx is cut short.*has 7 tokens.*for 6"),
        ("megatron", ".bin", lambda it: it[:-8], "a.bin is cut short.*has 4 tokens.*for 6; copy"),
        ("megatron", ".bin", lambda it: it[:-1], "a.bin is damaged, cut short"),
        ("flat", ".csv.gz", lambda _: gzip.compress(OUTSIDE), "a.npy is cut.*5 tokens.*for 7"),
        ("flat", ".npy", lambda it: it[:-2], "a.npy is cut short.*has 4 tokens.*for 5"),
        (
            "flat",
            ".csv.gz",
            lambda _: gzip.compress(b"0,3,x\n5,4,y\n"),
            "a.csv.gz is damaged.*before they",
        ),
        ("flat", ".csv.gz", lambda it: it[:-9], "a.csv.gz cannot be unpacked"),
    ],
)
def test_damaged_files_are_refused(form, end, change, sentence, tmp_path):
    write_megatron(tmp_path / "a", [[[1, 2], [3]], [[4, 5, 6]]])
    write_flat(tmp_path / "a.npy", [[1, 2, 3], [4, 5]])
    path = tmp_path / f"a{end}"
    path.write_bytes(change(path.read_bytes()))
    name, options = {"megatron": ("a", {}), "flat": ("a.npy", {"dtype": "uint16"})}[form]
    with pytest.raises(ValueError, match=sentence):
        InPlace(form, tmp_path / name, **options)


def test_the_file_that_is_cut_is_the_one_that_is_named(tmp_path):
    tokens, offsets = tmp_path / "tokens.npy", tmp_path / "offsets.npy"
    np.save(offsets, [0, 3, 5])
    for kept, sentence in (
        (5, None),
        (4, "tokens.npy is cut short, or does not belong to .*offsets.npy: tokens.npy has 4 tok"),
        (6, "offsets.npy is cut short, or does not belong to .*tokens.npy: tokens.npy has 6 tok"),
    ):
        np.save(tokens, np.arange(1, kept + 1))
        raises = pytest.raises(ValueError, match=sentence) if sentence else contextlib.nullcontext()
        with raises:
            InPlace.npy([tokens, offsets])
    np.save(tokens, np.arange(1, 6))
    for path in (tokens, offsets):
        whole = path.read_bytes()
        for size in (len(whole) - 8, 60, 0):
            path.write_bytes(whole[:size])
            with pytest.raises(ValueError, match=rf"{path.name} is damaged, cut short.*whole .npy"):
                InPlace.npy([tokens, offsets])
        path.write_bytes(whole)


def test_masks_that_are_short_are_named_with_their_tokens(tmp_path):
    for name, ids in (("a", [1, 2, 3]), ("b", [4, 5, 3])):
        np.array(ids, "<u2").tofile(tmp_path / f"{name}.bin")
        np.ones(3, bool).tofile(tmp_path / f"{name}.mask")
    (tmp_path / "b.mask").write_bytes(b"\1\1")
    options = {"dtype": "uint16", "end": 3}
    with pytest.raises(
        ValueError, match=r"b.mask is cut short, .* to .*b.bin: it has 2 bytes for 3"
    ):
        InPlace.flat(tmp_path / "*.bin", weights=tmp_path / "*.mask", **options)
    (tmp_path / "b.mask").unlink()
    with pytest.raises(ValueError, match="there are 1 files of weights for 2 of tokens"):
        InPlace.flat(tmp_path / "*.bin", weights=tmp_path / "*.mask", **options)


def test_a_stream_of_arrow_that_ends_between_its_batches_is_told(tmp_path, caplog):
    """Arrow takes such an end for that of the stream, so the rows after it would be missed."""
    table, path = pa.table({"input_ids": [[1, 2, 3]] * 30}), tmp_path / "a.arrow"
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        for batch in table.to_batches(max_chunksize=10):
            at = file.tell()
            writer.write_batch(batch)
    assert len(InPlace.arrow(path)) == 30
    assert not caplog.text
    path.write_bytes(path.read_bytes()[:at])
    assert len(InPlace.arrow(path)) == 20
    assert "a.arrow ends without the mark that ends a stream of Arrow, after 20 rows" in caplog.text


def test_positions_far_beyond_rows_are_told_with_the_cure(tmp_path, caplog):
    """As of a file of tokens in which nothing marks the ends of documents."""
    np.ones(70_000, "<u2").tofile(tmp_path / "a.bin")
    corpus = InPlace.flat(tmp_path / "a.bin", dtype="uint16", end=(), vocab_size=9)
    options = {"tokens_per_batch": 1024, "max_length": 256}
    load(corpus, **options).close()
    assert "positions go up to 69,998 in rows of 256" in caplog.text
    assert "positions='restart' begins each piece at 0" in caplog.text
    caplog.clear()
    load(corpus, positions="continue", **options).close()
    load(corpus, positions="restart", **options).close()
    load(corpus, **options | {"max_length": 8192, "tokens_per_batch": 8192}).close()
    assert not caplog.text


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=60),
    st.lists(st.integers(0, 60), max_size=5),
    st.booleans(),
)
def test_documents_go_on_in_the_next_file(tmp_path_factory, ids, cuts, ends):
    folder, ids = tmp_path_factory.mktemp("shards"), [*ids, 3]
    for number, some in enumerate(np.split(np.array(ids, "<u2"), sorted(cuts))):
        some.tofile(folder / f"{number}.bin")
        (some % 2 == 1).tofile(folder / f"{number}.mask")
    named = {"end": 3} if ends else {"begin": 3}
    options = {"dtype": "uint16", **named}
    corpus = InPlace.flat(folder / "*.bin", task=INPUTS, weights=(), **options)
    assert documents_of(corpus) == split_at(ids, 3, ends=ends)
    weighted = InPlace.flat(folder / "*.bin", weights=folder / "*.mask", **options)
    due = [[id_ % 2 for id_ in document[1:]] for document in split_at(ids, 3, ends=ends)]
    assert weights_of(weighted) == due


def test_the_header_of_llm_c_tells_the_type_and_the_mark(tmp_path):
    """Those of the two versions, and what they hold, are golden."""
    names = tmp_path / "train_*.bin"
    write_llm_c(tmp_path / "train_0.bin", [END, 5, 6, END, 7])
    for same in ({"dtype": np.uint16}, {"begin": END}):
        assert len(InPlace.flat(names, **same)) == 2
    for wrong in ({"end": END}, {"begin": 5}):
        with pytest.raises(ValueError, match=f"says that {END} begins each document; omit both"):
            InPlace.flat(names, **wrong)
    with pytest.raises(ValueError, match="by its header, it has"):
        InPlace.flat(names, dtype="int64")
    write_llm_c(tmp_path / "train_1.bin", [1, 2], 20240522)
    with pytest.raises(ValueError, match="an evaluation file of llm"):
        InPlace.flat(names)


def test_a_table_beside_a_file_lists_its_documents(tmp_path, caplog):
    write_flat(tmp_path / "part-0.npy", [[1, 2, 3], [], [4, END]])
    np.zeros(6, np.uint16).tofile(tmp_path / "part-1.npy")
    gzip.open(tmp_path / "part-1.csv.gz", "wb").close()
    corpus = InPlace.flat(tmp_path / "*.npy", dtype="uint16", end=0, task=INPUTS)
    assert documents_of(corpus) == [[1, 2, 3], [], [4, END]]
    assert "part-0.csv.gz says where documents are; begin and end are not used" in caplog.text
    assert "part-1.csv.gz lists documents of 0 tokens, and the file beside it has 6" in caplog.text
    assert "part-0.csv.gz lists" not in caplog.text
    (tmp_path / "part-0.csv.gz").unlink()
    with pytest.raises(ValueError, match=r"there is no .*part-0.csv.gz"):
        InPlace.flat(tmp_path / "*.npy", dtype="uint16")


def test_a_mask_of_tokens_is_never_read_as_tokens_or_ignored(tmp_path):
    write_flat(tmp_path / "token_ids_part_0000.npy", [[1, 2, 3], [4, 5]], "uint32")
    np.array([0, 1, 0, 1, 1], bool).tofile(tmp_path / "labels_mask_part_0000.npy")
    masks, options = tmp_path / "labels_mask*", {"dtype": "uint32"}
    for names in (tmp_path / "*.npy", tmp_path / "token_ids*.npy"):
        with pytest.raises(ValueError, match=r"give weights='.*labels_mask_part_0000.npy', "):
            InPlace.flat(names, **options)
        plain, corpus = (InPlace.flat(names, **options, weights=some) for some in ((), masks))
        assert [example["targets"].tolist() for example in plain] == [[2, 3], [5]]
        assert weights_of(corpus) == [[1, 0], [1]]
        assert corpus.fingerprint != plain.fingerprint
    with pytest.raises(ValueError, match=r"are masks or labels by .*; give the files of tokens"):
        InPlace.flat(masks, **options)
    (tmp_path / "labels_mask_part_0000.npy").write_bytes(b"\1\0")
    with pytest.raises(ValueError, match=r"labels_mask_part_0000.npy is cut .*2 bytes for 5 tok"):
        InPlace.flat(names, **options, weights=masks)


def test_a_mask_that_datatrove_wrote_beside_its_tokens_is_not_ignored(tmp_path):
    write_flat(tmp_path / "0.ds", [[1, 2, 9], [4, 9]], "uint16")
    options = {"dtype": "uint16", "end": 9}
    assert not InPlace.flat(tmp_path / "*.ds", **options).weighted
    np.array([0, 1, 0, 1, 1], bool).tofile(tmp_path / "0.ds.loss")
    with pytest.raises(
        ValueError, match=r"0\.ds\.loss, by its .* weights='.*\.loss', .*or weights=\(\)"
    ):
        InPlace.flat(tmp_path / "*.ds", **options)
    corpus = InPlace.flat(tmp_path / "*.ds", **options, weights=tmp_path / "*.loss")
    assert weights_of(corpus) == [[1, 0], [1]]
    assert not InPlace.flat(tmp_path / "*.ds", **options, weights=()).weighted


def test_flat_files_whose_layout_is_unknown_are_refused(tmp_path, caplog):
    path = tmp_path / "train.bin"
    np.array([5, 6, 7, 8, 9], np.uint16).tofile(path)
    np.save(tmp_path / "a.npy", np.arange(4))
    for options, sentence in (
        ({}, "give that of its ids, such as 'uint16'"),
        ({"dtype": "float32"}, "dtype is 'float32' for"),
        ({"dtype": "uint16", "end": 1, "skip": 12}, "its 10 bytes are not 12 and some uint16"),
        ({"dtype": "uint16"}, "give one of them, the id that ends or begins each document"),
        ({"dtype": "uint16", "end": 1, "begin": 1}, "give one of them"),
        ({"dtype": "uint16", "end": 4}, "the id 4 is in none of the 5 tokens"),
        ({"dtype": "uint16", "end": 128000}, "the id 128000 cannot be in"),
    ):
        with pytest.raises(ValueError, match=sentence):
            InPlace.flat(path, **options)
    InPlace.flat(path, dtype="uint16", begin=7)
    assert "begins inside a document, with the id 5 and not begin=7; if that id" in caplog.text
    with pytest.raises(ValueError, match=r"a.npy holds more than ids. It is a NumPy array; give"):
        InPlace.flat(tmp_path / "a.npy", dtype="int64", end=1)
    content = np.arange(1, 9, dtype="uint16").tobytes()
    places = struct.pack("<4I", 2, 16, 20, 32)
    for other, sentence in (
        (b"LITPKDS\0" + bytes(40), "It is a packed file of LitGPT"),
        (gzip.compress(content), "It is gzip; unpack it first"),
        (b"version https://git-lfs.github.com/spec/v1\n", "It is a Git LFS pointer"),
        (places + content, "begins with the places of 2 items, as shards of other programs do"),
    ):
        path.write_bytes(other)
        with pytest.raises(ValueError, match=sentence):
            InPlace.flat(path, dtype="uint16", end=())
    for first in (93, 0x9D1F, 65279):  # as the signs of lzma, of .Z and of UTF-16 are
        np.array([first, 1], "uint32").tofile(path)
        assert len(InPlace.flat(path, dtype="uint32", end=1)) == 1
    path.write_bytes(b"")
    with pytest.raises(ValueError, match="holds no document"):
        InPlace.flat(path, dtype="uint16", end=())


@pytest.mark.parametrize("written", ["uint16", "uint32", "int64"])
def test_ids_that_are_wider_than_the_dtype_are_told(written, tmp_path, caplog):
    ids = np.random.default_rng(0).integers(0, 60000, 500).astype(written)
    ids[::50] = 7
    ids.tofile(tmp_path / "a.bin")
    for dtype in ("uint16", "uint32"):
        caplog.clear()
        with contextlib.suppress(ValueError):  # read as too wide, the id 7 is not there
            InPlace.flat(tmp_path / "a.bin", dtype=dtype, end=7)
        is_wider = ids.dtype.itemsize > np.dtype(dtype).itemsize
        assert ("as if its ids were wider than" in caplog.text) == is_wider


def test_the_marks_of_a_long_file_are_searched_once(tmp_path, monkeypatch):
    monkeypatch.setattr(flat, "SEARCHED", 8)
    monkeypatch.setattr(cache, "default_directory", lambda: tmp_path / "cache")
    ids = np.random.default_rng(0).integers(0, 4, 50)
    ids.astype(np.uint16).tofile(tmp_path / "a.bin")
    options = {"dtype": "uint16", "end": 3, "task": INPUTS}
    corpus = InPlace.flat(tmp_path / "a.bin", **options)
    assert documents_of(corpus) == split_at(ids.tolist(), 3, ends=True)
    (stored,) = (tmp_path / "cache").glob("files/*/*.npy")
    np.save(stored, np.array([9, 29]))
    assert InPlace.flat(tmp_path / "a.bin", **options).lengths.tolist() == [10, 20, 20]
    (ids + 1).astype(np.uint16).tofile(tmp_path / "a.bin")
    again = InPlace.flat(tmp_path / "a.bin", **options)
    assert documents_of(again) == split_at((ids + 1).tolist(), 3, ends=True)
