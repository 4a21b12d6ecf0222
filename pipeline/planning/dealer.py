"""The dealer: windows dealt when they are needed, or just before, and each one once."""

import collections
import concurrent.futures
import threading

from pipeline.planning.windows import Dealt, Windows

# Windows kept in memory: the current one, the next, and the last for readers that lag behind.
KEPT = 3


class Dealer:
    """The windows of all epochs; those last asked for are kept.

    Any number of threads may ask; one that asks for what another is dealing waits for it.

    Args:
        windows: what to deal.
        kept: how many windows to keep.
    """

    def __init__(self, windows: Windows, kept: int = KEPT):
        self._windows, self._kept = windows, kept
        self._lock = threading.Lock()
        self._dealt: collections.OrderedDict[tuple[int, int], concurrent.futures.Future] = (
            collections.OrderedDict()
        )

    def __reduce__(self):
        return Dealer, (self._windows, self._kept)

    def get(self, epoch: int, place: int) -> Dealt:
        """The window at `place` of the epoch's order, now."""
        future, mine = self._future(epoch, place)
        if mine:
            self._deal(epoch, place, future)
        else:
            with self._lock:
                if (epoch, place) in self._dealt:
                    self._dealt.move_to_end((epoch, place))
        return future.result()

    def prepare(self, epoch: int, place: int):
        """Sees to it, in the background, that `get` will have that window at hand."""
        future, mine = self._future(epoch, place)
        if mine:
            arguments = epoch, place, future
            threading.Thread(target=self._deal, args=arguments, daemon=True).start()

    def _future(self, epoch: int, place: int) -> tuple[concurrent.futures.Future[Dealt], bool]:
        """The window's future, and whether it is the caller's to fulfil."""
        with self._lock:
            future = self._dealt.get((epoch, place))
            mine = future is None
            if future is None:
                future = self._dealt[epoch, place] = concurrent.futures.Future()
                while len(self._dealt) > self._kept:
                    self._dealt.popitem(last=False)
        return future, mine

    def _deal(self, epoch: int, place: int, future: concurrent.futures.Future):
        try:
            future.set_result(self._windows.deal(epoch, place))
        except BaseException as error:
            with self._lock:
                self._dealt.pop((epoch, place), None)
            future.set_exception(error)
