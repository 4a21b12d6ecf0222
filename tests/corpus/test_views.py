"""Views: masks, spans and cut examples, which are pure functions of seed, epoch and example."""

import hashlib
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pipeline
from pipeline import Examples, Feature, FillInTheMiddle, Masked, SpanCorruption
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


def read_pairs(view, epoch=0):
    return [read_all(*side, epoch) for side in zip(view.sides, view.lengths.T, strict=True)]


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
    own = Masked(corpus, mask_id=5, keep_ids=[3 + ord("w")])
    fields = read_all(own, own.lengths)
    assert own.vocab_size == 259
    assert not fields["loss_weights"][text == 3 + ord("w")].any()


def restored(inputs, targets, view):
    """The text that a pair was made of."""
    sentinels, spans, run, text = view.sentinels.tolist(), {}, [], []
    for token in targets:
        if token in sentinels:
            run = spans[token] = []
        else:
            run.append(token)
    for token in inputs:
        text += spans.pop(token) if token in sentinels else [token]
    assert not spans
    return text


@given(
    st.lists(st.integers(0, 60), min_size=1, max_size=8),
    st.integers(3, 40),
    st.floats(0.05, 0.9),
    st.floats(1, 6),
    st.integers(0, 3),
)
def test_text_and_gaps_together_are_each_token_once(sizes, max_length, density, mean_span, epoch):
    examples = [np.arange(size) + 100 * number for number, size in enumerate(sizes)]
    corpus = Examples(examples, vocab_size=1000, task=INPUTS)
    spans = {"max_length": max_length, "density": density, "mean_span": mean_span}
    view = SpanCorruption(corpus, **spans, start_id=998, end_id=999, sentinels=range(990, 900, -1))
    assert view.sentinels.tolist() == [*range(990, 900, -1)][: len(view.sentinels)]
    sides, ends, seen = read_pairs(view, epoch), np.cumsum(view.lengths, axis=0), []
    for pair in range(len(view)):
        here = [slice(end - n, end) for end, n in zip(ends[pair], view.lengths[pair], strict=True)]
        inputs, targets = sides[0]["inputs"][here[0]], sides[1]["targets"][here[1]]
        assert sides[1]["decoder_inputs"][here[1]].tolist() == [998, *targets[:-1]][: len(targets)]
        if len(inputs):
            assert inputs[-1] == targets[-1] == 999
            seen += restored(inputs[:-1].tolist(), targets[:-1].tolist(), view)
    # A text of one token cannot have a gap.
    assert seen == [token for each in examples if len(each) > 1 for token in each.tolist()]


def test_a_corrupted_text_by_eye(tmp_path):
    records = Records(["The quick brown fox jumps over the lazy dog."])
    corpus = pipeline.prepare(records, Bytes(), tmp_path, task=INPUTS, progress=False)
    view = SpanCorruption(corpus, max_length=100, density=0.2)

    def text(ids):
        names = {1: "^", 2: "$"} | {id_: f"<{n}>" for n, id_ in enumerate(view.sentinels.tolist())}
        return "".join(names.get(id_) or chr(id_ - 3) for id_ in ids.tolist())

    inputs, targets = read_pairs(view)
    assert view.lengths.tolist() == [[39, 13]]
    assert text(inputs["inputs"]) == "The q<0>ick brown fox<1>over the lazy dog<2>$"
    assert text(targets["targets"]) == "<0>u<1> jumps <2>.$"
    assert text(targets["decoder_inputs"]) == "^" + text(targets["targets"])[:-1]


def test_spans_differ_between_epochs_and_all_are_equally_likely():
    corpus = Examples([np.arange(10)] * 2000, vocab_size=10, task=INPUTS)
    view = SpanCorruption(corpus, max_length=10, density=0.4, mean_span=2.0, end_id=9)
    inputs = [read_pairs(view, epoch)[0]["inputs"] for epoch in (0, 1)]
    assert not np.array_equal(*inputs)
    # 6 tokens that stay in two runs, 4 that go in two: 5 · 3 ways.
    ways, counts = np.unique(inputs[0].reshape(2000, -1), axis=0, return_counts=True)
    assert len(ways) == 15
    assert counts.min() > 90
    assert counts.max() < 180


def test_sentinels_are_told_apart(corpus):
    for sentinels in ([300] * 10, range(3, -7, -1)):
        with pytest.raises(ValueError, match=r"sentinels are .*; give ids from 0 up, each of them"):
            SpanCorruption(corpus, max_length=200, sentinels=sentinels)


def test_a_view_prints_its_own_counts_where_they_differ(corpus):
    _, held_out = corpus.split(0.2)
    assert "which has    120 documents" not in str(Masked(corpus))
    assert f"which has    {len(held_out)} documents, {held_out.num_tokens:,} tok" in str(held_out)
    spans = SpanCorruption(corpus, max_length=40)
    inputs, targets = spans.lengths.sum(axis=0)
    assert f"{len(spans)} documents, {inputs:,} inputs, {targets:,} targets" in str(spans)


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


WEIGHTED = Examples({"tokens": [[1, 2]], "weights": [[1, 0]]})


@pytest.mark.parametrize(
    ("corpus", "options", "sentence"),
    [
        (Examples([[1, 2, 3]], vocab_size=9), {"rate": 1.5}, r"rate is 1\.5; it must be a number"),
        (Examples([[1, 2, 3]], vocab_size=9), {"mode": "mps"}, "mode is 'mps'; it must be one of"),
        (Examples([[1, 2, 3]], vocab_size=9), {"loss": "suffix"}, "loss is 'suffix'; it must be"),
        (Examples([[1, 2, 3]], vocab_size=9), {"prefix": -1}, "prefix is -1; it must be a whole"),
        (Examples([[1, 2, 3]]), {**IDS, "suffix": 900}, r"suffix are \[900, 901, 900\]; give ids"),
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
