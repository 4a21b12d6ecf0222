"""Packers: a packer packs the histogram of a window, with the options of its plan."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from pipeline.planning.bucket import Bucket
from pipeline.planning.patterns import Packed


class Pack(Protocol):
    """Packs a histogram into rows, as `pipeline.planning.cascade.pack` with its other arguments."""

    def __call__(
        self, counts: np.ndarray, *, whole: bool = False, surplus: Sequence[int] | None = None
    ) -> Packed:
        """The packed histogram."""
        ...


@dataclasses.dataclass(frozen=True)
class Packer:
    """Packs histograms with fixed options. Implements `Pack`.

    Args:
        search: as `pipeline.planning.cascade.pack`.
        buckets: the buckets of the result.
        used: those of them that may have rows.
        options: other arguments of `search`.
    """

    search: Callable[..., Packed]
    buckets: tuple[Bucket, ...]
    used: tuple[Bucket, ...]
    options: Mapping[str, Any]

    def __call__(
        self, counts: np.ndarray, *, whole: bool = False, surplus: Sequence[int] | None = None
    ) -> Packed:
        """See `Pack`."""
        options = {**self.options, "buckets": self.used, "whole": whole}
        if surplus is not None:
            given = dict(zip(self.buckets, surplus, strict=True))
            options["surplus"] = [given[bucket] for bucket in self.used]
        packed = self.search(counts, **options)
        if len(self.used) == len(self.buckets):
            return packed
        patterns = dict(zip(self.used, packed.patterns, strict=True))
        every = tuple(patterns.get(bucket, ()) for bucket in self.buckets)
        return Packed(self.buckets, every, packed.counts)
