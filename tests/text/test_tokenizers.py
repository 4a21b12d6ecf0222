import functools
import json
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pipeline
from pipeline.text import source as sizes
from pipeline.text import templates
from pipeline.text.source import sharded
from pipeline.text.sources import Records
from pipeline.text.templates import Answer, Preference
from pipeline.text.tokenizers import (
    Bytes,
    HuggingFace,
    SentencePiece,
    load,
    train_sentencepiece,
    training,
)
from tests.text.trained import train_bytes_pairs, train_pieces

pytest.importorskip("sentencepiece")
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


def test_begin_and_end_marks_are_explicit_and_in_fingerprints(trained, tmp_path):
    description, fingerprints = trained.save(tmp_path), {trained.fingerprint}
    for begin, end in MARKS:
        own = load(description | {"begin": begin, "end": end}, tmp_path)
        for tokenizer in (Bytes(begin=begin, end=end), own):
            flat, counts = tokenizer.encode_batch(["ab", ""])
            assert (flat[0] == 1, flat[counts[0] - 1] == 2) == (begin, end)
            assert counts[1] == begin + end
            due = 1 if begin else None, 2 if end else None
            assert (tokenizer.begin_id, tokenizer.end_id) == due
            assert tokenizer.decode(flat) == "ab"
            fingerprints.add(tokenizer.fingerprint)
    assert len(fingerprints) == 8  # the trained one has both marks
    assert Bytes().decode([4 + 255 - 1, 0, 100]) == "\ufffda"  # a byte that is no UTF-8


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


def test_training_is_deterministic_and_done_once(source, trained, tmp_path, monkeypatch):
    again = train_sentencepiece(source, 400, tmp_path / "m.model")
    assert again.fingerprint == trained.fingerprint
    other = train_sentencepiece(source, 410, tmp_path / "n.model")
    assert other.vocab_size == 410
    for name in ("Sample", "_train"):  # nothing is read from now on
        monkeypatch.setattr(training, name, None)
    assert train_sentencepiece(source, 400, tmp_path / "m.model").fingerprint == again.fingerprint
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    changed = Records(source.records, fingerprint="changed")
    with pytest.raises(ValueError, match=r"m\.model exists, .* \(source was .*, now changed"):
        train_sentencepiece(changed, 400, tmp_path / "m.model")
    with pytest.raises(ValueError, match="field was text, now body, seed was 0, now 1"):
        train_sentencepiece(source, 400, tmp_path / "m.model", seed=1, field="body")
    (tmp_path / "m.model.json").unlink()  # it may be a user's own
    with pytest.raises(ValueError, match=r"m\.model exists"):
        train_sentencepiece(source, 400, tmp_path / "m.model")
    del before["m.model.json"]
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_large_source_is_sampled_all_over_by_the_seed(source, monkeypatch):
    total = sum(len(text) for text in source.records)
    monkeypatch.setattr(sizes, "LEAST", total // 100)
    monkeypatch.setattr(training, "SAMPLED", 20)
    monkeypatch.setattr(training, "SAMPLE_BYTES", 20)
    pairs = [(sharded(source), ["text"])]
    samples = [list(training.Sample(pairs, seed)) for seed in (0, 0, 1)]
    assert samples[0] == samples[1] != samples[2]
    assert len(samples[0]) == 20
    places = [source.records.index(text) for text in samples[0]]
    assert places == sorted(places)
    assert places[0] < 30
    assert places[-1] > 270
    monkeypatch.setattr(training, "SAMPLED", 1000)
    monkeypatch.setattr(training, "SAMPLE_BYTES", 200 * total)
    for field in (["text"] * 2, lambda record: [record["text"]] * 2):
        twice = [text for text in source.records for _ in range(2)]
        assert list(training.Sample([(sharded(source), field)], 0)) == twice


def test_a_vocabulary_of_an_impossible_size_is_refused(source, tmp_path):
    for size in (100, 100_000):
        with pytest.raises(ValueError, match=f"cannot make {size:,} pieces .* another vocab_size"):
            train_sentencepiece(Records(source.records[::10]), size, tmp_path / "m.model")
    assert not list(tmp_path.glob("*.model*"))


@pytest.mark.parametrize(
    ("records", "sentences"),
    [
        (
            [{"content": "a b c"}] * 9,
            [
                "no text to train",
                "9 records failed, first record 0: it has"
                " no field 'text' (its fields: content); name the field",
            ],
        ),
        ([{"text": ""}] * 9, ["no text to train", "all records that were read are empty"]),
        ([], ["no text to train"]),
        (
            [{"text": "a"}, {"content": "b c"}],
            [
                "cannot make 900 pieces of 1 bytes",
                "1 record failed, first record 1: it has no field 'text'",
            ],
        ),
    ],
)
def test_text_that_is_missing_is_named_before_the_size_of_the_vocabulary(
    records, sentences, tmp_path
):
    with pytest.raises(ValueError) as caught:
        train_sentencepiece(Records(records), 900, tmp_path / "m.model")
    for sentence in sentences:
        assert sentence in str(caught.value)


def test_marks_of_a_sentencepiece_model_are_its_own_or_named(source, tmp_path):
    path, symbols = tmp_path / "m.model", ["<|end|>"]
    train_pieces(path, source.records, vocab_size=320, bos_id=-1, user_defined_symbols=symbols)
    with pytest.raises(ValueError, match=r"not add exactly one begin mark; .* or pass begin=False"):
        SentencePiece(path)
    with pytest.raises(ValueError, match="has no token '<eos>'; name the token, as in end="):
        SentencePiece(path, begin=False, end="<eos>")
    own = SentencePiece(path, begin=False, end="<|end|>")
    assert own.decode(own.encode_batch(["hi"])[0]) == "hi"
    assert load(own.save(tmp_path), tmp_path).fingerprint == own.fingerprint


def test_a_prepare_of_which_nothing_is_learnt_leaves_nothing(tokenizer, source, tmp_path):
    def ignore(record):
        return [(record["text"], 0.0)]

    for _ in range(2):  # the second is not said to go on from the first
        with pytest.raises(ValueError, match="weight 0 to every token of all 300 records"):
            pipeline.prepare(source, tokenizer, tmp_path / "corpus", template=ignore)
        assert not [*(tmp_path / "corpus").glob("*.arrow"), *(tmp_path / "corpus").glob("corpus*")]


def prefixed(kind, place):
    """A tokenizer of letters that puts a space before each text, as Llama's do, or none."""
    models, steps = tokenizers.models, tokenizers.pre_tokenizers
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{b:02X}>": 3 + b for b in range(256)}
    for letter in "\u2581" + "".join(map(chr, range(33, 127))):
        vocab[letter] = len(vocab)
    model = tokenizers.Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    replace = tokenizers.normalizers.Replace(" ", "\u2581")
    prepend = tokenizers.normalizers.Prepend("\u2581")
    match kind:
        case "prepend":
            model.normalizer = tokenizers.normalizers.Sequence([prepend, replace])
        case "prepend alone":
            model.normalizer, model.pre_tokenizer = prepend, steps.Metaspace(prepend_scheme="never")
        case "nested":
            step = steps.Metaspace(prepend_scheme="always", split=False)
            model.pre_tokenizer = steps.Sequence([steps.Sequence([step])])
        case _:
            model.pre_tokenizer = steps.Metaspace(prepend_scheme=kind, split=False)
    decode = tokenizers.decoders
    model.decoder = decode.Sequence(
        [decode.Replace("\u2581", " "), decode.ByteFallback(), decode.Fuse()]
        + [decode.Strip(" ", 1, 0)] * (kind != "never")
    )
    model.add_special_tokens(["<s>", "</s>"])
    model.save(str(place / "prefixed.json"))
    return HuggingFace(place / "prefixed.json", begin="<s>", end="</s>")


def with_defaults(place, **options):
    """A sentencepiece model that puts a space before each text."""
    texts = ["Q: the un happy cat", "A: hi yo user assistant"] * 50
    train_pieces(place / "spaced.model", texts, vocab_size=300, **options)
    return SentencePiece(place / "spaced.model")


SENTENCEPIECE = {
    "plain": {},
    "with marks": {"user_defined_symbols": ["<|end|>", "[INST]"]},
    "removing": {"remove_extra_whitespaces": True, "user_defined_symbols": ["<|end|>"]},
    "suffix": {"treat_whitespace_as_suffix": True},
}
KINDS = ["prepend", "prepend alone", "nested", "always", "first", "never", *SENTENCEPIECE]


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_put_where_a_span_begins_inside_an_example(kind, tmp_path):
    spans = [
        ["un", "happy"],
        ["Q: hi\nA: ", "yo"],
        ["", "un", "", "happy", " cat"],
        ["a", " b", "  c ", " "],
        ["x\n", "\ny", "né", " é"],
    ]
    if kind in SENTENCEPIECE:
        tokenizer = with_defaults(tmp_path, **SENTENCEPIECE[kind])
        own = templates.Markup("</s><|end|>[INST] ")
        spans.append([templates.Markup("Q: "), "<|end|>" + own, "yes"])
    else:
        tokenizer = prefixed(kind, tmp_path)
    for texts in spans:
        chunk = templates.encode([[[(text, 1.0, {}) for text in texts]]], tokenizer)
        assert tokenizer.spell(chunk.flat) == "".join(texts)
        if kind not in SENTENCEPIECE:
            # A text has as many letters in one span as in several; only the first gets a space.
            whole = templates.encode([[[("".join(texts), 1.0, {})]]], tokenizer)
            assert chunk.flat.tolist() == whole.flat.tolist()
    # A continuation goes on from its prefix, and begins the example if that is empty.
    for prefix in ("Q: ", ""):
        group = [[("Q", 0.0, {})] * bool(prefix) or [("", 0.0, {})], [("yo", 1.0, {})]]
        ids = templates.encode([group], tokenizer).flat
        assert tokenizer.spell(ids).rstrip() == ("Qyo" if prefix else "yo")


def test_a_model_may_remove_spaces_of_whole_texts_alone(tmp_path):
    tokenizer = with_defaults(tmp_path, **SENTENCEPIECE["removing"])
    alone = templates.encode([[[(" a  b ", 1.0, {})]]], tokenizer)
    assert tokenizer.spell(alone.flat) == "a b"


@pytest.mark.parametrize(
    ("single", "marks", "found"),
    [
        ("<s> $A </s>", {}, (1, 2)),
        ("<s> $A", {"end": "</s>"}, (1, 2)),
        ("$A </s>", {"begin": False}, (None, 2)),
        ("</s> $A <s>", {}, (2, 1)),
        ("$A", {"begin": False, "end": "<s>"}, (None, 1)),
        ("$A", {"begin": False}, "does not add exactly one end mark"),
        ("<s> <s> $A </s>", {}, "does not add exactly one begin mark"),
        ("<s> $A </s>", {"end": "<eos>"}, "has no token '<eos>'; name the token"),
    ],
)
def test_marks_are_found_in_any_alphabet(single, marks, found, tmp_path):
    vocab = {"x1": 0, "<s>": 1, "</s>": 2, "A": 3, "C": 4}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="<none>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single=single, special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    tokenizer.save(str(tmp_path / "dna.json"))
    if isinstance(found, str):
        with pytest.raises(ValueError, match=found):
            HuggingFace(tmp_path / "dna.json", **marks)
        return
    own = HuggingFace(tmp_path / "dna.json", **marks)
    assert (own.begin_id, own.end_id) == found
    description = json.loads(json.dumps(own.save(tmp_path)))
    assert load(description, tmp_path).fingerprint == own.fingerprint
    assert [*own.encode_batch(["A C"])[0]] == [n for n in (found[0], 3, 4, found[1]) if n]
    with pytest.raises(ValueError, match=r"dna\.json cannot encode 'x': .*; correct the record"):
        own.encode_batch(["x"])


def lower_case(place):
    """A tokenizer of lower-case words that knows few of them, as BERT's do."""
    vocab = {word: number for number, word in enumerate(["[UNK]", "a", "b", "c", ".", "[CLS]"])}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="[UNK]"))
    model.normalizer = tokenizers.normalizers.Lowercase()
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    model.save(str(place / "lower.json"))
    return HuggingFace(place / "lower.json", begin=False, end=False)


LONG_TEXTS = [
    "word other  thing\n\n\tand 123456 more, 'tis. " * 60,
    " ".join(f"{n * n}" for n in range(900)),
    "日本語 テキスト。" * 200 + " 😀\r\n" * 90,
    "a" * 3000 + " " * 2000 + "b c",
    "1234567" * 500,
]


def split_words(place, kind):
    """A tokenizer whose words are cut as some published ones cut them."""
    bare = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    pattern = r"'s|\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    steps = {
        "bytes": tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=True),
        "digits": tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated"),
        "spaces": tokenizers.pre_tokenizers.Metaspace(),
        "whole": None,
    }
    if steps[kind] is not None:
        bare.pre_tokenizer = steps[kind]
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>"])
    bare.train_from_iterator([text[:900] for text in LONG_TEXTS], trainer)
    bare.save(str(place / "t.json"))
    return HuggingFace(place / "t.json", begin=False, end=False)


@pytest.mark.parametrize("kind", ["bytes", "digits", "spaces", "whole"])
def test_long_texts_have_the_tokens_that_they_have_at_once(kind, tmp_path, monkeypatch):
    tokenizer, cuts = split_words(tmp_path, kind), []
    spans = [*LONG_TEXTS, *LONG_TEXTS]
    inside = [False] * len(LONG_TEXTS) + [True] * len(LONG_TEXTS)
    due = [each.tolist() for each in tokenizer.encode_spans(spans, inside)]
    for name, size in (("LONG", 700), ("AROUND", 60)):
        monkeypatch.setattr(f"pipeline.text.tokenizers.hugging_face.{name}", size)
    find = HuggingFace._find_cut
    monkeypatch.setattr(
        HuggingFace, "_find_cut", lambda *given: cuts.append(find(*given)) or cuts[-1]
    )
    assert [each.tolist() for each in tokenizer.encode_spans(spans, inside)] == due
    assert (len({*cuts}) > 10) == (kind != "whole")


def test_long_texts_of_bytes_have_the_tokens_that_they_have_at_once(monkeypatch):
    for marks in MARKS:
        due = [[each.tolist() for each in Bytes(*marks).encode_batch([t])] for t in LONG_TEXTS]
        monkeypatch.setattr("pipeline.text.tokenizer.LONG", 100)
        found = [[each.tolist() for each in Bytes(*marks).encode_batch([t])] for t in LONG_TEXTS]
        assert found == due
        monkeypatch.undo()


def test_characters_that_have_no_token_are_said_with_an_example(tmp_path, caplog):
    vocab = {token: number for number, token in enumerate(["a", "b", "ab", "<s>"])}
    bare = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [("a", "b")]))
    bare.decoder = tokenizers.decoders.Fuse()
    bare.save(str(tmp_path / "bare.json"))
    for marks in ({"begin": "<s>", "end": False}, {"begin": False, "end": False}):
        caplog.clear()
        tokenizer, records = HuggingFace(tmp_path / "bare.json", **marks), ["ab", "aéb", "b☃", "ba"]
        folder = tmp_path / f"{marks['begin']}"
        pipeline.prepare(Records(records), tokenizer, folder, progress=False)
        assert "2 of 4 records lose characters that the tokenizer has no token for" in caplog.text
        assert "as 'é', '☃')" in caplog.text


def test_text_that_a_tokenizer_cannot_hold_is_counted_or_refused(tmp_path, caplog):
    tokenizer = lower_case(tmp_path)
    records = ["a b", "A b", "a  b", "a zebra", "a b.", "c"] * 20
    prepare = functools.partial(pipeline.prepare, num_workers=0, progress=False)
    prepare(Records(records), tokenizer, tmp_path / "a")
    assert "80 of 120 records change when they are encoded and" in caplog.text
    assert "the first: record 1: the tokenizer loses text: 'A b' becomes 'a b'" in caplog.text
    for text, sentence in (("a  b", "'a  b' becomes 'a b'"), ("a z", r"'a z' becomes 'a \[UNK\]'")):
        with pytest.raises(ValueError, match=f"record 1: .*{sentence} when it is decoded; give"):
            prepare(Records(["a", text]), tokenizer, tmp_path / "b", strict=True)
    caplog.clear()
    prepare(Records(list(filter(None, HARD))), Bytes(), tmp_path / "c", strict=True)
    assert not caplog.records
    template = templates.Preference(prompt="{q}", chosen="{a}", rejected="{b}")
    record = {"q": "a ", "a": "b", "b": "C"}
    prepare(Records([record]), tokenizer, tmp_path / "d", template=template)
    assert "record 0: the tokenizer loses text: 'a C' becomes 'a c'" in caplog.text


def test_a_tokenizer_that_lacks_something_is_refused_before_the_work(tmp_path):
    class Mine:
        vocab_size, fingerprint, begin_id, end_id = 259, "mine", None, None

        def encode_batch(self, texts):
            raise AssertionError("work")

    with pytest.raises(TypeError, match="Mine has no kind, decode, save; a tokenizer has"):
        pipeline.prepare(Records(["a"]), Mine(), tmp_path, progress=False)


@pytest.mark.parametrize("kind", ["pieces", "words", "suffixes"])
def test_a_span_may_not_begin_inside_a_word_of_a_tokenizer_of_words(kind, tmp_path):
    models, words = tokenizers.models, {"[UNK]": 0, "un": 1, "happy": 2, "##happy": 3, ",": 4}
    model = {
        "pieces": lambda: models.WordPiece(words, unk_token="[UNK]"),
        "words": lambda: models.WordLevel(words, unk_token="[UNK]"),
        "suffixes": lambda: models.BPE(words, [], end_of_word_suffix="</w>", unk_token="[UNK]"),
    }[kind]()
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = HuggingFace(tmp_path / "tokenizer.json", begin=False, end=False)
    pair = Preference(prompt="{q}", chosen="{a}", rejected=" {a},")
    for prompt, template in (("un", Answer(prompt="{q}", answer="{a}")), ("un", pair)):
        filled = templates.fill(template, {"q": prompt, "a": "happy"})["inputs"]
        with pytest.raises(ValueError, match="the span 'happy' begins inside a word, after 'n'"):
            templates.encode([filled], tokenizer)
        filled = templates.fill(template, {"q": prompt + " ", "a": "happy"})["inputs"]
        assert templates.encode([filled], tokenizer).flat.tolist()
