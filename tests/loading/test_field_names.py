import numpy as np
import pytest

import pipeline
from pipeline import Bucket

BATCH = {
    "inputs": np.array([[5, 6, 7, 0]], np.int32),
    "targets": np.array([[6, 7, 8, 0]], np.int32),
    "inputs_segment_ids": np.array([[1, 1, 2, 0]], np.int32),
    "inputs_positions": np.array([[0, 1, 0, 0]], np.int32),
    "loss_weights": np.array([[0, 1, 1, 0]], np.float32),
}
ALONE = BATCH | {
    "inputs_segment_ids": np.array([[1, 1, 1, 0]], np.int32),
    "inputs_positions": np.array([[0, 1, 2, 0]], np.int32),
}
PAIR = ALONE | {
    "decoder_inputs": np.array([[1, 6, 0]], np.int32),
    "targets": np.array([[6, 2, 0]], np.int32),
    "targets_segment_ids": np.array([[1, 1, 0]], np.int32),
    "targets_positions": np.array([[0, 1, 0]], np.int32),
    "loss_weights": np.array([[1, 1, 0]], np.float32),
}


@pytest.mark.parametrize(
    ("batch", "convention", "expected"),
    [
        # Weights of 0 are folded into the segments of the targets.
        (BATCH, "maxtext", {
            "inputs": [5, 6, 7, 0], "inputs_segmentation": [1, 1, 2, 0],
            "targets": [6, 7, 8, 0], "targets_segmentation": [0, 1, 2, 0],
            "inputs_position": [0, 1, 0, 0], "targets_position": [0, 1, 0, 0],
        }),
        # Labels that a model shifts, and labels that it does not.
        (BATCH, "huggingface", {
            "input_ids": [5, 6, 7, 0], "position_ids": [0, 1, 0, 0],
            "labels": [-100, -100, 7, 8], "shift_labels": [-100, 7, 8, -100],
        }),
        # The loss shifts both by one, so that 6 predicts 7, and 7 predicts 8.
        (ALONE, "tunix", {
            "input_tokens": [5, 6, 7, 8, 0], "input_mask": [False, False, True, True, False],
        }),
        (PAIR, "huggingface", {
            "input_ids": [5, 6, 7, 0], "attention_mask": [1, 1, 1, 0], "labels": [6, 2, -100],
            "decoder_input_ids": [1, 6, 0], "decoder_attention_mask": [1, 1, 0],
        }),
    ],
)  # fmt: skip
def test_each_convention_has_its_fields(batch, convention, expected):
    renamed = pipeline.rename(batch, convention)
    assert {name: values.tolist() for name, values in renamed.items()} == {
        name: [row] for name, row in expected.items()
    }
    assert all(values.dtype in (np.int32, bool) for values in renamed.values())


IDS, TWO = BATCH["inputs"], BATCH["inputs_segment_ids"]
LATE = {"inputs_positions": np.array([[7, 8, 9, 0]])}
HALF = {"loss_weights": ALONE["loss_weights"] / 2}
CONVENTIONS = "maxtext", "tunix", "huggingface"


@pytest.mark.parametrize(
    ("batch", "change", "convention", "message"),
    [
        (BATCH, {"targets_positions": IDS}, "maxtext", "no name for targets_posit"),
        (BATCH, {"inputs_position": IDS}, "maxtext", "inputs_position of your own, and maxtext us"),
        (BATCH, {}, "t5x", "convention is 't5x'; .* one of maxtext, tunix, huggingface"),
        (BATCH, {}, "tunix", "tunix cannot express segment id 2: .* packing='none'"),
        (PAIR, {}, "maxtext", "no name for decoder_inputs"),
        (PAIR, {}, "tunix", "no name for decoder_inputs"),
        (
            PAIR,
            {"inputs_segment_ids": TWO},
            "huggingface",
            "huggingface cannot express segment id 2",
        ),
        (BATCH, LATE, "huggingface", "begins at position 7.* positions='restart', or plan"),
        (ALONE, LATE, "tunix", "tunix cannot .* begins at position 7"),
        *((ALONE, HALF, name, rf"{name} cannot express loss weight 0\.5") for name in CONVENTIONS),
    ],
)
def test_what_a_convention_cannot_carry_is_refused(batch, change, convention, message):
    with pytest.raises(ValueError, match=message):
        pipeline.rename(batch | change, convention)


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_a_batch_of_inputs_alone_is_refused(convention):
    alone = {name: ALONE[name] for name in ALONE if name.startswith("inputs")}
    with pytest.raises(ValueError, match=f"the batch has no targets, and {convention} trains"):
        pipeline.rename(alone, convention)


SIZES = np.random.default_rng(0).integers(2, 30, 40)
EXAMPLES = [np.arange(1, size + 1, dtype=np.int32) * size % 89 + 1 for size in SIZES]


def mean_of_all(mean_loss, batches):
    """The mean loss of all tokens of some batches."""
    counts = [batch["loss_weights"].sum() for batch in batches]
    return np.average([float(mean_loss(batch)) for batch in batches], weights=counts)


@pytest.mark.slow
def test_transformers_sees_in_a_row_what_it_sees_in_single_examples(tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")

    def mean_loss(model, fields, **options):
        tensors = {name: torch.tensor(values).long() for name, values in fields.items()}
        with torch.no_grad():
            return model(**tensors, **options).loss

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(vocab_size=90, num_attention_heads=2, **sizes)
    llama = transformers.LlamaForCausalLM(config)
    corpus = pipeline.Corpus.from_arrays(EXAMPLES, tmp_path / "corpus", vocab_size=90)
    packed, single = (
        mean_of_all(
            lambda batch: mean_loss(llama, pipeline.rename(batch, "huggingface"), use_cache=False),
            pipeline.Batches(corpus, pipeline.Plan(corpus, [Bucket(4, 32)], packing=packing)),
        )
        for packing in ("best_fit", "none")
    )
    assert packed == pytest.approx(single, rel=1e-6)

    config = transformers.T5Config(
        vocab_size=90, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, dropout_rate=0
    )
    t5 = transformers.T5ForConditionalGeneration(config)
    pairs = pipeline.Pairs.from_arrays(EXAMPLES, EXAMPLES[::-1], tmp_path / "pairs")
    padded = [*pipeline.Batches(pairs, pipeline.Plan(pairs, [Bucket(8, (32, 32))], packing="none"))]
    alone = []
    for batch in padded:
        for row in np.flatnonzero(batch["loss_weights"].sum(axis=1)):
            sizes = {
                name: batch[f"{'inputs' if name[:6] == 'inputs' else 'targets'}_segment_ids"][row]
                for name in batch
            }
            alone.append({name: batch[name][[row], : size.sum()] for name, size in sizes.items()})
    in_rows, one_by_one = (
        mean_of_all(lambda batch: mean_loss(t5, pipeline.rename(batch, "huggingface")), batches)
        for batches in (padded, alone)
    )
    assert in_rows == pytest.approx(one_by_one, rel=1e-6)


@pytest.mark.slow
def test_tunix_has_the_loss_of_the_weighted_targets(tmp_path):
    pytest.importorskip("tunix")
    import jax.numpy as jnp
    import optax
    from flax import nnx
    from tunix.models.llama3.model import Llama3, ModelConfig
    from tunix.sft import peft_trainer, utils

    sizes = {"num_layers": 2, "vocab_size": 90, "embed_dim": 32, "hidden_dim": 64}
    heads = {"num_heads": 2, "head_dim": 16, "num_kv_heads": 2, "rope_theta": 10_000}
    config = ModelConfig(**sizes, **heads, norm_eps=1e-5)
    model = Llama3(config, rngs=nnx.Rngs(0))

    def theirs(batch):
        given = pipeline.rename(batch, "tunix")
        real = jnp.asarray(given["input_tokens"] != 0)
        return peft_trainer._default_loss_fn(
            model,
            jnp.asarray(given["input_tokens"]),
            jnp.asarray(given["input_mask"]),
            utils.build_positions_from_mask(real),
            utils.make_causal_attn_mask(real),
        )

    def ours(batch):
        ids, positions = batch["inputs_segment_ids"], batch["inputs_positions"]
        mask = (ids[:, :, None] == ids[:, None, :]) & (positions[:, :, None] >= positions[:, None])
        logits, _ = model(jnp.asarray(batch["inputs"]), jnp.asarray(positions), None, mask)
        each = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
        return (each * batch["loss_weights"]).sum() / batch["loss_weights"].sum()

    weights = [np.arange(len(example)) > len(example) // 3 for example in EXAMPLES]
    options = {"vocab_size": 90, "weights": weights}
    corpus = pipeline.Corpus.from_arrays(EXAMPLES, tmp_path / "corpus", **options)
    alone, packed = (
        pipeline.Batches(corpus, pipeline.Plan(corpus, [Bucket(4, 32)], packing=packing))
        for packing in ("none", "best_fit")
    )
    assert mean_of_all(theirs, alone) == pytest.approx(mean_of_all(ours, alone), rel=1e-5)
    assert mean_of_all(theirs, alone) == pytest.approx(mean_of_all(ours, packed), rel=1e-5)
