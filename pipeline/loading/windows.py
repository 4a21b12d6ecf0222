"""Windows of a stream: what a host holds of its data, in batches that all hosts have.

A host reads up to a window of elements and packs them into rows, as plans do. Hosts then agree on
the batches: for each bucket, as many as every host can fill. Rows that fill no batch are taken
apart, and their pieces are packed again in the next window. So hosts have one shape at each step,
and see no example but their own.
"""

import base64
import copy
import dataclasses
import functools
import hashlib
import logging
import threading
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NoReturn, get_args

import grain
import numpy as np

from pipeline.corpus.examples import Examples
from pipeline.corpus.interface import AnyCorpus
from pipeline.corpus.side import Side
from pipeline.errors import InvalidState, InvalidType, InvalidValue
from pipeline.loading.batches import Batches
from pipeline.loading.exchange import Exchange
from pipeline.loading.fitting import Shapes, explain_shapes
from pipeline.loading.reports import as_error
from pipeline.loading.state import differences
from pipeline.planning.balance import balance
from pipeline.planning.bucket import Bucket, Fitted
from pipeline.planning.identity import fingerprint_of
from pipeline.planning.layout import FlatRows, lay_out, sum_rows
from pipeline.planning.options import VERSION as PLAN_VERSION
from pipeline.planning.options import Options, select_options
from pipeline.planning.order import Purpose, permutation, random_bits, random_key, sort_by_group
from pipeline.planning.pieces import merge_spans
from pipeline.planning.planned import PlannedBatch
from pipeline.text.features import TOKENS, Feature

logger = logging.getLogger(__name__)

Ending = Literal["pad", "drop"]
ENDINGS: tuple[Ending, ...] = get_args(Ending)

# The version of the packing of windows. It goes up whenever batches would change.
VERSION = 1

# The state of the source is noted before every so many elements: it may take long to copy. As many
# elements at most are read in vain after a restore.
MARK = 32

# The parts of a state: whole numbers from 0, and others.
COUNTS = ("window", "step", "within", "lost", "read", "mark", "host")
STATE = (*COUNTS, "carried", "lengths", "identity", "fitted", "source")

RESTORE = (
    ". Give the options, the number of hosts and the host that it was saved with; only a prepared "
    "corpus continues on another number of hosts"
)

# If hosts have less than this share of their full batches in common, they all use the longest
# bucket: each window would move few examples, and be packed for few batches.
IN_COMMON = 0.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
    """What the windows of a stream depend on, beside its data.

    Attributes:
        batches: the `Batches` of no example, which make the fields.
        options: those of packing.
        window: the number of elements that a host holds.
        ending: as for `PackedStream`.
        features: the schemas of the columns beside the tokens.
        hosts: the processes that share the rows of batches.
        host: the place of this process among them.
        fitted: how `load` chose the shapes, as in `StateKey`; nothing depends on it.
    """

    batches: Batches
    options: Options
    window: int
    ending: Ending
    features: Mapping[str, Feature]
    hosts: tuple[int, ...]
    host: int
    fitted: dict[str, Any] | None = None

    @property
    def identity(self) -> dict[str, Any]:
        """Everything but the data and the process on which batches depend, as JSON."""
        names = ("buckets", "packing", "overflow", "max_segments", "align", "cost", "seed")
        options = self.options.as_json((*names, "attention", "width"))
        own = {"window": self.window, "ending": self.ending, "hosts": len(self.hosts)}
        versions = {"stream": VERSION, "plan": PLAN_VERSION}
        return {**versions, **options, **own, "positions": self.batches.positions}

    def rows_of(self, bucket: Bucket) -> np.ndarray:
        """The rows of a batch that this process has: int64, ascending."""
        return self.batches.blocks[bucket][0].rows

    def check(self, state: Any) -> dict[str, Any]:
        """A copy of the state of an iterator; one of another stream or host is refused."""
        known = read_state(state)
        then = {**known["identity"], "host": known["host"]}
        if changes := differences(then, {**self.identity, "host": self.host}):
            fitted = explain_shapes(changes, known["fitted"], self.fitted)
            raise InvalidValue(
                f"the state of step {known['step']:,} belongs to another stream: "
                f"{'; '.join(changes)}{f'; {fitted}' if fitted else RESTORE}"
            )
        return known


def read_state(state: Any) -> dict[str, Any]:
    """A copy of the state of an iterator; a `ValueError` if it is none."""
    try:
        if state["digest"] != digest_of_state(state):
            raise ValueError("it was changed")
        known = {name: copy.deepcopy(state[name]) for name in STATE}
        if not all(type(known[name]) is int and known[name] >= 0 for name in COUNTS):
            raise ValueError("a count is no whole number from 0")
        decode_spans(known["carried"], 2 + len(Bucket(*known["identity"]["buckets"][-1]).lengths))
    except (KeyError, TypeError, ValueError, zlib.error) as error:
        raise InvalidValue(
            f"{str(state)[:200]!r} is not the state of a PackedStream; give one that get_state() "
            "of its iterator returned"
        ) from error
    return known


def saved_setup(state: Any) -> tuple[Shapes, dict[str, Any]]:
    """The shapes of a state, and the options of its `PackedStream`; an error if it is none."""
    known = read_state(state)
    names = ("packing", "overflow", "max_segments", "align", "cost", "seed", "window", "ending")
    identity = known["identity"]
    buckets = [Bucket(*shape) for shape in identity["buckets"]]
    model = select_options(("attention", "width"), identity)
    options = select_options((*names, "positions"), identity)
    return Shapes(Fitted.of(buckets, model), known["fitted"]), options


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
    keys, found = pieces.keys(0, len(pieces)), list[FlatRows]()
    packer = options.packer(pieces.table, buckets)
    packed = packer.pack(np.bincount(keys, minlength=len(pieces.table)))
    by_key = sort_by_group(keys, None)[np.count_nonzero(keys == 0) :]
    for times, columns in lay_out(packed, by_key, lambda _, times, first: np.arange(len(times))):
        number, parts = columns[:, 0], columns[:, 2:] if columns.shape[1] > 1 else None
        span, start, sizes = pieces.locate(number)
        if parts is not None:  # pieces that are cut
            start, sizes = start + columns[:, 1], parts
        segments = np.column_stack([spans[span, 0], spans[span, 1] + start, sizes])
        costs = sum_rows(pieces.costs(number, parts), times)
        found.append(FlatRows(times, segments, costs))
    return found


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
        self._setup, self._source, self._lock = setup, source, lock
        # Here, since all hosts make iterators and restore them in the same order.
        self._exchange = Exchange(setup.hosts) if len(setup.hosts) > 1 else None
        self._key = random_key(setup.options.seed, "stream")
        self._interrupted, self._ended = False, False
        self._read = 0  # elements
        # The number of an element, and the state of the source before it.
        self._marks: list[tuple[int, Any]] = []
        self._held: dict[int, dict[str, Any]] = {}  # elements, by their numbers
        self._carried = np.zeros((0, 2 + len(setup.options.names)), np.int64)  # their spans
        self._error: BaseException | None = None  # that the others are not told yet
        self._rounds: dict[int, list[Any]] = {}  # the answers of hosts for this window
        self._restored = state
        self._within = 0  # batches of the first window that come no more
        self._lost = 0  # positions of elements of this window that are held no more
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
                what = f"window {self.begin['window']:,} was not made: the data set"
                self._error = as_error(error, what)
                if self._error is not error:
                    self._error.__cause__ = error
            return self._pack()

    def _note_begin(self, window: int, step: int, lost: int) -> dict[str, Any]:
        """The state before a window, into which `_carried` is carried."""
        oldest = int(self._carried[:, 0].min(initial=self._read))
        while len(self._marks) > 1 and self._marks[1][0] <= oldest:
            del self._marks[0]
        mark, source = self._marks[0]
        return {
            "window": window,
            "step": step,
            "within": 0,
            "lost": lost,
            "read": self._read,
            "mark": mark,
            "host": self._setup.host,
            "carried": encode_spans(self._carried),
            "lengths": "",  # a digest of the window's own, once it is packed
            "identity": self._setup.identity,
            "fitted": self._setup.fitted,
            "source": source,
        }

    # ---- reading

    def _mark(self) -> None:
        self._marks.append((self._read, copy.deepcopy(self._source.get_state())))

    def _fill(self) -> None:
        """Reads elements until a window of them is held and fills a batch, or the source ends.

        Many elements may have few positions left: then one more window of them is read.
        """
        if (state := self._restored) is not None:
            self._restore(state)
        held = self._setup.window
        while True:
            while len(self._held) < held and not self._ended:
                self._held |= self._next(lambda number: True)
            self._spans, lost = self._measure()
            if self._ended or self._fills_batch():
                break
            if not self._spans[:, 2:].any():
                self._held.clear()  # none of them has a position that stays
                self._lost += lost
            held = len(self._held) + self._setup.window
        self._lost_so_far = self.begin["lost"] + self._lost + lost
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
        return {number: as_entries(element)} if is_wanted(number) else {}

    def _restore(self, state: dict[str, Any]) -> None:
        """Reads again the elements that were held at the beginning of a window."""
        self._source.set_state(copy.deepcopy(state["source"]))
        self._read, self._ended, self._held, self._lost = state["mark"], False, {}, 0
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

    def _measure(self) -> tuple[np.ndarray, int]:
        """The spans of what is held, as `_corpus`, and the positions that new elements lose."""
        if not self._held:
            self._corpus, self._numbers = self._setup.batches.corpus, np.zeros(1, np.int64)
            return self._carried, 0
        self._corpus = make_examples([*self._held.items()], self._setup.features)
        self._numbers = np.fromiter(self._held, np.int64, len(self._held))
        lengths = self._corpus.lengths.reshape(len(self._held), -1).astype(np.int64)
        lengths[self._corpus.silent] = 0
        new = self._numbers >= self.begin["read"]
        numbers, lengths = self._numbers[new], lengths[new]
        overflow, longest = self._setup.options.overflow, self._setup.options.buckets[-1]
        over = (lengths > longest.lengths).max(axis=1)
        kept = lengths
        if overflow == "error" and over.any():
            seen = " and ".join(f"{n:,}" for n in lengths[over][0])
            raise InvalidValue(
                f"element {numbers[over][0]:,} has {seen} positions, more than the longest bucket, "
                f"{longest}; give a longer bucket, or overflow='truncate' or 'drop'"
            )
        if overflow == "truncate":
            kept = np.minimum(lengths, longest.lengths)
        elif overflow == "drop":
            kept = lengths * ~over[:, None]
        fresh = np.column_stack([numbers, 0 * numbers, kept])
        return np.concatenate([self._carried, fresh]), int((lengths - kept).sum())

    # ---- packing

    def _fills_batch(self) -> bool:
        """Whether what is held fills a batch that all hosts can have: of the longest bucket.

        Without other hosts, a batch of any bucket is enough.
        """
        *shorter, longest = self._setup.options.buckets
        needed, spans = len(self._setup.rows_of(longest)), self._spans
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
        buckets = self._setup.options.buckets
        shares = [len(self._setup.rows_of(bucket)) for bucket in buckets]
        return [len(some) // share for some, share in zip(rows, shares, strict=True)]

    def _pack(self) -> Window:
        """The window of what is held, in batches that all hosts have."""
        if self._error is not None:
            self._tell_error(self._error)
        setup, number = self._setup, self.begin["window"]
        rows, counts = self._agree()
        taken, carried = list[FlatRows](), [self._carried[:0]]
        for index, (some, count) in enumerate(zip(rows, counts.tolist(), strict=True)):
            last = count * len(setup.rows_of(setup.options.buckets[index]))
            order = order_rows(some, self.begin["read"])
            draw = functools.partial(random_bits, self._key, window=number, bucket=index)
            mixed = permutation(draw(Purpose.ROWS, min(last, len(order))))
            chosen = order[:last][mixed]
            taken.append(FlatRows(*some.pick(chosen), some.costs[chosen]))
            carried.append(some.pick(order[last:])[1])
        order = np.arange(len(counts)).repeat(counts)
        bits = random_bits(self._key, Purpose.BUCKETS, len(order), window=number)
        window = Window(
            self.begin | {"lengths": self._digest}, setup, order[permutation(bits)], taken
        )
        corpus = Numbered(self._corpus, self._numbers)
        window.batches = setup.batches._copy(corpus=corpus, plan=window, _planned=True)
        spans = np.concatenate(carried)
        self._carried = merge_spans(np.insert(spans, 0, 0, axis=1))[:, 1:]
        self._held = {n: self._held[n] for n in np.unique(self._carried[:, 0]).tolist()}
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
        shares = [len(setup.rows_of(bucket)) for bucket in buckets]
        volumes = [bucket.positions for bucket in buckets]
        rows = self._pack_apart()
        answers = self._gather(0, {"full": self._count_full(rows), "ended": self._ended})
        full, ended = (np.array([each[name] for each in answers]) for name in ("full", "ended"))
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
                rows = [*(some.between(0, 0) for some in rows[:-1]), *longest]
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
        errors = [(process, each["error"]) for process, each in failed if "error" in each]
        if errors and "error" not in value:
            raise InvalidState(
                f"process {errors[0][0]} has no window {self.begin['window']:,}: {errors[0][1]}; "
                "mend it, and ask for the batch again on all hosts, or start them again"
            )
        self._rounds[number] = answers
        return answers

    def _tell_error(self, error: BaseException) -> NoReturn:
        """Raises an error, once the others have it, too."""
        if not self._interrupted:
            self._gather(0, {"error": f"{type(error).__name__}: {error}"[:1000]})
            self._rounds.clear()
        self._error = None
        raise error


class Numbered(AnyCorpus):
    """Examples under other numbers: those of the elements of a data set.

    Args:
        corpus: the examples.
        numbers: the number of each, ascending: int64 [examples].
    """

    def __init__(self, corpus: AnyCorpus, numbers: np.ndarray):
        self.lengths, self.loss = corpus.lengths, corpus.loss
        self.sides = {name: _NumberedSide(each, numbers) for name, each in corpus.sides.items()}


class _NumberedSide(Side):
    def __init__(self, side: Side, numbers: np.ndarray):
        self._side, self._numbers = side, numbers
        self.lengths, self.weighted, self.features = side.lengths, side.weighted, side.features

    def read(self, examples: Any, *more: Any, **options: Any) -> dict[str, np.ndarray]:
        return self._side.read(self._numbers.searchsorted(examples), *more, **options)

    def read_examples(
        self, examples: Any, features: Iterable[str] | None = None
    ) -> dict[str, np.ndarray]:
        return self._side.read_examples(self._numbers.searchsorted(examples), features)


def as_entries(element: Any) -> dict[str, Any]:
    """An element of a data set as a dict; others may use the memory of its arrays again."""
    entries = dict(element) if isinstance(element, Mapping) else {TOKENS: element}
    return {n: each.copy() if isinstance(each, np.ndarray) else each for n, each in entries.items()}


def make_examples(
    elements: Sequence[tuple[int, Mapping[str, Any]]], features: Mapping[str, Feature]
) -> AnyCorpus:
    """Elements with their numbers as examples; an error names the first that is none."""
    first, entries = elements[0]
    if {"inputs", "targets"} & {*entries} and TOKENS not in entries:
        raise InvalidValue(
            f"element {first:,} has {', '.join(map(str, entries))}: pairs, or tokens that are "
            "shifted already. A PackedStream shifts tokens itself: give {'tokens': ids}, marks "
            "included. Pairs need a corpus: pipeline.prepare_pairs"
        )
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


def digest_of_state(state: Mapping[str, Any]) -> str:
    """A short digest of a state, but for the host, and the source, whose state may be no JSON."""
    return fingerprint_of({name: state[name] for name in STATE if name not in ("source", "host")})


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
