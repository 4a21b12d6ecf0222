"""From options to a loader: `load`, of a corpus or of a Grain data set."""

import dataclasses
import logging
import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, Unpack, cast

import grain

from pipeline.corpus import truncate_groups
from pipeline.corpus.interface import AnyCorpus
from pipeline.corpus.opening import open_corpus
from pipeline.errors import InvalidType, InvalidValue, require_type, suggest_option
from pipeline.loading.batches import A_CORPUS, Batches, Transform
from pipeline.loading.dynamic_context import DynamicContext
from pipeline.loading.fitting import FITTING, fit_shapes, keep_shapes
from pipeline.loading.loader import Loader, StreamLoader
from pipeline.loading.segments import Positions
from pipeline.loading.sharding import ContextOrder, batch_sharding
from pipeline.loading.state import Saved
from pipeline.loading.stream import WINDOW, PackedStream, read_lengths
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
