"""Progress: a bar on a terminal, elsewhere a line in the log now and then."""

import logging
import sys
import time

import tqdm

logger = logging.getLogger(__name__)

# Seconds between lines where there is no terminal to draw a bar on.
EVERY = 10.0


class Progress:
    """Shows how far a run is, how fast, and how long it waits for batches.

    The run has `steps` steps and goes on from `step`. Of several hosts one has it `enabled`.
    """

    def __init__(self, steps: int, step: int, *, name: str = "train", enabled: bool = True):
        self._enabled = enabled
        self._bar = tqdm.tqdm(
            total=steps,
            initial=step,
            desc=name,
            unit="step",
            dynamic_ncols=True,
            disable=not (enabled and sys.stderr.isatty()),
        )
        self._steps, self._first = steps, step
        self._begin = self._shown = time.perf_counter()
        self._tokens, self._waited = 0, 0.0  # since what was shown last

    def update(self, step: int, tokens: int, waited: float, text: str) -> None:
        """Shows that `step` steps are done, the last of so many tokens, and a text."""
        if not self._enabled:
            return
        self._bar.update(step - self._bar.n)
        self._tokens, self._waited = self._tokens + tokens, self._waited + waited
        now = time.perf_counter()
        if now - self._shown < (EVERY if self._bar.disable else 1.0) and step < self._steps:
            return
        span = max(now - self._shown, 1e-9)
        text += f" · {self._tokens / span:,.0f} tokens/s · {self._waited / span:.1%} waiting"
        self._tokens, self._waited, self._shown = 0, 0.0, now
        if self._bar.disable:
            left = (now - self._begin) / max(step - self._first, 1) * (self._steps - step)
            logger.info(f"step {step:,}/{self._steps:,} · {text} · {left:.0f} s left")
        else:
            self._bar.set_postfix_str(text)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()
