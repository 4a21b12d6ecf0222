"""Reports: what workers cannot send, as elements that they can.

A process that cannot pickle an error, or an element, loses it, and its reader waits for ever; so it
does if the class of the error is one of the program's main file, has another number of arguments
than it shows, or holds a lock. So errors cross as a type, a text and a traceback.
"""

import dataclasses
import pickle
import threading
import traceback
from typing import Any, NoReturn

import grain

from pipeline.errors import InvalidState


@dataclasses.dataclass(frozen=True)
class Failure:
    """An error of a worker.

    Attributes:
        text: its type and text.
        trace: its traceback.
        pickled: the error itself, if it can be pickled; else empty.
    """

    text: str
    trace: str
    pickled: bytes

    def throw(self) -> NoReturn:
        """Raises the error, if it is whole in this process, or else one that tells its text."""
        error: Exception
        try:
            error = pickle.loads(self.pickled)
        except Exception:  # of the class, which may do anything
            error = InvalidState(
                f"a worker process raised {self.text}; its traceback is below, or in __notes__"
            )
        error.add_note(f"In the worker process:\n{self.trace}")
        raise error


class Reports(grain.MapDataset):
    """The elements of a data set, with a `Failure` for each that raises or cannot be pickled."""

    def __init__(self, inside: grain.MapDataset):
        super().__init__(inside)

    def __len__(self) -> int:
        return len(self.parents[0])

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.slice(index)
        try:
            element = self.parents[0][index]
            # Without the numbers of arrays, which are not copied.
            pickle.dumps(element, protocol=5, buffer_callback=lambda _: None)
            return element
        except BaseException as error:  # SystemExit, too, would end the worker without a word
            return report(error)


def as_error(error: BaseException, what: str) -> BaseException:
    """An error that a consumer is told as it is, or one in its place, which says `what` failed.

    A function of the user may raise `StopIteration` by mistake, or `SystemExit` in a thread, which
    would end an iterator, the thread or the program without a word. In the main thread, Ctrl-C and
    `sys.exit` stay what they are.
    """
    in_main = threading.current_thread() is threading.main_thread()
    exits = isinstance(error, KeyboardInterrupt | SystemExit) and in_main
    ends = isinstance(error, StopIteration | StopAsyncIteration)
    if exits or (isinstance(error, Exception) and not ends):
        return error
    return InvalidState(f"{what} raised {error!r}; raise a ValueError to report what is wrong")


def report(error: BaseException) -> Failure:
    """A `Failure` that can be pickled, whatever the error is."""
    text, pickled = f"{type(error).__name__}: {error}", b""
    if isinstance(error, Exception):
        try:
            pickled = pickle.dumps(error)
        except Exception:  # of the class, which may do anything
            pickled = b""
    return Failure(text, "".join(traceback.format_exception(error)), pickled)
