"""Corpora without a copy read what a corpus on disk would."""

import pickle

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import feather, parquet

import pipeline
from pipeline.corpus.corpus import Corpus
from pipeline.corpus.in_place import InPlace
from pipeline.corpus.on_read import tokenize_on_read
from pipeline.corpus.tasks import INPUTS
from pipeline.corpus.views import Masked
from pipeline.planning import lengths as lengths_lib
from pipeline.text.sources import Records, TextFiles
from pipeline.text.templates import Chat
from pipeline.text.tokenizers import Bytes

COUNTS = [(7 * number) % 18 for number in range(40)]
EXAMPLES = [np.arange(count) + 100 * number for number, count in enumerate(COUNTS)]
TEXTS = [f"text {number} " + "é" * (number % 9) for number in range(60)]
CHATS = [{"messages": [{"role": role, "content": text} for role in ("user", "assistant")]}
         for text in TEXTS]  # fmt: skip
KINDS = ["arrow", "stream", "lz4", "uint16", "parquet", "npy"]


def make(kind, directory, task=pipeline.corpus.CAUSAL, examples=EXAMPLES):
    """EXAMPLES as another program would have stored them, in two files of many groups."""
    if kind == "npy":
        np.save(directory / "tokens.npy", np.concatenate(examples).astype(np.uint16))
        np.save(directory / "offsets.npy", np.cumsum([0, *map(len, examples)]))
        return InPlace.npy(
            directory / "tokens.npy", directory / "offsets.npy", task=task, vocab_size=4000
        )
    item = {"arrow": pa.int32(), "stream": pa.int64(), "lz4": pa.int32(), "uint16": pa.uint16()}
    held = pa.large_list(item[kind]) if kind == "lz4" else pa.list_(item.get(kind, pa.int64()))
    for number, mine in enumerate((examples[:15], examples[15:])):
        ids = pa.array([each.tolist() for each in mine], held)
        table = pa.table({"other": ["x"] * len(mine), "input_ids": ids})
        path = str(directory / f"{number}.{kind}")
        if kind == "parquet":
            parquet.write_table(table, path, row_group_size=4)
        elif kind == "stream":
            with pa.ipc.new_stream(path, table.schema) as writer:
                writer.write_table(table, max_chunksize=4)
        else:
            compression = "lz4" if kind == "lz4" else "uncompressed"
            feather.write_feather(table, path, compression=compression, chunksize=4)
    opened = InPlace.parquet if kind == "parquet" else InPlace.arrow
    return opened(str(directory / f"*.{kind}"), task=task, vocab_size=4000)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return Corpus.from_arrays(EXAMPLES, tmp_path_factory.mktemp("corpus"), vocab_size=4000)


@pytest.fixture(scope="module", params=KINDS)
def in_place(request, tmp_path_factory):
    return make(request.param, tmp_path_factory.mktemp(request.param))


def same(one, other):
    return list(one) == list(other) and all(
        one[name].dtype == other[name].dtype and np.array_equal(one[name], other[name])
        for name in one
    )


def pieces(data, lengths):
    picked = data.draw(st.lists(st.integers(0, len(lengths) - 1), max_size=20))
    starts = [data.draw(st.integers(0, int(lengths[each]))) for each in picked]
    wanted = [
        data.draw(st.integers(0, int(lengths[each]) - start))
        for each, start in zip(picked, starts, strict=True)
    ]
    return picked, starts, wanted


@given(st.data())
def test_pieces_in_place_are_those_of_a_copy(in_place, corpus, data):
    asked = pieces(data, corpus.lengths)
    assert same(in_place.read(*asked), corpus.read(*asked))


def test_batches_in_place_are_those_of_a_copy(in_place, corpus):
    assert np.array_equal(in_place.lengths, corpus.lengths)
    assert lengths_lib.digest(in_place.lengths) == lengths_lib.digest(corpus.lengths)
    assert in_place.num_tokens == corpus.num_tokens
    plan = pipeline.Plan(in_place, [pipeline.Bucket(4, 8), pipeline.Bucket(4, 16)])
    assert plan.fingerprint == pipeline.Plan(corpus, plan.buckets).fingerprint
    again = pickle.loads(pickle.dumps(in_place))
    assert again.fingerprint == in_place.fingerprint != corpus.fingerprint
    batches = pipeline.Batches(corpus, plan)
    for step in range(len(batches)):
        assert same(pipeline.Batches(again, plan)[step], batches[step])
    with pipeline.load(in_place, buckets=plan.buckets, num_epochs=1) as loader:
        assert sum(float(batch["loss_weights"].sum()) for batch in loader) == corpus.num_tokens
    in_place.verify()
    assert "InPlace" in str(in_place)
    for wrong in (40, -1):
        with pytest.raises(IndexError, match=f"example {wrong} of 40"):
            in_place.read([wrong], [0], [1])
    with pytest.raises(IndexError, match="positions 0 to 7 of example 1, which has length 6"):
        in_place.read([1], [0], [7])


def test_corpora_in_place_are_joined_like_any_others(in_place, corpus):
    joined = pipeline.Corpora({"stored": corpus, "in place": in_place})
    copies = pipeline.Corpora({"stored": corpus, "in place": corpus})
    buckets = pipeline.Bucket(4, 8), pipeline.Bucket(4, 16)
    plan = pipeline.Plan(joined, buckets, weights={"stored": 1, "in place": 2})
    assert (
        plan.batch(0).digest
        == pipeline.Plan(copies, buckets, weights={"stored": 1, "in place": 2}).batch(0).digest
    )
    for step in range(plan.num_batches()):
        batch = pipeline.Batches(joined, plan)[step]
        assert same(batch, pipeline.Batches(copies, plan)[step])
    alone = pipeline.Corpora({"a": in_place})
    assert alone.fingerprint == in_place.fingerprint
    assert same(alone[7], corpus[7])


def test_tokens_in_place_can_be_masked(tmp_path):
    plain = make("arrow", tmp_path, INPUTS)
    view = Masked(plain)
    assert plain.lengths.tolist() == COUNTS
    everything = np.arange(40), np.zeros(40, np.int64), plain.lengths
    assert np.array_equal(view.read(*everything)["targets"], np.concatenate(EXAMPLES))
    assert view.identity.items() > plain.identity.items()


def test_what_is_no_list_of_ids_is_refused(tmp_path):
    def write(**columns):
        feather.write_feather(pa.table(columns), str(tmp_path / "a.arrow"))
        return tmp_path / "a.arrow"

    with pytest.raises(ValueError, match=r"a.arrow, from row 0 on, holds list<.*double>; tokens"):
        InPlace.arrow(write(input_ids=[[1.0]]))
    with pytest.raises(ValueError, match="has missing entries"):
        InPlace.arrow(write(input_ids=[[1], None]))
    with pytest.raises(ValueError, match="has no column 'input_ids'"):
        InPlace.arrow(write(text=["a"]))
    negative = InPlace.arrow(write(input_ids=[[1, 2], [1, -100]]))
    with pytest.raises(ValueError, match=r"example 1 of .* holds the id -100; ids are from 0"):
        negative.verify()
    np.save(tmp_path / "tokens.npy", np.arange(5))
    for name, offsets in (("far", [0, 6]), ("back", [0, 3, 2]), ("none", [0])):
        np.save(tmp_path / f"{name}.npy", np.array(offsets))
        with pytest.raises(ValueError, match=f"{name}.npy are no offsets of 5 tokens"):
            InPlace.npy(tmp_path / "tokens.npy", tmp_path / f"{name}.npy")
    np.save(tmp_path / "floats.npy", np.zeros(3))
    with pytest.raises(ValueError, match=r"shape .3,. and dtype float64; it must be"):
        InPlace.npy(tmp_path / "floats.npy", tmp_path / "far.npy")
    (tmp_path / "text.npy").write_text("none")
    with pytest.raises(ValueError, match=r"text.npy is no .npy array"):
        InPlace.npy(tmp_path / "text.npy", tmp_path / "far.npy")


@given(st.data())
def test_text_on_the_fly_is_what_was_prepared(tmp_path_factory, data):
    base = tmp_path_factory.getbasetemp()
    options = {"progress": False, "num_workers": 0}
    for name, source, more in (
        ("text", Records(TEXTS), {}),
        ("inputs", Records(TEXTS), {"task": INPUTS}),
        ("chat", Records(CHATS), {"template": Chat()}),
    ):
        prepared = pipeline.prepare(source, Bytes(), base / name, **options, **more)
        fly = tokenize_on_read(source, Bytes(), base / f"{name}-index", **options, **more)
        assert np.array_equal(fly.lengths, prepared.lengths)
        asked = pieces(data, fly.lengths)
        if any(asked[2]):
            assert same(fly.read(*asked), prepared.read(*asked))


def test_batches_are_tokenised_in_several_processes(tmp_path):
    fly = tokenize_on_read(
        Records(CHATS), Bytes(), tmp_path, template=Chat(), readers=2, progress=False
    )
    plan = pipeline.Plan(fly, [pipeline.Bucket(4, 128)])
    alone = tokenize_on_read(Records(CHATS), Bytes(), tmp_path, template=Chat())
    for step in range(plan.num_batches()):
        assert same(pipeline.Batches(fly, plan)[step], pipeline.Batches(alone, plan)[step])
    assert pickle.loads(pickle.dumps(fly)).fingerprint == alone.fingerprint
    fly.close()
    assert same(fly[3], alone[3])
    fly.close()


def test_an_index_of_something_else_is_refused(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one\ntwo\n")
    fly = tokenize_on_read(TextFiles(path), Bytes(), tmp_path / "index", progress=False)
    stored = {each.name for each in (tmp_path / "index").iterdir()}
    assert {name for name in stored if not name.startswith(".")} == {"counts.npy", "index.json"}
    with pytest.raises(ValueError, match="made with another tokenizer"):
        tokenize_on_read(TextFiles(path), Bytes(end=False), tmp_path / "index")
    path.write_text("one\nthree\n")
    with pytest.raises(ValueError, match="line 2 has 7 tokens, and had 5 when it was measured"):
        pickle.loads(pickle.dumps(fly))[1]  # as a worker has it, which opens the file anew
    with pytest.raises(ValueError, match="made with another source"):
        tokenize_on_read(TextFiles(path), Bytes(), tmp_path / "index")
    with pytest.raises(ValueError, match="the source is empty"):
        tokenize_on_read(Records([]), Bytes(), tmp_path / "none")
