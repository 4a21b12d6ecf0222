"""One run in its work directory: configuration, plans, compiled steps, and where it goes on."""

import contextlib
import dataclasses
import json
import math
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from etils import epath
from ml_collections import ConfigDict

from pipeline.atomic import directory_lock
from pipeline.configuration import prepare_corpora
from pipeline.loading.checkpoint import Checkpoints
from pipeline.loading.loader import Batches, Loader, load
from pipeline.loading.sharding import batch_sharding, parts
from pipeline.planning.checks import require_whole
from pipeline.planning.plan import Plan
from pipeline.planning.planned import PlannedBatch
from pipeline.storage.corpora import Corpora
from pipeline.training import hosts, schedule
from pipeline.training.change import allowing, applied, changed, parsed, resumed, with_change
from pipeline.training.compiled import Compiled, device_memory, keep_programs, table
from pipeline.training.history import require_tokenizer, write_history
from pipeline.training.metrics import Clock, Profile
from pipeline.training.record import Record, changes, differing, flat, unigram_entropy
from pipeline.training.trainer import Trainer, summarise

# A run may go on under other values of these; of `batches`, `seed` and the `schedule` to come, when
# --change says so; any other change makes it another run.
MAY_CHANGE = (
    *("steps", "mesh", "microbatches", "memory_budget", "skip_steps", "on_nonfinite"),
    *("eval_every", "checkpoint_every", "keep", "on_compile", "peak_flops"),
    # Of which the data state refuses what has passed.
    *("mixture", "sources", "added"),
)


@dataclasses.dataclass(frozen=True)
class Steps:
    """What a run is told of its model.

    Attributes:
        init: from a PRNG key to the state, a dict with `params` in it.
        train_step: from state, batch and the keyword `microbatches` to state and scalars, `loss`,
            `gradient_norm` and `finite` among them.
        eval_step: from `params`, batch and `microbatches` to Σ weight·nll and Σ weight.
        shardings: from a state, or its `jax.eval_shape`, and a mesh to the sharding of each leaf.
        flops: what the mathematics of a training step on a planned batch asks for.
    """

    init: Callable
    train_step: Callable
    eval_step: Callable
    shardings: Callable
    flops: Callable[[PlannedBatch], float]


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


def parameters_of(workdir: epath.Path, like: Any) -> Any:
    """The parameters of another run's latest checkpoint, whose model and optimizer are alike."""
    checkpoints = Checkpoints(workdir / "checkpoints")
    try:
        if checkpoints.latest is None:
            raise ValueError(f"start_from is {workdir}, where no checkpoint is; train there first")
        hosts.say(f"parameters are those of step {checkpoints.latest:,} of {workdir}")
        return checkpoints.restore_state(checkpoints.latest, like)["params"]
    finally:
        checkpoints.close()


class Run:
    """One run in its work directory, from where it stands to its last step.

    Args:
        config: as configs/quickstart.py has it.
        workdir: where corpus, checkpoints and metrics go.
        change: JSON, options that change where the run goes on.
        profile: the steps to trace, as for `Profile`.

    Raises:
        ValueError: the config is wrong, or not that of the run that `workdir` holds.
    """

    def __init__(
        self, config: ConfigDict, workdir: epath.Path, *, change: str = "", profile: str = ""
    ):
        self.config, self.workdir, self.change = config, workdir, change
        self.profile = Profile(profile, workdir / "profile")
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
                "change": f"asked={change}",
            }
        )
        for name in ("steps", "keep", "eval_every", "checkpoint_every"):
            require_whole(f"config.{name}", config[name], 1)
        for step in config.skip_steps:
            require_whole("config.skip_steps has a step that", step, 0)
        for name, known in (("on_nonfinite", ("stop", "skip")), ("on_compile", ("stop", "warn"))):
            if config[name] not in known:
                raise ValueError(f"{name} is {config[name]!r}; it must be one of {known}")
        self.new: list[schedule.Stage] = []  # what --change adds
        if self.first:
            self.data, record = self.checkpoints.restore_json(self.first)
            if self.data.get("step") != self.first:
                raise ValueError(
                    f"the checkpoint of step {self.first:,} in {workdir} has the data state of "
                    f"step {self.data.get('step')!r}; it is damaged: delete it, and the run goes "
                    "on from the one before"
                )
            self.resume(record)
        elif change:
            raise ValueError(
                f"--change is for runs that go on, and {workdir} has no checkpoint to go on from; "
                "put it into the config"
            )
        else:
            if (workdir / "metrics.jsonl").exists():
                hosts.say(f"{workdir} has no checkpoint: the run begins anew, and so does its log")
            begin = {"seed": config.seed, **self.record.config["batches"]}
            self.stages = schedule.stages(self.record.config["schedule"], begin)
        self.clock = Clock(self.record.seconds)

    def resume(self, record: dict[str, Any]):
        """Takes over the record of a checkpoint, with what --change asks for.

        Raises:
            ValueError: the run is of another configuration, or --change cannot be read.
        """
        kept = [schedule.Stage(**stage) for stage in record["stages"]]
        self.stages = changed(kept, self.first, parsed(self.change))
        self.new = [stage for stage in self.stages if stage not in kept]
        if self.change and self.stages == kept:
            hosts.say(f"--change={self.change} is in force already")
        planned = [(stage.step, stage.asked) for stage in self.stages]
        for stage in kept:
            if (stage.step, stage.asked) not in planned:
                hosts.say(f"no longer planned from step {stage.step:,} on: {stage.asked}")
        # The config is that of the beginning, or what unplanned changes have made of it since.
        then, now = record["config"], resumed(self.record.config, self.stages, self.first)
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

    def train(self, make_steps: Callable[..., Steps]):
        """Prepares, plans, compiles, restores, trains, and writes the summary.

        Args:
            make_steps: from the corpus and the sharding of batches to `Steps`.

        Raises:
            RuntimeError: another process trains in the same directory; and what training raises.
        """
        leads = jax.process_index() == 0
        with (
            directory_lock(self.workdir, "training", wait=False)
            if leads
            else contextlib.nullcontext()
        ):
            self._train(make_steps)

    def _train(self, make_steps: Callable[..., Steps]):
        config, record = self.config, self.record
        if self.first >= config.steps:
            hosts.say(
                f"finished: {self.workdir} has done {self.first:,} steps. To go on, ask for more "
                "with --config.steps=N; to start anew, give another --workdir"
            )
            if self.new:
                hosts.say("the change was not made, as no step follows it")
            if not (self.workdir / "summary.json").exists():
                summarise(record, self.workdir, self.first)
            return
        with self.clock("prepare"):
            corpus, held_out = hosts.one_after_another(
                "preparing the corpus", lambda: prepare_corpora(config, self.workdir / "corpus")
            )
            record.unigram_entropy = unigram_entropy(held_out)
        corpus = self.begun_or_added(corpus)
        hosts.say(corpus)
        mesh = make_mesh(config.mesh)
        with self.clock("plan"):
            whole = self.plan(corpus, mesh)
            plan = whole.onward(self.first)
            batches = Batches(corpus, plan, sharding=batch_sharding(mesh)).repeat()
            loader = Loader(batches, mesh=mesh)
        hosts.require_agreement(
            {
                "plan": loader.plan.fingerprint,
                "corpus": corpus.fingerprint,
                "held-out corpus": held_out.fingerprint,
            }
        )
        hosts.say(plan)
        steps = make_steps(corpus, batch_sharding(mesh))
        # Evaluations of all stages are to be compared, so they have the batches of the last.
        last = plan.options
        once = {"corpus": held_out, "buckets": last.buckets, "packing": last.packing}
        once |= {"mesh": mesh, "shuffle": False, "num_epochs": 1}
        if np.ndim(held_out.lengths) == 2:  # others are split, and lose nothing
            once["overflow"] = last.overflow
        with jax.set_mesh(mesh), loader:
            state, train_step, eval_step = self.compile(steps, mesh, loader, once)
            if jax.process_index() == 0:
                write_history(self.workdir, corpus, whole)
            Trainer(
                config,
                self.workdir,
                train_step=train_step,
                eval_step=eval_step,
                held_out=once,
                flops=steps.flops,
                checkpoints=self.checkpoints,
                record=record,
                clock=self.clock,
            ).train(state, loader, self.first, self.profile)

    def begun_or_added(self, corpus: Any) -> Any:
        """Of a corpus that others may join, itself and those that have, or will, in their order.

        Raises:
            ValueError: one that is to join is not among `config.added`, or would join twice.
        """
        names = schedule.options(self.stages).get("add", [])
        if "sources" in self.config and not names:
            return corpus
        alone = "sources" not in self.config
        there = corpus.corpora if isinstance(corpus, Corpora) and alone else {}
        if wrong := [name for name in names if name not in there or names.count(name) > 1]:
            known = [name for name in there if name != "train"]
            raise ValueError(
                f"add is {names}, and config.added has {', '.join(known) or 'nothing'}; each of "
                f"{', '.join(dict.fromkeys(wrong))} must be there, as config.train is, and once. "
                "Corpora join a mixture by a phase of config.mixture.weights"
            )
        if unused := [name for name in there if name != "train" and name not in names]:
            hosts.say(
                f"not trained on: {', '.join(unused)} of config.added, which no schedule and no "
                "--change adds"
            )
        if not names:
            return there.get("train", corpus)
        return Corpora({name: there[name] for name in ("train", *names)})

    def plan(self, corpus: Any, mesh) -> Plan:
        """The plan of all stages, from step 0 on.

        Raises:
            ValueError: the rows of a bucket do not divide over the devices; there are several
                corpora without weights, or weights of one; or a mixture ends too early.
        """
        config, mixture = self.config, dict(self.config.get("mixture", {}))
        if ("sources" in config) != ("mixture" in config):
            raise ValueError(
                "config.sources has several corpora, and config.mixture says in which shares; "
                "give both or neither"
            )
        multiple = parts(batch_sharding(mesh))[0]
        # Buckets are fitted once: a run that goes on with other devices keeps its batches.
        schedule.resolve(self.stages, corpus, multiple, mixture)
        self.record.stages = [dataclasses.asdict(stage) for stage in self.stages]
        planned = [(stage.step, stage.changes) for stage in self.stages]
        if mixture:
            planned[0] = 0, {**planned[0][1], **mixture}
        elif isinstance(corpus, Corpora):  # a run begins with the first, and the others join
            planned[0] = 0, {**planned[0][1], "examples": len(next(iter(corpus.corpora.values())))}
        whole = Plan.replay(corpus, planned)
        for stage in self.new:
            hosts.say(f"changed {schedule.told(self.stages, stage, whole)}")
        if whole.finite and config.steps > whole.num_batches():
            raise ValueError(
                f"steps is {config.steps:,} and the plan ends after {whole.num_batches():,}; "
                "ask for fewer, or repeat sources with --config.mixture.ending=repeat"
            )
        to_come = whole.onward(self.first).buckets
        wrong = [str(bucket) for bucket in to_come if bucket.rows % multiple]
        if self.first and wrong:
            change = parsed(self.change) | {"row_multiple": multiple}
            raise ValueError(
                f"the rows of the buckets {', '.join(wrong)} do not divide over {multiple} groups "
                "of devices; go on with as many as before, or change the rows from step "
                f"{self.first:,} on:\n\n{with_change(sys.argv, change)}\n"
            )
        return whole

    def compile(self, steps: Steps, mesh, loader: Loader, once: dict[str, Any]):
        """The state to go on from, and both steps compiled for every bucket."""
        config = self.config
        key = jax.random.key(config.seed)
        like = jax.eval_shape(steps.init, key)
        shardings = steps.shardings(like, mesh)
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
        with self.clock("compile"), load(**once) as finite:
            train = Compiled(
                steps.train_step,
                like,
                loader.specs,
                donate=True,
                microbatches=int(number) if number.isdigit() else number,
                out_shardings=(shardings, None),
                **options,
            )
            evaluate = Compiled(
                steps.eval_step,
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
                state = jax.jit(steps.init, out_shardings=shardings)(key)
                if config.start_from:
                    require_tokenizer(epath.Path(config.start_from), loader.corpus)
                    state["params"] = parameters_of(epath.Path(config.start_from), like)
                return state, train, evaluate
        with self.clock("restore"):
            loader.set_state(self.data)
            state = self.checkpoints.restore_state(self.first, like)
            hosts.say(f"resumed: step {self.first:,} of {config.steps:,}")
            return state, train, evaluate
