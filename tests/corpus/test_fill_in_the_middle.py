"""Fill-in-the-middle: an example that is cut is the whole one again once its parts are put back."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pipeline
from pipeline import Examples, Feature, FillInTheMiddle
from pipeline.text.sources import Records
from pipeline.text.tokenizers import Bytes

PREFIX, MIDDLE, SUFFIX = MARKS = 900, 901, 902
IDS = {"prefix": PREFIX, "middle": MIDDLE, "suffix": SUFFIX}


def whole(fields):
    """All tokens of an example."""
    return [*fields["inputs"].tolist(), *fields["targets"][-1:].tolist()]


def put_back(tokens, mode, begins, ends):
    """The prefix, the middle and the suffix, without marks, of an example that is cut."""
    head, tail = tokens[:begins], tokens[len(tokens) - ends :]
    tokens = tokens[begins : len(tokens) - ends]
    at = {mark: tokens.index(mark) for mark in MARKS}
    assert at[PREFIX] == 0
    last = tokens[at[MIDDLE] + 1 :]
    if mode == "psm":
        assert at[SUFFIX] < at[MIDDLE]
        parts = tokens[1 : at[SUFFIX]], last, tokens[at[SUFFIX] + 1 : at[MIDDLE]]
    else:
        assert at[SUFFIX] == 1
        parts = last, [], tokens[2 : at[MIDDLE]]
    return head + [token for part in parts for token in part] + tail


@given(
    st.lists(st.integers(0, 12), min_size=1, max_size=12),
    st.sampled_from(["psm", "spm"]),
    st.tuples(st.booleans(), st.booleans()),
    st.integers(0, 3),
)
@settings(max_examples=60)
def test_an_example_that_is_cut_is_whole_again_once_its_parts_are_put_back(
    sizes, mode, marks, epoch
):
    examples = [np.arange(size) + 20 * number for number, size in enumerate(sizes)]
    view = FillInTheMiddle(Examples(examples), 0.5, **IDS, mode=mode, marks=marks)
    for number, (ids, length) in enumerate(zip(examples, view.lengths.tolist(), strict=True)):
        fields = view.read([number], [0], [length], epoch=epoch)
        assert fields["inputs"][1:].tolist() == fields["targets"][:-1].tolist()
        tokens = whole(fields)
        if length != max(len(ids) - 1, 0):
            assert length == len(ids) + 2
            tokens = put_back(tokens, mode, *marks)
        assert tokens == (ids.tolist() if len(ids) > 1 else [])


def test_the_same_examples_are_cut_in_every_epoch_elsewhere_and_everywhere_alike():
    view = FillInTheMiddle(Examples([np.arange(10)] * 4000), 0.5, **IDS, seed=2)
    cut = view.lengths == 12
    assert cut.mean() == pytest.approx(0.5, abs=0.03)
    assert set(view.lengths[~cut].tolist()) == {9}
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
    found = np.bincount(sizes, minlength=11)[1:] / len(sizes)
    np.testing.assert_allclose(found, expected, atol=0.03)
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


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"rate": 1.5}, r"rate is 1\.5; it must be a number above 0 and below 1"),
        ({"mode": "mps"}, "mode is 'mps'; it must be one of psm, spm"),
        ({"loss": "suffix"}, "loss is 'suffix'; it must be one of all, middle"),
        ({"prefix": -1}, "prefix is -1; it must be a whole number"),
    ],
)
def test_what_cannot_be_is_refused(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        FillInTheMiddle(Examples([[1, 2, 3]], vocab_size=9), **options)


def test_it_takes_causal_documents_without_weights_and_keeps_features_of_examples():
    with pytest.raises(ValueError, match=r"needs documents of the task 'causal'.*'inputs'"):
        FillInTheMiddle(Examples([[1, 2]], task=pipeline.corpus.INPUTS), **IDS)
    with pytest.raises(ValueError, match="has the task 'causal' and groups"):
        FillInTheMiddle(Examples.from_groups([([1], [[2], [3]])]), **IDS)
    with pytest.raises(ValueError, match="has weights, and FillInTheMiddle may hide or move"):
        FillInTheMiddle(Examples({"tokens": [[1, 2]], "weights": [[1, 0]]}), **IDS)
    with pytest.raises(ValueError, match="has no vocab_size; give prefix="):
        FillInTheMiddle(Examples([[1, 2, 3]]))
    features = {"score": Feature("example"), "logprob": Feature("targets")}
    columns = {"tokens": [[1, 2, 3]], "score": [7.0], "logprob": [[1.0, 2.0, 3.0]]}
    view = FillInTheMiddle(Examples(columns, features=features), **IDS)
    assert [*view.features] == ["score"]
    assert float(view[0]["score"]) == 7


def test_a_corpus_that_is_cut_is_joined_with_one_that_is_not():
    one, other = (
        Examples([np.arange(size) for size in range(n, 30)], vocab_size=40) for n in (2, 9)
    )
    both = pipeline.Corpora({"code": FillInTheMiddle(one), "text": FillInTheMiddle(other, 0)})
    assert both.lengths[28:].tolist() == other.lengths.tolist()
    assert both[30]["targets"].tolist() == other[2]["targets"].tolist()
