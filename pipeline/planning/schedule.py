"""The schedule: which options of the batches change at which steps of a run, and to what.

A run's options are those of `fit_buckets` and `Plan`. Stages change them: planned ones, from the
config, and others, asked for when a run goes on. What a stage comes to, fitted buckets above all,
is worked out once and kept, so that a run goes on with the batches that it was begun with.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any

from pipeline.planning.bucket import Bucket
from pipeline.planning.chain import Chain, Link
from pipeline.planning.checks import unknown
from pipeline.planning.fit import fit_buckets
from pipeline.planning.mixture import Mixture
from pipeline.planning.mixture_chain import MixtureChain, MixtureLink
from pipeline.planning.options import FITTING, MIXING, PLANNING, chosen
from pipeline.planning.plan import Plan

# What a run is planned by: each knows its changes, and can be made again from them.
RunPlan = Chain | Mixture | MixtureChain

# Of these, a stage adds to what earlier ones have.
MORE = ("leave_out", "add")
KNOWN = sorted({*FITTING, *PLANNING, *MORE, "buckets"})

# What a mixture has beside.
MIXTURE = sorted({*MIXING} - {*PLANNING})

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
            raise ValueError(f"batches have no option {unknown(name, KNOWN)}")
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


def resolve(stages: Sequence[Stage], lengths: Any, row_multiple: int) -> None:
    """Works out what each stage comes to, where that is not known yet.

    Args:
        stages: the first has all options of the run.
        lengths: a corpus, to fit buckets to; where stages add to it, all `Joined`, the first that
            with which the run begins, and then in the order of the stages.
        row_multiple: that of the buckets, where the options have none.
    """
    for number, stage in enumerate(stages):
        if stage.changes:
            continue
        asked, force = stage.asked, options(stages[: number + 1])
        there = lengths
        if hasattr(lengths, "begin"):
            count = int(lengths.first[1 + len(force.get("add", ()))])
            there = lengths.begin(count)
        stage.changes = chosen(sorted([*PLANNING, "buckets", "leave_out"]), asked)
        if asked.get("add"):
            stage.changes["examples"] = count
        if "buckets" not in asked and (number == 0 or chosen(FITTING, asked)):
            fitting: dict[str, Any] = {"max_buckets": 4, "row_multiple": row_multiple}
            fitting |= chosen(FITTING, force)
            stage.changes["buckets"] = [b.as_json for b in fit_buckets(there, **fitting)]


def plan_of(lengths: Any, changes: Iterable[tuple[int, Mapping[str, Any]]]) -> Chain:
    """The plan of some changes, each from a step on, the first with all options.

    Args:
        lengths: a corpus, or lengths; of all examples there are in the end.
        changes: keywords of `Plan.after`, buckets as rows and length; and `examples`, how many
            examples there are from there on, where others join. Where the first does not say, it
            is those of the first corpus.
    """
    changes, chain = list(changes), None
    if any("examples" in given for _, given in changes):
        changes[0] = changes[0][0], {"examples": int(lengths.first[1])} | dict(changes[0][1])
    for step, given in changes:
        each = dict(given)
        if "examples" in each:
            each["lengths"] = lengths.begin(each.pop("examples"))
        if "buckets" in each:
            each["buckets"] = [Bucket(*shape) for shape in each["buckets"]]
        if chain is not None:
            chain = chain.after(step, **each)
            continue
        left_out = each.pop("leave_out", None)
        chain = Chain.begin(Plan(each.pop("lengths", lengths), **each))
        if left_out:
            chain = chain.after(step, leave_out=left_out)
    assert chain is not None, "a run has options to begin with"
    return chain


def mixture_of(
    joined: Any, changes: Iterable[tuple[int, Mapping[str, Any]]]
) -> Mixture | MixtureChain:
    """The mixture of some changes, each from a step on, the first with all options.

    Args:
        joined: the corpora, in the order in which they join.
        changes: keywords of `Mixture.after`, buckets as rows and length. Weights by name, as
            numbers or text, are of the corpora there are; the first may have phases of them.
    """
    mixture: Any = None
    for step, given in changes:
        each = {name: value for name, value in given.items() if name != "examples"}
        if "buckets" in each:
            each["buckets"] = [Bucket(*shape) for shape in each["buckets"]]
        there = joined.corpora if mixture is None else mixture.names
        if isinstance(weights := each.get("weights"), Mapping):
            each["weights"] = {name: Fraction(str(weight)) for name, weight in weights.items()}
            there = weights
        corpora = {name: joined.corpora[name] for name in there}
        if mixture is None:
            left_out = each.pop("leave_out", ())
            mixture = Mixture(corpora, **each)
            each = {"leave_out": left_out} if left_out else {}
        elif len(corpora) > len(mixture.names):
            each["lengths"] = corpora
        if each:
            mixture = mixture.after(step, **each)
    return mixture


def told(stages: Sequence[Stage], stage: Stage, plan: RunPlan) -> str:
    """What a stage changes, in words, for the plan or mixture that has been made of it."""
    assert not isinstance(plan, Mixture), "a stage makes it a chain"
    links: tuple[Link | MixtureLink, ...] = plan.links
    at = max(n for n, link in enumerate(links) if link.step == stage.step)
    before, link = links[at - 1], links[at]
    force = options(stages[: list(stages).index(stage)])
    lines = [f"from step {stage.step:,} on:"]
    for name, value in stage.asked.items():
        if name == "leave_out":
            names = ", ".join(map(str, value[:SHOWN])) + ", …" * (len(value) > SHOWN)
            lines.append(f"{len(value):,} examples are left out: {names}")
        elif name == "add":
            new = link.plan.num_examples - before.plan.num_examples
            lines.append(f"{', '.join(value)}: {new:,} examples more, from this epoch on")
        else:
            lines.append(f"{name} was {force.get(name, 'not given')} and is now {value}")
    if before.plan.buckets != link.plan.buckets:
        lines.append(f"buckets were {_names(before.plan)} and are now {_names(link.plan)}")
    how = _going_on(link) if isinstance(link, Link) else ["each corpus goes on where it stands"]
    return "\n  ".join(lines + how)


def _going_on(link: Link) -> list[str]:
    """How a plan goes on from what was left of an epoch, in words."""
    lines = []
    if link.rest is not None:
        lines.append(
            f"the {link.rest.plan.num_tokens:,} positions that epoch {link.rest.epoch} still has "
            f"take {link.rest.steps:,} batches; none is lost or trained on again"
        )
        if lost := link.rest.plan.lost:
            lines[-1] += f", but for {lost:,} that overflow={link.plan.overflow!r} leaves out"
    lines.append(
        f"from step {link.whole:,} on, epoch {link.epoch}, an epoch has "
        f"{link.plan.num_batches():,} batches"
    )
    return lines


def _names(plan: Any) -> str:
    return " + ".join(map(str, plan.buckets))
