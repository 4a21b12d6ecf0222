"""Trains a Transformer on packed text: a decoder, an encoder, or an encoder–decoder on pairs.

    python train.py --config=configs/quickstart.py --config.steps=500 --workdir=runs/quickstart

Run again, it goes on from its last checkpoint. On several hosts the same command runs on each;
where the platform does not say how many there are, add --coordinator=HOST:PORT --num_processes=N
--process_id=I. This is the only place where `pipeline` (which knows no model) and `models` (which
know no data) meet.
"""

import functools
import logging
import os
import pathlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags
from etils import epath
from flax import nnx
from flax.training.dynamic_scale import DynamicScale
from ml_collections import ConfigDict, config_flags

import pipeline
from models.config import TransformerConfig
from models.decoder import Decoder
from models.encoder import Encoder
from models.encoder_decoder import EncoderDecoder
from models.flops import pair_flops, training_flops
from models.loss import cross_entropy
from models.parameters import decay_mask, parameter_shardings
from pipeline.training import hosts
from pipeline.training.microbatches import summed, summed_gradients
from pipeline.training.run import Run, Steps

HERE = pathlib.Path(__file__).parent
CONFIG = config_flags.DEFINE_config_file(
    "config", os.fspath(HERE / "configs/quickstart.py"), "A file of configs/; --config.FIELD=VALUE."
)
WORKDIR = flags.DEFINE_string(
    "workdir", None, "Where corpus, checkpoints and metrics go; runs/NAME_OF_CONFIG if not given."
)
COORDINATOR = flags.DEFINE_string("coordinator", None, "HOST:PORT of process 0.")
NUM_PROCESSES = flags.DEFINE_integer("num_processes", None, "How many processes there are.")
PROCESS_ID = flags.DEFINE_integer("process_id", None, "Which of them this is, from 0.")
WAIT = flags.DEFINE_integer("wait", 100, "Seconds of silence after which a host counts as gone.")
CHANGE = flags.DEFINE_string(
    "change", "", """JSON, what a run changes where it goes on: '{"tokens_per_batch": 8192}'."""
)
PROFILE = flags.DEFINE_string("profile_steps", "", "FIRST:LAST, the steps to trace for a profile.")

# What each network takes of a batch, in the order of its arguments.
FIELDS: dict[Callable[..., nnx.Module], tuple[str, ...]] = {
    Decoder: ("inputs", "inputs_segment_ids", "inputs_positions"),
    Encoder: ("inputs", "inputs_segment_ids", "inputs_positions"),
    EncoderDecoder: (
        *("inputs", "inputs_segment_ids", "inputs_positions"),
        *("decoder_inputs", "targets_segment_ids", "targets_positions"),
    ),
}


def network_for(corpus) -> Callable[..., nnx.Module]:
    """The network that a corpus, a view of one, or pairs ask for."""
    if np.ndim(corpus.lengths) == 2:
        return EncoderDecoder
    return Encoder if isinstance(corpus, pipeline.Masked) else Decoder


def check(config: ConfigDict) -> None:
    """Refuses, before anything is prepared, what is no model or no run.

    Raises:
        ValueError: the warm-up is longer than the run, or what `TransformerConfig` raises.
    """
    TransformerConfig(vocab_size=1, **config.model)
    if not 0 <= config.optimizer.warmup_steps < config.steps:
        raise ValueError(
            f"optimizer.warmup_steps is {config.optimizer.warmup_steps} and steps is "
            f"{config.steps}; warm-up takes some of the steps, or 0, as in "
            "--config.optimizer.warmup_steps=0"
        )


def make_steps(config: ConfigDict, corpus, sharding) -> Steps:
    """The model that `config` describes, for a corpus or pairs, and how it is trained."""
    model = TransformerConfig(vocab_size=corpus.vocab_size or 0, **config.model)
    network = network_for(corpus)
    spec, steps = config.optimizer, config.steps
    schedule = optax.warmup_cosine_decay_schedule(
        spec.learning_rate / max(spec.warmup_steps, 1),
        spec.learning_rate,
        spec.warmup_steps,
        steps,
        end_value=spec.learning_rate * spec.final,
    )
    optimizer = optax.chain(
        optax.clip_by_global_norm(spec.clip),
        optax.adamw(schedule, spec.b1, spec.b2, weight_decay=spec.weight_decay, mask=decay_mask),
    )
    graph, _ = nnx.split(nnx.eval_shape(lambda: network(model, rngs=nnx.Rngs(0))))

    def init(key):
        params = nnx.to_pure_dict(nnx.state(network(model, rngs=nnx.Rngs(key)), nnx.Param))
        state = {"params": params, "optimizer": optimizer.init(params), "updates": jnp.int32(0)}
        if model.dtype == "float16":  # small gradients would vanish in it
            state["loss_scale"] = DynamicScale(scale=jnp.float32(spec.loss_scale))
        return state

    def sums(params, batch):
        logits = nnx.merge(graph, params)(*(batch[name] for name in FIELDS[network]))
        return cross_entropy(logits, batch["targets"], batch["loss_weights"])

    def eval_step(params, batch, microbatches=1):
        return summed(sums, params, batch, microbatches=microbatches, sharding=sharding)

    def train_step(state, batch, microbatches=1):
        # Sums of losses grow with the batch; the scale is meant for their mean.
        scale = state["loss_scale"].scale / batch["targets"].size if "loss_scale" in state else 1.0

        def scaled(params, microbatch):
            total, weight = sums(params, microbatch)
            return total * scale, weight

        total, weight, gradients = summed_gradients(
            scaled, state["params"], batch, microbatches=microbatches, sharding=sharding
        )
        tokens = jnp.maximum(weight, 1) * scale
        gradients = jax.tree.map(lambda gradient: gradient / tokens, gradients)
        loss, norm = total / tokens, optax.global_norm(gradients)
        updates, moments = optimizer.update(gradients, state["optimizer"], state["params"])
        after = {
            "params": optax.apply_updates(state["params"], updates),
            "optimizer": moments,
            "updates": state["updates"] + 1,
        }
        # A step that is not finite leaves the state as it was, whatever the host then decides.
        finite = jnp.isfinite(loss) & jnp.isfinite(norm)
        values = {"loss": loss, "gradient_norm": norm, "finite": finite}
        values["learning_rate"] = schedule(state["updates"])
        keep = {name: state[name] for name in after}
        after = jax.tree.map(lambda new, old: jnp.where(finite, new, old), after, keep)
        if "loss_scale" in state:
            after["loss_scale"] = adjusted(state["loss_scale"], finite)
            values["loss_scale"] = state["loss_scale"].scale
        return after, values

    return Steps(
        init,
        train_step,
        eval_step,
        parameter_shardings,
        lambda planned: flops(model, network, planned),
    )


def adjusted(scale: DynamicScale, finite) -> DynamicScale:
    """The loss scale for the next step: less after an overflow, more after many good steps."""
    grows = finite & (scale.fin_steps + 1 >= scale.growth_interval)
    larger = jnp.where(grows, scale.scale * scale.growth_factor, scale.scale)
    smaller = jnp.maximum(scale.scale * scale.backoff_factor, 1.0)
    return scale.replace(
        scale=jnp.where(finite, larger, smaller),
        fin_steps=jnp.where(finite & ~grows, scale.fin_steps + 1, 0),
    )


def flops(model: TransformerConfig, network, planned: pipeline.PlannedBatch) -> float:
    """What a training step on a planned batch asks for."""
    lengths = planned.segments[:, 3:]
    squares = lengths.T @ lengths
    if len(squares) == 1:
        seen = int(squares[0, 0]) * (2 if network is Encoder else 1)  # both ways
        return training_flops(model, planned.num_tokens, seen)
    inputs, targets = lengths.sum(axis=0).tolist()
    mixed = int(squares[0, 0]), int(squares[1, 1]), int(squares[0, 1])
    return pair_flops(model, (inputs, targets), mixed)


def main(argv):
    """Runs the configuration that the flags give."""
    if len(argv) > 1:
        raise app.UsageError(f"{argv[1]!r} is no flag; write --NAME=VALUE, lists in quotes")
    if not flags.FLAGS["verbosity"].present:
        logging.getLogger("absl").setLevel(logging.WARNING)  # orbax tells of every file
    check(CONFIG.value)
    hosts.connect(COORDINATOR.value, NUM_PROCESSES.value, PROCESS_ID.value, WAIT.value)
    name = pathlib.Path(config_flags.get_config_filename(flags.FLAGS["config"])).stem
    with hosts.leaving_together():
        workdir = epath.Path(WORKDIR.value or HERE / "runs" / name)
        run = Run(CONFIG.value, workdir, change=CHANGE.value, profile=PROFILE.value)
        run.train(functools.partial(make_steps, CONFIG.value))


if __name__ == "__main__":
    app.run(main)
