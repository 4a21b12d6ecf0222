"""Pairs: two corpora side by side."""

import functools

import pytest

import pipeline
from pipeline import Feature, Pairs
from pipeline.report import open_dataset
from pipeline.text.sources import Records
from pipeline.text.tokenizers import Bytes
from tests.corpus.files import require_equal


def test_sides_share_the_room_of_a_cache(pairs, tmp_path):
    cached = Pairs.open(pairs.directory, cache=tmp_path, cache_bytes=100_001)
    assert [cache.max_bytes for cache, _ in cached.caches] == [50_000] * 2
    require_equal(cached, pairs)


def test_prepared_pairs_hold_both_texts(tmp_path):
    records = [{"de": "ja", "en": "yes"}, {"de": "nein", "en": "no"}, {"de": "", "en": ""}]
    source, options = Records(records), {"fields": ("de", "en"), "progress": False}
    pairs = pipeline.prepare_pairs(source, Bytes(), tmp_path, **options)
    tokenizer = pairs.tokenizer
    for number, (example, record) in enumerate(zip(pairs, records, strict=True)):
        assert [side.decode(number) for side in pairs.sides.values()] == [
            record["de"],
            record["en"],
        ]
        assert example["decoder_inputs"][0] == tokenizer.begin_id
        assert example["targets"][-1] == tokenizer.end_id
    assert (pairs.text_bytes, pairs.num_learnt) == (5, pairs.lengths[:, 1].sum())
    assert pipeline.prepare_pairs(source, Bytes(), tmp_path, **options).lengths.tolist()
    with pytest.raises(ValueError, match=r"made with another template: there Pair\(inputs='de'"):
        pipeline.prepare_pairs(source, Bytes(), tmp_path, fields=("en", "de"))
    with pytest.raises(ValueError, match="make the tokenizer with begin=True"):
        pipeline.prepare_pairs(source, Bytes(begin=False), tmp_path, **options)
    of_inputs, other = (Feature(of, dtype="int8", fill=4) for of in ("inputs", "example"))
    options |= {"features": {"seen": of_inputs, "margin": other}, "on_error": "skip"}
    pairs = pipeline.prepare_pairs(source, Bytes(), tmp_path / "more", **options)
    assert [[*side.features] for side in pairs.sides.values()] == [["seen", "margin"], []]
    assert [side.origin["on_error"] for side in pairs.sides.values()] == ["skip"] * 2
    assert (pairs[0]["seen"].tolist(), pairs[0]["margin"]) == ([4] * 4, 4)


def test_what_does_not_belong_together_is_refused(pairs, sides, tmp_path):
    fewer = Pairs.from_arrays(sides[0][:9], sides[1][:9], tmp_path / "fewer")
    tag = functools.partial(Pairs.from_arrays, features={"a": Feature("example")})
    tagged = {"tokens": [[1]], "a": [2]}
    for act, sentence in (
        (lambda: Pairs(pairs.inputs, pairs.inputs), "of the task 'inputs', not 'targets'"),
        (lambda: Pairs(fewer.inputs, pairs.targets), "there are 9 inputs and 300 targets"),
        (lambda: tag(tagged, tagged, tmp_path / "twice"), "both have a feature 'a'"),
    ):
        with pytest.raises(ValueError, match=sentence):
            act()
    with pytest.raises(FileNotFoundError, match="there is no corpus"):
        pipeline.load(tmp_path / "nothing", tokens_per_batch=64)
    dataset = open_dataset([str(pairs.inputs.directory.parent)])
    assert dataset.side_names == ("inputs", "targets")
    assert dataset.lengths.tolist() == pairs.lengths.tolist()


def test_a_pair_with_an_empty_side_is_in_no_batch_and_counted(tmp_path):
    empty = Pairs.from_arrays([[], [5, 2], [4]], [[1, 11, 2], [1, 3, 2], [1]], tmp_path)
    assert empty.lengths.tolist() == [[0, 0], [2, 2], [0, 0]]
    plan = pipeline.Plan(empty, [pipeline.Bucket(1, (8, 8))])
    assert "left out: 2 examples with nothing to train on" in str(plan)
    batch = pipeline.Batches(empty, plan)[0]
    assert batch["targets"][batch["loss_weights"] > 0].tolist() == [3, 2]
    assert empty.num_learnt is None
