"""TensorBoard: a writer of events, for `RunLog`."""

import contextlib
import logging
import os
import tempfile
from collections.abc import Mapping

from etils import epath

from pipeline.fs import is_local, name_full_disk
from pipeline.history.log_parts import write_part

logger = logging.getLogger(__name__)


class TensorBoard(contextlib.ExitStack):
    """Writes the numbers of a line as events of its step; nothing if tensorboardX is not installed.

    Events from `step` on, of an earlier start, are hidden, but for an evaluation after `step`
    steps. For object storage, `save` uploads those since the last one, as a file of their own.
    """

    def __init__(self, directory: epath.Path, step: int):
        super().__init__()
        self._here = self._there = directory
        self._board, self._uploaded = None, 0  # bytes
        try:
            import tensorboardX
        except ImportError:
            logger.info("tensorboardX is not installed, so there are no TensorBoard events")
            return
        if not is_local(directory):
            self._here = epath.Path(self.enter_context(tempfile.TemporaryDirectory()))
        self.enter_context(name_full_disk(directory))
        place = os.fspath(self._here)
        with name_full_disk(directory):
            self._board = tensorboardX.SummaryWriter(place, purge_step=step + 1, flush_secs=30)
        self.callback(self._board.close)
        self.callback(self.save)

    def __call__(self, step: int, values: Mapping[str, float]) -> None:
        """Writes the numbers of a line."""
        if self._board:
            with name_full_disk(self._there):
                for name, value in values.items():
                    self._board.add_scalar(name, value, step)

    def save(self) -> None:
        """Saves everything written so far beyond the life of the process."""
        if self._board:
            if self._here == self._there:
                with name_full_disk(self._there):
                    self._board.flush()
                return
            # A thread writes events, and closing alone waits for it. The next event opens a file.
            self._board.close()
            self._board.purge_step = None
            for events in self._here.iterdir():
                place = self._there / events.name
                self._uploaded = write_part(place, self._uploaded, events.read_bytes())
                events.unlink()
