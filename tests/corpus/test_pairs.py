"""Pairs from end to end: corpora side by side, batches, hosts, resuming."""

import pickle
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import pipeline
from pipeline import Batches, Bucket, Corpus, Pairs, Plan
from pipeline.report import open_dataset
from pipeline.steps import Compiled
from pipeline.text.tokenizers import Bytes
from tests.loading.definition import require_same

BUCKETS = (Bucket(8, (24, 24)), Bucket(8, (24, 40)), Bucket(4, (64, 40)))
BEGIN = 1


@pytest.fixture(scope="module")
def plan(pairs):
    return Plan(pairs, BUCKETS, overflow="truncate")


def test_renamed_fields_of_pairs_keep_the_length_of_their_side(pairs, plan):
    devices = np.array(jax.devices()).reshape(2, 2)
    mesh = Mesh(devices, ("data", "sequence"), axis_types=(AxisType.Auto,) * 2)

    def rename(batch):
        return {f"my_{name}": values for name, values in batch.items()}

    whole = Batches(pairs, plan, transform=rename)
    sharding = NamedSharding(mesh, PartitionSpec("data", "sequence"))
    with pipeline.Loader(Batches(pairs, plan, transform=rename, sharding=sharding)) as loader:
        for step, batch in enumerate(loader):
            require_same(batch, whole[step])
            assert {name: a.shape for name, a in batch.items()} == {
                name: each.shape for name, each in loader.specs[plan.batch(step).bucket].items()
            }


def test_load_fits_buckets_and_a_compiled_step_runs_each_of_them(pairs):
    options = {"tokens_per_batch": 512, "max_length": (48, 48), "length_multiple": 8}
    options |= {"buckets": None, "overflow": "truncate", "packing": "none"}
    place = pairs.inputs.directory.parent
    with pipeline.load(place, num_epochs=1, **options) as loader:
        assert 2 <= len(loader.plan.buckets) <= 4
        compiled = Compiled(
            lambda state, batch: state + batch["loss_weights"].sum(), jnp.zeros(()), loader.specs
        )
        total = jnp.zeros(())
        for step, batch in enumerate(loader):
            specs = loader.specs[loader.plan.batch(step).bucket]
            assert {name: (a.shape, a.dtype) for name, a in batch.items()} == {
                name: (spec.shape, spec.dtype) for name, spec in specs.items()
            }
            total = compiled(total, batch)
        assert float(total) == np.minimum(pairs.lengths[:, 1], 48).sum()


def test_buckets_with_equal_inputs_have_programs_of_their_own(pairs, plan):
    with pipeline.load(pairs, buckets=BUCKETS, overflow="truncate", num_epochs=1) as loader:
        step = Compiled(
            lambda state, batch: state + batch["targets"].shape[1], jnp.zeros(()), loader.specs
        )
        for number, batch in enumerate(loader):
            assert float(step(jnp.zeros(()), batch)) == plan.batch(number).bucket.length[1]
        with pytest.raises(ValueError, match="targets is missing"):
            step(jnp.zeros(()), {name: a for name, a in batch.items() if name != "targets"})


def test_pairs_read_and_describe_themselves(pairs, sides, plan):
    assert len(pairs) == 300
    expected = sides[0][7], sides[1][7][:-1], sides[1][7][1:]
    names = "inputs", "decoder_inputs", "targets"
    require_same(pairs[7], dict(zip(names, expected, strict=True)))
    assert pairs.num_tokens == pairs.lengths.sum()
    assert (pairs.vocab_size, pairs.identity["targets"]["task"]) == (1000, "targets")
    assert "documents    300" in str(pairs)
    assert pickle.loads(pickle.dumps(pairs)).fingerprint == pairs.fingerprint
    assert Plan(pairs.lengths, BUCKETS, overflow="truncate").fingerprint == plan.fingerprint
    pairs.verify()


def test_a_state_of_other_targets_is_refused_with_what_changed(pairs, sides, plan, tmp_path):
    other = Pairs.from_arrays(sides[0], [target * 2 for target in sides[1]], tmp_path)
    state = iter(Batches(pairs, plan).to_iter_dataset()).get_state()
    with pytest.raises(ValueError, match=r"corpus: tokens of targets was .* and is now"):
        iter(Batches(other, plan).to_iter_dataset()).set_state(state)


def test_prepared_pairs_hold_both_texts(tmp_path):
    records = [{"de": "ja", "en": "yes"}, {"de": "nein", "en": "no"}, {"de": "", "en": ""}]

    class Source(list):
        fingerprint = "records"

    options = {"fields": ("de", "en"), "progress": False}
    pairs = pipeline.prepare_pairs(Source(records), Bytes(), tmp_path, **options)
    tokenizer = pairs.tokenizer
    for number, (example, record) in enumerate(zip(pairs, records, strict=True)):
        assert [side.decode(number) for side in pairs.sides] == [record["de"], record["en"]]
        assert example["decoder_inputs"][0] == tokenizer.begin_id
        assert example["targets"][-1] == tokenizer.end_id
    assert pairs.text_bytes == 5
    assert pipeline.prepare_pairs(Source(records), Bytes(), tmp_path, **options).lengths.tolist()
    with pytest.raises(ValueError, match="made with another field of the records"):
        pipeline.prepare_pairs(Source(records), Bytes(), tmp_path, fields=("en", "de"))
    with pytest.raises(ValueError, match="make the tokenizer with begin=True"):
        pipeline.prepare_pairs(Source(records), Bytes(begin=False), tmp_path, **options)
    with pytest.raises(ValueError, match="of the task 'inputs', not 'causal'"):
        pipeline.prepare(Source(records), Bytes(), tmp_path / "inputs", field="de", progress=False)


def test_what_does_not_belong_together_is_refused(pairs, sides, plan, tmp_path):
    with pytest.raises(ValueError, match="of the task 'inputs', not 'targets'"):
        Pairs(pairs.inputs, pairs.inputs)
    fewer = Pairs.from_arrays(sides[0][:9], sides[1][:9], tmp_path / "fewer")
    with pytest.raises(ValueError, match="there are 9 inputs and 300 targets"):
        Pairs(fewer.inputs, pairs.targets)
    with pytest.raises(ValueError, match=re.escape("it must be one of truncate, drop, error")):
        pipeline.load(pairs, buckets=BUCKETS, overflow="split")
    with pytest.raises(ValueError, match="give a longer bucket, or overflow='truncate' or 'drop'"):
        pipeline.load(pairs, buckets=BUCKETS)
    with pytest.raises(FileNotFoundError, match="there is no corpus"):
        pipeline.load(tmp_path / "nothing", buckets=BUCKETS)
    dataset = open_dataset([str(pairs.inputs.directory.parent)])
    assert dataset.pairs
    assert dataset.lengths.tolist() == pairs.lengths.tolist()
    one = Corpus.from_arrays(sides[1], tmp_path / "one")
    with pytest.raises(ValueError, match="the plan is for pairs"):
        Batches(one, plan)


def test_a_file_in_place_of_a_corpus_gets_a_sentence(tmp_path):
    (tmp_path / "a.txt").write_text("some text")
    with pytest.raises(ValueError, match="is a file; give the directory of a corpus"):
        pipeline.load(tmp_path / "a.txt", tokens_per_batch=1024)
