"""Elements: what a host reads of its data set, holds until it is packed, and reads again.

An element has a number, in the order of the data set. The state of the data set is noted now and
then, so that the elements that are held can be read again, in another process too.
"""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import grain
import numpy as np

from pipeline.corpus.examples import Examples
from pipeline.corpus.interface import AnyCorpus
from pipeline.corpus.side import Side
from pipeline.errors import InvalidState, InvalidType, InvalidValue
from pipeline.text.features import TOKENS, Feature

# The state of the source is noted before every so many elements: it may take long to copy. As many
# elements at most are read in vain after a restore.
MARK = 32


class Elements:
    """The elements of a data set that a host has read and holds.

    Attributes:
        read: the number of elements that were read.
        ended: whether there are no more.
        held: the elements that are held, by their numbers, ascending.
        interrupted: whether a thread that reads one more must end, with an error.
    """

    def __init__(self, source: grain.DatasetIterator):
        self._source = source
        self.read, self.ended, self.interrupted = 0, False, False
        self.held: dict[int, dict[str, Any]] = {}
        # The number of an element, and the state of the source before it.
        self._marks: list[tuple[int, Any]] = []

    def note(self) -> None:
        """Notes the state of the source before the next element."""
        self._marks.append((self.read, copy.deepcopy(self._source.get_state())))

    def noted_before(self, oldest: int) -> tuple[int, Any]:
        """The last noted element up to `oldest`, and the state before it; forgets those earlier."""
        while len(self._marks) > 1 and self._marks[1][0] <= oldest:
            del self._marks[0]
        return self._marks[0]

    def fill(self, count: int) -> None:
        """Reads elements until `count` are held, or there are no more."""
        while len(self.held) < count and not self.ended:
            self._read(lambda number: True)

    def restore(self, first: int, state: Any, end: int, wanted: set[int]) -> None:
        """Goes back to element `first`, before which the source had a state, and reads to `end`.

        Holds the elements whose numbers are `wanted`.
        """
        self._source.set_state(copy.deepcopy(state))
        self.read, self.ended, self.held = first, False, {}
        self._marks = [(first, copy.deepcopy(state))]
        while self.read < end and not self.ended:
            self._read(wanted.__contains__)
        if self.ended:
            raise InvalidValue(
                f"the data set has {self.read:,} elements, fewer than the {end:,} that "
                "were read when the state was saved; give the same data set"
            )

    def _read(self, is_wanted: Callable[[int], bool]) -> None:
        """Reads the next element, and holds it if its number is wanted."""
        if self.interrupted:
            raise InvalidState("the iterator was closed or restored")
        if self.read % MARK == 0 and self._marks[-1][0] != self.read:
            self.note()
        try:
            element = next(self._source)
        except StopIteration:
            self.ended = True
            return
        number, self.read = self.read, self.read + 1
        if is_wanted(number):
            self.held[number] = as_entries(element)


class Numbered(AnyCorpus):
    """Examples under other numbers: those of the elements of a data set.

    Args:
        corpus: the examples.
        numbers: the number of each, ascending: int64 [examples].
    """

    def __init__(self, corpus: AnyCorpus, numbers: np.ndarray):
        self.lengths, self.loss = corpus.lengths, corpus.loss
        self.sides = {name: _NumberedSide(side, numbers) for name, side in corpus.sides.items()}


class _NumberedSide(Side):
    def __init__(self, side: Side, numbers: np.ndarray):
        self._side, self._numbers = side, numbers
        self.lengths, self.weighted, self.features = side.lengths, side.weighted, side.features

    def read(self, examples: Any, *more: Any, **options: Any) -> dict[str, np.ndarray]:
        return self._side.read(self._numbers.searchsorted(examples), *more, **options)

    def read_examples(
        self, examples: Any, features: Iterable[str] | None = None
    ) -> dict[str, np.ndarray]:
        return self._side.read_examples(self._numbers.searchsorted(examples), features)


def as_entries(element: Any) -> dict[str, Any]:
    """An element of a data set as a dict; others may use the memory of its arrays again."""
    given = element if isinstance(element, Mapping) else {TOKENS: element}
    return {
        n: entry.copy() if isinstance(entry, np.ndarray) else entry for n, entry in given.items()
    }


def make_examples(
    elements: Sequence[tuple[int, Mapping[str, Any]]], features: Mapping[str, Feature]
) -> AnyCorpus:
    """Elements with their numbers as examples; an error names the first that is none."""
    first, entries = elements[0]
    if {"inputs", "targets"} & {*entries} and TOKENS not in entries:
        raise InvalidValue(
            f"element {first:,} has {', '.join(map(str, entries))}: pairs, or tokens that are "
            "shifted already. A PackedStream shifts tokens itself: give {'tokens': ids}, marks "
            "included. Pairs need a corpus: pipeline.prepare_pairs"
        )
    for number, element in elements:
        if element.keys() != entries.keys():
            raise InvalidValue(
                f"element {number:,} has {', '.join(element)}, and element {first:,} "
                f"{', '.join(entries)}; give all elements the same entries"
            )
    try:
        columns = {name: [element[name] for _, element in elements] for name in entries}
        return Examples(columns, features=features)
    except (InvalidValue, InvalidType) as error:
        if len(elements) > 1:
            for numbered in elements:
                make_examples([numbered], features)
        name = f"element {first:,} is no example: " if len(elements) == 1 else ""
        raise type(error)(f"{name}{error}") from error
