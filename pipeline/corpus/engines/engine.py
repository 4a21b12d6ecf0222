"""Engine: the one method that runs tasks."""

from collections.abc import Callable, Generator, Sequence
from typing import Any, Protocol


class Engine(Protocol):
    """Runs tasks somewhere. It may run a task several times, at once or again after a loss.

    A task that is done already costs little: the function finds its result on disk.
    """

    def run(self, function: Callable[[Any], Any], tasks: Sequence[Any]) -> Generator[Any]:
        """The result of each task, at least once and in any order; a generator.

        Closing it ends the work.

        Args:
            function: pickles, and takes one task.
            tasks: small values that pickle.
        """
        ...
