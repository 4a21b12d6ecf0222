"""Progress: a line in the log now and then."""

import logging
import time

logger = logging.getLogger(__name__)

# Seconds between lines.
EVERY = 10.0


class Progress:
    """Logs the steps of a run, its speed, and its waits for batches."""

    def __init__(self, steps: int, step: int):
        self._steps, self._first = steps, step
        self._begin = self._logged = time.perf_counter()
        self._tokens, self._waited = 0, 0.0  # since the last line

    def update(self, step: int, tokens: int, waited: float, text: str) -> None:
        """Notes that `step` steps are done, and the tokens, wait and text of the last one."""
        self._tokens, self._waited = self._tokens + tokens, self._waited + waited
        now = time.perf_counter()
        span = max(now - self._logged, 1e-9)
        if span < EVERY and step < self._steps:
            return
        left = (now - self._begin) / max(step - self._first, 1) * (self._steps - step)
        logger.info(
            f"step {step:,}/{self._steps:,} · {text} · {self._tokens / span:,.0f} tokens/s · "
            f"{self._waited / span:.1%} waiting · {left:.0f} s left"
        )
        self._tokens, self._waited, self._logged = 0, 0.0, now
