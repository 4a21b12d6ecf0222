"""The scores of a run: the loss of each document of its corpus, with its latest checkpoint."""

import logging
import math
from collections.abc import Callable
from typing import Any

import jax
import pyarrow as pa
import pyarrow.compute as pc
from etils import epath

from pipeline.errors import InvalidValue
from pipeline.fs.atomic import as_path
from pipeline.loading.checkpoint import Checkpoints
from pipeline.loading.sharding import batch_sharding
from pipeline.scoring.scores import TABLE, ScoreOptions, score
from pipeline.steps import hosts
from pipeline.steps.mesh import make_mesh
from pipeline.steps.segments import position_losses
from pipeline.trainer.corpora import prepare_corpora

logger = logging.getLogger(__name__)


def weighted_losses(loss: Callable) -> Callable:
    """The step `(params, batch)` of a loss that gives the weighted loss of each position.

    Args:
        loss: as for `position_losses`.

    Returns:
        A step that returns `nll`, weight · nll, and `weight`, float32 `[rows, length]`.
    """

    def losses(params: Any, batch: Any) -> Any:
        _, _, nll = position_losses(loss, params, batch)
        return {"nll": nll, "weight": batch["loss_weights"]}

    return losses


def score_run(
    config: Any, workdir: epath.Path, directory: str, make_steps: Callable, shard: Callable
) -> None:
    """Scores the training corpus of a config with the latest checkpoint in its work directory.

    Args:
        config: of train.py.
        workdir: where its corpus and its checkpoints are.
        directory: where to write the scores: `nll`, the sum of the weighted losses of each document
            in nats, and `weight`, the sum of its weights.
        make_steps: from config, corpus and the sharding of batches to four things: `init(key)`, the
            state; a training step; `loss(params, batch)`, as for `weighted_losses`; anything.
        shard: from the shapes of a state and a mesh to its shardings.

    Raises:
        ValueError: there is no checkpoint, or what `score` raises.
    """
    mesh = make_mesh(config.mesh)
    with jax.set_mesh(mesh), Checkpoints(workdir / "checkpoints") as checkpoints:
        if (step := checkpoints.latest) is None:
            raise InvalidValue(
                f"--score needs a checkpoint, and {workdir} has none; train there first"
            )
        corpus, _ = hosts.main_process_first(
            "preparing the corpus", lambda: prepare_corpora(config, workdir / "corpus")
        )
        config.optimizer.decay_steps = config.optimizer.decay_steps or config.steps
        init, _, loss, _ = make_steps(config, corpus, batch_sharding(mesh))
        key = jax.random.key(config.seed)
        shardings = shard(jax.eval_shape(init, key), mesh)
        like = jax.jit(init, out_shardings=shardings).eval_shape(key)
        params = checkpoints.restore_state(step, like)["params"]
        options = {
            name: value
            for name, value in config.batches.items()
            if value is not None and name in ScoreOptions.__annotations__
        }
        table = score(
            corpus,
            weighted_losses(loss),
            directory=directory,
            state=params,
            model=f"step {step} of {workdir}",
            reduce="sum",
            sharding=mesh,
            **options,
        )
    _report(table, corpus.text_bytes, as_path(directory) / TABLE)


def _report(table: pa.Table, text_bytes: int | None, path: epath.Path) -> None:
    total, weight = (
        pc.call_function("sum", [table[name]]).as_py() or 0.0 for name in ("nll", "weight")
    )
    mean = total / max(weight, 1e-9)
    said = f"loss {mean:.4f}, perplexity {math.exp(min(mean, 700)):,.2f}"
    if text_bytes:
        said += f", {total / math.log(2) / text_bytes:.4f} bits per byte"
    logger.info("%s documents: %s; each is in %s", f"{len(table):,}", said, path)
