"""Progress: a line in the log now and then, or a bar."""

import logging
import time

from pipeline.bar import Bar

logger = logging.getLogger(__name__)

# Seconds between lines.
EVERY = 10.0


class Progress:
    """Logs the steps of some work, its speed, and its waits for batches.

    Where lines of the level INFO are not logged, and standard error is a terminal, a bar has the
    steps instead.

    Args:
        name: what is in progress, as in "scoring".
        steps: the number of all steps.
        step: the steps that are done already.
        shown: False: without a bar, as on all hosts but the first.
    """

    def __init__(self, name: str, steps: int, step: int, *, shown: bool | None = None):
        self._steps, self._first = steps, step
        self._begin = self._logged = time.perf_counter()
        self._tokens, self._waited = 0, 0.0  # since the last line
        self._bar = Bar(name, total=steps, initial=step, unit=" step", shown=shown, log=logger)

    def update(self, step: int, tokens: int, waited: float, text: str) -> None:
        """Notes that `step` steps are done, and the tokens, wait and text of the last one."""
        self._tokens, self._waited = self._tokens + tokens, self._waited + waited
        now = time.perf_counter()
        span = max(now - self._logged, 1e-9)
        self._bar.set_postfix_str(text, refresh=False)
        self._bar.update(step - self._bar.n)
        if span < EVERY and step < self._steps:
            return
        left = (now - self._begin) / max(step - self._first, 1) * (self._steps - step)
        logger.info(
            f"step {step:,}/{self._steps:,} · {text} · {self._tokens / span:,.0f} tokens/s · "
            f"{self._waited / span:.1%} waiting · {left:.0f} s left"
        )
        self._tokens, self._waited, self._logged = 0, 0.0, now

    def close(self) -> None:
        """Removes the bar."""
        self._bar.close()
