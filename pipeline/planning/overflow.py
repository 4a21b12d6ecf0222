"""What happens to examples that are longer than the longest bucket."""

import numpy as np

from pipeline.planning import lengths as lengths_lib

OVERFLOWS = ("split", "truncate", "drop", "error")


class Pieces:
    """The segments to be packed: each an example, or a piece of one.

    Numbers below that of examples are examples, or their first pieces; later pieces of split
    examples are numbered after them. Lengths are read where they lie and never copied whole.

    Attributes:
        longest: positions of the longest piece.
        overlong: how many examples are longer than the longest bucket.
        lost: how many of their positions are in no piece.
    """

    def __init__(self, lengths: np.ndarray, longest: int, overflow: str):
        self._lengths, self._limit, self._overflow = lengths, longest, overflow
        #: Positions of the longest example.
        self.longest_example = int(lengths.max(initial=0))
        self.overlong = self.lost = 0
        # Later pieces: the example, the first position and the length of each.
        self._later = np.zeros((3, 0), np.int64)
        if self.longest_example > longest:
            self._cut_overlong()
        self.longest = min(self.longest_example, longest)
        if overflow == "drop" and self.overlong:
            pieces = lengths_lib.pieces(lengths)
            self.longest = max(int(self._clipped(piece).max(initial=0)) for piece in pieces)

    def _cut_overlong(self):
        limit = self._limit
        found = [
            np.flatnonzero(piece > limit) + number * lengths_lib.PIECE
            for number, piece in enumerate(lengths_lib.pieces(self._lengths))
        ]
        examples = np.concatenate(found)
        sizes = self._lengths[examples].astype(np.int64)
        self.overlong = len(examples)
        if self._overflow == "error":
            raise ValueError(
                f"{len(examples):,} of {len(self._lengths):,} examples are longer than the longest "
                f"bucket's {limit:,} positions (example {examples[0]:,} has {sizes[0]:,}); give a "
                "longer bucket, or overflow='split', 'truncate' or 'drop'"
            )
        if self._overflow != "split":
            kept = limit if self._overflow == "truncate" else 0
            self.lost = int((sizes - kept).sum())
            return
        times = -(-sizes // limit) - 1
        example = np.repeat(examples, times)
        number = np.arange(len(example)) - np.repeat(np.cumsum(times) - times, times) + 1
        start = number * limit
        self._later = np.stack([example, start, np.minimum(np.repeat(sizes, times) - start, limit)])

    def _clipped(self, lengths: np.ndarray) -> np.ndarray:
        if not self.overlong:
            return lengths
        if self._overflow == "drop":
            return np.where(lengths > self._limit, 0, lengths)
        return np.minimum(lengths, self._limit)

    def __len__(self) -> int:
        return len(self._lengths) + self._later.shape[1]

    @property
    def max_position(self) -> int:
        """The largest position in a row; pieces of a split example go on where the last ended."""
        return (self.longest_example if self._overflow == "split" else self.longest) - 1

    @property
    def lengths(self) -> np.ndarray:
        """The lengths of all pieces, those of an example following one another; may be a copy."""
        times = np.ones(len(self._lengths), np.int64)
        np.add.at(times, self._later[0], 1)
        if not self._later.shape[1]:
            return self._clipped(self._lengths)
        lengths = np.repeat(self._clipped(self._lengths), times)
        first = np.cumsum(times) - times
        lengths[first[self._later[0]] + self._later[1] // self._limit] = self._later[2]
        return lengths

    def numbered(self) -> np.ndarray:
        """The lengths of all pieces by their numbers; may be a copy."""
        clipped = self._clipped(self._lengths)
        return np.concatenate([clipped, self._later[2]]) if self._later.shape[1] else clipped

    def blocks(self, numbers: np.ndarray, size: int) -> np.ndarray:
        """The lengths of some blocks of `size` pieces: [len(numbers), size], 0 after the last.

        Block `b` holds the pieces from `b · size` on.
        """
        whole = len(self._lengths) // size
        stored = self._lengths[: whole * size].reshape(whole, size)
        inside = numbers < whole
        if inside.all():
            return self._clipped(stored[numbers])
        found = np.zeros((len(numbers), size), np.int64)
        found[inside] = self._clipped(stored[numbers[inside]])
        rest = np.concatenate([self._clipped(self._lengths[whole * size :]), self._later[2]])
        rest = np.pad(rest, (0, -len(rest) % size)).reshape(-1, size)
        found[~inside] = rest[numbers[~inside] - whole]
        return found

    def positions_of(self, pieces: np.ndarray) -> np.ndarray:
        """The lengths of some pieces, by their numbers: int64 [len(pieces)]."""
        first = pieces < len(self._lengths)
        sizes = np.empty(len(pieces), np.int64)
        sizes[first] = self._clipped(self._lengths[pieces[first]])
        sizes[~first] = self._later[2, pieces[~first] - len(self._lengths)]
        return sizes

    def locate(self, pieces: np.ndarray) -> tuple[np.ndarray, np.ndarray | int]:
        """The example and the first position of each of `pieces`."""
        if not self._later.shape[1]:
            return pieces, 0
        example, start = pieces.copy(), np.zeros_like(pieces)
        later = np.flatnonzero(pieces >= len(self._lengths))
        number = pieces[later] - len(self._lengths)
        example[later], start[later] = self._later[0, number], self._later[1, number]
        return example, start

    def lengths_of(self, sizes: np.ndarray) -> np.ndarray:
        """Positions of pieces, from what they were packed by, their lengths: [len(sizes), 1]."""
        return sizes[:, None]


def cut(lengths: np.ndarray, longest: int, overflow: str) -> Pieces:
    """The pieces of all examples, none longer than `longest`.

    >>> pieces = cut(np.array([3, 10]), 4, "split")
    >>> pieces.lengths.tolist(), pieces.numbered().tolist()
    ([3, 4, 4, 2], [3, 4, 4, 2])
    >>> [part.tolist() for part in pieces.locate(np.arange(4))]
    [[0, 1, 1, 1], [0, 0, 4, 8]]

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
    return Pieces(lengths, longest, overflow)


def split_counts(counts: np.ndarray, longest: int) -> np.ndarray:
    """A histogram after all longer lengths are split: int64 [≤ longest + 1].

    >>> split_counts(np.array([0, 1, 0, 0, 0, 2]), 2).tolist()  # 5 = 2 + 2 + 1
    [0, 3, 4]
    """
    found = counts[: longest + 1].copy()
    over = np.arange(longest + 1, len(counts))
    if len(over):
        found[longest] += counts[over] @ (over // longest)
        np.add.at(found, over % longest, counts[over])
    return found
