"""The small model that benchmarks train, and a step of it."""

import dataclasses

import jax
import optax
from flax import nnx

from models.config import TransformerConfig
from models.decoder import Decoder
from models.loss import cross_entropy
from pipeline.fields.names import INPUTS
from pipeline.text.tokenizers import Bytes

ON_CPU = jax.default_backend() == "cpu"

MODEL = TransformerConfig(
    vocab_size=Bytes.vocab_size,
    num_layers=2,
    width=128,
    num_heads=4,
    num_kv_heads=4,
    mlp_width=384,
    attention="dense",
)
if not ON_CPU:  # 125 million parameters
    MODEL = TransformerConfig(
        vocab_size=Bytes.vocab_size,
        num_layers=12,
        width=768,
        num_heads=12,
        num_kv_heads=12,
        mlp_width=2_048,
        dtype="bfloat16",
        attention="auto",
        remat=True,
        scan_layers=True,
    )


def model_for(length: int) -> TransformerConfig:
    """The model for rows of some length: on CPUs, attention is in blocks above 512 positions."""
    if not ON_CPU:
        return MODEL
    return dataclasses.replace(MODEL, attention="dense" if length <= 512 else "blocked")


class Step:
    """A step of training with a state of its own."""

    def __init__(self, config: TransformerConfig):
        graph, params = nnx.split(Decoder(config, rngs=nnx.Rngs(0)))
        optimizer = optax.adamw(3e-3)

        def mean_loss(params, batch):
            logits = nnx.merge(graph, params)(*(batch[name] for name in INPUTS))
            sums = cross_entropy(logits, batch["targets"], batch["loss_weights"])
            return sums.total / sums.weight

        def step(state, batch):
            params, moments = state
            batch = {name: field % config.vocab_size if name in ("inputs", "targets") else field
                     for name, field in batch.items()}  # fmt: skip
            gradients = jax.grad(mean_loss)(params, batch)
            updates, moments = optimizer.update(gradients, moments, params)
            return optax.apply_updates(params, updates), moments

        self._step, self._state = jax.jit(step), (params, optimizer.init(params))

    def __call__(self, batch):
        """The state after a step, to wait for."""
        self._state = self._step(self._state, batch)
        return self._state
