"""From the rows of a plan to arrays on the devices, and the state to resume from.

`Batches` builds the batches of a plan in NumPy, as a Grain data set; `Loader` transfers them, and
`load` makes a loader from a corpus and options. `PackedStream` packs a Grain data set as it comes,
without a plan of all of it. `to_global` transfers a single batch. `StateKey`
makes and checks a state without a loader. What is computed from the fields of a batch is in
`pipeline.fields`, and can be imported from here as well.
"""

from pipeline.fields import (
    attention_mask,
    cu_seqlens,
    follow,
    rename,
    segment_starts,
    targets_ahead,
)
from pipeline.fields.batch import Batch
from pipeline.loading.batches import Batches
from pipeline.loading.dynamic_context import DynamicContext
from pipeline.loading.from_options import load
from pipeline.loading.loader import Loader
from pipeline.loading.sharding import batch_sharding, multiples
from pipeline.loading.state import StateKey
from pipeline.loading.stream import PackedStream
from pipeline.loading.transfer import to_global

__all__ = [
    "Batch",
    "Batches",
    "DynamicContext",
    "Loader",
    "PackedStream",
    "StateKey",
    "attention_mask",
    "batch_sharding",
    "cu_seqlens",
    "follow",
    "load",
    "multiples",
    "rename",
    "segment_starts",
    "targets_ahead",
    "to_global",
]
