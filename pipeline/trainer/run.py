"""A run of train.py: everything in its loop but data and model."""

import contextlib
import json
import logging
import re
import signal
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from etils import epath

from pipeline.corpus.interface import AnyCorpus
from pipeline.errors import counted
from pipeline.fs.atomic import as_path, directory_lock, make_directory, remove_leftovers
from pipeline.history import RunLog, loss_archive, write_history
from pipeline.loading.batches import Batches
from pipeline.loading.loader import Loader
from pipeline.loading.sharding import batch_sharding, multiples
from pipeline.planning.plan import Plan
from pipeline.planning.planned import PlannedBatch
from pipeline.steps import Compiled, CompileLog, hosts, keep_programs, make_mesh, programs_table
from pipeline.trainer.checkpoint import Checkpoints
from pipeline.trainer.corpora import prepare_on_hosts
from pipeline.trainer.evaluation import sum_over_batches
from pipeline.trainer.parameters import require_checkpoint, restore_parameters
from pipeline.trainer.profile import Profile
from pipeline.trainer.run_config import check_config, list_fields, require_same
from pipeline.trainer.schedule import Schedule
from pipeline.trainer.stored_config import save_config

logger = logging.getLogger(__name__)

# Temporary names of files of a run; see `pipeline.fs.atomic.atomic_write`.
TEMPORARY = re.compile(r"\.(\w+\.jsonl?|\d+-\d+-[0-9a-f]+\.arrow)\.[0-9a-f]{32}\.tmp")


class Run(contextlib.ExitStack):
    """A run in a work directory, from its last checkpoint on, or from the beginning.

    It is a context manager, and exits the contexts that `enter_context` gives it. When its block
    ends, the last checkpoint is complete, and `summary.json` is written.

    Args:
        config: from `configs/`; it is not changed.
        workdir: the directory of the run; made if it does not exist.
        profile: "FIRST:LAST", the steps to trace; "" for none.

    Attributes:
        config: the config, with the seed of the run, and its values for fields that are None.
        first_step: the step that the run resumes from; 0 for a new run.
        finished: whether all steps are done.
        mesh: the mesh of all devices, JAX's default inside the block.
        layout: `sharding` and `context_order`, as `Batches` takes them.
        log: the `RunLog`, with the clock: `with run.log.clock("compile"): …`.
    """

    def __init__(self, config: Any, workdir: epath.PathLike, *, profile: str = ""):
        super().__init__()
        check_config(config)
        self.config, self.workdir = config.copy_and_resolve_references(), as_path(workdir)
        self._profile = Profile(profile, self.workdir / "profile")
        self._leads = jax.process_index() == 0

    def __enter__(self) -> "Run":
        with contextlib.ExitStack() as failing:
            failing.push(self)  # closes what is open if the rest fails
            self._open()
            self.push(self._finish)
            failing.pop_all()
        return self

    def _open(self) -> None:
        make_directory(self.workdir)
        # All hosts read the directory only after it is locked.
        hosts.main_process_first("locking the work directory", self._lock)
        keep_programs(self.workdir / "programs")
        self.checkpoints = Checkpoints(self.workdir / "checkpoints", keep=self.config.keep)
        self.enter_context(self.checkpoints)
        self.first_step: int = self.checkpoints.latest or 0
        fields = json.loads(self.config.to_json())
        # Hosts that differ here would later wait for each other.
        start = {"configuration": list_fields(fields), "checkpoint": {"step": self.first_step}}
        hosts.require_agreement(start)
        hosts.require_shared(self.workdir)
        self.mesh = make_mesh(self.config.mesh)
        self.enter_context(jax.set_mesh(self.mesh))
        self.layout: dict[str, Any] = {
            "sharding": batch_sharding(self.mesh),
            "context_order": self.config.context_order,
        }
        self._resume(fields)
        if self.config.start_from and not self.first_step:
            require_checkpoint(as_path(self.config.start_from))
        self.finished: bool = self.first_step >= self.config.steps
        self._done, self._interrupted = self.first_step, False
        if self.finished:
            logger.info(
                f"finished: all {self.first_step:,} steps are done; for more, give --config.steps=N"
            )

    def _lock(self) -> None:
        if self._leads:
            self.enter_context(directory_lock(self.workdir, "training", wait=False))
            for folder in (self.workdir, self.workdir / loss_archive.NAME):
                remove_leftovers(folder, TEMPORARY)

    def _resume(self, fields: dict[str, Any]) -> None:
        """Loads schedule and log from the checkpoint; only entries after this step may differ."""
        run: dict[str, Any] = {"config": fields, "schedule": None, "record": {}}
        if self.first_step:
            self._data_state, run = self.checkpoints.restore_json(self.first_step)
        with self.config.unlocked():
            self.config.update_from_flattened_dict(require_same(run, fields))
        self._fields = fields = json.loads(self.config.to_json())
        if fields["batches"].get("tiers") is None:  # the steps of an update are a block
            fields["batches"]["tiers"] = self.config.accumulate
        self._schedule = Schedule({"seed": fields["seed"], **fields["batches"]}, fields["schedule"])
        self._schedule.resume(run["schedule"], self.first_step)
        options = {"peak_flops": self.config.peak_flops, "on_nonfinite": self.config.on_nonfinite}
        self.log = RunLog(
            self.workdir, self.first_step, self.config.steps, state=run["record"], **options
        )
        with self.config.unlocked():
            self.config.seed = self._schedule.entries[0].options["seed"]
            if "decay_steps" in self.config.optimizer:
                decay = self.config.optimizer.decay_steps or self.config.steps
                self.config.optimizer.decay_steps = fields["optimizer"]["decay_steps"] = decay
                if self.first_step and self.config.steps > max(decay, self.first_step):
                    logger.info(
                        f"from step {decay:,} on, the learning rate stays as it is, since "
                        f"config.optimizer.decay_steps is {decay:,} and config.steps is "
                        f"{self.config.steps:,}"
                    )

    def prepare_corpora(self) -> tuple[Any, AnyCorpus]:
        """The corpora for training and evaluation; process 0 prepares those that do not exist."""
        with self.log.clock("prepare"):
            corpus, held_out = prepare_on_hosts(self.config, self.workdir / "corpus")
        if "sources" not in self.config:
            corpus = self._schedule.select(corpus)
        logger.info(f"{corpus}")
        return corpus, held_out

    def make_plan(self, corpus: AnyCorpus) -> Plan:
        """The plan of all steps from `first_step` on, for the corpus of `prepare_corpora`."""
        mixture, rows = dict(self.config.get("mixture", {})), multiples(**self.layout)[0]
        with self.log.clock("plan"):
            self._plan = self._schedule.plan(corpus, mixture, row_multiple=rows)
            plan = self._plan.onward(self.first_step)
        logger.info(f"{plan}")
        return plan

    def require_agreement(self, training: Batches, evaluation: Batches) -> None:
        """Raises an error on every host if hosts have other plans or corpora."""
        identities = {"plan": training.plan.identity, "corpus": training.corpus.identity}
        identities["held-out plan"] = evaluation.plan.identity
        identities["held-out corpus"] = evaluation.corpus.identity
        hosts.require_agreement(identities)

    def compile(
        self,
        init_state: Any,
        train_step: Callable,
        eval_step: Callable,
        loader: Loader,
        evaluation: Batches,
    ) -> Compiled:
        """Compiles the steps of training and evaluation for every bucket; returns the first.

        `init_state(key)` is jitted, with the shardings of the state. `loader` has the batches of
        training.
        """
        self._init_state, self._key = init_state, jax.random.key(self.config.seed)
        self._abstract_state = like = init_state.eval_shape(self._key)
        self._loader, self._evaluation = loader, evaluation
        with self.log.clock("compile"):
            self._train_step = Compiled(
                train_step,
                like,
                loader.specs,
                donate=True,
                microbatches=self.config.microbatches or "auto",
                budget=self.config.memory_budget,
                out_shardings=(jax.tree.map(lambda leaf: leaf.sharding, like), jax.P()),
            )
            held = {name: leaf for name, leaf in like.items() if name != "params"}
            auto: Any = {"microbatches": "auto", "budget": self.config.memory_budget}
            specs = evaluation.specs
            self._eval_step = Compiled(eval_step, like["params"], specs, held=held, **auto)
        logger.info(programs_table(self._train_step, self._eval_step))
        return self._train_step

    def begin(self, flops: Callable[[PlannedBatch], float]) -> Any:
        """The initial state; from here on, the run logs steps, and notes signals and compilations.

        It is the state of the last checkpoint, from which the loader resumes, too; or a new one,
        with the parameters of `config.start_from` if that is given. `flops` is that of a `Model`.
        """
        self._flops = flops
        save_config(self.workdir, self.config)  # of a start that is not refused
        state = self._restore() if self.first_step else self._initialise()
        self.checkpoints.compile(state)
        if self._leads:
            write_history(self.workdir, self._loader.corpus, self._plan)
        self._compilations = self.enter_context(CompileLog())
        self.enter_context(self.log)
        self.enter_context(self._profile)
        self._signals = self.enter_context(hosts.StopSignals())
        return state

    def _restore(self) -> Any:
        """The state of the last checkpoint."""
        with self.log.clock("restore"):
            self._loader.set_state(self._data_state)
            state = self.checkpoints.restore_state(self.first_step, self._abstract_state)
        logger.info(f"resumed: step {self.first_step:,} of {self.config.steps:,}")
        return state

    def _initialise(self) -> Any:
        """A new state, with the parameters of `config.start_from` if that is given."""
        with self.log.clock("initialise"):
            state = self._init_state(self._key)
            if start := self.config.start_from:
                corpus, like = self._loader.corpus, self._abstract_state
                _, state["params"] = restore_parameters(as_path(start), corpus, like)
            return state

    @contextlib.contextmanager
    def timed(self, step: int, state: Any) -> Iterator[None]:
        """Times a step, and traces it if requested; `state` is that before the step."""
        with self.log.clock("train"), self._profile.step(step, state):
            yield

    def log_step(self, step: int, values: Mapping[str, jax.Array]) -> None:
        """Records a step that the device has begun, on the last batch of the loader."""
        planned, traffic = self._loader.planned, self._loader.traffic()
        self.log.add(step, planned, {**values, **traffic}, flops=self._flops(planned))

    def log_skipped(self, step: int) -> None:
        """Records a step whose batch is skipped."""
        self.log.stats.skipped += 1
        self.log.write({"step": step, "skipped": self._loader.planned.digest})

    def finish_step(self, step: int) -> bool:
        """Counts a step; returns, the same on all hosts, whether a signal or the last step ends."""
        self._done = step + 1
        signalled, ends = self._signals.received(self._done), self._done == self.config.steps
        self._interrupted = signalled and not ends
        return signalled or ends

    @property
    def status(self) -> int:
        """The exit status: 0, or by convention 128 + the number of the signal that ended it."""
        if not self._interrupted:
            return 0
        return 128 + signal.Signals[self._signals.reason or "SIGTERM"]

    def evaluate_if_due(self, done: int, params: Any) -> None:
        """Evaluates after `done` steps, and records it, if that is due and not done yet."""
        ends = done == self.config.steps
        due = ends or (done % self.config.eval_every == 0 and not self._interrupted)
        if not due or str(done) in self.log.stats.evaluations:
            return
        self.log.flush()
        with self.log.clock("evaluate"):
            total, weight = sum_over_batches(self._evaluation, self._eval_step, params)
        self.log.evaluate(done, total, weight, self._evaluation.corpus.text_bytes)

    def save(self, done: int, state: Any) -> None:
        """Writes a checkpoint after `done` steps."""
        stats = self.log.stats
        self.log.flush()
        with self.log.clock("save"):
            steps = {f"jit({step.name})" for step in (self._train_step, self._eval_step)}
            names = self._compilations.names
            stats.compiles_after_start = sum(name in steps for name in names)
            stats.other_compiles = len(names) - stats.compiles_after_start
            data = self._loader.get_state()
            run = {"config": self._fields, "schedule": self._schedule.as_json()}
            run["record"] = self.log.save()
            self.checkpoints.save(done, state, data=data, run=run)
        ends = done == self.config.steps
        if ends and (unapplied := int(state["steps"]) % self.config.accumulate):
            logger.warning(
                f"the gradients of the last {counted(unapplied, 'step')} are in no update, "
                f"which takes accumulate={self.config.accumulate} steps, since some steps were "
                "skipped or not finite"
            )
        if self._interrupted:
            logger.info(f"{self._signals.reason}: saved step {done:,}; run again to continue")

    def _finish(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            with self.log.clock("save"):
                self.checkpoints.close()
            self.log.write_summary(self._done)
