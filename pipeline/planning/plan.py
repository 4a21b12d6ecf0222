"""The plan: for each global step, the bucket and the segments of each of its rows."""

import functools
import operator
import os
from collections.abc import Iterable
from typing import Any

import numpy as np

from pipeline.planning import lengths as lengths_lib
from pipeline.planning.balance import imbalance
from pipeline.planning.bucket import Bucket, as_buckets
from pipeline.planning.chain import Chain
from pipeline.planning.checks import require_whole, unknown
from pipeline.planning.dealer import Dealer
from pipeline.planning.overflow import cut
from pipeline.planning.packing import Packed, check_packing, pack
from pipeline.planning.pair_packing import pack_pairs, volume_bound
from pipeline.planning.pair_pieces import PairPieces
from pipeline.planning.planned import PlannedBatch
from pipeline.planning.solution import Search, kept
from pipeline.planning.summary import table
from pipeline.planning.windows import Dealt, Windows

# The version of the planning algorithm. It goes up whenever any plan would change, so that a
# checkpoint is never continued under another order of batches.
VERSION = 2

WINDOW = 1 << 22


class Plan:
    """All batches of all epochs, decided from lengths alone.

    A pure function of its arguments: the same on every host, in every process, at every time.
    Each epoch is a partition of the examples' positions; batch `step` is random access.

    >>> plan = Plan([5, 3, 4, 2, 1], [Bucket(rows=2, length=8)], shuffle=False)
    >>> plan.num_batches(), plan.batch(0).bucket
    (1, Bucket(rows=2, length=8))
    >>> plan.batch(0).segments.tolist()  # row, example, start, length
    [[0, 0, 0, 5], [0, 1, 0, 3], [1, 2, 0, 4], [1, 3, 0, 2], [1, 4, 0, 1]]

    Pairs, for sequence to sequence, have inputs and targets, which share a row at the same time:

    >>> plan = Plan([[5, 2], [3, 3], [3, 1]], [Bucket(2, (8, 4))], shuffle=False, overflow="drop")
    >>> plan.batch(0).segments.tolist()  # row, example, start, inputs, targets
    [[0, 0, 0, 5, 2], [0, 2, 0, 3, 1], [1, 1, 0, 3, 3]]

    Args:
        lengths: positions of each example, an integer array `[n]`, of pairs `[n, 2]` (inputs and
            targets), or a corpus.
        buckets: the shapes, ascending by length; of pairs by the sum of both, the last holding
            all others.
        seed: decides every shuffle; 0 ≤ seed < 2**63.
        shuffle: shuffle examples, rows, batches and buckets anew in every epoch. Without it every
            epoch is the same, rows in the order of their longest example.
        packing: "best_fit"; "optimal", column generation, which needs scipy and some seconds or
            minutes once (with more than 2,048 different lengths it is best fit), not for pairs; or
            "none" for one example in a row.
        overflow: for examples longer than the longest bucket: "split" (not for pairs, whose
            targets would lose their inputs), "truncate", "drop" or "error". None: "split", and
            "error" for pairs.
        window: the most pieces that are planned together; bounds memory and time to first batch.
        max_segments: the most segments in a row; None for no limit.
        patterns: a file that keeps what "optimal" found, an input of the plan from then on; made
            if it is not there. None: a corpus keeps it beside itself, and for lengths alone it is
            found anew, which on another machine may be another plan.

    Raises:
        ValueError: an argument is not as above, no example has a position to train on, or
            `patterns` is of another plan.
        ImportError: packing is "optimal", patterns have to be found, and scipy is missing.
    """

    def __init__(
        self,
        lengths,
        buckets: Iterable[Bucket],
        *,
        seed: int = 0,
        shuffle: bool = True,
        packing: str = "best_fit",
        overflow: str | None = None,
        window: int = WINDOW,
        max_segments: int | None = None,
        patterns: str | os.PathLike | None = None,
    ):
        self.buckets = as_buckets(buckets)
        check_packing(packing)
        seed, window = require_whole("seed", seed, 0), require_whole("window", window, 1)
        if max_segments is not None:
            max_segments = require_whole("max_segments", max_segments, 1)
        array = lengths_lib.as_lengths(lengths)
        self.num_examples = len(array)
        longest = self.buckets[-1]
        if array.ndim != len(longest.lengths):
            raise ValueError(
                f"lengths has shape {array.shape} and the longest bucket is {longest!r}; pairs "
                "need buckets with two lengths, Bucket(rows=…, length=(inputs, targets)), and "
                "others with one"
            )
        pairs = array.ndim == 2
        overflow = overflow or ("error" if pairs else "split")
        if pairs and packing == "optimal":
            raise ValueError("packing='optimal' is for one length; for pairs take 'best_fit'")
        self._pieces = (PairPieces if pairs else cut)(array, longest.length, overflow)
        if self._pieces.longest == 0:
            raise ValueError(
                f"none of the {len(array):,} examples has a position to train on; a causal example "
                "needs at least two tokens, and overflow='drop' leaves out those longer than the "
                f"longest bucket ({self.buckets[-1]})"
            )
        self.overflow, self.packing, self.seed = overflow, packing, seed
        self.shuffle, self.max_segments = bool(shuffle), max_segments
        #: What it was made from, and how many pieces are planned together at the most.
        self.lengths, self.window = lengths, window
        #: The largest position that a batch will hold: a table of positions needs one entry more.
        self.max_position = self._pieces.max_position
        # What the plan depends on, as `name=value` parts, so that a refusal can name what changed.
        parts = {
            "plan": VERSION,
            "lengths": lengths_lib.digest(lengths),
            "buckets": "+".join(map(str, self.buckets)),
            "seed": self.seed,
            "shuffle": "yes" if self.shuffle else "no",
            "packing": packing,
            "overflow": overflow,
            "window": window if len(self._pieces) > window else "all",
            "max_segments": max_segments or "any",
        }

        def windows(search) -> Windows:
            return Windows(
                self._pieces,
                functools.partial(search, buckets=self.buckets, max_segments=max_segments),
                seed=self.seed,
                shuffle=self.shuffle,
                window=window,
            )

        def solve() -> bytes:
            search = Search()
            return search.text(windows(search.pack).counts)

        #: Proven: no packing of these examples into these buckets uses a greater share of its
        #: positions. Of one length it is None, unless packing is "optimal"; of pairs it is that of
        #: `pipeline.planning.pair_packing.volume_bound`, and `side_bounds` is that of each side.
        self.bound: float | None = None
        #: A digest of what "optimal" found; empty for other packings.
        self.patterns = ""
        self.side_bounds: tuple[float, ...] = ()
        if pairs:
            sizes = self._pieces.lengths_of(np.arange(self._pieces.longest + 1))
            self._windows = windows(functools.partial(pack_pairs, packing=packing, sizes=sizes))
            totals = self._windows.counts @ sizes
            self.bound, self.side_bounds = volume_bound(totals, self.buckets)
        elif packing == "optimal":
            rows = {name: parts[name] for name in parts if name not in ("seed", "shuffle")}
            solution = kept(lengths, patterns, f"{rows}", solve)
            self.bound = solution.bound
            self.patterns = parts["patterns"] = solution.digest
            self._windows = windows(solution.pack)
        else:
            self._windows = windows(functools.partial(pack, packing=packing))
        #: How many examples have nothing to train on.
        self.num_empty = int(self._windows.counts[0])
        if overflow == "drop":
            self.num_empty -= self._pieces.overlong
        #: What the plan depends on: its parts, as `name=value` with semicolons between.
        self.fingerprint = ";".join(f"{name}={value}" for name, value in parts.items())
        self._dealer = Dealer(self._windows)

    #: Whether the steps end with the first epoch; those of a plan go on for ever.
    finite = False

    def num_batches(self, epoch: int = 0) -> int:
        """Batches in an epoch; the same for every epoch."""
        del epoch
        return self._windows.steps

    def first_step(self, epoch: int) -> int:
        """The step at which an epoch begins."""
        return epoch * self.num_batches()

    def batch(self, step: int) -> PlannedBatch:
        """The batch of global step `step`, counted from 0 over all epochs.

        Raises:
            IndexError: `step` is negative.
        """
        if step < 0:
            raise IndexError(f"step is {step}; steps count from 0 over all epochs")
        epoch, within = divmod(operator.index(step), self.num_batches())
        place, local = self._windows.find(epoch, within)
        dealt = self._dealt(epoch, place)
        if local >= len(dealt.bucket) // 2:
            self._prepare(epoch, place + 1)
        bucket, row, pieces, sizes = dealt.segments(local)
        return PlannedBatch(bucket, self._segments(row, pieces, sizes), epoch)

    def _dealt(self, epoch: int, place: int) -> Dealt:
        # Without shuffling all epochs are one.
        return self._dealer.get(epoch if self.shuffle else 0, place)

    def _prepare(self, epoch: int, place: int):
        """Has the window at `place` dealt in the background; after the last, the next epoch's."""
        more, place = divmod(place, len(self._windows))
        self._dealer.prepare((epoch + more) if self.shuffle else 0, place)

    def _segments(self, row: np.ndarray, pieces: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        segments = np.empty((len(row), 3 + len(self.buckets[0].lengths)), np.int64)
        segments[:, 0], segments[:, 3:] = row, self._pieces.lengths_of(sizes)
        segments[:, 1], segments[:, 2] = self._pieces.locate(pieces)
        return segments

    def after(
        self, step: int, *, lengths: Any = None, leave_out: Any = (), **changes: Any
    ) -> Chain:
        """The plan that goes on from `step` with other options, and that may change again.

        What this one has left of its epoch at `step` is planned anew, and from the next epoch on
        the whole corpus: nothing is lost or repeated. The cost is that of planning an epoch,
        whatever the step.

        >>> plan = Plan([5, 3, 4, 2, 1], [Bucket(rows=1, length=8)])
        >>> later = plan.after(1, buckets=[Bucket(rows=2, length=8)]).after(7, leave_out=[0])
        >>> later.num_batches(0), later.num_batches(1), later.batch(1).bucket
        (2, 1, Bucket(rows=2, length=8))

        Args:
            step: the first step that may differ, from 0; not before an earlier change.
            lengths: those of the examples so far, in the same order, and of others after them; or
                a corpus that has them, `Joined` of the one so far and more. The epoch that is half
                done has the others, too. None: no others.
            leave_out: examples that are left out from then on, beside those already left out:
                their numbers; or a function of the corpus (of the lengths, if this was made from
                lengths) that gives them, or a bool for each example.
            **changes: what `Plan` takes by keyword, and `buckets`; all else stays as it was.

        Raises:
            ValueError: an argument is not as above, or what `Plan` raises.
        """
        return Chain.begin(self).after(step, lengths=lengths, leave_out=leave_out, **changes)

    def anew(self, lengths: Any = None, **changes: Any) -> "Plan":
        """Another plan: of other lengths if there are any, and with other options.

        Raises:
            ValueError: there is no such option, or what `Plan` raises.
        """
        for name in changes:
            if name not in (known := {*self.options, "patterns", "lengths", "leave_out"}):
                raise ValueError(f"a plan has no option that can change {unknown(name, known)}")
        options = {**self.options, "buckets": self.buckets, **changes}
        return Plan(self.lengths if lengths is None else lengths, **options)

    @property
    def options(self) -> dict[str, Any]:
        """What it was made with, beside the lengths: JSON, buckets as rows and length."""
        names = ("seed", "shuffle", "packing", "overflow", "window", "max_segments")
        buckets = [bucket.as_json for bucket in self.buckets]
        return {"buckets": buckets, **{name: getattr(self, name) for name in names}}

    @property
    def counts(self) -> tuple[int, ...]:
        """How many examples the plan of each entry knows."""
        return (self.num_examples,)

    @property
    def entries(self) -> tuple[dict[str, Any], ...]:
        """As those of a `Chain`, of which this is the simplest."""
        return ({"from": 0, "fingerprint": self.fingerprint},)

    def entries_at(self, step: int) -> tuple[dict[str, Any], ...]:
        """What the data state after `step` batches tells of the plan: its entries."""
        del step
        return self.entries

    def onward(self, step: int) -> "Plan":
        """Itself: it has the same buckets for all steps."""
        del step
        return self

    @property
    def plans(self) -> tuple["Plan", ...]:
        """Itself alone, as of a `Chain`."""
        return (self,)

    def left(self, step: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Example, first position and positions of each piece that is in no batch before `step`.

        Of the epoch that `step` belongs to; int64, ascending by example where none is split; of
        pairs, the positions are [n, 2], of inputs and targets.
        """
        epoch, within = divmod(int(step), self.num_batches())
        place, local = self._windows.find(epoch, within)
        epoch = epoch if self.shuffle else 0
        found = [self._dealer.get(epoch, place).left(local)]
        for later in range(place + 1, len(self._windows)):
            members, _ = self._windows.members(epoch, later)
            assert members is not None, "one of several windows has members of its own"
            found.append(members)
        pieces = np.sort(np.concatenate(found)).astype(np.int64)
        examples, starts = self._pieces.locate(pieces)
        starts = np.broadcast_to(starts, len(pieces))
        return examples, starts, self._pieces.positions_of(pieces)

    @property
    def batches_per_bucket(self) -> dict[Bucket, int]:
        """How many batches of each bucket an epoch has; 0 for one that is never needed."""
        return {
            bucket: sum(kind.number * kind.table.batches[index] for kind in self._windows.kinds)
            for index, bucket in enumerate(self.buckets)
        }

    def packed(self) -> list[tuple[int, Packed]]:
        """The packed histogram of each kind of window, and how many such windows an epoch has."""
        return [(kind.number, kind.table.packed) for kind in self._windows.kinds]

    def most_segments(self) -> dict[Bucket, int]:
        """The most segments that any row of each bucket has; at least 1."""
        return {
            bucket: max(packed.most_segments(index) for _, packed in self.packed())
            for index, bucket in enumerate(self.buckets)
        }

    @property
    def num_pieces(self) -> int:
        """What an epoch packs: examples, and the parts of those that are split."""
        return int(self._windows.counts[1:].sum())

    @property
    def overlong(self) -> int:
        """How many examples are longer than the longest bucket."""
        return self._pieces.overlong

    @property
    def lost(self) -> int:
        """How many of their positions are in no batch."""
        return self._pieces.lost

    def imbalance(self, hosts: int, batches: int = 64) -> dict[Bucket, float]:
        """How much busier the busiest of `hosts` is than the mean, for attention inside segments.

        The mean over those of the first `batches` that are of each bucket; buckets whose rows
        `hosts` does not divide, or that are not among them, are left out.
        """
        seen: dict[Bucket, list[float]] = {}
        for step in range(min(batches, self.num_batches())):
            bucket, segments = self.batch(step).bucket, self.batch(step).segments
            if bucket.rows % hosts == 0:
                seen.setdefault(bucket, []).append(imbalance(segments, bucket.rows, hosts))
        return {bucket: sum(values) / len(values) for bucket, values in seen.items()}

    @property
    def side_fills(self) -> tuple[float, ...]:
        """The share of an epoch's positions that are used; of pairs, of inputs and of targets."""
        counts = self._windows.counts
        used = counts @ self._pieces.lengths_of(np.arange(len(counts)))
        there = sum(
            number * bucket.rows * np.array(bucket.lengths)
            for bucket, number in self.batches_per_bucket.items()
        )
        return tuple((used / there).tolist())

    @property
    def num_tokens(self) -> int:
        """Real positions in an epoch."""
        return sum(
            number * packed.real(index)
            for number, packed in self.packed()
            for index in range(len(self.buckets))
        )

    @property
    def padding(self) -> float:
        """The share of an epoch's positions that are padding, empty rows included."""
        batches = self.batches_per_bucket
        positions = sum(number * bucket.positions for bucket, number in batches.items())
        return 1 - self.num_tokens / positions

    def __repr__(self) -> str:
        return f"Plan({self.fingerprint})"

    def __str__(self) -> str:
        return table(self)
