"""Features are read as they were given, from memory, files, a cache and other programs' files."""

import pickle
import shutil
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import feather

import pipeline
from pipeline import Corpora, Corpus, Examples, Feature, InPlace, sources, tokenizers
from pipeline.corpus.stored.parts import read_part
from tests.corpus.files import flip, require_equal
from tests.corpus.kinds import FEATURES, draw_columns

SIZES = [3, 0, 7, 1, 2, 9, 5, 12, 4, 1, 8, 6, 2, 11, 3, 10]
SMALL = {"TOKENS_PER_PART": 30}


def test_features_that_do_not_match_their_corpus_are_not_added_or_opened(tmp_path):
    one, other = (Corpus.from_arrays([[1, 2], [3, id_]], tmp_path / f"{id_}") for id_ in (4, 5))
    a, ab = ({name: Feature("example")} for name in ("a", "ab"))
    both = {"a": [1, 2], "ab": [3, 4]}
    added = one.with_features({"ab": [1, 2]}, features=ab)
    shutil.copytree(one.directory / "features", other.directory / "features")
    for act, sentence in (
        (lambda: one.with_features({"a": [1]}, features=a), "have 1 entries, but the corpus has"),
        (lambda: one.with_features({"a": [1] * 3}, features=a), "have more than 2 entries, one"),
        (lambda: added.with_features({"ab": [1, 2]}, features=ab), "a feature 'ab' already; use"),
        (lambda: one.with_features(both, features=a | ab), "has a feature 'ab' already; open the"),
        (lambda: Corpus.open(one.directory, features=["a"]), "no features were added .* as 'a'"),
        (lambda: Corpus.open(other.directory, features=["ab"]), "it is of another corpus"),
    ):
        with pytest.raises(ValueError, match=sentence):
            act()


def test_features_are_stored_or_added_to_a_finished_corpus(tmp_path, way):
    columns, stored = draw_columns(SIZES), tmp_path / "stored"
    made = Corpus.from_arrays(columns, stored, features=FEATURES)
    assert Corpus.from_arrays(columns, stored, features=FEATURES).fingerprint == made.fingerprint
    base = {name: columns[name] for name in ("tokens", "weights", "logprob")}
    plain = Corpus.from_arrays(base, tmp_path, features={"logprob": FEATURES["logprob"]})
    added = {name: feature for name, feature in FEATURES.items() if name != "logprob"}
    values = {name: columns[name] for name in added}
    corpus = plain.with_features({n: iter(column) for n, column in values.items()}, features=added)
    assert corpus.fingerprint != plain.fingerprint
    assert Corpus.open(tmp_path).fingerprint == plain.fingerprint
    opened = Corpus.open(tmp_path, features=added, **way)
    assert opened.fingerprint == corpus.fingerprint
    examples = Examples(columns, features=FEATURES)
    require_equal(pickle.loads(pickle.dumps(examples)), examples)
    for whole in (Corpus.open(stored, **way), corpus, opened, pickle.loads(pickle.dumps(opened))):
        require_equal(whole, examples)
        assert whole.features == examples.features
        whole.verify()
    assert plain.with_features(values, features=added).fingerprint == corpus.fingerprint
    values["reward"] = [*values["reward"][:-1], 7.0]
    with pytest.raises(ValueError, match="holds other values of"):
        plain.with_features(values, features=added)
    (added_features,) = opened.others
    path = added_features.directory / added_features.manifest.parts[0].file
    file = read_part(path)
    flip(path, path.read_bytes().index(file.columns["routing"].values.tobytes()))
    with pytest.raises(ValueError, match="damaged at"):
        Corpus.open(tmp_path, features=added).verify()


def test_features_of_columns_in_place(tmp_path):
    columns = draw_columns([5, 3, 8, 2])
    for name in ("weights", "half", "offsets"):
        del columns[name]
    wanted = {name: feature for name, feature in FEATURES.items() if name in columns}
    due = Examples(columns, features=wanted)

    def nested(values, kind):
        rows = pa.FixedSizeListArray.from_arrays(pa.array(np.ravel(np.concatenate(values))), kind)
        return pa.LargeListArray.from_arrays(np.cumsum([0, *map(len, values)]), rows)

    flags = pa.FixedSizeListArray.from_arrays(pa.array(np.concatenate(columns["flags"])), 5)
    stored = {"ids": columns["tokens"], "logprob": columns["logprob"], "flags": flags}
    stored |= {name: nested(columns[name], size) for name, size in (("routing", 6), ("seen", 3))}
    table = pa.table(stored | {"reward": columns["reward"]})
    feather.write_feather(table, str(tmp_path / "a.arrow"), compression="uncompressed")
    corpus = InPlace.arrow(tmp_path / "a.arrow", column="ids", features=wanted)
    for copy in (corpus, pickle.loads(pickle.dumps(corpus))):
        require_equal(copy, due)
    narrow = {"routing": Feature("inputs", dtype="int8", shape=6)}
    with pytest.raises(ValueError, match=r"routing of .* holds \d+; int8 holds -128 to 127"):
        InPlace.arrow(tmp_path / "a.arrow", column="ids", features=narrow)[2]


def test_records_and_templates_give_features(tmp_path):
    records = [{"text": "ab" * (at % 4), "reward": at / 2} for at in range(20)]
    source = sources.Records(records), tokenizers.Bytes(), tmp_path

    def template(record):
        return [("Q", 0.0, {"turn": 1}), (record["text"] + "x", 1.0, {"turn": 2})]

    reward = Feature("example", dtype="float32")
    features = {"reward": reward, "turn": Feature("targets", dtype="int8")}
    corpus = pipeline.prepare(*source, template=template, features=features, num_workers=0)
    corpus.verify()
    # Begin mark, Q, ab, x, end mark.
    assert corpus[1]["turn"].tolist() == [1, 2, 2, 2, 2]
    assert [float(reward) for reward in corpus.read_examples([3, 19])["reward"]] == [1.5, 9.5]
    with pytest.raises(ValueError, match="another features"):
        pipeline.prepare(*source, template=template)
    with pytest.raises(ValueError, match="record 0: age is no field of it"):
        pipeline.prepare(*source[:2], tmp_path / "age", features={"age": reward})


def test_what_is_joined_are_corpora_that_agree_on_features_or_have_a_fill():
    for dtype, fill in (
        ("int32", 2**31 - 1),
        ("bfloat16", 0.1),
        ("float32", -np.inf),
        (bool, True),
    ):
        assert Feature("example", dtype=dtype, fill=fill).filled(1) == np.array(fill, dtype)
    plain = Examples({"tokens": [[1, 2]], "reward": [1.0]}, features={"reward": Feature("example")})

    def more(**features):
        """Another corpus with these features, and that of the first one."""
        features = {**plain.features, **features}
        columns = {"tokens": [[1, 2]], **{name: [1.0] for name in features}}
        return Examples(columns, features=features)

    turn, reward = Feature("example"), Feature("example", dtype="float16")
    corpora: Any
    for corpora, sentence in (
        ({"plain": plain, "more": more(turn=turn)}, "plain has no feature 'turn', which more has"),
        ({"plain": plain, "more": more(reward=reward)}, "'reward' of more is .* that of plain is"),
        ([plain], "corpora is .* it must be a dict of corpora by name"),
        ({"a": plain, "b": "place"}, r"corpora\['b'\] is 'place', a str; it must be a corpus, op"),
        ({"": plain}, "a name of corpora is empty"),
        ({0: plain, 1: plain}, "a name of corpora is 0, a int; it must be a text"),
    ):
        with pytest.raises((ValueError, TypeError), match=sentence):
            Corpora(corpora)


@pytest.mark.parametrize(
    ("columns", "features", "sentence"),
    [
        ({"tokens": [[1, 2]]}, {"a": Feature("example")}, "the feature 'a' has no column"),
        ({"tokens": [[1, 2]], "a": [1]}, {}, "the column 'a' has no feature"),
        ({"tokens": [[1, 2]], "labels": [[-100, 2]]}, {}, "as that: labels != -100"),
        ({"tokens": [[1, 2]], "completion_mask": [[0, 1]]}, {}, "column 'weights' alone, a number"),
        ({"tokens": [[1, 2]], "attention_mask": [[1, 1]]}, {}, "as that; or drop the padding"),
        ([[1, 2]], {"a": Feature("example")}, "features are a, but only tokens are given"),
        ({"tokens": [[1, 2]], "a": [[1]]}, {"a": Feature("inputs")}, "have shape .2,., one value"),
        ({"tokens": [[1, 2]], "a": [[1, 2]]}, {"a": Feature("example")}, "have shape .., not .2,."),
        ({"tokens": [[1]], "a": [0.5]}, {"a": Feature("example", dtype="int8")}, "from float64"),
        ({"tokens": [[1]], "a": [300]}, {"a": Feature("example", dtype="uint8")}, "holds 300"),
        ({"tokens": [[1]], "a": [[3.4e38]]}, {"a": Feature("inputs", dtype="bfloat16")}, "3.39e"),
        ({"tokens": [[1]], "a": [np.nan]}, {"a": Feature("example")}, "example 0 cannot hold NaN"),
        ({"tokens": [[], [1]], "a": [[], [1]]}, {"a": Feature("inputs")}, "example 0 is an empty"),
        ({"a": [[], [1]]}, {"a": Feature("edges")}, "a is an empty list, .* give the feature a dt"),
        ({"tokens": [[1], [2]], "a": [1]}, {"a": Feature("example")}, "'a' ends after 1 example,"),
        ({"tokens": [[1]], "inputs": [1]}, {"inputs": Feature("example")}, "named 'inputs'"),
        ({"tokens": [[1, 2]], "weights": [[1]]}, {}, "of example 0 must have shape .2,., one"),
        ({"tokens": [[1, 2]], "weights": [[1, -1]]}, {}, r"weights of example 0 cannot hold -1\.0"),
    ],
)  # fmt: skip
def test_columns_that_do_not_match_are_refused(columns, features, sentence):
    with pytest.raises((ValueError, TypeError), match=sentence):
        Examples(columns, features=features)
