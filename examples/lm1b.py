"""A loop in the style of Flax's lm1b example: Linen, logical axes, evaluation; fed by Lockstep.

    pip install lockstep-pipeline flax optax orbax-checkpoint
    python examples/lm1b.py --workdir=runs/lm1b --num-train-steps=60

Parameters are sharded by the rules of logical axes, over a mesh with the axes `data` and `fsdp`.
The evaluation is one pass over a held-out set, in which every host takes the same number of steps
and every token counts once. Run the command again, also after a kill: it continues from its last
checkpoint, with the same losses. Comments that begin with "Lockstep:" say what the line below does.
"""

import argparse
import dataclasses
import email
import math
import pathlib

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
from flax import linen as nn
from flax.linen.spmd import logical_to_mesh_sharding
from flax.training.train_state import TrainState

import pipeline
from pipeline import sources, tokenizers


@dataclasses.dataclass(frozen=True)
class Config:
    """The configuration of a run."""

    workdir: pathlib.Path
    num_train_steps: int = 60
    eval_every_steps: int = 20
    checkpoint_every_steps: int = 10
    seed: int = 0

    # Batches.
    tokens_per_batch: int = 2048
    max_target_length: int = 256
    max_buckets: int = 4

    # Model.
    emb_dim: int = 32
    num_heads: int = 2
    num_layers: int = 2
    mlp_dim: int = 64

    # Optimizer.
    learning_rate: float = 0.02
    warmup_steps: int = 10
    weight_decay: float = 0.1

    # Mesh: the devices that share the parameters; the others hold copies.
    fsdp: int = 1

    # The axis of the mesh that divides each logical axis.
    logical_axis_rules: tuple = (
        ("batch", ("data", "fsdp")),
        ("vocab", "fsdp"),
        ("mlp", "fsdp"),
        ("heads", "fsdp"),
        ("embed", None),
        ("positions", None),
    )


def partitioned(*axes):
    """The initialiser of a kernel with these logical axes."""
    return nn.with_logical_partitioning(nn.initializers.xavier_uniform(), axes)


class Block(nn.Module):
    """A layer of attention and a layer of hidden units."""

    config: Config

    @nn.compact
    def __call__(self, x, mask):
        """The rows `[rows, length, width]` after this block."""
        config = self.config
        attention = nn.MultiHeadDotProductAttention(
            config.num_heads, kernel_init=partitioned("embed", "heads"), use_bias=False
        )
        x += attention(nn.LayerNorm()(x), mask=mask)
        hidden = nn.Dense(config.mlp_dim, kernel_init=partitioned("embed", "mlp"))
        y = nn.gelu(hidden(nn.LayerNorm()(x)))
        return x + nn.Dense(config.emb_dim, kernel_init=partitioned("mlp", "embed"))(y)


class TransformerLM(nn.Module):
    """A decoder: a batch to logits `[rows, length, vocabulary]`."""

    config: Config
    vocab_size: int
    max_positions: int

    @nn.compact
    def __call__(self, batch):
        """Logits of the next tokens."""
        # Lockstep: a row holds several examples, and each attends only to itself.
        mask = pipeline.attention_mask(batch)[:, None]  # the same for every head
        width, init = self.config.emb_dim, nn.initializers.normal(1.0)
        vocabulary = nn.with_logical_partitioning(init, ("vocab", "embed"))
        positions = nn.with_logical_partitioning(init, ("positions", "embed"))
        x = nn.Embed(self.vocab_size, width, embedding_init=vocabulary)(batch["inputs"])
        # Lockstep: positions begin at 0 in each example; do not use the column number.
        x += nn.Embed(self.max_positions, width, embedding_init=positions)(
            batch["inputs_positions"]
        )
        for _ in range(self.config.num_layers):
            x = Block(self.config)(x, mask)
        head = nn.Dense(self.vocab_size, kernel_init=partitioned("embed", "vocab"))
        return head(nn.LayerNorm()(x))


def create_learning_rate_schedule(config):
    """Linear warm-up, then the reciprocal square root of the step."""

    def rsqrt(step):
        shifted = step + config.warmup_steps  # a joined schedule begins at 0
        return config.learning_rate * jnp.sqrt(config.warmup_steps / shifted)

    warmup = optax.linear_schedule(0.0, config.learning_rate, config.warmup_steps)
    return optax.join_schedules([warmup, rsqrt], [config.warmup_steps])


def compute_metrics(logits, batch):
    """Sums over the global batch, which add up over batches: loss, accuracy, denominator."""
    # Lockstep: the weight is 0 on padding, so empty rows at the end of an epoch do not count.
    weights, targets = batch["loss_weights"], batch["targets"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    hits = logits.argmax(-1) == targets
    return {
        "loss": (losses * weights).sum(),
        "accuracy": (hits * weights).sum(),
        "denominator": weights.sum(),
    }


def normalize(sums):
    """Means and perplexity from sums of `compute_metrics`."""
    sums = {name: float(value) for name, value in sums.items()}
    loss, accuracy = (sums[name] / max(sums["denominator"], 1) for name in ("loss", "accuracy"))
    return {"loss": loss, "accuracy": accuracy, "perplexity": math.exp(min(loss, 10))}


def train_step(state, batch):
    """The state after one update, and the metrics of the batch."""

    def mean_loss(params):
        metrics = compute_metrics(state.apply_fn({"params": params}, batch), batch)
        # Lockstep: batches hold different numbers of tokens, so divide by their number.
        return metrics["loss"] / metrics["denominator"], metrics

    gradients, metrics = jax.grad(mean_loss, has_aux=True)(state.params)
    return state.apply_gradients(grads=gradients), metrics


def eval_step(state, batch):
    """The metrics of a held-out batch."""
    return compute_metrics(state.apply_fn({"params": state.params}, batch), batch)


def evaluate(compiled_eval_step, state, eval_batches):
    """Metrics of the held-out set."""
    sums = None
    # Lockstep: a finite pass ends at the same step on every host.
    with pipeline.Loader(eval_batches) as loader:
        for batch in loader:
            metrics = jax.device_get(compiled_eval_step(state, batch))
            sums = metrics if sums is None else jax.tree.map(lambda x, y: x + y, sums, metrics)
    return normalize(sums)


def get_corpora(directory):
    """The paragraphs of Python's own email package, as corpora of bytes: to train on, held out."""
    files = sorted(pathlib.Path(email.__file__).parent.glob("*.py"))
    texts = [text for file in files for text in file.read_text("utf-8").split("\n\n")]
    # Lockstep: tokenises once; the next call opens the corpus.
    corpus = pipeline.prepare(sources.Records(texts), tokenizers.Bytes(), directory)
    return corpus.split(hold_out=0.1)


def create_train_state(config, model, mesh, like):
    """The initial state, sharded by the rules of the logical axes."""
    schedule = create_learning_rate_schedule(config)
    optimizer = optax.adamw(schedule, b1=0.9, b2=0.98, weight_decay=config.weight_decay)

    def init(key, batch):
        params = model.init(key, batch)["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=optimizer)

    key = jax.random.key(config.seed)
    specs = nn.get_partition_spec(jax.eval_shape(init, key, like))
    shardings = logical_to_mesh_sharding(specs, mesh, config.logical_axis_rules)
    state = jax.jit(init, out_shardings=shardings)(key, like)
    return nn.meta.unbox(state), nn.meta.unbox(shardings)


def train_and_evaluate(config):
    """Trains from the last checkpoint in `config.workdir`, or from the beginning, to the end."""
    auto = (jax.sharding.AxisType.Auto,) * 2
    shape = (jax.device_count() // config.fsdp, config.fsdp)
    mesh = jax.make_mesh(shape, ("data", "fsdp"), axis_types=auto)
    corpus, held_out = get_corpora(config.workdir / "corpus")
    # Lockstep: an iterator of global batches of a few shapes; rows are sharded over both axes. With
    # multiples of 8 rows, the run may continue on 1, 2, 4 or 8 devices.
    loader = pipeline.load(
        corpus,
        sharding=mesh,
        tokens_per_batch=config.tokens_per_batch,
        max_length=config.max_target_length,
        max_buckets=config.max_buckets,
        row_multiple=8,
        width=config.emb_dim,
        seed=config.seed,
    )

    # Lockstep: one epoch of the held-out set in the same shapes; examples keep their order.
    eval_plan = pipeline.Plan(held_out, loader.plan.buckets, shuffle=False)
    eval_batches = pipeline.Batches(held_out, eval_plan, sharding=mesh)

    with loader, ocp.CheckpointManager(config.workdir / "checkpoints") as manager:
        # Lockstep: the table of positions is as large as either plan needs.
        positions = max(loader.plan.max_position, eval_plan.max_position) + 1
        vocab_size = -(-(corpus.vocab_size or 0) // 64) * 64  # so that the mesh divides it
        model = TransformerLM(config, vocab_size, positions)
        # Lockstep: specs has the shapes of every bucket; any of them will do to initialise.
        like = jax.tree.map(jnp.zeros_like, next(iter(loader.specs.values())))
        state, shardings = create_train_state(config, model, mesh, like)

        first = manager.latest_step() or 0
        if first:
            items = ocp.args.Composite(
                state=ocp.args.StandardRestore(state), data=ocp.args.JsonRestore()
            )
            restored = manager.restore(first, args=items)
            state = restored["state"]
            # Lockstep: continues with the next batch, or says which setting or text has changed.
            loader.set_state(restored["data"])

        # Lockstep: compiles both steps for every bucket now, and refuses other shapes later.
        compiled_train_step = pipeline.steps.Compiled(
            train_step, state, loader.specs, donate=True, out_shardings=(shardings, None)
        )
        compiled_eval_step = pipeline.steps.Compiled(eval_step, state, eval_batches.specs)
        for step in range(first, config.num_train_steps):
            batch = next(loader)
            state, metrics = compiled_train_step(state, batch)
            done, ends = step + 1, step + 1 == config.num_train_steps
            loss = normalize(metrics)["loss"]
            print("step", step, "shape", batch["inputs"].shape, "loss", loss)
            if done % config.eval_every_steps == 0 or ends:
                held_out_metrics = evaluate(compiled_eval_step, state, eval_batches)
                print("after step", step, "held out", held_out_metrics)
            if done % config.checkpoint_every_steps == 0 or ends:
                items = ocp.args.Composite(
                    state=ocp.args.StandardSave(state),
                    # Lockstep: the step and a fingerprint of the plan, the same on every host.
                    data=ocp.args.JsonSave(loader.get_state()),
                )
                manager.save(done, args=items)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--workdir", type=lambda name: pathlib.Path(name).absolute(), required=True)
    parser.add_argument("--num-train-steps", type=int, default=Config.num_train_steps)
    parser.add_argument("--fsdp", type=int, default=Config.fsdp)
    train_and_evaluate(Config(**vars(parser.parse_args())))
