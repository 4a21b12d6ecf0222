"""Groups: continuations of one prefix in one row have the losses and gradients they have alone.

A tree is (tokens, [subtree, …]). It lies in a row as tests/loading/definition.py defines it.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from optax import softmax_cross_entropy_with_integer_labels as token_losses

from models import blocked
from models.attention import make_attention
from models.config import TransformerConfig
from models.decoder import Decoder
from models.splash import splash_masked
from models.visibility import causal_until
from tests.loading.definition import define_group, define_groups, define_row

CONFIG = {"vocab_size": 50, "num_layers": 2, "width": 32, "num_heads": 4, "num_kv_heads": 2}
CONFIG |= {"mlp_width": 48}
LENGTH = 96


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    monkeypatch.setattr(blocked, "_block", lambda length: min(length, 8))
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


RNG = np.random.default_rng(0)


def node(size, *children):
    return RNG.integers(1, 50, size), list(children)


PAIR = node(11, node(5), node(9))
TREE = node(9, node(6, node(1), node(7), node(4)), node(3), node(5, node(2, node(4), node(3))))
OF_ONE_TOKEN = node(1, node(4), node(1), node(6))
DOCUMENT = node(14)


def paths(tree):
    """The tokens from the root to each leaf."""
    tokens, children = tree
    if not children:
        return [tokens]
    return [np.concatenate([tokens, path]) for child in children for path in paths(child)]


def row_of(trees):
    """A batch of one row, and the name of the node of each column: (tree, branch, …)."""
    columns = [define_group(tree) for tree in trees]
    batch = define_row(define_groups({"tokens": trees}), map(len, columns), LENGTH)
    del batch["inputs_branch_ids"]
    names = [(number, *name) for number, each in enumerate(columns, 1) for *_, name in each]
    return batch, names


@functools.cache
def value_and_gradient(config, tables):
    """A jitted function: parameters and a batch to the loss of each position, and gradients."""
    make = functools.partial(Decoder, config)
    graph, _ = nnx.split(nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0))))
    state = jax.jit(lambda: nnx.split(make(rngs=nnx.Rngs(0)))[1])()
    table = 0.02 * jax.random.normal(jax.random.key(1), (LENGTH, config.width))

    def loss(parameters, batch):
        state, table = parameters
        model = nnx.merge(graph, state)
        x = model.embedding(batch["inputs"]) + tables * table[batch["inputs_positions"]]
        hidden = model.transformer(
            x, batch["inputs_segment_ids"], batch["inputs_positions"],
            visible_until_BL=batch.get("visible_until"),
        )  # fmt: skip
        nll = token_losses(model.embedding.logits(hidden), batch["targets"])
        return jnp.sum(nll * batch["loss_weights"]), nll

    step = jax.jit(jax.value_and_grad(loss, has_aux=True))
    return functools.partial(step, (state, table))


# Whether there is a table of positions, and options of the model.
ROTARY = False, {"scan_layers": True}
TABLE = True, {"scan_layers": True, "remat": True}
ONE_KEY_HEAD = True, {"num_kv_heads": 1, "remat": True}
ALL_KEY_HEADS = False, {"num_kv_heads": 4}


@pytest.mark.parametrize(
    ("attention", "tables", "options"),
    [
        pytest.param("dense", *ROTARY, marks=pytest.mark.slow),
        ("blocked", True, {"num_layers": 1}),
        pytest.param("blocked", *TABLE, marks=pytest.mark.slow),
        pytest.param("dense", *TABLE, marks=pytest.mark.slow),
        pytest.param("blocked", *ROTARY, marks=pytest.mark.slow),
        pytest.param("dense", *ALL_KEY_HEADS, marks=pytest.mark.slow),
        pytest.param("blocked", *ONE_KEY_HEAD, marks=pytest.mark.slow),
    ],
)
def test_a_group_trains_like_its_continuations_alone(attention, tables, options):
    step = value_and_gradient(TransformerConfig(**CONFIG | options, attention=attention), tables)
    trees = [DOCUMENT, PAIR, TREE, OF_ONE_TOKEN]
    batch, names = row_of(trees)
    (total, nll), gradient = step(batch)

    alone = [row_of([(path, [])])[0] for tree in trees for path in paths(tree)]
    rows = {field: np.concatenate([row[field] for row in alone]) for field in batch}
    del rows["visible_until"]  # ordinary rows do without
    (expected_total, expected), expected_gradient = step(rows)

    count = rows["loss_weights"].sum()
    assert count == batch["loss_weights"].sum()
    np.testing.assert_allclose(total / count, expected_total / count, atol=1e-5)
    # In order of their first columns, names of nodes are depth first, as paths are.
    leaves = [n for n in dict.fromkeys(names) if sum(m[: len(n)] == n for m in {*names}) == 1]
    assert len(leaves) == len(alone)
    for leaf, losses in zip(leaves, expected, strict=True):
        columns = [c for c, name in enumerate(names) if leaf[: len(name)] == name]
        np.testing.assert_allclose(nll[0, np.array(columns)], losses[: len(columns)], atol=1e-5)
    for a, b in zip(*map(jax.tree.leaves, (gradient, expected_gradient)), strict=True):
        np.testing.assert_allclose(a / count, b / count, atol=1e-5)


@pytest.mark.parametrize("attention", ["blocked", pytest.param("dense", marks=pytest.mark.slow)])
def test_a_continuation_changes_nothing_in_another(attention):
    # One layer, as in the quick test above, whose program this shares.
    config = TransformerConfig(**CONFIG | {"num_layers": 1}, attention=attention)
    step = value_and_gradient(config, True)
    batch, names = row_of([PAIR, TREE, DOCUMENT])
    of_changed = np.array([name[:3] == (2, 0, 1) for name in names])
    changed = batch | {"inputs": batch["inputs"].copy()}
    columns = np.flatnonzero(of_changed)
    changed["inputs"][0, columns] = changed["inputs"][0, columns] % 49 + 1
    (_, before), _ = step(batch)
    (_, after), _ = step(changed)
    others = np.flatnonzero(~of_changed)
    np.testing.assert_array_equal(before[0, others], after[0, others])
    assert (before[0, columns] != after[0, columns]).all()


def test_blocks_that_are_needed_have_all_that_is_seen_and_lie_apart():
    """The last continuation needs its prefix and itself, not the blocks between them."""
    group = node(17, node(32), node(32), node(8))
    batch, _ = row_of([group])
    visible = causal_until(batch["visible_until"])
    starts, counts = blocked.needed_blocks(visible, adjoining=False)
    starts = np.reshape(starts, (12, 12)) // 8
    found = [row[:n].tolist() for row, n in zip(starts, counts[0], strict=True)]
    seen = np.asarray(visible.mask())[0].reshape(12, 8, 12, 8).any(axis=(1, 3))
    assert found == [np.flatnonzero(row).tolist() for row in seen]
    assert found[10] == [0, 1, 10]


@pytest.mark.slow
def test_rows_of_a_group_by_the_kernel_for_tpus_equal_dense():
    """JAX's own splash, interpreted."""
    batch, _ = row_of([PAIR, TREE, DOCUMENT])
    until = jnp.asarray(np.concatenate([batch["visible_until"], row_of([])[0]["visible_until"]]))
    rng = np.random.default_rng(3)
    q, k, v, g = (jnp.asarray(rng.normal(size=(2, LENGTH, n, 16)), "float32") for n in (4, 2, 2, 4))
    dense = make_attention(until * 0, visible_until=until, implementation="dense")
    (out, pull), (expected, pull_dense) = (
        jax.vjp(attend, q, k, v)
        for attend in (lambda *qkv: splash_masked(*qkv, causal_until(until)), dense)
    )
    for a, b in zip((out, *pull(g)), (expected, *pull_dense(g)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
