"""Memory: where the columns of the examples of a part are, and stores of parts that have them."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from etils import epath

from pipeline.corpus.stored.gather import address_of
from pipeline.text.features import Column
from pipeline.text.ragged import find_lead


class Segments(NamedTuple):
    """A column of the examples of a part, in memory.

    The values of example `i` begin at the address `address + scale * begins[i]`.

    Attributes:
        dtype: of the numbers.
        address: where the column begins.
        begins: where each example begins; None: where its tokens do, or for a column of one value
            for each example, at `i`.
        scale: the bytes of a unit of `begins`.
    """

    dtype: np.dtype
    address: int
    begins: np.ndarray | None
    scale: int


def find_segments(columns: Mapping[str, Column], offsets: np.ndarray | None) -> dict[str, Segments]:
    """Where columns of stored numbers are; `offsets` tell where examples begin in the lists."""
    lead, segments = find_lead({name: column.feature for name, column in columns.items()}), {}
    for name, (feature, values) in columns.items():
        begins, scale = offsets if name == lead else None, values.itemsize * feature.size
        segments[name] = Segments(values.dtype, address_of(values), begins, scale)
    return segments


class Opened(Protocol):
    """A part whose columns are in memory as long as it lives."""

    @property
    def segments(self) -> Mapping[str, Segments]:
        """Where the examples are, by column."""
        ...


class PartStore:
    """Parts that can be opened.

    Attributes:
        source: the directory of the corpus, for errors.
        evictions: a number that grows when a file that was opened is removed.
    """

    source = epath.Path()
    evictions = 0

    def open(self, numbers: Sequence[int]) -> Sequence[Opened]:
        """The parts with these numbers."""
        raise NotImplementedError

    @property
    def caches(self) -> tuple[tuple[Any, int], ...]:
        """The `PartCache` that it is, with the number of its first file; () for any other store."""
        return ()

    def has(self, number: int) -> bool:
        """Whether the file of an opened part is still there."""
        return True


class HeldPart(PartStore):
    """One part that is in memory; `held` are the arrays that `segments` tell the places of."""

    def __init__(self, segments: Mapping[str, Segments], held: Any):
        self.segments, self._held = segments, held

    def open(self, numbers: Sequence[int]) -> "Sequence[HeldPart]":
        """See `PartStore`."""
        return [self for _ in numbers]
