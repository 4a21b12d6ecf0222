"""The loader: an iterator that transfers batches to the devices ahead, and `load`, to make one."""

import copy
import dataclasses
import functools
import logging
import numbers
import os
import sys
import threading
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, Unpack, cast

import grain

from pipeline.corpus import truncate_groups
from pipeline.corpus.interface import AnyCorpus
from pipeline.corpus.opening import open_corpus
from pipeline.errors import (
    InvalidType,
    InvalidValue,
    require_type,
    require_whole,
    suggest_option,
)
from pipeline.fields.batch import Batch
from pipeline.loading.ahead import ReadAhead
from pipeline.loading.batches import A_CORPUS, Batches, Transform, phase
from pipeline.loading.collate import Positions
from pipeline.loading.dynamic_context import DynamicContext
from pipeline.loading.fitting import FITTING, fit_shapes, keep_shapes
from pipeline.loading.iteration import StepIterator
from pipeline.loading.live import LiveBatches
from pipeline.loading.prefetch import Prefetch
from pipeline.loading.sharding import (
    ContextOrder,
    batch_sharding,
    field_specs,
    place,
    require_specs,
    sharding_of,
)
from pipeline.loading.state import Saved
from pipeline.loading.stream import WINDOW, PackedIterator, PackedStream, read_lengths
from pipeline.loading.stream_state import saved_setup
from pipeline.planning.bucket import Bucket, as_buckets
from pipeline.planning.figures import warn_of_overflow, warn_of_positions
from pipeline.planning.lengths import Exclude
from pipeline.planning.options import (
    BySide,
    PackingOptions,
    PlanOptions,
    Weights,
    list_keywords,
    select_options,
)
from pipeline.planning.plan import PLANNING, Plan
from pipeline.planning.planned import PlannedBatch
from pipeline.text.features import Feature

if TYPE_CHECKING:
    import jax

logger = logging.getLogger(__name__)


class OrderedOptions(PackingOptions, total=False):
    """The options of `fit_buckets` and `Plan` that leave examples in order, for type checkers."""

    tokens_per_batch: int
    max_buckets: int
    max_length: int | tuple[int, ...] | Mapping[str, int] | None
    length_multiple: BySide | None
    row_multiple: int
    devices: int | None
    exclude: Exclude


class LoadOptions(OrderedOptions, PlanOptions, total=False):
    """The options that `load` hands on to `fit_buckets` and `Plan`, for type checkers."""

    weights: Weights | None


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
        transfer = _Transfer(batches, self.sharding, self.specs)
        self._live = live = LiveBatches(batches, self.specs, changes_every)

        def make(step: int) -> tuple[PlannedBatch, Any]:
            built: Any = live.at(step, ahead.is_wanted)
            planned, batch = built[step]
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


class _Transfer:
    """Puts batches on the devices, as programs were compiled for; holds no loader.

    A loader's thread has it, and would keep the loader alive.
    """

    def __init__(self, batches: Batches, sharding: Any, specs: Mapping[Bucket, Any]):
        self._sharding, self._specs, self._features = sharding, specs, batches.features
        self._commit = batches.sharding is not None
        self._layouts: dict[Bucket, list] = {}  # of batches that have these specs

    def __call__(self, step: int, bucket: Bucket, batch: Mapping[str, Any]) -> Any:
        """The batch of a step, a dict of jax.Arrays; a `ValueError` if it has other fields."""
        with phase("transfer"):
            layout = [
                (name, type(field), getattr(field, "shape", None), getattr(field, "dtype", None))
                for name, field in batch.items()
            ]
            if self._layouts.get(bucket) != layout:
                on = sharding_of(self._sharding, bucket.rows)
                layout_specs = field_specs(batch, on, bucket, self._features)
                require_specs(layout_specs, self._specs[bucket], f"the batch of step {step:,}")
                self._layouts[bucket] = layout
            return place(batch, self._specs[bucket], commit=self._commit)


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
        transfer = _Transfer(self.batches, self.sharding, self.specs)

        def make(step: int) -> tuple[PlannedBatch, Any, dict[str, Any]]:
            if not ready:  # else an error came after it
                ready.append(next(batches))
            planned = batches.planned
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


class GrainDataset(Protocol):
    """A `grain.MapDataset` or `grain.IterDataset`, for type checkers, some of which see neither."""

    def filter(self, transform: Any) -> Any:
        """The data set of some elements."""

    def map(self, transform: Any) -> Any:
        """The data set of other elements."""


def load(
    corpus: AnyCorpus | str | os.PathLike | GrainDataset,
    *,
    buckets: Iterable[Bucket] | None = None,
    sharding: "jax.sharding.Mesh | jax.sharding.NamedSharding | DynamicContext | None" = None,
    num_epochs: int | None = None,
    state: dict[str, Any] | None = None,
    prefetch: int = 2,
    num_threads: int = 1,
    positions: Positions | None = None,
    transform: Transform | None = None,
    context_order: ContextOrder = "contiguous",
    features: Iterable[str] | Mapping[str, Feature] | None = None,
    timeout_seconds: float | None = None,
    changes_every: int | None = None,
    **options: Unpack[LoadOptions],
) -> Loader:
    """An iterator over the batches of a corpus or a Grain data set: packed and on the devices.

    A batch is a `Batch`, a dict of jax.Arrays of the global shape `[rows, length]` of its bucket.

    Args:
        corpus: a corpus, a view of one, pairs, `Corpora`, or the directory of a corpus or of pairs.
            Tokens are compared with their digests only in a cache; see `Corpus.open`. Or a Grain
            data set of examples, of which a `PackedStream` is made, or a `PackedStream`.
        buckets: the shapes, as for `Plan`; None: fitted, for which `tokens_per_batch` is needed.
        sharding: the devices that share a batch: a `jax.sharding.Mesh`, whose axes `data` and
            `fsdp` divide rows, and whose axis `context` divides length, if it has them; or a
            `jax.sharding.NamedSharding` of `[rows, length]`; or a `DynamicContext`, which divides
            the length of a bucket over as many devices as its rows need; None: the first local
            device.
        num_epochs: passes through the corpus; None: endless.
        state: the data state to continue from, of `get_state` of such a loader, perhaps on another
            number of devices. Shapes are then those of the state, not fitted again, and so are the
            options of `Plan` and `positions` that are not given. None: from the beginning.
        prefetch: the number of batches kept ready on the devices (2).
        num_threads: the number of threads that build batches (1). Text is built fastest by one;
            give more where files are decoded (`Decoded`), or a `transform` takes long, which is
            then called in several threads at once.
        positions: later pieces of a split example continue its positions ("continue", the default),
            or begin at 0 ("restart"), so that no position reaches the length of its row.
        transform: a function of each batch of NumPy arrays before its transfer, which returns a
            dict of arrays; for example `lambda batch: pipeline.rename(batch, "maxtext")`. See
            `Batches`.
        context_order: the order of the columns of a row whose length is divided over devices:
            "contiguous", "zigzag" or "striped" (contiguous); see `Batches`.
        features: names of the features to read, among the corpus's `features` and "example_id";
            (): none; None: all of the corpus, without "example_id". Of a Grain data set, their
            schemas by name.
        timeout_seconds: the longest wait for one batch. Then `next` raises a `TimeoutError`, which
            says which step is late, and what its thread is doing; no batch is lost. None: no limit.
        changes_every: `Loader.change` takes effect at multiples of this many steps, at each of
            which processes tell one another whether it does. None: at any step; on several
            processes, `change` is refused.
        **options: of `fit_buckets`, which chooses the buckets (tokens_per_batch, max_buckets,
            max_length, length_multiple, row_multiple, devices, attention, width), and of `Plan`
            (packing, overflow, seed, shuffle, max_segments, align, cost, tiers, curriculum, cycles,
            read_shares, window, exclude, weights, by). Here `max_buckets` is 4 by default, and
            `row_multiple` the number of devices that share the rows. With `overflow="truncate"`,
            groups that are too long lose continuations. Of a Grain data set, they are those of
            `fit_buckets`, which sees its first window, and of `PackedStream`.

    Raises:
        TypeError: there is no such option, or `corpus` is not a corpus.
        ValueError: a value is not as above; the message names the option and what it may be. Or
            `state` is of another corpus, or of another value of an option.
    """
    for name in options:
        if name not in LoadOptions.__annotations__:
            names = {*LoadOptions.__annotations__, *list_keywords(load)}
            raise InvalidType(f"load() has no option {suggest_option(name, names)}")
    if isinstance(corpus, PackedStream):
        return _continue(
            StreamLoader(corpus, prefetch=prefetch, timeout_seconds=timeout_seconds), state
        )
    if buckets is None and state is None and "tokens_per_batch" not in options:
        raise InvalidType("load() needs tokens_per_batch=, to choose buckets, or buckets=")
    if buckets is not None and (wrong := {*options} & {*FITTING} - {*PLANNING}):
        raise InvalidValue(
            f"buckets are given, and also {', '.join(sorted(wrong))} to choose them; give only one "
            "of the two"
        )
    if isinstance(corpus, grain.MapDataset | grain.IterDataset):
        keywords: dict[str, Any] = {"sharding": sharding, "transform": transform}
        keywords |= {"context_order": context_order, "features": features, **options}
        keywords |= {"positions": positions} if positions is not None else {}
        keywords |= {"num_epochs": num_epochs} if num_epochs is not None else {}
        keywords |= {"num_threads": num_threads} if num_threads != 1 else {}
        keywords |= {"changes_every": changes_every} if changes_every is not None else {}
        stream = _make_stream(corpus, buckets, keywords, state)
        loader = StreamLoader(stream, prefetch=prefetch, timeout_seconds=timeout_seconds)
        return _continue(loader, state)
    sharding = None if sharding is None else batch_sharding(sharding)
    if isinstance(corpus, str | os.PathLike):
        corpus = open_corpus(corpus)
    require_type("corpus", corpus, "fingerprint", f"a directory, or {A_CORPUS}")
    corpus = cast("AnyCorpus", corpus)
    saved = None if state is None else Saved.of(state)
    fitted = None
    if buckets is None and saved is not None:
        buckets, fitted = keep_shapes(saved.shapes, options, sharding, context_order)
    elif buckets is None:
        buckets, fitted = fit_shapes(corpus, sharding, context_order, options)
    planning: dict[str, Any] = select_options(PLANNING, options)
    if saved is not None:
        planning = saved.options | planning
        positions = positions or saved.positions
        if saved.corpora and "weights" not in options:
            raise InvalidValue(
                f"the state mixes {', '.join(saved.corpora)}, and does not have the weights of "
                "later steps; give weights= as before"
            )
    overflow = planning.get("overflow")
    if isinstance(overflow, str) and overflow == "truncate" and corpus.trees is not None:
        buckets = as_buckets(buckets)
        corpus = truncate_groups(corpus, buckets[-1].length)
    plan = Plan(corpus, buckets, **planning)
    if warning := warn_of_overflow(plan.stages[0]):
        logger.warning(warning)
    if positions is None and (warning := warn_of_positions(plan.stages[0])):
        logger.warning(
            f"{warning}, and a table of positions needs as many entries; if files of tokens have "
            "no marks between documents, give the id that ends each (end=); else "
            "positions='restart' begins each piece at 0, and positions='continue' stays so"
        )
    batches = Batches(
        corpus,
        plan,
        sharding=sharding,
        positions=positions or "continue",
        transform=transform,
        context_order=context_order,
        features=features,
    )
    batches = batches.note_fitted(fitted)
    loader = Loader(
        batches.repeat(num_epochs),
        prefetch=prefetch,
        num_threads=num_threads,
        timeout_seconds=timeout_seconds,
        changes_every=changes_every,
    )
    return _continue(loader, state)


def _continue(loader: Loader, state: dict[str, Any] | None) -> Loader:
    """The loader at a state; at the beginning if that is None."""
    if state is not None:
        loader.set_state(state)
    return loader


# Options of plans and loaders that a stream has in another way.
INSTEAD = {
    "num_epochs": "repeat the data set itself, as in dataset.repeat(3)",
    "num_threads": "read it in threads, dataset.to_iter_dataset(grain.ReadOptions(num_threads=8))",
    "shuffle": "its order is that of the data set, except within windows",
    "exclude": "leave them out with dataset.filter",
    "weights": "mix data sets, with grain.IterDataset.mix or grain.MapDataset.mix",
    "by": "data sets are mixed by examples, with grain.IterDataset.mix or grain.MapDataset.mix",
}


def _make_stream(
    dataset: Any, buckets: Any, keywords: dict[str, Any], state: dict[str, Any] | None
) -> PackedStream:
    """The stream of a data set, with the options of `load`."""
    names = list_keywords(PackedStream)
    for name in keywords:
        if name in INSTEAD or name not in (*names, *FITTING):
            way = INSTEAD.get(name, "only a plan has it: prepare the data as a corpus")
            raise InvalidValue(f"{name} is given for a Grain data set; {way}")
    sharding = None if keywords["sharding"] is None else batch_sharding(keywords["sharding"])
    options = select_options(names, keywords)
    fitted = None
    if buckets is None and state is not None:
        of_state, saved = saved_setup(state)
        buckets, fitted = keep_shapes(of_state, keywords, sharding, keywords["context_order"])
        options = saved | options
    elif buckets is None:
        window = keywords.get("window", WINDOW)
        lengths = read_lengths(dataset, keywords["features"], window, sharding)
        buckets, fitted = fit_shapes(lengths, sharding, keywords["context_order"], keywords)
    stream = PackedStream(dataset, buckets, **options)
    stream.setup = dataclasses.replace(stream.setup, fitted=fitted)
    return stream
