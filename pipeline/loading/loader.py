"""Batches as a Grain data set, and an iterator that keeps them coming to the devices."""

import os
import sys
import weakref
from collections.abc import Iterable
from typing import Any

import grain
import jax
import numpy as np

from pipeline.loading.checkpoint import check_data_state, data_state
from pipeline.loading.collate import collate, collate_pairs
from pipeline.loading.sharding import (
    Block,
    batch_sharding,
    block_of_sharding,
    field_layout,
    parts,
    slice_of_process,
    to_global,
)
from pipeline.packing.bucket import Bucket
from pipeline.planning.checks import (
    list_keywords,
    require_whole,
    select_options,
    suggest_option,
)
from pipeline.planning.fit import fit_buckets
from pipeline.planning.lengths import HasCorpora
from pipeline.planning.plan import Plan
from pipeline.planning.planned import PlannedBatch
from pipeline.storage.interface import AnyCorpus
from pipeline.storage.pairs import open_corpus

FITTING, PLANNING = list_keywords(fit_buckets), list_keywords(Plan)

# Building a batch from memory takes about a millisecond, in many short calls of NumPy, each of
# which takes the interpreter's lock: on two cores, one thread is a tenth to a quarter faster than
# two that wait for one another, and the 99th percentile of a wait is half.
FROM_MEMORY = grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)
# What waits, for a network or a tokenizer, may wait for two batches at once.
WAITING = grain.ReadOptions(num_threads=2, prefetch_buffer_size=4)
# In the thread that asks.
AT_ONCE = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)


class Batches(grain.MapDataset):
    """The batches of a plan, random access: `Batches(corpus, plan)[step]` is a dict of arrays.

    Steps count from 0 over all epochs. The length is one epoch; `repeat` makes it several, or
    endless, with every epoch shuffled anew. The state of its iterators is
    `pipeline.loading.checkpoint.data_state`, and they refuse the state of another plan or corpus.

    Args:
        corpus: where the tokens are: a corpus, a view of one, or pairs.
        plan: which tokens are in which batch.
        sharding: a `jax.sharding.NamedSharding` of batches `[rows, length]`; this process then
            builds exactly the rows and columns that its devices hold.
        process_index, process_count: the shorthand for contiguous slices of rows.
        compact: give `segments` in place of the fields that follow from them; `pipeline.expand`
            makes those inside the compiled step.

    Raises:
        ValueError: both ways to say which rows are given, the rows of a bucket do not divide, or
            the plan is for another number of examples or for examples of another kind, or compact
            batches of pairs are wanted.
    """

    def __init__(
        self,
        corpus: AnyCorpus,
        plan: Plan,
        *,
        sharding=None,
        process_index: int = 0,
        process_count: int = 1,
        compact: bool = False,
    ):
        super().__init__()
        if len(corpus) != plan.num_examples:
            raise ValueError(
                f"the corpus has {len(corpus):,} examples and the plan is for "
                f"{plan.num_examples:,}; make the plan from corpus.lengths"
            )
        sides = np.ndim(corpus.lengths)  # [n], or of pairs [n, 2]
        if len(plan.buckets[0].lengths) != sides:
            kind = "pairs" if sides == 1 else "examples of one length"
            raise ValueError(f"the plan is for {kind}; make it from this corpus's lengths")
        if len({*plan.counts}) > 1 and not isinstance(corpus, HasCorpora):
            raise ValueError(
                f"the plan begins with {plan.counts[0]:,} examples and others join them; give the "
                "corpora joined, Corpora({'first': corpus, 'new': …}), so that a state can tell "
                "what was there"
            )
        if compact and sides == 2:
            raise ValueError("batches of pairs are not made compact; leave out compact=True")
        if sharding is not None and process_count != 1:
            raise ValueError(
                "both sharding and process_count say which rows to build; give one of them"
            )
        self.corpus, self.plan = corpus, plan
        self._epochs: int | None = 1
        self._planned = False
        #: What this process builds of each bucket; of pairs, of each of its two sides.
        self.blocks: dict[Bucket, Block] = {
            side: slice_of_process(side.shape, process_index, process_count)
            if sharding is None
            else block_of_sharding(sharding, side.shape)
            for bucket in plan.buckets
            for side in bucket.sides
        }
        #: For compact batches, the most segments in a row of each bucket.
        self.most = plan.most_segments() if compact else {}

    def __len__(self) -> int:
        if self._epochs is None and not self.plan.finite:
            return sys.maxsize
        return self.plan.first_step(1 if self._epochs is None else self._epochs)

    def __getitem__(self, step):
        if isinstance(step, slice):
            return self.slice(step)
        with jax.profiler.TraceAnnotation("plan"):
            planned = self.plan.batch(step)
        with jax.profiler.TraceAnnotation("collate"):
            batch = self._collate(planned)
        return (planned, batch) if self._planned else batch

    def with_plans(self) -> "Batches":
        """The same batches, each with what it was built from: `(PlannedBatch, batch)`."""
        copy = self._copy()
        copy._planned = True
        return copy

    def empty(self, bucket: Bucket) -> dict[str, np.ndarray]:
        """A batch of padding alone: the fields, shapes and dtypes of this process's batches."""
        return self._collate(PlannedBatch(bucket, np.zeros((0, 3 + len(bucket.lengths)), np.int64)))

    def _collate(self, planned: PlannedBatch) -> dict[str, np.ndarray]:
        bucket = planned.bucket
        if len(bucket.lengths) == 2:
            return collate_pairs(self.corpus.sides, planned, self.blocks)
        (side,) = self.corpus.sides
        return collate(side, planned, self.blocks[bucket], self.most.get(bucket))

    def repeat(self, num_epochs: int | None = None, **options) -> "Batches":
        """The same batches for `num_epochs` epochs; None for ever, or as long as there are any."""
        if num_epochs is not None:
            require_whole("num_epochs", num_epochs, 1)
        if self.plan.finite and num_epochs not in (None, 1):
            raise ValueError(
                f"num_epochs is {num_epochs}, and this plan ends once and for all; give None or "
                "1, or ending='repeat' to go on"
            )
        if options or self._epochs != 1:
            raise ValueError(
                f"repeat(num_epochs={num_epochs}, {options}) of batches that are repeated "
                f"{self._epochs} times; repeat them once, and without other options"
            )
        copy = self._copy()
        copy._epochs = num_epochs
        return copy

    def _copy(self) -> "Batches":
        copy = object.__new__(type(self))
        copy.__dict__.update(self.__dict__)
        return copy

    def set_slice(self, sl: slice, sequential_slice: bool = False):
        """Refuses Grain's slicing of sources, which would take steps out from under the plan."""
        raise ValueError(
            f"the batches of a plan cannot be sliced in place ({sl}); use "
            "mp_prefetch(…, sequential_slice=False)"
        )

    def to_iter_dataset(
        self, read_options: grain.ReadOptions | None = None, *, allow_nones: bool = False
    ) -> grain.IterDataset:
        """An iterable data set whose iterators have the data state of this plan."""
        read_options = read_options or (FROM_MEMORY if self.corpus.in_memory else WAITING)
        steps = super().to_iter_dataset(read_options, allow_nones=allow_nones)
        return _Resumable(steps, self.plan, self.corpus)


class _Resumable(grain.IterDataset):
    """Gives the iterators of its parent the data state of a plan."""

    def __init__(self, parent: grain.IterDataset, plan: Plan, corpus: Any):
        super().__init__(parent)
        self._about = plan, corpus

    def __iter__(self) -> grain.DatasetIterator:
        return _ResumableIterator(iter(self._parent), *self._about)


class _ResumableIterator(grain.DatasetIterator):
    def __init__(self, parent: grain.DatasetIterator, plan: Plan, corpus: Any):
        super().__init__(parent)
        self._about = plan, corpus

    def __next__(self) -> dict[str, np.ndarray]:
        return next(self._parent)

    def get_state(self) -> dict[str, Any]:
        return data_state(self._parent.get_state()["next_index"], *self._about)

    def set_state(self, state: dict[str, Any]):
        self._parent.set_state({"next_index": check_data_state(state, *self._about)})


class Loader:
    """An iterator over batches as jax.Arrays, transferred while the last step still runs.

    Its state is exact with batches in flight: it counts those that were handed out.

    Args:
        batches: what to load; made with the sharding of `mesh` and `spec` if there is a mesh.
        mesh: the devices; None: all arrays on the default device.
        spec: how batches lie on the mesh, as for `to_global`.
        prefetch: batches kept ready on the devices.

    Attributes:
        planned: of the batch that was handed out last, the `PlannedBatch` that it was built from.
    """

    planned: PlannedBatch

    def __init__(self, batches: Batches, *, mesh=None, spec=None, prefetch: int = 2):
        self.plan, self.corpus = batches.plan, batches.corpus
        mesh = _one_device() if mesh is None else mesh
        used = [bucket for bucket, number in self.plan.batches_per_bucket.items() if number]
        empty = {bucket: batches.empty(bucket) for bucket in used}
        # One process's part of a bucket has shapes that no other bucket's part has.
        shapes = {_shapes(batch): bucket.shape for bucket, batch in empty.items()}

        def put(built):
            planned, batch = built
            with jax.profiler.TraceAnnotation("transfer"):
                shape = shapes[_shapes(batch)]
                return planned, to_global(batch, mesh, spec=spec, shape=shape)

        #: For each bucket that the plan uses, a `jax.ShapeDtypeStruct` for every field.
        self.specs = {
            bucket: _specs(batch, bucket, batch_sharding(mesh, spec))
            for bucket, batch in empty.items()
        }
        # The thread that transfers batches also builds them, unless building waits.
        read_options = AT_ONCE if self.corpus.in_memory else WAITING
        ahead = batches.with_plans().to_iter_dataset(read_options).map(put)
        steps = grain.experimental.ThreadPrefetchIterDataset(ahead, prefetch_buffer_size=prefetch)
        self._open = [iter(steps)]
        # At the latest when Python ends, while what closing needs is still there.
        self._close = weakref.finalize(self, _close, self._open)

    def __iter__(self) -> "Loader":
        return self

    @property
    def _steps(self) -> grain.DatasetIterator:
        if not self._open:
            raise ValueError("this loader is closed; make another")
        return self._open[0]

    def __next__(self) -> dict[str, Any]:
        self.planned, batch = next(self._steps)
        return batch

    def get_state(self) -> dict[str, Any]:
        """The data state after the batches handed out so far: small JSON."""
        return self._steps.get_state()

    def set_state(self, state: dict[str, Any]):
        """Goes on from `state`; refuses that of another plan or corpus with a `ValueError`."""
        self._steps.set_state(state)

    def close(self):
        """Stops the background threads; also when the loader is no longer used, or Python ends."""
        self._close()

    def __enter__(self) -> "Loader":
        return self

    def __exit__(self, *_):
        self.close()


def _close(iterators: list[grain.DatasetIterator]) -> None:
    while iterators:
        iterators.pop().close()


def _shapes(batch: dict[str, np.ndarray]) -> tuple[tuple[int, ...], ...]:
    return tuple(values.shape for values in batch.values())


def _specs(batch: dict[str, np.ndarray], bucket: Bucket, sharding) -> dict[str, Any]:
    specs = {}
    for name, values in batch.items():
        shape, of_field = field_layout(name, values, bucket.shape, sharding)
        specs[name] = jax.ShapeDtypeStruct(shape, values.dtype, sharding=of_field)
    return specs


def _one_device():
    auto = (jax.sharding.AxisType.Auto,)
    return jax.make_mesh((1,), ("data",), axis_types=auto, devices=jax.local_devices()[:1])


def load(
    corpus: AnyCorpus | str | os.PathLike,
    *,
    buckets: Iterable[Bucket] | None = None,
    mesh=None,
    spec=None,
    num_epochs: int | None = None,
    prefetch: int = 2,
    compact: bool = False,
    **options,
) -> Loader:
    """An iterator over the batches of a corpus, planned, packed and on the devices.

    Args:
        corpus: a corpus, a view of one, pairs, or the directory of a corpus or of pairs; or
            several corpora, as `Corpora`.
        buckets: the shapes; None: chosen by `fit_buckets`, with rows that the mesh divides.
        mesh: as for `Loader`.
        spec: as for `Loader`.
        prefetch: as for `Loader`.
        num_epochs: how often to go through the corpus; None for ever, or until the plan ends.
        compact: as for `Batches`.
        **options: what `fit_buckets` and `Plan` take by keyword: `tokens_per_batch`,
            `max_buckets`, `weights`, `seed`, `packing`, `overflow`, …

    Raises:
        TypeError: an option is of neither.
        ValueError: as `fit_buckets`, `Plan` and `Batches` raise.
    """
    known = {*FITTING, *PLANNING}
    for name in options:
        if name not in known:
            raise TypeError(
                f"load() has no option {suggest_option(name, known | {*list_keywords(load)})}"
            )
    if buckets is None and "tokens_per_batch" not in options:
        raise TypeError("load() needs tokens_per_batch=, to choose buckets by, or buckets=")
    if wrong := {*options} & {*FITTING} - {*PLANNING} if buckets is not None else ():
        raise ValueError(
            f"buckets are given, and {', '.join(sorted(wrong))} to choose them by; give one of both"
        )
    if isinstance(corpus, str | os.PathLike):
        corpus = open_corpus(corpus)
    if not hasattr(corpus, "fingerprint"):
        raise TypeError(
            f"corpus is a {type(corpus).__name__}; it must be a corpus, a view of one, pairs, "
            "Corpora, or a directory. Text is made one by prepare, arrays by Corpus.from_arrays"
        )
    if options.get("weights") is not None and not isinstance(corpus, HasCorpora):
        raise ValueError("weights are for several corpora; join them: Corpora({'name': corpus})")
    mesh = _one_device() if mesh is None else mesh
    sharding = batch_sharding(mesh, spec)
    asked = {"max_buckets": 4, "row_multiple": parts(sharding)[0], **options}
    if buckets is None:
        buckets = fit_buckets(corpus, **select_options(FITTING, asked))
    plan = Plan(corpus, buckets, **select_options(PLANNING, options))
    batches = Batches(corpus, plan, sharding=sharding, compact=compact).repeat(num_epochs)
    return Loader(batches, mesh=mesh, spec=spec, prefetch=prefetch)
