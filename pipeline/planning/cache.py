"""The cache of windows, which threads may share."""

import collections
import concurrent.futures
import threading
from collections.abc import Callable, Hashable
from typing import Any

from pipeline.fs.fork import Handles


class WindowCache(Handles):
    """What was made for the windows used last: up to `capacity` pieces.

    Any number of threads may use it. A thread that needs what another thread is making waits for
    it, so that nothing is made twice. `capacity` may be changed.
    """

    handles = ("_held", "_entries")

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.__setstate__({})

    def restart(self) -> None:
        """Forgets everything, also what a thread is making; see `Handles`."""
        super().restart()
        self._held = 0
        self._entries: collections.OrderedDict[Hashable, _Entry] = collections.OrderedDict()

    def get(self, key: Hashable, pieces: int, make: Callable[..., Any], *arguments: Any) -> Any:
        """What `make(*arguments)` returns for `key`, which stands for so many `pieces`."""
        entry, is_new = self._find_or_add(key, pieces)
        if entry.value is None:
            if is_new:
                self._fulfil(key, entry, make, arguments)
            return entry.future.result()
        return entry.value

    def prepare(
        self, key: Hashable, pieces: int, make: Callable[..., Any], *arguments: Any
    ) -> None:
        """Makes it in the background, so that `get` need not wait for it."""
        entry, is_new = self._find_or_add(key, pieces)
        if is_new:
            work = key, entry, make, arguments
            threading.Thread(target=self._fulfil, args=work, daemon=True).start()

    def _find_or_add(self, key: Hashable, pieces: int) -> "tuple[_Entry, bool]":
        """The entry of a key, and whether it is new, so that the caller must fulfil it."""
        with self._lock:
            if (found := self._entries.get(key)) is not None:
                self._entries.move_to_end(key)
                return found, False
            found = self._entries[key] = _Entry(pieces)
            self._held += pieces
            while self._held > self.capacity and len(self._entries) > 1:
                self._held -= self._entries.popitem(last=False)[1].pieces
        return found, True

    def _fulfil(
        self, key: Hashable, entry: "_Entry", make: Callable[..., Any], arguments: Any
    ) -> None:
        try:
            entry.value = make(*arguments)
            entry.future.set_result(entry.value)
        except BaseException as error:
            with self._lock:
                if self._entries.get(key) is entry:
                    del self._entries[key]
                    self._held -= entry.pieces
            entry.future.set_exception(error)


class _Entry:
    """What was made, as soon as it is; others wait for the future."""

    def __init__(self, pieces: int):
        self.pieces, self.value = pieces, None
        self.future: concurrent.futures.Future[Any] = concurrent.futures.Future()
