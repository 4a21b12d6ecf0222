"""Scores of a run: losses of documents, and the reference's log-probabilities of continuations."""

import logging
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from etils import epath

from pipeline.corpus.corpora import Corpora
from pipeline.errors import InvalidValue
from pipeline.scoring.scores import TABLE, ScoreOptions, score
from pipeline.scoring.table import open_table
from pipeline.steps import hosts
from pipeline.steps.preferences import REFERENCE
from pipeline.text.features import Feature

logger = logging.getLogger(__name__)

# The directory of the scores by the reference, beside their corpus.
NAME = "reference"


def score_options(config: Any) -> dict[str, Any]:
    """The options of `score` in `config.batches`."""
    return {
        name: value
        for name, value in config.batches.items()
        if value is not None and name in ScoreOptions.__annotations__
    }


def score_corpus(
    config: Any,
    corpus: Any,
    step: Callable,
    params: Any,
    *,
    directory: epath.Path,
    mesh: jax.sharding.Mesh,
) -> None:
    """Scores the documents of a corpus, and logs their mean loss.

    `config.batches` decides how documents are packed, and `step` is from `make_score_step`. The
    table in `directory` has `nll`, the sum of the weighted losses of each document in nats, and
    `weight`, the sum of its weights.
    """
    options = {"directory": directory, "sharding": mesh, "reduce": "sum", **score_options(config)}
    per = "targets" if len(corpus.sides) > 1 else "position"
    if config.get("preference"):
        corpus, per = add_reference(corpus), "segment"
    table = score(corpus, step, state=params, per=per, **options)
    total, weight = (
        pc.call_function("sum", [table[name]]).as_py() or 0.0 for name in ("nll", "weight")
    )
    mean = total / max(weight, 1e-9)
    said = f"loss {mean:.4f}"
    if per != "segment":
        said += f", perplexity {math.exp(min(mean, 700)):,.2f}"
    if corpus.text_bytes and per != "segment":
        said += f", {total / math.log(2) / corpus.text_bytes:.4f} bits per byte"
    place = directory / TABLE
    logger.info("%s documents: %s; each is in %s", f"{len(table):,}", said, place)


def open_scores(corpus: Any, directory: epath.Path) -> pa.Table:
    """The table of scores in a directory; an error if the run has not made it."""
    if not (directory / TABLE).exists():
        raise InvalidValue(
            f"{corpus!r:.80} has no log-probabilities of a reference: there is no "
            f"{directory / TABLE}; train with this config first"
        )
    return open_table(directory / TABLE)


def add_reference(
    corpus: Any, make_table: Callable[[Any, epath.Path], pa.Table] = open_scores
) -> Any:
    """The corpus of pairs with the reference's log-probability of each continuation.

    It is the feature `reference_logprob`, which a `PairLoss` reads.

    Args:
        corpus: a corpus of groups of two continuations, or `Corpora` of these.
        make_table: returns the table of scores, `reference_logprob`, of a corpus in a directory.

    Raises:
        ValueError: an example is not a group of two, or other values are stored.
    """
    if isinstance(corpus, Corpora):
        parts = corpus.corpora.items()
        return Corpora({name: add_reference(each, make_table) for name, each in parts})
    if corpus.trees is None or (corpus.trees[:, 1] != 2).any():
        raise InvalidValue(
            f"config.preference is given, but not all examples of {corpus!r:.80} are groups of two "
            "continuations; give --config.template.kind=preference, or a template that makes such "
            "groups"
        )
    column = make_table(corpus, corpus.directory / NAME)[REFERENCE]
    features = {REFERENCE: Feature("continuation", dtype="float32")}

    def store() -> Any:
        pairs = (pair for chunk in column.chunks for pair in chunk.to_pylist())
        # A pair that is in no batch has 0.
        values = (np.asarray(pair or (0.0, 0.0), np.float32) for pair in pairs)
        return corpus.with_features({REFERENCE: values}, features=features)

    return hosts.main_process_first("storing the reference", store)
