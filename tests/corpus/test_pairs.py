"""Pairs from end to end: corpora side by side, batches, hosts, resuming."""

import functools
import pickle

import pytest
from jax.sharding import NamedSharding, PartitionSpec

import pipeline
from pipeline import Batches, Bucket, Corpus, Feature, Pairs, Plan
from pipeline.report import open_dataset
from pipeline.text.tokenizers import Bytes
from tests.loading.definition import require_same
from tests.meshes import mesh_of

BUCKETS = (Bucket(8, (24, 24)), Bucket(8, (24, 40)), Bucket(4, (64, 40)))
BEGIN = 1


@pytest.fixture(scope="module")
def plan(pairs):
    return Plan(pairs, BUCKETS, overflow="truncate")


def test_renamed_fields_of_pairs_keep_the_length_of_their_side(pairs, plan):
    def rename(batch):
        return {f"my_{name}": values for name, values in batch.items()}

    whole = Batches(pairs, plan, transform=rename)
    sharding = NamedSharding(mesh_of(data=2, sequence=2), PartitionSpec("data", "sequence"))
    with pipeline.Loader(Batches(pairs, plan, transform=rename, sharding=sharding)) as loader:
        for step, batch in enumerate(loader):
            require_same(batch, whole[step])
            assert {name: a.shape for name, a in batch.items()} == {
                name: each.shape for name, each in loader.specs[plan.batch(step).bucket].items()
            }


def test_pairs_read_and_describe_themselves(pairs, sides, plan, tmp_path):
    cached = Pairs.open(pairs.directory, cache=tmp_path, cache_bytes=100_001)
    assert [cache.max_bytes for cache, _ in cached.caches] == [50_000] * 2
    assert len(pairs) == len(cached) == 300
    expected = sides[0][7], sides[1][7][:-1], sides[1][7][1:]
    names = "inputs", "decoder_inputs", "targets"
    for each in (pairs, cached):
        require_same(each[7], dict(zip(names, expected, strict=True)))
    assert pairs.num_tokens == pairs.lengths.sum()
    assert pairs.num_learnt == pairs.lengths[:, 1].sum()
    assert (pairs.vocab_size, pairs.identity["targets"]["task"]) == (1000, "targets")
    assert "documents    300" in str(pairs)
    assert pickle.loads(pickle.dumps(pairs)).fingerprint == pairs.fingerprint
    assert Plan(pairs.lengths, BUCKETS, overflow="truncate").fingerprint == plan.fingerprint
    pairs.verify()


def test_a_state_of_other_targets_is_refused_with_what_changed(pairs, sides, plan, tmp_path):
    targets = [target * 2 for target in sides[1]]
    other = Pairs.from_arrays(sides[0], targets, tmp_path, vocab_size=2000)
    for mixed in (Pairs(pairs.inputs, other.targets), Pairs(other.inputs, pairs.targets)):
        assert mixed.vocab_size == 2000
    state = iter(Batches(pairs, plan).to_iter_dataset()).get_state()
    with pytest.raises(ValueError, match=r"corpus: tokens of targets was .* and is now"):
        iter(Batches(other, plan).to_iter_dataset()).set_state(state)


def test_prepared_pairs_hold_both_texts(tmp_path):
    class Source(list):
        fingerprint = "records"

    records = [{"de": "ja", "en": "yes"}, {"de": "nein", "en": "no"}, {"de": "", "en": ""}]
    source, options = Source(records), {"fields": ("de", "en"), "progress": False}
    pairs = pipeline.prepare_pairs(source, Bytes(), tmp_path, **options)
    tokenizer = pairs.tokenizer
    for number, (example, record) in enumerate(zip(pairs, records, strict=True)):
        assert [side.decode(number) for side in pairs.sides] == [record["de"], record["en"]]
        assert example["decoder_inputs"][0] == tokenizer.begin_id
        assert example["targets"][-1] == tokenizer.end_id
    assert pairs.text_bytes == 5
    assert pipeline.prepare_pairs(source, Bytes(), tmp_path, **options).lengths.tolist()
    with pytest.raises(ValueError, match=r"made with another template: there Pair\(inputs='de'"):
        pipeline.prepare_pairs(source, Bytes(), tmp_path, fields=("en", "de"))
    with pytest.raises(ValueError, match="make the tokenizer with begin=True"):
        pipeline.prepare_pairs(source, Bytes(begin=False), tmp_path, **options)
    with pytest.raises(ValueError, match="another field of the records: there None, now de"):
        pipeline.prepare(source, Bytes(), tmp_path / "inputs", field="de", progress=False)
    with pytest.raises(ValueError, match="fields is 'de'; it must be two, of the inputs and of"):
        pipeline.prepare_pairs(source, Bytes(), tmp_path, fields="de")
    of_inputs, other = (Feature(of, dtype="int8", fill=4) for of in ("inputs", "example"))
    options |= {"features": {"seen": of_inputs, "margin": other}, "on_error": "skip"}
    pairs = pipeline.prepare_pairs(source, Bytes(), tmp_path / "more", **options)
    assert [[*side.features] for side in pairs.sides] == [["seen", "margin"], []]
    assert [side.origin["on_error"] for side in pairs.sides] == ["skip"] * 2
    assert (pairs[0]["seen"].tolist(), pairs[0]["margin"]) == ([4] * 4, 4)


def test_what_does_not_belong_together_is_refused(pairs, sides, plan, tmp_path):
    fewer = Pairs.from_arrays(sides[0][:9], sides[1][:9], tmp_path / "fewer")
    one = Corpus.from_arrays(sides[1], tmp_path / "one")
    (tmp_path / "a.txt").write_text("some text")
    tag = functools.partial(Pairs.from_arrays, features={"a": Feature("example")})
    tagged = {"tokens": [[1]], "a": [2]}
    load = functools.partial(pipeline.load, buckets=BUCKETS)
    for act, sentence in (
        (lambda: Pairs(pairs.inputs, pairs.inputs), "of the task 'inputs', not 'targets'"),
        (lambda: Pairs(fewer.inputs, pairs.targets), "there are 9 inputs and 300 targets"),
        (lambda: tag(tagged, tagged, tmp_path / "twice"), "both have a feature 'a'"),
        (lambda: tag([[1]], [[1]], tmp_path / "none"), "the feature 'a' has no column"),
        (lambda: load(pairs, overflow="split"), "a piece would lose its other sides"),
        (lambda: load(pairs), "give a longer bucket, or overflow='truncate' or 'drop'"),
        (lambda: load(tmp_path / "a.txt"), "is a file; give the directory of a corpus"),
        (lambda: Batches(one, plan), "the plan has the sides inputs, targets, and the corpus"),
    ):
        with pytest.raises(ValueError, match=sentence):
            act()
    with pytest.raises(FileNotFoundError, match="there is no corpus"):
        load(tmp_path / "nothing")
    dataset = open_dataset([str(pairs.inputs.directory.parent)])
    assert dataset.side_names == ("inputs", "targets")
    assert dataset.lengths.tolist() == pairs.lengths.tolist()
