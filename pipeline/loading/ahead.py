"""ReadAhead: tells the caches of a corpus which files batches will need."""

import weakref
from collections.abc import Sequence

import numpy as np

from pipeline.fork import Handles, restart_in_children
from pipeline.planning.ahead import files_ahead
from pipeline.planning.lengths import HasCorpora
from pipeline.planning.plan import Plan
from pipeline.storage.cache import Demand, PartCache
from pipeline.storage.interface import AnyCorpus


class ReadAhead(Handles):
    """Lets caches fetch what the batches after a step need, while batches are built.

    Args:
        corpus: the corpus; without caches, nothing happens.
        plan: the plan of the batches.
    """

    handles = ("_begun",)

    def __init__(self, corpus: AnyCorpus, plan: Plan):
        self._corpus, self._plan, self._step = corpus, plan, 0
        self.restart()
        restart_in_children(self)

    def restart(self) -> None:
        """See `Handles`."""
        super().restart()
        self._begun = not self._corpus.caches

    def begin(self, step: int) -> None:
        """Says that batches are built from `step` on. Any thread may say so, for every batch."""
        self._step = step
        if self._begun:
            return
        with self._lock:
            if self._begun:
                return
            self._begun = True
        corpora = {"": self._corpus}
        if self._plan.names != ("",) and isinstance(self._corpus, HasCorpora):
            corpora = {name: self._corpus.corpora[name] for name in self._plan.names}
        for name, corpus in corpora.items():
            for cache, first in corpus.caches:
                cache.follow(_demand(weakref.ref(self), name, first, cache))

    def windows(self, name: str) -> list[np.ndarray]:
        """The files of a corpus that are needed from now on, as `files_ahead` gives them."""
        return files_ahead(self._plan, self._step).get(name, [])


def _demand(ahead: "weakref.ref[ReadAhead]", name: str, first: int, cache: PartCache) -> Demand:
    """The parts of one cache that are needed, whose first file has the number `first`."""

    def demand() -> Sequence[np.ndarray] | None:
        if (found := ahead()) is None:
            return None
        last = first + cache.num_parts
        return [files[(files >= first) & (files < last)] - first for files in found.windows(name)]

    return demand
