"""The data state: a step, and the identity of the plan whose steps it counts.

It is small JSON, the same on every host and for any number of hosts:

    {"step": 12, "plans": [{"from": 0, "fingerprint": "9f0a…",
                            "identity": {"plan": 5, "seed": 0, …},
                            "corpus": {"tokens": "91f9…", …}}]}

A plan that changes (`Plan.after`) has an entry for each of its stages; entries after the first
have their "changes". If corpora join, an entry has the identity of all corpora so far. A followed
plan, of corpora that grow, has the entry of a stage that begins with a chapter, with the "places"
where chapters begin and the ends of the windows that have begun, each with a digest of all earlier
parts. `"positions": "restart"` is there if batches are built with that option, and `"order"` if
Grain slices, shuffles or stacks them: steps are then counted after that.
"""

import itertools
import sys
from typing import Any, NamedTuple

from pipeline.corpus.interface import AnyCorpus
from pipeline.errors import InvalidValue
from pipeline.planning.identity import fingerprint_of, flatten
from pipeline.planning.lengths import take_first
from pipeline.planning.plan import Plan


class StateKey(NamedTuple):
    """The plan and corpus of data states: it makes states, and refuses those of others.

    A state belongs to the plan up to its step: later stages may differ, since a run may change its
    future. With an `order`, after which a step is no longer a step of the plan, a state belongs to
    the whole plan.
    """

    plan: Plan
    corpus: AnyCorpus | None = None  # None: states have no corpus
    positions: str = "continue"
    order: tuple[str, ...] = ()

    def state(self, step: int) -> dict[str, Any]:
        """The data state after `step` batches."""
        follows = self.plan.follows
        entries = [dict(each) for each in self.plan.entries_at(self._reach(int(step)))]
        if follows and self.corpus is not None:
            entries[0]["corpus"] = self.corpus.identity
        counts = () if follows else self.plan.counts
        for entry, count, before in zip(entries, counts, (0, *counts), strict=False):
            if count != before and self.corpus is not None:
                whole = count == len(self.corpus)
                known = self.corpus if whole else take_first(self.corpus, count)
                entry["corpus"] = known.identity
        state: dict[str, Any] = {"step": int(step), "plans": entries}
        if self.positions != "continue":
            state["positions"] = self.positions
        return {**state, "order": [*self.order]} if self.order else state

    def step(self, state: Any) -> int:
        """The step of `state`.

        Raises:
            ValueError: `state` is not a data state, or belongs to another plan, corpus, positions
                or order; the message names each part that differs, with both values.
        """
        if not _is_state(state):
            raise InvalidValue(
                f"{str(state)[:200]!r} is not a data state; one looks like "
                f"{StateKey(self.plan).state(0)}, and comes from get_state() or a checkpoint's "
                "'data' item"
            )
        step, then = state["step"], state["plans"]
        if type(step) is not int or step < 0:
            raise InvalidValue(f"the state's step is {step!r}; it must be a whole number from 0")
        if self.corpus is not None and "corpus" not in then[0]:
            raise InvalidValue(
                f"the state of step {step:,} has no corpus to compare with; restore it with the "
                "plan alone, StateKey(plan).step(state)"
            )
        if (saved := state.get("positions", "continue")) != self.positions:
            raise InvalidValue(
                f"the state of step {step:,} was saved with positions={saved!r} and is restored "
                f"with positions={self.positions!r}; load with positions={saved!r} to resume, or "
                "start a new run"
            )
        if (saved := state.get("order", [])) != [*self.order]:
            raise InvalidValue(
                f"the state of step {step:,} counts steps after {saved or 'no slice or the like'}, "
                f"and is restored after {[*self.order] or 'none'}; transform the batches as when "
                "it was saved"
            )
        changes = []
        if self.plan.follows:
            if [*then[0].get("places", ())] != [*self.plan.names]:
                raise InvalidValue(
                    f"the state of step {step:,} belongs to a corpus that was planned as a whole, "
                    "or to other corpora; load those, without follow=True if they were planned as "
                    "a whole"
                )
            changes = [
                change
                for entry, stage in self.plan.match(then)
                for change in differences(entry["identity"], stage.identity)
            ]
            if not changes:
                self.plan.resume(then)
        if changes := changes or _changes(self._reach(step), then, self.state(step)["plans"]):
            raise InvalidValue(
                f"the state of step {step:,} belongs to another plan or corpus: "
                f"{'; '.join(changes)}. Restore it with the plan and corpus that it was saved "
                "with, change that plan from a later step on (plan.after), or start a new run in "
                "another directory"
            )
        return step

    def _reach(self, step: int) -> int:
        """The step up to which the plan counts."""
        return sys.maxsize if self.order and not self.plan.follows else step


def _is_state(state: Any) -> bool:
    """Whether `state` has the form of a data state, without a check of its step."""
    plans = state.get("plans") if isinstance(state, dict) and "step" in state else None
    if not isinstance(plans, list | tuple) or not all(isinstance(each, dict) for each in plans):
        return False
    starts = [entry.get("from") for entry in plans]
    known = all(
        isinstance(entry.get("identity"), dict)
        and entry.get("fingerprint") == fingerprint_of(entry["identity"])
        and isinstance(entry.get("corpus", {}), dict)
        for entry in plans
    )
    if not known or not all(type(start) is int for start in starts):
        return False
    begins = starts[:1] == [0] or any(map(_is_followed, plans[:1]))
    return begins and starts == sorted(starts)


def _is_followed(entry: dict) -> bool:
    """Whether an entry has the form of those of a followed plan."""
    places, rows, owed = (entry.get(name) for name in ("places", "rows", "owed"))
    if not isinstance(places, dict) or not isinstance(rows, list) or not isinstance(owed, list):
        return False
    known = all(_are_numbers(line) and len(line) == len(places) for line in (*rows, *owed))
    windows = entry.get("windows")
    known = known and isinstance(windows, list) and len(windows) == len(places)
    known = known and _are_numbers(windows)
    return known and all(map(_is_place, places.values()))


def _is_place(place: Any) -> bool:
    """Whether JSON has the form of a `Place` and the end of the windows that have begun.

    Of a corpus that does not grow, there is only whether it begins with a rest, and an epoch.
    """
    if not isinstance(place, dict) or type(place.get("epoch", 0)) is not int:
        return False
    if not {*place} - {"rest", "epoch"}:
        return True
    try:
        last, digest = place["last"]
        numbers = [last, *(place[name] for name in ("part", "example", "pieces"))]
        digests = isinstance(place["digest"], str) and isinstance(digest, str)
    except (TypeError, KeyError, ValueError):
        return False
    known = len({*place} - {"rest", "epoch"}) == 5 and digests
    return known and _are_numbers(numbers) and min(numbers) >= 0


def _are_numbers(values: Any) -> bool:
    return isinstance(values, list) and all(type(each) is int for each in values)


def _changes(step: int, then: list[dict], now: list[dict]) -> list[str]:
    """The first difference, before `step`, between the entries of a state and of a plan, in words.

    Two changes at one step are two entries, so entries are compared one by one.
    """
    sides = [[entry for entry in some if entry["from"] < max(step, 1)] for some in (then, now)]
    old, new = dict[str, Any](), dict[str, Any]()
    for both in itertools.zip_longest(*sides):
        at = min(entry["from"] for entry in both if entry)
        there = [entry is not None and entry["from"] == at for entry in both]
        for held, entry, is_there in zip((old, new), both, there, strict=True):
            held |= entry if is_there else {}  # else its earlier entries still hold
        kept = [what for what in ("corpus", "identity") if what in old and what in new]
        found = [change for what in kept for change in differences(old[what], new[what])]
        if not all(there):
            found = found or [f"its plan changes {'there' if there[0] else 'here'} alone"]
        if found:
            return [f"{change} from step {at:,} on" if at else change for change in found]
    return []


def differences(then: Any, now: Any) -> list[str]:
    """Each part that differs between two identities, which are JSON, in words.

    >>> differences({"seed": 3, "corpora": {"text": {"lengths": "a"}}}, {"seed": 4})
    ['seed was 3 and is now 4', 'lengths of text was a and is now not given']
    """
    old, new = (dict(flatten(each)) for each in (then, now))
    return [
        f"{name} was {old.get(name, 'not given')} and is now {new.get(name, 'not given')}"
        for name in dict.fromkeys([*old, *new])
        if old.get(name) != new.get(name)
    ]
