"""Pieces: what is packed. Each is an example, or a part of one that is longer than every bucket.

The only place that knows the overflow rule: what an example longer than the longest bucket loses,
and what an epoch therefore owes.
"""

import dataclasses

import numpy as np

from pipeline.planning import lengths as lengths_lib

OVERFLOWS = ("split", "truncate", "drop", "error")


class Pieces:
    """The pieces of some examples. Packing knows a piece by its size, a number.

    Of examples of one length the size is the length; of pairs it is the number of a line in a
    table. Numbers of pieces below that of examples are examples, or their first pieces; later
    pieces of split examples are numbered after them. Lengths are read where they lie and never
    copied whole.

    Args:
        stored: the size of each example.
        overlong: the examples that the longest bucket does not hold: int64, ascending.
        lost: how many of their positions are in no piece.
        clip: sizes above the first number are the second. None: as they are.
        later: example, first position and size of each later piece: int64 [3, later pieces].
        longest: the largest size, where it is known.
        table: of pairs, inputs and targets of each size: int64 [longest + 1, 2].

    Attributes:
        overlong, lost: as given.
        longest: the largest size.
        max_position: the largest position of any piece in its example.
    """

    def __init__(
        self,
        stored: np.ndarray,
        overlong: np.ndarray = lengths_lib.NONE,
        lost: int = 0,
        *,
        clip: tuple[int, int] | None = None,
        later: np.ndarray | None = None,
        table: np.ndarray | None = None,
        longest: int | None = None,
    ):
        self._stored, self.overlong, self.lost = stored, overlong, lost
        self._clip, self.table = clip, table
        self._later = np.zeros((3, 0), np.int64) if later is None else later
        if longest is None:
            parts = lengths_lib.pieces(stored)
            longest = max((int(self._clipped(part).max()) for part in parts), default=0)
        self.longest = longest
        self.max_position = (self.longest if table is None else int(table.max())) - 1
        if later is not None:  # later pieces go on counting
            self.max_position = int((later[1] + later[2]).max()) - 1

    def _clipped(self, sizes: np.ndarray) -> np.ndarray:
        return (
            sizes if self._clip is None else np.where(sizes > self._clip[0], self._clip[1], sizes)
        )

    def __len__(self) -> int:
        return len(self._stored) + self._later.shape[1]

    def numbered(self) -> np.ndarray:
        """The size of every piece, by its number; may be a copy."""
        clipped = self._clipped(self._stored)
        return np.concatenate([clipped, self._later[2]]) if self._later.shape[1] else clipped

    def blocks(self, numbers: np.ndarray, size: int) -> np.ndarray:
        """The sizes of some blocks of `size` pieces: [len(numbers), size], 0 after the last.

        Block `b` holds the pieces from `b · size` on.
        """
        whole = len(self._stored) // size
        stored = self._stored[: whole * size].reshape(whole, size)
        inside = numbers < whole
        if inside.all():
            return self._clipped(stored[numbers])
        found = np.zeros((len(numbers), size), np.int64)
        found[inside] = self._clipped(stored[numbers[inside]])
        rest = np.concatenate([self._clipped(self._stored[whole * size :]), self._later[2]])
        rest = np.pad(rest, (0, -len(rest) % size)).reshape(-1, size)
        found[~inside] = rest[numbers[~inside] - whole]
        return found

    def locate(self, pieces: np.ndarray) -> tuple[np.ndarray, np.ndarray | int]:
        """The example and the first position of each of `pieces`."""
        if not self._later.shape[1]:
            return pieces, 0
        example, start = pieces.copy(), np.zeros_like(pieces)
        later = np.flatnonzero(pieces >= len(self._stored))
        number = pieces[later] - len(self._stored)
        example[later], start[later] = self._later[0, number], self._later[1, number]
        return example, start

    def positions(self, sizes: np.ndarray) -> np.ndarray:
        """The positions of pieces of these sizes: int64 [len(sizes), 1], of pairs [len, 2]."""
        return sizes[:, None] if self.table is None else self.table[sizes]

    def positions_of(self, pieces: np.ndarray) -> np.ndarray:
        """The positions of some pieces, by their numbers: int64 [len(pieces), 1 or 2]."""
        first = pieces < len(self._stored)
        sizes = np.empty(len(pieces), np.int64)
        sizes[first] = self._clipped(self._stored[pieces[first]])
        sizes[~first] = self._later[2, pieces[~first] - len(self._stored)]
        return self.positions(sizes)

    def due(self) -> np.ndarray:
        """The positions of each example that are in a piece: int64 [examples, 1 or 2]."""
        found = self.positions(self._clipped(self._stored).astype(np.int64))
        np.add.at(found, self._later[0], self._later[2][:, None])
        return found


def cut(lengths: np.ndarray, room: tuple[int, ...], overflow: str) -> Pieces:
    """The pieces of all examples, none longer than `room`.

    >>> pieces = cut(np.array([3, 10]), (4,), "split")
    >>> pieces.numbered().tolist()
    [3, 4, 4, 2]
    >>> [part.tolist() for part in pieces.locate(np.arange(4))]
    [[0, 1, 1, 1], [0, 0, 4, 8]]

    Args:
        lengths: positions of each example, integers `[n]`, of pairs `[n, 2]`.
        room: positions in a row of the longest bucket; of pairs, of inputs and of targets.
        overflow: "split" into pieces that lose nothing (not for pairs), "truncate" to the first
            positions, "drop" the example, or "error".

    Raises:
        ValueError: `overflow` is "error" and an example is too long.
    """
    if lengths.ndim == 2:
        return _cut_pairs(lengths, room, overflow)
    (limit,) = room
    longest = int(lengths.max(initial=0))
    if longest <= limit:
        return Pieces(lengths, longest=longest)
    found = [
        np.flatnonzero(part > limit) + number * lengths_lib.PIECE
        for number, part in enumerate(lengths_lib.pieces(lengths))
    ]
    overlong = np.concatenate(found)
    if overflow == "error":
        _refuse(lengths, overlong, room)
    sizes = lengths[overlong].astype(np.int64)
    if overflow != "split":
        instead = limit if overflow == "truncate" else 0
        lost = int((sizes - instead).sum())
        return Pieces(lengths, overlong, lost, clip=(limit, instead))
    times = -(-sizes // limit) - 1
    example = np.repeat(overlong, times)
    number = np.arange(len(example)) - np.repeat(np.cumsum(times) - times, times) + 1
    start = number * limit
    later = np.stack([example, start, np.minimum(np.repeat(sizes, times) - start, limit)])
    return Pieces(lengths, overlong, clip=(limit, limit), later=later)


def _cut_pairs(lengths: np.ndarray, room: tuple[int, ...], overflow: str) -> Pieces:
    """As `cut`, for pairs: each is one piece. Without targets there is nothing to train on.

    Sizes ascend by what they take of a row of the longest bucket; 0 is of pairs with nothing to
    train on.

    >>> pieces = _cut_pairs(np.array([[3, 1], [9, 9], [2, 4], [3, 1], [5, 0]]), (8, 4), "drop")
    >>> pieces.table.tolist(), pieces.numbered().tolist()
    ([[0, 0], [3, 1], [2, 4]], [1, 0, 2, 1, 0])
    """
    empty = lengths[:, 1] == 0
    over = (lengths > room).any(axis=1) & ~empty
    overlong = np.flatnonzero(over)
    if len(overlong) and overflow == "error":
        _refuse(lengths, overlong, room)
    clipped = np.minimum(lengths, room).astype(np.int64)
    if overflow == "drop":
        clipped[over] = 0
    lost = int((lengths[over] - clipped[over]).sum()) if len(overlong) else 0
    clipped[empty] = 0
    taken = clipped[:, 0] * room[1] + clipped[:, 1] * room[0]
    order = np.lexsort((clipped[:, 0], taken))  # both together say what the targets are
    ordered = np.pad(clipped[order], ((1, 0), (0, 0)))  # size 0 is there in any case
    new = (ordered[1:] != ordered[:-1]).any(axis=1)
    numbers = np.empty(len(lengths), np.uint32)
    numbers[order] = np.cumsum(new)
    return Pieces(numbers, overlong, lost, table=ordered[np.append(True, new)])


def _refuse(lengths: np.ndarray, overlong: np.ndarray, room: tuple[int, ...]) -> None:
    seen, most = (
        " and ".join(f"{n:,}" for n in np.ravel(of)) for of in (lengths[overlong[0]], room)
    )
    others = "'split', 'truncate' or 'drop'" if lengths.ndim == 1 else "'truncate' or 'drop'"
    raise ValueError(
        f"{len(overlong):,} of {len(lengths):,} {'pairs' if lengths.ndim == 2 else 'examples'} are "
        f"longer than the longest bucket's {most} positions (example {overlong[0]:,} has {seen}); "
        f"give a longer bucket, or overflow={others}"
    )


@dataclasses.dataclass(frozen=True)
class Runs:
    """Runs of positions of some examples; what the remainder of an epoch is planned from.

    Attributes:
        examples: the example of each run, int64 [n].
        starts: its first position in the example, int64 [n].
        sizes: its positions, int64 [n, 1]; of pairs [n, 2], of inputs and targets.
        epochs: the epoch that it belongs to, int64 [n].
    """

    examples: np.ndarray
    starts: np.ndarray
    sizes: np.ndarray
    epochs: np.ndarray

    def __len__(self) -> int:
        return len(self.examples)

    @property
    def lengths(self) -> np.ndarray:
        """The sizes as lengths that a plan is made from: uint32 [n], of pairs [n, 2]."""
        sizes = self.sizes.astype(np.uint32)
        return sizes if sizes.shape[1] == 2 else sizes[:, 0]

    @classmethod
    def none(cls, sides: int) -> "Runs":
        """No runs, of examples that have so many sides."""
        none = np.zeros(0, np.int64)
        return cls(none, none, np.zeros((0, sides), np.int64), none)

    def take(self, chosen: np.ndarray) -> "Runs":
        """Some of the runs: their numbers, or a bool for each."""
        return Runs(*(getattr(self, field.name)[chosen] for field in dataclasses.fields(self)))

    def with_sizes(self, sizes: np.ndarray) -> "Runs":
        """The same runs with other sizes."""
        return dataclasses.replace(self, sizes=sizes)

    @classmethod
    def concatenate(cls, parts: list["Runs"]) -> "Runs":
        """The runs of all parts, one after another."""
        parts = [part for part in parts if len(part)] or parts[:1]
        if len(parts) == 1:
            return parts[0]
        fields = [field.name for field in dataclasses.fields(cls)]
        return cls(*(np.concatenate([getattr(p, field) for p in parts]) for field in fields))

    def merged(self) -> "Runs":
        """The runs by epoch, example and start; those that follow one another are one.

        So longer buckets take whole what shorter ones had split.

        >>> some = np.array([7, 3, 7]), np.array([8, 0, 4]), np.array([[2], [5], [4]])
        >>> runs = Runs(*some, np.zeros(3, np.int64)).merged()
        >>> runs.examples.tolist(), runs.starts.tolist(), runs.lengths.tolist()
        ([3, 7], [0, 4], [5, 6])
        """
        in_order = (np.diff(self.epochs) > 0) | (np.diff(self.examples) > 0)
        if in_order.all() and (np.diff(self.epochs) >= 0).all():
            return self
        runs = self.take(np.lexsort((self.starts, self.examples, self.epochs)))
        if self.sizes.shape[1] == 2:  # pairs are whole examples
            return runs
        follows = (np.diff(runs.examples) == 0) & (np.diff(runs.epochs) == 0)
        follows &= runs.starts[:-1] + runs.sizes[:-1, 0] == runs.starts[1:]
        first = np.flatnonzero(np.append(True, ~follows))
        return runs.take(first).with_sizes(np.add.reduceat(runs.sizes, first))


def trained(lengths: np.ndarray) -> np.ndarray:
    """Positions to train on, int64 [n, 1 or 2]; none of pairs without targets."""
    sizes = lengths.astype(np.int64)
    sizes = sizes if sizes.ndim == 2 else sizes[:, None]
    return np.where(sizes[:, -1:] > 0, sizes, 0)
