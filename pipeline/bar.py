"""Bar: the progress of long work, on a terminal."""

import logging
import sys
import threading
from collections.abc import Iterable
from typing import Any

from tqdm import tqdm

# Seconds between two lines of a bar that is written to a file.
EVERY = 10.0


class Bar(tqdm):
    """A progress bar of tqdm on standard error, which is removed at the end.

    It iterates over `items`, if they are given; else call `update`.

    Args:
        name: what is in progress, as in "scoring".
        items: an iterable.
        total: the number of all items; default None: `len(items)`, if that is known.
        shown: False: never, as on all hosts but the first; True: also where standard error is no
            terminal, as a line now and then, and it stays at the end. Default None: on a terminal.
        log: a logger that tells the same at the level INFO; if it does, there is no bar.
        **options: of `tqdm`.
    """

    _lock = threading.RLock()  # of this process; tqdm's own would fix how processes start

    def __init__(
        self,
        name: str,
        items: Iterable[Any] | None = None,
        *,
        total: int | None = None,
        shown: bool | None = None,
        log: logging.Logger | None = None,
        **options: Any,
    ):
        terminal = sys.stderr is not None and sys.stderr.isatty()
        told = log is not None and log.isEnabledFor(logging.INFO)
        visible = (terminal if shown is None else shown) and not told
        options = {"leave": bool(shown), "mininterval": 0.2 if terminal else EVERY, **options}
        super().__init__(items, desc=name, total=total, disable=not visible, **options)
