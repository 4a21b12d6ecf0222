"""The pairs to be packed, each known by the number of its size."""

import numpy as np

OVERFLOWS = ("truncate", "drop", "error")


class PairPieces:
    """The pairs to be packed: each an example, never a piece of one.

    What packs and deals pairs knows their sizes by number, as it knows examples of one length by
    their length. Of every example the number is kept, four bytes.

    >>> pieces = PairPieces(np.array([[3, 1], [9, 9], [2, 4], [3, 1], [5, 0]]), (8, 4), "drop")
    >>> pieces.sizes.tolist()  # number 0: nothing to train on
    [[0, 0], [3, 1], [2, 4]]
    >>> pieces.numbered().tolist()
    [1, 0, 2, 1, 0]

    Args:
        lengths: inputs and targets of each example, integers [n, 2]; without targets there is
            nothing to train on.
        room: what the longest bucket holds, of inputs and of targets.
        overflow: "truncate" each side to what that holds, "drop" the example, or "error".

    Attributes:
        longest: the highest number of a size.
        sizes: int64 [longest + 1, 2], ascending by what they take of a row of the longest bucket.
        overlong: how many examples the longest bucket does not hold.
        lost: how many of their positions are in no batch.

    Raises:
        ValueError: `overflow` is none of these, or is "error" and an example is too long.
    """

    def __init__(self, lengths: np.ndarray, room: tuple[int, int], overflow: str):
        if overflow not in OVERFLOWS:
            why = "a target cut in two would lose its inputs; " if overflow == "split" else ""
            raise ValueError(
                f"overflow is {overflow!r}; {why}for pairs it must be one of {', '.join(OVERFLOWS)}"
            )
        empty = lengths[:, 1] == 0
        over = ((lengths[:, 0] > room[0]) | (lengths[:, 1] > room[1])) & ~empty
        self.overlong = int(np.count_nonzero(over))
        if self.overlong and overflow == "error":
            first = int(over.argmax())
            raise ValueError(
                f"{self.overlong:,} of {len(lengths):,} pairs are longer than the longest bucket's "
                f"{room[0]:,} and {room[1]:,} positions (example {first:,} has "
                f"{' and '.join(f'{length:,}' for length in lengths[first].tolist())}); give a "
                "longer bucket, or overflow='truncate' or 'drop'"
            )
        clipped = np.minimum(lengths, room).astype(np.int64)
        if overflow == "drop":
            clipped[over] = 0
        self.lost = int((lengths[over] - clipped[over]).sum()) if self.overlong else 0
        clipped[empty] = 0
        taken = clipped[:, 0] * room[1] + clipped[:, 1] * room[0]
        order = np.lexsort((clipped[:, 0], taken))  # both together say what the targets are
        ordered = clipped[order]
        new = np.ones(len(order), bool)
        new[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
        if some := len(order) == 0 or ordered[0].any():  # no example has nothing to train on
            ordered, new = np.pad(ordered, ((1, 0), (0, 0))), np.pad(new, (1, 0), constant_values=1)
        self.sizes = ordered[new]
        self.longest = len(self.sizes) - 1
        self._numbers = np.empty(len(lengths), np.uint32)
        self._numbers[order] = (np.cumsum(new) - 1)[int(some) :]

    def __len__(self) -> int:
        return len(self._numbers)

    @property
    def max_position(self) -> int:
        """The largest position in a row, of either side."""
        return int(self.sizes.max()) - 1

    def numbered(self) -> np.ndarray:
        """The number of the size of each example: uint32 [n]."""
        return self._numbers

    def blocks(self, numbers: np.ndarray, size: int) -> np.ndarray:
        """The same for some blocks of `size` examples: [len(numbers), size], 0 after the last."""
        examples = numbers[:, None] * size + np.arange(size)
        known = self._numbers[np.minimum(examples, len(self) - 1)]
        return np.where(examples < len(self), known, 0)

    def locate(self, pieces: np.ndarray) -> tuple[np.ndarray, int]:
        """The example and the first position of each of `pieces`."""
        return pieces, 0

    def positions_of(self, pieces: np.ndarray) -> np.ndarray:
        """Inputs and targets of some examples: int64 [len(pieces), 2]."""
        return self.sizes[self._numbers[pieces]]

    def lengths_of(self, numbers: np.ndarray) -> np.ndarray:
        """Inputs and targets of sizes: int64 [len(numbers), 2]."""
        return self.sizes[numbers]
