"""Corpora without a copy read what a corpus on disk would."""

import pickle
from functools import partial

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import feather

import pipeline
from pipeline import InPlace, Masked
from pipeline.corpus import INPUTS, tokenize_on_read
from pipeline.text.sources import Records, TextFiles
from pipeline.text.templates import Answer, Chat
from pipeline.text.tokenizers import Bytes
from tests.corpus.files import read_all, require_equal
from tests.corpus.kinds import FORMATS, SIZES, ids_of, in_place
from tests.loading.definition import require_same

TEXTS = [f"text {number} " + "é" * (number % 9) for number in range(60)]
CHATS = [{"messages": [{"role": role, "content": text} for role in ("user", "assistant")]}
         for text in TEXTS]  # fmt: skip


@pytest.mark.parametrize("kind", FORMATS)
def test_tokens_in_place_can_be_masked(kind, tmp_path):
    plain = in_place(kind, tmp_path, ids_of(SIZES), INPUTS)
    view = Masked(plain)
    assert plain.lengths.tolist() == SIZES.tolist()
    assert "InPlace" in str(plain)
    targets = read_all(view, plain.lengths)["targets"]
    assert np.array_equal(targets, np.concatenate(ids_of(SIZES)))
    assert view.identity.items() > plain.identity.items()


def test_what_is_no_list_of_ids_is_refused(tmp_path):
    wanted = {"features": {"points": pipeline.Feature("inputs", shape=(2,))}}

    def of_points(*values):
        points = pa.array([values], pa.list_(pa.list_(pa.int32(), 2)))
        return {"input_ids": [[1, 2, 3]], "points": points}

    for columns, options, sentence in (
        ({"input_ids": [[1.0]]}, {}, "row 0 on, input_ids holds list<.*double>; tokens"),
        ({"input_ids": [[1], None]}, {}, "input_ids has missing entries"),
        ({"input_ids": [[1, None]]}, {}, "input_ids has missing entries"),
        ({"text": ["a"]}, {}, "has no column 'input_ids'"),
        (of_points([1, 2], None, [3, 4]), wanted, "points has missing entries"),
        (of_points([1, 2], [3, 4]), wanted, "example 0 .* has 4 numbers for 3 tokens"),
        ({"input_ids": [[1]], "points": [[5]]}, wanted, "a shape as fixed-size lists"),
        ({"input_ids": [[1, 5]]}, {"vocab_size": 5}, "example 0 .* holds the id 5; ids must be"),
        ({"input_ids": [[1, 2], [1, -100]]}, {}, "example 1 .* holds the id -100; ids must be"),
    ):
        feather.write_feather(pa.table(columns), str(tmp_path / "a.arrow"))
        call = partial(InPlace.arrow, tmp_path / "a.arrow", **options)
        call = call().verify if "holds the id" in sentence else call
        with pytest.raises(ValueError, match=sentence):
            call()
    ids = pa.array([[1]], pa.list_(pa.int32()))
    feather.write_feather(pa.table({"input_ids": ids}), str(tmp_path / "b.arrow"))
    with pytest.raises(ValueError, match=r"'input_ids' of .* holds .*give it the same type in all"):
        InPlace.arrow(str(tmp_path / "*.arrow"))
    tokens, offsets = tmp_path / "tokens.npy", tmp_path / "offsets.npy"
    for some, bounds, sentence in (
        (np.arange(5), [0, 6], "offsets.npy does not hold offsets into 5 tokens"),
        (np.arange(5), [0, 3, 2], "offsets.npy does not hold offsets into 5 tokens"),
        (np.arange(5), [-1, 3], "offsets.npy does not hold offsets into 5 tokens"),
        (np.arange(5), [0], "offsets.npy does not hold offsets into 5 tokens"),
        (np.zeros(3), [0, 3], "shape .3,. and dtype float64; it must be"),
        (np.zeros((3, 1), int), [0, 3], "shape .3, 1. and dtype int64; it must be"),
    ):
        np.save(tokens, some)
        np.save(offsets, bounds)
        with pytest.raises(ValueError, match=sentence):
            InPlace.npy(tokens, offsets)
    tokens.write_text("none")
    with pytest.raises(ValueError, match=r"tokens.npy is not an .npy array"):
        InPlace.npy(tokens, offsets)


@pytest.mark.parametrize(
    ("source", "more"),
    [
        (Records(TEXTS), {}),
        (Records(TEXTS), {"task": INPUTS}),
        (Records(CHATS), {"template": Chat()}),
        (Records(TEXTS), {"template": Answer(prompt="", answer="{text}"), "task": INPUTS}),
        (Records([{"body": text} for text in TEXTS]), {"field": "body"}),
    ],
)
def test_text_on_the_fly_is_what_was_prepared(source, more, tmp_path):
    options = {"progress": False, "num_workers": 0, **more}
    prepared = pipeline.prepare(source, Bytes(), tmp_path / "corpus", **options)
    fly = tokenize_on_read(source, Bytes(), tmp_path / "index", **options)
    require_equal(fly, prepared)
    assert (fly.weighted, fly.vocab_size) == (prepared.weighted, prepared.vocab_size)


def test_batches_are_tokenised_in_several_processes(tmp_path):
    source = Records(CHATS), Bytes(), tmp_path
    fly = tokenize_on_read(*source, template=Chat(), readers=2, progress=False)
    plan = pipeline.Plan(fly, [pipeline.Bucket(4, 128)])
    alone = tokenize_on_read(*source, template=Chat())
    for step in range(plan.num_batches()):
        require_same(pipeline.Batches(fly, plan)[step], pipeline.Batches(alone, plan)[step])
    assert pickle.loads(pickle.dumps(fly)).fingerprint == alone.fingerprint
    fly.close()
    require_same(fly[3], alone[3])
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
    with pytest.raises(ValueError, match="line 2 has 7 tokens, but had 5 when it was indexed"):
        pickle.loads(pickle.dumps(fly))[1]  # as a worker has it, which opens the file anew
    with pytest.raises(ValueError, match="made with another source"):
        tokenize_on_read(TextFiles(path), Bytes(), tmp_path / "index")
    given = [Records(TEXTS[:count], fingerprint="mine") for count in (2, 1)]
    tokenize_on_read(given[0], Bytes(), tmp_path / "mine", progress=False)
    with pytest.raises(ValueError, match="is the index of 2 records, but the source has 1"):
        tokenize_on_read(given[1], Bytes(), tmp_path / "mine")
    with pytest.raises(ValueError, match="the source is empty"):
        tokenize_on_read(Records([]), Bytes(), tmp_path / "none")
