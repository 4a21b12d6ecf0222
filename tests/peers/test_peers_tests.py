"""What other projects test of packing, masks and resume, with Lockstep as the source.

Each test names theirs, and runs where their package is installed. README.md has the counts.
"""

import dataclasses
import functools
import pathlib
import types
import unittest

import grain
import numpy as np
import pytest

import pipeline
from pipeline import Batches, Bucket, Plan
from pipeline.corpus.tasks import INPUTS


def documents(sizes):
    """Documents of these sizes; no token occurs twice."""
    ends = np.cumsum(sizes)
    return [np.arange(end - size, end) + 1 for end, size in zip(ends, sizes, strict=True)]


SIZES = [int(size) for size in np.random.default_rng(0).integers(3, 15, 40)]
PROMPTS = [size // 3 for size in SIZES]
ANSWERS = sum(SIZES) - sum(PROMPTS)  # tokens that the loss counts


@pytest.fixture
def prompted(tmp_path):
    """A corpus of documents that begin with a prompt, which has no loss; a plan in rows of 16."""
    weights = [np.arange(size) >= prompt for size, prompt in zip(SIZES, PROMPTS, strict=True)]
    folder = tmp_path / "prompted"
    corpus = pipeline.Corpus.from_arrays(
        {"tokens": documents(SIZES), "weights": weights}, folder, vocab_size=512
    )
    return corpus, Plan(corpus, [Bucket(4, 16)])


def predictions(batches):
    """All that the loss counts in batches of positions, tokens and targets: one of each."""
    flat = np.concatenate([np.stack([np.ravel(each) for each in batch], 1) for batch in batches])
    return sorted(flat[flat[:, 2] != -100].tolist())


# infinibatch, `test_iterators`.

DIRECTLY = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)  # thousands of tiny iterators


@functools.cache
def one_token_each(count, rows, shuffle, seed, folder):
    """A corpus of `count` examples, whose only token is their number, from 1, and its plan."""
    examples = [[number + 1] for number in range(count)]
    directory = folder / f"{count}-{rows}-{shuffle}-{seed}"
    corpus = pipeline.Corpus.from_arrays(examples, directory, task=INPUTS)
    return corpus, Plan(corpus, [Bucket(rows, 1)], shuffle=shuffle, seed=seed)


def lockstep_sources(base, folder):
    """The sources of infinibatch by name, with Lockstep inside; `base` is its abstract class."""

    class Source(base):
        """One row of each batch, as the item with that number; None for an empty row."""

        def __init__(
            self, items, seed=0, shuffle=False, num_instances=1, instance_rank=0, epochs=1
        ):
            if iter(items) is items:
                raise ValueError("an iterator cannot be restored")
            self.items = list(items)
            planned = one_token_each(len(self.items), num_instances, shuffle, seed or 0, folder)
            hosts = {"process_index": instance_rank, "process_count": num_instances}
            self.rows = Batches(*planned, **hosts).repeat(epochs)
            self.setstate(None)

        def getstate(self):
            return self.state if self.steps is None else self.steps.get_state()

        def setstate(self, state):
            self.state, self.steps = state, None  # opened by the process that reads

        def __next__(self):
            if self.steps is None:
                self.steps = iter(self.rows.to_iter_dataset(DIRECTLY))
                if self.state:
                    self.steps.set_state(self.state)
            token = int(next(self.steps)["inputs"][0, 0])
            return self.items[token - 1] if token else None

        def close(self):
            pass

    return {
        "NativeCheckpointableIterator": Source,
        "ChunkedSourceIterator": Source,
        "InfinitePermutationSourceIterator": functools.partial(Source, shuffle=True, epochs=None),
    }


# In Lockstep an epoch ends with empty rows, so that all hosts take equally many steps, and does not
# run on into the next; hosts take rows in turns, not one chunk each; Philox shuffles, not `Random`;
# and a corpus holds at least one example.
OTHERWISE = {
    "TestChunkedSourceIterator.test_multiple_instances",
    "TestInfinitePermutationSourceIterator.test_no_shuffle",
    "TestInfinitePermutationSourceIterator.test_shuffle",
    "TestNativeCheckpointableIterator.test_empty",
}


@pytest.mark.slow
def test_infinibatch_restores_all_its_iterators_over_lockstep(tmp_path, monkeypatch):
    """All of `test_iterators`, with fewer and shorter lists; it is in the source distribution, and
    runs where that folder `test` is on the path."""
    theirs = pytest.importorskip("test_iterators")
    iterators = pytest.importorskip("infinibatch.iterators")
    for name, source in lockstep_sources(iterators.CheckpointableIterator, tmp_path).items():
        monkeypatch.setattr(theirs, name, source)
        monkeypatch.setattr(iterators, name, source)

    def set_up(case):
        case.lengths, case.world_sizes, case.seed = [1, 2, 5], [1, 3], 42

    monkeypatch.setattr(theirs.TestBase, "setUp", set_up)
    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromModule(theirs).run(result)
    failed = [getattr(case, "test_case", case) for case, _ in result.failures + result.errors]
    assert {f"{type(case).__name__}.{case._testMethodName}" for case in failed} == OTHERWISE
    assert result.testsRun == 168


# TRL, `TestPackDatasetBfd` of `test_data_utils`; `test_sft_trainer`.


@pytest.mark.parametrize(
    ("sizes", "length", "strategy"),
    [
        pytest.param((3, 4, 1), 4, "bfd", id="test_simple"),
        pytest.param((5, 2, 4, 1), 4, "bfd_split", id="test_with_overlong_0"),
        pytest.param((6, 3, 3, 4), 4, "bfd_split", id="test_with_overlong_two_coluns"),
        pytest.param((5, 1, 4, 3), 5, "bfd_split", id="test_with_non_power_of_2"),
        pytest.param((5, 2, 4, 1), 4, "bfd", id="test_default_no_requeue"),
    ],
)
def test_trl_packs_these_documents_into_the_same_rows(sizes, length, strategy, tmp_path):
    """The cases of `TestPackDatasetBfd`."""
    table = pytest.importorskip("datasets").Dataset.from_dict({"input_ids": documents(sizes)})
    packed = pytest.importorskip("trl").pack_dataset(table, length, strategy).with_format("numpy")
    theirs = [np.split(row["input_ids"], np.cumsum(row["seq_lengths"])[:-1]) for row in packed]
    corpus = pipeline.Corpus.from_arrays(documents(sizes), tmp_path, task=INPUTS)
    overflow = {"bfd": "truncate", "bfd_split": "split"}[strategy]
    plan = Plan(corpus, [Bucket(1, length)], shuffle=False, overflow=overflow)
    ours = []
    for batch in Batches(corpus, plan):
        tokens, ids = batch["inputs"][0], batch["inputs_segment_ids"][0]
        ours.append([tokens[ids == number] for number in range(1, 1 + ids.max())])

    def comparable(rows):  # in any order
        return sorted(sorted(part.tolist() for part in row) for row in rows)

    assert comparable(ours) == comparable(theirs)


def test_trl_counts_the_losses_of_the_same_predictions(prompted):
    """`test_packing`, `test_padding_free_mode`, `test_packing_carries_labels`: positions begin anew
    with a document; its first token and its prompt are no labels."""
    collator = pytest.importorskip("trl.trainer.sft_trainer").DataCollatorForLanguageModeling
    from datasets import Dataset
    from trl import pack_dataset

    ids = [document.tolist() for document in documents(SIZES)]
    labels = [[-100] * n + each[n:] for n, each in zip(PROMPTS, ids, strict=True)]
    packed = pack_dataset(Dataset.from_dict({"input_ids": ids, "labels": labels}), 16, "bfd")
    theirs = collator(pad_token_id=0, padding_free=True)([*packed])
    positions, tokens, labels = (theirs[name] for name in ("position_ids", "input_ids", "labels"))
    expected = predictions([(positions[:, :-1], tokens[:, :-1], labels[:, 1:])])  # as models shift
    batches = [pipeline.rename(batch, "huggingface") for batch in Batches(*prompted)]
    names = ("position_ids", "input_ids", "shift_labels")
    assert predictions([batch[name] for name in names] for batch in batches) == expected
    assert len(expected) == ANSWERS


# Tunix, `sft_utils_test`, `sequence_packing_test` and `peft_trainer_test`.


def test_tunix_makes_the_masks_and_positions_of_our_rows(tmp_path):
    """`test_make_causal_attn_mask` and `test_build_positions_from_mask`."""
    utils = pytest.importorskip("tunix.sft.utils")
    corpus = pipeline.Corpus.from_arrays(documents(SIZES), tmp_path)
    for batch in Batches(corpus, Plan(corpus, [Bucket(4, 16)], packing="none")):
        ids, positions = batch["inputs_segment_ids"], batch["inputs_positions"]
        same = ids[:, :, None] == ids[:, None, :]
        seen = same & (positions[:, :, None] >= positions[:, None, :])
        real = ids > 0  # what padding sees counts for nothing
        assert (np.asarray(utils.make_causal_attn_mask(real)) == seen)[real].all()
        assert (np.asarray(utils.build_positions_from_mask(real)) == positions)[real].all()


@pytest.mark.slow
def test_tunix_sees_in_a_row_what_it_sees_in_single_documents(tmp_path):
    """`test_segment_layout_equivalence`, by the function that scores tokens for its losses."""
    common = pytest.importorskip("tunix.rl.common")
    from flax import nnx
    from tunix.models.qwen2.model import ModelConfig, Qwen2

    sizes = {"num_layers": 2, "embed_dim": 32, "hidden_dim": 64, "vocab_size": 512}
    heads = {"num_heads": 2, "head_dim": 16, "num_kv_heads": 2, "rope_theta": 10_000}
    model = Qwen2(ModelConfig(**sizes, **heads, norm_eps=1e-5), rngs=nnx.Rngs(0))
    corpus = pipeline.Corpus.from_arrays(documents(SIZES), tmp_path, task=INPUTS)

    def scores(packing):
        """The log-probability of each token but the first of a document."""
        found = np.zeros(sum(SIZES) + 1)
        for batch in Batches(corpus, Plan(corpus, [Bucket(4, 16)], packing=packing)):
            ids, positions = batch["inputs_segment_ids"], batch["inputs_positions"]
            nothing, packed = ids[:, :0], {"segment_ids": ids, "segment_positions": positions}
            arguments = (*nnx.split(model), nothing, batch["inputs"], 0, 0)
            each = np.asarray(common.compute_per_token_logps(*arguments, **packed))
            found[batch["inputs"][positions > 0]] += each[positions > 0]
        return found

    assert np.count_nonzero(scores("none")) == sum(SIZES) - len(SIZES)
    np.testing.assert_allclose(scores("best_fit"), scores("none"), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("accumulated", [1, 2], ids=["with_resume", "with_resume_and_grad_accu"])
def test_tunix_goes_on_after_the_batches_of_its_checkpoint(accumulated, prompted, tmp_path):
    """`test_checkpointing` and `test_checkpoint_save_and_restore`: the trainer is given all batches
    again and skips those that it has trained on."""
    peft_trainer = pytest.importorskip("tunix.sft.peft_trainer")
    import jax
    import optax
    from flax import nnx
    from tunix.tests import test_common

    corpus = prompted[0]
    batches = Batches(corpus, Plan(corpus, [Bucket(4, 16)], packing="none")).repeat()

    unused = {"positions": None, "attention_mask": None}

    def give(batch):
        return peft_trainer.TrainingInput(**pipeline.rename(batch, "tunix"))

    def train(folder, steps):
        sizes = test_common.ModelConfig(vocab_size=512)
        model = test_common.ToyTransformer(sizes, rngs=nnx.Rngs(0))
        config = peft_trainer.TrainingConfig(
            eval_every_n_steps=100,
            max_steps=steps,
            gradient_accumulation_steps=accumulated,
            checkpoint_root_directory=str(tmp_path / folder),
        )
        trainer = peft_trainer.PeftTrainer(model, optax.adamw(1e-3), config)
        first = trainer.train_steps
        trainer.with_gen_model_input_fn(lambda given: dataclasses.asdict(given) | unused)
        trainer.train(batches.to_iter_dataset().map(give))
        return first, [np.asarray(each) for each in jax.tree.leaves(nnx.state(model, nnx.Param))]

    assert train("halves", 3)[0] == 0
    first, resumed = train("halves", 6)
    assert first == 3
    for ours, expected in zip(resumed, train("whole", 6)[1], strict=True):
        np.testing.assert_array_equal(ours, expected)


# MaxText, `sft_data_processing_test`.


def test_maxtext_counts_the_losses_of_the_same_answers(prompted):
    """`test_sft_format_with_messages`: several conversations in a row; no loss on prompts, and none
    where one document ends and the next begins."""
    utils = pytest.importorskip("maxtext.input_pipeline.input_pipeline_utils")
    formats = pytest.importorskip("maxtext.input_pipeline.data_processing_utils")
    config = types.SimpleNamespace(
        packing=True,
        max_target_length=16,
        max_segments_per_seq=None,
        grain_packing_type="first_fit",
        grain_use_elastic_iterator=False,
    )
    turns = [
        {"messages": [[*each[:prompt]], [*each[prompt:]]], "is_prompt": [True, False]}
        for each, prompt in zip(documents(SIZES), PROMPTS, strict=True)
    ]
    masking = utils.SFTPromptMasking("messages", completion_only=True, max_target_length=16)
    data = grain.MapDataset.source(turns).map(masking).to_iter_dataset(DIRECTLY)
    theirs = formats.format_and_batch(data, config, 4, 0, ["inputs", "targets"], None)

    def found(batches):
        for batch in batches:
            targets = np.where(batch["targets_segmentation"] > 0, batch["targets"], -100)
            yield batch["inputs_position"], batch["inputs"], targets

    ours = predictions(found(pipeline.rename(batch, "maxtext") for batch in Batches(*prompted)))
    assert ours == predictions(found(theirs))
    assert len(ours) == ANSWERS


TINY = """
run_name=test hardware=cpu skip_jax_distributed_system=True enable_checkpointing=False
attention=dot_product dtype=float32 base_emb_dim=32 base_num_query_heads=2 base_num_kv_heads=2
base_mlp_dim=64 base_num_decoder_layers=2 head_dim=16 vocab_size=512 per_device_batch_size=4
max_target_length=16
"""


@pytest.mark.slow
def test_maxtext_sees_in_a_row_what_it_sees_in_single_documents(prompted):
    """Masks, by the loss that MaxText trains on: its model keeps the segments of a row apart."""
    maxtext = pytest.importorskip("maxtext")
    import jax
    from flax import nnx
    from maxtext.configs import pyconfig
    from maxtext.trainers.pre_train.train import loss_fn
    from maxtext.utils import maxtext_utils, model_creation_utils

    base = pathlib.Path(maxtext.__path__[0]) / "configs/base.yml"
    config = pyconfig.initialize(["", str(base), *TINY.split()])
    mesh = maxtext_utils.get_mesh_from_config(config, jax.devices()[:1])
    with mesh:
        model = model_creation_utils.from_config(config, mesh=mesh, rngs=nnx.Rngs(0))

    @nnx.jit
    def sums(model, batch):
        aux = loss_fn(model, config, batch, None, None, is_train=False)[1]
        return aux["xent_sum"], aux["total_weights"]

    def mean(batches):
        with mesh:
            each = [sums(model, pipeline.rename(batch, "maxtext")) for batch in batches]
        total, weights = np.sum(each, axis=0)
        assert weights == ANSWERS
        return total / weights

    corpus, plan = prompted
    alone = Batches(corpus, Plan(corpus, plan.buckets, packing="none"))
    assert mean(Batches(corpus, plan)) == pytest.approx(mean(alone), rel=1e-5)
