"""What happens to examples that are longer than the longest bucket."""

import dataclasses

import numpy as np

OVERFLOWS = ("split", "truncate", "drop", "error")


@dataclasses.dataclass(frozen=True)
class Pieces:
    """The segments to be packed: each an example, or a piece of one.

    Attributes:
        lengths: positions of each piece; pieces of length 0 are in no batch.
        example: the example of each piece, int64; None when pieces and examples are the same.
        start: the first position of each piece in its example, int64; None likewise.
        overlong: how many examples are longer than the longest bucket.
        lost: how many of their positions are in no batch.
    """

    lengths: np.ndarray
    example: np.ndarray | None = None
    start: np.ndarray | None = None
    overlong: int = 0
    lost: int = 0

    def locate(self, pieces: np.ndarray) -> tuple[np.ndarray, np.ndarray | int]:
        """The example and the first position of each of `pieces`."""
        if self.example is None or self.start is None:
            return pieces, 0
        return self.example[pieces], self.start[pieces]


def cut(lengths: np.ndarray, longest: int, overflow: str) -> Pieces:
    """The pieces of all examples, none longer than `longest`.

    >>> pieces = cut(np.array([3, 10]), 4, "split")
    >>> pieces.lengths.tolist(), pieces.example.tolist(), pieces.start.tolist()
    ([3, 4, 4, 2], [0, 1, 1, 1], [0, 0, 4, 8])

    Args:
        lengths: positions of each example.
        longest: positions in a row of the longest bucket.
        overflow: "split" into pieces that lose nothing, "truncate" to the first `longest`
            positions, "drop" the example, or "error".

    Raises:
        ValueError: `overflow` is none of these, or is "error" and an example is too long.
    """
    if overflow not in OVERFLOWS:
        raise ValueError(f"overflow is {overflow!r}; it must be one of {', '.join(OVERFLOWS)}")
    if int(lengths.max(initial=0)) <= longest:
        return Pieces(lengths)
    long = np.flatnonzero(lengths > longest)
    extra = lengths[long].astype(np.int64) - longest
    if overflow == "error":
        raise ValueError(
            f"{len(long):,} of {len(lengths):,} examples are longer than the longest bucket's "
            f"{longest:,} positions (example {long[0]:,} has {int(lengths[long[0]]):,}); give a "
            "longer bucket, or overflow='split', 'truncate' or 'drop'"
        )
    if overflow == "split":
        times = np.ones(len(lengths), np.int64)
        times[long] = -(-lengths[long].astype(np.int64) // longest)
        example = np.repeat(np.arange(len(lengths)), times)
        first = np.cumsum(times) - times
        start = (np.arange(len(example)) - first[example]) * longest
        sizes = np.minimum(lengths[example].astype(np.int64) - start, longest)
        return Pieces(sizes.astype(np.uint32), example, start, len(long))
    kept = lengths.copy()
    kept[long] = longest if overflow == "truncate" else 0
    lost = int(extra.sum()) + (longest * len(long) if overflow == "drop" else 0)
    return Pieces(kept, overlong=len(long), lost=lost)
