"""Streams: examples in the order in which a training script would read them."""

import dataclasses
import functools
from collections.abc import Iterator

import numpy as np

from pipeline.planning.order import Purpose, permutation, random_bits


@dataclasses.dataclass(frozen=True, eq=False)
class Stream:
    """Lengths of examples in the order of reading.

    >>> Stream(np.array([3, 9, 2]), longest=4).pieces.tolist()
    [3, 4, 4, 1, 2]

    Attributes:
        documents: the length of each example, int64 [n], none of them 0.
        longest: positions in a row; a longer document is split into pieces.
        scale: the size of the data as a multiple of this stream; above 1 for a sample.
    """

    documents: np.ndarray
    longest: int
    scale: float = 1.0

    @functools.cached_property
    def pieces(self) -> np.ndarray:
        """The lengths that go into rows: int64 [pieces], in the order of the documents."""
        numbers = -(-self.documents // self.longest)
        pieces = np.full(int(numbers.sum()), self.longest, np.int64)
        pieces[np.cumsum(numbers) - 1] = self.documents - (numbers - 1) * self.longest
        return pieces

    @property
    def cut(self) -> int:
        """How many documents are split into several pieces."""
        return int(np.count_nonzero(self.documents > self.longest))

    def shards(self, hosts: int) -> Iterator["Stream"]:
        """The stream of each host, where host h reads every `hosts`-th document from h on."""
        for host in range(hosts):
            yield Stream(self.documents[host::hosts], self.longest, self.scale)


def draw(lengths: np.ndarray, sample: int, seed: int) -> np.ndarray:
    """All lengths in a random order; where there are more than `sample`, a random sample.

    A sample is drawn with replacement, so that its cost does not depend on the size of the data.
    """
    count = len(lengths)
    if count <= sample:
        return np.asarray(lengths)[permutation(random_bits(seed, Purpose.EXAMPLES, count))]
    bits = random_bits(seed, Purpose.EXAMPLES, sample)
    return np.asarray(lengths)[(bits % np.uint64(count)).astype(np.int64)]


def stream_of(
    lengths: np.ndarray, longest: int, overflow: str | None, scale: float = 1.0
) -> Stream:
    """The stream of these lengths, without empty ones.

    >>> stream_of(np.array([3, 0, 9, 2]), 4, "truncate").documents.tolist()
    [3, 4, 2]

    Documents longer than `longest`, the positions in a row, are split, truncated or dropped, as
    the `overflow` of `Plan` says.
    """
    documents = lengths.astype(np.int64)
    if overflow == "truncate":
        documents = np.minimum(documents, longest)
    elif overflow == "drop":
        documents = documents[documents <= longest]
    return Stream(documents[documents > 0], longest, scale)
