"""Trains a Transformer on packed text: a decoder, an encoder, or an encoder–decoder on pairs.

    python train.py --config=configs/quickstart.py --config.steps=500 --workdir=runs/quickstart

Run it again, with --workdir alone, and it continues from its last checkpoint, with the same config
unless flags change it. --mode=score writes the loss of each document of the training corpus, with
the latest parameters; --mode=evaluate, of config.eval, which may be a test set. On several hosts,
run it on each; if the platform does not say how many there are, add --coordinator=HOST:PORT
--num_processes=N --process_id=I. To train another model, change `make_model` and `make_optimizer`.
A field that you add to a config goes into `trainer.config.MAY_CHANGE`, too, if a run may continue
with another value of it.
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
    """The network of `config.architecture` and `config.model`, and its loss: Σ w·nll and Σ w.

    Both are sums over positions, linear in `loss_weights`: so segments have losses of their own.
    """
    # `fields` are those of a batch that the network takes; flops(planned) is a number, for the log.
    network, fields, flops = trainer.choose_network(config, corpus)
    graphdef, _ = nnx.split(nnx.eval_shape(lambda: network(nnx.Rngs(0))))

    def init_params(key):
        return nnx.to_pure_dict(nnx.state(network(nnx.Rngs(key)), nnx.Param))

    def loss(params, batch):
        inputs = (batch.get(name) for name in fields)  # "inputs", …: see `pipeline.Batch`
        model: Any = nnx.merge(graphdef, params)
        hidden, logits = model.hidden(*inputs), model.embedding.logits
        return chunked_cross_entropy(hidden, logits, batch["targets"], batch["loss_weights"])

    return trainer.Model(init_params, loss, flops)


def make_optimizer(config: ConfigDict) -> tuple[optax.GradientTransformation, optax.Schedule]:
    """The optimizer and its learning rate, a function of the number of updates.

    The optimizer gets mean gradients once per update (no `MultiSteps`); the rate is for the log.
    `decay_mask` goes by the names of parameters: change models/parameters.py with the model. A name
    that it does not list gets no decay, and is whole on every device.
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


# ---- Training.


def make_steps(config: ConfigDict, model: trainer.Model, sharding: Any, plan: Any) -> trainer.Steps:
    """The functions that make a state, train and evaluate, not compiled yet, and the optimizer.

    A training step is (state, batch, microbatches=1) → (state of the same shape, values to log).
    The optimizer is with them for the update of a last, unfinished window of `accumulate` steps.
    """
    optimizer, learning_rate = make_optimizer(config)
    state_of, train_step = steps.make_train_step(
        model.loss,
        optimizer,
        accumulated=config.accumulate,
        learning_rate=learning_rate,
        loss_scale=config.optimizer.loss_scale if config.model.dtype == "float16" else None,
        # If given, the values have each segment's loss; this is the size of that array, a row.
        most_segments=max(plan.most_segments().values()) if config.segment_losses else None,
        sharding=sharding,
    )

    # A state is a dict of params, optimizer and steps; names of parameters decide their shardings.
    init_state = parameters.jit_init(lambda key: state_of(model.init_params(key)), sharding.mesh)
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
        config = trainer.resume_config(config, saved)  # as it began, but for `MAY_CHANGE`
        schedule = trainer.Schedule.of(config, saved, sharding)  # options of batches, by step
        trainer.store_config(workdir, config, schedule, saved)  # for a start with --workdir alone
        if trainer.is_finished(config, workdir, saved):  # with its evaluation and summary
            return 0
        clock = trainer.Clock(saved.record.get("seconds", {}))  # of phases; for the summary

        # The data. Every batch of the run is planned here, from lengths alone.
        with clock("prepare"):
            corpus, held_out = trainer.prepare_run(config, schedule, workdir)
        with clock("plan"):
            # Shapes, and tiers: so many steps swap rows, so that devices finish together.
            schedule = trainer.fit_schedule(config, schedule, corpus, sharding)
            plan = schedule.plan(corpus)
        layout = trainer.choose_layout(config, corpus, sharding)  # sharding, order, features
        # The loader's state, if it resumes, says where it was; `onward` drops the shapes before it.
        batches = pipeline.Batches(corpus, plan.onward(saved.step), **layout)
        evaluation = trainer.evaluation_batches(held_out, batches.plan.options, **layout)
        trainer.require_same_data(batches, evaluation)  # on all hosts, which would else hang
        options = trainer.loader_options(config)
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
                trainer.warn_of_window(config, state, saved.step)  # if part of an update is unmade
            else:  # with the parameters of the run config.start_from, if that is given
                state = trainer.start_from(config, compiled.init(key), corpus)
            checkpoints.compile(state)  # its checksums, so that no save compiles anything
        trainer.describe_run(workdir, config, schedule, loader)  # for `lockstep` commands

        log = enter(trainer.TrainingLog(workdir, config, schedule, saved, clock, model, compiled))
        weights = trainer.WeightsFile(workdir, config, loader)  # of a mixture
        signals = enter(steps.hosts.StopSignals())
        step = last = saved.step  # steps that are done, and that are saved
        while True:
            # All hosts ask equally often whether a signal came, and agree.
            stops, ends = signals.received(), step == config.steps
            if ends and step > last:  # an update by the last steps, if their window is not full
                state = compiled.finish(state)
            if step > last and (stops or ends or step % config.checkpoint_every == 0):
                with clock("save"):  # `data` and `run` are those of `saved` when it continues
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
                    state, values = compiled.train(state, batch)  # the arrays of before are donated
                    # Waits for the step before, while this one runs; raises if that is not finite.
                    log.add(step, loader.planned, {**values, **loader.traffic()})
            step += 1
        with clock("save"):
            checkpoints.wait()
        log.write_summary(step)
        finished = ends and log.evaluated(step)
        return 0 if finished else trainer.say_stopped(signals.reason, step)


if __name__ == "__main__":
    trainer.launch.run(train, make_model)
