"""The gradients of an update are those of its examples alone, whatever shares their rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import pipeline
from models.config import TransformerConfig
from models.decoder import Decoder
from pipeline import Bucket

FEATURES = {
    "advantage": pipeline.Feature("example", dtype="float32"),
    "old_logprobs": pipeline.Feature("targets", dtype="float32"),
}
SEGMENTS = 8


def make_columns(count=24):
    """Rollouts of 4 to 40 tokens: prompts without weight, an advantage, log-probabilities."""
    random = np.random.default_rng(0)
    sizes = random.integers(4, 41, count)
    return {
        "tokens": [random.integers(0, 32, size) for size in sizes],
        "weights": [(np.arange(size) > size // 3).astype(np.float32) for size in sizes],
        "advantage": [*random.normal(size=count)],
        "old_logprobs": [random.normal(-3, 0.2, size) for size in sizes],
    }


@pytest.fixture(scope="module")
def model():
    config = TransformerConfig(
        vocab_size=32,
        num_layers=2,
        width=32,
        num_heads=2,
        num_kv_heads=1,
        mlp_width=64,
        attention="dense",
    )
    return Decoder(config, rngs=nnx.Rngs(0))


@nnx.jit
def gradient_of_sum(model, batch):
    """The gradients of the sum of a batch's losses, and its log-probabilities."""

    def loss(model):
        ids = batch["inputs_segment_ids"]
        logits = jax.nn.log_softmax(model(batch["inputs"], ids, batch["inputs_positions"]))
        logprobs = jnp.take_along_axis(logits, batch["targets"][..., None], 2)[..., 0]
        advantages = jnp.take_along_axis(batch["advantage"], jnp.maximum(ids - 1, 0), 1)
        ratio = jnp.exp(logprobs - batch["old_logprobs"])
        losses = -jnp.minimum(ratio * advantages, jnp.clip(ratio, 0.8, 1.2) * advantages)
        return (losses * batch["loss_weights"]).sum(), logprobs

    return nnx.grad(loss, has_aux=True)(model)


def flat(gradients):
    """Gradients as one vector."""
    return np.concatenate([np.ravel(each) for each in jax.tree.leaves(gradients)])


def update(model, columns, buckets, *, deal=None, max_segments=SEGMENTS):
    """The gradients of the mean loss of an update, those of the mean of its batches' means, and
    the log-probabilities of each example; `deal` reorders the rows of a batch."""
    examples = pipeline.Examples(columns, features=FEATURES)
    sums, means, results = [], [], []
    for planned, batch in pipeline.pack(examples, buckets, max_segments=max_segments):
        order = np.arange(planned.bucket.rows) if deal is None else deal(planned.bucket.rows)
        batch = {name: np.asarray(each)[order] for name, each in batch.items()}
        gradients, logprobs = gradient_of_sum(model, batch)
        sums.append(flat(gradients).astype(np.float64))
        means.append(sums[-1] / max(batch["loss_weights"].sum(), 1))
        results.append((planned, np.asarray(logprobs)[np.argsort(order)]))
    found = pipeline.unpack(results, examples, per="position")
    return sum(sums) / examples.num_learnt, np.mean(means, axis=0), found


def distance(found, expected):
    """How far apart, in norms of the second."""
    return np.linalg.norm(found - expected) / np.linalg.norm(expected)


def test_the_gradients_of_an_update_do_not_depend_on_how_it_is_packed(model):
    columns = make_columns()
    alone, _, logprobs = update(model, columns, [Bucket(4, 40)], max_segments=1)
    ways = {
        "packed": {"buckets": [Bucket(4, 80)]},
        "in two shapes": {"buckets": [Bucket(8, 20), Bucket(2, 64)]},
        "rows in another order": {
            "buckets": [Bucket(4, 80)],
            "deal": np.random.default_rng(1).permutation,
        },
    }
    for name, way in ways.items():
        gradients, _, found = update(model, columns, **way)
        assert distance(gradients, alone) < 1e-6, name
        for each, expected in zip(found, logprobs, strict=True):
            np.testing.assert_allclose(each, expected, atol=2e-5)
    backwards = {name: column[::-1] for name, column in columns.items()}
    gradients, _, found = update(model, backwards, [Bucket(4, 80)])
    assert distance(gradients, alone) < 1e-6
    assert [len(each) for each in found[::-1]] == [len(each) for each in logprobs]


def test_a_mean_of_the_means_of_batches_depends_on_how_an_update_is_packed(model):
    columns = make_columns()
    exact, one_way, _ = update(model, columns, [Bucket(4, 40)], max_segments=1)
    _, another_way, _ = update(model, columns, [Bucket(3, 80)])
    assert distance(one_way, exact) > 0.01
    assert distance(one_way, another_way) > 0.01
