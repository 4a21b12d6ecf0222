"""Lockstep: batches of a few static shapes, almost without padding, planned from lengths alone.

`Bucket`, `fit_buckets`, `Plan` and `calibrate` need NumPy only; everything else is imported when
first used.
"""

import importlib
from typing import TYPE_CHECKING

from pipeline.planning.bucket import Bucket
from pipeline.planning.calibration import calibrate
from pipeline.planning.fit import fit_buckets
from pipeline.planning.plan import Plan
from pipeline.planning.planned import PlannedBatch

if TYPE_CHECKING:
    __version__: str
    from pipeline import corpus as corpus
    from pipeline import fs as fs
    from pipeline import history as history
    from pipeline import loading as loading
    from pipeline import planning as planning
    from pipeline import report as report
    from pipeline import scoring as scoring
    from pipeline import steps as steps
    from pipeline import text as text
    from pipeline.corpus import engines
    from pipeline.corpus.corpora import Corpora
    from pipeline.corpus.corpus import Corpus
    from pipeline.corpus.duplicates import duplicates
    from pipeline.corpus.in_place import InPlace
    from pipeline.corpus.on_read import tokenize_on_read
    from pipeline.corpus.pairs import Pairs
    from pipeline.corpus.preparation import prepare, prepare_pairs
    from pipeline.corpus.views import Masked, SpanCorruption
    from pipeline.history.losses import losses
    from pipeline.loading.batches import Batches
    from pipeline.loading.compact import expand
    from pipeline.loading.field_names import rename
    from pipeline.loading.fields import Batch
    from pipeline.loading.loader import Loader, load
    from pipeline.loading.sharding import to_global
    from pipeline.scoring.score import score
    from pipeline.steps.compile_log import CompileGuard
    from pipeline.steps.compiled import Compiled
    from pipeline.text import sources, templates, tokenizers
    from pipeline.text.templates import Function

# The place of each name that is imported when first used.
_PLACES = {
    "Batch": "loading.fields",
    "Batches": "loading.batches",
    "CompileGuard": "steps.compile_log",
    "Compiled": "steps.compiled",
    "Corpora": "corpus.corpora",
    "Corpus": "corpus.corpus",
    "Function": "text.templates",
    "InPlace": "corpus.in_place",
    "Loader": "loading.loader",
    "Masked": "corpus.masked",
    "Pairs": "corpus.pairs",
    "SpanCorruption": "corpus.span_corruption",
    "duplicates": "corpus.duplicates",
    "expand": "loading.compact",
    "tokenize_on_read": "corpus.on_read",
    "load": "loading.loader",
    "losses": "history.losses",
    "prepare": "corpus.preparation",
    "prepare_pairs": "corpus.preparation",
    "rename": "loading.field_names",
    "score": "scoring.score",
    "to_global": "loading.sharding",
}
_ROOMS = ("corpus", "fs", "history", "loading", "planning", "report", "scoring", "steps", "text")
_MODULES = {
    "engines": "corpus.engines",
    "sources": "text.sources",
    "templates": "text.templates",
    "tokenizers": "text.tokenizers",
}

__all__ = [
    "Batch",
    "Batches",
    "Bucket",
    "CompileGuard",
    "Compiled",
    "Corpora",
    "Corpus",
    "Function",
    "InPlace",
    "Loader",
    "Masked",
    "Pairs",
    "Plan",
    "PlannedBatch",
    "SpanCorruption",
    "calibrate",
    "duplicates",
    "engines",
    "expand",
    "fit_buckets",
    "load",
    "losses",
    "prepare",
    "prepare_pairs",
    "rename",
    "score",
    "sources",
    "templates",
    "to_global",
    "tokenize_on_read",
    "tokenizers",
]


if not TYPE_CHECKING:  # with it, type checkers would accept every name

    def __getattr__(name: str):
        if name == "__version__":
            from importlib import metadata

            try:
                return metadata.version("lockstep-pipeline")
            except metadata.PackageNotFoundError:
                return "unknown (not installed)"
        if name in _MODULES:
            return importlib.import_module(f"pipeline.{_MODULES[name]}")
        if name in _ROOMS:
            return importlib.import_module(f"pipeline.{name}")
        if name not in _PLACES:
            raise AttributeError(f"module 'pipeline' has no attribute {name!r}")
        return getattr(importlib.import_module(f"pipeline.{_PLACES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
