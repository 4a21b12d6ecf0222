"""Corpora that grow: sealed parts, whose lengths become known in order, in windows and chapters.

A window is a run of sealed parts. It closes at `options.window` pieces or, in a corpus that has few
yet, at fewer, so that the first one is there soon. `CHAPTER` windows are a chapter: a pass that
gains windows. Rows run on from window to window, and end with the chapter.

Nothing depends on which parts are sealed by now: a window that is asked for is waited for.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from pipeline.errors import InvalidValue
from pipeline.planning.cache import WindowCache
from pipeline.planning.layout import Layout
from pipeline.planning.options import LEAST_WINDOW, WINDOW, Options
from pipeline.planning.order import random_key
from pipeline.planning.pieces import cut
from pipeline.planning.stream import Pass, Rows, make_packer, pack_into
from pipeline.planning.tails import group_tails

# Windows in a chapter.
CHAPTER = 64

# In a mixture, numbers of the examples of one corpus and the next: nobody knows how many there are.
APART = 1 << 40

# A window closes at this share of the pieces before it, if that is less than `options.window`.
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
        """The lengths of all examples of a finished corpus, or the corpus, as for `Plan`."""
        ...


def begin_lengths(parts: Parts, options: Mapping[str, Any]) -> np.ndarray:
    """The lengths of the first window of a corpus that grows, to fit buckets to.

    `options` may have a `window` and a `max_length`, as for `fit_buckets`.
    """
    most = min(options.get("window", WINDOW), LEAST_WINDOW)
    room = tuple(np.ravel(options["max_length"]).tolist())
    found, pieces = list[np.ndarray](), 0
    while pieces < most and (lengths := parts.lengths(len(found))) is not None:
        found.append(lengths)
        pieces += len(cut(lengths, room, "split" if lengths.ndim == 1 else "truncate"))
    if not found:
        raise InvalidValue("the corpus is finished and has no examples")
    return np.concatenate(found)


@dataclasses.dataclass(frozen=True)
class Place:
    """A place between two parts: what is before it.

    Attributes:
        part: the number of parts.
        example: the number of examples.
        pieces: the number of pieces that these were cut into.
        digest: that of `Parts`.
    """

    part: int = 0
    example: int = 0
    pieces: int = 0
    digest: str = ""


@dataclasses.dataclass(frozen=True, eq=False)
class Window:
    """Some parts that are packed together, and their rows after the rows of a chapter before them.

    Attributes:
        begin, end: the places of its first and its last part.
        ends: whether the chapter ends with it.
        rows_before: int64 [lengths], the rows of the chapter before it.
        rows, real: int64 [lengths], its rows, and real positions in them.
    """

    begin: Place
    end: Place
    ends: bool
    rows_before: np.ndarray
    rows: np.ndarray
    real: np.ndarray


class Chapter:
    """The rows of some windows of a corpus that grows, as of a stream; it gains windows.

    Attributes:
        passes: none; those of its windows are made when they are needed.
        name: the name of the corpus; empty if it is the only one.
        first: the number of its first example in the plan.
        begin: where it begins.
        windows: those that it has by now; only `gain` adds one.
        over: whether it gains no more.
    """

    passes: tuple[Pass, ...] = ()

    def __init__(
        self,
        parts: Parts,
        options: Options,
        cache: WindowCache,
        *,
        name: str = "",
        first: int = 0,
        by_row: bool = False,
        begin: Place | None = None,
    ):
        self._parts, self._options, self._cache, self._by_row = parts, options, cache, by_row
        self.name, self.first, self.begin = name, first, begin or Place()
        self.windows: tuple[Window, ...] = ()
        self.over = False
        self._buckets = options.buckets
        if by_row:
            self._buckets = tuple(dataclasses.replace(each, rows=1) for each in options.buckets)

    @property
    def end(self) -> Place:
        """The place of the last window."""
        return self.windows[-1].end if self.windows else self.begin

    @property
    def rows(self) -> np.ndarray:
        """The rows of all windows: int64 [lengths]."""
        if not self.windows:
            return np.zeros(len(self._options.groups), np.int64)
        return self.windows[-1].rows_before + self.windows[-1].rows

    @property
    def real(self) -> np.ndarray:
        """The real positions in these: int64 [lengths]."""
        each = [window.real for window in self.windows]
        return np.sum(each, axis=0) if each else 0 * self.rows

    def gain(self) -> bool:
        """Adds the next window, once its parts are sealed; whether there is one."""
        if self.over:
            return False
        window = self._plan_window()
        if window is not None:
            self.windows = (*self.windows, window)
        self.over = window is None or window.ends
        return window is not None

    def take(
        self, cache: WindowCache, bucket: int, first: int, count: int, last_epoch: float
    ) -> Any:
        """Rows `first` to `first + count` of a bucket, counted from the chapter's beginning.

        As `Stream.take`.
        """
        windows = self.windows
        while count:
            number = len(windows) - 1
            while first < windows[number].rows_before[bucket]:
                number -= 1
            window = windows[number]
            end = int(window.rows_before[bucket] + window.rows[bucket])
            of_window = self._pass(window.begin, window.end, window.ends, window.rows_before)
            some: Rows = of_window.take(
                cache, 0, bucket, first, min(count, end - first), last_epoch
            )
            yield some
            first, count = first + len(some), count - len(some)

    def _plan_window(self) -> Window | None:
        """The next window; None at the end of the corpus."""
        begin = self.end
        most = min(self._options.window, max(LEAST_WINDOW, begin.pieces // GROWTH))
        part, example, pieces = begin.part, begin.example, begin.pieces
        ends = len(self.windows) == CHAPTER - 1
        while pieces - begin.pieces < most:
            lengths = self._parts.lengths(part)
            if lengths is None:
                ends = True
                break
            part, example = part + 1, example + len(lengths)
            pieces += len(self._cut(lengths))
        if part == begin.part:
            return None
        digest = self._parts.digest(part)
        assert digest is not None, "its parts are sealed"
        end, rows_before = Place(part, example, pieces, digest), self.rows
        layout = self._pass(begin, end, ends, rows_before).layout
        rows, real = layout.rows[:, 0], layout.real[:, 0]
        return Window(begin, end, ends, rows_before, rows, real)

    def _pass(self, begin: Place, end: Place, ends: bool, rows_before: np.ndarray) -> Pass:
        """The pass of a window."""
        pieces = end.pieces - begin.pieces
        # Two windows of which batches take rows, the one to come, and their slots.
        self._cache.capacity = max(self._cache.capacity, 9 * pieces)
        return self._cache.get(
            (self, begin), pieces, self._make_pass, begin, end, ends, rows_before
        )

    def _make_pass(self, begin: Place, end: Place, ends: bool, rows_before: np.ndarray) -> Pass:
        options, every = self._options, self._buckets
        lengths = [self._parts.lengths(number) for number in range(begin.part, end.part)]
        assert all(each is not None for each in lengths), "its parts are sealed"
        pieces = self._cut(np.concatenate(lengths))  # type: ignore[arg-type]
        search, _ = make_packer(pieces, every, options, lambda name, make: make())
        key = random_key(options.seed, self.name, "part", begin.part)
        layout = Layout(
            pieces,
            functools.partial(pack_into, search, every, every, options),
            group_tails(every),
            key=None,
            window=max(len(pieces), 1),
            rows_before=rows_before,
            ends=ends,
        )
        return Pass(
            layout,
            options,
            key,
            first_epoch=0,
            by_row=self._by_row,
            first=begin.example,
            repeats=False,
        )

    def _cut(self, lengths: np.ndarray) -> Any:
        return cut(lengths, self._options.buckets[-1].lengths, self._options.overflow)
