"""Lockstep: batches of a few static shapes, almost without padding, planned from lengths alone.

`Bucket`, `fit_buckets`, `Plan` and `Mixture` need NumPy only; everything else is imported when
first used.
"""

import importlib
from typing import TYPE_CHECKING

from pipeline.bucket import Bucket
from pipeline.fit import fit_buckets
from pipeline.mixture import Mixture
from pipeline.plan import Plan, PlannedBatch

if TYPE_CHECKING:
    from pipeline import sources, tasks, templates, tokenizers
    from pipeline.compact import spread
    from pipeline.compile_log import CompileGuard
    from pipeline.compiled import Compiled
    from pipeline.corpus import Corpus
    from pipeline.joined import Joined
    from pipeline.loader import Batches, Loader, load
    from pipeline.pairs import Pairs
    from pipeline.preparation import prepare, prepare_pairs
    from pipeline.sharding import to_global
    from pipeline.spelling import rename
    from pipeline.uncopied import InPlace, index
    from pipeline.views import Masked, SpanCorruption

_LATER = {
    "Batches": "loader",
    "CompileGuard": "compile_log",
    "Compiled": "compiled",
    "Corpus": "corpus",
    "Joined": "joined",
    "Loader": "loader",
    "InPlace": "uncopied",
    "Masked": "views",
    "Pairs": "pairs",
    "SpanCorruption": "views",
    "index": "uncopied",
    "load": "loader",
    "prepare": "preparation",
    "prepare_pairs": "preparation",
    "rename": "spelling",
    "sources": None,
    "spread": "compact",
    "tasks": None,
    "templates": None,
    "to_global": "sharding",
    "tokenizers": None,
}

__all__ = [
    "Batches",
    "Bucket",
    "CompileGuard",
    "Compiled",
    "Corpus",
    "InPlace",
    "Joined",
    "Loader",
    "Masked",
    "Mixture",
    "Pairs",
    "Plan",
    "PlannedBatch",
    "SpanCorruption",
    "fit_buckets",
    "index",
    "load",
    "prepare",
    "prepare_pairs",
    "rename",
    "sources",
    "spread",
    "tasks",
    "templates",
    "to_global",
    "tokenizers",
]


def __getattr__(name: str):
    if name not in _LATER:
        raise AttributeError(f"module 'pipeline' has no attribute {name!r}")
    module = importlib.import_module(f"pipeline.{_LATER[name] or name}")
    return getattr(module, name) if _LATER[name] else module


def __dir__():
    return sorted(__all__)
