import jax.numpy as jnp
import optax
import pytest

import train


@pytest.fixture
def counter(monkeypatch):
    """A model of one parameter, which each update makes one larger; the loss is the parameter."""

    def make_model(config, corpus):
        def loss(params, batch):
            ids = batch["inputs_segment_ids"]
            same = (ids[:, :, None] == ids[:, None]).sum()  # some work, as attention has it
            weight = batch["loss_weights"].sum()
            return weight * params["count"] + 0.0 * same, weight

        return (lambda key: {"count": jnp.float32(0)}), loss, lambda planned: planned.num_tokens

    def make_optimizer(config):
        return optax.sgd(-1.0), lambda updates: updates * 1.0

    monkeypatch.setattr(train, "make_model", make_model)
    monkeypatch.setattr(train, "make_optimizer", make_optimizer)
