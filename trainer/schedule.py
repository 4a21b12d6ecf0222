"""The schedule: the changes of the options of a run's batches, by step.

The first entry of a schedule has the options at step 0; each later entry changes some of them. One
rule holds for every change: the past stands, the future may change.
"""

import dataclasses
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from pipeline.corpus.corpora import Corpora
from pipeline.errors import InvalidValue, require_whole, suggest_option
from pipeline.history.plans import describe_changes
from pipeline.loading import DynamicContext, batch_sharding, multiples
from pipeline.planning.fit import fit_buckets
from pipeline.planning.options import list_keywords, select_options
from pipeline.planning.plan import PLANNING, Plan
from trainer.checkpoint import Saved
from trainer.config import as_json, show_field

logger = logging.getLogger(__name__)

FITTING = list_keywords(fit_buckets)
# Options that choose other buckets when they change; examples that leave do not.
REFITTING = [name for name in FITTING if name not in ("exclude", "overflow", "max_segments")]

# An entry adds to these lists, and does not replace them.
LISTS = ("exclude", "add")
# The weights of a mixture change by phases instead.
KNOWN = {*FITTING, *PLANNING, *LISTS, "buckets"} - {"weights", "by"}


@dataclasses.dataclass(frozen=True)
class Entry:
    """Options that hold from a step on.

    `options` come from the config: those of `fit_buckets` and `Plan`; `buckets`, `exclude` and
    `add` (names of corpora that join the first). `plan` has the arguments of `Plan.after` for them,
    with fitted buckets; it is empty before `Schedule.fit`.
    """

    step: int
    options: dict[str, Any]
    plan: dict[str, Any] = dataclasses.field(default_factory=dict, compare=False)


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The options of a run's batches: an entry for step 0, and one for each step of a change.

    `mixture` has `weights` and `by`, as for `Plan`; empty for one corpus.

    >>> schedule = Schedule.make({"buckets": [[2, 128]]}, [(100, {"buckets": [[4, 128]]})])
    >>> schedule.plan([30, 50, 90]).buckets
    (Bucket(rows=4, length=128), Bucket(rows=2, length=128))
    """

    entries: tuple[Entry, ...]
    mixture: dict[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def make(
        cls,
        begin: Mapping[str, Any],
        changes: Iterable[Sequence] = (),
        mixture: Mapping[str, Any] | None = None,
    ) -> "Schedule":
        """The schedule of options at step 0, and of pairs of a step and what changes there."""
        options = {name: value for name, value in begin.items() if value is not None}
        entries = [Entry(0, options), *_list_entries(changes)]
        for entry in entries:
            _check_options(entry.options)
        first = Entry(0, _merge(entry for entry in entries if entry.step == 0))
        return cls((first, *(entry for entry in entries if entry.step)), dict(mixture or {}))

    @classmethod
    def of(cls, config: ConfigDict, saved: Saved, sharding: Any) -> "Schedule":
        """The schedule of a config, for a run that continues from a checkpoint, or begins.

        A run that begins keeps the number of devices that share its rows as `row_multiple`, if the
        config gives none, so that it has the same batches on other devices. `sharding` is that of
        batches.
        """
        fields = as_json(config)
        begin = {"seed": fields["seed"], **fields["batches"]}
        if begin.get("row_multiple") is None and not saved.step:
            begin["row_multiple"] = multiples(batch_sharding(sharding), config.context_order)[0]
            if isinstance(sharding, DynamicContext):
                begin["devices"] = sharding.devices
        made = cls.make(begin, fields["schedule"], config.get("mixture"))
        return made.resume(saved.run["schedule"], saved.step) if saved.step else made

    def begin_with(self, **options: Any) -> "Schedule":
        """The same schedule with more options at step 0, and in its plan if that is fitted."""
        first, *later = self.entries
        plan = first.plan and {**first.plan, **options}
        first = Entry(0, {**first.options, **options}, plan)
        return dataclasses.replace(self, entries=(first, *later))

    @property
    def seed(self) -> int:
        """The seed at step 0."""
        return self.entries[0].options["seed"]

    def as_json(self) -> list[dict[str, Any]]:
        """The state of the schedule, for `resume`."""
        return [dataclasses.asdict(entry) for entry in self.entries]

    def options(self, step: float = float("inf")) -> dict[str, Any]:
        """The options in force at a step; `exclude` and `add` accumulate."""
        return _merge(entry for entry in self.entries if entry.step <= step)

    def resume(self, state: Iterable[Mapping[str, Any]], step: int) -> "Schedule":
        """The schedule of a run that continues at a step: the past stands, the future may change.

        Entries before `step` come from `state`, `as_json()` of the run's schedule; entries from
        `step` on come from this schedule. It may omit past entries, and its options at step 0 may
        be those that the run began with, or the changed ones.
        """
        before = [Entry(**entry) for entry in state]
        past = [entry for entry in before if entry.step < step]
        future = [entry for entry in self.entries if entry.step >= step]
        for entry in self.entries[1:]:
            if entry.step < step and entry not in past[1:]:
                had = [[each.step, each.options] for each in past[1:]]
                raise InvalidValue(
                    f"the schedule has {[entry.step, entry.options]}, but up to step {step:,}, "
                    f"where the run is, it was {had}; change only later entries"
                )
        now, entries = self.entries[0].options, [*past, *future]
        stages = [_merge(entries[: n + 1]) for n in range(len(entries))]
        if wrong := {
            name: value
            for name, value in now.items()
            if not any(_is_same(name, value, stage.get(name)) for stage in stages)
        }:
            in_force = _merge(entry for entry in entries if entry.step <= step)
            differ = "; ".join(
                f"{name} was {show_field(in_force, name)} and is now {value!r}"
                for name, value in wrong.items()
            )
            new = wrong | {
                name: [value for value in wrong[name] if value not in in_force.get(name, ())]
                for name in {*wrong} & {*LISTS}
            }
            schedule = (step, new), *((entry.step, entry.options) for entry in future)
            raise InvalidValue(
                f"{differ}. The past of a run stands; restore these values, or change them from "
                f'step {step:,} on with --config.schedule="{schedule}"'
            )
        for entry in before:
            if entry.step >= step and entry not in future:
                what = describe_changes(entry.options)
                logger.info(f"no longer in the schedule: from step {entry.step:,} on, {what}")
        for number, (then, entry) in enumerate(zip(before, entries, strict=False)):
            if then != entry:
                break
            entries[number] = then  # its buckets are fitted already
        return dataclasses.replace(self, entries=tuple(entries))

    def select(self, corpus: Any) -> Any:
        """The corpus that a run trains on: the first of `corpus`, and those that entries add."""
        if self.mixture:  # its phases say which corpora are in it
            return corpus
        added = self.options().get("add", [])
        members = corpus.corpora if isinstance(corpus, Corpora) else {"": corpus}
        first, *others = members
        if wrong := [name for name in added if name not in others or added.count(name) > 1]:
            raise InvalidValue(
                f"add is {added}, but config.added has {', '.join(others) or 'nothing'}; each of "
                f"{', '.join(map(str, dict.fromkeys(wrong)))} must be there, with the fields of "
                "config.train, and be added once (corpora join a mixture by a phase of "
                "config.mixture.weights)"
            )
        if not added:
            return members[first]
        return Corpora({name: members[name] for name in (first, *added)})

    def fit(self, corpus: Any) -> "Schedule":
        """The same schedule with the buckets of its new entries; those of old ones stand.

        `corpus` is that of `select`.
        """
        entries = list(self.entries)
        resumes = bool(entries[0].plan)
        for number, entry in enumerate(entries):
            if not entry.plan:
                plan = self._resolve(_merge(entries[: number + 1]), entry, corpus)
                entries[number] = dataclasses.replace(entry, plan=plan)
                if resumes:
                    what = describe_changes(entry.options)
                    logger.info(f"changed from step {entry.step:,} on: {what}")
        return dataclasses.replace(self, entries=tuple(entries))

    def plan(self, corpus: Any) -> Plan:
        """The plan from step 0 on; `corpus` is that of `select`."""
        (_, first), *later = ((entry.step, entry.plan) for entry in self.fit(corpus).entries)
        if self.mixture:
            first = {**first, **self.mixture}
        elif isinstance(corpus, Corpora):
            first = {"examples": len(corpus.members[0]), **first}
        return Plan.replay(corpus, [(0, first), *later])

    def _resolve(self, in_force: dict[str, Any], entry: Entry, corpus: Any) -> dict[str, Any]:
        """The arguments of `Plan.after` for an entry."""
        plan = select_options((*PLANNING, "buckets"), entry.options)
        if isinstance(corpus, Corpora) and not self.mixture:
            count = sum(map(len, corpus.members[: 1 + len(in_force.get("add", ()))]))
            corpus = corpus.begin(count)
            if entry.options.get("add"):
                plan["examples"] = count
        fits = entry.step == 0 or select_options(REFITTING, entry.options)
        if "buckets" not in entry.options and fits:
            fitting: dict[str, Any] = {"max_buckets": 4, "length_multiple": None}
            fitting |= select_options(FITTING, {**in_force, **self.mixture})
            if "tokens_per_batch" not in fitting:
                raise InvalidValue(
                    "batches have neither tokens_per_batch nor buckets; give one of them, as in "
                    "--config.batches.tokens_per_batch=16384"
                )
            plan["buckets"] = [bucket.as_json for bucket in fit_buckets(corpus, **fitting)]
        return plan


def _list_entries(changes: Any) -> list[Entry]:
    """The entries of a config's `schedule`: each a step, and the options that change there."""
    try:
        entries = [Entry(require_whole("step", step, 0), dict(given)) for step, given in changes]
    except (TypeError, ValueError):
        raise InvalidValue(
            f"schedule is {changes!r:.200}; each entry must be a step and the options that "
            'change there, such as ((200, {"tokens_per_batch": 2048}), (500, {"seed": 1}))'
        ) from None
    return sorted(entries, key=lambda entry: entry.step)


def _check_options(options: Mapping[str, Any]) -> None:
    """Refuses unknown options, and lists that are none."""
    for name in options:
        if name not in KNOWN:
            raise InvalidValue(f"batches have no option {suggest_option(name, KNOWN)}")
    for name in LISTS:
        if not isinstance(value := options.get(name, ()), list | tuple):
            raise InvalidValue(f"{name} is {value!r}; it must be a list")


def _is_same(name: str, one: Any, other: Any) -> bool:
    """Whether two values of an option are the same; `LISTS` may have another order."""
    if name not in LISTS:
        return one == other
    return sorted(map(repr, one)) == sorted(map(repr, other or ()))


def _merge(entries: Iterable[Entry]) -> dict[str, Any]:
    """The options in force after several entries."""
    merged: dict[str, Any] = {}
    for entry in entries:
        lists = {name: [*merged.get(name, ()), *entry.options.get(name, ())] for name in LISTS}
        merged |= entry.options | {name: values for name, values in lists.items() if values}
    return merged
