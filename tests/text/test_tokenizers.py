import json
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pipeline
from pipeline.text.sources import Records, Slice
from pipeline.text.sources import source as sizes
from pipeline.text.sources.source import sharded
from pipeline.text.tokenizers import Bytes, HuggingFace, SentencePiece, load, train_sentencepiece
from pipeline.text.tokenizers import sentencepiece as sentencepiece_module
from tests.text.trained import train_bytes_pairs

sentencepiece = pytest.importorskip("sentencepiece")
tokenizers = pytest.importorskip("tokenizers")

# Text with what tokenizers like to change: white space of all kinds, marks, the sentencepiece
# space, a byte order mark, characters beyond the basic plane, a NUL.
HARD = ["", " ", "  a\t\tb\n\n\n c ", "\r\n", "▁x▁ ▁", "▁", "😀 naïve 日本語"]
HARD += ["\ufeff<s></s><0x41>", "a\0b"]
MARKS = [(True, True), (True, False), (False, True), (False, False)]


@pytest.fixture(scope="module")
def source():
    text = "the input pipeline packs examples of every length into batches of a few shapes"
    words = text.split()
    draw = np.random.default_rng(0).integers(0, len(words), size=(300, 12))
    lines = [" ".join(words[at] for at in row) for row in draw]
    return Records([f"def f():\n    # {line}\n\treturn  {line[:5]!r}\n" for line in lines])


@pytest.fixture(scope="module")
def trained(source, tmp_path_factory):
    return train_sentencepiece(source, 400, tmp_path_factory.mktemp("trained") / "a.model")


@pytest.fixture(scope="module")
def hugging_face(source, tmp_path_factory):
    """A byte-level byte-pair tokenizer with special tokens and a post-processor."""
    tokenizer = train_bytes_pairs(source.records, ["<pad>", "<s>", "</s>", "<|turn|>"])
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    tokenizer.enable_truncation(8)  # which a corpus must not heed
    tokenizer.enable_padding()  # nor this
    path = tmp_path_factory.mktemp("hugging_face") / "tokenizer.json"
    tokenizer.save(str(path))
    return HuggingFace(path)


@pytest.fixture(params=["bytes", "sentencepiece", "huggingface"])
def tokenizer(request):
    fixture = {"sentencepiece": "trained", "huggingface": "hugging_face"}.get(request.param)
    return request.getfixturevalue(fixture) if fixture else Bytes()


@pytest.mark.parametrize(("begin", "end"), MARKS)
def test_begin_and_end_marks_are_explicit(trained, tmp_path, begin, end):
    description = trained.save(tmp_path)
    for tokenizer in (
        Bytes(begin=begin, end=end),
        load(description | {"begin": begin, "end": end}, tmp_path),
    ):
        flat, counts = tokenizer.encode_batch(["ab", ""])
        assert (flat[0] == 1, flat[counts[0] - 1] == 2) == (begin, end)
        assert counts[1] == begin + end
        assert tokenizer.begin_id == (1 if begin else None)
        assert tokenizer.end_id == (2 if end else None)
        assert tokenizer.decode(flat) == "ab"
    assert Bytes().decode([4 + 255 - 1, 0, 100]) == "\ufffda"  # a byte that is no UTF-8


def test_fingerprints_differ_where_ids_do(trained, tmp_path):
    trained.save(tmp_path)
    pieces = [SentencePiece(tmp_path / "tokenizer.model", begin=b, end=e) for b, e in MARKS]
    assert pieces[0].fingerprint == trained.fingerprint
    everyone = [*pieces, *(Bytes(begin=b, end=e) for b, e in MARKS)]
    assert len({tokenizer.fingerprint for tokenizer in everyone}) == 8


@settings(deadline=None, max_examples=200)
@given(st.lists(st.one_of(st.text(max_size=30), st.sampled_from(HARD)), max_size=5))
def test_every_text_comes_back_as_it_was(trained, hugging_face, texts):
    for tokenizer in (Bytes(), trained, hugging_face):
        flat, counts = tokenizer.encode_batch(texts)
        assert (flat.dtype, counts.dtype) == (np.int32, np.int64)
        ends = np.cumsum(counts)
        for text, end, count in zip(texts, ends, counts, strict=True):
            own = flat[end - count : end]
            assert tokenizer.decode(own) == text
            assert own.tolist() == tokenizer.encode_batch([text])[0].tolist()
        assert flat.max(initial=0) < tokenizer.vocab_size


def test_a_tokenizer_pickles_and_is_stored_with_a_corpus(tokenizer, tmp_path):
    description = json.loads(json.dumps(tokenizer.save(tmp_path)))
    for other in (pickle.loads(pickle.dumps(tokenizer)), load(description, tmp_path)):
        assert other.fingerprint == tokenizer.fingerprint
        assert other.encode_batch(HARD)[0].tolist() == tokenizer.encode_batch(HARD)[0].tolist()


def test_a_corpus_holds_the_text_of_every_example(tokenizer, tmp_path):
    corpus = pipeline.prepare(Records(HARD), tokenizer, tmp_path, num_workers=0, progress=False)
    assert [corpus.decode(number) for number in range(len(HARD))] == HARD


def test_a_trained_model_has_the_ids_it_promises(trained):
    assert trained.vocab_size == 400
    counts = trained.encode_batch(["the input pipeline packs examples"])[1]
    assert counts[0] < 12
    assert 3 not in trained.encode_batch(HARD)[0]


def test_training_is_deterministic_and_done_once(source, trained, tmp_path, monkeypatch):
    again = train_sentencepiece(source, 400, tmp_path / "m.model")
    assert again.fingerprint == trained.fingerprint
    other = train_sentencepiece(source, 410, tmp_path / "n.model")
    assert other.vocab_size == 410
    for name in ("_sample", "_train"):  # nothing is read from now on
        monkeypatch.setattr(sentencepiece_module, name, None)
    assert train_sentencepiece(source, 400, tmp_path / "m.model").fingerprint == again.fingerprint
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    changed = Records(source.records, fingerprint="changed")
    with pytest.raises(ValueError, match=r"m\.model exists, .* \(source was .*, now changed"):
        train_sentencepiece(changed, 400, tmp_path / "m.model")
    with pytest.raises(ValueError, match=r"\(vocab_size was 400, now 410\)\. Give it as the"):
        train_sentencepiece(source, 410, tmp_path / "m.model")
    with pytest.raises(ValueError, match="field was text, now body, seed was 0, now 1"):
        train_sentencepiece(source, 400, tmp_path / "m.model", seed=1, field="body")
    (tmp_path / "m.model.json").unlink()  # it may be a user's own
    with pytest.raises(ValueError, match=r"m\.model exists"):
        train_sentencepiece(source, 400, tmp_path / "m.model")
    del before["m.model.json"]
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_large_source_is_sampled_all_over_by_the_seed(source, monkeypatch, tmp_path):
    total = sum(len(text) for text in source.records)
    monkeypatch.setattr(sizes, "LEAST", total // 100)
    monkeypatch.setattr(sentencepiece_module, "SAMPLED", 20)
    monkeypatch.setattr(sentencepiece_module, "SAMPLE_BYTES", 20)
    pairs = [(sharded(source), ["text"])]
    samples = [list(sentencepiece_module._sample(pairs, seed)) for seed in (0, 0, 1)]
    assert samples[0] == samples[1] != samples[2]
    assert len(samples[0]) == 20
    places = [source.records.index(text) for text in samples[0]]
    assert places == sorted(places)
    assert places[0] < 30
    assert places[-1] > 270
    monkeypatch.setattr(sentencepiece_module, "SAMPLED", 1000)
    monkeypatch.setattr(sentencepiece_module, "SAMPLE_BYTES", 200 * total)
    for field in (["text"] * 2, lambda record: [record["text"]] * 2):
        twice = [text for text in source.records for _ in range(2)]
        assert list(sentencepiece_module._sample([(sharded(source), field)], 0)) == twice


def test_a_vocabulary_of_an_impossible_size_is_refused(source, tmp_path):
    for size in (100, 100_000):
        with pytest.raises(ValueError, match=f"cannot make {size:,} pieces .* another vocab_size"):
            train_sentencepiece(Slice(source, 0.0, 0.1), size, tmp_path / "m.model")
    assert not list(tmp_path.glob("*.model*"))


def test_a_model_that_is_none_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no sentencepiece tokenizer"):
        SentencePiece(tmp_path / "none.model")
    (tmp_path / "bad.model").write_bytes(b"not a model")
    with pytest.raises(ValueError, match=r"bad\.model is not a sentencepiece model"):
        SentencePiece(tmp_path / "bad.model")


def test_a_model_without_a_mark_says_so(source, tmp_path):
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(source.records),
        model_prefix=str(tmp_path / "unmarked"),
        vocab_size=60,
        bos_id=-1,
        minloglevel=2,
    )
    with pytest.raises(ValueError, match=r"has no begin mark; pass begin=False"):
        SentencePiece(tmp_path / "unmarked.model")
    tokenizer = SentencePiece(tmp_path / "unmarked.model", begin=False)
    ids, _ = tokenizer.encode_batch(["the input▁pipeline"])
    assert tokenizer.decode(ids) == "the input pipeline"


def test_what_to_install_is_said(monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "sentencepiece", None)
    with pytest.raises(ImportError, match=r"pip install 'lockstep-pipeline\[sentencepiece\]'"):
        sentencepiece_module._require()


def test_a_prepare_of_which_nothing_is_learnt_leaves_nothing(tokenizer, source, tmp_path):
    def ignore(record):
        return [(record["text"], 0.0)]

    for _ in range(2):  # the second is not said to go on from the first
        with pytest.raises(ValueError, match="weight 0 to every token of all 300 records"):
            pipeline.prepare(source, tokenizer, tmp_path / "corpus", template=ignore)
        assert not [*(tmp_path / "corpus").glob("*.arrow"), *(tmp_path / "corpus").glob("corpus*")]


def test_marks_of_a_hugging_face_tokenizer_are_its_own_or_named(hugging_face, tmp_path):
    path = hugging_face._name
    bare = tokenizers.Tokenizer.from_file(path)
    assert (hugging_face.begin_id, hugging_face.end_id) == (1, 2)
    assert hugging_face.vocab_size == bare.get_vocab_size()
    named = HuggingFace(path, begin=False, end="<pad>")
    assert named.encode_batch([""])[0].tolist() == [0]
    description = json.loads(json.dumps(named.save(tmp_path)))
    assert load(description, tmp_path).fingerprint == named.fingerprint
    with pytest.raises(ValueError, match="has no token '<eos>'; give another end="):
        HuggingFace(path, end="<eos>")
    bare.post_processor = tokenizers.processors.ByteLevel()
    bare.save(str(tmp_path / "bare.json"))
    with pytest.raises(ValueError, match="does not add exactly one begin mark; name the token"):
        HuggingFace(tmp_path / "bare.json")
    with pytest.raises(FileNotFoundError, match="there is no huggingface tokenizer"):
        HuggingFace(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(ValueError, match=r"bad\.json is not a tokenizer\.json"):
        HuggingFace(tmp_path / "bad.json")


def test_a_tokenizer_that_lacks_something_is_refused_before_the_work(tmp_path):
    class Mine:
        vocab_size, fingerprint, begin_id, end_id = 259, "mine", None, None

        def encode_batch(self, texts):
            raise AssertionError("work")

    with pytest.raises(TypeError, match="Mine has no kind, decode, save; a tokenizer has"):
        pipeline.prepare(Records(["a"]), Mine(), tmp_path, progress=False)
