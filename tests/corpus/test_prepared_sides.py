"""Records become examples of several sides: in one pass, by any workers, continued after kills."""

import itertools
import json
import pkgutil

import numpy as np
import pytest

import pipeline
from pipeline import Examples, Feature, Pairs, prepare, prepare_pairs
from pipeline.corpus import Sides, open_corpus
from pipeline.corpus.engines import Processes
from pipeline.corpus.tasks import TARGETS
from pipeline.text.sources import JsonLines, Records
from pipeline.text.templates import Function, Pair, Slots
from pipeline.text.tokenizers import Bytes
from tests.corpus.engines import Twice, Untouchable
from tests.corpus.files import contents, require_equal

SMALL = {"TOKENS_PER_PART": 300, "LEAST": 2500, "BLOCK": 100}

SLOT = 258
FEATURES = {
    "patches": Feature("patches", dtype="uint8", shape=(3,)),
    "patch": Feature("inputs", to="patches"),
    "turn": Feature("inputs", dtype="int8", fill=0),
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
        spans.append((Slots(SLOT, at), 0.0, {"turn": number}))
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
                ids = [byte + 3 for byte in part.encode()]
                at = [-1] * len(ids)
            else:
                begin = len(row["patches"])
                at = [*range(begin, begin + part[0] * part[1])]
                ids = [SLOT] * len(at)
                image = len(row["grid"])
                row["patches"] += [[image, k, number] for k in range(len(at))]
                row["patch_image"] += [image] * len(at)
                row["grid"].append(part)
            weight = float(number % 2) if isinstance(part, str) else 0.0
            marks = [1] * first, [2] * last
            row["tokens"] += [*marks[0], *ids, *marks[1]]
            row["patch"] += [*([-1] * first), *at, *([-1] * last)]
            row["weights"] += [*([0.0] * first), *([weight] * len(ids)), *([weight] * last)]
            row["turn"] += [number] * (len(ids) + first + last)
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
    given = {"template": pictures, "engine": engine, "progress": False}
    return prepare(source, Bytes(), directory, **given, **options)


@pytest.mark.parametrize("seed", range(2))
def test_prepared_sides_are_those_of_the_definition(seed, tmp_path):
    records = draw(60, seed)
    made = make(Records(records), tmp_path, Processes(0))
    require_equal(made, define(records))
    require_equal(open_corpus(tmp_path), made)
    assert made.tokenizer.fingerprint == Bytes().fingerprint
    made.verify()
    again = prepare(Records(records), Untouchable(), tmp_path, template=pictures, progress=False)
    assert again.fingerprint == made.fingerprint


def test_tasks_that_run_twice_in_any_order_make_the_same_files(source, tmp_path):
    whole = make(source, tmp_path / "one", Processes(0))
    assert len(whole.sides[1].files) > 4
    make(source, tmp_path / "twice", Twice())
    assert contents(tmp_path / "twice") == contents(tmp_path / "one")
    # All sides of a part have the same examples.
    files = [side.files.tolist() for side in whole.sides]
    assert files[0] == files[1] == files[2]


@pytest.mark.parametrize(
    ("module", "name", "calls"),
    [("preparation", "finish", 1), ("preparation", "finish", 2), ("work", "write_record", 2)],
)
def test_killed_between_the_sides_it_goes_on_with_the_rest(module, name, calls, source, tmp_path):
    make(source, tmp_path / "whole", Processes(0))
    count, place = itertools.count(1), f"pipeline.corpus.{module}.{name}"
    whole = pkgutil.resolve_name(place)

    def die(*arguments, **options):
        if next(count) == calls:
            raise KeyError("killed")
        return whole(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(place, die)
        with pytest.raises(KeyError, match="killed"):
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
    assert [each["example"] for each in listed] == [3, 17, 20]
    assert "3 of 40 records failed" in caplog.text
    for number in (3, 17, 20):
        records[number] |= {"parts": [""], "label": 0.0}
    kept = [number for number in range(40) if number not in (3, 17, 20)]
    np.testing.assert_array_equal(made.lengths[kept], define(records).lengths[kept])
    with pytest.raises(
        ValueError, match="record 3: it does not suit the template pictures: it has"
    ):
        make(Records([*records[:3], {"parts": ["x"]}]), tmp_path / "no", Processes(0))


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
    assert (pairs.loss_side, pairs.lengths.tolist()) == (1, [[3, 3, 2], [3, 2, 0]])
    alone = prepare(Records(records), None, tmp_path / "c", loss="frames", **options)
    assert isinstance(alone, Sides)
    assert (alone.loss_side, alone.lengths.tolist()) == (0, [2, 0])
    assert open_corpus(tmp_path / "c").fingerprint == alone.fingerprint


def test_slots_may_have_values_of_several_features_and_stand_anywhere(tmp_path):
    features = {
        "a": Feature("inputs", to="frames"),
        "b": Feature("inputs", to="frames"),
        "at": Feature("inputs", dtype="int8", shape=(2,), fill=7),
        "frames": Feature("frames", dtype="int8"),
    }

    def spans(record):
        slots = Slots(5, {"b": [1, 0], "at": [[1, 2], [3, 4]]})
        return {"inputs": [(slots, 0.0), ("u", 1.0), (slots, 1.0)], "frames": {"frames": [8, 9]}}

    options = {"template": spans, "features": features, "progress": False}
    one = prepare(Records([{"text": ""}]), Bytes(), tmp_path, **options)[0]
    assert one["inputs"].tolist() == [1, 5, 5, 120, 5, 5]
    assert one["targets"].tolist() == [5, 5, 120, 5, 5, 2]
    assert one["loss_weights"].tolist() == [0, 0, 1, 1, 1, 1]
    assert one["b"].tolist() == [-1, 1, 0, -1, 1, 0]
    assert (one["a"] == -1).all()
    assert one["at"].tolist() == [[7, 7], [1, 2], [3, 4], [7, 7], [1, 2], [3, 4]]


# ---- what is refused

PATCHES = {"patches": Feature("patches", dtype="uint8", shape=(2,))}
POINTER = {"patch": Feature("inputs", to="patches"), **PATCHES}


ONE, TEXT = {"patches": [[1, 2]]}, [("a", 1.0)]


@pytest.mark.parametrize(
    ("returned", "features", "said"),
    [
        (
            {"inputs": TEXT, "patches": {**ONE, "yx": [1, 2]}},
            {**PATCHES, "yx": Feature("patches", dtype="int8")},
            "record 0: yx has 2 values, and patches 1; both are of the side 'patches'",
        ),
        (
            {"inputs": [(Slots(9, [0, 1]), 0.0)], "patches": ONE},
            POINTER,
            "record 0: patch points to position 1 of patches, which has 1; give positions from 0",
        ),
        ({"inputs": TEXT, "pictures": ONE}, PATCHES, "return a dict of sides, with spans for inp"),
        ({"patches": ONE}, PATCHES, "return a dict of sides, with spans for inputs, and arrays by"),
        (
            {"inputs": TEXT, "patches": {"other": [[1, 2]]}},
            PATCHES,
            "patches of the side 'patches' is missing; there are other",
        ),
        (TEXT, PATCHES, "is missing; there are text: name the feature like"),
        ([(Slots(9, [0]), 1.0)], PATCHES, "returned Slots, and the pointers of tokens are none"),
        (
            {"inputs": [(Slots(999, [0]), 0.0)], "patches": ONE},
            POINTER,
            "record 0: the tokenizer .* gave the id 999",
        ),
        (
            {"inputs": TEXT, "patches": {"patches": [[1, 256]]}},
            PATCHES,
            "record 0: patches holds 256; uint8 holds 0 to 255",
        ),
        (
            {"inputs": TEXT, "patches": ONE},
            {"patches": Feature("patches", shape=(2,))},
            "the feature 'patches' has no dtype",
        ),
        (
            {"inputs": TEXT},
            {"patch": Feature("inputs", to="image"), **PATCHES},
            "points to the side 'image'; there are inputs, patches",
        ),
    ],
)
def test_records_that_do_not_fit_their_sides_are_refused(returned, features, said, tmp_path):
    template = Function(lambda _: returned, fingerprint="v1")
    given = {"template": template, "features": features, "progress": False, "num_workers": 0}
    with pytest.raises(ValueError, match=said):
        prepare(Records([{"text": "a"}]), Bytes(), tmp_path, **given)


def test_directories_of_something_else_and_growth_are_refused(source, tmp_path):
    make(source, tmp_path / "sides", Processes(0))
    texts, quiet = Records(["a", "b"]), {"progress": False}
    prepare(texts, Bytes(), tmp_path / "text", **quiet)
    for act, said in (
        (
            lambda: prepare(texts, Bytes(), tmp_path / "sides", **quiet),
            "holds a corpus of several sides; prepare with their features",
        ),
        (
            lambda: make(Records(draw(3)), tmp_path / "sides"),
            "sides/inputs holds a corpus made with another source",
        ),
        (
            lambda: make(source, tmp_path / "sides", features=FEATURES | PATCHES),
            "sides/inputs holds a corpus made with another features",
        ),
        (
            lambda: pipeline.load(tmp_path / "sides", tokens_per_batch=64, follow=True),
            "holds a corpus of several sides, which cannot grow yet",
        ),
        (
            lambda: pipeline.Corpus.open(tmp_path / "sides"),
            "holds a corpus of several sides, which cannot grow yet; open it with",
        ),
        (
            lambda: prepare(texts, None, tmp_path / "none", **quiet),
            "tokenizer is None, and features describe no side of arrays",
        ),
        (
            lambda: prepare(
                Records([{"text": "a", **ONE}]),
                *(Bytes(), tmp_path / "a"),
                features=PATCHES,
                loss="patches",
            ),
            "inputs and patches both carry the loss; one",
        ),
        (
            lambda: prepare(
                texts, Bytes(), tmp_path / "b", template=Pair(inputs="a", targets="b"), task=TARGETS
            ),
            "makes pairs, which are of the task",
        ),
    ):
        with pytest.raises(ValueError, match=said):
            act()
