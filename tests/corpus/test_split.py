"""Splits: each example is in one of two views, which its number alone decides."""

import pickle
import tempfile

import numpy as np
import pytest
from etils import epath
from hypothesis import given, settings
from hypothesis import strategies as st

import pipeline
from pipeline import Batches, Bucket, Corpora, Corpus, Masked, Pairs, Plan, SpanCorruption
from pipeline.corpus import INPUTS, duplicates
from pipeline.corpus.views import view_of
from pipeline.history import read_history, write_history
from pipeline.text import ragged
from pipeline.text.sources import Records
from pipeline.text.tokenizers import Bytes

KINDS = ["arrays", "weighted", "in_place", "on_read", "masked", "pairs", "corrupted", "joined"]
SIZES = np.random.default_rng(0).integers(1, 30, 80)


def make(kind, directory, sizes=SIZES):
    ids = [np.arange(3, 3 + size) for size in sizes]
    records = Records(["abcdefghijklmnopqrstuvwxyzabcdefg"[: size - 1] for size in sizes])
    match kind:
        case "arrays":
            return Corpus.from_arrays(ids, directory)
        case "weighted":
            return Corpus.from_arrays(ids, directory, weights=[each / 7 for each in ids])
        case "in_place":
            np.save(f"{directory}.npy", np.concatenate(ids))
            np.save(f"{directory}-offsets.npy", np.cumsum([0, *sizes]))
            return pipeline.InPlace.npy(f"{directory}.npy", f"{directory}-offsets.npy")
        case "on_read":
            return pipeline.corpus.tokenize_on_read(records, Bytes(), directory, progress=False)
        case "pairs":
            return Pairs.from_arrays(ids, ids[::-1], directory)
        case "joined":
            both = {"one": ids[:30], "two": ids[30:]}
            return Corpora(
                {name: Corpus.from_arrays(some, directory / name) for name, some in both.items()}
            )
    corpus = pipeline.prepare(records, Bytes(), directory, task=INPUTS, progress=False)
    return Masked(corpus) if kind == "masked" else SpanCorruption(corpus, max_length=20)


@pytest.fixture(scope="module", params=KINDS)
def whole(request, tmp_path_factory):
    return make(request.param, tmp_path_factory.mktemp("split") / request.param)


def numbers_of(view):
    """The numbers that the examples of a view have in the corpus."""
    if isinstance(view, Corpora):
        firsts = np.cumsum([0, *(len(each.corpus) for each in view.members)])
        pairs = zip(view.members, firsts.tolist(), strict=False)
        return np.concatenate([each.numbers + first for each, first in pairs])
    return view.numbers


def require_equal(one, other):
    assert {name: values.tolist() for name, values in one.items()} == {
        name: values.tolist() for name, values in other.items()
    }


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
        assert (view.vocab_size, view.in_memory) == (whole.vocab_size, whole.in_memory)
        if whole.files is not None:
            assert (len(view.files), view.files.sum()) == (len(whole.files), len(view))
        for at, number in enumerate(numbers[:5].tolist()):
            for mine, theirs, size in zip(
                view.sides, whole.sides, np.reshape(view.lengths[at], -1), strict=True
            ):
                assert mine.weighted == theirs.weighted
                read = mine.read([at], [0], [size], epoch=2)
                require_equal(read, theirs.read([number], [0], [size], epoch=2))


def test_batches_have_the_examples_of_their_view_except_those_left_out(whole):
    for view in pickle.loads(pickle.dumps(whole.split(hold_out=0.3))):
        pair = view.lengths.ndim == 2
        plan = Plan(view, [Bucket(4, (40, 40) if pair else 40)], exclude=[1])
        batches = Batches(view, plan)
        read = [batches[step] for step in range(plan.num_batches())]
        some = np.reshape(view.lengths, (len(view), -1))
        some = some.sum(axis=1) * some.all(axis=1)  # pairs without targets are in no batch
        some[1] = 0
        name = "targets_segment_ids" if pair else "inputs_segment_ids"
        seen = sum(int((batch["inputs_segment_ids"] > 0).sum()) for batch in read)
        seen += sum(int((batch[name] > 0).sum()) for batch in read) * pair
        assert seen == some.sum()
        assert plan.fingerprint != Plan(whole, plan.buckets, exclude=[1]).fingerprint


@pytest.mark.parametrize("kind", ["arrays", "pairs"])
def test_what_is_held_out_stays_so_when_a_corpus_grows(kind, tmp_path):
    small, large = (make(kind, tmp_path / str(count), SIZES[:count]) for count in (50, 80))
    before, after = small.split(0.2)[1].numbers, large.split(0.2)[1].numbers
    assert after[after < 50].tolist() == before.tolist()
    assert {*after.tolist()} <= {*large.split(0.3)[1].numbers.tolist()}


def test_which_examples_are_held_out_is_the_same_for_ever(tmp_path):
    corpus = Corpus.from_arrays([[1, 2]] * 1000, tmp_path)
    assert corpus.split()[1].numbers.tolist() == [203, 254, 366, 410, 503, 543, 566, 821, 930, 986]
    assert len(corpus.split(0.5)[0]) == pytest.approx(500, abs=40)
    for wrong in (0, 1, "a tenth"):
        with pytest.raises(ValueError, match=r"hold_out is .*; it must be a number above 0"):
            corpus.split(wrong)
    with pytest.raises(ValueError, match=r"leaves none of the 1,000 examples to hold out; give"):
        corpus.split(1e-9)


def test_what_a_view_of_a_split_is_can_be_described(tmp_path):
    train, held_out = make("masked", tmp_path).corpus.split(0.3)
    for view in (train, Masked(held_out), Masked(train.corpus, seed=3).split(0.3)[0]):
        again = view_of(train.corpus, view.description)
        assert (again.fingerprint, again.directory) == (view.fingerprint, tmp_path)
        require_equal(again[0], view[0])


def test_a_split_is_joined_with_a_whole_corpus(tmp_path):
    one, other = (make("arrays", tmp_path / name) for name in ("one", "other"))
    joined = Corpora({"one": one.split(0.3)[0], "other": other})
    assert joined.identity["corpora"]["one"]["split"] == {"hold_out": 0.3, "held_out": False}
    require_equal(joined[len(joined) - 1], other[len(other) - 1])


def test_copies_in_a_split_are_those_of_its_own_examples():
    with tempfile.TemporaryDirectory() as directory:
        corpus = Corpus.from_arrays([[7, 7, 7]] * 100, directory)
        for view in corpus.split(0.4):
            assert duplicates(view).tolist() == list(range(1, len(view)))


@pytest.mark.parametrize("kind", ["arrays", "pairs", "masked", "joined"])
def test_a_run_on_a_split_is_planned_again(kind, tmp_path):
    view = make(kind, tmp_path / "corpus").split(0.3)[1]
    plan = Plan(view, [Bucket(4, (40, 40) if kind == "pairs" else 40)])
    write_history(tmp_path, view, plan)
    corpus, again = read_history(epath.Path(tmp_path))
    assert (corpus.fingerprint, again.fingerprint) == (view.fingerprint, plan.fingerprint)


def test_windows_of_files_have_every_example_of_a_view(tmp_path, monkeypatch):
    monkeypatch.setattr(ragged, "TOKENS_PER_PART", 40)
    for view in make("arrays", tmp_path).split(0.5):
        assert len(view.files) > 20
        assert view.files.min() == 0  # all of its examples are in the other view
        plan = Plan(view, [Bucket(2, 40)], window=9)
        segments = [plan.batch(step).segments for step in range(plan.num_batches())]
        seen = np.unique(np.concatenate(segments)[:, 1])
        assert seen.tolist() == np.flatnonzero(view.lengths).tolist()
