"""The bar of a pass over a source."""

import sys
import time

from tqdm import tqdm

from pipeline.ragged import Ragged


class Progress:
    """A bar of documents, with tokens, rate and time left.

    Args:
        name: what is being done.
        documents: how many there are.
        done: how many of them are done.
        tokens: how many tokens these have.
        shown: whether to show anything.
    """

    def __init__(
        self, name: str, documents: int, *, done: int = 0, tokens: int = 0, shown: bool = True
    ):
        self._bar = tqdm(
            total=documents,
            initial=done,
            disable=not shown,
            unit=" documents",
            unit_scale=True,
            desc=name,
            # In a log file, a line now and then is enough.
            mininterval=0.2 if sys.stderr.isatty() else 10,
        )
        self._tokens, self._new, self._started = tokens, 0, time.monotonic()

    def counted(self, chunk: Ragged) -> Ragged:
        """The chunk, after it was added to what is done."""
        self._new += len(chunk.flat)
        rate = self._new / max(time.monotonic() - self._started, 1e-9)
        self._bar.set_postfix_str(
            f"{(self._tokens + self._new) / 1e6:,.1f} M tokens, {rate / 1e6:.2f} M/s",
            refresh=False,
        )
        self._bar.update(len(chunk.counts))
        return chunk

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()
