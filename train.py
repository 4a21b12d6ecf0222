"""Trains a Transformer on packed text: a decoder, an encoder, or an encoder–decoder on pairs.

    python train.py --config=configs/quickstart.py --config.steps=500 --workdir=runs/quickstart

Run it again, with --workdir alone, and it continues from its last checkpoint, with the same config
unless flags change it. --mode=score writes the loss of each document of the training corpus, with
the parameters of the last checkpoint; --mode=evaluate, of each document of config.eval, which may
be a test set. On several hosts, run it on each; if the platform does not say how many there are,
add --coordinator=HOST:PORT --num_processes=N --process_id=I. To train another model, copy this file
and change `make_model` and `make_optimizer` (docs/own_loop.md). The loop is in `train`.
"""

import dataclasses
import functools
import math
import pathlib
from typing import Any

import jax
import optax
from absl import flags
from etils import epath
from flax import nnx
from ml_collections import ConfigDict

import pipeline
from models import Decoder, Encoder, EncoderDecoder, TransformerConfig, VisionDecoder, step_flops
from models.loss import chunked_cross_entropy
from models.parameters import decay_mask, parameter_shardings
from pipeline.errors import InvalidValue
from pipeline.loading import batch_sharding
from pipeline.steps import make_eval_step, make_mesh, make_score_step, make_train_step
from pipeline.trainer import (
    Model,
    Run,
    evaluation_batches,
    launch,
    prepare_on_hosts,
    prepare_test,
    require_checkpoint,
    restore_parameters,
    score_corpus,
)

DEFAULT_CONFIG = f"{pathlib.Path(__file__).parent}/configs/quickstart.py"
MODE = flags.DEFINE_enum("mode", "train", ["train", "score", "evaluate"], "What to do.")
SCORES = flags.DEFINE_string(
    "scores",
    None,
    "Where --mode=score and --mode=evaluate write; default: WORKDIR/scores/STEP, and "
    "WORKDIR/tests/CORPUS/STEP.",
)
PROFILE = flags.DEFINE_string("profile_steps", "", "FIRST:LAST, the steps to trace for a profile.")
flags.adopt_module_key_flags(launch)  # such as --workdir, for --help


OFFSETS = "inputs_segment_offsets", "targets_segment_offsets"  # fields on request


# ---- The model and its optimizer.


def make_model(config: ConfigDict, corpus: Any) -> Model:
    """A decoder for a corpus, an encoder for a masked one, or an encoder–decoder for pairs.

    A decoder for a corpus with patches sees them. README.md lists the fields of a batch.
    """
    sees = "patches" in corpus.side_names  # the features are those of configs/vision.py
    if corpus.unpriced and not sees:
        raise InvalidValue(
            f"the corpus has the sides {', '.join(corpus.side_names)}, and train.py trains on text "
            "or pairs, or on text with patches; load it with pipeline.load in a loop of your own, "
            "as in docs/sides.md"
        )
    try:
        sizes = TransformerConfig(vocab_size=corpus.vocab_size, **config.model)
    except (TypeError, ValueError) as error:  # its message names the field
        raise InvalidValue(f"config.model: {error}") from error
    arguments = ["inputs", "inputs_segment_ids", "inputs_positions"]  # fields of a batch, in order
    optional = {"visible_until": "visible_until", OFFSETS[0]: "segment_offsets"}
    if sees:
        network: Any = functools.partial(VisionDecoder, patch_size=corpus.features["patches"].size)
        arguments += ["patches", "patch_image", "patch_yx", "patch"]
    elif len(corpus.sides) == 2:  # pairs
        network = EncoderDecoder
        arguments += ["decoder_inputs", "targets_segment_ids", "targets_positions"]
        optional = {field: field for field in OFFSETS}
    else:
        network = Encoder if config.task.kind == "masked" else Decoder
    graphdef, _ = nnx.split(nnx.eval_shape(lambda: network(sizes, rngs=nnx.Rngs(0))))

    def init_params(key):
        return nnx.to_pure_dict(nnx.state(network(sizes, rngs=nnx.Rngs(key)), nnx.Param))

    def loss(params, batch):
        given = [batch[name] for name in arguments]
        # Groups: several continuations of one prefix. Offsets: for attention that takes them.
        more = {name: batch[field] for field, name in optional.items() if field in batch}
        model = nnx.merge(graphdef, params)
        hidden, logits = model.hidden(*given, **more), model.embedding.logits
        return chunked_cross_entropy(hidden, logits, batch["targets"], batch["loss_weights"])

    def flops(planned):
        # The columns of segments: row, example, start, length; for pairs two lengths.
        example, lengths = planned.segments[:, 1], planned.segments[:, 3:]
        if sees:  # exact if an example has one picture; the table of patches is like that of ids
            encoder = dataclasses.replace(sizes, vocab_size=corpus.features["patches"].size)
            patches = lengths[:, [corpus.side_names.index("patches")]]
            seen = step_flops(encoder, patches, bidirectional=True)
            return seen + step_flops(sizes, lengths[:, :1])
        trees = None if corpus.trees is None else corpus.trees[example]  # of groups
        return step_flops(sizes, lengths, bidirectional=network is Encoder, trees=trees)

    return Model(init_params, loss, flops)


def make_optimizer(config: ConfigDict) -> tuple[optax.GradientTransformation, optax.Schedule]:
    """The optimizer and its learning rate, a function of the number of updates.

    The optimizer gets mean gradients once per update (no `MultiSteps`); the rate is for the log.
    `decay_mask` and `parameter_shardings` go by the names of parameters: change
    models/parameters.py with the model.
    """
    spec = config.optimizer
    decay = spec.decay_steps or config.steps  # a run stores those of its first start
    warmup = decay // 10 if spec.warmup_steps is None else spec.warmup_steps
    if not 0 <= warmup < decay:
        raise InvalidValue(
            f"config.optimizer.warmup_steps is {warmup} and the learning rate decays over {decay} "
            "steps; warm-up must be shorter, or 0, as in --config.optimizer.warmup_steps=0"
        )
    peak, warmup_updates = spec.learning_rate, warmup // config.accumulate
    rate = optax.warmup_cosine_decay_schedule(
        init_value=peak / max(warmup_updates, 1),  # the first update is not 0
        peak_value=peak,
        warmup_steps=warmup_updates,
        decay_steps=math.ceil(decay / config.accumulate),  # with the last, partial update
        end_value=peak * spec.final,
    )
    adamw = optax.adamw(rate, spec.b1, spec.b2, weight_decay=spec.weight_decay, mask=decay_mask)
    return optax.chain(optax.clip_by_global_norm(spec.clip), adamw), rate


# ---- Training and scoring.


def make_init_and_step(
    config: ConfigDict, mesh: jax.sharding.Mesh, model: Model, most_segments: int | None = None
) -> tuple[Any, Any]:
    """`init_state(key)`, jitted with the shardings of the state; and `train_step`.

    With `most_segments`, the largest number of segments in a row, a step also returns the loss of
    each segment. A model whose `config.model.dtype` is float16 needs `config.optimizer.loss_scale`.
    """
    optimizer, learning_rate = make_optimizer(config)
    state_of, train_step = make_train_step(
        model.loss,
        optimizer,
        accumulated=config.accumulate,
        learning_rate=learning_rate,
        loss_scale=config.optimizer.loss_scale if config.model.dtype == "float16" else None,
        most_segments=most_segments,
        sharding=batch_sharding(mesh),  # so that microbatches are parts of each device's rows
    )

    def init_state(key):
        return state_of(model.init_params(key))

    shardings = parameter_shardings(jax.eval_shape(init_state, jax.random.key(0)), mesh)
    return jax.jit(init_state, out_shardings=shardings), train_step


def train(config: ConfigDict, workdir: epath.Path, *, profile: str = "") -> int:
    """Trains from the last checkpoint in `workdir`, or from the beginning, to the last step.

    `profile` is that of `Run`. Returns the exit status: 0, or 128 + the signal that stopped the
    run, which has saved.
    """
    with Run(config, workdir, profile=profile) as run:
        if run.finished:
            return 0
        config = run.config  # fields that are None have the values that the run began with

        # The data. The plan begins at run.first_step; run.begin restores the state of the loader.
        train_corpus, eval_corpus = run.prepare_corpora()
        model = make_model(config, train_corpus)
        plan = run.make_plan(train_corpus)
        if config.model.attention == "cudnn_packed":
            sides = [name for name in OFFSETS if name.split("_")[0] in train_corpus.side_names]
            run.layout["features"] = [*train_corpus.features, *sides]
        train_batches = pipeline.Batches(train_corpus, plan, **run.layout)
        eval_batches = evaluation_batches(eval_corpus, plan.options, **run.layout)
        run.require_agreement(train_batches, eval_batches)  # or hosts would wait for each other
        loader = run.enter_context(
            pipeline.Loader(train_batches.repeat(), num_threads=config.num_threads)
        )

        # The steps of training and evaluation, compiled for every bucket.
        most = max(plan.most_segments().values()) if config.segment_losses else None  # in a row
        init_state, train_step = make_init_and_step(config, run.mesh, model, most)
        eval_step = make_eval_step(model.loss, sharding=batch_sharding(run.mesh))
        train_step = run.compile(init_state, train_step, eval_step, loader, eval_batches)

        # The loop, from the last checkpoint or a new state. From here on, the run logs.
        state = run.begin(model.flops)
        run.evaluate_if_due(run.first_step, state["params"])  # at 0, or where a signal came first
        for step in range(run.first_step, config.steps):
            with run.log.clock("wait"):
                batch = next(loader)
            if step in config.skip_steps:
                run.log_skipped(step)
            else:
                with run.timed(step, state):  # and traced if asked
                    state, values = train_step(state, batch)
                run.log_step(step, values)
            # All hosts agree whether this was the last step, or a signal ends the run.
            stops = run.finish_step(step)
            run.evaluate_if_due(step + 1, state["params"])  # before save, so that it is saved
            if stops or (step + 1) % config.checkpoint_every == 0:
                run.save(step + 1, state)
            if stops:
                break
    return run.status


def score(
    config: ConfigDict, workdir: epath.Path, directory: str | None = None, *, test: bool = False
) -> None:
    """Writes the loss of each document with the parameters of the latest checkpoint.

    The documents are those of the training corpus, or with `test`, of `config.eval`.
    """
    require_checkpoint(workdir)
    mesh = make_mesh(config.mesh)
    with jax.set_mesh(mesh):
        if test:
            corpus, place = prepare_test(config, workdir)
        else:
            corpus, _ = prepare_on_hosts(config, workdir / "corpus")
            place = workdir / "scores"
        model = make_model(config, corpus)
        # A checkpoint is read whole, optimizer and all.
        init_state, _ = make_init_and_step(config, mesh, model)
        abstract_state = init_state.eval_shape(jax.random.key(0))
        step, params = restore_parameters(workdir, corpus, abstract_state)
        into, score_step = directory or place / f"{step}", make_score_step(model.loss)
        score_corpus(config, corpus, score_step, params, directory=into, mesh=mesh)


def main(config: ConfigDict, workdir: epath.Path) -> int:
    """Trains or scores, as the flags say; returns the exit status."""
    for flag, modes in ((SCORES, ("score", "evaluate")), (PROFILE, ("train",))):
        if flag.value and MODE.value not in modes:
            raise InvalidValue(
                f"--{flag.name} needs --mode={' or '.join(modes)}, and --mode is {MODE.value}; "
                "remove it"
            )
    if MODE.value in ("score", "evaluate"):
        score(config, workdir, SCORES.value, test=MODE.value == "evaluate")
        return 0
    return train(config, workdir, profile=PROFILE.value)


if __name__ == "__main__":
    launch.run(main, DEFAULT_CONFIG)
