"""Fields of batches for other trainers, kernels and models; nothing here builds a batch.

`rename` gives a batch the names that another trainer expects. `cu_seqlens`, `attention_mask`,
`segment_starts` and `targets_ahead` are computed from the fields of a batch, and `follow` takes
values by a pointer.
"""

from pipeline.fields.masks import attention_mask, cu_seqlens, segment_starts, targets_ahead
from pipeline.fields.names import rename
from pipeline.fields.pointers import follow

__all__ = [
    "attention_mask",
    "cu_seqlens",
    "follow",
    "rename",
    "segment_starts",
    "targets_ahead",
]
