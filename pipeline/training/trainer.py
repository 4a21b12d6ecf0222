"""The loop that runs compiled steps over a plan's batches: it knows no model."""

import dataclasses
import json
import math
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from etils import epath

from pipeline import report
from pipeline.loading.checkpoint import Checkpoints
from pipeline.loading.loader import Loader, load
from pipeline.planning.planned import PlannedBatch
from pipeline.training import hosts
from pipeline.training.compile_log import CompileGuard
from pipeline.training.compiled import Compiled
from pipeline.training.metrics import Clock, MetricsLog, Profile, Progress
from pipeline.training.peaks import peak_of
from pipeline.training.record import Record


class Trainer:
    """Trains from one step to another, with evaluation, checkpoints, metrics and a clean stop.

    Args:
        config: `steps`, `eval_every`, `checkpoint_every`, `skip_steps`, `on_nonfinite` ("stop" or
            "skip"), `on_compile` ("stop" or "warn") and `peak_flops` (of a device; 0: a table's).
        workdir: where metrics and the summary go.
        train_step: compiled; from state and batch to state and scalars, `loss`, `gradient_norm`
            and `finite` among them.
        eval_step: compiled; from the state's `params` and a batch to Σ weight·nll and Σ weight.
        held_out: what `load` takes, for one finite pass over the held-out corpus.
        flops: what the model's mathematics asks for in a training step on a planned batch.
        checkpoints: where the state goes.
        record: what the run has done so far.
        clock: seconds by phase.
    """

    def __init__(
        self,
        config: Any,
        workdir: epath.Path,
        *,
        train_step: Compiled,
        eval_step: Compiled,
        held_out: dict[str, Any],
        flops: Callable[[PlannedBatch], float],
        checkpoints: Checkpoints,
        record: Record,
        clock: Clock,
    ):
        self.config, self.workdir, self.flops = config, workdir, flops
        self.train_step, self.eval_step, self.held_out = train_step, eval_step, held_out
        self.checkpoints, self.record, self.clock = checkpoints, record, clock
        peak = config.peak_flops or peak_of(jax.devices()[0].device_kind)
        self.peak = peak * jax.device_count() if peak else None
        self.before = dataclasses.replace(record)  # as this start found it

    def train(self, state: Any, loader: Loader, step: int, profile: Profile):
        """Runs from step `step` to the last, or until a signal asks to stop; saves and summarises.

        Raises:
            FloatingPointError: a loss was not finite, and `on_nonfinite` is "stop".
            RuntimeError: something was compiled after the start and `on_compile` is "stop", or
                another process has gone.
        """
        leads = jax.process_index() == 0
        self.log = MetricsLog(self.workdir, step, enabled=leads)
        self.clock.add("lost", self.log.lost)
        self.progress = Progress(
            self.config.steps,
            step,
            tokens=self.record.tokens,
            waited=self.clock["wait"],
            enabled=leads,
        )
        self.loader, self.stop = loader, hosts.StopSignals()
        self.guard = CompileGuard(
            self.train_step.name,
            self.eval_step.name,
            on_compile=self.config.on_compile,
            say=self.progress.say,
        )
        try:
            step = self.loop(state, loader, step, profile)
            with self.clock("save"):
                self.checkpoints.close()
        except FloatingPointError:  # of all processes, so what is being saved can be finished
            self.checkpoints.close()
            raise
        finally:  # what was measured before a failure is what explains it
            profile.close()
            self.progress.close()
            self.log.close()
            self.guard.close()
        self.note()
        summarise(self.record, self.workdir, step)

    def loop(self, state: Any, loader: Loader, step: int, profile: Profile) -> int:
        """As `train`, with the files open; returns the steps done."""
        config, running = self.config, None
        if not self.record.evaluations:
            self.log.text("plan", report.markdown(loader.plan.until(0)))
        if step % config.eval_every == 0 and str(step) not in self.record.evaluations:
            self.evaluate(
                state, step
            )  # at the beginning, or because there was no time when told to stop
        stopped = False
        self.since, self.waited = time.perf_counter(), 0.0  # since the last step was done
        while step < config.steps and not stopped:
            begin = time.perf_counter()
            with self.clock("wait"):
                batch = next(loader)
            planned, self.waited = loader.planned, self.waited + time.perf_counter() - begin
            previous, running = running, None
            if step not in config.skip_steps:
                with self.clock("train"), profile.step(step, previous and previous[-1]):
                    state, values = self.train_step(state, batch)
                running = step, planned, values
            self.settle(previous)  # while this step runs
            if running is None:
                self.log.write({"step": step, "skipped": planned.digest})
            self.guard.check(f"at step {step:,}")
            step += 1
            stopped = self.stop.asked(step)
            evaluates = step == config.steps or (step % config.eval_every == 0 and not stopped)
            saves = step == config.steps or step % config.checkpoint_every == 0 or stopped
            if evaluates or saves:
                self.settle(running)
                running = None
            if evaluates:
                self.evaluate(state, step)
            if saves:
                self.save(step, state)
            if evaluates or saves:
                self.since = time.perf_counter()
        self.guard.check(f"after step {step - 1:,}")
        if stopped and step < config.steps:
            self.progress.say(f"{self.stop.reason}: saved step {step:,}; run again to go on")
        return step

    def settle(self, done):
        """Records a step's values once it has run; deals with one that is not finite."""
        if done is None:
            return
        step, planned, values = done
        with self.clock("train"):
            values = {name: value.item() for name, value in jax.device_get(values).items()}
        documents = np.unique(planned.segments[:, 1])
        now = time.perf_counter()
        seconds, self.since = now - self.since, now
        if not values.pop("finite"):
            self.nonfinite(step, planned, documents, values)
            self.record.skipped_seconds += seconds
        flops = self.flops(planned) if self.peak else 0.0
        self.record.add(planned, len(documents), flops)
        self.log.write(
            {
                "step": step,
                "epoch": planned.epoch,
                "bucket": str(planned.bucket),
                **{name: value if math.isfinite(value) else None for name, value in values.items()},
                "documents": len(documents),
                "tokens": planned.num_tokens,
                "positions": planned.bucket.positions,
                "padding": 1 - planned.num_tokens / planned.bucket.positions,
                "batch": planned.digest,
                **self.speed(planned, seconds, flops),
            }
        )
        text = f"loss {values['loss']:.3f} · {planned.bucket} · padding {self.record.padding:.2%}"
        self.progress.update(step + 1, self.record.tokens, self.clock["wait"], text)

    def speed(self, planned: PlannedBatch, seconds: float, flops: float) -> dict[str, float]:
        """What depends on the clock; `seconds` is from the end of the step before to this one's.

        `waited` is how much of that the host waited for data; mostly for the batch after this one,
        which it asks for while this one is computed.
        """
        values = {"waited": self.waited, "seconds": seconds}
        self.waited = 0.0
        values["tokens_per_second"] = planned.num_tokens / seconds
        values["positions_per_second"] = planned.bucket.positions / seconds
        so_far = self.clock.seconds()
        values["goodput"] = self.record.goodput(so_far)
        values |= {f"seconds/{name}": so_far.get(name, 0.0) for name in ("compile", "save")}
        if self.peak:
            values["flop_utilisation"] = flops / seconds / self.peak
        return values

    def nonfinite(self, step: int, planned: PlannedBatch, documents: np.ndarray, values):
        """Stops, or counts and says it, naming the step, the bucket and the documents."""
        text = (
            f"loss {values['loss']} and gradient norm {values['gradient_norm']} at step {step:,}, "
            f"bucket {planned.bucket}, documents "
            f"{', '.join(map(str, documents[:20]))}{', …' * (len(documents) > 20)}"
        )
        # With a loss scale an overflow of the gradients is expected, while it can still fall.
        overflow = math.isfinite(values["loss"]) and values.get("loss_scale", 0) > 1
        if self.config.on_nonfinite == "stop" and not overflow:
            raise FloatingPointError(
                f"{text}. Run again with --config.skip_steps='({step},)' to leave this batch out, "
                "or with --config.on_nonfinite=skip to go on without such updates"
            )
        self.record.skipped += 1
        self.progress.say(f"no update: {text}")

    def evaluate(self, state: Any, step: int):
        """Evaluates on every held-out document once; sums are kept as Python floats."""
        total = weight = 0.0
        with self.clock("evaluate"), load(**self.held_out) as batches:
            for batch in batches:
                sums = jax.device_get(self.eval_step(state["params"], batch))
                total, weight = total + float(sums[0]), weight + float(sums[1])
            values = self.record.evaluate(step, total, weight, batches.corpus.text_bytes)
        self.log.write({"step": step, **values})
        shown = ", ".join(
            f"{name} {'not finite' if value is None else f'{value:.4f}'}"
            for name, value in values.items()
        )
        entropy = self.record.unigram_entropy
        self.progress.say(f"step {step:,}: {shown} (unigram entropy {entropy:.4f})")

    def save(self, step: int, state: Any):
        """Starts to write a checkpoint of the state after `step` steps."""
        with self.clock("save"):
            self.log.flush()
            self.note()
            data, run = self.loader.get_state(), self.record.as_json()
            self.checkpoints.save(step, state, data=data, run=run)

    def note(self):
        """Brings the record's compilations and seconds up to now."""
        self.record.compiles = {
            str(bucket): program.compiles for bucket, program in self.train_step.programs.items()
        }
        self.record.compiles_after_start = self.guard.again
        self.record.other_compiles = self.guard.others
        self.record.seconds = self.clock.seconds()
        spent = self.record.training_seconds - self.before.training_seconds
        self.record.capacity = self.before.capacity + (self.peak or 0.0) * spent


def summarise(record: Record, workdir: epath.Path, step: int):
    """Prints the summary and writes it to `summary.json`, on one host."""
    if jax.process_index() == 0:
        text = json.dumps(record.summary(step), indent=1)
        (workdir / "summary.json").write_text(text + "\n")
        print(text)
