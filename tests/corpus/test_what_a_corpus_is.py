"""Corpora whose members are others': their memory, their names, and what describes them."""

import json
import pickle

import numpy as np
import pytest

from pipeline import (
    Bucket,
    Corpora,
    Corpus,
    Examples,
    Feature,
    FillInTheMiddle,
    InPlace,
    Masked,
    Plan,
    prepare,
)
from pipeline.corpus import CAUSAL, INPUTS, Joined
from pipeline.corpus.description import DESCRIPTION, describe, make_corpus
from pipeline.corpus.interface import SingleCorpus
from pipeline.corpus.opening import open_corpus
from pipeline.corpus.stored.directory import write_entries
from pipeline.fs import as_path
from pipeline.history import write_history
from pipeline.text.sources import Records
from pipeline.text.tokenizers import Bytes
from tests.corpus.files import few_bytes, require_equal

COUNT = 1 << 22
PATCHES = {"patches": Feature("patches", dtype="uint8")}


class Ones(SingleCorpus):
    """Many examples of two positions, of which nothing is ever read."""

    vocab_size, identity = 9, {"tokens": "ones"}

    def __init__(self, task):
        self.task, self.lengths = task, np.full(COUNT, 2, np.uint32)

    def arguments(self):
        return {"task": self.task}


@pytest.mark.parametrize(
    "make",
    [
        lambda corpus: corpus.split(0.3)[0],
        lambda corpus: corpus.split(0.3)[1],
        lambda corpus: FillInTheMiddle(corpus, 0.5),
        lambda corpus: Corpora({"a": corpus}),
        lambda corpus: FillInTheMiddle(corpus, 0.5).split(0.3)[0].covering(),
    ],
)
def test_a_view_takes_little_memory_and_no_array_of_all_examples_travels(make):
    corpus = Ones(CAUSAL)
    with few_bytes(18 * COUNT):  # of which 4 are lengths, and 4 are numbers
        view = make(corpus)
        assert len(view.lengths) == len(view)
    pickled = pickle.dumps(view)
    assert len(pickled) < 2000
    again = pickle.loads(pickled)
    np.testing.assert_array_equal(again.lengths, view.lengths)
    assert again.fingerprint == view.fingerprint


def test_a_masked_view_pickles_without_the_lengths():
    assert len(pickle.dumps(Masked(Ones(INPUTS)))) < 2000


def sides_with(name, value):
    """Examples of a side with this name, without tokens."""
    features = {"v": Feature(name, dtype="uint8"), "w": Feature("frames", dtype="uint8")}
    return Examples({"v": [[value]], "w": [[1]]}, features=features, loss="frames")


@pytest.mark.parametrize("name", ["loss", "features", "split", "decoded", "masked"])
def test_a_side_cannot_have_a_name_that_its_identity_has(name, tmp_path):
    with pytest.raises(ValueError, match=f"a side is named '{name}', which has another meaning"):
        sides_with(name, 1)
    features = {"v": Feature(name, dtype="uint8")}
    with pytest.raises(ValueError, match=f"a side is named '{name}', which has another meaning"):
        Corpus.from_arrays({"tokens": [[1, 2]], "v": [[1]]}, tmp_path, features=features)
    with pytest.raises(ValueError, match=f"a side is named '{name}', which has another meaning"):
        prepare(Records([{"text": "a", "v": [1]}]), Bytes(), tmp_path, features=features)
    assert {path.name for path in tmp_path.iterdir()} <= {".lock"}
    assert sides_with("lost", 1).fingerprint != sides_with("lost", 2).fingerprint


@pytest.mark.parametrize("name", ["../outside", "/etc", "a/b", "", 3])
def test_the_sides_of_a_directory_are_inside_it(name, tmp_path):
    directory = as_path(tmp_path)
    for folder in ("corpus/inputs", "outside"):
        Corpus.from_arrays([[1, 2, 3]], tmp_path / folder, task=INPUTS)
    entries = {"kind": "sides", "sides": ["inputs", name], "loss": None}
    write_entries(directory / "corpus" / DESCRIPTION, entries)
    with pytest.raises(ValueError, match=r"a side is named .*; a name has letters, digits and _"):
        open_corpus(tmp_path / "corpus")


def test_a_description_names_directories_from_where_it_is(tmp_path):
    columns = {"tokens": [[1, 2, 3]] * 20, "patches": [[4, 5]] * 20}
    sides = Corpus.from_arrays(columns, tmp_path / "run" / "sides", features=PATCHES)
    text = Corpus.from_arrays([[1, 2, 3]] * 20, tmp_path / "text")
    both = Corpora({"kind": sides, "text": text.split(0.4)[0]})
    described = describe(both, tmp_path / "run")
    stored = {"kind": "stored"}
    assert described == {
        "kind": "corpora",
        "corpora": {
            "kind": {
                "kind": "sides",
                "sides": {
                    "inputs": {**stored, "directory": "sides/inputs"},
                    "patches": {**stored, "directory": "sides/patches"},
                },
                "loss": None,
            },
            "text": {
                "kind": "split",
                "corpus": {**stored, "directory": f"{tmp_path}/text"},
                "hold_out": 0.4,
                "held_out": False,
            },
        },
    }
    (tmp_path / "run").rename(tmp_path / "moved")
    again = make_corpus(json.loads(json.dumps(described)), tmp_path / "moved")
    assert again.fingerprint == both.fingerprint
    assert (
        describe(open_corpus(tmp_path / "moved" / "sides"), tmp_path / "moved")
        == (described["corpora"]["kind"])
    )


def test_what_is_in_memory_or_unknown_has_no_description(tmp_path):
    examples = Examples([[1, 2, 3]] * 9)
    with pytest.raises(ValueError, match=r"has no directory, .* write it with Corpus.from_arrays"):
        describe(examples.split(0.3)[0])
    with pytest.raises(ValueError, match=r"audit and show could not plan .* Corpus.from_arrays"):
        write_history(tmp_path, examples, Plan(examples, [Bucket(1, 8)]))
    with pytest.raises(ValueError, match="no kind of corpus 'sorted'; did you mean 'stored'"):
        make_corpus({"kind": "sorted"})
    with pytest.raises(ValueError, match="describes no corpus; it must have a 'kind'"):
        make_corpus({"directory": "corpus"})


# ---- joined on one side

SIZES = [5, 3, 1, 8]
IDS = [np.arange(3, 3 + size) for size in SIZES]
SCORED = {"score": Feature("targets", dtype="float32"), "reward": Feature("example")}


def scored():
    """Examples of the same lengths, with features."""
    columns = {"tokens": [0 * ids for ids in IDS], "score": [ids / 2 for ids in IDS]}
    return Examples(columns | {"reward": [1.0, 2.0, 3.0, 4.0]}, features=SCORED)


def test_a_joined_corpus_has_the_tokens_of_one_and_the_features_of_all(tmp_path):
    np.save(tmp_path / "ids.npy", np.concatenate(IDS))
    np.save(tmp_path / "ends.npy", np.cumsum([0, *SIZES]))
    features = {"kept": Feature("example", dtype="int32")}
    columns = {"tokens": IDS, "score": [ids / 2 for ids in IDS], "reward": [1.0, 2, 3, 4]}
    due = Examples(columns | {"kept": range(4)}, features=SCORED | features)
    more = Examples({"tokens": IDS, "kept": range(4)}, features=features)
    in_place = InPlace.npy(tmp_path / "ids.npy", tmp_path / "ends.npy")
    stored = Corpus.from_arrays(IDS, tmp_path / "stored")
    for tokens in (stored, in_place, Examples(IDS)):
        both = Joined(tokens, scored(), more)
        for copy in (both, pickle.loads(pickle.dumps(both))):
            require_equal(copy, due)
            assert copy.features.keys() == due.features.keys()
        assert both.fingerprint not in (tokens.fingerprint, Joined(tokens, more).fingerprint)
        assert Joined(tokens, more, scored()).fingerprint == both.fingerprint
        assert Joined(Joined(tokens, more), scored()).fingerprint == both.fingerprint
        assert Plan(both, [Bucket(1, 8)]).fingerprint == Plan(tokens, [Bucket(1, 8)]).fingerprint
    copied = Corpus.from_arrays(
        {"tokens": IDS, "kept": range(4)}, tmp_path / "copied", features=features
    )
    both = Joined(stored, copied).split(0.5)[0]
    assert make_corpus(json.loads(json.dumps(describe(both)))).fingerprint == both.fingerprint


def test_what_cannot_be_joined_is_refused():
    sides = Examples({"tokens": IDS, "patches": IDS}, features=PATCHES)
    for others, said in (
        ([Examples(IDS[:3])], "has other lengths than"),
        ([scored(), scored()], "have a feature 'reward'; give them different names"),
        ([sides], "has several sides; join"),
    ):
        with pytest.raises(ValueError, match=said):
            Joined(Examples(IDS), *others)
