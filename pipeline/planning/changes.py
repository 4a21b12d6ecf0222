"""Changes: how a plan begins, is changed, and is written down as JSON.

A plan is a list of changes; each has the stage that begins with it. Neither is ever altered.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple, Unpack

from pipeline.errors import InvalidValue
from pipeline.planning.bucket import Bucket
from pipeline.planning.lengths import Exclude, store_mask, take_first
from pipeline.planning.members import Members, as_corpora, begin_of
from pipeline.planning.options import Changes, Options, Weights, as_phases
from pipeline.planning.stage import Stage

Shares = Mapping[str, Fraction]


class Change(NamedTuple):
    """A change of a plan, at the first step of a stage."""

    stage: Stage
    # The keywords of `Plan.after` that make it, in JSON, with `examples` (the number from here on)
    # instead of `lengths`; of the first stage, all options.
    keywords: Mapping[str, Any]


def begin(
    lengths: Any, options: Options, weights: Weights | None, exclude: Exclude
) -> tuple[Change, ...]:
    """The stage at step 0, and one for each later phase of weights; arguments as for `Plan`."""
    shares: Shares | None = None
    phases: Sequence[tuple[int, Shares]] = ()
    if weights is None:
        members = Members.of_one(lengths)
    else:
        (_, shares), *phases = as_phases(weights, tuple(as_corpora(lengths)))
        members = Members.of_several(lengths, shares)
    _check_by(options, members)
    keywords = options.as_json() | _weights_as_json(shares)
    if shares is None:
        del keywords["by"]
    if (excluded := members.select(exclude)).any():
        members, keywords["exclude"] = members.without(excluded), store_mask(excluded)
    first = Change(Stage(0, options, members, shares), keywords)
    return _add_phases([first], phases, lengths)


def after(
    history: Sequence[Change],
    step: int,
    *,
    lengths: Any = None,
    exclude: Exclude = (),
    weights: Mapping[str, Any] | None = None,
    **changes: Unpack[Changes],
) -> tuple[Change, ...]:
    """The history with a change at a step; arguments and errors as for `Plan.after`."""
    past = [change for change in history if change.stage.start <= step]
    later = [change.stage for change in history[len(past) :]]
    if fixed := [stage for stage in later if not stage.continues]:
        raise InvalidValue(
            f"step is {step:,}, and the last change of options is at step "
            f"{fixed[-1].start:,}; give that step or a later one"
        )
    last = past[-1].stage
    changed = _change(last, step, lengths=lengths, exclude=exclude, weights=weights, **changes)
    if last.members.several and not changed.keywords:
        return tuple(history)
    phases = [(stage.start, stage.weights) for stage in later if weights is None and stage.weights]
    return _add_phases([*past, changed], phases, history[-1].stage.members.given)


def as_json(history: Sequence[Change]) -> list[tuple[int, dict[str, Any]]]:
    """The first step and the keywords of each change, for `read`."""
    changes = [(stage.start, dict(keywords)) for stage, keywords in history]
    first, last = history[0].stage.members, history[-1].stage.members
    if not first.several and last.count > first.count:
        changes[0][1]["examples"] = first.count
    return changes


def read(
    changes: Iterable[tuple[int, Mapping[str, Any]]], lengths: Any
) -> Iterator[tuple[int, dict[str, Any]]]:
    """The steps and keywords of `Plan` and then of `Plan.after` that make the stages again.

    `lengths` are those of all examples of the last stage.
    """
    for number, (step, given) in enumerate(changes):
        keywords = dict(given)
        if "buckets" in keywords:
            keywords["buckets"] = [Bucket(*shape) for shape in keywords["buckets"]]
        count, weights = keywords.pop("examples", None), keywords.get("weights")
        if isinstance(weights, Mapping) and (count is not None or not number):
            keywords["lengths"] = begin_of(lengths, weights)
        elif count is not None:
            keywords["lengths"] = take_first(lengths, count)
        elif not number:
            keywords["lengths"] = lengths
        yield step, keywords


def _add_phases(
    history: list[Change], phases: Iterable[tuple[int, Shares]], given: Any
) -> tuple[Change, ...]:
    """Some changes, and one for each further phase of weights.

    `given` are all corpora, with those that join at a phase.
    """
    for start, shares in phases:
        last = history[-1].stage
        joined = begin_of(given, shares) if len(shares) > len(last.members.corpora) else None
        history.append(_change(last, start, lengths=joined, weights=shares))
    return tuple(history)


def _change(
    stage: Stage,
    step: int,
    *,
    lengths: Any = None,
    exclude: Exclude = (),
    weights: Mapping[str, Any] | None = None,
    **changes: Unpack[Changes],
) -> Change:
    """The change by which another stage takes over from one at a step."""
    options = stage.options.change(**changes)
    block = stage.assembly.block(step)
    if block.start != step:
        raise InvalidValue(
            f"step is {step:,}, in the middle of the steps {block.start:,} to {block.stop - 1:,}, "
            f"whose rows are dealt together (tiers={stage.options.tiers}); change the plan at step "
            f"{block.stop:,}"
        )
    members, shares = stage.members, stage.weights
    _check_by(options, members)
    if lengths is not None:
        if members.several and weights is None:
            raise InvalidValue("lengths are given without weights; give a weight for each corpus")
        members = members.extend(lengths)
    if weights is not None:
        shares = _as_shares(weights, members)
    more = members.select(exclude) & members.stays
    keywords = options.as_json(changes)
    keywords |= {"exclude": store_mask(more)} if more.any() else {}
    # If only weights and corpora are new, the present streams continue.
    continues = members.several and not keywords
    keywords |= _weights_as_json(shares) if weights is not None else {}
    keywords |= {"examples": members.count} if members.count > stage.members.count else {}
    members = members.without(more)
    after = Stage(step, options, members, shares, before=stage, continues=continues)
    return Change(after, keywords)


def _check_by(options: Options, members: Members) -> None:
    if not members.several and options.by != "tokens":
        raise InvalidValue(
            f"by is {options.by!r}, the unit of weights; it is for several corpora: give weights= "
            "as well"
        )


def _as_shares(weights: Any, members: Members) -> Shares:
    if not members.several:
        raise InvalidValue("weights are for several corpora, and this plan is of one")
    if not isinstance(weights, Mapping):
        raise InvalidValue(
            f"weights is {weights!r}; it must be numbers by name, the weights from this step on"
        )
    return as_phases(weights, tuple(members.corpora))[0][1]


def _weights_as_json(weights: Shares | None) -> dict[str, Any]:
    return {} if weights is None else {"weights": {name: f"{weights[name]}" for name in weights}}
