"""Prefetch: the elements of consecutive steps, made ahead in a thread that nobody has to wait for.

What a thread makes may never come: a transform sleeps, a read stalls. So nothing here waits for the
thread without a limit. A thread that was left alone ends with the element that it makes.
"""

import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from pipeline.errors import InvalidState, InvalidValue, Late

T = TypeVar("T")

# Seconds to wait for a thread that was told to end.
AT_MOST = 0.5


class Prefetch(Generic[T]):
    """Calls `make(step)` for one step after another; several threads may take the results.

    Args:
        make: makes the element of a step; an error goes to the thread that asks for the element,
            and `make` is called again for the same step if it asks once more.
        size: the number of elements kept ready.
        doing: what a thread does, by its identifier, for the message of a time limit.

    Attributes:
        step: the step of the next element.
    """

    def __init__(self, make: Callable[[int], T], size: int, doing: Callable[[int | None], str]):
        self.step, self._make, self._size, self._doing = 0, make, size, doing
        # The collector may close this in any thread, also in one that holds the lock: it is an
        # RLock, as in any `Condition`.
        self._changed = threading.Condition()
        self._ready: deque[T] = deque()
        self._error: BaseException | None = None  # of the step after those that are ready
        self._waiting = 0
        self._thread: threading.Thread | None = None
        self._left: threading.Thread | None = None  # the last one that was told to end
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

    def next(self, seconds: float | None = None) -> T:
        """The next element; raises the error of its step, or `Late` after `seconds`."""
        begin = time.monotonic()
        if self.closed:
            raise InvalidValue("this loader is closed; make another one")
        with self._changed:
            while not self._ready:
                if self._error is not None:
                    error, self._error = self._error, None
                    raise error
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
            self.step += 1
            self._changed.notify_all()
            return self._ready.popleft()

    def start(self) -> None:
        """Begins to make elements now."""
        with self._changed:
            if self._thread is None and self._error is None and not self.closed:
                step, before = self.step + len(self._ready), self._left
                self._thread = threading.Thread(
                    target=self._run, args=(step, before), name="loader", daemon=True
                )
                self._thread.start()

    def stop(self) -> None:
        """Ends the thread, and drops what is ready; `next` begins again with its step."""
        with self._changed:
            thread, self._thread = self._thread, None
            self._left = thread or self._left
            self._ready.clear()
            self._error = None
            self._changed.notify_all()
        # The collector may call it in that thread, which cannot wait for itself.
        if thread is not None and thread is not threading.current_thread():
            thread.join(AT_MOST)

    def close(self) -> None:
        """Ends the thread, and raises an error in threads that wait for an element."""
        self._closed = True
        self.stop()

    def _run(self, step: int, before: threading.Thread | None) -> None:
        if before is not None:
            before.join()  # `make` is never called twice at a time
        own = threading.current_thread()
        while True:
            with self._changed:
                while self._thread is own and len(self._ready) >= max(self._size, self._waiting):
                    self._changed.wait()
                if self._thread is not own:
                    return
            try:
                element = self._make(step)
            except BaseException as error:  # SystemExit, too, or its consumer would wait for ever
                with self._changed:
                    if self._thread is own:
                        self._error, self._thread = error, None
                        self._changed.notify_all()
                return
            with self._changed:
                if self._thread is own:
                    self._ready.append(element)
                    self._changed.notify_all()
            del element  # its memory is the consumer's
            step += 1

    def _say(self, seconds: float | None) -> str:
        thread = self._left if self._left and self._left.is_alive() else self._thread
        identifier = thread.ident if thread else None
        frame = sys._current_frames().get(identifier or 0)
        calls = [] if frame is None else traceback.extract_stack(frame)
        at = [f"{call.name} ({os.path.basename(call.filename)}:{call.lineno})" for call in calls]
        return (
            f"the batch of step {self.step:,} was not ready within {seconds:g} s "
            f"(timeout_seconds). Its thread is busy with {self._doing(identifier)}, in "
            f"{' in '.join(reversed(at[-3:]))}. The next call waits for the same batch again"
        )
