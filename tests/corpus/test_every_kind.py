"""What holds for every kind of corpus: its pieces, and its two views of a split."""

import copy
import json
import pickle

import hypothesis
import numpy as np
import pytest
from etils import epath
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline import Bucket, Corpora, Corpus, Feature, Masked, Plan, load
from pipeline.corpus import INPUTS, Examples, duplicates, prepare
from pipeline.corpus.description import describe, make_corpus
from pipeline.history import read_history, write_history
from pipeline.text import ragged
from pipeline.text.sources import Records
from pipeline.text.tokenizers import Bytes
from tests.corpus.kinds import FORMATS, KINDS, SIZES, ids_of, make, require_read
from tests.loading.definition import require_same


@pytest.fixture(scope="module", params=KINDS)
def whole(request, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ragged, "TOKENS_PER_PART", 200)  # several parts
        return make(request.param, tmp_path_factory.mktemp("whole") / request.param)


def columns_of(corpus):
    """The lengths, as one column for each side."""
    return np.reshape(corpus.lengths, (len(corpus), -1))


picks = st.lists(
    st.tuples(st.integers(0, 10**4), st.floats(0, 1), st.floats(0, 1), st.integers(0, 9)),
    max_size=20,
)


# Of each example, the end, which is seldom drawn.
@hypothesis.example([(number, 0.97, 1.0, number % 3) for number in range(80)], 1)
@given(picks, st.integers(0, 3))
@settings(max_examples=20)
def test_a_piece_is_that_of_the_whole_example_whatever_else_is_read(whole, picks, epoch):
    for side, lengths in zip(
        whole.sides.values(), columns_of(whole).T.astype(int).tolist(), strict=True
    ):
        drawn = []
        for number, at, share, more in picks:
            example = number % len(whole)
            start = int(at * lengths[example])
            size = int(share * (lengths[example] - start))
            drawn.append((example, start, size, size and size + more))
        pieces = np.array(drawn, int).reshape(-1, 4).T
        # Pieces of joined corpora may be of several epochs.
        several = isinstance(whole, Corpora)
        epochs = [epoch + number % 2 * several for number in range(len(picks))]
        wholes = [
            side.read([example], [0], [lengths[example]], epoch=now)
            for example, now in zip(pieces[0], epochs, strict=True)
        ]
        require_read(side, *pieces, wholes, epoch=epochs if several else epoch)


@pytest.mark.parametrize("kind", ["arrays", "cached", "weighted", "weighted cached", *FORMATS])
def test_examples_are_the_arrays_they_were_made_of(kind, tmp_path):
    corpus = make(kind, tmp_path / "corpus")
    for example, ids in zip(corpus, ids_of(SIZES), strict=True):
        assert example["inputs"].tolist() == ids[:-1].tolist()
        assert example["targets"].tolist() == ids[1:].tolist()
        if "weighted" in kind:
            assert example["loss_weights"].tolist() == (ids[1:] / 7).astype(np.float32).tolist()
    lengths = np.maximum(SIZES - 1, 0)
    assert corpus.lengths.tolist() == lengths.tolist()
    assert (corpus.num_tokens, corpus.vocab_size) == (lengths.sum(), 99)
    buckets = [Bucket(4, 24), Bucket(4, 40)]
    assert Plan(corpus, buckets).fingerprint == Plan(lengths, buckets).fingerprint
    for again in (pickle.loads(pickle.dumps(corpus)), copy.deepcopy(corpus)):
        assert again.fingerprint == corpus.fingerprint
    with load(corpus, buckets=[Bucket(4, 48)], num_epochs=1) as loader:
        assert sum(int((batch["inputs_segment_ids"] > 0).sum()) for batch in loader) == sum(lengths)
    corpus.verify()


# ---- joined


def test_several_corpora_have_sums_that_all_of_them_know_and_begin_with_the_first(tmp_path):
    one, other, mapped = (
        make(kind, tmp_path / kind, SIZES[:30]) for kind in ("arrays", "weighted", "npy")
    )
    corpora = Corpora({"one": one, "other": other})
    assert corpora.num_learnt == one.num_learnt + other.num_learnt > 0
    assert (
        Corpora({**corpora.corpora, "mapped": mapped}).begin(60).fingerprint == corpora.fingerprint
    )
    assert corpora.begin(30).fingerprint == Corpora({"one": one}).fingerprint == one.fingerprint
    both = Corpora({"one": one, "mapped": mapped})
    assert mapped.num_learnt is both.num_learnt is both.files is None
    text = make("masked", tmp_path / "text").corpus
    assert Corpora({"a": text, "b": text}).text_bytes == 2 * text.text_bytes > 0


def test_what_differs_in_kind_task_or_tokenizer_is_not_joined(pairs, corpus, tmp_path):
    inputs = Examples([[1, 2]], vocab_size=1000, task=INPUTS)
    text = prepare(Records(["a"]), Bytes(), tmp_path, progress=False)
    for other, what in ((pairs, ""), (inputs, "task inputs"), (text, "tokenizer bytes-begin-end")):
        for several in ({"a": other, "b": corpus}, {"b": corpus, "a": other}):
            with pytest.raises(ValueError, match=f"{what}.* that are read as one must agree"):
                Corpora(several)


# ---- split


def numbers_of(view):
    """The numbers that the examples of a view have in the corpus."""
    if isinstance(view, Corpora):
        firsts = np.cumsum([0, *(len(each.corpus) for each in view.members)])
        pairs = zip(view.members, firsts.tolist(), strict=False)
        return np.concatenate([part.numbers + first for part, first in pairs])
    return view.numbers


@given(share=st.floats(0.15, 0.85))
@settings(max_examples=15)
def test_each_example_is_in_one_of_both_with_its_tokens(whole, share):
    views = whole.split(hold_out=share)
    assert sorted(np.concatenate([*map(numbers_of, views)])) == list(range(len(whole)))
    assert len({whole.fingerprint, *(view.fingerprint for view in views)}) == 3
    for view in views:
        numbers = numbers_of(view)
        assert len(view) == len(numbers)
        assert view.lengths.tolist() == whole.lengths[numbers].tolist()
        assert view.num_tokens == view.lengths.sum()
        assert view.vocab_size == whole.vocab_size
        if whole.files is not None:  # also those of which the view has no example
            files = np.repeat(range(len(whole.files)), whole.files)[numbers]
            assert view.files.tolist() == np.bincount(files, minlength=len(whole.files)).tolist()
        for at, number in enumerate(numbers[:5].tolist()):
            for mine, theirs, size in zip(
                view.sides.values(), whole.sides.values(), columns_of(view)[at], strict=True
            ):
                assert mine.weighted == theirs.weighted
                read = mine.read([at], [0], [size], epoch=2)
                require_same(read, theirs.read([number], [0], [size], epoch=2))


def test_which_examples_are_held_out_is_the_same_for_ever(tmp_path):
    corpus = Corpus.from_arrays([[1, 2]] * 1000, tmp_path / "large")
    assert corpus.split()[1].numbers.tolist() == [203, 254, 366, 410, 503, 543, 566, 821, 930, 986]
    most, held_out = corpus.split(0.5)
    assert len(most) == pytest.approx(500, abs=40)
    assert {*corpus.split()[1].numbers.tolist()} <= {*held_out.numbers.tolist()}
    small = Corpus.from_arrays([[1, 2]] * 600, tmp_path / "small")  # before it grew
    assert small.split()[1].numbers.tolist() == [203, 254, 366, 410, 503, 543, 566]
    for view in corpus.split(0.4):  # all are copies of one, and those of a view of its first
        assert duplicates(view).tolist() == list(range(1, len(view)))
    for wrong in (0, 1, "a tenth"):
        with pytest.raises(ValueError, match=r"hold_out is .*; it must be a number above 0"):
            corpus.split(wrong)
    with pytest.raises(ValueError, match=r"none of the 1,000 examples is held out; give"):
        corpus.split(1e-9)


def test_a_view_is_made_again_from_its_description(tmp_path):
    corpus = make("masked", tmp_path).corpus
    train, held_out = corpus.split(0.3)
    views = [Masked(corpus, rate=0.3, seed=5), train, Masked(held_out)]
    views.append(Masked(corpus, seed=3).split(0.3)[0])
    for view in views:
        again = make_corpus(json.loads(json.dumps(describe(view))))
        assert (again.fingerprint, again.directory) == (view.fingerprint, tmp_path)
        require_same(again[0], view[0])
    middle = make("middle", tmp_path / "causal")
    again = make_corpus(json.loads(json.dumps(describe(middle))))
    assert again.fingerprint == middle.fingerprint
    require_same(again[0], middle[0])


def test_a_run_on_splits_of_text_and_of_sides_is_planned_again(tmp_path):
    text = Corpus.from_arrays([[1, 2, 3]] * 30, tmp_path / "text")
    columns = {"tokens": [[1, 2]] * 20, "pixel": [[7, 8, 9]] * 20}
    pixels = {"pixel": Feature("patches", dtype="uint8")}
    sides = Corpus.from_arrays(columns, tmp_path / "sides", features=pixels)
    both = Corpora({"text": text, "sides": sides})
    train, held_out = text.split(0.3)
    for number, view in enumerate(
        [both, *both.split(0.3), Corpora({"text": train, "sides": sides, "rest": held_out})]
    ):
        plan = Plan(
            view, [Bucket(2, {"inputs": 8, "patches": 9})], cost={"inputs": 1, "patches": 1}
        )
        directory = epath.Path(tmp_path / str(number))
        write_history(directory, view, plan)
        corpus, again = read_history(directory)
        assert (corpus.fingerprint, again.fingerprint) == (view.fingerprint, plan.fingerprint)
