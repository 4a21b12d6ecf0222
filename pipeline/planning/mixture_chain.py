"""The chain of mixtures: one takes over from another, so that no corpus loses or repeats a token.

Each corpus goes on from where it stood: with what its epochs that were begun still have, planned
anew, and then with whole epochs. A chain knows mixtures only by what they do; `Mixture.after`
begins one.
"""

import bisect
import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from pipeline.planning.bucket import Bucket
from pipeline.planning.checks import require_whole
from pipeline.planning.leftover import chosen, short


@dataclasses.dataclass(frozen=True)
class MixtureLink:
    """A mixture, from the step on at which it takes over.

    Attributes:
        step: the first step that is not the earlier mixture's.
        plan: the mixture; its steps count from there.
        asked: what changed there beside the weights, as of a `Link`.
    """

    step: int
    plan: Any
    asked: dict[str, Any] = dataclasses.field(default_factory=dict)


class MixtureChain:
    """A mixture that goes on under changed options; what loads and saves takes it as one.

    Args:
        links: the mixtures, by the step at which they take over.
        first: how many of them are over, of which no step is asked for any more.
    """

    #: Whether the steps end; never those of mixtures that can be changed.
    finite = False

    def __init__(self, links: Iterable[MixtureLink], first: int = 0):
        self._links, self._first = tuple(links), first
        self._from = [link.step for link in self._links]
        # The number of each mixture's first epoch: each begins one.
        self._epochs = [0]
        for link, step in zip(self._links, self._from[1:], strict=False):
            begun = -(-(step - link.step) // link.plan.num_batches())
            self._epochs.append(self._epochs[-1] + begun)

    def after(
        self,
        step: int,
        *,
        weights: Mapping[str, float] | None = None,
        lengths: Any = None,
        leave_out: Any = (),
        **changes: Any,
    ) -> "MixtureChain":
        """As `Mixture.after`.

        Raises:
            ValueError: as `Mixture.after`; or `step` is before that of an earlier change.
        """
        *earlier, last = self._links
        step = require_whole("step", step, 0)
        if step < last.step:
            raise ValueError(
                f"step is {step:,}; a change is not before step {last.step:,}, at which the last is"
            )
        if lengths is not None and weights is None:
            raise ValueError("lengths are given without weights; give each corpus its weight, too")
        local = step - last.step
        there = last.plan if lengths is None else last.plan.grown(lengths)
        asked = leave_out(there.joined) if callable(leave_out) else leave_out
        more = chosen(asked, np.broadcast_to(np.uint8(0), there.num_examples))
        more = np.setdiff1d(more, there.left_out_of_all)
        known = there.num_examples if weights is not None else there.examples_at(local)
        if len(more) and more[-1] >= known:
            raise ValueError(
                f"leave_out holds {more[-1]:,}, of a corpus that has not joined by step {step:,}, "
                f"when there are {known:,} examples; leave it out when the corpus joins, or later"
            )
        if changes or len(more):
            mixture = there.goes_on(local, weights=weights, leave_out=more, **changes)
            record = {name: mixture.options[name] for name in changes}
            if len(more):
                record["leave_out"] = more.tolist()
            return MixtureChain([*self._links, MixtureLink(step, mixture, record)])
        if weights is None:  # nothing changes
            return self
        mixture = there.after(local, weights=weights)
        return MixtureChain([*earlier, dataclasses.replace(last, plan=mixture)])

    def onward(self, step: int) -> "MixtureChain":
        """The same mixture for steps from `step` on only, with the buckets that these need."""
        return MixtureChain(self._links, self._at(step))

    def _at(self, step: int) -> int:
        at = bisect.bisect_right(self._from, step) - 1
        if at < self._first:
            raise IndexError(
                f"step is {step}; this mixture knows steps from {self._from[self._first]:,} on"
            )
        return at

    def batch(self, step: int):
        """The batch of global step `step`, as `Mixture.batch` gives it.

        Raises:
            IndexError: `step` is negative, or before the steps that this mixture knows.
        """
        at = self._at(step)
        planned = self._links[at].plan.batch(int(step) - self._from[at])
        return dataclasses.replace(planned, epoch=self._epochs[at] + planned.epoch)

    @property
    def _phases(self) -> list[tuple[dict[str, Any], int, dict[str, Any]]]:
        """Of each phase of each mixture that ever holds: entry, number of examples, and change."""
        found: list[tuple[dict[str, Any], int, dict[str, Any]]] = []
        for number, link in enumerate(self._links):
            until = self._from[number + 1] if number + 1 < len(self._links) else None
            phases = zip(link.plan.entries, link.plan.counts, link.plan.changes, strict=True)
            for entry, count, (start, options) in phases:
                at = link.step + start
                if start and until is not None and at >= until:
                    continue
                if number and not start:
                    options = link.asked | {"weights": options["weights"]}
                    if count > found[-1][1]:
                        options["examples"] = count
                entry = {**entry, "from": at} | ({"changes": short(options)} if found else {})
                found.append((entry, count, options))
        return found

    @property
    def entries(self) -> tuple[dict[str, Any], ...]:
        """As those of a `Mixture`."""
        return tuple(entry for entry, _, _ in self._phases)

    def entries_at(self, step: int) -> tuple[dict[str, Any], ...]:
        """Its entries but for what is to come, which may change."""
        return tuple(entry for entry in self.entries if entry["from"] < max(step, 1))

    @property
    def counts(self) -> tuple[int, ...]:
        """How many examples the mixture of each entry knows."""
        return tuple(count for _, count, _ in self._phases)

    @property
    def fingerprint(self) -> str:
        """Those of all its mixtures, each with the step from which it holds."""
        first, *later = self.entries
        return ";".join(
            [first["fingerprint"]]
            + [
                ";".join(f"{part}@{entry['from']}" for part in entry["fingerprint"].split(";"))
                for entry in later
            ]
        )

    @property
    def changes(self) -> list[tuple[int, dict[str, Any]]]:
        """From which step on each mixture and each of its phases holds, and what is new there."""
        return [(entry["from"], options) for entry, _, options in self._phases]

    def first_step(self, epoch: int) -> int:
        """The step at which an epoch begins; each mixture begins one."""
        at = bisect.bisect_right(self._epochs, epoch) - 1
        return self._from[at] + (epoch - self._epochs[at]) * self._links[at].plan.num_batches()

    def num_batches(self, epoch: int = 0) -> int:
        """Batches in an epoch."""
        return self.first_step(epoch + 1) - self.first_step(epoch)

    def tokens(self, step: int) -> np.ndarray:
        """As `Mixture.tokens`, of the corpora there are in the end."""
        total = np.zeros(len(self.names))
        for mixture, local in self._before(step):
            each = mixture.tokens(local)
            total[: len(each)] += each
        return total

    def shares(self, first: int, last: int) -> dict[str, float]:
        """As `Mixture.shares`."""
        tokens = self.tokens(last) - self.tokens(first)
        return dict(zip(self.names, (tokens / max(tokens.sum(), 1)).tolist(), strict=True))

    def passes(self, step: int) -> dict[str, float]:
        """How often each corpus has been through before `step`, about."""
        found = dict.fromkeys(self.names, 0.0)
        for mixture, local in self._before(step):
            for name, passes in mixture.passes(local).items():
                found[name] += passes
        return found

    def _before(self, step: int) -> list[tuple[Any, int]]:
        """The mixtures that have steps before `step`, and how many."""
        ends = [*self._from[1:], step]
        pairs = zip(self._links, ends, strict=True)
        return [(link.plan, min(end, step) - link.step) for link, end in pairs if link.step < step]

    def whole_epochs(self, step: int) -> dict[str, int]:
        """As `Mixture.whole_epochs`."""
        link = self._links[bisect.bisect_right(self._from, max(step - 1, 0)) - 1]
        return link.plan.whole_epochs(step - link.step)

    @property
    def links(self) -> tuple[MixtureLink, ...]:
        """The mixtures and from where on they hold."""
        return self._links

    @property
    def plans(self) -> tuple[Any, ...]:
        """The mixtures, one after another."""
        return tuple(link.plan for link in self._links)

    @property
    def _last(self) -> Any:
        return self._links[-1].plan

    @property
    def _used(self) -> list[Any]:
        return [link.plan for link in self._links[self._first :]]

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """Every bucket of any of the mixtures, the shortest first."""
        every = {bucket for mixture in self._used for bucket in mixture.buckets}
        return tuple(sorted(every, key=lambda bucket: (bucket.length, bucket.rows)))

    @property
    def batches_per_bucket(self) -> dict[Bucket, int]:
        """How many batches of each bucket an epoch of each mixture has, added up."""
        found = dict.fromkeys(self.buckets, 0)
        for mixture in self._used:
            for bucket, number in mixture.batches_per_bucket.items():
                found[bucket] += number
        return found

    def most_segments(self) -> dict[Bucket, int]:
        """The most segments that any row of each bucket has; at least 1."""
        found = dict.fromkeys(self.buckets, 1)
        for mixture in self._used:
            for bucket, number in mixture.most_segments().items():
                found[bucket] = max(found[bucket], number)
        return found

    @property
    def names(self) -> tuple[str, ...]:
        """The corpora there are in the end."""
        return self._last.names

    @property
    def first_examples(self) -> list[int]:
        """The number of each corpus's first example."""
        return self._last.first_examples

    @property
    def num_examples(self) -> int:
        """Examples of all corpora, those left out included."""
        return self._last.num_examples

    @property
    def max_position(self) -> int:
        """The largest position that a batch will hold."""
        return max(mixture.max_position for mixture in self.plans)

    @property
    def num_tokens(self) -> int:
        """Real positions in an epoch of the last mixture."""
        return self._last.num_tokens

    @property
    def padding(self) -> float:
        """The share of padding in an epoch of the last mixture."""
        return self._last.padding

    def __repr__(self) -> str:
        return f"MixtureChain({self.fingerprint})"

    def __str__(self) -> str:
        first, *later = self._links
        return "\n".join(
            [
                str(first.plan),
                *(f"from step {each.step:,} on:\n{each.plan}" for each in later),
            ]
        )
