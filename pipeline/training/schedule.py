"""The schedule: which options of the batches change at which steps of a run, and to what.

A run's options are those of `fit_buckets` and `Plan`. Stages change them: planned ones, from the
config, and others, asked for when a run goes on. What a stage comes to, fitted buckets above all,
is worked out once and kept, so that a run goes on with the batches that it was begun with.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pipeline.planning import stage as planning
from pipeline.planning.checks import list_keywords, select_options, suggest_option
from pipeline.planning.fit import fit_buckets
from pipeline.planning.lengths import HasCorpora, take_first
from pipeline.planning.plan import Plan
from pipeline.planning.table import heading

# What several corpora have beside; their weights change by phases of their own.
MIXTURE = ("weights", "by", "ending")

FITTING = tuple(name for name in list_keywords(fit_buckets) if name not in MIXTURE)
PLANNING = tuple(name for name in list_keywords(Plan) if name not in MIXTURE)

# Of these, a stage adds to what earlier ones have.
MORE = ("leave_out", "add")
KNOWN = sorted({*FITTING, *PLANNING, *MORE, "buckets"})

# Examples that are named one by one where they are left out.
SHOWN = 10


@dataclasses.dataclass
class Stage:
    """Other options from a step on; JSON throughout.

    Attributes:
        step: the first step of the stage.
        asked: the options, as the config spells them: those of `fit_buckets` and `Plan`, and
            `buckets`, rows and length of each; `leave_out`, numbers of examples; or `add`, names of
            corpora that join.
        planned: whether the config has it, and not a `--change` later on.
        changes: what it comes to for a plan; empty until `resolve`.
    """

    step: int
    asked: dict[str, Any]
    planned: bool = True
    changes: dict[str, Any] = dataclasses.field(default_factory=dict)


def stages(schedule: Iterable[Sequence], begin: Mapping[str, Any]) -> list[Stage]:
    """The stages of a config, the first of them at step 0 with the options `begin`.

    >>> stages([(100, {"tokens_per_batch": 512})], {"tokens_per_batch": 256})[1].asked
    {'tokens_per_batch': 512}

    Args:
        schedule: steps and what changes there, ascending.
        begin: the options of the run; those that are None are not given.

    Raises:
        ValueError: the schedule is not as above, or names an option that there is not.
    """
    check_options(begin)
    found = [Stage(0, {name: value for name, value in begin.items() if value is not None})]
    for entry in schedule:
        try:
            step, asked = entry
            asked = dict(asked)
            if int(step) != step or step < found[-1].step:
                raise ValueError
        except (TypeError, ValueError):
            raise ValueError(
                f"schedule holds {entry!r}; each entry is a step and what changes there, by "
                'ascending steps, as in ((0, {"tokens_per_batch": 2048}), (500, {"seed": 1}))'
            ) from None
        check_options(asked)
        if step == 0:
            found[0].asked |= asked
        else:
            found.append(Stage(int(step), asked))
    return found


def check_options(asked: Mapping[str, Any]) -> None:
    """Refuses options that there are not, naming the nearest that is one, and bad lists."""
    for name in asked:
        if name in MIXTURE:
            raise ValueError(
                f"{name} is not an option of batches: weights of a mixture change by another phase "
                "of config.mixture.weights, from a step to come, and what else it has does not"
            )
        if name not in KNOWN:
            raise ValueError(f"batches have no option {suggest_option(name, KNOWN)}")
    for name, kind, what in (
        ("leave_out", int, "numbers of examples"),
        ("add", str, "names of corpora, those of config.added"),
    ):
        given = asked.get(name, [])
        if not isinstance(given, list | tuple) or not all(isinstance(n, kind) for n in given):
            raise ValueError(f"{name} is {given!r}; it must be a list of {what}")


def options(stages: Iterable[Stage]) -> dict[str, Any]:
    """The options in force after some stages; of `leave_out` and `add` all there ever were."""
    found: dict[str, Any] = {}
    for stage in stages:
        lists = {name: [*found.get(name, ()), *stage.asked.get(name, ())] for name in MORE}
        found |= stage.asked | {name: every for name, every in lists.items() if every}
    return found


def resolve(
    stages: Sequence[Stage],
    lengths: Any,
    row_multiple: int,
    mixture: Mapping[str, Any] | None = None,
) -> None:
    """Works out what each stage comes to, where that is not known yet.

    Args:
        stages: the first has all options of the run.
        lengths: a corpus, to fit buckets to; where stages add to it, all `Corpora`, the first that
            with which the run begins, and then in the order of the stages.
        row_multiple: that of the buckets, where the options have none.
        mixture: of several corpora with weights, what `Plan` takes beside: `weights` and others.
    """
    for number, stage in enumerate(stages):
        if stage.changes:
            continue
        asked, force = stage.asked, options(stages[: number + 1])
        there = lengths
        stage.changes = select_options(sorted([*PLANNING, "buckets"]), asked)
        if isinstance(lengths, HasCorpora) and not mixture:
            first = list(lengths.corpora.values())[: 1 + len(force.get("add", ()))]
            there = take_first(lengths, count := sum(map(len, first)))
            if asked.get("add"):
                stage.changes["examples"] = count
        if "buckets" not in asked and (number == 0 or select_options(FITTING, asked)):
            fitting: dict[str, Any] = {"max_buckets": 4, "row_multiple": row_multiple}
            fitting |= select_options(FITTING, force) | select_options(
                ("weights", "by"), mixture or {}
            )
            stage.changes["buckets"] = [b.as_json for b in fit_buckets(there, **fitting)]


def told(stages: Sequence[Stage], stage: Stage, plan: Plan) -> str:
    """What a stage changes, in words, for the plan that has been made of it."""
    at = max(n for n, each in enumerate(plan.stages) if each.start == stage.step)
    before, now = plan.stages[at - 1], plan.stages[at]
    force = options(stages[: list(stages).index(stage)])
    lines = [heading(before, now)]
    for name, value in stage.asked.items():
        if name == "leave_out":
            names = ", ".join(map(str, value[:SHOWN])) + ", …" * (len(value) > SHOWN)
            lines.append(f"{len(value):,} examples are left out: {names}")
        elif name == "add":
            new = now.num_examples - before.num_examples
            lines.append(f"{', '.join(value)}: {new:,} examples more, from this epoch on")
        else:
            lines.append(f"{name} was {force.get(name, 'not given')} and is now {value}")
    if before.options.buckets != now.options.buckets:
        lines.append(f"buckets were {_names(before)} and are now {_names(now)}")
    if any(source.open_epochs for source in now.sources):
        lost = sum(source.num_lost for source in now.sources)
        what = f", but for {lost:,} positions of examples left out or too long" if lost else ""
        lines.append(f"of epochs in progress none is lost or trained on again{what}")
    return "\n  ".join(lines)


def _names(stage: planning.Stage) -> str:
    return " + ".join(map(str, stage.options.buckets))
