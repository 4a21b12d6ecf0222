"""Lockstep: batches of a few static shapes, almost without padding, planned from lengths alone.

`Bucket`, `fit_buckets` and `Plan` need NumPy only; everything else is imported when first used.
Other names are in their rooms, such as `pipeline.steps.Compiled` or `pipeline.history.losses`.
"""

import importlib
from typing import TYPE_CHECKING

from pipeline.planning import Bucket, Plan, PlannedBatch, fit_buckets

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
    from pipeline.corpus import (
        Corpora,
        Corpus,
        Decoded,
        Examples,
        FillInTheMiddle,
        InPlace,
        Masked,
        Pairs,
        Writer,
        find_prefixes,
        patch_grid,
        patchify,
        prepare,
        prepare_pairs,
    )
    from pipeline.corpus import engines as engines
    from pipeline.fields import attention_mask, follow, rename
    from pipeline.loading import (
        Batch,
        Batches,
        DynamicContext,
        Loader,
        PackedStream,
        load,
        to_global,
    )
    from pipeline.scoring import pack, score, unpack
    from pipeline.text import Feature
    from pipeline.text import sources as sources
    from pipeline.text import templates as templates
    from pipeline.text import tokenizers as tokenizers

# Names that are imported when first used, by room (all others are in `corpus`); and modules.
_NAMES: dict[str, tuple[str, ...]] = {
    "fields": ("attention_mask", "follow", "rename"),
    "loading": (
        *("Batch", "Batches", "DynamicContext", "Loader", "PackedStream", "load"),
        "to_global",
    ),
    "scoring": ("pack", "score", "unpack"),
    "text": ("Feature",),
}
_MODULES = {"engines": "corpus.engines"}
_MODULES |= {name: f"text.{name}" for name in ("sources", "templates", "tokenizers")}
_ROOMS = (
    *("corpus", "fields", "fs", "history", "loading", "planning", "report", "scoring", "steps"),
    "text",
)

__all__ = [
    "Batch",
    "Batches",
    "Bucket",
    "Corpora",
    "Corpus",
    "Decoded",
    "DynamicContext",
    "Examples",
    "Feature",
    "FillInTheMiddle",
    "InPlace",
    "Loader",
    "Masked",
    "PackedStream",
    "Pairs",
    "Plan",
    "PlannedBatch",
    "Writer",
    "attention_mask",
    "engines",
    "find_prefixes",
    "fit_buckets",
    "follow",
    "load",
    "pack",
    "patch_grid",
    "patchify",
    "prepare",
    "prepare_pairs",
    "rename",
    "score",
    "sources",
    "templates",
    "to_global",
    "tokenizers",
    "unpack",
]


if not TYPE_CHECKING:  # with it, type checkers would accept every name

    def __getattr__(name: str):
        if name == "__version__":
            from importlib import metadata

            try:
                return metadata.version("lockstep-pipeline")
            except metadata.PackageNotFoundError:
                return "unknown (not installed)"
        if name in _MODULES or name in _ROOMS:
            return importlib.import_module(f"pipeline.{_MODULES.get(name, name)}")
        if name in __all__:
            room = next((room for room, names in _NAMES.items() if name in names), "corpus")
            return getattr(importlib.import_module(f"pipeline.{room}"), name)
        raise AttributeError(f"module 'pipeline' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_ROOMS, "__version__"])
