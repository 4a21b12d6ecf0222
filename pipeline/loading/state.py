"""The data state: a step, and the identity of the plan whose steps it counts.

It is small JSON, the same on every host and for any number of hosts:

    {"step": 12, "plans": [{"from": 0, "fingerprint": "9f0a…",
                            "identity": {"plan": 11, "seed": 0, …},
                            "corpus": {"tokens": "91f9…", …}}], "digest": "8c41…"}

A plan that changes (`Plan.after`) has an entry for each of its stages, with what differs from the
one before. If corpora join, an entry has the identity of all corpora so far, likewise.
`"positions": "restart"` is there if batches are built with that option, and `"order"` if Grain
slices or shuffles them: steps are then counted after that. `"fitted"` is there if `load` chose the
shapes: the number of devices, and the options of the choice. `"live"` has the numbers of the
entries that `Loader.change` made, also if they begin later: a loader takes their weights from the
state. The digest is that of all else.
"""

import contextlib
import copy
import itertools
import json
import logging
import operator
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from pipeline.corpus.interface import AnyCorpus
from pipeline.errors import InvalidValue, name_some
from pipeline.loading.fitting import Shapes, explain_shapes
from pipeline.planning.bucket import Bucket
from pipeline.planning.identity import apply, difference, differences, fingerprint_of
from pipeline.planning.lengths import take_first
from pipeline.planning.options import select_options
from pipeline.planning.plan import PLANNING, Plan

logger = logging.getLogger(__name__)

DEFAULTS: dict[str, Any] = {"positions": "continue", "order": []}  # those that states leave out

RESTORE = (
    ". Restore it with the plan, corpus and options that it was saved with, change that plan from "
    "a later step on (plan.after), or start a new run in another directory"
)


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
    fitted: Mapping[str, Any] | None = None  # how `load` chose the shapes; no plan depends on it
    live: tuple[int, ...] = ()  # the numbers of the stages that `change` made
    before: Plan | None = None  # the plan without the last of them

    def state(self, step: int) -> dict[str, Any]:
        """The data state after `step` batches."""
        state = {"step": int(step), "plans": _shorten(self._entries(step))}
        state |= {name: value for name, value in self._options if value != DEFAULTS[name]}
        state |= {} if self.fitted is None else {"fitted": self.fitted}
        state |= {"live": [*self.live]} if self.live else {}
        state["digest"] = fingerprint_of(state)
        return copy.deepcopy(state)  # who changes it changes no plan

    def _entries(self, step: int) -> list[dict[str, Any]]:
        """The entries of the stages that a state of `step` has, each as a whole."""
        reach, counts = max(self._reach(int(step)), 1), self.plan.examples_per_stage
        entries = [dict(entry) for entry in self.plan.entries if entry["from"] < reach]
        for entry, count, before in zip(entries, counts, (0, *counts), strict=False):
            if count != before and self.corpus is not None:
                whole = count == len(self.corpus)
                corpus = self.corpus if whole else take_first(self.corpus, count)
                entry["corpus"] = corpus.identity
        return entries

    def resume(self, state: Any) -> int:
        """The step of `state`.

        Raises:
            ValueError: `state` is not a data state, or belongs to another plan, corpus, positions
                or order; the message names each part that differs, with both values.
        """
        state = _read(state)
        step, then = state["step"], state["plans"]
        if type(step) is not int or step < 0:
            raise InvalidValue(f"the state's step is {step!r}; it must be a whole number from 0")
        if self.corpus is not None and "corpus" not in then[0]:
            raise InvalidValue(
                f"the state of step {step:,} has no corpus to compare with; restore it with the "
                "plan alone, StateKey(plan).resume(state)"
            )
        saved = {name: state.get(name, default) for name, default in DEFAULTS.items()}
        changes = differences(saved, dict(self._options))
        entries, live = _whole(then), state.get("live", [])
        reach = max([self._reach(step), *(1 + entries[number]["from"] for number in live)])
        changes = changes or _changes(reach, entries, self._entries(reach))
        if changes:
            fitted = explain_shapes(changes, state.get("fitted"), self.fitted)
            raise InvalidValue(
                f"the state of step {step:,} belongs to another plan or corpus: "
                f"{'; '.join(changes)}{f'; {fitted}' if fitted else RESTORE}"
            )
        return step

    def change(self, step: int, weights: Mapping[str, Any]) -> "StateKey":
        """The key of the plan with other weights from a step on, which its states carry along.

        They replace those of an earlier call for the same step, and later phases.
        """
        plan, live = self.plan, self.live
        if live and self.before and plan.stages[live[-1]].start == step:
            plan, live = self.before, live[:-1]
        # Corpora that a later phase would add join here.
        every, present = plan.stages[-1].members, plan.last_stage(step).members
        joining = every.given if len(every.corpora) > len(present.corpora) else None
        changed = plan.after(step, weights=weights, lengths=joining)
        if gone := [stage.start for stage in plan.stages if stage.start > step]:
            starts = name_some(list(map("{:,}".format, gone)))
            logger.info(f"weights that change at step {step:,} replace those from {starts} on")
        number = len(changed.stages) - 1
        live = (*(earlier for earlier in live if earlier < number), number)
        return self._replace(plan=changed, before=plan, live=live)

    def live_weights(self, step: int) -> dict[str, Any] | None:
        """The weights that `change` gave from a step on; None if it changed nothing there."""
        at = [n for n in self.live if self.plan.stages[n].start == step]
        return _weights_of(self.plan.stages[at[-1]].identity) if at else None

    def follow(self, state: Any) -> "StateKey":
        """The key of the plan with the weights that `change` gave to the plan of a state."""
        state, plan = _read(state), self.plan
        entries, planned = _whole(state["plans"]), plan.entries
        live = tuple(
            number
            for number in state.get("live", ())
            if number >= len(planned)
            or any(planned[number][name] != entries[number][name] for name in ("from", "identity"))
        )
        if not live:
            return self
        start, changes = entries[live[0]]["from"], list[tuple[int, dict[str, Any]]]()
        for stage, change in zip(plan.stages, plan.changes, strict=True):
            if stage.start <= start or not stage.continues:  # phases after it are replaced
                changes.append(change)
        for number in live:
            before, weights = (_weights_of(entries[n]["identity"]) for n in (number - 1, number))
            joining = {"examples": plan.num_examples} if len(weights) > len(before) else {}
            changes.append((entries[number]["from"], {"weights": weights, **joining}))
        changes.sort(key=operator.itemgetter(0))
        lengths = plan.stages[-1].members.given
        return self._replace(plan=Plan.replay(lengths, changes).onward(plan.first), live=live)

    @property
    def _options(self) -> list[tuple[str, Any]]:
        return [("positions", self.positions), ("order", [*self.order])]

    def _reach(self, step: int) -> int:
        """The step up to which the plan counts."""
        decided = [1 + self.plan.stages[number].start for number in self.live]
        return sys.maxsize if self.order else max([step, *decided])


class Saved(NamedTuple):
    """What a data state tells of the call of `load` that made its loader.

    Attributes:
        shapes: the buckets, and how they were chosen.
        options: those of `Plan` at step 0, without `exclude`, `weights`, and the `window` of a
            corpus that is planned at once.
        corpora: the names of several corpora; empty for one.
        positions: as for `load`.
    """

    shapes: Shapes
    options: dict[str, Any]
    corpora: tuple[str, ...]
    positions: Any

    @classmethod
    def of(cls, state: Any) -> "Saved":
        """What `state` tells; a `ValueError` if it is not a data state."""
        state = _read(state)
        identity = _whole(state["plans"])[0]["identity"]
        sides = identity.get("sides", ())
        buckets = [Bucket.parse(text, sides) for text in identity["buckets"].split("+")]
        options = select_options(PLANNING, identity)
        return cls(
            Shapes(buckets, state.get("fitted")),
            {n: v for n, v in options.items() if (n, v) != ("window", None)},
            tuple(identity.get("corpora", ())),
            state.get("positions", DEFAULTS["positions"]),
        )


def _read(state: Any) -> dict[str, Any]:
    """A data state as it is in JSON; a `ValueError` if it is none."""
    with contextlib.suppress(TypeError, ValueError, RecursionError):
        # Whole numbers of NumPy are whole numbers.
        state = json.loads(json.dumps(state, default=operator.index))
    if not _is_state(state):
        raise InvalidValue(
            f"{str(state)[:200]!r} is not a data state, or was altered; one looks like "
            "{'step': 12, 'plans': […], 'digest': '8c41…'}, and comes from get_state() or a "
            "checkpoint's 'data' item"
        )
    return state


def _shorten(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Entries with what differs from the one before: corpora may be many, and most stay."""
    before, shortened = dict[str, Any](), []
    for entry in entries:
        shortened.append({n: difference(before.get(n), v) for n, v in entry.items()})
        before |= entry
    return shortened


def _whole(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The entries that `_shorten` shortened."""
    before, whole = dict[str, Any](), []
    for entry in entries:
        whole.append({name: apply(value, before.get(name)) for name, value in entry.items()})
        before |= whole[-1]
    return whole


def _weights_of(identity: Mapping[str, Any]) -> dict[str, Any]:
    """The weight of each corpus, as text, in an identity."""
    return {name: corpus.get("weight") for name, corpus in identity.get("corpora", {}).items()}


def _is_state(state: Any) -> bool:
    """Whether `state` has the form of a data state, without a check of its step."""
    try:
        entries = state["plans"]
        content = {name: value for name, value in state.items() if name != "digest"}
        return (
            state["step"] is not None
            and len(entries) > 0
            and all({"from", "identity"} <= {*entry} for entry in entries)
            and {*state.get("live", ())} <= {*range(1, len(entries))}
            and state["digest"] == fingerprint_of(content)
        )
    except (KeyError, TypeError, ValueError, RecursionError):
        return False


def _changes(step: int, then: list[dict], now: list[dict]) -> list[str]:
    """The first difference, before `step`, between the entries of a state and of a plan, in words.

    Two changes at one step are two entries, so entries are compared one by one.
    """
    sides = [[entry for entry in some if entry["from"] < max(step, 1)] for some in (then, now)]
    old, new = dict[str, Any](), dict[str, Any]()
    for both in itertools.zip_longest(*sides):
        at = min(entry["from"] for entry in both if entry)
        begins = [entry is not None and entry["from"] == at for entry in both]
        for held, entry, begins_here in zip((old, new), both, begins, strict=True):
            held |= entry if begins_here else {}  # else its earlier entries still hold
        compared = [what for what in ("corpus", "identity") if what in old and what in new]
        changes = [change for what in compared for change in differences(old[what], new[what])]
        if not all(begins):
            changes = changes or [f"its plan changes {'there' if begins[0] else 'here'} alone"]
        if changes:
            return [f"{change} from step {at:,} on" if at else change for change in changes]
    return []
