"""Stream: the examples in the order in which a training script would read them."""

import dataclasses
from collections.abc import Iterator

import numpy as np

from pipeline.planning import lengths as lengths_lib
from pipeline.planning.order import Purpose, permutation, random_bits
from pipeline.planning.pieces import cut


@dataclasses.dataclass(frozen=True, eq=False)
class Stream:
    """Examples in a shuffled order, those with nothing to train on left out.

    Attributes:
        documents: their lengths; truncated or dropped, but not split, as `overflow` says.
        pieces: the lengths of what goes into rows, in the same order; where documents are split,
            their pieces follow one another.
    """

    documents: np.ndarray
    pieces: np.ndarray

    @property
    def cut(self) -> int:
        """How many documents are in more than one piece."""
        if self.documents is self.pieces:
            return 0
        return int(np.count_nonzero(self.documents > self.pieces.max(initial=0)))

    def first(self, count: int) -> "Stream":
        """The first `count` documents; the stream itself if it has no more."""
        if len(self.documents) <= count:
            return self
        documents = self.documents[:count]
        if self.documents is self.pieces:
            return Stream(documents, documents)
        size = int(documents.sum(dtype=np.int64))
        last = int(np.searchsorted(np.cumsum(self.pieces, dtype=np.int64), size)) + 1
        return Stream(documents, self.pieces[:last])

    def shards(self, hosts: int) -> Iterator["Stream"]:
        """The examples of each host when every one takes each `hosts`-th document."""
        for host in range(hosts):
            documents = self.documents[host::hosts]
            if self.documents is self.pieces:
                yield Stream(documents, documents)
            else:
                longest = int(self.pieces.max(initial=0))
                yield Stream(documents, _pieces(documents, longest, "split"))


def shuffled(lengths: np.ndarray, longest: int, overflow: str, seed: int) -> Stream:
    """The stream of all `lengths`, in an order that `seed` decides.

    >>> stream = shuffled(np.array([3, 0, 9, 2]), 4, "split", seed=0)
    >>> sorted(stream.documents.tolist()), sorted(stream.pieces.tolist())
    ([2, 3, 9], [1, 2, 3, 4, 4])

    Args:
        lengths: positions of each example.
        longest: positions of the longest row.
        overflow: what becomes of longer examples, as for `Plan`.
        seed: decides the order.
    """
    order = permutation(random_bits(seed, Purpose.EXAMPLES, len(lengths)))
    documents = np.empty(len(lengths), np.uint32)
    for start in range(0, len(order), lengths_lib.CHUNK):
        documents[start : start + lengths_lib.CHUNK] = lengths[
            order[start : start + lengths_lib.CHUNK]
        ]
    del order
    if overflow != "split":
        documents = _pieces(documents, longest, overflow)
    documents = documents[documents > 0]
    if int(documents.max(initial=0)) <= longest:
        return Stream(documents, documents)
    parts = [_pieces(part, longest, "split") for part in lengths_lib.chunks(documents)]
    return Stream(documents, np.concatenate(parts))


def _pieces(lengths: np.ndarray, longest: int, overflow: str) -> np.ndarray:
    """The lengths of all pieces, those of a document one after another."""
    pieces = cut(lengths, (longest,), overflow)
    sizes = pieces.sizes()
    if len(sizes) == len(lengths):
        return sizes
    documents, starts = pieces.locate(np.arange(len(sizes)))
    order = np.lexsort((np.broadcast_to(starts, len(sizes)), documents))
    return sizes[order]
