"""With on_error="skip", a record that fails is left out of everything, listed and counted."""

import gzip
import json
import os

import numpy as np
import pytest

import pipeline
from pipeline.text import source
from pipeline.text.sources import JsonLines, Records, TextFiles
from pipeline.text.tokenizers import Bytes, train_sentencepiece

OPTIONS = {"progress": False, "num_workers": 0, "on_error": "skip"}


def test_a_pair_of_which_one_side_fails_is_in_no_batch(tmp_path):
    sides = [("aa", "b"), (None, "c"), ("d", None), ("", "e"), ("f", ""), (None, None)]
    records = [dict(zip(("inputs", "targets"), pair, strict=True)) for pair in sides]
    pairs = pipeline.prepare_pairs(Records(records), Bytes(), tmp_path / "pairs", **OPTIONS)
    assert pairs.lengths.tolist() == [[4, 2], [0, 0], [0, 0], [2, 2], [3, 1], [0, 0]]
    again = pipeline.Pairs.open(tmp_path / "pairs")
    assert (again.lengths == pairs.lengths).all()
    with pipeline.load(pairs, tokens_per_batch=64, num_epochs=1) as batches:
        targets = [
            int(target) for batch in batches for target in batch["targets"].ravel() if target > 2
        ]
    assert sorted(map(chr, (target - 3 for target in targets))) == ["b", "e"]


def test_failures_are_listed_with_their_place_and_counted_by_reason(tmp_path, caplog):
    path = tmp_path / os.fsdecode(b"caf\xe9.jsonl")
    lines = ['{"text": "a"}', "nope", '{"text": null}', '{"text": []}', '{"text": "b"}', "[1]", "{"]
    path.write_text("\n".join(lines * 3))
    corpus = pipeline.prepare(JsonLines(path), Bytes(), tmp_path / "corpus", **OPTIONS)
    assert [corpus.decode(at) for at in range(7)] == ["a", "", "", "", "b", "", ""]
    listed = [json.loads(line) for line in (tmp_path / "corpus/skipped.jsonl").open()]
    assert [failure["byte"] for failure in listed[:5]] == [14, 19, 34, 61, 65]
    assert {failure["file"] for failure in listed} == {str(path)}
    assert "15 of 21 records failed" in caplog.text
    assert "6 × it is not valid JSON, 3 × " in caplog.text


def test_a_reason_ends_with_its_sentence_not_in_a_name(tmp_path, caplog):
    def refuse(record):
        if record["text"] == "b":
            raise ValueError("the module a.b has no value. Give one")
        return [(record["text"], 1.0)]

    source = Records([{"text": "a"}, {"text": "b"}])
    pipeline.prepare(source, Bytes(), tmp_path / "corpus", template=refuse, **OPTIONS)
    assert caplog.text.rstrip().endswith("1 × the module a.b has no value")


@pytest.mark.parametrize("count", [400, 2_000])  # 400 are unpacked at once
@pytest.mark.parametrize("sample_by", ["line", "file"])
def test_the_rest_of_a_damaged_file_is_left_out_and_listed(
    sample_by, count, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(source, "BLOCK", 1 << 14)
    lines = [f"{number} " * 40 for number in range(count)]
    packed = gzip.compress("\n".join(lines).encode())
    for name, content in (("a", packed), ("b", packed[:-9]), ("c", packed)):
        (tmp_path / f"{name}.txt.gz").write_bytes(content)
    files = TextFiles(str(tmp_path / "?.txt.gz"), sample_by=sample_by)
    corpus = pipeline.prepare(files, Bytes(), tmp_path / "corpus", **OPTIONS)
    (failed,) = map(json.loads, (tmp_path / "corpus/skipped.jsonl").open())
    whole = len(lines) if sample_by == "line" else 1
    texts = [corpus.decode(number) for number in range(len(corpus))]
    expected = [line.rstrip() for line in lines] if sample_by == "line" else ["\n".join(lines)]
    assert [text.rstrip() for text in texts[-whole:]] == [text.rstrip() for text in expected]
    read = failed["example"]
    assert texts[whole:read] == texts[: read - whole]
    assert texts[read] == ""
    assert (failed["file"], len(texts)) == (str(tmp_path / "b.txt.gz"), read + 1 + whole)
    if sample_by == "line":
        assert read > 1.5 * whole or count == 400
        assert failed["byte"] == sum(len(line) + 1 for line in lines[: read - whole])
        assert "1 × the rest of the file cannot be read" in caplog.text


def test_a_lack_of_memory_is_not_the_fault_of_a_record(tmp_path):
    def run_out(record):
        raise MemoryError

    with pytest.raises(MemoryError):
        pipeline.prepare(Records(["a"]), Bytes(), tmp_path / "a", template=run_out, **OPTIONS)


def test_records_that_no_field_can_read_do_not_stop_a_fingerprint_or_a_tokenizer(tmp_path, caplog):
    source = Records(["some words", None, 5, {"body": "x"}, {"text": b"\xff"}, "more words"] * 20)
    tokenizer = train_sentencepiece(source, 270, tmp_path / "m.model")
    assert "trained without the records that fail; first record 1: it is a NoneType" in caplog.text
    corpus = pipeline.prepare(source, tokenizer, tmp_path / "corpus", **OPTIONS)
    assert [corpus.decode(at) for at in range(6)] == ["some words", "", "", "", "", "more words"]


@pytest.mark.parametrize("template", [None, lambda record: [(record["text"], 1.0)]])
@pytest.mark.parametrize(
    ("wrong", "dtype"),
    [
        *(((1 << 32) + 7, "int64"), (-1, "int64"), (-1, "int32"), (259, "int16"), (259, "uint16")),
        *(((1 << 31) + 5, "uint32"), ((1 << 63) + 5, "uint64"), (1 << 31, "int64")),
    ],
)
def test_an_id_of_a_tokenizer_that_does_not_fit_fails_its_record(
    wrong, dtype, template, tmp_path, monkeypatch
):
    def encode(self, texts):
        ids = [[5, wrong if "x" in str(text) else 5] for text in texts]
        return np.ravel(np.array(ids, dtype)), np.full(len(texts), 2)

    monkeypatch.setattr(Bytes, "encode_batch", encode)
    arguments = {"source": Records(["ab", "x", "cd"]), "tokenizer": Bytes(), "template": template}
    with pytest.raises(ValueError, match=rf"record 1: the tokenizer .* gave the id {wrong}, and"):
        pipeline.prepare(**arguments, directory=tmp_path / "a", **{**OPTIONS, "on_error": "raise"})
    pipeline.prepare(**arguments, directory=tmp_path / "b", **OPTIONS)
    (failed,) = (tmp_path / "b/skipped.jsonl").read_text().splitlines()
    assert json.loads(failed)["record"] == 1
