"""Trains a Transformer on packed text: a decoder, an encoder, or an encoder–decoder on pairs.

    python train.py --config=configs/quickstart.py --config.steps=500 --workdir=runs/quickstart

Run it again, with --workdir alone, and it continues from its last checkpoint, with the same config
unless flags change it. --mode=score does not train; it writes the loss of each document.
--mode=tune measures which batch shapes are the fastest on these devices. On several hosts, run it
on each; if the platform does not say how many there are, add --coordinator=HOST:PORT
--num_processes=N --process_id=I. To train another model, copy this file and change `make_model` and
`make_optimizer` (docs/own_loop.md).
"""

import functools
import pathlib
import signal
import sys
from collections.abc import Callable
from typing import Any

if __name__ == "__main__":
    # Until the loop begins, ^C ends the process as SIGTERM does. Once imported, JAX runs inside
    # callbacks of Python's garbage collector, where a KeyboardInterrupt would be lost.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import jax
import numpy as np
import optax
from absl import flags
from etils import epath
from flax import nnx
from ml_collections import ConfigDict, config_flags

import pipeline
from models import Decoder, Encoder, EncoderDecoder, TransformerConfig, step_flops
from models.loss import PREFERENCE_LOSSES, cross_entropy, preference_losses
from models.parameters import decay_mask, parameter_shardings
from pipeline.errors import InvalidValue, require_one_of
from pipeline.fs import as_path
from pipeline.loading import batch_sharding
from pipeline.steps import Compiled, make_eval_step, make_mesh, make_score_step, make_train_step
from pipeline.steps.preferences import PairLoss
from pipeline.trainer import (
    Run,
    evaluation_batches,
    find_config,
    launch,
    prepare_on_hosts,
    restore_parameters,
    score_corpus,
    tune_run,
)

HERE = pathlib.Path(__file__).parent
# The default is the config of the run in --workdir, if there is one.
CONFIG = config_flags.DEFINE_config_file(
    "config", find_config(sys.argv, f"{HERE}/configs/quickstart.py")
)
MODE = flags.DEFINE_enum("mode", "train", ["train", "score", "tune"], "What to do.")
WORKDIR = flags.DEFINE_string(
    "workdir", None, "Directory of corpus, checkpoints, metrics; default: runs/NAME of the config."
)
CHANGE = flags.DEFINE_string("change", "", "JSON: batch options to change from this step on.")
SCORES = flags.DEFINE_string(
    "scores", None, "Where --mode=score writes; default: WORKDIR/scores/STEP."
)
PROFILE = flags.DEFINE_string("profile_steps", "", "FIRST:LAST, the steps to trace for a profile.")
flags.adopt_module_key_flags(launch)  # such as --coordinator


# ---- The model and its optimizer.


def make_model(config: ConfigDict, corpus: Any) -> tuple[Callable, Callable, Callable]:
    """A decoder for a corpus, an encoder for a masked one, or an encoder–decoder for pairs.

    Returns:
        `init_params(key)`, the parameters and only state of the model: no dropout, no batch
        statistics; `loss(params, batch)`, the sums of weighted losses and of their weights, linear
        in `batch["loss_weights"]`, or a `PairLoss` of these; and `flops(planned)`, the operations
        of a training step on a planned batch, or 0.0. README.md lists the fields of a batch.
    """
    try:
        shape = TransformerConfig(vocab_size=corpus.vocab_size or 0, **config.model)  # 0 is refused
    except (TypeError, ValueError) as error:  # its message names the field
        raise InvalidValue(f"config.model: {error}") from error
    fields = ["inputs", "inputs_segment_ids", "inputs_positions"]
    if len(corpus.sides) == 2:  # pairs
        network: Any = EncoderDecoder
        fields += ["decoder_inputs", "targets_segment_ids", "targets_positions"]
    else:
        network = Encoder if config.task.kind == "masked" else Decoder
        fields += ["visible_until"] if network is Decoder else []  # in batches with groups
    graphdef, _ = nnx.split(nnx.eval_shape(lambda: network(shape, rngs=nnx.Rngs(0))))

    def init_params(key):
        return nnx.to_pure_dict(nnx.state(network(shape, rngs=nnx.Rngs(key)), nnx.Param))

    def loss(params, batch):
        logits = nnx.merge(graphdef, params)(*(batch[name] for name in fields if name in batch))
        return cross_entropy(logits, batch["targets"], batch["loss_weights"])

    if preference := config.get("preference"):
        require_one_of("config.preference.kind", preference.kind, PREFERENCE_LOSSES)
        loss = PairLoss(loss, lambda *logprobs: preference_losses(*logprobs, **preference))

    def flops(planned: pipeline.PlannedBatch):
        lengths = planned.segments[:, 3:]  # for pairs, two columns
        squares = None
        if corpus.trees is not None:  # a group computes its prefix once
            _, branches, costs = corpus.trees[planned.segments[:, 1]].T
            squares = np.where(branches > 0, costs, lengths[:, 0] ** 2).sum()
        return step_flops(shape, lengths, bidirectional=network is Encoder, squares=squares)

    return init_params, loss, flops


def make_optimizer(config: ConfigDict) -> tuple[optax.GradientTransformation, optax.Schedule]:
    """The optimizer and its learning rate, a function of the number of updates.

    The optimizer gets mean gradients once per update (no `MultiSteps`); the rate is for the log.
    `decay_mask` and `parameter_shardings` go by the names of parameters: change
    models/parameters.py with the model.
    """
    spec = config.optimizer
    decay = spec.decay_steps or config.steps  # Run sets decay_steps; scoring may not have it
    warmup = decay // 10 if spec.warmup_steps is None else spec.warmup_steps
    if not 0 <= warmup < decay:
        raise InvalidValue(
            f"config.optimizer.warmup_steps is {warmup} and the learning rate decays over {decay} "
            "steps; warm-up must be shorter, or 0, as in --config.optimizer.warmup_steps=0"
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


# ---- Training and scoring.


def make_training(
    config: ConfigDict,
    mesh: jax.sharding.Mesh,
    init_params: Callable,
    loss: Callable,
    most_segments: int | None = None,
) -> tuple[Any, Callable]:
    """`initialise(key)`, which makes the state, jitted with its shardings; and `train_step`.

    With `most_segments`, the largest number of segments in a row, a step also returns the loss of
    each segment. A model whose `config.model.dtype` is float16 needs `config.optimizer.loss_scale`.
    """
    optimizer, learning_rate = make_optimizer(config)
    init_state, train_step = make_train_step(
        loss,
        optimizer,
        accumulated=config.accumulate,
        learning_rate=learning_rate,
        loss_scale=config.optimizer.loss_scale if config.model.dtype == "float16" else None,
        most_segments=most_segments,
        sharding=batch_sharding(mesh),  # so that each device splits its own rows
    )

    def initialise(key):
        return init_state(init_params(key))

    shardings = parameter_shardings(jax.eval_shape(initialise, jax.random.key(0)), mesh)
    return jax.jit(initialise, out_shardings=shardings), train_step


def train(
    config: ConfigDict, workdir: epath.Path, *, file: str = "", change: str = "", profile: str = ""
) -> int:
    """Trains from the last checkpoint in `workdir`, or from the beginning, to the last step.

    The options are those of `Run`. Returns the exit status: 0, or 128 + the signal that stopped the
    run, which has saved.
    """
    with Run(config, workdir, file=file, change=change, profile=profile) as run:
        if run.finished:
            return 0
        config, mesh = run.config, run.mesh  # with the seed of the run, and its values for None

        # Corpora, model, plan and loader.
        corpus, held_out = run.prepare_corpora()
        init_params, loss, flops = make_model(config, corpus)
        make_steps = functools.partial(make_training, config, mesh, init_params, loss)
        key = jax.random.key(config.seed)
        if config.get("preference"):  # adds the log-probabilities of the initial model
            initialise, _ = make_steps()
            corpus, held_out = run.add_reference((corpus, held_out), loss, initialise, key)
        plan = run.make_plan(corpus, make_steps)  # steps, for tuning
        batches = pipeline.Batches(corpus, plan, **run.layout)
        evaluation = evaluation_batches(held_out, plan.options, **run.layout)
        run.require_agreement(batches, evaluation)  # or hosts would wait for each other
        # begin() puts it at first_step.
        loader = run.enter_context(pipeline.Loader(batches.repeat()))

        # The state and the steps of training and evaluation.
        most = max(plan.most_segments().values()) if config.segment_losses else None  # in a row
        initialise, train_step = make_steps(most)
        eval_step = make_eval_step(loss, sharding=batch_sharding(mesh))
        like = initialise.eval_shape(key)  # shapes, dtypes and shardings of the state

        # Both steps, compiled for every bucket.
        with run.log.clock("compile"):
            train_step = Compiled(
                train_step,
                like,
                loader.specs,
                donate=True,
                microbatches=config.microbatches or "auto",
                budget=config.memory_budget,
                out_shardings=(jax.tree.map(lambda leaf: leaf.sharding, like), jax.P()),
            )
            eval_step = Compiled(
                eval_step,
                like["params"],  # the rest of the state is in memory, too
                evaluation.specs,
                held={name: leaf for name, leaf in like.items() if name != "params"},
                microbatches="auto",
                budget=config.memory_budget,
            )

        # The loop. begin() restores or initialises the state; from here on, the run logs.
        state = run.begin(
            initialise, key, train_step=train_step, eval_step=eval_step, loader=loader, flops=flops
        )
        run.evaluate_if_due(run.first_step, evaluation, state["params"])
        for step in range(run.first_step, config.steps):
            with run.log.clock("wait"):
                batch = next(loader)
            if step in config.skip_steps:
                run.skip(step)
            else:
                with run.training(step, state):  # timed, and traced if asked
                    state, values = train_step(state, batch)
                run.add(step, values)
            # All hosts agree whether this was the last step, or a signal ends the run.
            stops = run.finish_step(step)
            run.evaluate_if_due(step + 1, evaluation, state["params"])
            if stops or (step + 1) % config.checkpoint_every == 0:
                run.save(step + 1, state)
            if stops:
                break
    return run.status


def score(config: ConfigDict, workdir: epath.Path, directory: str | None = None) -> None:
    """Writes the loss of each document with the parameters of the latest checkpoint."""
    mesh = make_mesh(config.mesh)
    with jax.set_mesh(mesh):
        corpus, _ = prepare_on_hosts(config, workdir / "corpus", whole=True)
        init_params, loss, _ = make_model(config, corpus)
        # A checkpoint is read whole, optimizer and all.
        initialise, _ = make_training(config, mesh, init_params, loss)
        like = initialise.eval_shape(jax.random.key(0))
        step, params = restore_parameters(workdir, corpus, like)
        place = as_path(directory or workdir / f"scores/{step}")
        score_corpus(config, corpus, make_score_step(loss), params, directory=place, mesh=mesh)


def tune(config: ConfigDict, workdir: epath.Path) -> None:
    """Prints the shapes with which training is fastest here, and keeps them in `workdir`."""
    if config.get("preference"):
        raise InvalidValue(
            "config.preference needs a reference, which --mode=tune does not have; tune at the "
            "start of the run, with --config.batches.tune=True"
        )
    mesh = make_mesh(config.mesh)
    with jax.set_mesh(mesh):
        corpus, _ = prepare_on_hosts(config, workdir / "corpus")
        init_params, loss, _ = make_model(config, corpus)
        make_steps = functools.partial(make_training, config, mesh, init_params, loss)
        tune_run(config, corpus, make_steps, workdir, mesh=mesh, again=True)


def main() -> int:
    """Trains, scores or tunes, as the flags say; returns the exit status."""
    file = config_flags.get_config_filename(flags.FLAGS["config"])
    workdir = as_path(WORKDIR.value or HERE / "runs" / pathlib.Path(file).stem)
    if SCORES.value and MODE.value != "score":
        raise InvalidValue(
            f"--scores needs --mode=score, and --mode is {MODE.value}; set the mode, or remove "
            "--scores"
        )
    if (CHANGE.value or PROFILE.value) and MODE.value != "train":
        raise InvalidValue(
            f"--change and --profile_steps need --mode=train, and --mode is {MODE.value}; remove "
            "them"
        )
    if MODE.value == "score":
        score(CONFIG.value, workdir, SCORES.value)
        return 0
    if MODE.value == "tune":
        tune(CONFIG.value, workdir)
        return 0
    return train(CONFIG.value, workdir, file=file, change=CHANGE.value, profile=PROFILE.value)


if __name__ == "__main__":
    launch.run(main)
