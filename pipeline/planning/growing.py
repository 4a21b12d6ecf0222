"""Corpora that grow: sealed parts, whose lengths become known in order, and their windows.

A window is a run of sealed parts. It closes at `options.window` pieces or, while the corpus is
small, at fewer, so that training can begin soon. A stream takes windows in order, `CHAPTER` of them
to a chapter. Batches may span windows of a chapter, but not two chapters: so the last rows of a
length that becomes rare are not held back for ever, and a resumed run plans one chapter again.

The plan never depends on which parts are sealed by now: a request for a window waits for its parts.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pipeline.errors import InvalidValue
from pipeline.planning.bucket import PAIR
from pipeline.planning.lengths import Exclude, Parts
from pipeline.planning.options import LEAST_WINDOW, WINDOW, Options, by_side
from pipeline.planning.pieces import Pieces

# Windows in a chapter.
CHAPTER = 64

# In a mixture, each corpus has this many example numbers, as its number of examples is not known.
APART = 1 << 40

# A window closes at 1 / GROWTH of the pieces before it, within LEAST_WINDOW and `options.window`.
GROWTH = 4


def first_examples(rooms: Sequence[int]) -> np.ndarray:
    """The number of each corpus's first example, then the total: int64 [rooms + 1].

    `rooms` are their numbers of examples; `APART` is that of one which grows, and then of each.
    """
    return np.cumsum([0, *([APART] * len(rooms) if APART in rooms else rooms)])


def refuse_exclude(exclude: Exclude) -> None:
    """Refuses examples to leave out of a corpus that grows."""
    if callable(exclude) or np.size(np.asarray(exclude)):
        raise InvalidValue(
            "exclude cannot be given while a corpus grows; corpus.split() holds out a share"
        )


def begin_lengths(parts: Parts | Mapping[str, Any], options: Mapping[str, Any]) -> Any:
    """The lengths of the first window of a corpus that grows, to fit buckets to.

    For several corpora, by name; those that do not grow are returned unchanged. `options` must have
    `max_length`, as for `fit_buckets`, and may have `window`.
    """
    refuse_exclude(options.get("exclude", ()))
    if isinstance(parts, Mapping):
        growing = {name: each for name, each in parts.items() if isinstance(each, Parts)}
        return {**parts, **{n: begin_lengths(each, options) for n, each in growing.items()}}
    if options.get("max_length") is None:
        raise InvalidValue(
            "neither max_length nor buckets is given, and the longest example of a corpus that "
            "grows is not known yet; give one of them, such as max_length=1024"
        )
    most = min(options.get("window", WINDOW), LEAST_WINDOW)
    found, pieces = list[np.ndarray](), 0
    while pieces < most and (lengths := parts.lengths(len(found))) is not None:
        found.append(lengths)
        room = by_side("max_length", options["max_length"], PAIR[: lengths.ndim])
        pieces += len(Pieces(lengths, room, "split" if lengths.ndim == 1 else "truncate"))
    if not found:
        raise InvalidValue("the corpus is finished and has no examples")
    return np.concatenate(found)


@dataclasses.dataclass(frozen=True)
class Place:
    """A place between two parts of a corpus."""

    part: int = 0  # the number of parts before it
    example: int = 0  # the number of examples before it
    pieces: int = 0  # the number of pieces that these examples were cut into
    digest: str = ""  # of the parts before it, by `Parts.digest`

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> "Place":
        """The place from JSON that may have its attributes, and others."""
        names = [each.name for each in dataclasses.fields(cls)]
        return cls(**{name: given[name] for name in names if name in given})


def cut_parts(parts: Parts, numbers: range, options: Options) -> Pieces:
    """The pieces of the examples in some sealed parts."""
    lengths = [parts.lengths(number) for number in numbers]
    assert all(each is not None for each in lengths), "the parts are sealed"
    every: np.ndarray = np.concatenate(lengths)  # type: ignore[arg-type]
    return options.cut(every)


def find_window(parts: Parts, begin: Place, options: Options) -> tuple[Place, bool]:
    """Where the window that begins at a place ends, and whether the corpus is known to end there.

    Waits until its parts are sealed. If the corpus ends at `begin`, the window has no parts.
    """
    most = min(options.window, max(LEAST_WINDOW, begin.pieces // GROWTH))
    part, example, pieces = begin.part, begin.example, begin.pieces
    while pieces - begin.pieces < most:
        if (lengths := parts.lengths(part)) is None:
            break
        part, example = part + 1, example + len(lengths)
        pieces += len(options.cut(lengths))
    if part == begin.part:
        return begin, True
    digest = parts.digest(part)
    assert digest is not None, "the parts are sealed"
    return Place(part, example, pieces, digest), pieces - begin.pieces < most


def require_past(parts: Parts, number: int, then: str) -> None:
    """Raises an error if the first `number` parts of a corpus do not have the digest `then`."""
    if (now := parts.digest(number)) is None:
        raise InvalidValue(
            f"the state is of a corpus with {number:,} parts or more, and this one has fewer; it "
            "was cut short or replaced. Put back the parts that are missing, or start anew in "
            "another directory"
        )
    if now != then:
        raise InvalidValue(
            f"the first {number:,} parts of the corpus are no longer what the state was trained "
            f"on: their digest was {then} and is now {now}. Put them back, or start anew in "
            "another directory"
        )
