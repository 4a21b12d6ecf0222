"""Corpora without a copy read what a corpus on disk would."""

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import feather

import pipeline
from pipeline import Corpus, InPlace
from pipeline.corpus import CAUSAL, INPUTS
from tests.corpus.files import require_equal
from tests.corpus.kinds import SIZES, ids_of, require_read
from tests.text.record_files import write_table


@pytest.mark.parametrize("marks", [(1, 2), (1, None), (None, 2), (None, None)])
@pytest.mark.parametrize("task", [CAUSAL, INPUTS], ids=["causal", "inputs"])
def test_marks_that_files_lack_are_read_as_if_they_were_there(marks, task, tmp_path):
    begin, end = ([] if mark is None else [mark] for mark in marks)
    plain = [ids.tolist() for ids in ids_of(SIZES)]
    weights = [[float(id_ % 2) for id_ in row] for row in plain]
    columns = {"input_ids": plain, "mine": weights, "reward": range(len(plain))}
    path = tmp_path / "a.arrow"
    feather.write_feather(pa.table(columns), str(path), chunksize=7)
    options = {"weights": "mine", "features": {"reward": pipeline.Feature("example")}}
    corpus = InPlace.arrow(path, marks=marks, task=task, vocab_size=99, **options)
    marked = {
        "tokens": [[*begin, *ids, *end] for ids in plain],
        "weights": [[*[1.0] * len(begin), *row, *[1.0] * len(end)] for row in weights],
        "reward": range(len(plain)),
    }
    due = Corpus.from_arrays(marked, tmp_path / "due", features=options["features"], task=task)
    require_equal(corpus, due)
    rng = np.random.default_rng(0)
    some = rng.permutation(np.flatnonzero(due.lengths))
    starts = rng.integers(0, due.lengths[some])
    sizes = rng.integers(1, due.lengths[some] - starts + 1)
    wholes = [due.read([number], [0], [due.lengths[number]]) for number in some]
    require_read(corpus, some, starts, sizes, sizes + 3, wholes)
    if marks != (None, None):
        assert corpus.fingerprint != InPlace.arrow(path, task=task, **options).fingerprint


def test_marks_are_two_ids_and_have_no_features_of_tokens(tmp_path):
    path = tmp_path / "a.arrow"
    feather.write_feather(pa.table({"input_ids": [[1]], "seen": [[0]]}), str(path))
    with pytest.raises(ValueError, match=r"marks is .*; give two ids or None"):
        InPlace.arrow(path, marks=(1, 2, 3))
    with pytest.raises(ValueError, match="marks has the id 99; ids must be below 99"):
        InPlace.arrow(path, marks=(1, 99), vocab_size=99)
    with pytest.raises(ValueError, match=f"marks has the id {1 << 31}; ids must be below"):
        InPlace.arrow(path, marks=(1 << 31, None))
    with pytest.raises(ValueError, match="features of tokens have no values for marks"):
        InPlace.arrow(path, marks=(1, 2), features={"seen": pipeline.Feature("inputs")})


def test_what_is_no_list_of_ids_is_refused(tmp_path):
    wanted = {"features": {"points": pipeline.Feature("inputs", shape=(2,))}}

    def of_points(*values):
        points = pa.array([values], pa.list_(pa.list_(pa.int32(), 2)))
        return {"input_ids": [[1, 2, 3]], "points": points}

    for columns, options, sentence in (
        ({"input_ids": [[1.0]]}, {}, "row 0 on, input_ids holds list<.*double>; tokens"),
        ({"input_ids": [[1, 2], [1], None]}, {}, "missing entries, first 2 rows after"),
        (of_points([1, 2], None, [3, 4]), wanted, "points has missing entries"),
        (of_points([1, 2], [3, 4]), wanted, "example 0 .* has 4 numbers for 3 tokens"),
        ({"input_ids": [[1]], "points": [[5]]}, wanted, "a shape as fixed-size lists"),
    ):
        feather.write_feather(pa.table(columns), str(tmp_path / "a.arrow"))
        with pytest.raises(ValueError, match=sentence):
            InPlace.arrow(tmp_path / "a.arrow", **options)
    ids = pa.array([[1]], pa.list_(pa.int32()))
    feather.write_feather(pa.table({"input_ids": ids}), str(tmp_path / "b.arrow"))
    with pytest.raises(ValueError, match=r"the tokens of .* are int.*give them the same type in"):
        InPlace.arrow(str(tmp_path / "*.arrow"))
    tokens, offsets = tmp_path / "tokens.npy", tmp_path / "offsets.npy"
    for some, bounds, sentence in (
        (np.arange(5), [1, 3, 2], "offsets.npy is damaged.* does not hold offsets into 5 tokens"),
        (
            np.arange(5),
            [3, 2],
            r"lengths, which sum to 5 tokens; .*np.append\(0, np.cumsum\(lengths",
        ),
        (np.arange(5), [3, 5], r"seems to hold ends, up to 5 tokens; give np.append\(0, ends\)"),
        (np.arange(5), [0, 3], r"has 5 tokens, and it ends at 3; if .* np.append\(starts, 5\)"),
        (np.arange(5), [0, 24, 40], r"seems to count bytes, 40 for 5 tokens; give offsets // 8"),
        ([0, 2, 3], [7, 8, 9], "hold the tokens, and tokens.npy the offsets; give the file of tok"),
        (np.zeros(3), [0, 3], "shape .3,. and dtype float64; it must be"),
    ):
        np.save(tokens, some)
        np.save(offsets, bounds)
        with pytest.raises(ValueError, match=sentence):
            InPlace.npy(tokens, offsets)


IDS = [[1, 5, 2, 9], [1, 6, 7, 2], [1, 6, 7, 2]]
INT = pa.int32()
LAYOUTS = {
    **{kind: pa.array(IDS, pa.list_(kind)) for kind in (pa.uint8(), pa.int64(), pa.uint64())},
    **{kind(INT): pa.array(IDS, kind(INT)) for kind in (pa.large_list, pa.list_view)},
    "large_list_view": pa.array(IDS, pa.large_list_view(pa.uint16())),
    "views of the same": pa.ListViewArray.from_arrays(
        pa.array([4, 0, 0], INT), pa.array([4, 4, 4], INT), pa.array([1, 6, 7, 2, 1, 5, 2, 9])
    ),
    "fixed": pa.array(IDS, pa.list_(INT, 4)),
    "fixed, sliced": pa.array([[0] * 4, *IDS, [0] * 4], pa.list_(pa.uint16(), 4)).slice(1, 3),
    "sliced": pa.array([[0], *IDS, [0]], pa.list_(INT)).slice(1, 3),
    "chunks": pa.chunked_array([pa.array(IDS[:1]), pa.array(IDS[1:])]),
    "runs": pa.RunEndEncodedArray.from_arrays([1, 3], pa.array(IDS[:2])),
    "dictionary": pa.DictionaryArray.from_arrays([0, 1, 1], pa.array(IDS[:2])),
    "list of a dictionary": pa.ListArray.from_arrays(
        [0, 4, 8, 12], pa.array(np.ravel(IDS)).dictionary_encode()
    ),
    "tensor": pa.ExtensionArray.from_storage(
        pa.fixed_shape_tensor(INT, [4]), pa.array(IDS, pa.list_(INT, 4))
    ),
    "opaque": pa.ExtensionArray.from_storage(
        pa.opaque(pa.list_(INT), "ids", "us"), pa.array(IDS, pa.list_(INT))
    ),
}


@pytest.mark.parametrize("kind", ["arrow", "stream"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_lists_of_ids_may_have_any_layout(layout, kind, tmp_path):
    strange = pa.array([1, 2, 3], pa.timestamp("ns", tz="No/Where"))  # and is not read
    table = pa.table({"when": strange, "input_ids": LAYOUTS[layout]})
    write_table(tmp_path / f"a.{kind}", table, rows=2)
    corpus = InPlace.arrow(tmp_path / f"a.{kind}", vocab_size=10)
    assert [corpus[at]["inputs"].tolist() for at in range(3)] == [ids[:-1] for ids in IDS]
    assert [corpus[at]["targets"].tolist() for at in range(3)] == [ids[1:] for ids in IDS]
    corpus.verify()


@pytest.mark.parametrize("place", [0, 3])
@pytest.mark.parametrize(
    ("wrong", "kind", "vocab_size"),
    [
        *((99, kind, 50) for kind in ("uint8", "int16", "int32", "uint32", "int64", "uint64")),
        *((-5, kind, None) for kind in ("int8", "int16", "int32", "int64")),
        *((wrong, "int64", None) for wrong in (1 << 31, (1 << 32) + 7, -(1 << 32) + 7, 1 << 62)),
        *((wrong, "uint64", None) for wrong in (1 << 31, (1 << 63) + 3, (1 << 64) - 1)),
        ((1 << 31) + 1, "uint32", None),
        (1 << 33, "int64", 1 << 40),
        (50, "uint16", 50),
    ],
)
def test_an_id_that_does_not_fit_is_never_gathered(wrong, kind, vocab_size, place, tmp_path):
    ids = np.array([1, 2, 3, 4, 5, 1, 2, 3, 4, 5], kind)
    ids[5 + place] = wrong
    np.save(tmp_path / "t.npy", ids)
    np.save(tmp_path / "o.npy", [0, 5, 5, 9, 10])
    ids = pa.array([ids[:5], ids[:0], ids[5:9], ids[9:]])
    feather.write_feather(pa.table({"input_ids": ids}), str(tmp_path / "a.arrow"))
    for corpus in (
        InPlace.npy(tmp_path / "t.npy", tmp_path / "o.npy", vocab_size=vocab_size),
        InPlace.arrow(tmp_path / "a.arrow", vocab_size=vocab_size),
    ):
        assert corpus[0]["targets"].tolist() == [2, 3, 4, 5]
        sentence = rf"example 2 of .* holds the id {wrong}; ids must be from 0 and below [\d,]+"
        for call in (corpus.verify, lambda corpus=corpus: corpus[2]):
            with pytest.raises(ValueError, match=sentence):
                call()
