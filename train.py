"""Trains a decoder-only Transformer on packed text, or an encoder–decoder on packed pairs.

    python train.py --config=configs/quickstart.py --config.steps=500 --workdir=runs/quickstart

Run again, it goes on from its last checkpoint. On several hosts the same command runs on each;
where the platform does not say how many there are, add --coordinator=HOST:PORT --num_processes=N
--process_id=I. This is the only place where `pipeline` (which knows no model) and `models` (which
know no data) meet.
"""

import dataclasses
import json
import logging
import math
import os
import pathlib
import sys
from typing import Any

import jax
import jax.numpy as jnp
import optax
from absl import app, flags
from etils import epath
from flax import nnx
from flax.training.dynamic_scale import DynamicScale
from ml_collections import ConfigDict, config_flags

import pipeline
from models.config import TransformerConfig
from models.decoder import Decoder
from models.encoder_decoder import EncoderDecoder
from models.flops import pair_flops, training_flops
from models.loss import cross_entropy
from models.parameters import decay_mask, parameter_shardings
from pipeline import hosts, schedule
from pipeline.chain import Chain
from pipeline.change import allowing, applied, changed, parsed, with_change
from pipeline.checkpoint import Checkpoints
from pipeline.compiled import Compiled, device_memory, keep_programs, table
from pipeline.corpora import prepare_corpora
from pipeline.history import write_history
from pipeline.metrics import Clock, Profile
from pipeline.microbatches import summed, summed_gradients
from pipeline.record import Record, changes, differing, flat, unigram_entropy
from pipeline.sharding import batch_sharding, parts
from pipeline.trainer import Trainer, summarise

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

# A run may go on under other values of these; of `batches` and `seed`, when --change says so; any
# other change makes it another run.
MAY_CHANGE = (
    *("steps", "mesh", "microbatches", "memory_budget", "skip_steps", "on_nonfinite"),
    *("eval_every", "checkpoint_every", "keep", "on_compile", "peak_flops"),
)


def make_mesh(config: ConfigDict) -> jax.sharding.Mesh:
    """A mesh of all devices; the axis that is −1 takes what the others leave."""
    sizes, devices = dict(config), jax.device_count()
    given = math.prod(size for size in sizes.values() if size != -1)
    sizes = {axis: devices // given if size == -1 else size for axis, size in sizes.items()}
    if math.prod(sizes.values()) != devices:
        raise ValueError(
            f"mesh {dict(config)} does not fit {devices} devices; the product of its axes must be "
            "the number of devices, and one axis may be -1"
        )
    auto = (jax.sharding.AxisType.Auto,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=auto)


# What each network takes of a batch, in the order of its arguments.
FIELDS = {
    Decoder: ("inputs", "inputs_segment_ids", "inputs_positions"),
    EncoderDecoder: (
        *("inputs", "inputs_segment_ids", "inputs_positions"),
        *("decoder_inputs", "targets_segment_ids", "targets_positions"),
    ),
}


def make_steps(
    model: TransformerConfig, spec: ConfigDict, steps: int, sharding=None, network=Decoder
):
    """The functions `init(key)`, `train_step(state, batch, …)` and `eval_step(params, batch, …)`.

    `sharding` is that of the batches; only several microbatches need it. `network` is one of
    `FIELDS`.
    """
    if not 0 <= spec.warmup_steps < steps:
        raise ValueError(
            f"optimizer.warmup_steps is {spec.warmup_steps} and steps is {steps}; warm-up must "
            "end before the run does"
        )
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

    return init, train_step, eval_step


def adjusted(scale: DynamicScale, finite) -> DynamicScale:
    """The loss scale for the next step: less after an overflow, more after many good steps."""
    grows = finite & (scale.fin_steps + 1 >= scale.growth_interval)
    larger = jnp.where(grows, scale.scale * scale.growth_factor, scale.scale)
    smaller = jnp.maximum(scale.scale * scale.backoff_factor, 1.0)
    return scale.replace(
        scale=jnp.where(finite, larger, smaller),
        fin_steps=jnp.where(finite & ~grows, scale.fin_steps + 1, 0),
    )


def flops(model: TransformerConfig, planned: pipeline.PlannedBatch) -> float:
    """What a training step on a planned batch asks for."""
    lengths = planned.segments[:, 3:]
    squares = lengths.T @ lengths
    if len(squares) == 1:
        return training_flops(model, planned.num_tokens, int(squares[0, 0]))
    inputs, targets = lengths.sum(axis=0).tolist()
    mixed = int(squares[0, 0]), int(squares[1, 1]), int(squares[0, 1])
    return pair_flops(model, (inputs, targets), mixed)


class Run:
    """One run in its work directory, from where it stands to its last step."""

    def __init__(self, config: ConfigDict, workdir: epath.Path):
        for name, known in (("on_nonfinite", ("stop", "skip")), ("on_compile", ("stop", "warn"))):
            if config[name] not in known:
                raise ValueError(f"{name} is {config[name]!r}; it must be one of {known}")
        self.config, self.workdir = config, workdir
        workdir.mkdir(parents=True, exist_ok=True)
        keep_programs(workdir / "programs")
        self.checkpoints = Checkpoints(workdir / "checkpoints", keep=config.keep)
        self.first = self.checkpoints.latest or 0
        self.data: dict[str, Any] = {}
        self.record = Record(config=json.loads(config.to_json()))
        # First of all: hosts that differ here would wait for each other in different places.
        hosts.require_agreement(
            {
                "configuration": ";".join(f"{k}={v}" for k, v in flat(self.record.config).items()),
                "checkpoint": f"step={self.first}",
                "change": f"asked={CHANGE.value}",
            }
        )
        self.new: list[schedule.Stage] = []  # what --change adds
        if self.first:
            self.data, record = self.checkpoints.restore_json(self.first)
            self.resume(record)
        elif CHANGE.value:
            raise ValueError(
                f"--change is for runs that go on, and {workdir} has no checkpoint to go on from; "
                "put it into the config"
            )
        else:
            begin = {"seed": config.seed, **self.record.config["batches"]}
            self.stages = schedule.stages(self.record.config["schedule"], begin)
        self.clock = Clock(self.record.seconds)

    def resume(self, record: dict[str, Any]):
        """Takes over the record of a checkpoint, with what --change asks for.

        Raises:
            ValueError: the run is of another configuration, or --change cannot be read.
        """
        kept = [schedule.Stage(**stage) for stage in record["stages"]]
        self.stages = changed(kept, self.first, parsed(CHANGE.value))
        self.new = [stage for stage in self.stages if stage not in kept and not stage.planned]
        if CHANGE.value and not self.new:
            hosts.say(f"--change={CHANGE.value} is in force already")
        # The config is that of the beginning, or what unplanned changes have made of it since.
        then, now = record["config"], self.record.config
        since = applied(then, self.stages)
        nearer = min(then, since, key=lambda each: len(differing(each, now, MAY_CHANGE)))
        if wrong := changes(nearer, now, MAY_CHANGE):
            how = allowing(sys.argv, now, differing(nearer, now, MAY_CHANGE))
            how = f"; or change it from step {self.first:,} on:\n\n{how}\n" if how else ""
            raise ValueError(
                f"{self.workdir} holds a run of another configuration: "
                f"{'; '.join(wrong)}. Run it as it was, or start anew with another --workdir{how}"
            )
        begun = {name: then[name] for name in ("seed", "batches", "schedule")}
        self.record, self.config.seed = Record(**(record | {"config": now | begun})), then["seed"]

    def train(self):
        """Prepares, plans, compiles, restores, trains, and writes the summary."""
        config, record = self.config, self.record
        if self.first >= config.steps:
            hosts.say(
                f"finished: {self.workdir} has done {self.first:,} steps. To go on, ask for more "
                "with --config.steps=N; to start anew, give another --workdir"
            )
            if self.new:
                hosts.say("the change was not made, as no step follows it")
            summarise(record, self.workdir, self.first)
            return
        with self.clock("prepare"):
            corpus, held_out = hosts.one_after_another(
                "preparing the corpus", lambda: prepare_corpora(config, self.workdir / "corpus")
            )
            record.unigram_entropy = unigram_entropy(held_out)
        hosts.say(corpus)
        mesh = make_mesh(config.mesh)
        with self.clock("plan"):
            whole = self.plan(corpus, mesh)
            plan = whole.onward(self.first)
            batches = pipeline.Batches(corpus, plan, sharding=batch_sharding(mesh)).repeat()
            loader = pipeline.Loader(batches, mesh=mesh)
        hosts.require_agreement(
            {
                "plan": loader.plan.fingerprint,
                "corpus": corpus.fingerprint,
                "held-out corpus": held_out.fingerprint,
            }
        )
        hosts.say(plan)
        model = TransformerConfig(vocab_size=corpus.vocab_size or 0, **config.model)
        # Evaluations of all stages are to be compared, so they have the batches of the last.
        last = plan.plans[-1]
        once = {"corpus": held_out, "buckets": last.buckets, "packing": last.packing}
        once |= {"mesh": mesh, "shuffle": False, "num_epochs": 1}
        once["overflow"] = last.overflow
        with jax.set_mesh(mesh), loader:
            state, train_step, eval_step = self.compile(model, mesh, loader, once)
            if jax.process_index() == 0:
                write_history(self.workdir, corpus, whole)
            Trainer(
                config,
                self.workdir,
                train_step=train_step,
                eval_step=eval_step,
                held_out=once,
                flops=lambda planned: flops(model, planned),
                checkpoints=self.checkpoints,
                record=record,
                clock=self.clock,
            ).train(state, loader, self.first, Profile(PROFILE.value, self.workdir / "profile"))

    def plan(self, corpus: pipeline.Corpus, mesh) -> Chain:
        """The plan of all stages, from step 0 on.

        Raises:
            ValueError: the rows of a bucket do not divide over the devices.
        """
        multiple = parts(batch_sharding(mesh))[0]
        # Buckets are fitted once: a run that goes on with other devices keeps its batches.
        schedule.resolve(self.stages, corpus, multiple)
        self.record.stages = [dataclasses.asdict(stage) for stage in self.stages]
        whole = schedule.plan_of(corpus, [(stage.step, stage.changes) for stage in self.stages])
        for stage in self.new:
            hosts.say(f"changed {schedule.told(self.stages, stage, whole)}")
            # The state tells of stages that were to come under the options before.
            past = [entry for entry in self.data["plans"] if entry["from"] < max(self.first, 1)]
            self.data["plans"] = past
        to_come = whole.onward(self.first).buckets
        wrong = [str(bucket) for bucket in to_come if bucket.rows % multiple]
        if self.first and wrong:
            change = parsed(CHANGE.value) | {"row_multiple": multiple}
            raise ValueError(
                f"the rows of the buckets {', '.join(wrong)} do not divide over {multiple} groups "
                "of devices; go on with as many as before, or change the rows from step "
                f"{self.first:,} on:\n\n{with_change(sys.argv, change)}\n"
            )
        return whole

    def compile(self, model: TransformerConfig, mesh, loader: pipeline.Loader, once):
        """The state to go on from, and both steps compiled for every bucket."""
        config = self.config
        network = EncoderDecoder if isinstance(loader.corpus, pipeline.Pairs) else Decoder
        init, train_step, eval_step = make_steps(
            model, config.optimizer, config.steps, batch_sharding(mesh), network
        )
        key = jax.random.key(config.seed)
        like = jax.eval_shape(init, key)
        shardings = parameter_shardings(like, mesh)
        like = jax.tree.map(
            lambda leaf, at: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=at),
            like,
            shardings,
        )
        number = str(config.microbatches)
        options: dict[str, Any] = {
            "budget": config.memory_budget or hosts.smallest(device_memory()),
            "report": hosts.say,
        }
        besides = {name: leaf for name, leaf in like.items() if name != "params"}
        with self.clock("compile"), pipeline.load(**once) as finite:
            train = Compiled(
                train_step,
                like,
                loader.specs,
                donate=True,
                microbatches=int(number) if number.isdigit() else number,
                out_shardings=(shardings, None),
                **options,
            )
            evaluate = Compiled(
                eval_step,
                like["params"],
                finite.specs,
                held=besides,
                microbatches="auto",
                **options,
            )
            # What each host decided by itself: its held-out plan, and how to split batches.
            split = {
                f"{step.name} {bucket}": program.microbatches
                for step in (train, evaluate)
                for bucket, program in step.programs.items()
            }
            hosts.require_agreement(
                {
                    "held-out plan": finite.plan.fingerprint,
                    "microbatches": ";".join(f"{name}={number}" for name, number in split.items()),
                }
            )
        hosts.say(table(train, evaluate))
        if not self.first:
            with self.clock("initialise"):
                return jax.jit(init, out_shardings=shardings)(key), train, evaluate
        with self.clock("restore"):
            loader.set_state(self.data)
            state = self.checkpoints.restore_state(self.first, like)
            hosts.say(f"resumed: step {self.first:,} of {config.steps:,}")
            return state, train, evaluate


def main(_):
    """Runs the configuration that the flags give."""
    if not flags.FLAGS["verbosity"].present:
        logging.getLogger("absl").setLevel(logging.WARNING)  # orbax tells of every file
    hosts.connect(COORDINATOR.value, NUM_PROCESSES.value, PROCESS_ID.value, WAIT.value)
    name = pathlib.Path(config_flags.get_config_filename(flags.FLAGS["config"])).stem
    with hosts.leaving_together():
        Run(CONFIG.value, epath.Path(WORKDIR.value or HERE / "runs" / name)).train()


if __name__ == "__main__":
    app.run(main)
