"""ReadAhead: tells the caches of a corpus which files batches need, and will need."""

import collections
import functools
import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np

from pipeline.corpus.corpora import Corpora
from pipeline.corpus.interface import AnyCorpus
from pipeline.corpus.stored.cache import Needs
from pipeline.fs.fork import Handles
from pipeline.planning.bucket import Bucket
from pipeline.planning.plan import Plan


class ReadAhead(Handles):
    """Lets caches fetch the files of the next batches.

    `rows` are those of each bucket that this process builds.
    """

    handles = ("_run",)

    def __init__(self, corpus: AnyCorpus, plan: Plan, rows: Mapping[Bucket, np.ndarray]):
        self._corpus, self._plan, self._rows, self._step = corpus, plan, rows, 0
        self._corpora: dict[str, Any] = {"": corpus}
        if plan.names != ("",) and isinstance(corpus, Corpora):
            self._corpora = {name: corpus.corpora[name] for name in plan.names}
        self.__setstate__({})

    def restart(self) -> None:
        """See `Handles`."""
        super().restart()
        self._run: object | None = None  # while caches fetch for it

    def begin(self, step: int, plan: Plan) -> None:
        """Notes that batches of a plan, which may have changed, are built from `step` on.

        Any thread may call it, for every batch.
        """
        self._plan, self._step = plan, step
        if self._run is not None or not self._corpus.caches:
            return
        with self._lock:
            if self._run is not None:
                return
            self._run = object()
        for name, corpus in self._corpora.items():
            for cache, first in corpus.caches:
                files = range(first, first + cache.num_parts)
                cache.follow(functools.partial(_ask, weakref.ref(self), self._run, name, files))

    def stop(self) -> None:
        """Stops fetching, until batches are built again."""
        self._run = None

    def traffic(self) -> dict[str, float]:
        """Counts of reads through caches so far, in this process; empty without a cache.

        `fetched_bytes` of parts; `stalls`, the number of reads that waited for a part, and
        `stalled`, their seconds.
        """
        if not self._corpus.caches:
            return {}
        sums: collections.Counter = collections.Counter()
        for cache, _ in self._corpus.caches:
            sums.update(cache.traffic)
        return {
            "fetched_bytes": sums["fetched"],
            "stalls": sums["stalls"],
            "stalled": sums["waited"],
        }


def _ask(ahead: "weakref.ref[ReadAhead]", run: object, name: str, numbers: range) -> Needs | None:
    """What one cache needs, window by window; `numbers` are its files in the corpus."""
    if (owner := ahead()) is None or owner._run is not run:  # deleted, or `stop` was called
        return None
    needs = list[list[np.ndarray]]()
    for rows in (owner._rows, None):
        every = owner._plan.files_ahead(owner._step, rows).get(name)
        if every is None:
            return Needs.of([np.arange(len(numbers))])  # any file at any time
        first, end = numbers.start, numbers.stop
        needs.append([files[(files >= first) & (files < end)] - first for files in every])
    return Needs(*needs)
