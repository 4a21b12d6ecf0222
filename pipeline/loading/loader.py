"""The loader: an iterator that transfers batches to the devices ahead."""

import copy
import functools
import numbers
import sys
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pipeline.errors import InvalidType, InvalidValue, require_type, require_whole
from pipeline.fields.batch import Batch
from pipeline.loading.ahead import ReadAhead
from pipeline.loading.batches import Batches, phase
from pipeline.loading.iteration import StepIterator
from pipeline.loading.live import LiveBatches
from pipeline.loading.prefetch import Prefetch
from pipeline.loading.sharding import batch_sharding
from pipeline.loading.stream import PackedIterator, PackedStream
from pipeline.loading.transfer import Transfer
from pipeline.planning.plan import Plan
from pipeline.planning.planned import PlannedBatch

if TYPE_CHECKING:
    import jax


class Loader(StepIterator):
    """An iterator over batches as jax.Arrays, transferred while the last step still runs.

    Its state is exact with batches in flight: it counts the batches that `next` returned. Like any
    iterator, it keeps its place: a second `for` continues there, and after the last batch, which
    `num_epochs` decides, it has none. For another pass, make another loader, or give `set_state`
    an earlier state. `len` is the number of batches from the first step to the end.

    It is a `grain.DatasetIterator`, which Grain's and orbax's checkpoint handlers save and restore.

    Args:
        batches: the batches to load; their `sharding` is that of the arrays. Without one, all
            arrays are on the first local device, and not committed to it, like those that
            `jax.numpy` makes: a function of `jax.jit` takes both in one program.
        prefetch: the number of batches kept ready on the devices.
        num_threads: as for `load`.
        timeout_seconds: as for `load`.
        changes_every: as for `load`.

    Attributes:
        corpus: the corpus.
        sharding: the `jax.sharding.NamedSharding` of the arrays, `[rows, length]`, or the
            `DynamicContext`; one device without that of `batches`.
        specs: for each bucket that the plan uses, a dict with a `jax.ShapeDtypeStruct` for each
            field, with its sharding, to compile a step for.
        planned: the `PlannedBatch` (bucket, segments, epoch) of the last batch that `next`
            returned; absent before the first.
    """

    planned: PlannedBatch

    def __init__(
        self,
        batches: Batches,
        *,
        prefetch: int = 2,
        num_threads: int = 1,
        timeout_seconds: float | None = None,
        changes_every: int | None = None,
    ):
        wanted = "Batches; transform them in the step, or with Batches(…, transform=function)"
        require_type("batches", batches, Batches, wanted)
        prefetch = require_whole("prefetch", prefetch, 0)
        threads = require_whole("num_threads", num_threads, 1)
        self._timeout = _require_seconds(timeout_seconds)
        if not hasattr(batches, "sharding"):
            raise InvalidValue(
                "batches is a pickled copy, which knows no devices; pickle the corpus and the "
                "plan, and make Batches(corpus, plan, sharding=…) of them"
            )
        self.corpus = batches.corpus
        self.specs, self.sharding = batches.specs, batch_sharding(batches.sharding)
        commit = batches.sharding is not None
        transfer = Transfer(self.sharding, self.specs, batches.features, commit=commit)
        self._live = live = LiveBatches(batches, self.specs, changes_every)

        def make(step: int) -> tuple[PlannedBatch, Any]:
            built: Any = live.at(step, ahead.is_wanted)
            planned, batch = built[step]
            with phase("transfer"):
                return planned, transfer(step, planned.bucket, batch)

        size = prefetch + threads - 1
        ahead = Prefetch(make, size, end=lambda: live.end, threads=threads)
        close = functools.partial(_close, ahead, batches.ahead, live)
        super().__init__(batches, ahead, close)

    def __repr__(self) -> str:
        at = "closed" if self._ahead.closed else f"at step {self.step:,}"
        return f"Loader({self.batches!r}, {at})"

    def __str__(self) -> str:
        end = "" if self.batches.endless else f" of {len(self):,}"
        return f"{self.plan}\nnext: step {self.step:,}{end}"

    def __iter__(self) -> "Loader":
        return self

    @property
    def batches(self) -> Batches:
        """The `Batches` that it loads, with the weights that `change` gave."""
        return self._live.batches

    @property
    def plan(self) -> Plan:
        """The `Plan` of the batches: buckets, batches, padding; `print` shows it."""
        return self.batches.plan

    def change(self, *, weights: Mapping[str, float]) -> int:
        """Gives the corpora of a mixture other weights; returns the step from which they hold.

        That is the first step that no prefetched batch has when all are ready: `prefetch` +
        `num_threads` - 1 steps after the next one, or with `tiers` or `changes_every` the next
        block of steps from there on. The plan is then `plan.after(step, weights=weights)`, which
        removes later phases. Until that step, another call for it replaces this one. The states of
        the loader have the change, so that any loader of the same plan that continues one has it.

        On several processes, process 0 alone calls it, of a loader with `changes_every`. Save the
        state of process 0: others know a change once their threads come to its step.

        Raises:
            TypeError: `weights` are not numbers by name.
            ValueError: the weights are not as for `Plan.after`; there is one corpus; a later change
                of options is planned already; or they need a bucket that `specs` does not have.
            RuntimeError: another process decides, or others would not know of it.
        """
        require_type("weights", weights, Mapping, "numbers by name, as {'code': 3, 'prose': 1}")
        with self._ahead.hold() as first:
            return self._live.change(first, weights)

    def get_state(self) -> dict[str, Any]:
        """The data state after the batches that `next` returned so far: small JSON."""
        return self.batches.origin.state(self.step)

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues from `state`, with the weights that `change` gave its loader.

        On several processes with `changes_every`, all call it. The state of another plan or corpus
        raises a `ValueError`.
        """
        batches = self._live.follow(state)
        step = batches.step_of(state)
        if batches.origin.live:  # perhaps with buckets that the plan has no more without them
            self.specs.update(batches.specs)
        self._live.close()
        self._ahead.jump(step)
        self._live.begin(batches, step)

    def __len__(self) -> int:
        if self.batches.endless:
            raise InvalidType(
                "this loader has no end, so it has no length; give num_epochs= to load, or to "
                "Batches.repeat"
            )
        return len(self.batches)

    def __bool__(self) -> bool:
        return True  # like any iterator, even without a length

    @property
    def step(self) -> int:
        """The step of the batch that `next` returns next, from 0: the step of the state."""
        return self._ahead.step

    def __next__(self) -> "Batch[jax.Array]":
        self.planned, batch = self._ahead.next(self._timeout)
        return batch

    def traffic(self) -> dict[str, float]:
        """Counts of reads through a cache so far; see `ReadAhead.traffic`."""
        return self.batches.ahead.traffic()

    def __enter__(self) -> "Loader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _require_seconds(limit: float | None) -> float | None:
    numeric = isinstance(limit, numbers.Real) and 0 < limit <= threading.TIMEOUT_MAX
    if limit is not None and not numeric:
        raise InvalidValue(
            f"timeout_seconds is {limit!r}; it must be a number of seconds above 0, or None"
        )
    return None if limit is None else float(limit)


class StreamLoader(Loader):
    """A `Loader` of a `PackedStream`, with the state of its iterator; made by `load`.

    It has no plan, no corpus, and no length; `specs` has all buckets.
    """

    def __init__(
        self, stream: PackedStream, *, prefetch: int = 2, timeout_seconds: float | None = None
    ):
        self._timeout = _require_seconds(timeout_seconds)
        self._stream, self._size = stream, require_whole("prefetch", prefetch, 0)
        self.sharding = batch_sharding(stream.batches.sharding)
        self.specs = self.batches.specs
        self._start(None)

    def _start(self, state: dict[str, Any] | None) -> None:
        batches, ready = PackedIterator(self._stream), list[Any]()
        if state is not None:
            batches.set_state(state)
        commit = self.batches.sharding is not None
        transfer = Transfer(self.sharding, self.specs, self.batches.features, commit=commit)

        def make(step: int) -> tuple[PlannedBatch, Any, dict[str, Any]]:
            if not ready:  # else an error came after it
                ready.append(next(batches))
            planned = batches.planned
            with phase("transfer"):
                arrays = transfer(step, planned.bucket, ready[0])
            ready.clear()
            return planned, arrays, batches.get_state()

        self._state = batches.get_state()
        ahead = Prefetch(make, self._size, end=lambda: sys.maxsize)
        ahead.jump(self._state["step"])
        StepIterator.__init__(self, self.batches, ahead, functools.partial(_end, ahead, batches))

    def __repr__(self) -> str:
        at = "closed" if self._ahead.closed else f"at step {self.step:,}"
        return f"Loader({self._stream}, {at})"

    __str__ = __repr__

    @property
    def batches(self) -> Batches:
        """The `Batches` of a window without examples, with the buckets and fields of all."""
        return self._stream.batches

    def change(self, *, weights: Mapping[str, float]) -> int:
        """Refuses weights, which a plan has."""
        raise InvalidValue(
            f"weights is {weights!r:.80}, but a stream has no plan that they could change; mix "
            "data sets, with grain.IterDataset.mix, or prepare them as corpora"
        )

    def __len__(self) -> int:
        raise InvalidType("a stream ends where its data set ends, so its loader has no length")

    def __next__(self) -> "Batch[jax.Array]":
        self.planned, batch, self._state = self._ahead.next(self._timeout)
        return batch

    def get_state(self) -> dict[str, Any]:
        """The state of this host after the batches that `next` returned so far; see the stream."""
        return copy.deepcopy(self._state)

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues from `state`; one of other options or of another host raises a `ValueError`."""
        self._stream.setup.check(state)
        if self._close is not None:
            self._close()
        self._start(state)


def _end(ahead: Prefetch, batches: PackedIterator) -> None:
    if not ahead.inherited:
        batches.close()  # first, since the thread may wait for it
        ahead.close()


def _close(batches: Prefetch, files: ReadAhead, live: LiveBatches) -> None:
    if not batches.inherited:  # its lock may be held by a thread of the parent
        live.close()  # first, since a thread may wait for another process
        batches.close()
        files.stop()  # last, since a batch in the making would restart it
