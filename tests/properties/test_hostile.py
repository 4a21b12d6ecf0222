"""A quick run of all properties; `python -m tests.properties fuzz` is the long one."""

import numpy as np
import pyarrow as pa
import pytest
from etils import epath

from pipeline import Corpus
from pipeline.history import RunLog, audit
from pipeline.text.sources import ArrowFiles
from pipeline.trainer.corpora import open_source
from pipeline.trainer.schedule import Schedule
from tests.properties.properties import PROPERTIES, made, put, run


@pytest.mark.parametrize("name", PROPERTIES)
def test_hostile_input_keeps_the_contract_or_is_refused(name):
    one = PROPERTIES[name]
    assert run(one, one.quick, None) > one.quick / 2


# What was found, and is a sentence now.
FOUND = {
    "example 0 cannot be an array": lambda place: Corpus.from_arrays([[[1], [2, 3]]], place),
    "the weights of example 0 must have shape": lambda place: Corpus.from_arrays(
        {"tokens": [[1]], "weights": [{}]}, place
    ),
    r"vocab_size is \[3\]; it must be a whole number": lambda place: Corpus.from_arrays(
        [[1, 2]], place, vocab_size=[3]
    ),
    "have neither tokens_per_batch nor": lambda place: Schedule({"tokens_per_batch": None}).plan(
        [3, 8]
    ),
    "config.train.split is 5; it must be text": lambda place: open_source(
        {"files": ["a.txt"], "split": 5}, "config.train"
    ),
    "source is 'os:path', which cannot be imported: path is a module": lambda place: open_source(
        {"source": "os:path", "files": "", "split": ""}, "config.train"
    ),
}


@pytest.mark.parametrize("sentence", FOUND)
def test_what_was_found_is_a_sentence_now(sentence, tmp_path):
    with pytest.raises(ValueError, match=sentence):
        FOUND[sentence](tmp_path)


def test_a_damaged_arrow_file_does_not_crash_the_process(tmp_path):
    schema, batches = pa.schema([("text", pa.string())]), [["one", "two"], ["three"]]
    with pa.ipc.new_file(str(tmp_path / "a.arrow"), schema) as file:
        for texts in batches:
            file.write_batch(pa.record_batch([pa.array(texts)], schema))
    content = (tmp_path / "a.arrow").read_bytes()
    offsets = np.array([0, 3, 6], np.int32).tobytes()
    assert content.count(offsets) == 1
    wrong = np.array([0, 1 << 30, 6], np.int32).tobytes()
    (tmp_path / "a.arrow").write_bytes(content.replace(offsets, wrong))
    with pytest.raises(ValueError, match=r"its column of string cannot be read: .* out of bounds"):
        [dict(record) for record in ArrowFiles(tmp_path / "a.arrow")]


@pytest.mark.parametrize(
    ("name", "old", "new", "sentence"),
    [
        ("plans.json", b'"identity"', b'"i"', "plans.json cannot be read"),
        ("plans.json", b'"changes"', b'"change"', "plans.json cannot be read"),
        ("plans.json", b'"directory": "corpus"', b'"directory": 3', "plans.json cannot be read"),
        ("plans.json", b'"view": null', b'"view": "a"', "plans.json cannot be read"),
        ("metrics.jsonl", b'"loss"', b'"lows"', "line 1 of .*metrics.jsonl cannot be read: .*loss"),
        ("metrics.jsonl", b'"step": 3', b'"step": {}', "line 4 of .*metrics.jsonl cannot be"),
        ("metrics.jsonl", b"0.1}", b'[1], "step": [1]}', "line 1 of .*metrics.jsonl cannot be"),
        ("metrics.jsonl", b'"seconds"', b'"second\xff"', "line 1 of .*metrics.jsonl cannot be"),
    ],
)
def test_damaged_files_of_a_run_are_named(name, old, new, sentence, tmp_path):
    files = made("run")
    assert old in files[name]
    put(tmp_path, {**files, name: files[name].replace(old, new, 1)})
    with pytest.raises(ValueError, match=sentence):
        audit(epath.Path(tmp_path), lambda line: None)
    if (
        name == "metrics.jsonl" and new != b'"lows"'
    ):  # what cannot be read is no step, as it would be after a kill
        with RunLog(tmp_path, 6, 8):
            pass
        assert len((tmp_path / name).read_bytes().splitlines()) == 5
