"""Examples with one key are held out together, in any order and in any other corpus."""

import datetime
import pickle

import numpy as np
import pytest

from pipeline import Corpora, Corpus, Examples, Feature, Masked, prepare
from pipeline.corpus import INPUTS, describe, make_corpus
from pipeline.text.sources import Csv, Records
from pipeline.text.tokenizers import Bytes

KEY = {"talk": Feature("example", key=True)}


def records(talks, seed=0):
    """Turns of these conversations, in random order."""
    turns = [{"text": "ab", "talk": talk} for talk in talks for _ in range(3)]
    return [turns[at] for at in np.random.default_rng(seed).permutation(len(turns))]


def keys_of(view, turns):
    return {turns[number]["talk"] for number in view.numbers.tolist()}


@pytest.mark.parametrize("name", ["talk {}", "{}"])
def test_a_conversation_is_on_one_side_the_same_in_any_order_and_later_corpora(name, tmp_path):
    talks, sides = [name.format(n) for n in range(60)], []
    for seed, some in enumerate((talks, talks[::-1], talks[:30])):
        turns = records(some, seed)
        corpus = prepare(
            Records(turns), Bytes(), tmp_path / f"{seed}", features=KEY, progress=False
        )
        train, held_out = corpus.split(0.3, by="talk")
        assert len(train) + len(held_out) == len(turns)
        assert not keys_of(train, turns) & keys_of(held_out, turns)
        sides.append(keys_of(held_out, turns))
        for again in (pickle.loads(pickle.dumps(train)), make_corpus(describe(train))):
            assert (again.fingerprint, len(again)) == (train.fingerprint, len(train))
        assert train.fingerprint != corpus.split(0.3)[0].fingerprint
    assert sides[0] == sides[1]
    assert 8 < len(sides[0]) < 30
    assert sides[2] == sides[0] & {*talks[:30]}


def test_a_key_is_kept_in_memory_in_mixtures_and_in_views():
    talks = np.arange(90) // 3
    numbers = Examples({"tokens": [[1, 2]] * 90, "talk": talks}, features=KEY)
    texts = Examples({"tokens": [[1, 2]] * 90, "talk": [*map(str, talks)]}, features=KEY)
    assert numbers.fingerprint == texts.fingerprint
    due = texts.split(0.3, by="talk")[1].numbers.tolist()
    assert {talk for at, talk in enumerate(talks) if at in due} == {*talks[due].tolist()}
    assert len(due) == 3 * len({*talks[due].tolist()})
    both = Corpora({"a": texts, "b": numbers}).split(0.3, by="talk")[1]
    assert [member.numbers.tolist() for member in both.members] == [due, due]
    inputs = Examples({"tokens": [[1, 2]] * 90, "talk": talks}, features=KEY, task=INPUTS)
    assert Masked(inputs, mask_id=9).split(0.3, by="talk")[1].numbers.tolist() == due
    plain = Feature("example", dtype="int16")
    for given in (plain, Feature("example", dtype="int32"), Feature("example", dtype="uint8")):
        examples = Examples({"tokens": [[1, 2]] * 90, "talk": talks}, features={"talk": given})
        held = examples.split(0.3, by="talk")[1].numbers.tolist()
        assert len(held) == 3 * len({*talks[held].tolist()})
        assert (
            held
            == Examples({"tokens": [[1, 2]] * 90, "talk": talks}, features={"talk": plain})
            .split(0.3, by="talk")[1]
            .numbers.tolist()
        )


def test_the_key_is_read_once_and_kept_beside_the_corpus(tmp_path, monkeypatch):
    columns = {"tokens": [[1, 2]] * 50, "talk": np.arange(50) // 5}
    corpus = Corpus.from_arrays(columns, tmp_path / "corpus", features=KEY)
    due = corpus.split(0.4, by="talk")[0].numbers.tolist()
    monkeypatch.setattr(Corpus, "_read_examples", None)
    again = Corpus.open(tmp_path / "corpus")
    assert again.split(0.4, by="talk")[0].numbers.tolist() == due


def test_what_is_no_key_is_refused(tmp_path):
    score = {"score": Feature("targets")}
    corpus = Examples({"tokens": [[1, 2]], "score": [[0.5, 1]]}, features=score)
    for by in ("talk", "score"):
        with pytest.raises(ValueError, match=f"by is '{by}'.*it must be a feature of examples"):
            corpus.split(0.3, by=by)
    for value in (0.5, 1.0, None, ["a"], True, "", " ", b"", {"id": 1}, datetime.date(2024, 1, 1)):
        with pytest.raises(
            ValueError, match=r"is .* \(\w+\); a key is a text or a whole number, and"
        ):
            Examples({"tokens": [[1, 2]], "talk": [value]}, features=KEY)
    for options in ({"of": "inputs"}, {"of": "example", "dtype": "int32"}):
        with pytest.raises(ValueError, match="a key is of an 'example', and has none of these"):
            Feature(**options, key=True)
    same = Corpus.from_arrays({"tokens": [[1, 2]] * 9, "talk": [3] * 9}, tmp_path, features=KEY)
    with pytest.raises(ValueError, match="9 examples, which have 1 value of 'talk', would all be"):
        same.split(0.5, by="talk")
    two = Examples({"tokens": [[1, 2]] * 9, "talk": [1, 2] * 4 + [1]}, features=KEY)
    with pytest.raises(ValueError, match="talk none of the 9 examples, which have 2 values of 't"):
        two.split(0.001, by="talk")
    with pytest.raises(ValueError, match=r"give an entry of one a field of its own"):
        Examples({"tokens": [[1, 2]], "meta.id": [1]}, features={"meta.id": KEY["talk"]})


def test_rows_of_csv_without_a_key_are_refused_not_put_on_one_side(tmp_path):
    (tmp_path / "a.csv").write_text("text,talk\nab,one\ncd,\n")
    with pytest.raises(ValueError, match=r"a\.csv, line 3 .*talk is '' \(str\); a key is a text"):
        prepare(Csv(tmp_path / "a.csv"), Bytes(), tmp_path / "c", features=KEY)


def test_a_part_of_a_split_is_split_again_by_another_hash(tmp_path):
    columns = {"tokens": [[1, 2]] * 10_000, "talk": [f"u{n // 5}" for n in range(10_000)]}
    corpus = Corpus.from_arrays(columns, tmp_path / "corpus", features=KEY)
    first = {share: corpus.split(share, by="talk") for share in (0.2, 0.4)}
    for part in first[0.2]:
        for share in (0.1, 0.25, 0.5):
            train, held_out = part.split(share, by="talk")
            assert abs(len(held_out) / len(part) - share) < 0.04
            talks = [
                {*(view.find_unsplit(np.arange(len(view)))[0] // 5)} for view in (train, held_out)
            ]
            assert not talks[0] & talks[1]
            third = held_out.split(0.5, by="talk")[1]
            assert abs(len(third) / len(held_out) - 0.5) < 0.12
            again = make_corpus(describe(third))
            assert again.numbers.tolist() == third.numbers.tolist()
    # What is cached for one corpus is not read for another.
    others = [first[share][0].split(0.5, by="talk")[0] for share in (0.2, 0.4)]
    assert others[0].fingerprint != others[1].fingerprint
    halves = [other.split(0.3, by="talk") for other in others]
    assert [sum(map(len, half)) for half in halves] == [*map(len, others)]


def test_numbers_are_those_in_the_view_that_was_split():
    corpus = Examples([[1, n] for n in range(400)])
    train = corpus.split(0.3)[0]
    held_out = train.split(0.3)[1]
    assert held_out.fingerprint != corpus.split(0.3)[1].fingerprint
    whole, _ = held_out.find_unsplit(np.arange(len(held_out)))
    for at, number in enumerate(held_out.numbers.tolist()):
        tokens = {held_out[at]["targets"][0], train[number]["targets"][0], whole[at]}
        assert len(tokens) == 1


def test_advice_for_a_split_with_an_empty_side_does_not_name_the_share_given():
    corpus = Examples({"tokens": [[1, 2]] * 2, "talk": [2, 3]}, features=KEY)
    with pytest.raises(ValueError, match=r"hold_out is 0\.1.*nearer to one half, or split a large"):
        corpus.split(0.1, by="talk")


def test_a_corpus_without_the_key_is_named():
    has = Examples({"tokens": [[1, 2]] * 9, "talk": range(9)}, features=KEY)
    with pytest.raises(ValueError, match="the corpus 'b': by is 'talk'; there is none to choose;"):
        Corpora({"a": has, "b": Examples([[1, 2]] * 9)}).split(0.5, by="talk")


def test_a_record_without_a_key_is_not_advised_to_have_a_fill(tmp_path):
    with pytest.raises(ValueError, match="name the feature like its field, or give the record a k"):
        prepare(Records([{"text": "ab"}]), Bytes(), tmp_path / "a", features=KEY)
