"""Views: masks and cut examples, which are pure functions of seed, epoch and example."""

import hashlib
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pipeline
from pipeline import Examples, Feature, FillInTheMiddle, Masked
from pipeline.corpus import INPUTS, prng
from pipeline.text.sources import Records
from pipeline.text.tokenizers import Bytes
from tests.corpus.files import read_all

TEXTS = ["word " * (number % 40) + f"and {number}" for number in range(120)] + [""]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    directory = tmp_path_factory.mktemp("encoder")
    records = Records(TEXTS)
    return pipeline.prepare(records, Bytes(), directory, task=INPUTS, progress=False)


def test_random_bits_are_the_same_for_ever():
    examples, sizes = np.arange(50), np.arange(1, 51)
    bits = prng.draw(3, 7, examples, np.zeros(50, np.int64), sizes)
    assert hashlib.sha256(bits.astype("<u8").tobytes()).hexdigest()[:16] == "f4965d0045921668"
    others = [
        prng.draw(seed, epoch, examples, np.full(50, start), sizes)
        for seed, epoch, start in ((4, 7, 0), (3, 8, 0), (7, 3, 0), (3, 7, 1 << 32))
    ]
    every = np.concatenate([bits, *others])
    assert len(np.unique(every)) == len(every)
    assert abs(np.mean(every / 2**64) - 0.5) < 0.01


def test_masked_tokens_are_asked_for_and_others_are_not(corpus):
    view = Masked(corpus, rate=0.2)
    read, text = read_all(view, view.lengths, epoch=2), read_all(corpus, view.lengths)["inputs"]
    asked = read["loss_weights"] > 0
    assert hashlib.sha256(read["inputs"].astype("<i4")).hexdigest().startswith("8e965a857898732a")
    assert np.array_equal(read["targets"], text)
    assert np.array_equal(read["inputs"][~asked], text[~asked])
    assert not asked[np.isin(text, [1, 2])].any()
    other = read_all(Masked(corpus, rate=0.2, seed=1), view.lengths, epoch=2)
    assert not np.array_equal(other["inputs"], read["inputs"])
    assert asked[text > 2].mean() == pytest.approx(0.2, abs=0.01)
    hidden = read["inputs"][asked]
    assert (hidden == view.mask_id).mean() == pytest.approx(0.8, abs=0.03)
    assert (hidden == text[asked]).mean() == pytest.approx(0.1, abs=0.02)
    assert (view.mask_id, view.vocab_size) == (259, 260)
    assert hidden.max() < 260
    masked = Masked(corpus, mask_id=5, keep_ids=[3 + ord("w")])
    fields = read_all(masked, masked.lengths)
    assert masked.vocab_size == 259
    assert not fields["loss_weights"][text == 3 + ord("w")].any()


def test_a_view_prints_its_own_counts_where_they_differ(corpus, pairs):
    _, held_out = corpus.split(0.2)
    assert "which has    120 documents" not in str(Masked(corpus))
    assert f"which has    {len(held_out)} documents, {held_out.num_tokens:,} tok" in str(held_out)
    _, some = pairs.split(0.2)
    inputs, targets = some.lengths.sum(axis=0)
    assert f"{len(some)} documents, {inputs:,} inputs, {targets:,} targets" in str(some)


# ---- fill in the middle


PREFIX, MIDDLE, SUFFIX = 900, 901, 902
IDS = {"prefix": PREFIX, "middle": MIDDLE, "suffix": SUFFIX}


def whole(fields):
    """All tokens of an example."""
    return [*fields["inputs"].tolist(), *fields["targets"][-1:].tolist()]


def define(ids, a, b, mode, begins, ends):
    """An example that is cut at two places, without the marks that it begins and ends with."""
    ids, marks = [*ids], slice(begins, len(ids) - ends)
    text = ids[marks]
    if mode == "psm":
        ids[marks] = [PREFIX, *text[:a], SUFFIX, *text[b:], MIDDLE, *text[a:b]]
    else:
        ids[marks] = [PREFIX, SUFFIX, *text[b:], MIDDLE, *text[:b]]
    return ids


@given(
    st.lists(st.integers(0, 12), min_size=1, max_size=12),
    st.sampled_from(["psm", "spm"]),
    st.tuples(st.booleans(), st.booleans()),
    st.integers(0, 3),
)
@settings(max_examples=60)
def test_an_example_that_is_cut_has_its_parts_in_order_between_marks(sizes, mode, marks, epoch):
    examples = [np.arange(size) + 20 * number for number, size in enumerate(sizes)]
    view = FillInTheMiddle(Examples(examples), 0.5, **IDS, mode=mode, marks=marks)
    for number, (ids, length) in enumerate(zip(examples, view.lengths.tolist(), strict=True)):
        fields = view.read([number], [0], [length], epoch=epoch)
        assert fields["inputs"][1:].tolist() == fields["targets"][:-1].tolist()
        due, places = [ids.tolist() if len(ids) > 1 else []], range(len(ids) - sum(marks) + 1)
        if length != max(len(ids) - 1, 0):
            cuts = itertools.combinations_with_replacement(places, 2)
            due = [define(ids.tolist(), *cut, mode, *marks) for cut in cuts]
        assert whole(fields) in due


def test_the_same_examples_are_cut_in_every_epoch_elsewhere_and_everywhere_alike():
    view = FillInTheMiddle(Examples([np.arange(10)] * 4000), 0.5, **IDS, seed=2)
    cut = view.lengths == 12
    assert cut.mean() == pytest.approx(0.5, abs=0.03)
    assert set(view.lengths[~cut].tolist()) == {9}
    assert FillInTheMiddle(view.corpus, 0, **IDS).lengths.max() == 9
    edges = []
    for epoch in (0, 1):
        read = view.read(np.flatnonzero(cut), 0 * view.lengths[cut], view.lengths[cut], epoch=epoch)
        tokens = read["targets"].reshape(-1, 12).tolist()
        edges.append([(row.index(SUFFIX), row.index(MIDDLE)) for row in tokens])
    same = np.mean([a == b for a, b in zip(*edges, strict=True)])
    assert same < 0.05
    # Two cuts among 10 places: prefixes are shorter, as the lower of two numbers is.
    sizes = np.array([suffix for suffix, _ in edges[0]])
    expected = np.array([(10 - k) ** 2 - (9 - k) ** 2 for k in range(10)]) / 100
    shares = np.bincount(sizes, minlength=11)[1:] / len(sizes)
    np.testing.assert_allclose(shares, expected, atol=0.03)
    # Who is held out has nothing to do with who is cut.
    held_out = view.split(0.3)[1]
    assert (held_out.lengths == 12).mean() == pytest.approx(0.5, abs=0.05)
    other = FillInTheMiddle(Examples([np.arange(10)] * 4000), 0.5, **IDS, seed=3)
    assert np.mean((other.lengths == 12) == cut) == pytest.approx(0.5, abs=0.05)


def test_a_text_by_eye_and_where_its_loss_is(tmp_path):
    corpus = pipeline.prepare(Records(["abcdef"] * 8), Bytes(), tmp_path, progress=False)
    for loss in ("all", "middle"):
        view = FillInTheMiddle(corpus, 0.5, loss=loss, seed=1)
        assert (view.prefix, view.middle, view.suffix) == (259, 260, 261)
        assert view.vocab_size == 262
        number = int(np.argmax(view.lengths))
        names = {1: "^", 2: "$", 259: "<p>", 260: "<m>", 261: "<s>"}
        read = view[number]
        text = [names.get(token) or chr(token - 3) for token in whole(read)]
        assert "".join(text) == "^<p>a<s>cdef<m>b$"
        if loss == "all":
            assert "loss_weights" not in read
        else:
            assert read["loss_weights"].tolist() == [0] * 8 + [1] * 2
            uncut = view[int(np.argmin(view.lengths))]
            assert uncut["loss_weights"].tolist() == [1] * 7


WEIGHTED = Examples({"tokens": [[1, 2]], "weights": [[1, 0]]})


@pytest.mark.parametrize(
    ("corpus", "options", "sentence"),
    [
        (Examples([[1, 2, 3]], vocab_size=9), {"rate": 1.5}, r"rate is 1\.5; it must be a number"),
        (Examples([[1, 2, 3]], vocab_size=9), {"mode": "mps"}, "mode is 'mps'; it must be one of"),
        (Examples([[1, 2, 3]], vocab_size=9), {"loss": "suffix"}, "loss is 'suffix'; it must be"),
        (Examples([[1, 2, 3]], vocab_size=9), {"prefix": -1}, "prefix is -1; it must be a whole"),
        (Examples([[1, 2, 3]]), {**IDS, "suffix": 900}, r"suffix are \[900, 901, 900\]; give"),
        (Examples([[1, 2, 3]]), {}, "has no vocab_size; give prefix="),
        (Examples([[1, 2]], task=INPUTS), IDS, "needs documents of the task 'causal'.*'inputs'"),
        (Examples.from_groups([([1], [[2], [3]])]), IDS, "has the task 'causal' and groups"),
        (WEIGHTED, IDS, "has weights, and FillInTheMiddle may hide or move"),
    ],
)
def test_what_cannot_be_is_refused(corpus, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        FillInTheMiddle(corpus, **options)


def test_features_of_examples_are_kept():
    features = {"score": Feature("example"), "logprob": Feature("targets")}
    columns = {"tokens": [[1, 2, 3]], "score": [7.0], "logprob": [[1.0, 2.0, 3.0]]}
    view = FillInTheMiddle(Examples(columns, features=features), **IDS)
    assert [*view.features] == ["score"]
    assert float(view[0]["score"]) == 7
