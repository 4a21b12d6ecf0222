"""Records become examples of several sides: in one pass, by any workers, continued after kills."""

import json
import pkgutil
from unittest import mock

import numpy as np
import pytest

import pipeline
from pipeline import Examples, Feature, Pairs, prepare, prepare_pairs
from pipeline.corpus import Sides
from pipeline.corpus.engines import Processes
from pipeline.corpus.opening import open_corpus
from pipeline.corpus.tasks import TARGETS
from pipeline.text.sources import JsonLines, Records
from pipeline.text.templates import Function, Slots
from pipeline.text.tokenizers import Bytes
from tests.corpus.files import contents, require_equal

SMALL = {"TOKENS_PER_PART": 300, "LEAST": 2500, "BLOCK": 100}

SLOT = 258
FEATURES = {
    "patches": Feature("patches", dtype="uint8", shape=(3,)),
    "patch": Feature("inputs", to="patches"),
    "turn": Feature("inputs", dtype="int8", fill=0),
    "yx": Feature("inputs", dtype="int8", shape=(2,), fill=7),
    "patch_image": Feature("patches", to="images"),
    "grid": Feature("images", dtype="int32", shape=(2,)),
    "label": Feature("example", dtype="float32"),
}


def pictures(record):
    """Texts and pictures, `[height, width]`, in turn; a text with an x fails."""
    spans, patches, images = [], [], []
    for number, part in enumerate(record["parts"]):
        if isinstance(part, str):
            if "x" in part:
                raise ValueError("it has an x")
            spans.append((part, number % 2, {"turn": number}))
            continue
        count = part[0] * part[1]
        at = np.arange(count) + len(patches)
        patches += [[len(images), k, number] for k in range(count)]
        slots = Slots(SLOT, {"patch": at, "yx": [*np.ndindex(*part)]} if number % 2 else at)
        spans.append((slots, number / 2, {"turn": number}))
        images.append(part)
    if not images:
        return {"inputs": spans, "patches": {}, "images": {}}
    sides = {"patches": patches, "patch_image": [image for image, *_ in patches]}
    return {"inputs": spans, "patches": sides, "images": {"grid": images}}


pictures.features = FEATURES


def draw(count, seed=0):
    rng = np.random.default_rng(seed)

    def part():
        if rng.random() < 0.4:
            return rng.integers(1, 4, 2).tolist()
        return "".join(rng.choice([*"abcü "], rng.integers(0, 12)))

    return [
        {"parts": [part() for _ in range(rng.integers(1, 6))], "label": float(rng.integers(9))}
        for _ in range(count)
    ]


def define(records):
    """The same examples, made from arrays."""
    columns = {name: [] for name in ("tokens", "weights", *FEATURES)}
    for record in records:
        row = {name: [] for name in columns}
        for number, part in enumerate(record["parts"]):
            first, last = number == 0, number == len(record["parts"]) - 1
            if isinstance(part, str):
                ids, weight = [byte + 3 for byte in part.encode()], float(number % 2)
                at, yx = [-1] * len(ids), [(7, 7)] * len(ids)
            else:
                begin, weight = len(row["patches"]), number / 2
                at = [*range(begin, begin + part[0] * part[1])]
                yx = [(n, k) for n in range(part[0]) for k in range(part[1])]
                ids, yx = [SLOT] * len(at), yx if number % 2 else [(7, 7)] * len(at)
                image = len(row["grid"])
                row["patches"] += [[image, k, number] for k in range(len(at))]
                row["patch_image"] += [image] * len(at)
                row["grid"].append(part)
            marks = [1] * first, [2] * last
            row["tokens"] += [*marks[0], *ids, *marks[1]]
            row["patch"] += [*([-1] * first), *at, *([-1] * last)]
            row["weights"] += [*([0.0] * first), *([weight] * len(ids)), *([weight] * last)]
            row["turn"] += [number] * (len(ids) + first + last)
            row["yx"] += [*([(7, 7)] * first), *yx, *([(7, 7)] * last)]
        row["label"] = record["label"]
        for name, shape in (("patches", (0, 3)), ("grid", (0, 2))):
            row[name] = row[name] or np.zeros(shape, int)
        for name, values in row.items():
            columns[name].append(values)
    return Examples(columns, features=FEATURES)


@pytest.fixture
def source(tmp_path):
    lines = map(json.dumps, draw(80))
    (tmp_path / "records.jsonl").write_text("\n".join(lines))
    return JsonLines(tmp_path / "records.jsonl")


def make(source, directory, engine=None, **options):
    arguments = {"template": pictures, "engine": engine, "progress": False}
    return prepare(source, Bytes(), directory, **arguments, **options)


@pytest.mark.parametrize("seed", range(2))
def test_prepared_sides_are_those_of_the_definition(seed, tmp_path, monkeypatch):
    records = draw(60, seed)
    made = make(Records(records), tmp_path, Processes(0))
    require_equal(made, define(records))
    require_equal(open_corpus(tmp_path), made)
    assert made.tokenizer.fingerprint == Bytes().fingerprint
    made.verify()
    monkeypatch.setattr(Bytes, "encode_batch", None)
    assert make(Records(records), tmp_path).fingerprint == made.fingerprint


@pytest.mark.parametrize(
    ("module", "name", "calls"),
    [
        ("preparation", "finish", 1),
        ("preparation", "finish", 2),
        ("work", "write_record", 1),
        ("work", "write_record", 2),
    ],
)
def test_killed_between_the_sides_it_goes_on_with_the_rest(module, name, calls, source, tmp_path):
    files = [
        side.files.tolist()
        for side in make(source, tmp_path / "whole", Processes(0)).sides.values()
    ]
    assert files[0] == files[1] == files[2]  # all sides of a part have the same examples
    target = f"pipeline.corpus.preparing.{module}.{name}"
    ends = [*[mock.DEFAULT] * (calls - 1), KeyError("killed")]
    dying = mock.Mock(wraps=pkgutil.resolve_name(target), side_effect=ends)
    with mock.patch(target, dying), pytest.raises(KeyError, match="killed"):
        make(source, tmp_path / "killed", Processes(0))
    make(source, tmp_path / "killed", Processes(0))
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")


def test_records_that_fail_have_nothing_on_any_side_and_are_listed(tmp_path, caplog):
    records = draw(40)
    for number in (3, 17):
        records[number]["parts"] = ["ax", [1, 1]]
    records[20]["label"] = None  # found after the tokens
    made = make(Records(records), tmp_path, Processes(0), on_error="skip")
    assert not made.lengths[[3, 17, 20]].any()
    listed = [json.loads(line) for line in (tmp_path / "skipped.jsonl").open()]
    assert [failure["example"] for failure in listed] == [3, 17, 20]
    assert "3 of 40 records failed" in caplog.text
    for number in (3, 17, 20):
        records[number] |= {"parts": [""], "label": 0.0}
    numbers = [number for number in range(40) if number not in (3, 17, 20)]
    np.testing.assert_array_equal(made.lengths[numbers], define(records).lengths[numbers])


def test_fields_of_records_may_be_sides_without_a_template(tmp_path):
    records = [
        {"text": "ab", "frames": [[1.0, 2.0], [3.0, 4.0]]},
        {"text": "c", "frames": None},
    ]
    features = {"frames": Feature("frames", dtype="float32", shape=(2,))}
    options = {"features": features, "progress": False}
    speech = prepare(Records(records), Bytes(), tmp_path / "a", task=TARGETS, **options)
    assert speech.side_names == ("targets", "frames")
    assert speech.lengths.tolist() == [[3, 2], [2, 0]]
    assert speech[0]["frames"].tolist() == records[0]["frames"]
    both = [record | {"inputs": "q"} for record in records]
    pairs = prepare_pairs(
        Records(both), Bytes(), tmp_path / "b", fields=("inputs", "text"), **options
    )
    assert not isinstance(pairs, Pairs)
    assert pairs.side_names == ("inputs", "targets", "frames")
    assert (pairs.loss, pairs.lengths.tolist()) == ("targets", [[3, 3, 2], [3, 2, 0]])
    alone = prepare(Records(records), None, tmp_path / "c", loss="frames", **options)
    assert isinstance(alone, Sides)
    assert (alone.loss, alone.lengths.tolist()) == ("frames", [2, 0])
    assert open_corpus(tmp_path / "c").fingerprint == alone.fingerprint


# ---- what is refused

PATCHES = {"patches": Feature("patches", dtype="uint8", shape=(2,))}
POINTER = {"patch": Feature("inputs", to="patches"), **PATCHES}
PLACED = {**PATCHES, "yx": Feature("patches", dtype="int8")}
ONE, TEXT = {"patches": [[1, 2]]}, [("a", 1.0)]


@pytest.mark.parametrize(
    ("returned", "features", "said"),
    [
        ({"inputs": TEXT, "patches": {**ONE, "yx": [1, 2]}}, PLACED, "record 0: yx has 2 values"),
        ({"inputs": [(Slots(9, [0, 1]), 0.0)], "patches": ONE}, POINTER, "points to position 1 of"),
        ({"inputs": [(Slots(999, [0]), 0.0)], "patches": ONE}, POINTER, "gave the id 999"),
        ({"inputs": TEXT, "pictures": ONE}, PATCHES, "return a dict of sides"),
        ([(Slots(9, [0]), 1.0)], PATCHES, "returned Slots, and the pointers of tokens are none"),
        ({"inputs": TEXT, "patches": {"patches": [[1, 256]]}}, PATCHES, "patches holds 256"),
    ],
)
def test_records_that_do_not_fit_their_sides_are_refused(returned, features, said, tmp_path):
    template = Function(lambda _: returned, fingerprint="v1")
    arguments = {"template": template, "features": features, "progress": False, "num_workers": 0}
    with pytest.raises(ValueError, match=said):
        prepare(Records([{"text": "a"}]), Bytes(), tmp_path, **arguments)


def test_directories_of_something_else_are_refused(source, tmp_path):
    sides, texts, quiet = tmp_path / "sides", Records(["a", "b"]), {"progress": False}
    make(source, sides, Processes(0))
    records = Records([{"text": "a", **ONE}])
    both = {"features": PATCHES, "loss": "patches", **quiet}
    for act, said in (
        (lambda: prepare(texts, Bytes(), sides, **quiet), "holds a corpus of several sides"),
        (lambda: make(Records(draw(3)), sides), "sides/inputs holds .* made with another source"),
        (lambda: make(source, sides, features=FEATURES | PATCHES), "made with another features"),
        (lambda: prepare(records, Bytes(), tmp_path / "b", **both), "patches both carry the loss"),
    ):
        with pytest.raises(ValueError, match=said):
            act()
    assert pipeline.Corpus.open(sides).fingerprint == open_corpus(sides).fingerprint
