"""Changes: how the list of stages of a plan begins, gets longer, and is written down as JSON.

A stage is immutable, and so is a plan. A change adds a stage, whose streams continue those of the
stage before it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, Unpack

import numpy as np

from pipeline.errors import InvalidValue
from pipeline.planning.bucket import Bucket
from pipeline.planning.lengths import (
    Exclude,
    Lengths,
    as_corpora,
    exclude_from,
    select,
    select_corpora,
    store_mask,
    take_first,
)
from pipeline.planning.options import Changes, Options, Weights, as_phases
from pipeline.planning.stage import Stage

Phases = Iterable[tuple[int, Mapping[str, Fraction]]]


def begin(
    lengths: Any, options: Options, weights: Weights | None, exclude: Exclude
) -> tuple[Stage, ...]:
    """The stage at step 0, and one for each later phase of weights; arguments as for `Plan`."""
    phases: Sequence[tuple[int, Mapping[str, Fraction]]] = ()
    if weights is not None:
        phases = as_phases(weights, tuple(as_corpora(lengths)))
    given = as_corpora(lengths) if phases else {"": lengths}
    shares = phases[0][1] if phases else None
    members = {name: Lengths.of(given[name]) for name in shares or given}
    _check_by(options, shares)
    changes = options.as_json() | _weights_as_json(shares)
    if shares is None:
        del changes["by"]
    excluded = _select(exclude, lengths, members)
    changes |= {"exclude": store_mask(excluded)} if excluded.any() else {}
    first = Stage(0, options, exclude_from(members, excluded), shares, lengths, changes)
    return _add_phases([first], phases[1:], lengths)


def after(
    stages: Sequence[Stage],
    step: int,
    *,
    lengths: Any = None,
    exclude: Exclude = (),
    weights: Mapping[str, Any] | None = None,
    **changes: Unpack[Changes],
) -> tuple[Stage, ...]:
    """The stages with a change at a step; arguments and errors as for `Plan.after`."""
    past = [stage for stage in stages if stage.start <= step]
    later = stages[len(past) :]
    if fixed := [each for each in later if each.replans]:
        raise InvalidValue(
            f"step is {step:,}, and the last change of options is at step "
            f"{fixed[-1].start:,}; give that step or a later one"
        )
    last = past[-1]
    changed = _change(last, step, lengths=lengths, exclude=exclude, weights=weights, **changes)
    if last.weights is not None and not changed.changes:
        return tuple(stages)
    phases = [(each.start, each.weights) for each in later if weights is None and each.weights]
    return _add_phases([*past, changed], phases, stages[-1].given)


def as_json(stages: Sequence[Stage]) -> list[tuple[int, dict[str, Any]]]:
    """The first step and the new options of each stage, for `read`."""
    changes = [(stage.start, dict(stage.changes)) for stage in stages]
    first, last = stages[0], stages[-1]
    if first.weights is None and last.num_examples > first.num_examples:
        changes[0][1]["examples"] = first.num_examples
    return changes


def read(
    changes: Iterable[tuple[int, Mapping[str, Any]]], lengths: Any
) -> Iterator[tuple[int, dict[str, Any]]]:
    """The steps and keywords of `Plan` and then of `Plan.after` that make the stages again.

    `lengths` are those of all examples of the last stage.
    """
    for number, (step, given) in enumerate(changes):
        each = dict(given)
        if "buckets" in each:
            each["buckets"] = [Bucket(*shape) for shape in each["buckets"]]
        count, weights = each.pop("examples", None), each.get("weights")
        if isinstance(weights, Mapping) and (count is not None or not number):
            each["lengths"] = select_corpora(lengths, weights)
        elif count is not None:
            each["lengths"] = take_first(lengths, count)
        elif not number:
            each["lengths"] = lengths
        yield step, each


def _add_phases(stages: list[Stage], phases: Phases, given: Any) -> tuple[Stage, ...]:
    """Some stages, and one for each further phase of weights.

    `given` are all corpora, with those that join at a phase.
    """
    for start, shares in phases:
        last = stages[-1]
        joined = select_corpora(given, shares) if len(shares) > len(last.members) else None
        stages.append(_change(last, start, lengths=joined, weights=shares))
    return tuple(stages)


def _change(
    stage: Stage,
    step: int,
    *,
    lengths: Any = None,
    exclude: Exclude = (),
    weights: Mapping[str, Any] | None = None,
    **changes: Unpack[Changes],
) -> Stage:
    """The stage that takes over from another one at a step."""
    options = stage.options.change(**changes)
    block = stage.assembly.block(step)
    if block.start != step:
        raise InvalidValue(
            f"step is {step:,}, in the middle of the steps {block.start:,} to {block.stop - 1:,}, "
            f"whose rows are dealt together (tiers={stage.options.tiers}); change the plan at step "
            f"{block.stop:,}"
        )
    _check_by(options, stage.weights)
    given, members = stage.given if lengths is None else lengths, stage.members
    if lengths is not None:
        members = _extend(stage, lengths, weights)
    shares = stage.weights if weights is None else _as_shares(weights, members)
    more = _select(exclude, given, members)
    more = more & np.concatenate([lengths.stays for lengths in members.values()])
    new = options.as_json(changes)
    new |= {"exclude": store_mask(more)} if more.any() else {}
    # If only weights and corpora are new, the present streams continue.
    replan = shares is None or bool(new)
    new |= _weights_as_json(shares) if weights is not None else {}
    count = sum(map(len, members.values()))
    new |= {"examples": count} if count > stage.num_examples else {}
    members = exclude_from(members, more)
    return Stage(step, options, members, shares, given, new, before=stage, replan=replan)


def _extend(stage: Stage, given: Any, weights: Any) -> dict[str, Lengths]:
    """The lengths of all corpora, with new examples (of one corpus) or new corpora."""
    if stage.weights is None:
        return {"": stage.members[""].extend(given)}
    if weights is None:
        raise InvalidValue("lengths are given without weights; give a weight for each corpus")
    every, present = as_corpora(given), stage.members
    if list(every)[: len(present)] != [*present]:
        raise InvalidValue(
            f"the corpora are {', '.join(every)}, and the plan has {', '.join(present)}; put "
            "new corpora after the present ones"
        )
    for name, lengths in present.items():
        if not lengths.equals(Lengths.of(every[name])):
            raise InvalidValue(
                f"corpus {name!r} has other lengths than before; a plan of several corpora "
                "takes new corpora, not new examples: make a corpus of the new examples"
            )
    return {name: present.get(name) or Lengths.of(each) for name, each in every.items()}


def _select(exclude: Exclude, given: Any, members: Mapping[str, Lengths]) -> np.ndarray:
    """Whether to leave out each example of all corpora: bool [examples]."""
    count = sum(map(len, members.values()))
    return select(exclude, take_first(given, count, several="" not in members), count)


def _check_by(options: Options, weights: Mapping[str, Fraction] | None) -> None:
    if weights is None and options.by != "tokens":
        raise InvalidValue(
            f"by is {options.by!r}, the unit of weights; it is for several corpora: give weights= "
            "as well"
        )


def _as_shares(weights: Any, members: Mapping[str, Lengths]) -> Mapping[str, Fraction]:
    if "" in members:
        raise InvalidValue("weights are for several corpora, and this plan is of one")
    if not isinstance(weights, Mapping):
        raise InvalidValue(
            f"weights is {weights!r}; it must be numbers by name, the weights from this step on"
        )
    return as_phases(weights, tuple(members))[0][1]


def _weights_as_json(weights: Mapping[str, Fraction] | None) -> dict[str, Any]:
    return {} if weights is None else {"weights": {name: f"{weights[name]}" for name in weights}}
