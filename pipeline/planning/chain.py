"""The chain: plans that take over from one another, so that nothing is lost or repeated.

What a plan has consumed by a step is a pure function, so what it has left of its epoch is known:
that is planned anew, and from the next epoch on the whole corpus. A chain knows plans only by what
they do; `Plan.after` begins one.
"""

import bisect
import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from pipeline.planning import lengths as lengths_lib
from pipeline.planning.bucket import Bucket
from pipeline.planning.checks import require_whole
from pipeline.planning.leftover import Leftover, Reduced, chosen, grown, short


@dataclasses.dataclass(frozen=True)
class Rest:
    """What was left of an epoch when another plan took over, planned anew.

    Attributes:
        leftover: the runs of positions that were left.
        plan: plans these runs.
        epoch: the epoch that they belong to.
    """

    leftover: Leftover
    plan: Any
    epoch: int

    @property
    def steps(self) -> int:
        """How many batches it has."""
        return self.plan.num_batches()

    @property
    def max_position(self) -> int:
        """The largest position that a batch of it holds."""
        return self.leftover.max_position(self.plan.buckets[-1], self.plan.overflow)

    def batch(self, step: int):
        """Its batch number `step`, of the examples themselves."""
        planned = self.plan.batch(self.epoch * self.steps + step)
        examples, starts = self.leftover.locate(*planned.segments[:, 1:3].T)
        planned.segments[:, 1], planned.segments[:, 2] = examples, starts
        return planned

    def left(self, step: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """As `Plan.left`, of the examples themselves."""
        runs, starts, sizes = self.plan.left(self.epoch * self.steps + step)
        return *self.leftover.locate(runs, starts), sizes


@dataclasses.dataclass(frozen=True)
class Link:
    """A plan, from the step on at which it takes over.

    Attributes:
        step: the first step that is not the earlier plan's.
        plan: plans the whole corpus, epoch by epoch.
        rest: plans what the earlier plan had left of its epoch; None for nothing.
        whole: the step at which the first epoch of `plan` begins.
        epoch: which epoch that is.
        left_out: the examples that are left out, int64, ascending.
        lengths: those of all examples, left out or not: an array, or a corpus.
        asked: what changed there, as keywords of `Plan.after`; JSON, `examples` in place of
            `lengths`: how many there are. Of the first, nothing.
    """

    step: int
    plan: Any
    rest: Rest | None
    whole: int
    epoch: int
    left_out: np.ndarray
    lengths: Any
    asked: dict[str, Any] = dataclasses.field(default_factory=dict)

    def batch(self, step: int):
        """The batch of global step `step`."""
        if self.rest is not None and step < self.whole:
            return self.rest.batch(step - self.step)
        return self.plan.batch(self._local(step))

    def left(self, step: int):
        """Pieces, as `Plan.left`, that are left of a half done epoch before `step`; and the epoch.

        None for the pieces where an epoch begins at `step`.
        """
        if self.rest is not None and step < self.whole:
            return self.rest.left(step - self.step), self.rest.epoch
        local = self._local(step)
        epoch, within = divmod(local, self.plan.num_batches())
        return (self.plan.left(local) if within else None), epoch

    def first(self, epoch: int) -> int:
        """The step at which `epoch` begins, if no other plan takes over before."""
        return self.whole + (epoch - self.epoch) * self.plan.num_batches()

    def _local(self, step: int) -> int:
        return self.epoch * self.plan.num_batches() + step - self.whole

    @property
    def plans(self) -> tuple[Any, ...]:
        """The plans that its batches come from."""
        return (self.plan,) if self.rest is None else (self.rest.plan, self.plan)


class Chain:
    """A plan that goes on under changed options: as a `Plan`, but for epochs of unequal length.

    >>> from pipeline import Bucket, Plan
    >>> plan = Plan([5, 3, 4, 2, 1, 6], [Bucket(1, 8)], shuffle=False)
    >>> longer = plan.after(1, buckets=[Bucket(1, 16)])
    >>> [longer.batch(step).segments[:, 1].tolist() for step in range(longer.num_batches(0))]
    [[0, 1], [5, 2, 3, 4]]
    >>> longer.num_batches(0), longer.num_batches(1), longer.batch(2).epoch
    (2, 2, 1)

    Each epoch holds what the plan with which it began says; of what is left when another takes
    over, nothing is trained on again, and nothing is lost but what is left out from then on or
    what `overflow` then takes from it, as it does from whole examples. What earlier options had
    truncated or dropped comes back with the next epoch.

    Memory, for each change: about 20 bytes for each piece that was left of the epoch, and where
    examples are left out, another copy of the lengths.

    Args:
        links: the plans, by the step at which they take over; the first has no rest.
        entries: one for each plan there ever was, as in the data state.
        counts: how many examples the plan of each entry knows.
    """

    #: Whether the steps end; never those of plans that can be changed.
    finite = False

    def __init__(
        self, links: Iterable[Link], entries: Iterable[Mapping[str, Any]], counts: Iterable[int]
    ):
        self._links, self.counts = tuple(links), tuple(counts)
        #: For each plan: "from" which step, its "fingerprint" and, but for the first, the
        #: "changes" to the one before; JSON. Of many examples left out, their number and a digest.
        self.entries = tuple(entries)
        self._from = [link.step for link in self._links]

    def entries_at(self, step: int) -> tuple[Mapping[str, Any], ...]:
        """All its entries: what is planned for later is part of what it is."""
        del step
        return self.entries

    @classmethod
    def begin(cls, plan: Any) -> "Chain":
        """The chain of one plan."""
        nothing = np.zeros(0, np.int64)
        return cls([Link(0, plan, None, 0, 0, nothing, plan.lengths)], plan.entries, plan.counts)

    def after(
        self, step: int, *, lengths: Any = None, leave_out: Any = (), **changes: Any
    ) -> "Chain":
        """As `Plan.after`.

        Raises:
            ValueError: as `Plan.after`; or `step` is before that of an earlier change.
        """
        last = self._links[-1]
        step = require_whole("step", step, 0)
        if step < last.step:
            raise ValueError(
                f"step is {step:,}; a change is not before step {last.step:,}, at which the last is"
            )
        if lengths is None:
            lengths, new = last.lengths, lengths_lib.as_lengths(last.lengths)[:0]
        else:
            new = grown(last.lengths, lengths)
        more = np.setdiff1d(chosen(leave_out, lengths), last.left_out)
        left_out = np.union1d(last.left_out, more)
        if len(left_out) and (len(new) or len(more)):
            plan = last.plan.anew(Reduced(lengths, left_out), **changes)
        else:
            plan = last.plan.anew(lengths if len(new) else None, **changes)
        pieces, epoch = last.left(step)
        rest = None
        if pieces is not None:
            pieces = _joined(pieces, last.plan.num_examples, new)
            rest = _rest(plan, pieces, epoch, left_out, getattr(lengths, "kept", None))
            epoch += 1
        whole = step + (rest.steps if rest else 0)
        asked = {name: plan.options[name] for name in changes if name in plan.options}
        if len(new):
            asked["examples"] = plan.num_examples
        if len(more):
            asked["leave_out"] = more.tolist()
        link = Link(step, plan, rest, whole, epoch, left_out, lengths, asked)
        fingerprint = plan.fingerprint
        if rest is not None and (found := rest.plan.patterns):
            fingerprint += f";patterns of the rest={found}"
        entry = {"from": link.step, "fingerprint": fingerprint, "changes": short(asked)}
        counts = [*self.counts, plan.num_examples]
        return Chain([*self._links, link], [*self.entries, entry], counts)

    def onward(self, step: int) -> "Chain":
        """The same plan for steps from `step` on only, with the buckets that these need."""
        at = bisect.bisect_right(self._from, step) - 1
        if at < 0:
            raise IndexError(f"step is {step}; this plan knows steps from {self._from[0]:,} on")
        first, *later = self._links[at:]
        if first.rest is not None and step >= first.whole:
            first = dataclasses.replace(first, step=first.whole, rest=None)
        return Chain([first, *later], self.entries, self.counts)

    @property
    def fingerprint(self) -> str:
        """That of the first plan, and for each change its step and the parts that it changes."""
        parts = [self.entries[0]["fingerprint"]]
        for before, entry in zip(self.entries, self.entries[1:], strict=False):
            then = before["fingerprint"].split(";")
            new = [part for part in entry["fingerprint"].split(";") if part not in then]
            names = "+".join(part.partition("=")[0] for part in new)
            parts += [f"change@{entry['from']}={names or 'nothing'}"]
            pairs = (part.partition("=") for part in new)
            parts += [f"{name}@{entry['from']}={value}" for name, _, value in pairs]
        return ";".join(parts)

    def first_step(self, epoch: int) -> int:
        """The step at which an epoch begins."""
        at = bisect.bisect_right([link.epoch for link in self._links], epoch) - 1
        if at < 0:
            raise IndexError(
                f"epoch is {epoch}; this plan knows whole epochs from {self._links[0].epoch} on"
            )
        return self._links[at].first(epoch)

    def num_batches(self, epoch: int = 0) -> int:
        """Batches in an epoch; epochs in which plans change have numbers of their own."""
        return self.first_step(epoch + 1) - self.first_step(epoch)

    def batch(self, step: int):
        """The batch of global step `step`, as `Plan.batch` gives it.

        Raises:
            IndexError: `step` is negative, or before the steps that this plan knows.
        """
        at = bisect.bisect_right(self._from, step) - 1
        if at < 0:
            raise IndexError(f"step is {step}; this plan knows steps from {self._from[0]:,} on")
        return self._links[at].batch(int(step))

    @property
    def changes(self) -> list[tuple[int, dict[str, Any]]]:
        """From which step on each plan holds, and what is new there: of the first, all of it."""
        first, *later = self._links
        begin = {"examples": self.counts[0]} if len({*self.counts}) > 1 else {}
        return [(0, first.plan.options | begin), *((link.step, link.asked) for link in later)]

    @property
    def links(self) -> tuple[Link, ...]:
        """The plans and from where on they hold."""
        return self._links

    @property
    def plans(self) -> tuple[Any, ...]:
        """The plans of whole epochs, one after another."""
        return tuple(link.plan for link in self._links)

    @property
    def _all(self) -> list[Any]:
        return [plan for link in self._links for plan in link.plans]

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """Every bucket of any of the plans, the shortest first."""
        every = {bucket for plan in self._all for bucket in plan.buckets}
        return tuple(sorted(every, key=lambda bucket: (bucket.length, bucket.rows)))

    @property
    def batches_per_bucket(self) -> dict[Bucket, int]:
        """How many batches of each bucket an epoch of each plan has, added up."""
        found = dict.fromkeys(self.buckets, 0)
        for plan in self._all:
            for bucket, number in plan.batches_per_bucket.items():
                found[bucket] += number
        return found

    def most_segments(self) -> dict[Bucket, int]:
        """The most segments that any row of each bucket has; at least 1."""
        found = dict.fromkeys(self.buckets, 1)
        for plan in self._all:
            for bucket, number in plan.most_segments().items():
                found[bucket] = max(found[bucket], number)
        return found

    @property
    def num_examples(self) -> int:
        """Examples of the corpus as it is in the end, those left out included."""
        return self._links[-1].plan.num_examples

    @property
    def max_position(self) -> int:
        """The largest position that a batch will hold."""
        rests = [link.rest for link in self._links if link.rest is not None]
        return max(each.max_position for each in [*self.plans, *rests])

    @property
    def num_tokens(self) -> int:
        """Real positions in a whole epoch of the last plan."""
        return self.plans[-1].num_tokens

    @property
    def padding(self) -> float:
        """The share of padding in a whole epoch of the last plan."""
        return self.plans[-1].padding

    def __repr__(self) -> str:
        return f"Chain({self.fingerprint})"

    def __str__(self) -> str:
        before = [self._links[0], *self._links]
        told = zip(self._links, before, strict=False)
        return "\n".join(
            _told(link, link.plan.num_examples - then.plan.num_examples) for link, then in told
        )


def _joined(pieces, first: int, new: np.ndarray):
    """Pieces, and new examples after them, as far as these have anything to train on."""
    there = np.flatnonzero(new if new.ndim == 1 else new[:, 1])
    more = first + there, np.zeros_like(there), new[there].astype(np.int64)
    return tuple(np.concatenate(each) for each in zip(pieces, more, strict=True))


def _rest(plan, pieces, epoch: int, left_out: np.ndarray, kept) -> Rest | None:
    """What is to be planned anew of the pieces that an epoch had left."""
    examples, starts, sizes = pieces
    if len(left_out):
        stays = ~np.isin(examples, left_out)
        examples, starts, sizes = examples[stays], starts[stays], sizes[stays]
    leftover = Leftover(examples, starts, sizes, kept)
    if not leftover.fit(plan.buckets[-1], plan.overflow):
        return None
    return Rest(leftover, plan.anew(leftover), epoch)


def _told(link: Link, new: int) -> str:
    """A link in words, with how many examples are new, and its plan as a table."""
    if not link.step:
        return str(link.plan)
    said = f"from step {link.step:,} on"
    if new:
        said += f", with {new:,} new examples"
    if len(link.left_out):
        said += f", without {len(link.left_out):,} examples that are left out"
    if link.rest is not None:
        rest = link.rest.plan
        said += (
            f", {link.rest.steps:,} batches for the {rest.num_tokens:,} positions that epoch "
            f"{link.rest.epoch} still had ({rest.padding:.3%} padding), and then"
        )
    return f"{said}:\n{link.plan}"
