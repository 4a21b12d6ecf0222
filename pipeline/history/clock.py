"""The clock of a run: every second belongs to one phase."""

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping


class Clock:
    """Seconds by phase, going on from those given: `with clock("compile"): …`.

    Every second since it was made belongs to one phase: to the innermost block, or to "other".

    >>> clock = Clock({"train": 60.0})
    >>> with clock("plan"):
    ...     pass
    >>> list(clock.seconds())
    ['train', 'other', 'plan']
    """

    def __init__(self, seconds: Mapping[str, float] | None = None):
        self._seconds: dict[str, float] = defaultdict(float, seconds or {})
        self._open, self._since = ["other"], time.perf_counter()

    def seconds(self) -> dict[str, float]:
        """Seconds of each phase up to now; their sum is the time since the clock was made."""
        now = time.perf_counter()
        self._seconds[self._open[-1]] += now - self._since
        self._since = now
        return dict(self._seconds)

    def add(self, phase: str, seconds: float) -> None:
        """Adds seconds that passed elsewhere, if there are any."""
        if seconds:
            self._seconds[phase] += seconds

    def __getitem__(self, phase: str) -> float:
        """Seconds of one phase."""
        return self.seconds().get(phase, 0.0)

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Adds the time inside the block to `phase`."""
        self.seconds()
        self._open.append(phase)
        try:
            yield
        finally:
            self.seconds()
            self._open.pop()
