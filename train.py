"""Trains a decoder-only Transformer on packed text.

    python train.py --config=configs/quickstart.py --config.steps=500 --workdir=runs/quickstart

Run again, it goes on from its last checkpoint. This is the only place where `pipeline` (which
knows no model) and `models` (which know no data) meet.
"""

import json
import math
import os
import pathlib
import signal
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags
from etils import epath
from flax import nnx
from ml_collections import ConfigDict, config_flags

import pipeline
from models.config import TransformerConfig
from models.decoder import Decoder
from models.loss import cross_entropy
from models.parameters import decay_mask, parameter_shardings
from pipeline.checkpoint import Checkpoints
from pipeline.compiled import Compiled, CompileLog
from pipeline.corpora import prepare_corpora
from pipeline.metrics import Clock, MetricsLog, Progress
from pipeline.record import Record, changes, unigram_entropy

HERE = pathlib.Path(__file__).parent
CONFIG = config_flags.DEFINE_config_file(
    "config", os.fspath(HERE / "configs/quickstart.py"), "A file of configs/; --config.FIELD=VALUE."
)
WORKDIR = flags.DEFINE_string(
    "workdir", None, "Where corpus, checkpoints and metrics go; runs/NAME_OF_CONFIG if not given."
)

# A run may go on under other values of these; any other change makes it another run.
MAY_CHANGE = (
    "steps",
    "mesh",
    "eval_every",
    "checkpoint_every",
    "keep",
    "on_nonfinite",
    "skip_steps",
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


def make_steps(model: TransformerConfig, spec: ConfigDict, steps: int):
    """The functions `init(key)`, `train_step(state, batch)` and `eval_step(params, batch)`."""
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
    graph, _ = nnx.split(nnx.eval_shape(lambda: Decoder(model, rngs=nnx.Rngs(0))))

    def init(key):
        params = nnx.to_pure_dict(nnx.state(Decoder(model, rngs=nnx.Rngs(key)), nnx.Param))
        return {"params": params, "optimizer": optimizer.init(params), "updates": jnp.int32(0)}

    def eval_step(params, batch):
        decoder = nnx.merge(graph, params)
        logits = decoder(batch["inputs"], batch["inputs_segment_ids"], batch["inputs_positions"])
        return cross_entropy(logits, batch["targets"], batch["loss_weights"])

    def train_step(state, batch):
        def mean_loss(params):
            total, weight = eval_step(params, batch)
            return total / jnp.maximum(weight, 1)

        loss, gradients = jax.value_and_grad(mean_loss)(state["params"])
        norm = optax.global_norm(gradients)
        updates, moments = optimizer.update(gradients, state["optimizer"], state["params"])
        after = {
            "params": optax.apply_updates(state["params"], updates),
            "optimizer": moments,
            "updates": state["updates"] + 1,
        }
        # A step that is not finite leaves the state as it was, whatever the host then decides.
        finite = jnp.isfinite(loss) & jnp.isfinite(norm)
        after = jax.tree.map(lambda new, old: jnp.where(finite, new, old), after, state)
        rate = schedule(state["updates"])
        return after, {"loss": loss, "gradient_norm": norm, "learning_rate": rate, "finite": finite}

    return init, train_step, eval_step


class Run:
    """One run in its work directory, from where it stands to its last step."""

    def __init__(self, config: ConfigDict, workdir: epath.Path):
        if config.on_nonfinite not in ("stop", "skip"):
            raise ValueError(f"on_nonfinite is {config.on_nonfinite!r}; it is 'stop' or 'skip'")
        self.config, self.workdir = config, workdir
        workdir.mkdir(parents=True, exist_ok=True)
        self.checkpoints = Checkpoints(workdir / "checkpoints", keep=config.keep)
        self.first = self.checkpoints.latest or 0
        self.data: dict[str, Any] = {}
        self.record = Record(config=json.loads(config.to_json()))
        if self.first:
            self.data, record = self.checkpoints.restore_json(self.first)
            if wrong := changes(record["config"], self.record.config, MAY_CHANGE):
                raise ValueError(
                    f"{workdir} holds a run of another configuration: {'; '.join(wrong)}. Run it "
                    f"as it was, or start anew with another --workdir"
                )
            self.record = Record(**(record | {"config": self.record.config}))
        self.clock = Clock(self.record.seconds)
        self.stopped_by = ""

    def train(self):
        """Prepares, plans, compiles, restores, trains, and writes the summary."""
        config = self.config
        if self.first >= config.steps:
            print(
                f"finished: {self.workdir} has done {self.first:,} steps. To go on, ask for more "
                "with --config.steps=N; to start anew, give another --workdir"
            )
            self.summarise(self.first)
            return
        with self.clock("prepare"):
            corpus, held_out = prepare_corpora(config, self.workdir / "corpus")
            self.record.unigram_entropy = unigram_entropy(held_out)
        print(corpus)
        mesh = make_mesh(config.mesh)
        with self.clock("plan"):
            loader = pipeline.load(corpus, mesh=mesh, seed=config.seed, **config.batches)
        print(loader.plan)
        with jax.set_mesh(mesh), loader:
            model = TransformerConfig(vocab_size=corpus.vocab_size or 0, **config.model)
            init, train_step, eval_step = make_steps(model, config.optimizer, config.steps)
            key = jax.random.key(config.seed)
            like = jax.eval_shape(init, key)
            shardings = parameter_shardings(like, mesh)
            like = jax.tree.map(
                lambda leaf, at: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=at),
                like,
                shardings,
            )
            self.held_out = {
                "corpus": held_out,
                "buckets": loader.plan.buckets,
                "mesh": mesh,
                "shuffle": False,
                "num_epochs": 1,
                "packing": config.batches.packing,
            }
            with self.clock("compile"), pipeline.load(**self.held_out) as once:
                self.train_step = Compiled(
                    train_step, like, loader.specs, donate=True, out_shardings=(shardings, None)
                )
                self.eval_step = Compiled(eval_step, like["params"], once.specs)
            with self.clock("restore"):
                if self.first:
                    loader.set_state(self.data)
                    state = self.checkpoints.restore_state(self.first, like)
                    print(f"resumed: step {self.first:,} of {config.steps:,}")
                else:
                    state = jax.jit(init, out_shardings=shardings)(key)
            self.loop(state, loader)

    def loop(self, state, loader: pipeline.Loader):
        """Trains to the last step, or until a signal asks to stop; then evaluates and saves."""
        config, step, running = self.config, self.first, None
        self.log, self.progress = MetricsLog(self.workdir, step), Progress(config.steps, step)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.stop)
        compiles = CompileLog()
        if not self.record.evaluations:
            self.evaluate(state, step)
        while step < config.steps and not self.stopped_by:
            begin = time.perf_counter()
            with self.clock("wait"):
                batch = next(loader)
            waited = time.perf_counter() - begin
            previous, running = running, None
            if step not in config.skip_steps:
                with self.clock("train"):
                    state, values = self.train_step(state, batch)
                running = step, begin, waited, values
            self.settle(loader.plan, previous)  # while this step runs
            step += 1
            last = step == config.steps or self.stopped_by
            evaluates = step == config.steps or step % config.eval_every == 0
            if last or evaluates or step % config.checkpoint_every == 0:
                self.settle(loader.plan, running)
                running = None
            if evaluates:
                self.evaluate(state, step)
            self.record.compiles = {str(b): p.compiles for b, p in self.train_step.programs.items()}
            self.record.compiles_after_start = len(compiles.names)
            if last or step % config.checkpoint_every == 0:
                self.save(step, state, loader)
        for name in compiles.names:
            print(f"compiled after the start: {name}")
        if self.stopped_by:
            self.progress.say(f"{self.stopped_by}: saved step {step:,}; run again to go on")
        self.progress.close()
        self.log.close()
        self.checkpoints.close()
        self.summarise(step)

    def settle(self, plan: pipeline.Plan, done):
        """Records a step's values once it has run; deals with one that is not finite."""
        if done is None:
            return
        step, begin, waited, values = done
        with self.clock("train"):
            values = {name: value.item() for name, value in jax.device_get(values).items()}
        planned = plan.batch(step)
        documents = np.unique(planned.segments[:, 1])
        if not values.pop("finite"):
            text = (
                f"loss {values['loss']} and gradient norm {values['gradient_norm']} at step "
                f"{step:,}, bucket {planned.bucket}, documents "
                f"{', '.join(map(str, documents[:20]))}{', …' * (len(documents) > 20)}"
            )
            if self.config.on_nonfinite == "stop":
                raise FloatingPointError(
                    f"{text}. Run again with --config.skip_steps='({step},)' to leave this batch "
                    "out, or with --config.on_nonfinite=skip to go on without such updates"
                )
            self.record.skipped += 1
            self.progress.say(f"no update: {text}")
        self.record.add(planned)
        self.log.write(
            {
                "step": step,
                "epoch": planned.epoch,
                "bucket": str(planned.bucket),
                **{name: value if math.isfinite(value) else None for name, value in values.items()},
                "documents": len(documents),
                "tokens": planned.num_tokens,
                "padding": 1 - planned.num_tokens / planned.bucket.positions,
                "waited": waited,
                "seconds": time.perf_counter() - begin,
                "batch": planned.digest,
            }
        )
        text = f"loss {values['loss']:.3f} · {planned.bucket} · padding {self.record.padding:.2%}"
        self.progress.update(step + 1, self.record.tokens, self.clock.seconds["wait"], text)

    def evaluate(self, state, step: int):
        """Evaluates on every held-out document once; sums are kept as Python floats."""
        total = weight = 0.0
        with self.clock("evaluate"), pipeline.load(**self.held_out) as batches:
            for batch in batches:
                sums = jax.device_get(self.eval_step(state["params"], batch))
                total, weight = total + float(sums.total), weight + float(sums.weight)
            values = self.record.evaluate(step, total, weight, batches.corpus.text_bytes)
        self.log.write({"step": step, **values})
        shown = ", ".join(f"{name} {value:.4f}" for name, value in values.items())
        entropy = self.record.unigram_entropy
        self.progress.say(f"step {step:,}: {shown} (unigram entropy {entropy:.4f})")

    def save(self, step: int, state, loader: pipeline.Loader):
        """Starts to write a checkpoint of the state after `step` steps."""
        with self.clock("save"):
            self.log.flush()
            self.record.seconds = dict(self.clock.seconds)
            data, run = loader.get_state(), self.record.as_json()
            self.checkpoints.save(step, state, data=data, run=run)

    def summarise(self, step: int):
        """Prints the summary and writes it to `summary.json`."""
        text = json.dumps(self.record.summary(step), indent=1)
        (self.workdir / "summary.json").write_text(text + "\n")
        print(text)

    def stop(self, number: int, _):
        """Asks the loop to save and leave; a second signal ends the process at once."""
        self.stopped_by = signal.Signals(number).name
        signal.signal(number, signal.SIG_DFL)


def main(_):
    """Runs the configuration that the flags give."""
    name = pathlib.Path(config_flags.get_config_filename(flags.FLAGS["config"])).stem
    Run(CONFIG.value, epath.Path(WORKDIR.value or HERE / "runs" / name)).train()


if __name__ == "__main__":
    app.run(main)
