"""Lockstep: batches of a few static shapes, almost without padding, planned from lengths alone.

`Bucket`, `fit_buckets`, `Plan` and `calibrate` need NumPy only; everything else is imported when
first used.
"""

import importlib
from typing import TYPE_CHECKING

from pipeline.packing.bucket import Bucket
from pipeline.planning.calibration import calibrate
from pipeline.planning.fit import fit_buckets
from pipeline.planning.plan import Plan
from pipeline.planning.planned import PlannedBatch

if TYPE_CHECKING:
    __version__: str
    from pipeline import engines, sources, tasks, templates, tokenizers
    from pipeline.external import InPlace, index
    from pipeline.fingerprints import Function
    from pipeline.loading.batches import Batches
    from pipeline.loading.compact import expand
    from pipeline.loading.field_names import rename
    from pipeline.loading.fields import Batch
    from pipeline.loading.loader import Loader, load
    from pipeline.loading.sharding import to_global
    from pipeline.scoring.score import score
    from pipeline.storage.corpora import Corpora
    from pipeline.storage.corpus import Corpus
    from pipeline.storage.duplicates import duplicates
    from pipeline.storage.pairs import Pairs
    from pipeline.storage.preparation import prepare, prepare_pairs
    from pipeline.training.compile_log import CompileGuard
    from pipeline.training.compiled import Compiled
    from pipeline.training.losses import losses
    from pipeline.views import Masked, SpanCorruption

# The module of each name that is imported when first used; None: the name is a module.
_MODULES = {
    "Batch": "loading.fields",
    "Batches": "loading.batches",
    "CompileGuard": "training.compile_log",
    "Compiled": "training.compiled",
    "Corpora": "storage.corpora",
    "Corpus": "storage.corpus",
    "Function": "fingerprints",
    "InPlace": "external",
    "Loader": "loading.loader",
    "Masked": "views",
    "Pairs": "storage.pairs",
    "SpanCorruption": "views",
    "duplicates": "storage.duplicates",
    "engines": None,
    "expand": "loading.compact",
    "index": "external",
    "load": "loading.loader",
    "losses": "training.losses",
    "prepare": "storage.preparation",
    "prepare_pairs": "storage.preparation",
    "rename": "loading.field_names",
    "score": "scoring.score",
    "sources": None,
    "tasks": None,
    "templates": None,
    "to_global": "loading.sharding",
    "tokenizers": None,
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
    "index",
    "load",
    "losses",
    "prepare",
    "prepare_pairs",
    "rename",
    "score",
    "sources",
    "tasks",
    "templates",
    "to_global",
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
        if name not in _MODULES:
            raise AttributeError(f"module 'pipeline' has no attribute {name!r}")
        module = importlib.import_module(f"pipeline.{_MODULES[name] or name}")
        return getattr(module, name) if _MODULES[name] else module


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
