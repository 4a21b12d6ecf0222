"""Preference tuning: what the reference gives each continuation, made once and stored."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
from etils import epath

from pipeline.corpus.corpora import Corpora
from pipeline.errors import InvalidValue
from pipeline.scoring.scores import TABLE
from pipeline.scoring.table import open_table
from pipeline.steps import hosts
from pipeline.steps.preferences import REFERENCE
from pipeline.text.features import Feature

# The directory of the scores by the reference, beside the corpus that they are of.
NAME = "reference"


def open_scores(corpus: Any, directory: epath.Path) -> pa.Table:
    """The table of scores in a directory; a sentence where the run has not made it."""
    if not (directory / TABLE).exists():
        raise InvalidValue(
            f"{corpus!r:.80} has no log-probabilities of a reference: there is no "
            f"{directory / TABLE}. Train with this config first"
        )
    return open_table(directory / TABLE)


def add_reference(
    corpus: Any, make_table: Callable[[Any, epath.Path], pa.Table] = open_scores
) -> Any:
    """The corpus of pairs with the log-probability of each continuation by the reference.

    It is the feature `reference_logprob`, which `by_pair` takes.

    Args:
        corpus: of groups of two continuations, or `Corpora` of such.
        make_table: gives the table of scores, `reference_logprob`, of a corpus in a directory.

    Raises:
        ValueError: an example is no group of two, or other values are stored.
    """
    if isinstance(corpus, Corpora):
        parts = corpus.corpora.items()
        return Corpora({name: add_reference(each, make_table) for name, each in parts})
    if corpus.trees is None or (corpus.trees[:, 1] != 2).any():
        raise InvalidValue(
            f"config.preference is given, and not all examples of {corpus!r:.80} are groups of two "
            "continuations; give --config.template.kind=preference, or a template that makes such"
        )
    table = make_table(corpus, corpus.directory / NAME)
    features = {REFERENCE: Feature("continuation", dtype="float32")}

    def store() -> Any:
        return corpus.with_features({REFERENCE: _read(table)}, features=features)

    return hosts.main_process_first("storing the reference", store)


def _read(table: pa.Table) -> Iterator[np.ndarray]:
    """The values of each pair; of one that is in no batch they are 0."""
    for batch in table.select([REFERENCE]).to_batches():
        for pair in batch.column(0).to_pylist():
            yield np.asarray(pair or (0.0, 0.0), np.float32)
