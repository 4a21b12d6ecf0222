"""PackedStream: a Grain data set packed as it comes, window by window, without preparation.

Each host holds up to a window of examples and packs them into rows, as plans do. Hosts then agree
on the batches of the window: for each bucket, as many as every host can fill. Rows that fill no
batch are taken apart, and their pieces are packed again in the next window, which a thread reads.
So hosts have one shape at each step and see no example but their own.
"""

import base64
import copy
import dataclasses
import functools
import hashlib
import logging
import sys
import threading
import weakref
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn, get_args

import grain
import numpy as np

from pipeline.corpus.examples import Examples
from pipeline.corpus.gather import Fields
from pipeline.corpus.interface import AnyCorpus, Readable, View
from pipeline.corpus.tasks import CAUSAL
from pipeline.errors import (
    InvalidState,
    InvalidType,
    InvalidValue,
    name_some,
    require_one_of,
    require_type,
    require_whole,
    suggest_keywords,
)
from pipeline.loading.batches import Batches, Transform
from pipeline.loading.collate import Positions
from pipeline.loading.exchange import Exchange
from pipeline.loading.iteration import StepDataset, StepIterDataset
from pipeline.loading.prefetch import Prefetch
from pipeline.loading.sharding import ContextOrder, parts
from pipeline.loading.state import differences
from pipeline.planning.balance import balance
from pipeline.planning.bucket import Bucket, as_shapes
from pipeline.planning.layout import lay_out, ranges
from pipeline.planning.options import BySide, Options
from pipeline.planning.order import Purpose, permutation, random_bits, random_key, sort_by_group
from pipeline.planning.packing import Packing
from pipeline.planning.pieces import Overflow, merge_spans
from pipeline.planning.plan import Plan
from pipeline.planning.planned import PlannedBatch
from pipeline.text.features import NOWHERE, OF, TOKENS, Feature, check_features

if TYPE_CHECKING:
    import jax

logger = logging.getLogger(__name__)

Ending = Literal["pad", "drop"]
ENDINGS: tuple[Ending, ...] = get_args(Ending)

# The examples of a window, unless it is given.
WINDOW = 8192

# The version of the packing of windows. It goes up whenever batches would change.
VERSION = 1

# The state of the source is noted before every so many elements: it may take long to copy. As many
# elements at most are read in vain after a restore.
MARK = 32

# The parts of a state: whole numbers from 0, and others.
COUNTS = ("window", "step", "within", "lost", "read", "mark", "host")
STATE = (*COUNTS, "carried", "lengths", "identity", "source")

# If hosts have less than this share of their full batches in common, they all use the longest
# bucket: each window would move few examples, and be packed for few batches.
IN_COMMON = 0.5

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
        window: the examples that a host holds and packs together. More of them leave less padding,
            and take more memory; default 8,192.
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
        batches: the `Batches` of no example, which tell the fields of batches: `batches.specs` has
            the shapes of each bucket.
        options: the options of packing.
        hosts: the numbers of the processes that share batches; `host`: the place of this one.

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
        sharding: "jax.sharding.Mesh | jax.sharding.NamedSharding | None" = None,
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
        self.window = require_whole("window", window, 1)
        require_one_of("ending", ending, ENDINGS)
        self.ending, self.features = ending, _require_dtypes(features)
        packed: dict[str, Any] = {"packing": packing, "overflow": overflow, "align": align}
        packed |= {"max_segments": max_segments, "cost": cost, "seed": seed}
        buckets = tuple(buckets) if isinstance(buckets, Iterable) else buckets
        example = make_blank(buckets, self.features)
        plan = Plan(example, buckets, **packed)
        self.options = plan.options
        self._require_features()
        batches = Batches(
            example,
            plan,
            sharding=sharding,
            transform=transform,
            positions=positions,
            context_order=context_order,
        )
        shapes: Any = Shapes(self.options.buckets)
        self.batches = batches._copy(plan=shapes)
        self.hosts, self.host = find_hosts(self.batches.sharding)

    def _require_features(self) -> None:
        of_examples = [name for name, each in self.features.items() if each.per_example]
        if of_examples and self.options.most_in_row is None:
            raise InvalidValue(
                f"{name_some(of_examples)} have a column for each segment of a row, whose number "
                "differs between batches; give max_segments= to fix the shape"
            )
        pointers = [name for name, each in self.features.items() if each.to is not None]
        if pointers and self.options.overflow == "truncate":
            raise InvalidValue(
                f"overflow is 'truncate', but {pointers[0]!r} points to a side, which then cannot "
                "be cut; give overflow='drop', or longer buckets"
            )

    def __str__(self) -> str:
        shapes = ", ".join(map(str, self.options.buckets))
        return f"PackedStream(buckets {shapes}, window {self.window:,})"

    @property
    def _element_spec(self) -> Any:
        return self.batches._element_spec

    @property
    def identity(self) -> dict[str, Any]:
        """Everything but the data and the process on which batches depend, as JSON."""
        names = ("buckets", "packing", "overflow", "max_segments", "align", "cost", "seed")
        options = self.options.as_json((*names, "attention", "width"))
        own = {"window": self.window, "ending": self.ending, "hosts": len(self.hosts)}
        return {"stream": VERSION, **options, **own, "positions": self.batches.positions}

    def rows_of(self, bucket: Bucket) -> np.ndarray:
        """The rows of a batch that this process has: int64, ascending."""
        return self.batches.blocks[bucket][0].rows

    def check(self, state: Any) -> dict[str, Any]:
        """A copy of the state of an iterator; one of another stream or host is refused."""
        try:
            known = {name: copy.deepcopy(state[name]) for name in STATE}
            whole = all(type(known[name]) is int and known[name] >= 0 for name in COUNTS)
            decode_spans(known["carried"], 2 + len(self.options.names))
            then = {**known["identity"], "host": known["host"]}
        except (KeyError, TypeError, ValueError, zlib.error):
            whole = False
        if not whole:
            raise InvalidValue(
                f"{str(state)[:200]!r} is not the state of a PackedStream; give one that "
                "get_state() of its iterator returned"
            )
        if changes := differences(then, {**self.identity, "host": self.host}):
            raise InvalidValue(
                f"the state of step {known['step']:,} belongs to another stream: "
                f"{'; '.join(changes)}. Give the options, the number of hosts and the host that it "
                "was saved with; only a prepared corpus continues on another number of hosts"
            )
        return known

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
        windows = Windows(self._stream, self._source, self._lock, state)
        self._ahead = Prefetch[Window](windows.make, 1, end=sys.maxsize)
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
        if self._window is None:
            return copy.deepcopy(self._state)
        step = {"step": self._window.first + self._within, "within": self._within}
        return copy.deepcopy(self._window.begin | step)

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues from `state`; one of other options or of another host raises a `ValueError`.

        The examples that the iterator held are read again when the next batch is asked for. If
        their lengths differ, that is an error, too.
        """
        state = self._stream.check(state)
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


def _end(ahead: Prefetch, windows: "Windows") -> None:
    if not ahead.inherited:
        windows.interrupt()
        ahead.close()


class Rows(NamedTuple):
    """Rows of a bucket: the number of segments of each, and its cost; and their segments in order.

    A segment is a span of an element of the data set: the number of the element, the first
    position, and the number of positions on each side: int64 [segments, 2 + sides].
    """

    times: np.ndarray  # int64 [rows]
    costs: np.ndarray  # int64 [rows]
    segments: np.ndarray

    def take(self, numbers: np.ndarray) -> "Rows":
        """Some of the rows, in the order of `numbers`."""
        times, first = self.times[numbers], np.cumsum(self.times) - self.times
        return Rows(times, self.costs[numbers], self.segments[ranges(first[numbers], times)])

    @property
    def oldest(self) -> np.ndarray:
        """The least number of an element in each row: int64 [rows]."""
        first = np.cumsum(self.times) - self.times
        return np.minimum.reduceat(self.segments[:, 0], first) if len(first) else first


def pack_rows(
    spans: np.ndarray, options: Options, buckets: Sequence[Bucket]
) -> tuple[list[Rows], int]:
    """The rows of each of `buckets` in which spans are packed, and the positions that are lost.

    Spans are as the segments of `Rows`; those without positions are in no row. Rows that fill no
    batch of `buckets` move to a longer one. This is all that a stream needs of planning.
    """
    sizes = spans[:, 2:] if options.vectors else spans[:, 2]
    if not sizes.any():
        none = np.zeros(0, np.int64)
        return [Rows(none, none, spans[:0]) for _ in buckets], 0
    pieces = options.cut(sizes)
    keys = pieces.keys(0, len(pieces))
    packed = options.packer(pieces.table, buckets).pack(
        np.bincount(keys, minlength=len(pieces.table))
    )
    by_key = sort_by_group(keys, None)[np.count_nonzero(keys == 0) :]
    found = []
    for laid in lay_out(packed, by_key, pieces, lambda _, times, first: np.arange(len(times))):
        times, taken, parts = laid.take(0, len(laid.costs))
        item, start, sizes = pieces.locate(taken)
        if parts is not None:
            start, sizes = start + parts[0], parts[1, :, None]
        segments = np.column_stack([spans[item, 0], spans[item, 1] + start, sizes])
        found.append(Rows(times, laid.costs, segments))
    return found, pieces.lost


class Window:
    """The batches of a window, as a plan whose steps count over all windows.

    Attributes:
        begin: the state before its first batch.
        first: the number of its first batch, from 0.
        batches: the `Batches` of its steps, each with its plan.
    """

    def __init__(
        self, begin: dict[str, Any], stream: PackedStream, order: np.ndarray, rows: Sequence[Rows]
    ):
        self.begin, self.first = begin, int(begin["step"])
        self._stream, self._order, self._rows = stream, order, rows
        # The place of each batch among those of its bucket.
        self._places = np.empty(len(order), np.int64)
        for bucket in range(len(rows)):
            mine = order == bucket
            self._places[mine] = np.arange(np.count_nonzero(mine))
        self.batches: Any = None

    def __len__(self) -> int:
        return len(self._order)

    def batch(self, step: int) -> PlannedBatch:
        """The rows of this process in a batch."""
        number, stream = step - self.first, self._stream
        index, place = int(self._order[number]), int(self._places[number])
        bucket, rows = stream.options.buckets[index], self._rows[index]
        mine = stream.rows_of(bucket)
        begin, end = (min(n * len(mine), len(rows.times)) for n in (place, place + 1))
        order, places = balance(rows.costs[begin:end], len(mine))
        times, _, segments = rows.take(begin + order)
        segments = np.column_stack([mine[places].repeat(times), segments])
        return PlannedBatch(bucket, segments, align=stream.options.align)


class Windows:
    """Reads and packs one window after another of a host's data, and agrees on it with the others.

    Args:
        stream: decides how.
        source: the data of this host.
        lock: of the source; only its holder reads.
        state: that of the first window; None: at the beginning of the source.

    Attributes:
        begin: the state before the next window.
    """

    def __init__(
        self,
        stream: PackedStream,
        source: grain.DatasetIterator,
        lock: threading.Lock,
        state: dict[str, Any] | None,
    ):
        self._stream, self._source, self._lock = stream, source, lock
        # Here, since all hosts make iterators and restore them in the same order.
        self._exchange = Exchange(stream.hosts) if len(stream.hosts) > 1 else None
        self._key = random_key(stream.options.seed, "stream")
        self._interrupted, self._ended = False, False
        self._read = 0  # elements
        # The number of an element, and the state of the source before it.
        self._marks: list[tuple[int, Any]] = []
        self._held: dict[int, dict[str, Any]] = {}  # elements, by their numbers
        self._carried = np.zeros((0, 2 + len(stream.options.names)), np.int64)  # their spans
        self._error: BaseException | None = None  # that the others are not told yet
        self._rounds: list[list[Any]] = []  # the answers of hosts for this window
        self._restored = state
        self._within = 0  # batches of the first window that come no more
        if state is None:
            self._mark()
            self.begin = self._note_begin(0, 0, 0)
        else:
            self._within = state["within"]
            self.begin = state | {"step": state["step"] - state["within"], "within": 0}

    def interrupt(self) -> None:
        """Makes a thread that makes a window end soon, with an error."""
        self._interrupted = True
        if self._exchange is not None:
            self._exchange.close()

    def make(self, _: int) -> Window:
        """The next window; after an error, the same one.

        Raises:
            StopIteration: there is none, on any host.
        """
        with self._lock:
            try:
                if self._error is None:
                    self._fill()
            except BaseException as error:  # the others must not wait for this host
                self._error = error
            return self._pack()

    def _note_begin(self, window: int, step: int, lost: int) -> dict[str, Any]:
        """The state before a window, into which `_carried` is carried."""
        oldest = int(self._carried[:, 0].min(initial=self._read))
        while len(self._marks) > 1 and self._marks[1][0] <= oldest:
            del self._marks[0]
        mark, source = self._marks[0]
        counts = window, step, 0, lost, self._read, mark, self._stream.host
        more = encode_spans(self._carried), "", self._stream.identity, source
        return dict(zip(STATE, counts + more, strict=True))

    # ---- reading

    def _mark(self) -> None:
        self._marks.append((self._read, copy.deepcopy(self._source.get_state())))

    def _fill(self) -> None:
        """Reads elements until a window of them is held, or the source ends."""
        if (state := self._restored) is not None:
            self._restore(state)
        while True:
            while len(self._held) < self._stream.window and not self._ended:
                self._held |= self._next(lambda number: True)
            self._spans = self._measure()
            if self._ended or self._spans[:, 2:].any():
                break
            self._held.clear()  # none of them has a position
        due, self._digest = self.begin["lengths"], digest_of(self._spans)
        if due not in ("", self._digest):
            raise InvalidValue(
                f"the examples from element {self.begin['mark']:,} to {self._read:,} have other "
                "lengths than when the state was saved; give the same data set, in the same order"
            )

    def _next(self, is_wanted: Callable[[int], bool]) -> dict[int, dict[str, Any]]:
        """The next element by its number; nothing if it is not wanted, or the source ends."""
        if self._interrupted:
            raise InvalidState("the iterator was closed or restored")
        if self._read % MARK == 0 and self._marks[-1][0] != self._read:
            self._mark()
        try:
            element = next(self._source)
        except StopIteration:
            self._ended = True
            return {}
        number, self._read = self._read, self._read + 1
        return {number: as_entries(element, number)} if is_wanted(number) else {}

    def _restore(self, state: dict[str, Any]) -> None:
        """Reads again the elements that were held at the beginning of a window."""
        self._source.set_state(copy.deepcopy(state["source"]))
        self._read, self._ended, self._held = state["mark"], False, {}
        self._marks = [(self._read, copy.deepcopy(state["source"]))]
        spans = decode_spans(state["carried"], self._carried.shape[1])
        wanted = {*spans[:, 0].tolist()}
        while self._read < state["read"] and not self._ended:
            self._held |= self._next(wanted.__contains__)
        if self._ended:
            raise InvalidValue(
                f"the data set has {self._read:,} elements, fewer than the {state['read']:,} that "
                "were read when the state was saved; give the same data set"
            )
        self._carried, self._restored = spans, None

    def _measure(self) -> np.ndarray:
        """The spans of the elements that are held; makes them `_corpus`."""
        features, options = self._stream.features, self._stream.options
        if not self._held:
            self._corpus, self._numbers = self._stream.batches.corpus, np.zeros(1, np.int64)
            return self._carried
        self._corpus = make_examples([*self._held.items()], features)
        self._numbers = np.fromiter(self._held, np.int64, len(self._held))
        lengths = self._corpus.lengths.reshape(len(self._held), -1).astype(np.int64)
        lengths[self._corpus.silent] = 0
        longest = options.buckets[-1]
        over = np.flatnonzero((lengths > longest.lengths).any(axis=1))
        if options.overflow == "error" and len(over):
            seen = " and ".join(f"{n:,}" for n in lengths[over[0]])
            raise InvalidValue(
                f"element {self._numbers[over[0]]:,} has {seen} positions, more than the longest "
                f"bucket, {longest}; give a longer bucket, or overflow='truncate' or 'drop'"
            )
        new = self._numbers >= self.begin["read"]
        fresh = np.column_stack([self._numbers[new], 0 * self._numbers[new], lengths[new]])
        return np.concatenate([self._carried, fresh])

    # ---- packing

    def _pack(self) -> Window:
        """The window of what is held, in batches that all hosts have."""
        if self._error is not None:
            self._tell_error(self._error)
        stream, number = self._stream, self.begin["window"]
        rows, counts, lost = self._agree()
        taken, carried = list[Rows](), [self._carried[:0]]
        for index, (some, count) in enumerate(zip(rows, counts.tolist(), strict=True)):
            last = count * len(stream.rows_of(stream.options.buckets[index]))
            order = some.oldest.argsort(kind="stable")  # or some might stay for ever
            draw = functools.partial(random_bits, self._key, window=number, bucket=index)
            mixed = permutation(draw(Purpose.ROWS, min(last, len(order))))
            taken.append(some.take(order[:last][mixed]))
            carried.append(some.take(order[last:]).segments)
        order = np.arange(len(counts)).repeat(counts)
        bits = random_bits(self._key, Purpose.BUCKETS, len(order), window=number)
        window = Window(
            self.begin | {"lengths": self._digest}, stream, order[permutation(bits)], taken
        )
        corpus, planned = Numbered(self._corpus, self._numbers), window
        window.batches = stream.batches._copy(corpus=corpus, plan=planned, _planned=True)
        spans = np.concatenate(carried)
        self._carried = merge_spans(np.insert(spans, 0, 0, axis=1))[:, 1:]
        self._held = {n: self._held[n] for n in np.unique(self._carried[:, 0]).tolist()}
        if lost and not self.begin["lost"]:
            logger.warning(
                f"examples longer than {stream.options.buckets[-1]} lose positions "
                f"(overflow={stream.options.overflow!r}): {lost:,} in window {number:,}; states "
                "have their number so far, as 'lost'; a longer bucket keeps them"
            )
        lost += self.begin["lost"]
        self.begin = self._note_begin(number + 1, self.begin["step"] + len(window), lost)
        self._rounds.clear()
        self._within = 0
        return window

    def _agree(self) -> tuple[list[Rows], np.ndarray, int]:
        """The rows of each bucket, the batches that all hosts have, and the positions lost."""
        stream, buckets = self._stream, self._stream.options.buckets
        shares = [len(stream.rows_of(bucket)) for bucket in buckets]
        singles = [dataclasses.replace(bucket, rows=1) for bucket in buckets]
        rows, lost = pack_rows(self._spans, stream.options, singles)
        full = [len(some.times) // share for some, share in zip(rows, shares, strict=True)]
        answers = self._gather(0, {"full": full, "ended": self._ended})
        going = [not (answer["ended"] and stream.ending == "pad") for answer in answers]
        if not any(going):  # the last window, in which rows that fill no batch move up
            whole = [dataclasses.replace(b, rows=n) for b, n in zip(buckets, shares, strict=True)]
            rows, lost = pack_rows(self._spans, stream.options, whole)
            some = [-(-len(each.times) // share) for each, share in zip(rows, shares, strict=True)]
            counts = np.max([each["some"] for each in self._gather(1, {"some": some})], axis=0)
        else:
            every = np.array([answer["full"] for answer in answers])[going]
            volumes, counts = [bucket.positions for bucket in buckets], every.min(axis=0)
            if counts @ volumes <= IN_COMMON * (every @ volumes).min():
                longest, _ = pack_rows(self._spans, stream.options, singles[-1:])
                answers = self._gather(1, {"full": len(longest[0].times) // shares[-1]})
                common = min(np.array([answer["full"] for answer in answers])[going])
                if common * volumes[-1] > counts @ volumes:
                    rows = [*(each.take(np.arange(0)) for each in rows[:-1]), *longest]
                    counts = np.append(0 * counts[:-1], common)
        if not counts.any():
            if any(answer["ended"] for answer in self._rounds[0]):
                raise StopIteration
            least = stream.hosts[int((every @ volumes).argmin())]
            raise InvalidValue(
                f"the {stream.window:,} examples of a window fill no batch of "
                f"{', '.join(map(str, buckets))} (process {least}); give a larger window=, or "
                "buckets with fewer rows"
            )
        return rows, counts, lost

    # ---- other hosts

    def _gather(self, number: int, value: dict[str, Any]) -> list[Any]:
        """The answers of all hosts in a round for this window."""
        if number < len(self._rounds):  # before an error in a later round
            return self._rounds[number]
        step = self.begin["step"] + self._within
        value = {**value, "stream": {**self._stream.identity, "step": step}}
        answers = [value] if self._exchange is None else self._exchange.gather(value)
        for process, answer in zip(self._stream.hosts, answers, strict=True):
            if changes := differences(answer["stream"], value["stream"]):
                raise InvalidValue(
                    f"hosts have different streams: {'; '.join(changes)} (process {process} and "
                    "this one); give all the same options, and states of the same step"
                )
        failed = zip(self._stream.hosts, answers, strict=True)
        errors = [(process, each["error"]) for process, each in failed if "error" in each]
        if errors and "error" not in value:
            raise InvalidState(
                f"process {errors[0][0]} has no window {self.begin['window']:,}: {errors[0][1]}; "
                "mend it, and ask for the batch again on all hosts, or start them again"
            )
        self._rounds.append(answers)
        return answers

    def _tell_error(self, error: BaseException) -> NoReturn:
        """Raises an error, once the others have it, too."""
        if not self._interrupted:
            self._gather(0, {"error": f"{type(error).__name__}: {error}"[:1000]})
            self._rounds.clear()
        self._error = None
        raise error


class Shapes:
    """A plan of no batch, which uses all of its buckets."""

    def __init__(self, buckets: Sequence[Bucket]):
        self.batches_per_bucket = dict.fromkeys(buckets, 1)


class Numbered(View):
    """Examples under other numbers: those of the elements of a data set.

    Args:
        corpus: the examples.
        numbers: the number of each, ascending: int64 [examples].
    """

    def __init__(self, corpus: AnyCorpus, numbers: np.ndarray):
        super().__init__(corpus)
        self.sides = tuple(_NumberedSide(side, numbers) for side in corpus.sides)


class _NumberedSide(Readable):
    def __init__(self, side: Readable, numbers: np.ndarray):
        self._side, self._numbers = side, numbers
        self.lengths, self.weighted, self.features = side.lengths, side.weighted, side.features

    def read(self, examples: Any, *more: Any, **options: Any) -> Fields:
        return self._side.read(self._numbers.searchsorted(examples), *more, **options)

    def read_examples(self, examples: Any, features: Iterable[str] | None = None) -> Fields:
        return self._side.read_examples(self._numbers.searchsorted(examples), features)


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


def find_hosts(sharding: "jax.sharding.NamedSharding | None") -> tuple[tuple[int, ...], int]:
    """The processes that share the rows of batches, and the place of this one among them.

    Raises:
        ValueError: processes hold the same rows, or this process holds none.
    """
    if sharding is None:
        return (0,), 0
    import jax

    whole, rows = parts(sharding), dict[int, set[int]]()
    devices: Mapping[Any, Any] = sharding.devices_indices_map(whole)
    for device, index in devices.items():
        mine = range(whole[0]) if index is None else range(*index[0].indices(whole[0]))
        rows.setdefault(device.process_index, set()).update(mine)
    hosts, me = sorted(rows), jax.process_index()
    if sum(map(len, rows.values())) > whole[0]:
        raise InvalidValue(
            f"processes hold the same rows of batches over {sharding.spec} of {sharding.mesh}, but "
            "each packs rows of its own data; give a mesh in which only devices of one process "
            "share rows, or prepare the data as a corpus"
        )
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
    sharding: "jax.sharding.NamedSharding | None",
) -> dict[str, np.ndarray]:
    """The lengths of each side of the first `window` examples of all hosts together."""
    hosts, _ = find_hosts(sharding)
    source, count = iter(as_iterable(dataset)), -(-window // len(hosts))
    try:
        elements = [(n, as_entries(each, n)) for n, each in zip(range(count), source, strict=False)]
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


def _require_dtypes(features: Mapping[str, Feature] | None) -> dict[str, Feature]:
    known = check_features(features)
    for name, feature in known.items():
        if feature.dtype is None:
            raise InvalidValue(
                f"the feature {name!r} has no dtype, and hosts may begin with different examples; "
                f"give one, as in Feature({feature.of!r}, dtype='float32')"
            )
    return known


def make_blank(buckets: Any, features: Mapping[str, Feature]) -> AnyCorpus:
    """One example, of one position on each side: what is known of a data set before it is read."""
    shapes = as_shapes(buckets)
    column = {
        name: np.zeros((2,) * (each.of in ("inputs", "targets")) + each.shape, each.dtype)
        if each.of in OF
        else np.full((1, *each.shape), 0 if each.to is None else NOWHERE, each.dtype)
        for name, each in features.items()
    }
    tokens = {TOKENS: np.zeros(2, np.int32)} if CAUSAL.side in shapes[0].names else {}
    return make_examples([(0, tokens | column)], features)


def as_entries(element: Any, number: int) -> dict[str, Any]:
    """An element of a data set as a dict; others may use the memory of its arrays again."""
    entries = dict(element) if isinstance(element, Mapping) else {TOKENS: element}
    if {"inputs", "targets"} & {*entries} and TOKENS not in entries:
        raise InvalidValue(
            f"element {number:,} has {', '.join(map(str, entries))}: pairs, or tokens that are "
            "shifted already. A PackedStream shifts tokens itself: give {'tokens': ids}, marks "
            "included. Pairs need a corpus: pipeline.prepare_pairs"
        )
    return {n: each.copy() if isinstance(each, np.ndarray) else each for n, each in entries.items()}


def make_examples(
    elements: Sequence[tuple[int, Mapping[str, Any]]], features: Mapping[str, Feature]
) -> AnyCorpus:
    """Elements with their numbers as examples; an error names the first that is none."""
    first, entries = elements[0]
    for number, element in elements:
        if element.keys() != entries.keys():
            raise InvalidValue(
                f"element {number:,} has {', '.join(element)}, and element {first:,} "
                f"{', '.join(entries)}; give all elements the same entries"
            )
    try:
        columns = {name: [element[name] for _, element in elements] for name in entries}
        return Examples(columns, features=features)
    except (InvalidValue, InvalidType) as error:
        if len(elements) > 1:
            for each in elements:
                make_examples([each], features)
        name = f"element {first:,} is no example: " if len(elements) == 1 else ""
        raise type(error)(f"{name}{error}") from error


def digest_of(spans: np.ndarray) -> str:
    """A short digest of spans."""
    return hashlib.sha256(spans.astype("<i8").tobytes()).hexdigest()[:16]


def encode_spans(spans: np.ndarray) -> str:
    """Spans as text; their elements ascend.

    >>> decode_spans(encode_spans(np.array([[70, 0, 5], [90, 8, 3]])), 3).tolist()
    [[70, 0, 5], [90, 8, 3]]
    """
    columns = spans.T.copy()
    columns[0] = np.diff(columns[0], prepend=0)
    return base64.b64encode(zlib.compress(columns.astype("<i8").tobytes(), 9)).decode()


def decode_spans(text: str, columns: int) -> np.ndarray:
    """The spans that `encode_spans` made text of."""
    values = np.frombuffer(zlib.decompress(base64.b64decode(text, validate=True)), "<i8")
    spans = values.reshape(columns, -1).T.astype(np.int64)
    spans[:, 0] = spans[:, 0].cumsum()
    return spans
