"""The work directory of a run: its lock, and the files that commands read."""

import contextlib
import re
from collections.abc import Iterator

import jax
from etils import epath
from ml_collections import ConfigDict

from pipeline.fs.atomic import as_path, directory_lock, make_directory, remove_leftovers
from pipeline.history import loss_archive, write_history
from pipeline.history.run_config import save_config
from pipeline.loading import Loader
from pipeline.steps import hosts, keep_programs
from trainer.config import as_json
from trainer.schedule import Schedule

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


def describe_run(
    workdir: epath.Path, config: ConfigDict, schedule: Schedule, loader: Loader
) -> None:
    """Writes the config and the plan of all steps, which `lockstep` commands read.

    The seed of the config is then that of the first step.
    """
    if jax.process_index() == 0:
        save_config(workdir, as_json(config) | {"seed": schedule.seed})
        write_history(workdir, loader.corpus, loader.plan)
