"""Text with pictures: packing changes nothing, and pictures do not leak."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models import TransformerConfig, VisionDecoder, cross_entropy
from models.layers import rotate
from pipeline import Batches, Bucket, Examples, Feature, Plan
from tests.alone import require_same_alone

FEATURES = {
    "patch": Feature("inputs", to="patches"),
    "patches": Feature("patches", dtype="uint8", shape=12),
    "patch_yx": Feature("patches", dtype="int32", shape=2),
    "patch_image": Feature("patches", to="images"),
    "image": Feature("images", dtype="int32"),
}
LENGTHS = {"inputs": 96, "patches": 80, "images": 12}
FIELDS = "inputs", "inputs_segment_ids", "inputs_positions", "patches", "patch_image", "patch_yx"
CONFIG = TransformerConfig(
    vocab_size=50, num_layers=2, width=32, num_heads=2, num_kv_heads=1, mlp_width=48
)


def draw_examples(count=7):
    """Texts with up to three pictures; a token points to each patch, some to none."""
    rng = np.random.default_rng(0)
    columns = {name: [] for name in ("tokens", *FEATURES)}
    for pictures in [0, *rng.integers(0, 4, count - 1)]:
        grids = rng.integers(1, 5, (pictures, 2))
        sizes = grids.prod(axis=1).astype(int)
        total, words = int(sizes.sum()), int(rng.integers(2, 9))
        columns["tokens"].append(rng.integers(1, 50, total + words))
        columns["patch"].append(np.append(np.arange(total), np.full(words, -1)))
        columns["patches"].append(rng.integers(0, 256, (total, 12)))
        yx = [np.argwhere(np.ones(grid)) for grid in grids]
        columns["patch_yx"].append(np.concatenate([np.zeros((0, 2), int), *yx]))
        columns["patch_image"].append(np.arange(pictures).repeat(sizes))
        columns["image"].append(np.arange(pictures))
    return Examples(columns, features=FEATURES)


@pytest.fixture(scope="module")
def model():
    graph, state = jax.jit(lambda: nnx.split(VisionDecoder(CONFIG, 12, rngs=nnx.Rngs(0))))()

    @jax.jit
    def of(state, batch):
        def loss(state):
            logits = nnx.merge(graph, state)(*(batch[name] for name in (*FIELDS, "patch")))
            return cross_entropy(logits, batch["targets"], batch["loss_weights"]).total, logits

        return jax.value_and_grad(loss, has_aux=True)(state)

    return state, of


def test_packed_examples_have_the_logits_and_gradients_that_they_have_alone(model):
    state, of = model

    def compute(batch):
        (_, logits), gradient = of(state, batch)
        return logits, gradient

    require_same_alone(compute, draw_examples(), LENGTHS, 2)


def test_a_picture_is_seen_by_the_text_that_points_to_it_alone(model):
    state, of = model
    examples = draw_examples()
    plan = Plan(examples, [Bucket(2, LENGTHS)], shuffle=False)
    batch = Batches(examples, plan)[0]
    (_, before), _ = of(state, batch)
    changed = int(batch["patches_segment_ids"][0].max())
    patches = np.array(batch["patches"])  # JAX may still read the batch's own
    patches[0][batch["patches_segment_ids"][0] == changed] ^= 255
    (_, after), _ = of(state, {**batch, "patches": patches})
    moved = np.abs(before - after).max(axis=-1) > 0
    assert moved.any()
    ids = batch["inputs_segment_ids"]
    assert not moved[1].any()
    assert {*ids[0][moved[0]].tolist()} == {changed}


def test_the_positions_of_patches_count_in_both_directions():
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(2, 1, 4, 1, 16)).astype(np.float32)
    yx = rng.integers(0, 9, (1, 4, 2))

    def scores(yx):
        turned = [rotate(jnp.asarray(x), jnp.asarray(yx), 100.0) for x in (q, k)]
        return np.einsum("blnk,bsnk->bls", *turned)

    np.testing.assert_allclose(scores(yx), scores(yx + np.array([7, 3])), atol=1e-4)
    for axis in (0, 1):
        moved = yx.copy()
        moved[0, 0, axis] += 1
        assert np.abs(scores(yx) - scores(moved)).max() > 0.01
