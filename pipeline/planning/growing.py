"""Corpora that grow: sealed parts, whose lengths become known in order, in windows and chapters.

A window is a run of sealed parts. It closes at `options.window` pieces or, while the corpus is
small, at fewer, so that training can begin soon. `CHAPTER` windows are a chapter: a pass that gains
windows. Batches may span windows of a chapter, but not two chapters.

The plan never depends on which parts are sealed by now: a request for a window waits for its parts.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from pipeline.errors import InvalidValue
from pipeline.fs.fork import Handles
from pipeline.planning.cache import WindowCache
from pipeline.planning.lengths import NO_EXAMPLES, Lengths
from pipeline.planning.options import LEAST_WINDOW, WINDOW, Options
from pipeline.planning.pieces import Pieces
from pipeline.planning.stream import Pass, Stream

# Windows in a chapter.
CHAPTER = 64

# In a mixture, each corpus has this many example numbers, as its number of examples is not known.
APART = 1 << 40

# A window closes at 1 / GROWTH of the pieces before it, within LEAST_WINDOW and `options.window`.
GROWTH = 4


class Parts(Protocol):
    """The sealed parts of a corpus that grows, in order."""

    def lengths(self, number: int) -> np.ndarray | None:
        """The lengths of the examples of a part, as for `Plan`.

        Waits until it is sealed; None if the corpus is finished and has no such part.
        """
        ...

    def digest(self, number: int) -> str | None:
        """A digest of all parts before a part; None if they are not sealed. It does not wait."""
        ...

    def whole(self) -> Any:
        """The lengths of all examples of a finished corpus, or the corpus, as for `Lengths.of`."""
        ...


def begin_lengths(parts: Parts | Mapping[str, Any], options: Mapping[str, Any]) -> Any:
    """The lengths of the first window of a corpus that grows, to fit buckets to.

    For several corpora, by name; those that do not grow are returned unchanged. `options` must have
    `max_length`, as for `fit_buckets`, and may have `window`.
    """
    if isinstance(parts, Mapping):
        growing = {name: each for name, each in parts.items() if hasattr(each, "digest")}
        return {**parts, **{n: begin_lengths(each, options) for n, each in growing.items()}}
    if options.get("max_length") is None:
        raise InvalidValue(
            "neither max_length nor buckets is given, and the longest example of a corpus that "
            "grows is not known yet; give one of them, such as max_length=1024"
        )
    most = min(options.get("window", WINDOW), LEAST_WINDOW)
    room = tuple(np.ravel(options["max_length"]).tolist())
    found, pieces = list[np.ndarray](), 0
    while pieces < most and (lengths := parts.lengths(len(found))) is not None:
        found.append(lengths)
        pieces += len(Pieces(lengths, room, "split" if lengths.ndim == 1 else "truncate"))
    if not found:
        raise InvalidValue("the corpus is finished and has no examples")
    return np.concatenate(found)


@dataclasses.dataclass(frozen=True)
class Place:
    """A place between two parts of a corpus.

    Attributes:
        part: the number of parts before it.
        example: the number of examples before it.
        pieces: the number of pieces that these examples were cut into.
        digest: a digest of the parts before it, by `Parts.digest`.
    """

    part: int = 0
    example: int = 0
    pieces: int = 0
    digest: str = ""


@dataclasses.dataclass(frozen=True, eq=False)
class Window:
    """Parts of a chapter that are packed together, and their rows.

    Attributes:
        begin, end: the places before its first part and after its last.
        ends: whether the chapter ends with it.
        rows_before: int64 [lengths], the rows of the chapter before it.
        rows: int64 [lengths], its rows.
        size: the real positions in its rows, at least 1.
    """

    begin: Place
    end: Place
    ends: bool
    rows_before: np.ndarray
    rows: np.ndarray
    size: int = 1

    @property
    def rows_after(self) -> np.ndarray:
        """The rows of the chapter up to the end of the window: int64 [lengths]."""
        return self.rows_before + self.rows


class Chapter(Stream, Handles):
    """The stream of up to `CHAPTER` windows of a corpus that grows, which become known in order.

    Attributes:
        begin: the place where it begins.
        windows: the windows that are known by now.
    """

    handles = ("windows",)
    passes = ()  # each window has a pass, made when it is needed
    lengths = Lengths(NO_EXAMPLES)  # the parts have them
    epoch = 0

    def __init__(
        self,
        parts: Parts,
        options: Options,
        cache: WindowCache,
        *,
        name: str = "",
        first: int = 0,
        begin: Place | None = None,
    ):
        self._parts, self.options, self.cache = parts, options, cache
        self.name, self.first, self.begin = name, first, begin or Place()
        self.__setstate__({})

    def restart(self) -> None:
        """Forgets the windows; see `Handles`."""
        super().restart()
        self.windows: tuple[Window, ...] = ()

    @property
    def identity(self) -> dict[str, Any]:
        """As `Stream.identity`, but without the examples, which are not known."""
        return {"window": self.options.window, "chapter": CHAPTER}

    @property
    def max_position(self) -> int:  # type: ignore[override]  # an attribute of `Stream`
        """An upper bound on positions; for split examples, which have no limit, that of int32."""
        if self.options.overflow == "split":
            return (1 << 31) - 1
        return max(max(bucket.lengths) for bucket in self.options.buckets) - 1

    def window(self, number: int) -> Window | None:
        """A window, once its parts are sealed; None if the chapter ends before it."""
        while number >= len(windows := self.windows):
            with self._lock:
                if windows is self.windows:  # no other thread has planned it
                    if (found := self._plan_window(self.last(len(windows)))) is None:
                        return None
                    self.windows = (*windows, found)
        return windows[number]

    def last(self, windows: int) -> Window:
        """The last of the first `windows` windows; for 0, an empty window before the first."""
        if windows and (found := self.window(windows - 1)):
            return found
        none = np.zeros(len(self.options.groups), np.int64)
        return Window(self.begin, self.begin, False, none, none)

    def window_lengths(self, window: Window) -> np.ndarray:
        """The lengths of the examples of a window."""
        numbers = range(window.begin.part, window.end.part)
        lengths = [self._parts.lengths(number) for number in numbers]
        assert all(each is not None for each in lengths), "its parts are sealed"
        return np.concatenate(lengths)  # type: ignore[arg-type]

    def locate(self, length: int, row: int) -> tuple[Pass, int, int]:
        """As `Stream.locate`, with the pass of a window."""
        window = next(each for each in reversed(self.windows) if row >= each.rows_before[length])
        return self._pass(window), 0, row - int(window.rows_before[length])

    def _plan_window(self, before: Window) -> Window | None:
        """The window after another one; None at the end of the chapter or the corpus."""
        begin = before.end
        most = min(self.options.window, max(LEAST_WINDOW, begin.pieces // GROWTH))
        part, example, pieces = begin.part, begin.example, begin.pieces
        ends = len(self.windows) == CHAPTER - 1
        while pieces - begin.pieces < most and not before.ends:
            lengths = self._parts.lengths(part)
            if lengths is None:
                ends = True
                break
            part, example = part + 1, example + len(lengths)
            pieces += len(self._cut(Lengths(lengths)))
        if part == begin.part:
            return None
        digest = self._parts.digest(part)
        assert digest is not None, "its parts are sealed"
        end = Place(part, example, pieces, digest)
        found = Window(begin, end, ends, before.rows_after, 0 * before.rows)
        made = self._pass(found)
        return dataclasses.replace(found, rows=made.rows, size=max(made.size, 1))

    def _pass(self, window: Window) -> Pass:
        pieces = window.end.pieces - window.begin.pieces
        # Room for the two windows from which batches take rows, the next one, and their passes.
        self.cache.capacity = max(self.cache.capacity, 6 * pieces)
        return self.cache.get((self, window.begin), pieces, self._pack, window)

    def _pack(self, window: Window) -> Pass:
        pieces, begin = self._cut(Lengths(self.window_lengths(window))), window.begin
        chapter = window.rows_before, window.ends
        return Pass(self, pieces, "part", begin.part, first=begin.example, chapter=chapter)
