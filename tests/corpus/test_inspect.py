"""One look at a sample says what is not trained on, and changes nothing."""

import collections
import json

import pyarrow as pa
import pytest
import tokenizers
from pyarrow import feather

from pipeline import Feature, prepare, prepare_pairs
from pipeline.corpus import Job
from pipeline.corpus.preparing import inspect as inspect_module
from pipeline.corpus.preparing.inspect import inspect
from pipeline.text import templates
from pipeline.text.sources import ArrowFiles, Records, TextFiles
from pipeline.text.templates import Function
from pipeline.text.tokenizers import Bytes, HuggingFace
from tests.corpus.files import contents

SMALL = {"LEAST": 2000, "BLOCK": 500}
LINES = [f"line {number} of the text" for number in range(5000)]


@pytest.fixture
def source(tmp_path):
    (tmp_path / "text.txt").write_text("\n".join(LINES))
    return TextFiles(tmp_path / "text.txt")


def without_unknown(folder, letters):
    """A BPE that has tokens for some letters, and none for what is unknown."""
    vocab = {letter: number for number, letter in enumerate(letters)}
    model = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
    model.decoder = tokenizers.decoders.Fuse()
    model.save(str(folder / "bpe.json"))
    return HuggingFace(folder / "bpe.json", begin=False, end=False)


def test_a_sample_is_spread_and_each_record_is_rendered_once_besides(source, tmp_path):
    seen = collections.Counter()

    def count(record):
        seen[record["text"]] += 1
        return [(record["text"], 1.0)]

    job = Job(source, Bytes(), template=Function(count, fingerprint="1"))
    shards = job.records.shards()
    assert len(shards) > 50
    inspection = inspect(job, shards)
    assert inspection.records == sum(seen.values())
    assert 500 < inspection.records <= 1024
    sampled = sorted(int(line.split()[1]) for line in seen)
    assert max(b - a for a, b in zip([0, *sampled], [*sampled, 5000], strict=True)) < 200
    assert inspection.tokens == inspection.characters + 2 * inspection.records  # and two marks
    assert f"{inspection.characters:,} characters in {inspection.tokens:,} tokens" in str(
        inspection
    )
    seen.clear()
    prepare(source, Bytes(), tmp_path / "c", template=job.template, num_workers=0, progress=False)
    assert {*seen} == {*LINES}
    assert sum(seen.values()) == 5000 + inspection.records


def test_characters_without_a_token_are_counted_with_an_example(tmp_path, caplog):
    tokenizer = without_unknown(tmp_path, "abcdef ")
    texts = ["abc", "a é b", "fé éd", "dab"] * 3
    prepare(Records(texts), tokenizer, tmp_path / "c", num_workers=0, progress=False)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == (
        "in a sample, 6 of 12 records lose characters that the tokenizer has no token for (9 of "
        "48 characters, as 'é'); the first: record 1: the tokenizer loses text: 'a é b' becomes "
        "'a  b' when it is decoded"
    )
    with pytest.raises(ValueError, match=r"record 1: .*'a é b' becomes 'a  b' when it is decoded"):
        prepare(
            Records(texts), tokenizer, tmp_path / "d", strict=True, num_workers=0, progress=False
        )


def test_notes_are_of_the_sample_and_said_once(source, tmp_path, caplog):
    def note(record):
        number = int(record["text"].split()[1])
        if number % 2:
            templates.note("have an odd number", f"it is {number}")
        return [(record["text"], 1.0)]

    template = Function(note, fingerprint="1")
    options = {"template": template, "num_workers": 0, "progress": False}
    prepare(source, Bytes(), tmp_path / "c", **options)
    (line,) = [record.getMessage() for record in caplog.records]
    assert "records have an odd number; the first: " in line
    assert line.startswith("in a sample, ")
    caplog.clear()
    prepare(source, Bytes(), tmp_path / "c", **options)
    assert caplog.records == []


def read_some(record):
    return [(record["text"] + str(record.get("n", "")), 1.0)]


def read_all(record):
    return [({**record}["text"], 1.0)]


def read_beside(record):
    return [((record | {})["text"], 1.0)]


def read_as_json(record):
    return [(json.dumps(record), 1.0)]


SOME = templates.Answer(prompt="{n}", answer="{text}")
RECORDS = [
    {"text": "a", "n": 1, "loss_mask": [0, 1], "url": None, "reward": 0.0},
    {"text": "b", "n": 2, "loss_mask": [], "url": "x", "reward": False},
    {"text": b"c", "loss_mask": None, "reward": 1},
]


@pytest.mark.parametrize(
    ("template", "unused"),
    [
        (None, "'n' of 2, 'loss_mask' of 1, 'reward', 'url' of 1"),
        (SOME, "'loss_mask' of 1, 'reward', 'url' of 1"),
        (read_some, "'loss_mask' of 1, 'reward', 'url' of 1"),
        (
            templates.Preference(prompt=read_some, chosen="yes", rejected="not"),
            "'loss_mask' of 1, 'rew",
        ),
        (read_all, None),
        (read_beside, None),
        (read_as_json, None),
    ],
)
def test_fields_that_nothing_reads_are_said_once(template, unused, tmp_path, caplog):
    records = RECORDS[:2] if template is SOME else RECORDS
    options = {"template": template, "num_workers": 0, "progress": False}
    prepare(Records(records), Bytes(), tmp_path / "c", **options)
    assert len(caplog.records) == bool(unused), caplog.text
    if unused:
        due = unused.replace(" of 2", "") if template is SOME else unused
        assert (
            f"in a sample of {len(records)} records, fields that are not used: {due}" in caplog.text
        )


def test_values_of_a_template_that_no_feature_describes_are_said(tmp_path, caplog):
    def advise(record):
        spans = [(record["text"], 1.0, {"advantage": 0.5, "step": 1})]
        return {"inputs": spans, "patches": {"patches": [[1], [2]], "extra": [1, 2]}}

    features = {
        "step": Feature("targets", dtype="int32"),
        "patches": Feature("patches", shape=(1,), dtype="uint8"),
    }
    records, template = Records([{"text": "a"}] * 2), Function(advise, fingerprint="1")
    prepare(records, Bytes(), tmp_path / "c", template=template, features=features, progress=False)
    said = sorted(record.getMessage() for record in caplog.records)
    about = (
        "2 of 2 records have values of {!r} by the template, which no feature describes; the first"
    )
    assert [
        about.format(name) in line for name, line in zip(("advantage", "extra"), said, strict=True)
    ] == [True] * 2


def test_a_field_that_is_a_feature_is_used(tmp_path, caplog):
    reward = {"reward": Feature("example", dtype="float32")}
    records = [{"text": "a", "reward": 0.5, "other": 1}]
    prepare(Records(records), Bytes(), tmp_path / "c", features=reward, progress=False)
    assert "1 record, fields that are not used: 'other'; if one decides what is" in caplog.text


def test_columns_that_nothing_reads_are_said_and_stay_unread(tmp_path, caplog):
    table = pa.table({"text": ["a", "b"], "n": [1, 2], "loss_mask": [[0], [1]]})
    feather.write_feather(table, tmp_path / "a.arrow")
    files = ArrowFiles(tmp_path / "a.arrow")
    prepare(files, Bytes(), tmp_path / "c", template=SOME, num_workers=0, progress=False)
    (line,) = (record.getMessage() for record in caplog.records)
    assert "in a sample of 2 records, fields that are not used: 'loss_mask'; if one" in line
    assert files.format._asked == {"text", "n"}


def test_little_text_is_looked_at_where_records_are_large(tmp_path, monkeypatch):
    monkeypatch.setattr(inspect_module, "CHARACTERS", 3000)
    inspection = inspect(job := Job(Records(["x" * 1000] * 500), Bytes()), job.records.shards())
    assert 3000 <= inspection.characters < 10_000


def test_records_that_fail_are_left_to_the_work(tmp_path):
    texts = [*LINES[:20], 3.5j, *LINES[20:40]]
    job = Job(Records([{"text": text} for text in texts], fingerprint="1"), Bytes())
    inspection = inspect(job, job.records.shards())
    assert (inspection.records, dict(inspection.findings)) == (41, {})
    with pytest.raises(ValueError, match="record 20: its field 'text' holds complex"):
        prepare(job.source, Bytes(), tmp_path / "c", num_workers=0, progress=False)


def test_a_look_changes_no_byte(source, tmp_path, monkeypatch):
    options = {"num_workers": 0, "progress": False}
    seen = prepare(source, Bytes(), tmp_path / "seen", **options)
    monkeypatch.setattr(
        "pipeline.corpus.preparing.preparation.inspect", lambda *_: inspect_module.Inspection()
    )
    unseen = prepare(source, Bytes(), tmp_path / "unseen", **options)
    assert contents(seen.directory) == contents(unseen.directory)


def test_records_without_text_are_counted_over_all_of_them(tmp_path, caplog):
    texts = ["", "a", "\n", "bc", ""] * 500  # more than a sample
    quiet = {"num_workers": 0, "progress": False}
    for tokenizer in (Bytes(), Bytes(begin=False), Bytes(begin=False, end=False)):
        caplog.clear()
        prepare(Records(texts), tokenizer, tmp_path / str(tokenizer.fingerprint), **quiet)
        said = [
            record.getMessage()
            for record in caplog.records
            if "have no text" in record.getMessage()
        ]
        assert len(said) == 1, caplog.text
        assert "1,000 of 2,500 records have no text; of such a one, at most the marks" in said[0]
        assert "the first: record 0" in said[0]
    caplog.clear()
    prepare(Records(["a", "b"]), Bytes(), tmp_path / "full", **quiet)
    assert caplog.records == []


def ask(record):
    return [(record["q"] + ": ", 0.0), (record["a"], 1.0)]


UNANSWERED = "in a sample, 1 of 3 records have an answer without text, so a model learns to say no"
UNASKED = (
    "in a sample, 1 of 3 records have a prompt without text, so a model learns to answer nothing"
)
ASK = templates.Answer(prompt="{q}: ", answer="{a}", null={"a": ""})


@pytest.mark.parametrize(
    ("template", "blank", "said"),
    [
        (ASK, {"q": "q", "a": ""}, [UNANSWERED]),
        (ASK, {"q": "", "a": ""}, [UNANSWERED]),
        (ASK, {"q": "q", "a": None}, [UNANSWERED]),
        (ASK, {"q": " ", "a": "a"}, [UNASKED]),
        (ASK, {"q": "q", "a": "a"}, []),
        (ask, {"q": "q", "a": "\n"}, [UNANSWERED]),
        (ask, {"q": "", "a": "a"}, []),
        (templates.Answer(prompt="{q}", answer="A: {a}|"), {"q": "q", "a": ""}, [UNANSWERED]),
        (templates.Answer(prompt="{q}", answer="yes"), {"q": "q", "a": ""}, []),
        (templates.Answer(prompt="", answer="{a}"), {"q": "", "a": "a"}, []),
        (
            templates.Answer(prompt="{q}", answer="{a}"),
            {"q": "", "a": ""},
            ["1 of 3 records have no"],
        ),
        (
            templates.Preference(prompt="{q}: ", chosen="{a}", rejected="no {a}"),
            {"q": "", "a": "a"},
            [UNASKED],
        ),
    ],
)
def test_answers_and_prompts_without_text_are_counted_once(template, blank, said, tmp_path, caplog):
    full = {"q": "question", "a": "answer"}
    quiet = {"num_workers": 0, "progress": False}
    prepare(Records([full, blank, full]), Bytes(), tmp_path, template=template, **quiet)
    lines = [
        record.getMessage() for record in caplog.records if "not used" not in record.getMessage()
    ]
    assert len(lines) == len(said), lines
    for line, wanted in zip(lines, said, strict=True):
        assert line.startswith(wanted)
        assert "the first: record 1" in line


def test_sides_and_failed_records_without_text_are_told_apart(tmp_path, caplog):
    records = [{"de": "", "en": "a"}, {"de": "b", "en": "c"}, {"de": None, "en": ""}]
    fields = {"fields": ("de", "en"), "num_workers": 0, "progress": False, "on_error": "skip"}
    prepare_pairs(Records(records), Bytes(), tmp_path / "pairs", **fields)
    (said,) = [
        record.getMessage() for record in caplog.records if "have no text" in record.getMessage()
    ]
    assert "1 of 3 records have no text on the side 'inputs'" in said
