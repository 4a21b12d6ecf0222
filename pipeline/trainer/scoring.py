"""Scores of a run: the losses of documents."""

import logging
import math
from collections.abc import Callable
from typing import Any

import jax
import pyarrow.compute as pc
from etils import epath

from pipeline.fs.atomic import as_path
from pipeline.scoring.scores import TABLE, ScoreOptions, score

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
    """Scores the documents of a corpus, and logs their mean loss.

    `config.batches` decides how documents are packed, and `step` is from `make_score_step`. The
    table in `directory` has `nll`, the sum of the weighted losses of each document in nats, and
    `weight`, the sum of its weights.
    """
    options: dict[str, Any] = {"directory": directory, "sharding": mesh, "reduce": "sum"}
    known = ScoreOptions.__annotations__
    options |= {name: v for name, v in config.batches.items() if name in known and v is not None}
    per = corpus.side_names[corpus.loss_side or 0] if len(corpus.sides) > 1 else "position"
    table = score(corpus, step, state=params, per=per, **options)
    total, weight = (
        pc.call_function("sum", [table[name]]).as_py() or 0.0 for name in ("nll", "weight")
    )
    mean = total / max(weight, 1e-9)
    means = f"loss {mean:.4f}, perplexity {math.exp(min(mean, 700)):,.2f}"
    if corpus.text_bytes:
        means += f", {total / math.log(2) / corpus.text_bytes:.4f} bits per byte"
    place = as_path(directory) / TABLE
    logger.info("%s documents: %s; each is in %s", f"{len(table):,}", means, place)
