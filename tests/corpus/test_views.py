"""Views: masked tokens, corrupted spans and pairs; pure functions of seed, epoch and example."""

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pipeline
from pipeline import Examples, Masked, SpanCorruption
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


def test_masks_differ_between_epochs_and_seeds(corpus):
    view, other = Masked(corpus), Masked(corpus, seed=1)
    args = [9], [0], corpus.lengths[9:10]
    reads = [each.read(*args, epoch=n) for each, n in ((view, 0), (view, 1), (other, 0))]
    assert len({read["inputs"].tobytes() for read in reads}) == 3
    assert len({read["targets"].tobytes() for read in reads}) == 1
    assert view.fingerprint != other.fingerprint
    plan = pipeline.Plan(view, [pipeline.Bucket(4, 256)])
    state = iter(pipeline.Batches(view, plan).to_iter_dataset()).get_state()
    with pytest.raises(ValueError, match="seed of masked was 0 and is now 1"):
        iter(pipeline.Batches(other, plan).to_iter_dataset()).set_state(state)


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
    view = SpanCorruption(
        corpus, max_length=max_length, density=density, mean_span=mean_span, end_id=999
    )
    sides, ends, seen = read_pairs(view, epoch), np.cumsum(view.lengths, axis=0), []
    for pair in range(len(view)):
        here = [slice(end - n, end) for end, n in zip(ends[pair], view.lengths[pair], strict=True)]
        inputs, targets = sides[0]["inputs"][here[0]], sides[1]["targets"][here[1]]
        assert sides[1]["decoder_inputs"][here[1]].tolist() == [0, *targets[:-1]][: len(targets)]
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


def test_lengths_never_depend_on_the_epoch_and_long_texts_are_cut(corpus):
    view = SpanCorruption(corpus, max_length=30)
    assert len(view) > len(corpus)
    assert view.lengths.max(axis=0).tolist() == [30 - 4 + 1 + 1, 4 + 1 + 1]  # 4 of 30, in one span
    assert view.num_tokens == view.lengths.sum()
    assert len(SpanCorruption(corpus, max_length=1000)) == len(corpus)
    ids = SpanCorruption(corpus, max_length=30, sentinels=range(300, 200, -1)).sentinels
    assert ids.tolist() == [300, 299][: len(ids)]
    own = SpanCorruption(corpus, max_length=30, start_id=0, end_id=0)  # not the tokenizer's marks
    assert own.targets.read([5], [0], [1])["decoder_inputs"].tolist() == [0]
    assert own.inputs.read([5], own.lengths[5, :1] - 1, [1])["inputs"].tolist() == [0]


def test_a_view_prints_its_own_counts_where_they_differ(corpus):
    _, held_out = corpus.split(0.2)
    assert "which has    120 documents" not in str(Masked(corpus))
    tokens = held_out.lengths.sum()
    assert f"which has    {len(held_out)} documents, {tokens:,} tokens" in str(held_out)
    spans = SpanCorruption(corpus, max_length=40)
    inputs, targets = spans.lengths.sum(axis=0)
    counts = f"{len(spans)} documents, {inputs:,} inputs, {targets:,} targets"
    assert str(spans).endswith(f"which has    {counts}")
