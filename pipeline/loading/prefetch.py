"""Prefetch: the elements of consecutive steps, made ahead in threads that nobody has to wait for.

What a thread makes may never come: a transform sleeps, a read stalls. So nothing here waits for a
thread without a limit. A thread that was told to end does so with the element that it makes.
"""

import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from pipeline.errors import InvalidState, InvalidValue, Late

T = TypeVar("T")

# Seconds to wait for a thread that was told to end: one in a batch ends in a moment, and one
# that waits for a disk may never end, which must not keep the program.
AT_MOST = 0.5

# By the names of modules: an error says where in this package a thread is that does not end.
PACKAGE = __name__.partition(".")[0] + "."


class Prefetch(Generic[T]):
    """Calls `make(step)` for one step after another; several threads may take the results.

    Args:
        make: makes the element of a step; an error goes to the thread that asks for the element,
            and `make` is called again for the same step if it asks once more.
        size: the number of elements kept ready.
        end: returns the number of steps; after the last one, `next` raises `StopIteration`.
        threads: the number of threads that call `make`; 0: `next` calls it.

    Attributes:
        step: the step of the next element, from 0.
    """

    def __init__(
        self, make: Callable[[int], T], size: int, *, end: Callable[[], int], threads: int = 1
    ):
        self.step, self._make, self._size, self._end = 0, make, size, end
        # The collector may close this in any thread, also in one that holds the lock: it is an
        # RLock, as in any `Condition`.
        self._changed = threading.Condition()
        self._ready: dict[int, tuple[T | None, BaseException | None]] = {}  # by step
        self._in_turn = threading.Lock()  # of the threads that call `next`, if they make elements
        self._waiting, self._count = 0, threads
        self._next = 0  # the step to make next
        self._threads: list[threading.Thread] = []
        self._left: list[threading.Thread] = []  # told to end
        self._process, self._closed = os.getpid(), False

    @property
    def inherited(self) -> bool:
        """Whether this process is a forked child, which has no such thread."""
        return self._process != os.getpid()

    @property
    def closed(self) -> bool:
        """Whether `close` was called; an error in a forked child."""
        if self.inherited:
            raise InvalidState(
                "this loader was made before the process forked, and its threads are not in the "
                "child; make another loader here"
            )
        return self._closed

    def _require_open(self) -> None:
        if self.closed:
            raise InvalidValue("this loader is closed; make another one")

    def next(self, seconds: float | None = None) -> T:
        """The next element; raises the error of its step, or `Late` after `seconds`."""
        begin = time.monotonic()
        self._require_open()
        if not self._count:
            with self._in_turn:
                self._require_more()
                here = self._make(self.step)
                self.step += 1
                return here
        with self._changed:
            while True:
                self._require_more()  # also of what is ready, since the end may change
                if self.step in self._ready:
                    break
                self.start()
                left = None if seconds is None else begin + seconds - time.monotonic()
                if left is not None and left <= 0:
                    raise Late(self._say(seconds))
                self._waiting += 1
                self._changed.notify_all()
                try:
                    self._changed.wait(left)
                finally:
                    self._waiting -= 1
                if self._closed:
                    raise InvalidState("the loader was closed while a thread waited for a batch")
            element, error = self._ready.pop(self.step)
            self._changed.notify_all()
            if error is None:
                self.step += 1
                return element  # type: ignore[return-value]
            self._forget()
        raise error

    def _require_more(self) -> None:
        if self.step >= self._end():
            raise StopIteration

    def start(self) -> None:
        """Begins to make elements now."""
        with self._changed:
            if self._threads or self.closed:
                return
            self._next, before = self.step, [thread for thread in self._left if thread.is_alive()]
            self._left = before
            for _ in range(self._count):
                thread = threading.Thread(
                    target=self._run, args=(before,), name="loader", daemon=True
                )
                self._threads.append(thread)
                thread.start()

    @contextlib.contextmanager
    def hold(self) -> Iterator[int]:
        """Lets no thread begin an element in a `with` block, and gives the first step to change.

        It is the first one that is not begun when `size` elements are ready: the same in every run
        of a loop, however far its threads are.
        """
        self._require_open()
        with self._changed:
            begun = self._next if self._threads else self.step
            yield max(begun, self.step + self._size)

    def is_wanted(self) -> bool:
        """Whether this thread, which makes an element, was not told to end."""
        return threading.current_thread() in self._threads

    def stop(self) -> None:
        """Ends the threads, and drops what is ready; `next` begins again with its step."""
        with self._changed:
            self._forget()
            threads = [thread for thread in self._left if thread is not threading.current_thread()]
        # The collector may call it in one of the threads, which cannot wait for itself.
        until = time.monotonic() + AT_MOST
        for thread in threads:
            thread.join(max(until - time.monotonic(), 0))

    def jump(self, step: int) -> None:
        """Makes `step` the next one."""
        self._require_open()
        self.stop()
        with self._changed:
            self._forget()  # threads that began again meanwhile
            self.step = step

    def _forget(self) -> None:
        self._left = [*self._left, *self._threads]  # another list: threads wait for those before
        self._threads = []
        self._ready.clear()
        self._changed.notify_all()

    def close(self) -> None:
        """Ends the threads, and raises an error in those that wait for an element."""
        if not self.inherited:  # a thread of the parent may hold the lock
            self._closed = True
            self.stop()

    def _run(self, before: list[threading.Thread]) -> None:
        for thread in before:
            thread.join()  # `make` is not called twice for one step at a time
        me, element, error = threading.current_thread(), None, None
        while error is None:
            with self._changed:
                while me in self._threads and self._next - self.step >= max(
                    self._size, self._waiting
                ):
                    self._changed.wait()
                if me not in self._threads or self._next >= self._end():
                    return
                step, self._next = self._next, self._next + 1
            try:
                element = self._make(step)
            except BaseException as raised:  # SystemExit, too, or its consumer would wait for ever
                error = raised
            with self._changed:
                if me in self._threads:
                    self._ready[step] = element, error
                    self._changed.notify_all()
            element = None  # its memory is the consumer's

    def _say(self, seconds: float | None) -> str:
        alive = [thread.ident for thread in (*self._left, *self._threads) if thread.is_alive()]
        frame = sys._current_frames().get((*alive, 0)[0] or 0)
        calls = [] if frame is None else [call for call, _ in traceback.walk_stack(frame)]
        ours = [call for call in calls if call.f_globals.get("__name__", "").startswith(PACKAGE)]
        at = (
            f"{call.f_code.co_name} ({os.path.basename(call.f_code.co_filename)}:{call.f_lineno})"
            for call in dict.fromkeys([*calls[:3], *ours[:1]])
        )
        return (
            f"the batch of step {self.step:,} was not ready within {seconds:g} s "
            f"(timeout_seconds). Its thread is in {', called by '.join(at)}. The next call waits "
            "for the same batch again"
        )
