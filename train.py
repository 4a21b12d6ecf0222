"""Trains a Transformer on packed text: a decoder, an encoder, or an encoder–decoder on pairs.

    python train.py --config=configs/quickstart.py --config.steps=500 --workdir=runs/quickstart

Run it again, with --workdir alone, and it continues from its last checkpoint, with the same config
unless flags change it. --mode=score writes the loss of each document of the training corpus, with
the latest parameters; --mode=evaluate, of config.eval, which may be a test set. On several hosts,
run it on each; if the platform does not say how many there are, add --coordinator=HOST:PORT
--num_processes=N --process_id=I. To train another model, change `make_model` and `make_optimizer`.
"""

import contextlib
import math
from typing import Any

import jax
import optax
from etils import epath
from flax import nnx
from ml_collections import ConfigDict

import pipeline
import trainer
from models import chunked_cross_entropy, parameters
from pipeline import steps

# ---- The model and its optimizer.


def make_model(config: ConfigDict, corpus: Any) -> trainer.Model:
    """The network of `config.architecture` and `config.model`, and its loss: Σ w·nll and Σ w."""
    network, fields, flops = trainer.choose_network(config, corpus)
    graphdef, _ = nnx.split(nnx.eval_shape(lambda: network(nnx.Rngs(0))))

    def init_params(key):
        return nnx.to_pure_dict(nnx.state(network(nnx.Rngs(key)), nnx.Param))

    def loss(params, batch):
        inputs = (batch.get(name) for name in fields)  # ids, segments, positions, …
        model: Any = nnx.merge(graphdef, params)
        hidden, logits = model.hidden(*inputs), model.embedding.logits
        return chunked_cross_entropy(hidden, logits, batch["targets"], batch["loss_weights"])

    return trainer.Model(init_params, loss, flops)


def make_optimizer(config: ConfigDict) -> tuple[optax.GradientTransformation, optax.Schedule]:
    """The optimizer and its learning rate, a function of the number of updates.

    The optimizer gets mean gradients once per update (no `MultiSteps`); the rate is for the log.
    `decay_mask` goes by the names of parameters: change models/parameters.py with the model.
    """
    spec = config.optimizer
    decay = spec.decay_steps or config.steps  # a run stores those of its first start
    warmup = decay // 10 if spec.warmup_steps is None else spec.warmup_steps
    trainer.check_warmup(warmup, decay)
    peak, warmup_updates = spec.learning_rate, warmup // config.accumulate
    rate = optax.warmup_cosine_decay_schedule(
        init_value=peak / max(warmup_updates, 1),  # the first update is not 0
        peak_value=peak,
        warmup_steps=warmup_updates,
        decay_steps=math.ceil(decay / config.accumulate),  # with the last, partial update
        end_value=peak * spec.final,
    )
    mask = parameters.decay_mask
    adamw = optax.adamw(rate, spec.b1, spec.b2, weight_decay=spec.weight_decay, mask=mask)
    return optax.chain(optax.clip_by_global_norm(spec.clip), adamw), rate


# ---- Training and scoring.


def make_steps(config: ConfigDict, model: trainer.Model, sharding: Any, plan: Any) -> trainer.Steps:
    """The functions that make a state, train and evaluate, and the optimizer; not compiled yet."""
    optimizer, learning_rate = make_optimizer(config)
    state_of, train_step = steps.make_train_step(
        model.loss,
        optimizer,
        accumulated=config.accumulate,
        learning_rate=learning_rate,
        loss_scale=config.optimizer.loss_scale if config.model.dtype == "float16" else None,
        # The step returns the loss of each segment; this is the size of that array, for a row.
        most_segments=max(plan.most_segments().values()) if config.segment_losses else None,
        sharding=sharding,
    )

    def init_state(key):  # a dict of params, optimizer and steps
        return state_of(model.init_params(key))

    init_state = parameters.jit_init(init_state, sharding.mesh)
    eval_step = steps.make_eval_step(model.loss, sharding=sharding)
    return trainer.Steps(init_state, train_step, eval_step, optimizer)


def train(config: ConfigDict, workdir: epath.Path) -> int:
    """Trains from the last checkpoint in `workdir`, or from the beginning, to the last step.

    Returns the exit status: 0, or 128 + the number of the signal that stopped the run.
    """
    trainer.check_config(config)
    with contextlib.ExitStack() as stack:
        enter = stack.enter_context
        workdir = enter(trainer.work_directory(workdir))  # no other run may use it meanwhile
        checkpoints = enter(trainer.Checkpoints(workdir / "checkpoints", keep=config.keep))
        saved = checkpoints.read()  # the last one, without its arrays; at step 0 if there is none
        mesh = steps.make_mesh(config.mesh)
        enter(jax.set_mesh(mesh))
        sharding = trainer.share_batches(config, mesh)  # a NamedSharding, or one for each shape
        config = trainer.resume_config(config, saved)  # None: as the run began; others must fit it
        schedule = trainer.Schedule.of(config, saved, sharding)  # options of batches, by step
        trainer.store_config(workdir, config, schedule, saved)  # for a start with --workdir alone
        if trainer.is_finished(config, workdir, saved):  # with its evaluation and summary
            trainer.suggest_commands(workdir, config)
            return 0
        clock = trainer.Clock(saved.record.get("seconds", {}))  # of each phase

        # The data. Every batch of the run is planned here, from lengths alone.
        with clock("prepare"):
            corpus, held_out = trainer.prepare_run(config, schedule, workdir)
        with clock("plan"):
            schedule = schedule.fit(corpus)  # the shapes of batches
            schedule = trainer.choose_tiers(config, schedule, corpus, sharding)
            plan = schedule.plan(corpus)
        layout = trainer.choose_layout(config, corpus, sharding)  # sharding, order, features
        batches = pipeline.Batches(corpus, plan.onward(saved.step), **layout)
        evaluation = trainer.evaluation_batches(held_out, batches.plan.options, **layout)
        trainer.require_same_data(batches, evaluation)  # on all hosts, which would else hang
        options = {"num_threads": config.num_threads, **trainer.change_options(config)}
        loader = enter(pipeline.Loader(batches.repeat(), **options))
        if saved.step:  # with the weights that have changed since the run began
            loader.set_state(saved.data)

        # The model, and its steps compiled for every shape.
        model = make_model(config, corpus)
        with clock("compile"):
            functions = make_steps(config, model, sharding, loader.plan)
            compiled = trainer.compile_steps(config, functions, loader, evaluation)
        with clock("restore" if saved.step else "initialise"):
            key = jax.random.key(schedule.seed)
            if saved.step:
                state = checkpoints.restore_state(saved.step, compiled.init.eval_shape(key))
                trainer.warn_of_window(config, state, saved.step)
            else:  # with the parameters of the run config.start_from, if that is given
                state = trainer.start_from(config, compiled.init(key), corpus)
            checkpoints.compile(state)  # its checksums, so that no save compiles anything
        trainer.describe_run(workdir, config, schedule, loader)  # for `lockstep` commands

        log = enter(trainer.TrainingLog(workdir, config, schedule, saved, clock, model, compiled))
        weights = trainer.WeightsFile(workdir, config, loader)
        signals = enter(steps.hosts.StopSignals())
        step = last = saved.step  # steps that are done, and that are saved
        while True:
            # All hosts agree whether a signal ends the run here.
            stops, ends = signals.received(), step == config.steps
            if ends and step > last:  # an update by the last steps, if their window is not full
                state = compiled.finish(state)
            if step > last and (stops or ends or step % config.checkpoint_every == 0):
                with clock("save"):
                    checkpoints.save(step, state, data=loader.get_state(), run=log.save())
                last = step
            if stops:
                break
            if (ends or step % config.eval_every == 0) and not log.evaluated(step):
                log.flush()
                with clock("evaluate"):  # ends without sums if a signal comes
                    params, stop = state["params"], signals.received
                    sums = trainer.evaluate(config, evaluation, compiled.eval, params, stop=stop)
                log.evaluate(step, sums)
                continue
            if ends:
                break
            weights.look(step)  # on process 0; those that it takes hold from a later step on
            with clock("wait"):
                batch = next(loader)
            if step in config.skip_steps:
                log.skip(step, loader.planned)
            else:
                with clock("train"):
                    state, values = compiled.train(state, batch)
                    log.add(step, loader.planned, {**values, **loader.traffic()})  # a step late
            step += 1
        with clock("save"):
            checkpoints.wait()
        log.write_summary(step)
        if not (ends and log.evaluated(step)):
            return trainer.say_stopped(signals.reason, step)
        trainer.suggest_commands(workdir, config)
        return 0


def score(config: ConfigDict, workdir: epath.Path, into: str | None = None, test: bool = False):
    """Writes the loss of each document of the training corpus, or with `test`, of `config.eval`.

    It is computed with the latest parameters in `workdir`, and written to the directory `into`; by
    default below `workdir`, by step.
    """
    trainer.check_config(config)
    trainer.require_checkpoint(workdir)
    mesh = steps.make_mesh(config.mesh)
    with jax.set_mesh(mesh):
        corpus, place = trainer.prepare_scored(config, workdir, test=test)
        model = make_model(config, corpus)
        like = parameters.jit_init(model.init_params, mesh).eval_shape(jax.random.key(0))
        step, params = trainer.restore_parameters(workdir, corpus, like)
        score_step, into = steps.make_score_step(model.loss), into or place / f"{step}"
        trainer.score_corpus(config, corpus, score_step, params, directory=into, mesh=mesh)


if __name__ == "__main__":
    trainer.launch.run(train, score)
