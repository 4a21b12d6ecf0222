"""The cache of windows, which threads may share."""

import collections
import contextlib
import threading
from collections.abc import Callable, Hashable
from concurrent.futures import CancelledError, Future
from typing import Any

from pipeline.fs.fork import Handles


class WindowCache(Handles):
    """Values made from the windows used last, which have up to `capacity` pieces.

    Any number of threads may use it. A thread that needs a value that another thread is making
    waits for it, so nothing is made twice. `capacity` may be changed.
    """

    handles = ("_held", "_entries")

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.__setstate__({})

    def restart(self) -> None:
        """Forgets all values, also those that threads are making; see `Handles`."""
        super().restart()
        self._held = 0
        # By key: the number of pieces, and the value made from them.
        self._entries: collections.OrderedDict[Hashable, tuple[int, Future[Any]]]
        self._entries = collections.OrderedDict()

    def get(self, key: Hashable, pieces: int, make: Callable[..., Any], *arguments: Any) -> Any:
        """The value of `key`, made by `make(*arguments)` if missing; it counts as `pieces`."""
        while True:
            try:
                return self._find_or_make(key, pieces, make, *arguments).result()
            except CancelledError:
                pass  # the thread that was making it was interrupted

    def prepare(self, key: Hashable, *making: Any) -> None:
        """Makes a value in the background, so that `get` need not wait; arguments as for `get`."""
        if key not in self._entries:
            work = threading.Thread(target=self._find_or_make, args=(key, *making), daemon=True)
            with contextlib.suppress(RuntimeError):  # no further thread can start
                work.start()

    def _find_or_make(
        self, key: Hashable, pieces: int, make: Callable[..., Any], *arguments: Any
    ) -> Future[Any]:
        with self._lock:
            if (entry := self._entries.get(key)) is not None:
                self._entries.move_to_end(key)
                return entry[1]
            future: Future[Any] = Future()
            self._entries[key] = entry = pieces, future
            self._held += pieces
            while self._held > self.capacity and len(self._entries) > 1:
                self._held -= self._entries.popitem(last=False)[1][0]
        try:
            future.set_result(make(*arguments))
        except BaseException as error:
            with self._lock:
                if self._entries.get(key) is entry:
                    del self._entries[key]
                    self._held -= pieces
            if not isinstance(error, Exception):
                future.cancel()
                raise
            future.set_exception(error)
        return future
