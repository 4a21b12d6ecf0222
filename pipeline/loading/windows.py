"""Windows of a stream: what a host holds of its data, in batches that all hosts have.

A host reads up to a window of elements and packs them into rows, as plans do. Hosts then agree on
the batches: for each bucket, as many as every host can fill. Rows that fill no batch are taken
apart, and their pieces are packed again in the next window. So hosts have one shape at each step,
and see no example but their own.
"""

import dataclasses
import functools
import logging
import threading
from collections.abc import Sequence
from typing import Any, NoReturn

import grain
import numpy as np

from pipeline.errors import InvalidState, InvalidValue
from pipeline.loading.elements import Elements, Numbered, make_examples
from pipeline.loading.exchange import Exchange
from pipeline.loading.reports import as_error
from pipeline.loading.stream_state import Setup, decode_spans, digest_of, encode_spans
from pipeline.planning.balance import balance
from pipeline.planning.bucket import Bucket
from pipeline.planning.identity import differences
from pipeline.planning.layout import FlatRows, lay_out, sum_rows
from pipeline.planning.options import Options
from pipeline.planning.order import Purpose, permutation, random_bits, random_key, sort_by_group
from pipeline.planning.pieces import merge_spans
from pipeline.planning.planned import PlannedBatch

logger = logging.getLogger(__name__)

# If hosts have less than this share of their full batches in common, they all use the longest
# bucket: each window would move few examples, and be packed for few batches.
IN_COMMON = 0.5


def pack_rows(spans: np.ndarray, options: Options, buckets: Sequence[Bucket]) -> list[FlatRows]:
    """The rows of each of `buckets` in which spans of elements are packed, as rows of spans.

    A span is the number of an element, a first position, and the number of positions on each side:
    int64 [spans, 2 + sides]. Those without positions are in no row, and those longer than a row are
    split. Rows that fill no batch of `buckets` move to a longer one. This is all that a stream
    needs of planning.
    """
    if not spans[:, 2:].any():
        none = np.zeros(0, np.int64)
        return [FlatRows(none, spans[:0], none) for _ in buckets]
    pieces = options.cut(spans[:, 2:])
    keys, rows = pieces.keys(0, len(pieces)), list[FlatRows]()
    packer = options.packer(pieces.table, buckets)
    packed = packer.pack(np.bincount(keys, minlength=len(pieces.table)))
    by_key = sort_by_group(keys, None)[np.count_nonzero(keys == 0) :]
    for times, columns in lay_out(packed, by_key, lambda _, times, first: np.arange(len(times))):
        number, cut_sizes = columns[:, 0], columns[:, 2:] if columns.shape[1] > 1 else None
        span, start, sizes = pieces.locate(number)
        if cut_sizes is not None:  # pieces that are cut
            start, sizes = start + columns[:, 1], cut_sizes
        segments = np.column_stack([spans[span, 0], spans[span, 1] + start, sizes])
        costs = sum_rows(pieces.costs(number, cut_sizes), times)
        rows.append(FlatRows(times, segments, costs))
    return rows


def order_rows(rows: FlatRows, carried: int) -> np.ndarray:
    """The numbers of rows: those with elements below `carried`, and then others.

    Those with the oldest elements come first, or some would wait for ever; then the fullest.
    """
    oldest = sum_rows(rows.segments[:, 0], rows.times, np.minimum)
    filled = sum_rows(rows.segments[:, 2:].sum(axis=1), rows.times)
    return np.lexsort((-filled, np.minimum(oldest, carried)))


class Window:
    """The batches of a window, as a plan whose steps count over all windows.

    Attributes:
        begin: the state before its first batch.
        first: the number of its first batch, from 0.
        batches: the `Batches` of its steps, each with its plan.
    """

    def __init__(
        self, begin: dict[str, Any], setup: Setup, order: np.ndarray, rows: Sequence[FlatRows]
    ):
        self.begin, self.first = begin, int(begin["step"])
        self._setup, self._order, self._rows = setup, order, rows
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
        number, setup = step - self.first, self._setup
        index, place = int(self._order[number]), int(self._places[number])
        bucket, rows = setup.options.buckets[index], self._rows[index]
        mine = setup.rows_of(bucket)
        begin, end = (min(n * len(mine), len(rows)) for n in (place, place + 1))
        order, places = balance(rows.costs[begin:end], len(mine))
        times, segments = rows.pick(begin + order)
        segments = np.column_stack([mine[places].repeat(times), segments])
        return PlannedBatch(bucket, segments, align=setup.options.align)


class HostWindows:
    """Reads and packs one window after another of a host's data, and agrees on it with the others.

    Args:
        setup: decides how.
        source: the data of this host.
        lock: of the source; only its holder reads.
        state: that of the first window; None: at the beginning of the source.

    Attributes:
        begin: the state before the next window.
    """

    def __init__(
        self,
        setup: Setup,
        source: grain.DatasetIterator,
        lock: threading.Lock,
        state: dict[str, Any] | None,
    ):
        self._setup, self._elements, self._lock = setup, Elements(source), lock
        # Here, since all hosts make iterators and restore them in the same order.
        self._exchange = Exchange(setup.hosts) if len(setup.hosts) > 1 else None
        self._key = random_key(setup.options.seed, "stream")
        self._carried = np.zeros((0, 2 + len(setup.options.names)), np.int64)  # their spans
        self._error: BaseException | None = None  # that the others are not told yet
        self._rounds: dict[int, list[Any]] = {}  # the answers of hosts for this window
        self._restored = state
        self._within = 0  # batches of the first window that come no more
        self._lost = 0  # positions of elements of this window that are held no more
        if state is None:
            self._elements.note()
            self.begin = self._note_begin(0, 0, 0)
        else:
            self._within = state["within"]
            self.begin = state | {"step": state["step"] - state["within"], "within": 0}

    def interrupt(self) -> None:
        """Makes a thread that makes a window end soon, with an error."""
        self._elements.interrupted = True
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
                what = f"window {self.begin['window']:,} was not made: the data set"
                self._error = as_error(error, what)
                if self._error is not error:
                    self._error.__cause__ = error
            return self._pack()

    def _note_begin(self, window: int, step: int, lost: int) -> dict[str, Any]:
        """The state before a window, into which `_carried` is carried."""
        read = self._elements.read
        mark, source = self._elements.noted_before(int(self._carried[:, 0].min(initial=read)))
        return {
            "window": window,
            "step": step,
            "within": 0,
            "lost": lost,
            "read": read,
            "mark": mark,
            "host": self._setup.host,
            "carried": encode_spans(self._carried),
            "lengths": "",  # a digest of the window's own, once it is packed
            "identity": self._setup.identity,
            "fitted": self._setup.fitted,
            "source": source,
        }

    # ---- reading

    def _fill(self) -> None:
        """Reads elements until a window of them is held and fills a batch, or the source ends.

        Many elements may have few positions left: then one more window of them is read.
        """
        elements, count = self._elements, self._setup.window
        if (state := self._restored) is not None:
            spans = decode_spans(state["carried"], self._carried.shape[1])
            wanted = {*spans[:, 0].tolist()}
            elements.restore(state["mark"], state["source"], state["read"], wanted)
            self._carried, self._lost, self._restored = spans, 0, None
        while True:
            elements.fill(count)
            self._spans, lost = self._measure()
            if elements.ended or self._fills_batch():
                break
            if not self._spans[:, 2:].any():
                elements.held.clear()  # none of them has a position that stays
                self._lost += lost
            count = len(elements.held) + self._setup.window
        self._lost_so_far = self.begin["lost"] + self._lost + lost
        due, self._digest = self.begin["lengths"], digest_of(self._spans)
        if due not in ("", self._digest):
            raise InvalidValue(
                f"the examples from element {self.begin['mark']:,} to {elements.read:,} have other "
                "lengths than when the state was saved; give the same data set, in the same order"
            )

    def _measure(self) -> tuple[np.ndarray, int]:
        """The spans of what is held, as `_corpus`, and the positions that new elements lose."""
        if not (held := self._elements.held):
            self._corpus, self._numbers = self._setup.batches.corpus, np.zeros(1, np.int64)
            return self._carried, 0
        self._corpus = make_examples([*held.items()], self._setup.features)
        self._numbers = np.fromiter(held, np.int64, len(held))
        lengths = self._corpus.lengths.reshape(len(held), -1).astype(np.int64)
        lengths[self._corpus.silent] = 0
        new = self._numbers >= self.begin["read"]
        numbers, lengths = self._numbers[new], lengths[new]
        overflow, longest = self._setup.options.overflow, self._setup.options.buckets[-1]
        over = (lengths > longest.lengths).any(axis=1)
        if overflow == "error" and over.any():
            seen = " and ".join(f"{n:,}" for n in lengths[over][0])
            raise InvalidValue(
                f"element {numbers[over][0]:,} has {seen} positions, more than the longest bucket, "
                f"{longest}; give a longer bucket, or overflow='truncate' or 'drop'"
            )
        stay = self._setup.options.cut(lengths).positions_per_example()
        fresh = np.column_stack([numbers, 0 * numbers, stay])
        return np.concatenate([self._carried, fresh]), int((lengths - stay).sum())

    # ---- packing

    def _fills_batch(self) -> bool:
        """Whether what is held fills a batch that all hosts can have: of the longest bucket.

        Without other hosts, a batch of any bucket is enough.
        """
        *shorter, longest = self._setup.options.buckets
        needed, spans = self._setup.rows_per_batch[-1], self._spans
        # A row has at most its length, so as many positions are in as many rows at least.
        if (spans[:, 2:].sum(axis=0) >= needed * np.array(longest.lengths)).any():
            return True
        if self._exchange is None and shorter:
            return any(self._count_full(self._pack_apart()))
        (rows,) = pack_rows(spans, self._setup.options, [dataclasses.replace(longest, rows=1)])
        return len(rows) >= needed

    def _pack_apart(self) -> list[FlatRows]:
        """The rows of each bucket, of which none moves to a longer one."""
        options = self._setup.options
        singles = [dataclasses.replace(bucket, rows=1) for bucket in options.buckets]
        return pack_rows(self._spans, options, singles)

    def _count_full(self, rows: Sequence[FlatRows]) -> list[int]:
        """The full batches of each bucket."""
        each_batch = zip(rows, self._setup.rows_per_batch, strict=True)
        return [len(of_bucket) // number for of_bucket, number in each_batch]

    def _pack(self) -> Window:
        """The window of what is held, in batches that all hosts have."""
        if self._error is not None:
            self._tell_error(self._error)
        setup, number = self._setup, self.begin["window"]
        rows, counts = self._agree()
        taken, carried = list[FlatRows](), [self._carried[:0]]
        ends = (counts * setup.rows_per_batch).tolist()  # of the rows that are taken
        for index, (of_bucket, end) in enumerate(zip(rows, ends, strict=True)):
            order = order_rows(of_bucket, self.begin["read"])
            draw = functools.partial(random_bits, self._key, window=number, bucket=index)
            chosen = order[:end][permutation(draw(Purpose.ROWS, min(end, len(order))))]
            taken.append(FlatRows(*of_bucket.pick(chosen), of_bucket.costs[chosen]))
            carried.append(of_bucket.pick(order[end:])[1])
        order = np.arange(len(counts)).repeat(counts)
        bits = random_bits(self._key, Purpose.BUCKETS, len(order), window=number)
        window = Window(
            self.begin | {"lengths": self._digest}, setup, order[permutation(bits)], taken
        )
        corpus = Numbered(self._corpus, self._numbers)
        window.batches = setup.batches._copy(corpus=corpus, plan=window, _planned=True)
        spans = np.concatenate(carried)
        self._carried = merge_spans(np.insert(spans, 0, 0, axis=1))[:, 1:]
        held, carried_on = self._elements.held, np.unique(self._carried[:, 0]).tolist()
        self._elements.held = {number: held[number] for number in carried_on}
        lost, step = self._lost_so_far, self.begin["step"] + len(window)
        if lost and not self.begin["lost"]:
            logger.warning(
                f"examples longer than {setup.options.buckets[-1]} lose positions "
                f"(overflow={setup.options.overflow!r}): {lost:,} in window {number:,}; states "
                "have their number so far, as 'lost'; a longer bucket keeps them"
            )
        self.begin = self._note_begin(number + 1, step, lost)
        self._rounds.clear()
        self._within = self._lost = 0
        return window

    def _agree(self) -> tuple[list[FlatRows], np.ndarray]:
        """The rows of each bucket, and the number of batches that all hosts have."""
        setup, buckets = self._setup, self._setup.options.buckets
        shares, volumes = setup.rows_per_batch, [bucket.positions for bucket in buckets]
        rows = self._pack_apart()
        answers = self._gather(0, {"full": self._count_full(rows), "ended": self._elements.ended})
        full, ended = (np.array([answer[name] for answer in answers]) for name in ("full", "ended"))
        # Those that have ended and fill no batch let the others go on, with empty rows.
        going = full.any(axis=1) | ~ended | (setup.ending == "drop")
        counts = full[going].min(axis=0) if going.any() else 0 * full[0]
        if going.any() and counts @ volumes <= IN_COMMON * (full[going] @ volumes).min():
            single = dataclasses.replace(buckets[-1], rows=1)
            longest = pack_rows(self._spans, setup.options, [single])
            answers = self._gather(1, {"full": len(longest[0]) // shares[-1]})
            in_longest = np.array([answer["full"] for answer in answers])
            common = in_longest[going].min()
            if not counts.any() and not common and setup.ending == "pad" and not ended.all():
                # Nor do those hold up the others that have ended with batches of other buckets.
                counts, common = full[~ended].min(axis=0), in_longest[~ended].min()
            if common * volumes[-1] > counts @ volumes:
                rows = [*(of_bucket.between(0, 0) for of_bucket in rows[:-1]), *longest]
                counts = np.append(0 * counts[:-1], common)
        if not counts.any() and ended.all() and setup.ending == "pad":
            # The last window, in which rows that fill no batch move to a longer bucket.
            whole = [dataclasses.replace(b, rows=n) for b, n in zip(buckets, shares, strict=True)]
            rows = pack_rows(self._spans, setup.options, whole)
            mine = [-(-len(some) // share) for some, share in zip(rows, shares, strict=True)]
            counts = np.max([answer["some"] for answer in self._gather(2, {"some": mine})], axis=0)
        if not counts.any():
            assert ended.any(), "a host that goes on fills a batch of the longest bucket"
            raise StopIteration
        return rows, counts

    # ---- other hosts

    def _gather(self, number: int, value: dict[str, Any]) -> list[Any]:
        """The answers of all hosts in a round for this window."""
        if number in self._rounds:  # before an error in a later round
            return self._rounds[number]
        step = self.begin["step"] + self._within
        value = {**value, "stream": {**self._setup.identity, "step": step}}
        answers = [value] if self._exchange is None else self._exchange.gather(value)
        for process, answer in zip(self._setup.hosts, answers, strict=True):
            if changes := differences(answer["stream"], value["stream"]):
                raise InvalidValue(
                    f"hosts have different streams: {'; '.join(changes)} (process {process} and "
                    "this one); give all the same options, and states of the same step"
                )
        failed = zip(self._setup.hosts, answers, strict=True)
        errors = [(process, answer["error"]) for process, answer in failed if "error" in answer]
        if errors and "error" not in value:
            raise InvalidState(
                f"process {errors[0][0]} has no window {self.begin['window']:,}: {errors[0][1]}; "
                "mend it, and ask for the batch again on all hosts, or start them again"
            )
        self._rounds[number] = answers
        return answers

    def _tell_error(self, error: BaseException) -> NoReturn:
        """Raises an error, once the others have it, too."""
        if not self._elements.interrupted:
            self._gather(0, {"error": f"{type(error).__name__}: {error}"[:1000]})
            self._rounds.clear()
        self._error = None
        raise error
