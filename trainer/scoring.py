"""Scores of a run: the losses of documents."""

import json
import logging
import math
from collections.abc import Callable
from typing import Any

import jax
import pyarrow.compute as pc
from etils import epath

from pipeline.errors import counted
from pipeline.fs.atomic import as_path, atomic_write
from pipeline.planning.identity import fingerprint_of
from pipeline.scoring.scores import TABLE, ScoreOptions, score
from trainer.config import as_json

logger = logging.getLogger(__name__)


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
    table = score(corpus, step, state=params, per=per, **options)
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
