"""The file of weights in a work directory, which changes the mixture of a run while it trains."""

import json
import logging
from typing import Any

import jax
from etils import epath
from ml_collections import ConfigDict

from pipeline.errors import UserError
from pipeline.history import write_history
from pipeline.history.plans import describe_changes
from pipeline.loading import Loader
from pipeline.planning.options import as_phases

logger = logging.getLogger(__name__)

NAME = "weights.json"


def loader_options(config: ConfigDict) -> dict[str, Any]:
    """The options of the `Loader` of a run: its threads, and the steps at which weights may change.

    A single process has no others to tell, so its weights may change at any step.
    """
    live = config.weights_every and "mixture" in config and jax.process_count() > 1
    changes = {"changes_every": config.weights_every} if live else {}
    return {"num_threads": config.num_threads, **changes}


class WeightsFile:
    """Gives the weights in `weights.json`, such as {"code": 3, "prose": 1}, to a loader.

    What is taken is logged, and `plans.json` has it before its first step, so that the audit knows
    it. A file that cannot be taken is said once; the run goes on with the weights that it has.

    Args:
        workdir: that of the run.
        config: its `weights_every` is the number of steps between looks; 0: never.
        loader: the loader, after its state is restored.
    """

    def __init__(self, workdir: epath.Path, config: ConfigDict, loader: Loader):
        self._path, self._loader = workdir / NAME, loader
        leads = jax.process_index() == 0 and "mixture" in config
        self._every = config.weights_every if leads else 0
        self._said = ""  # the last file that was not taken, or why it was not read

    def look(self, step: int) -> None:
        """Takes the weights of the file, if they are others than before; called at each step."""
        if not self._every or step % self._every:
            return
        text = ""
        try:
            if not self._path.exists():
                return
            text = self._path.read_text()
            weights = json.loads(text)
            if self._has(weights):
                return
            first = self._loader.change(weights=weights)
        except (OSError, ValueError, RecursionError, UserError) as error:
            if self._said != (text or repr(error)):
                logger.warning(f"{self._path} is not taken: {error}")
            self._said = text or repr(error)
            return
        write_history(self._path.parent, self._loader.corpus, self._loader.plan)
        what = describe_changes({"weights": weights})
        logger.info(f"changed from step {first:,} on, as {self._path} says: {what}")

    def _has(self, weights: Any) -> bool:
        """Whether the weights are those that were taken last, perhaps before a restart."""
        origin = self._loader.batches.origin
        if not origin.live:
            return False
        ((_, shares), *_) = as_phases(weights, self._loader.plan.names)
        return shares == origin.plan.stages[origin.live[-1]].weights
