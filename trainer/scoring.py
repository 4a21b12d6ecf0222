"""Scores with the parameters of a run: the losses of documents."""

import json
import logging
import math
from collections.abc import Callable
from typing import Any

import jax
import pyarrow.compute as pc
from etils import epath
from ml_collections import ConfigDict

from models.parameters import jit_init
from pipeline.errors import counted
from pipeline.fs.atomic import as_path, atomic_write
from pipeline.planning.identity import fingerprint_of
from pipeline.scoring.scores import TABLE, ScoreOptions
from pipeline.scoring.scores import score as score_documents
from pipeline.steps import make_mesh, make_score_step
from trainer.config import as_json, check_config
from trainer.corpora import prepare_scored
from trainer.model import Model
from trainer.parameters import require_checkpoint, restore_parameters

logger = logging.getLogger(__name__)


def score(
    config: ConfigDict,
    workdir: epath.Path,
    make_model: Callable[[ConfigDict, Any], Model],
    into: str | None = None,
    test: bool = False,
) -> None:
    """Writes the loss of each document of the training corpus, or with `test`, of `config.eval`.

    It is computed with the latest parameters in `workdir`, and written to the directory `into`; by
    default below `workdir`, by step. `make_model` is that of train.py.
    """
    check_config(config)
    require_checkpoint(workdir)
    mesh = make_mesh(config.mesh)
    with jax.set_mesh(mesh):
        corpus, place = prepare_scored(config, workdir, test=test)
        model = make_model(config, corpus)
        like = jit_init(model.init_params, mesh).eval_shape(jax.random.key(0))
        step, params = restore_parameters(workdir, corpus, like)
        score_step, into = make_score_step(model.loss), into or place / f"{step}"
        score_corpus(config, corpus, score_step, params, directory=into, mesh=mesh)


def score_corpus(
    config: Any,
    corpus: Any,
    step: Callable,
    params: Any,
    *,
    directory: epath.PathLike,
    mesh: jax.sharding.Mesh,
) -> None:
    """Scores the documents of a corpus; logs their mean loss, and writes it to `summary.json`.

    `step` is from `make_score_step`. The table has the columns `nll`, the sum of the weighted
    losses of a document in nats, and `weight`, the sum of its weights.
    """
    options: dict[str, Any] = {"directory": directory, "sharding": mesh, "reduce": "sum"}
    options["num_threads"] = config.num_threads
    # Other scores than those of another model with the same parameters.
    options["version"] = fingerprint_of([config.architecture, as_json(config.model)])
    known = ScoreOptions.__annotations__
    options |= {name: v for name, v in config.batches.items() if name in known and v is not None}
    per = (corpus.loss or corpus.side_names[0]) if len(corpus.sides) > 1 else "position"
    table = score_documents(corpus, step, state=params, per=per, **options)
    total, weight = (
        pc.call_function("sum", [table[name]]).as_py() or 0.0 for name in ("nll", "weight")
    )
    mean, unscored = total / max(weight, 1e-9), table["nll"].null_count
    summary = {"documents": len(table), "unscored": unscored, "weight": weight, "loss": mean}
    summary["perplexity"] = math.exp(min(mean, 700))
    means = f"loss {mean:.4f}, perplexity {summary['perplexity']:,.2f}"
    if corpus.text_bytes:
        summary["bits_per_byte"] = total / math.log(2) / corpus.text_bytes
        means += f", {summary['bits_per_byte']:.4f} bits per byte"
    if unscored:
        means += f"; {counted(unscored, 'document')} in no batch"
    if jax.process_index() == 0:
        with atomic_write(as_path(directory) / "summary.json") as file:
            file.write(f"{json.dumps(summary, indent=1)}\n".encode())
    place = as_path(directory) / TABLE
    logger.info(f"{counted(len(table), 'document')}: {means}; their losses are in {place}")
