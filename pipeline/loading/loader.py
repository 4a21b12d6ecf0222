"""The loader: an iterator that transfers batches to the devices ahead, and `load`, to make one."""

import functools
import logging
import math
import numbers
import os
import threading
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Unpack

from pipeline.corpus.groups import truncate_groups
from pipeline.corpus.interface import AnyCorpus
from pipeline.corpus.pairs import open_corpus
from pipeline.errors import (
    InvalidType,
    InvalidValue,
    require_type,
    require_whole,
    suggest_option,
)
from pipeline.loading.ahead import ReadAhead
from pipeline.loading.batches import A_CORPUS, Batch, Batches, Transform, phase
from pipeline.loading.collate import Positions
from pipeline.loading.dynamic_context import DynamicContext
from pipeline.loading.iteration import StepIterator
from pipeline.loading.prefetch import Prefetch
from pipeline.loading.sharding import (
    ContextOrder,
    batch_sharding,
    field_specs,
    multiples,
    place,
    require_specs,
    sharding_of,
)
from pipeline.planning.bucket import Bucket, as_buckets
from pipeline.planning.figures import warn_of_overflow
from pipeline.planning.fit import fit_buckets
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

if TYPE_CHECKING:
    import jax

logger = logging.getLogger(__name__)

FITTING = list_keywords(fit_buckets)


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

    Attributes:
        batches: the `Batches` that it loads.
        plan: the `Plan`: buckets, batches, padding; `print` shows it.
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
    ):
        wanted = "Batches; transform them in the step, or with Batches(…, transform=function)"
        require_type("batches", batches, Batches, wanted)
        prefetch, limit = require_whole("prefetch", prefetch, 0), timeout_seconds
        threads = require_whole("num_threads", num_threads, 1)
        numeric = isinstance(limit, numbers.Real) and 0 < limit <= threading.TIMEOUT_MAX
        if limit is not None and not numeric:
            raise InvalidValue(
                f"timeout_seconds is {limit!r}; it must be a number of seconds above 0, or None"
            )
        self._timeout = None if limit is None else float(limit)
        if not hasattr(batches, "sharding"):
            raise InvalidValue(
                "batches is a pickled copy, which knows no devices; pickle the corpus and the "
                "plan, and make Batches(corpus, plan, sharding=…) of them"
            )
        self.batches, self.plan, self.corpus = batches, batches.plan, batches.corpus
        self.specs, self.sharding = batches.specs, batch_sharding(batches.sharding)
        # Without `self`, which the thread would keep alive.
        specs, sharding, features = self.specs, self.sharding, batches.features
        built: Any = batches.with_plans()
        commit = batches.sharding is not None
        layouts: dict[Bucket, list] = {}  # of batches that have these specs

        def make(step: int) -> tuple[PlannedBatch, Any]:
            planned, batch = built[step]
            bucket, layout = planned.bucket, [_describe(*each) for each in batch.items()]
            with phase("transfer"):
                if layouts.get(bucket) != layout:
                    on = sharding_of(sharding, bucket.rows)
                    found = field_specs(batch, on, bucket, features)
                    require_specs(found, specs[bucket], f"the batch of step {step:,}")
                    layouts[bucket] = layout
                return planned, place(batch, specs[bucket], commit=commit)

        size = prefetch + threads - 1
        ahead = Prefetch(make, size, end=len(batches), threads=threads)
        close = functools.partial(_close, ahead, batches.ahead)
        super().__init__(batches, ahead, close)

    def __repr__(self) -> str:
        at = "closed" if self._ahead.closed else f"at step {self.step:,}"
        return f"Loader({self.batches!r}, {at})"

    def __iter__(self) -> "Loader":
        return self

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


def _describe(name: str, field: Any) -> tuple:
    """All of a field that its spec depends on."""
    return name, type(field), getattr(field, "shape", None), getattr(field, "dtype", None)


def _close(batches: Prefetch, files: ReadAhead) -> None:
    if not batches.inherited:  # its lock may be held by a thread of the parent
        batches.close()
        files.stop()  # last, since a batch in the making would restart it


def load(
    corpus: AnyCorpus | str | os.PathLike,
    *,
    buckets: Iterable[Bucket] | None = None,
    sharding: "jax.sharding.Mesh | jax.sharding.NamedSharding | DynamicContext | None" = None,
    num_epochs: int | None = None,
    prefetch: int = 2,
    num_threads: int = 1,
    positions: Positions = "continue",
    transform: Transform | None = None,
    context_order: ContextOrder = "contiguous",
    features: Iterable[str] | None = None,
    timeout_seconds: float | None = None,
    **options: Unpack[LoadOptions],
) -> Loader:
    """An iterator over the batches of a corpus: planned, packed and on the devices.

    A batch is a `Batch`, a dict of jax.Arrays of the global shape `[rows, length]` of its bucket.

    Args:
        corpus: a corpus, a view of one, pairs, `Corpora`, or the directory of a corpus or of pairs.
            Tokens are compared with their digests only in a cache; see `Corpus.open`.
        buckets: the shapes, as for `Plan`; None: fitted, for which `tokens_per_batch` is needed.
        sharding: the devices that share a batch: a `jax.sharding.Mesh`, whose axes `data` and
            `fsdp` divide rows, and whose axis `context` divides length, if it has them; or a
            `jax.sharding.NamedSharding` of `[rows, length]`; or a `DynamicContext`, which divides
            the length of a bucket over as many devices as its rows need; None: the first local
            device.
        num_epochs: passes through the corpus; None: endless.
        prefetch: the number of batches kept ready on the devices (2).
        num_threads: the number of threads that build batches (1). Text is built fastest by one;
            give more where files are decoded (`Decoded`), or a `transform` takes long, which is
            then called in several threads at once.
        positions: later pieces of a split example continue its positions ("continue"), or begin at
            0 ("restart"), so that no position reaches the length of its row.
        transform: a function of each batch of NumPy arrays before its transfer, which returns a
            dict of arrays; for example `lambda batch: pipeline.rename(batch, "maxtext")`. See
            `Batches`.
        context_order: the order of the columns of a row whose length is divided over devices:
            "contiguous", "zigzag" or "striped" (contiguous); see `Batches`.
        features: names of the features to read, among the corpus's `features` and "example_id";
            (): none; None: all of the corpus, without "example_id".
        timeout_seconds: the longest wait for one batch. Then `next` raises a `TimeoutError`, which
            says which step is late, and what its thread is doing; no batch is lost. None: no limit.
        **options: of `fit_buckets`, which chooses the buckets (tokens_per_batch, max_buckets,
            max_length, length_multiple, row_multiple, devices, attention, width), and of `Plan`
            (packing, overflow, seed, shuffle, max_segments, align, cost, tiers, window, exclude,
            weights, by). Here `max_buckets` is 4 by default, and `row_multiple` the number of
            devices that share the rows. With `overflow="truncate"`, groups that are too long lose
            continuations.

    Raises:
        TypeError: there is no such option, or `corpus` is not a corpus.
        ValueError: a value is not as above; the message names the option and what it may be.
    """
    for name in options:
        if name not in LoadOptions.__annotations__:
            known = {*LoadOptions.__annotations__, *list_keywords(load)}
            raise InvalidType(f"load() has no option {suggest_option(name, known)}")
    if buckets is None and "tokens_per_batch" not in options:
        raise InvalidType("load() needs tokens_per_batch=, to choose buckets, or buckets=")
    if buckets is not None and (wrong := {*options} & {*FITTING} - {*PLANNING}):
        raise InvalidValue(
            f"buckets are given, and also {', '.join(sorted(wrong))} to choose them; give only one "
            "of the two"
        )
    sharding = None if sharding is None else batch_sharding(sharding)
    if isinstance(corpus, str | os.PathLike):
        corpus = open_corpus(corpus)
    require_type("corpus", corpus, "fingerprint", f"a directory, or {A_CORPUS}")
    if buckets is None:
        rows, length = multiples(sharding, context_order)
        several = math.lcm(128, length) if length > 1 else None
        multiple: dict[str, Any] = {"row_multiple": rows, "length_multiple": several}
        if isinstance(sharding, DynamicContext):
            multiple["devices"] = sharding.devices
        fitting = {"max_buckets": 4, **multiple, **options}
        buckets = fit_buckets(corpus, **select_options(FITTING, fitting))
    overflow = options.get("overflow")
    if isinstance(overflow, str) and overflow == "truncate" and corpus.trees is not None:
        buckets = as_buckets(buckets)
        corpus = truncate_groups(corpus, buckets[-1].length)
    plan = Plan(corpus, buckets, **select_options(PLANNING, options))
    if warning := warn_of_overflow(plan.stages[0]):
        logger.warning(warning)
    batches = Batches(
        corpus,
        plan,
        sharding=sharding,
        positions=positions,
        transform=transform,
        context_order=context_order,
        features=features,
    )
    return Loader(
        batches.repeat(num_epochs),
        prefetch=prefetch,
        num_threads=num_threads,
        timeout_seconds=timeout_seconds,
    )
