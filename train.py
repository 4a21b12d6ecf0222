"""Trains a Transformer on packed text: a decoder, an encoder, or an encoder–decoder on pairs.

    python train.py --config=configs/quickstart.py --config.steps=500 --workdir=runs/quickstart

Run the same command again, and it goes on from its last checkpoint. On several hosts, run it on
each; where the platform does not say how many there are, add --coordinator=HOST:PORT
--num_processes=N --process_id=I. To train another model, copy this file and change `make_model` and
`make_optimizer`; the rest knows nothing of either.
"""

import contextlib
import functools
import json
import logging
import pathlib
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags
from etils import epath
from flax import nnx
from flax.training.dynamic_scale import DynamicScale
from ml_collections import ConfigDict, config_flags
from tqdm.contrib.logging import logging_redirect_tqdm

import pipeline
from models.config import TransformerConfig
from models.decoder import Decoder
from models.encoder import Encoder
from models.encoder_decoder import EncoderDecoder
from models.flops import step_flops
from models.loss import cross_entropy
from models.parameters import decay_mask, parameter_shardings
from pipeline.errors import InvalidValue, describe, require_one_of, require_whole
from pipeline.fs.atomic import as_path, directory_lock, make_directory
from pipeline.history import RunLog, write_history
from pipeline.loading.checkpoint import Checkpoints
from pipeline.loading.sharding import batch_sharding, multiples
from pipeline.report import markdown
from pipeline.steps import hosts
from pipeline.steps.accumulation import accumulate
from pipeline.steps.compiled import keep_programs, table
from pipeline.steps.mesh import make_mesh
from pipeline.steps.microbatches import summed, summed_gradients
from pipeline.steps.segments import by_segment
from pipeline.trainer.corpora import prepare_corpora
from pipeline.trainer.evaluation import Evaluation, unigram_entropy
from pipeline.trainer.profile import Profile
from pipeline.trainer.run_config import flatten, require_same
from pipeline.trainer.schedule import Schedule
from pipeline.trainer.scoring import score_run
from pipeline.trainer.start_from import parameters_of

HERE = pathlib.Path(__file__).parent
CONFIG = config_flags.DEFINE_config_file("config", f"{HERE}/configs/quickstart.py")
WORKDIR = flags.DEFINE_string("workdir", None, "For corpus, checkpoints, metrics: runs/CONFIG.")
CHANGE = flags.DEFINE_string("change", "", "JSON, options of batches that change from here on.")
SCORE = flags.DEFINE_string("score", "", "Directory: the loss of each document goes there.")
PROFILE = flags.DEFINE_string("profile_steps", "", "FIRST:LAST, the steps to trace for a profile.")
COORDINATOR = flags.DEFINE_string("coordinator", None, "HOST:PORT of process 0.")
NUM_PROCESSES = flags.DEFINE_integer("num_processes", None, "Number of processes.")
PROCESS_ID = flags.DEFINE_integer("process_id", None, "Number of this process, from 0.")
WAIT = flags.DEFINE_integer("wait", 100, "Seconds of silence after which a host counts as gone.")
VERSION = flags.DEFINE_bool("version", False, "Print the version and exit.")

# A run may go on with other values of these fields. `batches`, `seed` and `schedule` change as the
# schedule says; any other change makes it another run.
MAY_CHANGE = (
    *("steps", "mesh", "context_order", "microbatches", "memory_budget", "skip_steps", "cache"),
    *("on_nonfinite", "eval_every", "checkpoint_every", "keep", "on_compile", "peak_flops"),
    *("optimizer.decay_steps", "mixture", "sources", "added", "batches", "seed", "schedule"),
)

log = logging.getLogger("pipeline.train")
fail = functools.partial(describe, command="train.py")


def make_model(config: ConfigDict, corpus):
    """The model for a corpus, a view of one, or pairs.

    Returns:
        `init(key)`, its parameters; `loss(params, batch)`, the sums of weighted losses and of their
        weights; and `flops(planned)`, the operations of a training step on a planned batch.
    """
    model = TransformerConfig(vocab_size=corpus.vocab_size or 0, **config.model)
    fields = ["inputs", "inputs_segment_ids", "inputs_positions"]
    if np.ndim(corpus.lengths) == 2:
        network: Any = EncoderDecoder
        fields += ["decoder_inputs", "targets_segment_ids", "targets_positions"]
    else:
        network = Encoder if isinstance(corpus, pipeline.Masked) else Decoder
    graph, _ = nnx.split(nnx.eval_shape(lambda: network(model, rngs=nnx.Rngs(0))))

    def init(key):
        return nnx.to_pure_dict(nnx.state(network(model, rngs=nnx.Rngs(key)), nnx.Param))

    def loss(params, batch):
        logits = nnx.merge(graph, params)(*(batch[name] for name in fields))
        return cross_entropy(logits, batch["targets"], batch["loss_weights"])

    def flops(planned: pipeline.PlannedBatch):
        return step_flops(model, planned.segments[:, 3:], bidirectional=network is Encoder)

    return init, loss, flops


def check_model(config: ConfigDict) -> None:
    """Refuses, before anything is prepared, options that no model or optimizer has."""
    TransformerConfig(vocab_size=1, **config.model)
    warmup, decay = config.optimizer.warmup_steps or 0, config.optimizer.decay_steps
    if not 0 <= warmup < decay:
        raise ValueError(
            f"optimizer.warmup_steps is {warmup} and the learning rate decays over {decay} steps; "
            "warm-up takes some of these, or 0, as in --config.optimizer.warmup_steps=0"
        )


def make_optimizer(config: ConfigDict):
    """The optimizer and its learning rate, a function of the number of updates."""
    spec = config.optimizer
    warmup = spec.decay_steps // 10 if spec.warmup_steps is None else spec.warmup_steps
    warmup //= config.accumulate  # from steps to updates
    rate = optax.warmup_cosine_decay_schedule(
        spec.learning_rate / max(warmup, 1),
        spec.learning_rate,
        warmup,
        -(-spec.decay_steps // config.accumulate),
        end_value=spec.learning_rate * spec.final,
    )
    adamw = optax.adamw(rate, spec.b1, spec.b2, weight_decay=spec.weight_decay, mask=decay_mask)
    return optax.chain(optax.clip_by_global_norm(spec.clip), adamw), rate


def make_steps(config: ConfigDict, corpus, sharding, most_segments=1):
    """`init`, `train_step`, `eval_step`, `flops`; rows trained on have at most `most_segments`."""
    make_params, loss, flops = make_model(config, corpus)
    optimizer, learning_rate = make_optimizer(config)
    optimizer = accumulate(optimizer, config.accumulate)

    def init(key):
        params = make_params(key)
        state = {"params": params, "optimizer": optimizer.init(params), "updates": jnp.int32(0)}
        if config.model.dtype == "float16":  # without a scale, small gradients would vanish
            state["loss_scale"] = DynamicScale(scale=jnp.float32(config.optimizer.loss_scale))
        return state

    def eval_step(params, batch, microbatches=1):
        return summed(loss, params, batch, microbatches=microbatches, sharding=sharding)

    def train_step(state, batch, microbatches=1):
        # The scale is meant for mean losses, and these are sums.
        scale = state["loss_scale"].scale / batch["targets"].size if "loss_scale" in state else 1.0
        sums, batch = by_segment(loss, batch, most_segments)

        def scaled(params, microbatch):
            total, weights = sums(params, microbatch)
            return total * scale, weights

        total, (weight, segments), gradients = summed_gradients(
            scaled, state["params"], batch, microbatches=microbatches, sharding=sharding
        )
        tokens = jnp.maximum(weight, 1)
        gradients = jax.tree.map(lambda gradient: gradient / scale, gradients)
        mean, norm = total / (tokens * scale), optax.global_norm(gradients) / tokens
        params, moments = state["params"], state["optimizer"]
        updates, moments = optimizer.update(gradients, moments, params, weight=weight)
        params = optax.apply_updates(params, updates)
        new = {"params": params, "optimizer": moments, "updates": state["updates"] + 1}
        # A step that is not finite leaves the state as it was.
        finite = jnp.isfinite(mean) & jnp.isfinite(norm)
        new = jax.tree.map(functools.partial(jnp.where, finite), new, {k: state[k] for k in new})
        values = {"loss": mean, "gradient_norm": norm, "finite": finite, "segments": segments}
        values["learning_rate"] = learning_rate(state["updates"] // config.accumulate)
        if "loss_scale" in state:
            # A scale adjusts itself to the gradient that it gives: here 1 or, as in this step, NaN.
            slope = jnp.where(finite, 1.0, jnp.nan)
            probe = state["loss_scale"].value_and_grad(lambda x: slope * x)
            new["loss_scale"] = probe(jnp.float32(0)).dynamic_scale
            values["loss_scale"] = state["loss_scale"].scale
        return new, values

    return init, train_step, eval_step, flops


def train(config: ConfigDict, workdir: epath.Path, *, change: str = "", profile: str = ""):
    """Trains from the last checkpoint in `workdir`, or from the beginning, to the last step."""
    with contextlib.ExitStack() as stack:
        enter, leads = stack.enter_context, jax.process_index() == 0

        # Where the run stands. Hosts that differ here would later wait for each other.
        for name in ("steps", "accumulate", "eval_every", "checkpoint_every", "keep"):
            require_whole(f"config.{name}", config[name], 1)
        if config.steps % config.accumulate:
            updates = f"config.accumulate={config.accumulate} steps make an update"
            raise ValueError(f"config.steps is {config.steps}; {updates}: give a multiple of that")
        require_one_of("config.on_nonfinite", config.on_nonfinite, ("stop", "skip"))
        require_one_of("config.on_compile", config.on_compile, ("stop", "warn"))
        make_directory(workdir)
        keep_programs(workdir / "programs")
        checkpoints = enter(Checkpoints(workdir / "checkpoints", keep=config.keep))
        first, given = checkpoints.latest or 0, json.loads(config.to_json())
        fields = ";".join(f"{name}={value}" for name, value in flatten(given).items())
        hosts.require_agreement(
            {"configuration": fields, "checkpoint": f"step={first}", "change": f"asked={change}"}
        )
        hosts.require_shared(workdir)
        if leads:
            enter(directory_lock(workdir, "training", wait=False))
        enter(jax.set_mesh(mesh := make_mesh(config.mesh)))
        layout = {"sharding": batch_sharding(mesh), "context_order": config.context_order}
        multiple = multiples(**layout)

        # The past of a run stands; its future may change.
        if given["batches"].get("tiers") is None:
            given["batches"]["tiers"] = config.accumulate
        schedule = Schedule({"seed": config.seed, **given["batches"]}, given["schedule"])
        begun: dict[str, Any] = {"config": given, "schedule": None, "record": {}}
        data, run = checkpoints.restore_json(first) if first else ({}, begun)
        require_same(run, given, MAY_CHANGE)
        schedule.resume(run["schedule"], first, change)
        options = {"peak_flops": config.peak_flops, "on_nonfinite": config.on_nonfinite}
        run_log = RunLog(workdir, first, config.steps, state=run["record"], **options)
        stats, clock = run_log.stats, run_log.clock
        config.seed = schedule.entries[0].options["seed"]
        decay = config.optimizer.decay_steps or run["config"]["optimizer"]["decay_steps"]
        decay = config.optimizer.decay_steps = decay or config.steps
        given["optimizer"]["decay_steps"] = decay
        check_model(config)
        if first >= config.steps:
            log.info(f"finished: all {first:,} steps are done; ask for more: --config.steps=N")
            run_log.write_summary(first)
            return
        if not first and (workdir / "metrics.jsonl").exists():
            log.info(f"{workdir} has no checkpoint: the run begins anew, and so does its log")
        if config.steps > decay:
            log.info(f"the learning rate decays over the first {decay:,} steps, and then stays")

        # Corpora, plan and loader.
        with clock("prepare"):
            corpus, held_out = hosts.main_process_first(
                "preparing the corpus", lambda: prepare_corpora(config, workdir / "corpus")
            )
            stats.unigram_entropy = stats.unigram_entropy or unigram_entropy(held_out)
        mixture = dict(config.get("mixture", {}))
        corpus = corpus if mixture else schedule.select(corpus)
        log.info(f"{corpus}")
        with clock("plan"):
            whole = schedule.plan(corpus, mixture, row_multiple=multiple[0])
            schedule.check(whole, first, config.steps, multiple)
            plan = whole.onward(first)
            batches = pipeline.Batches(corpus, plan, **layout).repeat()
            loader = enter(pipeline.Loader(batches, mesh=mesh))
            evaluation = Evaluation(held_out, plan.options, mesh=mesh, **layout)
        agree = {"plan": plan, "corpus": corpus}
        agree |= {"held-out plan": evaluation.plan, "held-out corpus": held_out}
        hosts.require_agreement({name: each.fingerprint for name, each in agree.items()})
        log.info(f"{plan}")

        # The model, and its steps compiled for every bucket.
        most = max(plan.most_segments().values())
        init, train_step, eval_step, flops = make_steps(config, corpus, layout["sharding"], most)
        key = jax.random.key(config.seed)
        shardings = parameter_shardings(jax.eval_shape(init, key), mesh)
        initialise = jax.jit(init, out_shardings=shardings)
        like = initialise.eval_shape(key)  # shapes, dtypes and shardings
        with clock("compile"):
            train_step = pipeline.Compiled(
                train_step,
                like,
                loader.specs,
                donate=True,
                microbatches=config.microbatches or "auto",
                budget=config.memory_budget,
                out_shardings=(shardings, jax.NamedSharding(mesh, jax.P())),
            )
            eval_step = pipeline.Compiled(
                eval_step,
                like["params"],
                evaluation.specs,
                held={name: leaf for name, leaf in like.items() if name != "params"},
                microbatches="auto",
                budget=config.memory_budget,
            )
        log.info(table(train_step, eval_step))
        if first:
            with clock("restore"):
                loader.set_state(data)
                state = checkpoints.restore_state(first, like)
            log.info(f"resumed: step {first:,} of {config.steps:,}")
        else:
            with clock("initialise"):
                state = initialise(key)
                if config.start_from:
                    state["params"] = parameters_of(as_path(config.start_from), corpus, like)
                checkpoints.compile(state)
        if leads:
            write_history(workdir, corpus, whole)

        # The loop, and what it calls.
        enter(logging_redirect_tqdm())
        compiled = train_step.name, eval_step.name
        guard = enter(pipeline.CompileGuard(*compiled, on_compile=config.on_compile))
        enter(run_log)
        profiler = enter(Profile(profile, workdir / "profile"))
        signals = enter(hosts.StopSignals())

        def evaluate(step):
            run_log.flush()
            with clock("evaluate"):
                total, weight = evaluation.sums(eval_step, state["params"])
            run_log.evaluate(step, total, weight, held_out.text_bytes)

        def save(step):
            with clock("save"):
                stats.compiles = {str(b): p.compiles for b, p in train_step.programs.items()}
                stats.compiles_after_start, stats.other_compiles = guard.again, guard.others
                run = {"config": given, "schedule": schedule.as_json(), "record": run_log.save()}
                checkpoints.save(step, state, data=loader.get_state(), run=run)

        if not stats.evaluations:
            run_log.text("plan", markdown(plan.until(0)))
        if first % config.eval_every == 0 and str(first) not in stats.evaluations:
            evaluate(first)
        for step in range(first, config.steps):
            with clock("wait"):
                batch = next(loader)
            if step in config.skip_steps:
                run_log.write({"step": step, "skipped": loader.planned.digest})
            else:
                with clock("train"), profiler.step(step, state):
                    state, values = train_step(state, batch)
                planned, values = loader.planned, values | loader.traffic()
                run_log.add(step, planned, values, flops=flops(planned))
            guard.check(f"at step {step:,}")

            done = step + 1
            stops, ends = signals.received(done), done == config.steps
            if ends or (done % config.eval_every == 0 and not stops):
                evaluate(done)
            if ends or stops or done % config.checkpoint_every == 0:
                save(done)
            if stops and not ends:
                log.info(f"{signals.reason}: saved step {done:,}; run again to go on")
                break
        guard.check(f"after step {step:,}")
        with clock("save"):
            checkpoints.close()
        run_log.write_summary(done)


def main(_):
    """Runs the configuration that the flags give."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stdout, force=True)
    logging.getLogger("absl").setLevel(logging.WARNING)
    with hosts.exit_together(fail):
        hosts.connect(COORDINATOR.value, NUM_PROCESSES.value, PROCESS_ID.value, WAIT.value)
        if jax.process_index() == 0:
            logging.getLogger("pipeline").setLevel(logging.INFO)
        name = pathlib.Path(config_flags.get_config_filename(flags.FLAGS["config"])).stem
        workdir = as_path(WORKDIR.value or HERE / "runs" / name)
        if SCORE.value:
            return score_run(CONFIG.value, workdir, SCORE.value, make_steps, parameter_shardings)
        return train(CONFIG.value, workdir, change=CHANGE.value, profile=PROFILE.value)


def parse(argv):
    """Parses the flags."""
    try:
        rest = flags.FLAGS(argv)
        assert CONFIG.value.is_locked  # fails here if the file could not be read
        if len(rest) > 1:
            raise flags.Error(f"{rest[1]!r} is not a flag; write --NAME=VALUE, and lists in quotes")
    except Exception as error:  # of the flags, or of the file of the config
        sys.exit(fail(InvalidValue(error.args[0] if error.args else repr(error))))
    if VERSION.value:
        sys.exit(print(f"lockstep {pipeline.__version__}"))
    return rest


if __name__ == "__main__":
    app.run(main, flags_parser=parse)
