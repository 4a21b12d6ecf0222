"""Trains a Transformer on packed text: a decoder, an encoder, or an encoder–decoder on pairs.

    python train.py --config=configs/quickstart.py --config.steps=500 --workdir=runs/quickstart

Run it again, with --workdir alone, to continue from its last checkpoint with its own config, which
flags change. With --mode=score it writes the loss of each document instead. On several hosts, run
it on each; where the platform does not say how many there are, add
--coordinator=HOST:PORT --num_processes=N --process_id=I. To train another model, copy this file and
change `make_model` and `make_optimizer`; `parameter_shardings` says how parameters are split over
devices.
"""

import logging
import pathlib
import signal
import sys
from collections.abc import Callable
from typing import Any

if __name__ == "__main__":
    # Until the loop begins, ^C ends the process as SIGTERM does. JAX works in the callbacks of
    # Python's garbage collector from its import on, and a KeyboardInterrupt there would be lost.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import jax
import numpy as np
import optax
from absl import flags
from etils import epath
from flax import nnx
from ml_collections import ConfigDict, config_flags

import pipeline
from models.config import TransformerConfig
from models.decoder import Decoder
from models.encoder import Encoder
from models.encoder_decoder import EncoderDecoder
from models.flops import step_flops
from models.loss import cross_entropy
from models.parameters import decay_mask, parameter_shardings
from pipeline.errors import InvalidValue
from pipeline.fs import as_path
from pipeline.loading import batch_sharding
from pipeline.steps import (
    Compiled,
    make_eval_step,
    make_mesh,
    make_score_step,
    make_train_step,
    programs_table,
)
from pipeline.trainer import (
    Run,
    evaluation_batches,
    find_config,
    prepare_on_hosts,
    program,
    restore_parameters,
    score_corpus,
)

HERE = pathlib.Path(__file__).parent
CONFIG = config_flags.DEFINE_config_file(
    "config", find_config(sys.argv, f"{HERE}/configs/quickstart.py")
)
MODE = flags.DEFINE_enum("mode", "train", ["train", "score"], "What to do.")
WORKDIR = flags.DEFINE_string("workdir", None, "For corpus, checkpoints, metrics; runs/CONFIG.")
CHANGE = flags.DEFINE_string("change", "", "JSON: options of batches to change from here on.")
SCORES = flags.DEFINE_string(
    "scores", None, "Where --mode=score writes; default: WORKDIR/scores/STEP."
)
PROFILE = flags.DEFINE_string("profile_steps", "", "FIRST:LAST, the steps to trace for a profile.")
flags.adopt_module_key_flags(program)  # such as --coordinator

logger = logging.getLogger("pipeline.train")


# ---- The model and its optimizer.


def make_model(config: ConfigDict, corpus: Any) -> tuple[Callable, Callable, Callable]:
    """The model for a corpus, a `Masked` view of one, or pairs.

    Returns:
        `init(key)`, its parameters, which are all of its state; `loss(params, batch)`, the sums of
        weighted losses and of their weights, linear in `batch["loss_weights"]`; and
        `flops(planned)`, the operations of a training step on a planned batch. README.md shows what
        a batch has.
    """
    try:
        shape = TransformerConfig(vocab_size=corpus.vocab_size or 0, **config.model)
    except (TypeError, ValueError) as error:  # its message names the field
        raise InvalidValue(f"config.model: {error}") from error
    fields = ["inputs", "inputs_segment_ids", "inputs_positions"]
    if np.ndim(corpus.lengths) == 2:  # pairs
        network: Any = EncoderDecoder
        fields += ["decoder_inputs", "targets_segment_ids", "targets_positions"]
    else:
        network = Encoder if isinstance(corpus, pipeline.Masked) else Decoder
    graphdef, _ = nnx.split(nnx.eval_shape(lambda: network(shape, rngs=nnx.Rngs(0))))

    def init(key):
        return nnx.to_pure_dict(nnx.state(network(shape, rngs=nnx.Rngs(key)), nnx.Param))

    def loss(params, batch):
        logits = nnx.merge(graphdef, params)(*(batch[name] for name in fields))
        return cross_entropy(logits, batch["targets"], batch["loss_weights"])

    def flops(planned: pipeline.PlannedBatch):
        lengths = planned.segments[:, 3:]  # of pairs two columns
        return step_flops(shape, lengths, bidirectional=network is Encoder)

    return init, loss, flops


def make_optimizer(config: ConfigDict) -> tuple[optax.GradientTransformation, optax.Schedule]:
    """The optimizer and its learning rate, a function of the number of updates."""
    spec = config.optimizer
    decay = spec.decay_steps or config.steps
    warmup = decay // 10 if spec.warmup_steps is None else spec.warmup_steps
    if not 0 <= warmup < decay:
        raise InvalidValue(
            f"optimizer.warmup_steps is {warmup} and the learning rate decays over {decay} steps; "
            "warm-up takes some of these, or 0, as in --config.optimizer.warmup_steps=0"
        )
    warmup //= config.accumulate  # from steps to updates
    rate = optax.warmup_cosine_decay_schedule(
        spec.learning_rate / max(warmup, 1),
        spec.learning_rate,
        warmup,
        -(-decay // config.accumulate),
        end_value=spec.learning_rate * spec.final,
    )
    adamw = optax.adamw(rate, spec.b1, spec.b2, weight_decay=spec.weight_decay, mask=decay_mask)
    return optax.chain(optax.clip_by_global_norm(spec.clip), adamw), rate


# ---- What training and scoring do with them.


def make_training(
    config: ConfigDict,
    mesh: jax.sharding.Mesh,
    init: Callable,
    loss: Callable,
    most_segments: int | None = None,
) -> tuple[Any, Callable]:
    """`initialise(key)`, the state, jitted with its shardings; and `train_step(state, batch)`.

    With `most_segments`, the most in a row, a step gives the loss of each segment.
    """
    optimizer, learning_rate = make_optimizer(config)
    init_state, train_step = make_train_step(
        loss,
        optimizer,
        accumulated=config.accumulate,
        learning_rate=learning_rate,
        loss_scale=config.optimizer.loss_scale if config.model.dtype == "float16" else None,
        most_segments=most_segments,
        sharding=batch_sharding(mesh),
    )

    def initialise(key):
        return init_state(init(key))

    shardings = parameter_shardings(jax.eval_shape(initialise, jax.random.key(0)), mesh)
    return jax.jit(initialise, out_shardings=shardings), train_step


def train(config: ConfigDict, workdir: epath.Path, **options: str) -> int:
    """Trains from the last checkpoint in `workdir`, or from the beginning, to the last step.

    The options are those of `Run`. Returns the exit status: 0, or that of a signal after which the
    run was saved.
    """
    with Run(config, workdir, **options) as run:
        if run.finished:
            return 0
        config, mesh = run.config, run.mesh  # with what the past of the run decides

        # Corpora, plan and loader.
        corpus, held_out = run.prepare_corpora()
        plan = run.make_plan()
        batches = pipeline.Batches(corpus, plan, **run.layout)
        evaluation = evaluation_batches(held_out, plan.options, **run.layout)
        run.require_agreement(batches, evaluation)
        loader = run.enter(pipeline.Loader(batches.repeat()))

        # The model, and its steps compiled for every bucket.
        init, loss, flops = make_model(config, corpus)
        most = max(plan.most_segments().values()) if config.segment_losses else None
        initialise, train_step = make_training(config, mesh, init, loss, most)
        key = jax.random.key(config.seed)
        like = initialise.eval_shape(key)  # shapes, dtypes and shardings
        with run.log.clock("compile"):
            train_step = Compiled(
                train_step,
                like,
                loader.specs,
                donate=True,
                microbatches=config.microbatches or "auto",
                budget=config.memory_budget,
                out_shardings=(
                    jax.tree.map(lambda leaf: leaf.sharding, like),
                    jax.NamedSharding(mesh, jax.P()),
                ),
            )
            eval_step = Compiled(
                make_eval_step(loss, sharding=batch_sharding(mesh)),
                like["params"],
                evaluation.specs,
                held={name: leaf for name, leaf in like.items() if name != "params"},
                microbatches="auto",
                budget=config.memory_budget,
            )
        logger.info(programs_table(train_step, eval_step))

        # The loop.
        state = run.begin(initialise, key, train_step, eval_step, loader, flops)
        run.evaluate(run.first_step, evaluation, state["params"])
        for step in range(run.first_step, config.steps):
            with run.log.clock("wait"):
                batch = next(loader)
            if step in config.skip_steps:
                run.skip(step)
            else:
                with run.training(step, state):
                    state, values = train_step(state, batch)
                run.add(step, values)
            # Hosts agree here whether to stop: at the last step, or after a signal.
            stops = run.stops_after(step)
            run.evaluate(step + 1, evaluation, state["params"])
            if stops or (step + 1) % config.checkpoint_every == 0:
                run.save(step + 1, state)
            if stops:
                break
    return run.status


def score(config: ConfigDict, workdir: epath.Path, directory: str | None = None) -> None:
    """Writes the loss of each document under the latest checkpoint of the run in `workdir`."""
    mesh = make_mesh(config.mesh)
    with jax.set_mesh(mesh):
        corpus, _ = prepare_on_hosts(config, workdir / "corpus")
        init, loss, _ = make_model(config, corpus)
        initialise, _ = make_training(config, mesh, init, loss)
        like = initialise.eval_shape(jax.random.key(config.seed))
        step, params = restore_parameters(workdir, corpus, like)
        name, score_step = f"step {step} of {workdir}", make_score_step(loss)
        place = as_path(directory or workdir / f"scores/{step}")
        score_corpus(config, corpus, score_step, params, name, directory=place, mesh=mesh)


def main() -> int:
    """Runs the configuration that the flags give; returns the exit status."""
    file = config_flags.get_config_filename(flags.FLAGS["config"])
    workdir = as_path(WORKDIR.value or HERE / "runs" / pathlib.Path(file).stem)
    if MODE.value == "score":
        score(CONFIG.value, workdir, SCORES.value)
        return 0
    return train(CONFIG.value, workdir, file=file, change=CHANGE.value, profile=PROFILE.value)


if __name__ == "__main__":
    program.run(main)
