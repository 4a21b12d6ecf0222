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
from collections.abc import Callable
from typing import Any

if __name__ == "__main__":
    # Until the loop begins, ^C ends the process as SIGTERM does. Once imported, JAX runs inside
    # callbacks of Python's garbage collector, where a KeyboardInterrupt would be lost.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import jax
import optax
from absl import flags
from etils import epath
from flax import nnx
from ml_collections import ConfigDict

import pipeline
from models import Decoder, Encoder, EncoderDecoder, TransformerConfig, step_flops
from models.loss import cross_entropy
from models.parameters import decay_mask, parameter_shardings
from pipeline.errors import InvalidValue
from pipeline.fs import as_path
from pipeline.loading import batch_sharding
from pipeline.steps import make_eval_step, make_mesh, make_score_step, make_train_step
from pipeline.trainer import (
    Run,
    compile_evaluation,
    compile_training,
    evaluation_batches,
    has_checkpoint,
    launch,
    prepare_on_hosts,
    restore_parameters,
    score_corpus,
    tune_run,
)

DEFAULT = f"{pathlib.Path(__file__).parent}/configs/quickstart.py"  # without --config
MODE = flags.DEFINE_enum("mode", "train", ["train", "score", "tune"], "What to do.")
SCORES = flags.DEFINE_string(
    "scores", None, "Where --mode=score writes; default: WORKDIR/scores/STEP."
)
PROFILE = flags.DEFINE_string("profile_steps", "", "FIRST:LAST, the steps to trace for a profile.")
flags.adopt_module_key_flags(launch)  # such as --workdir


# ---- The model and its optimizer.


def make_model(config: ConfigDict, corpus: Any) -> tuple[Callable, Callable, Callable]:
    """A decoder for a corpus, an encoder for a masked one, or an encoder–decoder for pairs.

    Returns:
        `init_params(key)`, the parameters and only state of the model: no dropout, no batch
        statistics; `loss(params, batch)`, the sums of weighted losses and of their weights, linear
        in `batch["loss_weights"]`; and `flops(planned)`, the operations of a training step on a
        planned batch, or 0.0. README.md lists the fields of a batch.
    """
    if corpus.vocab_size is None:
        raise InvalidValue("the corpus has no vocabulary; prepare it again, with a tokenizer")
    try:
        shape = TransformerConfig(vocab_size=corpus.vocab_size, **config.model)
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

    def flops(planned: pipeline.PlannedBatch):
        lengths = planned.segments[:, 3:]  # for pairs, two columns
        trees = None if corpus.trees is None else corpus.trees[planned.segments[:, 1]]
        return step_flops(shape, lengths, bidirectional=network is Encoder, trees=trees)

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


def train(config: ConfigDict, workdir: epath.Path, *, profile: str = "") -> int:
    """Trains from the last checkpoint in `workdir`, or from the beginning, to the last step.

    `profile` is that of `Run`. Returns the exit status: 0, or 128 + the signal that stopped the
    run, which has saved.
    """
    with Run(config, workdir, profile=profile) as run:
        if run.finished:
            return 0
        config, mesh = run.config, run.mesh  # with the seed of the run, and its values for None

        # Corpora, plan and loader; begin() puts the loader at first_step.
        corpus, held_out = run.prepare_corpora()
        plan = run.make_plan(corpus)
        batches = pipeline.Batches(corpus, plan, **run.layout)
        evaluation = evaluation_batches(held_out, plan.options, **run.layout)
        run.require_agreement(batches, evaluation)  # or hosts would wait for each other
        loader = run.enter_context(pipeline.Loader(batches.repeat()))

        # The model, and the steps of training and evaluation.
        init_params, loss, flops = make_model(config, corpus)
        most = max(plan.most_segments().values()) if config.segment_losses else None  # in a row
        initialise, train_step = make_training(config, mesh, init_params, loss, most)
        eval_step = make_eval_step(loss, sharding=batch_sharding(mesh))
        key = jax.random.key(config.seed)
        like = initialise.eval_shape(key)  # shapes, dtypes and shardings of the state

        # Both steps, compiled for every bucket.
        with run.log.clock("compile"):
            train_step = compile_training(config, train_step, like, loader.specs)
            eval_step = compile_evaluation(config, eval_step, like, evaluation.specs)

        # The loop. begin() restores or initialises the state; from here on, the run logs.
        steps = {"train_step": train_step, "eval_step": eval_step}
        state = run.begin(initialise, key, loader=loader, flops=flops, **steps)
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


def tune(config: ConfigDict, workdir: epath.Path, *, again: bool = False) -> None:
    """Measures the shapes with which training is fastest here, and keeps them in `workdir`.

    Unless `again`, it does not measure what `workdir` holds already.
    """
    mesh = make_mesh(config.mesh)
    with jax.set_mesh(mesh):
        corpus, _ = prepare_on_hosts(config, workdir / "corpus")
        init_params, loss, _ = make_model(config, corpus)
        make_steps = functools.partial(make_training, config, mesh, init_params, loss)
        tune_run(config, corpus, make_steps, workdir, mesh=mesh, again=again)


def main(config: ConfigDict, workdir: epath.Path) -> int:
    """Trains, scores or tunes, as the flags say; returns the exit status."""
    if SCORES.value and MODE.value != "score":
        raise InvalidValue(f"--scores needs --mode=score, and --mode is {MODE.value}; remove it")
    if PROFILE.value and MODE.value != "train":
        raise InvalidValue(
            f"--profile_steps needs --mode=train, and --mode is {MODE.value}; remove it"
        )
    if MODE.value == "score":
        score(config, workdir, SCORES.value)
        return 0
    if MODE.value == "tune":
        tune(config, workdir, again=True)
        return 0
    if config.batches.tune and not has_checkpoint(workdir):
        tune(config, workdir)
    return train(config, workdir, profile=PROFILE.value)


if __name__ == "__main__":
    launch.run(main, DEFAULT)
