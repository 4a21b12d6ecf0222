"""Models on a mesh: values stay, and blocked attention costs no communication of its own."""

import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.config import TransformerConfig
from models.decoder import Decoder
from models.loss import cross_entropy
from models.parameters import parameter_shardings
from pipeline.loading.sharding import batch_sharding
from tests.meshes import mesh_of


@pytest.mark.slow
def test_on_four_devices_blocked_attention_adds_no_collective_to_dense():
    """Compiles a training step for a mesh of conftest's four devices, runs it, reads its HLO."""
    mesh = mesh_of(data=1, fsdp=2, tensor=2)
    ids = np.tile(np.repeat([1, 2, 0], [30, 20, 6]), (4, 1)).astype(np.int32)
    tokens = np.random.default_rng(6).integers(1, 50, ids.shape).astype(np.int32)
    kinds = r" (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
    values, found = [], []
    for attention in ("dense", "blocked"):
        config = TransformerConfig(
            vocab_size=50, num_layers=2, width=32, num_heads=4, num_kv_heads=2, mlp_width=48,
            attention=attention, scan_layers=True,
        )  # fmt: skip
        graph, state = nnx.split(Decoder(config, rngs=nnx.Rngs(0)))

        def loss(state, tokens, ids, graph=graph):
            logits = nnx.merge(graph, state)(tokens, ids, ids * 0 + jnp.arange(ids.shape[1]))
            return cross_entropy(logits, tokens, ids > 0).total

        shardings = parameter_shardings(state, mesh), batch_sharding(mesh), batch_sharding(mesh)
        with jax.set_mesh(mesh):
            step = jax.jit(jax.value_and_grad(loss), in_shardings=shardings)
            compiled = step.lower(state, tokens, ids).compile()
            values.append(compiled(*jax.device_put((state, tokens, ids), shardings))[0])
        found.append(Counter(re.findall(kinds, compiled.as_text())))
    np.testing.assert_allclose(values[0], values[1], rtol=1e-5)
    assert found[0], "the step was not split at all"
    assert found[1] <= found[0], found
