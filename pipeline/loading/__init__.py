"""From the rows of a plan to arrays on the devices, and the state to resume from.

`Batches` builds the batches of a plan in NumPy, as a Grain data set; `Loader` transfers them, and
`load` makes a loader from a corpus and options. `to_global` transfers a single batch. `rename`,
`cu_seqlens`, `attention_mask`, `segment_starts` and `targets_ahead` are for other trainers, kernels
and models; `follow` takes values by a pointer. `StateKey` makes and checks a state without a
loader.
"""

from pipeline.loading.batches import Batch, Batches
from pipeline.loading.field_names import rename
from pipeline.loading.loader import Loader, load
from pipeline.loading.masks import attention_mask, cu_seqlens, segment_starts, targets_ahead
from pipeline.loading.pointers import follow
from pipeline.loading.sharding import batch_sharding, multiples, to_global
from pipeline.loading.state import StateKey

__all__ = [
    "Batch",
    "Batches",
    "Loader",
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
