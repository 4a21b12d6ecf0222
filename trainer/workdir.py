"""The work directory of a run: its lock, and the files that commands read."""

import contextlib
import logging
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator

import jax
from etils import epath
from ml_collections import ConfigDict

from pipeline.fs.atomic import as_path, directory_lock, make_directory, remove_leftovers
from pipeline.history import loss_archive, write_history
from pipeline.history.run_config import save_config
from pipeline.loading import Loader
from pipeline.steps import hosts, keep_programs
from trainer.checkpoint import Saved
from trainer.config import as_json
from trainer.schedule import Schedule

logger = logging.getLogger(__name__)

# Temporary names of files of a run; see `pipeline.fs.atomic.atomic_write`.
TEMPORARY = re.compile(r"\.(\w+\.jsonl?|\d+-\d+-[0-9a-f]+\.arrow)\.[0-9a-f]{32}\.tmp")


@contextlib.contextmanager
def work_directory(workdir: epath.PathLike) -> Iterator[epath.Path]:
    """Locks the directory of a run, which is made if it does not exist, for the `with` block.

    All hosts must see it. JAX keeps compiled programs there.
    """
    path = make_directory(workdir)
    with contextlib.ExitStack() as stack:

        def lock() -> None:
            if jax.process_index() == 0:
                stack.enter_context(directory_lock(path, "training", wait=False))
                for folder in (path, path / loss_archive.NAME):
                    remove_leftovers(folder, TEMPORARY)

        # All hosts read the directory only after it is locked.
        hosts.main_process_first("locking the work directory", lock)
        hosts.require_shared(path)
        keep_programs(path / "programs")
        yield as_path(path)


def suggest_commands(workdir: epath.Path) -> None:
    """Logs where the results of a finished run are, and commands that look at them, to paste."""
    place, python = os.fspath(workdir), sys.executable
    program, lockstep = sys.argv[0], os.path.join(os.path.dirname(python), "lockstep")
    tool = (
        [_shorten(lockstep)] if os.path.exists(lockstep) else [_shorten(python), "-m", "pipeline"]
    )
    report = "its losses, and what padding costs", [*tool, "report", place, "--html", "report.html"]
    why = "the documents with the highest losses", [*tool, "why", place, "--worst", "10"]
    score = [_shorten(python), program, f"--workdir={place}", "--mode=score"]
    commands = [report]
    if (workdir / loss_archive.NAME).is_dir():  # the run kept the losses of segments
        commands.append(why)
    if jax.process_count() == 1:  # else it has other flags on each host
        commands.append(("the loss of every document", score))
    lines = "\n".join(f"{what}:\n  {shlex.join(command)}" for what, command in commands)
    files = "metrics.jsonl, summary.json, checkpoints/ and tensorboard/"
    logger.info(f"the log and the checkpoints are in {place}: {files}\n{lines}")


def _shorten(program: str) -> str:
    """The shortest way to call a program: by its name, relative to here, or by its path."""
    name = os.path.basename(program)
    known = shutil.which(name)
    if known and os.path.abspath(known) == os.path.abspath(program):
        return name
    here = os.path.relpath(program)
    return program if here.startswith(os.pardir) else here


def store_config(workdir: epath.Path, config: ConfigDict, schedule: Schedule, saved: Saved) -> None:
    """Stores the config of a run without a checkpoint, which may be stopped before its first step.

    That of a run with one stays until its next steps are planned, by `describe_run`.
    """
    if jax.process_index() == 0 and not saved.step:
        save_config(workdir, as_json(config) | {"seed": schedule.seed})


def describe_run(
    workdir: epath.Path, config: ConfigDict, schedule: Schedule, loader: Loader
) -> None:
    """Writes the config and the plan of all steps, which `lockstep` commands read.

    The seed of the config is then that of the first step.
    """
    if jax.process_index() == 0:
        save_config(workdir, as_json(config) | {"seed": schedule.seed})
        write_history(workdir, loader.corpus, loader.plan)
