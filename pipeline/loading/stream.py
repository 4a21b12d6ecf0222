"""PackedStream: a Grain data set packed as it comes, without preparation or a disk.

Windows are in `pipeline.loading.windows`; here are the data set of their batches, and what is known
of them before an element is read.
"""

import copy
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import grain
import numpy as np

from pipeline.corpus.interface import AnyCorpus
from pipeline.corpus.tasks import CAUSAL
from pipeline.errors import (
    InvalidType,
    InvalidValue,
    name_some,
    require_one_of,
    require_type,
    require_whole,
    suggest_keywords,
)
from pipeline.loading.batches import Batches, Transform
from pipeline.loading.dynamic_context import DynamicContext
from pipeline.loading.elements import as_entries, make_examples
from pipeline.loading.exchange import Exchange
from pipeline.loading.iteration import StepDataset, StepIterDataset
from pipeline.loading.prefetch import Prefetch
from pipeline.loading.segments import Positions
from pipeline.loading.sharding import ContextOrder, parts, sharding_of
from pipeline.loading.stream_state import ENDINGS, Ending, Setup, digest_of_state
from pipeline.loading.windows import HostWindows, Window
from pipeline.planning.bucket import Bucket, as_shapes
from pipeline.planning.options import BySide, Options
from pipeline.planning.packing import Packing
from pipeline.planning.pieces import Overflow
from pipeline.planning.plan import Plan
from pipeline.planning.planned import PlannedBatch
from pipeline.text.features import NOWHERE, TOKENS, Feature, check_features

if TYPE_CHECKING:
    import jax

# The examples of a window, unless it is given.
WINDOW = 8192

# Elements of a data set by index are read by the thread that makes windows. Grain's 16 threads take
# up to ten times as long for elements in memory, and a program that ends waits for them.
READ = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)


@suggest_keywords
class PackedStream(grain.IterDataset):
    """Batches of a Grain data set that is packed as it comes, without preparation or a disk.

    A batch is a `Batch` of NumPy arrays, of the rows of this process, as of `Batches`. Elements of
    the data set are as for `Examples`: a 1-D array of token ids, marks included; or a dict with
    "tokens", optionally "weights", and each of `features` by name. The order of examples is that of
    the data set, except within windows.

    >>> source = grain.MapDataset.source([np.arange(9), np.arange(4), np.arange(6)])
    >>> batch = next(iter(PackedStream(source, [Bucket(rows=2, length=8)])))
    >>> batch["inputs_segment_ids"].tolist()
    [[1, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 2, 2, 2]]

    On several hosts, each has its own part of the data, such as `source[host::hosts]`, and the same
    options; all make their iterators, restore them and take batches in the same order. An iterator
    has the state of its host, of which Grain's `CheckpointSave` writes a file for each process; as
    many hosts can continue from it. It is JSON and has no tokens.

    Args:
        dataset: a `grain.IterDataset` of examples; or a `grain.MapDataset`, which is read in order.
        buckets: the shapes of batches, as for `Plan`.
        window: the examples that a host holds and packs together, or more if these fill no batch.
            More of them leave less padding, and take more memory; default 8,192.
        sharding: as for `pipeline.load`. Default None: this process alone has all rows.
        ending: what happens where the data of some hosts end before those of others: "pad"
            (default): their later rows are empty, and each example comes once; "drop": all end
            where the first host cannot fill a batch, and no row is empty.
        features: the schemas of the other columns, by name, with dtypes; all are read. Default
            None: there are none.
        packing: as for `Plan`.
        overflow: as for `Plan`.
        max_segments: as for `Plan`; features of examples need it, since it decides their shape.
        align: as for `Plan`.
        cost: as for `Plan`.
        seed: decides the order of the rows and batches of each window; default 0.
        transform: as for `pipeline.load`. If it takes two arguments, the second is the
            `PlannedBatch` of the rows of this process, which numbers the elements of its data set
            from 0.
        positions: as for `pipeline.load`.
        context_order: as for `pipeline.load`.

    Attributes:
        batches: the `Batches` of no example, whose `specs` have the fields for each bucket.
        setup: what its windows depend on.

    Raises:
        TypeError: an argument has another type.
        ValueError: an argument is not as above, or hosts share rows.
    """

    def __init__(
        self,
        dataset: grain.IterDataset | grain.MapDataset,
        buckets: Iterable[Bucket],
        *,
        window: int = WINDOW,
        sharding: "jax.sharding.Mesh | jax.sharding.NamedSharding | DynamicContext | None" = None,
        ending: Ending = "pad",
        features: Mapping[str, Feature] | None = None,
        packing: Packing = "best_fit",
        overflow: Overflow | None = None,
        max_segments: int | None = None,
        align: BySide = 1,
        cost: BySide = 1,
        seed: int = 0,
        transform: Transform | None = None,
        positions: Positions = "continue",
        context_order: ContextOrder = "contiguous",
    ):
        super().__init__(as_iterable(dataset))
        window = require_whole("window", window, 1)
        require_one_of("ending", ending, ENDINGS)
        schemas, buckets = _require_dtypes(features), as_shapes(buckets)
        example = make_blank(buckets, schemas)
        packed: dict[str, Any] = {"packing": packing, "overflow": overflow, "align": align}
        packed |= {"max_segments": max_segments, "cost": cost, "seed": seed}
        plan = Plan(example, buckets, **packed)
        _require_packing(plan.options, schemas)
        built: dict[str, Any] = {"sharding": sharding, "transform": transform}
        built |= {"positions": positions, "context_order": context_order}
        self.batches = Batches(example, plan, **built)._copy(plan=AllBuckets(plan.buckets))
        hosts, host = find_hosts(self.batches.sharding, [bucket.rows for bucket in plan.buckets])
        self.setup = Setup(
            batches=self.batches,
            options=plan.options,
            window=window,
            ending=ending,
            features=schemas,
            hosts=hosts,
            host=host,
        )

    def __str__(self) -> str:
        shapes = ", ".join(map(str, self.setup.options.buckets))
        return f"PackedStream(buckets {shapes}, window {self.setup.window:,})"

    @property
    def _element_spec(self) -> Any:
        return self.batches._element_spec

    def mp_prefetch(self, *arguments: Any, **options: Any) -> NoReturn:
        """Refuses workers, of which each would pack a part of the data, and meet no other host."""
        raise InvalidValue(
            "workers cannot share the batches of a PackedStream; call mp_prefetch on its data set, "
            "PackedStream(dataset.mp_prefetch(…), …), or use threads after it: "
            "grain.experimental.ThreadPrefetchIterDataset"
        )

    def set_slice(self, sl: slice, sequential_slice: bool = False) -> None:
        """Refuses the slices of Grain's workers; see `mp_prefetch`."""
        self.mp_prefetch()

    def __reduce__(self) -> NoReturn:
        self.mp_prefetch()

    def __copy__(self) -> "PackedStream":
        return self

    def __deepcopy__(self, memo: object) -> "PackedStream":
        return self

    def __iter__(self) -> "PackedIterator":
        return PackedIterator(self)


class PackedIterator(grain.DatasetIterator):
    """An iterator over the batches of a `PackedStream`.

    Attributes:
        planned: the `PlannedBatch` of the last batch that `next` returned; absent before the first.
    """

    planned: PlannedBatch
    _end: Callable[[], object] = staticmethod(int)  # nothing, until there is a thread

    def __init__(self, stream: PackedStream):
        source = iter(stream.parents[0])
        super().__init__(source)
        self._stream, self._source, self._lock = stream, source, threading.Lock()
        self._begin(None)

    def _begin(self, state: dict[str, Any] | None) -> None:
        windows = HostWindows(self._stream.setup, self._source, self._lock, state)
        self._ahead = Prefetch[Window](windows.make, 1, end=lambda: sys.maxsize)
        self._state = windows.begin if state is None else state
        self._within = int(self._state["within"])  # batches of the window that were returned
        self._window: Window | None = None
        # Also before Python ends; without `self`, which it would keep alive.
        self._end = weakref.finalize(self, _end, self._ahead, windows)

    def __next__(self) -> Any:
        while self._window is None or self._within >= len(self._window):
            window = self._ahead.next()
            self._within = self._within if self._window is None else 0
            self._window = window
        self.planned, batch = self._window.batches[self._window.first + self._within]
        self._within += 1
        return batch

    def get_state(self) -> dict[str, Any]:
        """The state after the batches that `next` returned so far: JSON, without tokens."""
        state = self._state
        if self._window is not None:
            step = {"step": self._window.first + self._within, "within": self._within}
            state = self._window.begin | step
        return copy.deepcopy(state) | {"digest": digest_of_state(state)}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues from `state`; one of other options or of another host raises a `ValueError`.

        The examples that the iterator held are read again when the next batch is asked for. If
        their lengths differ, that is an error, too.
        """
        state = self._stream.setup.check(state)
        self._end()
        self._begin(state)

    def __reduce__(self) -> NoReturn:
        raise InvalidType(
            "an iterator has threads, so it cannot be copied or pickled; save its get_state(), and "
            "give it to set_state of another one of the same data set and options"
        )

    def start_prefetch(self) -> None:
        """Begins to read the first window now."""
        self._ahead.start()

    def close(self) -> None:
        """Stops the background thread, as happens when the iterator is deleted.

        It waits half a second at most for an element that the data set is making.
        """
        self._end()
        if self._lock.acquire(blocking=False):  # else the thread is still in the data set
            super().close()
            self._lock.release()


def _end(ahead: Prefetch, windows: "HostWindows") -> None:
    if not ahead.inherited:
        windows.interrupt()
        ahead.close()


def as_iterable(dataset: Any) -> grain.IterDataset:
    """A data set of examples by iteration; one by index is read in order."""
    if isinstance(dataset, StepDataset | StepIterDataset | PackedStream):
        raise InvalidType(
            f"dataset is {dataset!s:.80}, whose elements are batches; give a data set of examples"
        )
    if isinstance(dataset, grain.MapDataset):
        return dataset.to_iter_dataset(READ)
    wanted = "a grain.MapDataset or a grain.IterDataset of examples"
    require_type("dataset", dataset, grain.IterDataset, wanted)
    return dataset


def find_hosts(
    sharding: "jax.sharding.NamedSharding | DynamicContext | None", buckets: Iterable[int]
) -> tuple[tuple[int, ...], int]:
    """The processes that share the rows of batches, and the place of this one among them.

    `buckets` are numbers of rows.

    Raises:
        ValueError: processes hold the same rows, or this process holds none.
    """
    if sharding is None:
        return (0,), 0
    import jax

    rows = dict[int, set[int]]()
    for on in {sharding_of(sharding, rows_of_batch) for rows_of_batch in buckets}:
        whole, rows = parts(on), {}
        for device, index in on.devices_indices_map(whole).items():
            mine = range(*index[0].indices(whole[0]))
            rows.setdefault(device.process_index, set()).update(mine)
        if sum(map(len, rows.values())) > whole[0]:
            raise InvalidValue(
                f"processes hold the same rows of batches over {on.spec} of {on.mesh}, but each "
                "packs rows of its own data; give a mesh (or most= of DynamicContext) with which "
                "only devices of one process share rows, or prepare the data as a corpus"
            )
    hosts, me = sorted(rows), jax.process_index()
    if me not in rows:
        raise InvalidValue(
            f"process {me} has no device of the mesh; make the stream on processes "
            f"{name_some(hosts)} alone"
        )
    return tuple(hosts), hosts.index(me)


def read_lengths(
    dataset: grain.IterDataset | grain.MapDataset,
    features: Mapping[str, Feature] | None,
    window: int,
    sharding: "jax.sharding.NamedSharding | DynamicContext | None",
) -> dict[str, np.ndarray]:
    """The lengths of each side of the first `window` examples of all hosts together."""
    hosts, _ = find_hosts(sharding, [getattr(sharding, "devices", 1)])
    source, count = iter(as_iterable(dataset)), -(-window // len(hosts))
    try:
        elements = [(n, as_entries(each)) for n, each in zip(range(count), source, strict=False)]
    finally:
        source.close()
    corpus = make_examples(elements, check_features(features)) if elements else None
    mine: list[Any] = [[], []]
    if corpus is not None:
        mine = [corpus.side_names, np.reshape(corpus.lengths, (len(corpus), -1)).tolist()]
    answers = [mine] if len(hosts) == 1 else Exchange(hosts).gather(mine)
    every = [lengths for _, some in answers for lengths in some]
    if not every:
        raise InvalidValue("dataset has no element on any host; give buckets=, or another data set")
    names = next(names for names, _ in answers if names)
    return dict(zip(names, np.array(every, np.int64).T, strict=True))


def _require_packing(options: Options, features: Mapping[str, Feature]) -> None:
    """Refuses features whose shape or aim the packing does not keep."""
    of_examples = [name for name, feature in features.items() if feature.per_example]
    if of_examples and options.most_in_row is None:
        raise InvalidValue(
            f"{name_some(of_examples)} have a column for each segment of a row, whose number "
            "differs between batches; give max_segments= to fix the shape"
        )
    pointers = [name for name, feature in features.items() if feature.to is not None]
    if pointers and options.overflow == "truncate":
        raise InvalidValue(
            f"overflow is 'truncate', but {pointers[0]!r} points to a side, which then cannot "
            "be cut; give overflow='drop', or longer buckets"
        )


def _require_dtypes(features: Mapping[str, Feature] | None) -> dict[str, Feature]:
    schemas = check_features(features)
    for name, feature in schemas.items():
        if feature.dtype is None:
            raise InvalidValue(
                f"the feature {name!r} has no dtype, and hosts may begin with different examples; "
                f"give one, as in Feature({feature.of!r}, dtype='float32')"
            )
    return schemas


def make_blank(buckets: Sequence[Bucket], features: Mapping[str, Feature]) -> AnyCorpus:
    """One example, of one position on each side: what is known of a data set before it is read."""
    column = {
        name: np.full((1, *feature.shape), 0 if feature.to is None else NOWHERE, feature.dtype)
        if feature.of_arrays
        else np.zeros((2,) * (feature.of in ("inputs", "targets")) + feature.shape, feature.dtype)
        for name, feature in features.items()
    }
    tokens = {TOKENS: np.zeros(2, np.int32)} if CAUSAL.side in buckets[0].names else {}
    return make_examples([(0, tokens | column)], features)


class AllBuckets:
    """A plan of no batch, which uses all of its buckets."""

    def __init__(self, buckets: Iterable[Bucket]):
        self.batches_per_bucket = dict.fromkeys(buckets, 1)
