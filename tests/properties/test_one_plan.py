"""Any plan, of one corpus or several, whatever changes: held against what was asked for."""

import dataclasses
import itertools
from collections import Counter
from functools import cache

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline import Bucket, Plan
from tests.properties.accounts import (
    Accounts,
    assert_batch_fits,
    assert_coverage,
    assert_epochs_are_those_due,
    assert_random_access,
    by_side,
)

EXAMPLES = 40
STEPS = 90  # of mixtures, at most

TEXT = (
    (Bucket(2, 8), Bucket(1, 16)),
    (Bucket(4, 16), Bucket(1, 40)),
    (Bucket(3, 12),),
)
PAIRS = (
    (Bucket(4, (16, 12)), Bucket(2, (40, 36))),
    (Bucket(2, (8, 20)), Bucket(2, (20, 8)), Bucket(1, (32, 32))),
    (Bucket(3, (20, 12)),),
)
IMAGES = (
    (
        Bucket(4, {"inputs": 16, "patches": 12, "images": 4}),
        Bucket(2, {"inputs": 40, "patches": 36, "images": 8}),
    ),
    (Bucket(3, {"inputs": 24, "patches": 20, "images": 6}),),
)
SHAPES = {1: TEXT, 2: PAIRS, 3: IMAGES}
ALIGN = {1: [1, 2, 4], 2: [1, 2, 4, {"targets": 4}], 3: [1, 2, {"patches": 4, "inputs": 2}]}
COST = {
    1: [1],
    2: [1, {"inputs": 0.5, "targets": 1}],
    3: [1, {"inputs": 1, "patches": 0.25, "images": 0}],
}


# ---- what is asked for, drawn at random


def options_of(sides):
    return {
        "buckets": st.sampled_from(SHAPES[sides]),
        "seed": st.integers(0, 9),
        "shuffle": st.booleans(),
        "packing": st.sampled_from(["best_fit", "none"] + ["fill"] * (sides == 1)),
        "overflow": st.sampled_from(["truncate", "drop"] + ["split"] * (sides == 1)),
        "window": st.integers(1, 60),
        "max_segments": st.sampled_from([None, 1, 3]),
        "tiers": st.sampled_from([1, 2, 5]),
        "curriculum": st.sampled_from([None, "short_first"]),
        "cycles": st.integers(1, 5),
        "read_shares": st.sampled_from([1, 2, 5]),
        "align": st.sampled_from(ALIGN[sides]),
        "cost": st.sampled_from(COST[sides]),
    }


def as_allowed(*each):
    """Options, and changes of these one after another, without any that exclude each other."""
    now = {}
    for options in each:
        now |= options
        if now.get("packing") == "fill" and now.get("align", 1) > 1:
            now["align"] = options["align"] = 1
        if now.get("curriculum") is None and "cycles" in now:
            now["cycles"] = options["cycles"] = 1
        if now.get("read_shares", 1) > now.get("window", EXAMPLES):
            now["read_shares"] = options["read_shares"] = 1


def sizes_of(sides, most):
    """Lengths of some examples; the first two are short, so that something is always left."""
    size = [st.integers(0, 45), st.integers(0, 45), st.integers(0, 9)][:sides]
    few = [(5, 3, 1)[:sides], (3, 4, 0)[:sides]] if sides > 1 else [5, 3]
    more = st.lists(st.tuples(*size) if sides > 1 else size[0], max_size=most)
    return more.map(lambda sizes: few + sizes)


@st.composite
def asked(draw):
    """What a plan is made of, and its changes: (steps later, what changes).

    Weights are numbers without names, for those corpora that there are then. Last comes how many
    examples each file of a corpus has; None: there are no files.
    """
    sides, several = draw(st.sampled_from([1, 2, 3])), draw(st.booleans())
    begin = {"buckets": SHAPES[sides][0], "overflow": "truncate"}
    begin |= draw(st.fixed_dictionaries({}, optional=options_of(sides)))
    change = options_of(sides) | {"exclude": st.lists(st.integers(0, 99), max_size=5)}
    if several:
        weights = st.lists(st.integers(0, 5), min_size=7, max_size=7).filter(lambda w: w[0])
        change |= {"weights": weights, "joins": sizes_of(sides, 8)}
        change |= {"by": st.sampled_from(["tokens", "examples"])}
        begin["by"] = draw(change["by"])
        corpora = draw(st.lists(sizes_of(sides, 10), min_size=1, max_size=3))
        phases = draw(st.lists(st.tuples(st.integers(1, 30), weights), max_size=2))
        phases = [(0, draw(weights)), *phases]
    else:
        corpora, phases = [draw(sizes_of(sides, 30))], []
        change["more"] = sizes_of(sides, 7)
    steps = st.tuples(st.integers(0, 20), st.fixed_dictionaries({}, optional=change))
    changes = draw(st.lists(steps, max_size=4))
    as_allowed(begin, *(change for _, change in changes))
    return corpora, phases, begin, changes, draw(st.sampled_from([None, 4, 9]))


@dataclasses.dataclass
class Stored:
    """Lengths of examples, and how many of them each file has."""

    lengths: np.ndarray
    files: np.ndarray


def stored(sizes, per_file, grown=()):
    """Some lengths, as an array or in files; of a corpus that had so many when it grew."""
    if per_file is None:
        return np.array(sizes)
    edges = {*range(0, len(sizes), per_file), *grown, len(sizes)}
    return Stored(np.array(sizes), np.diff(sorted(edges)))


def made(corpora, phases, begin, changes, per_file):
    """The plan; all lengths by name, of one corpus with the name ""; and when what changed.

    Of what changed "exclude" are examples, counted over all corpora, and "more" new lengths.
    """
    if not phases:
        lengths = {"": corpora[0]}
        plan = Plan(stored(corpora[0], per_file), **begin)
    else:
        lengths = {f"c{number}": sizes for number, sizes in enumerate(corpora)}
        # The last of several corpora joins with the last of several phases.
        few = [*lengths][:-1] if len(phases) > 1 and len(lengths) > 1 else [*lengths]
        starts = itertools.accumulate(gap * begin.get("tiers", 1) for gap, _ in phases)
        named = [
            (start, of_names(few, weights))
            for start, (_, weights) in zip(starts, phases, strict=True)
        ]
        named[-1] = (named[-1][0], of_names(lengths, phases[-1][1]))
        plan = Plan(by_name(lengths, per_file), weights=named, **begin)
    events, grown, step = [], [], 0
    for gap, change in changes:
        step = plan.next_block(step + gap)
        given, there = dict(change), [*plan.last_stage(step).members.corpora]
        lengths = {name: lengths[name] for name in (lengths if "weights" not in given else there)}
        if more := given.pop("more", None):
            grown.append(len(lengths[""]))
            lengths = {"": lengths[""] + more}
            given["lengths"] = stored(lengths[""], per_file, grown)
        if new := given.pop("joins", None):
            lengths = {name: lengths[name] for name in there} | {f"j{len(events)}": new}
            given["lengths"], there = by_name(lengths, per_file), lengths
            given.setdefault("weights", [1] * 7)
        if "weights" in given:
            given["weights"] = of_names(there, given["weights"])
        # The first two examples of each corpus stay.
        ends = np.cumsum([0, *(len(lengths[name]) for name in there)]).tolist()
        may_go = [n for first, end in itertools.pairwise(ends) for n in range(first + 2, end)]
        given["exclude"] = sorted(
            {may_go[number] for number in change.get("exclude", ()) if number < len(may_go)}
        )
        before, plan = plan, plan.after(step, **given)
        for earlier in {0, step // 2, step - 1} & {*range(step)}:
            assert plan.batch(earlier).digest == before.batch(earlier).digest
        used = [used_buckets(source) for source in plan.last_stage(step).streams]
        events.append((step, {**change, "exclude": given["exclude"], "used": used}))
    return plan, {name: lengths[name] for name in plan.names}, events


def used_buckets(source):
    """The buckets that whole epochs of a source have rows of; others, its remainder has not."""
    pairs = zip(source.options.buckets, source.whole.counts.tolist(), strict=True)
    return [bucket for bucket, rows in pairs if rows or not source.name]


def of_names(names, weights):
    return dict(zip(names, weights, strict=False))


def by_name(lengths, per_file):
    return {name: stored(sizes, per_file) for name, sizes in lengths.items()}


@settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck))
@given(asked())
def test_every_plan_is_what_was_asked_for(what):
    assert_is_what_was_asked_for(what)


@pytest.mark.parametrize("packing", ["best_fit", "fill"])
def test_documents_of_several_rows_are_there_once_whatever_changes_at_any_step(packing):
    begin = {"buckets": (Bucket(2, 8),), "overflow": "split", "packing": packing}
    sizes, longer = [*range(5, 37, 3), 24, 3], {"buckets": (Bucket(1, 8), Bucket(1, 20))}
    joins = {"more": [9, 33, 2], "exclude": [len(sizes) - 2]}  # the first of the new ones
    for step in range(Plan(sizes, **begin).num_batches() + 2):
        for change in ({"seed": step}, longer, joins, joins | {"overflow": "truncate"}):
            assert_is_what_was_asked_for(([sizes], [], begin, [(step, change)], None), access=False)


def assert_last_epoch_is_counted(plan, options, batches):
    """Of an epoch that is whole under the last options; at most one of its batches lacks rows."""
    costs = by_side(options.get("cost", 1), batches[0].bucket.names)
    tokens = sum((batch.segments[:, 3:] * costs).sum() for batch in batches)
    positions = sum(b.bucket.rows * np.dot(b.bucket.lengths, costs) for b in batches)
    assert plan.num_tokens == round(tokens)
    assert plan.padding == pytest.approx(1 - tokens / positions, abs=1 / positions)
    lacking = [b for b in batches if len(np.unique(b.segments[:, 0])) < b.bucket.rows]
    longest = options["buckets"][-1].length
    assert not lacking or [batch.bucket.length for batch in lacking] == [longest]


def assert_is_what_was_asked_for(what, access=True):
    """Holds a plan, its epochs, its coverage and its random access against an account of them."""
    corpora, _, begin, _, per_file = what
    try:
        plan, lengths, events = made(*what)
    except ValueError as error:
        # Tiers that come later may have a later phase in the middle of a block.
        if "whose rows are dealt together" in str(error):
            return
        raise
    last, one = plan.stages[-1], plan.stages[-1].weights is None
    steps = max(STEPS, last.start + 20)
    if one:  # the epochs in progress where it changes, and one more
        steps = plan.first_step(plan.first_whole_epoch + 1)
    books = Accounts({"": corpora[0]} if one else lengths, begin, events)
    accounts, batches, first_step = list(books.by_name.values()), [], cache(plan.first_step)
    for step in range(steps):
        books.change(step)
        batch = plan.batch(step)
        tokens = books.take(batch)
        batches.append(batch)
        assert_batch_fits(batch, books.options, plan)
        assert batch.sources == ({} if one else tokens)
        assert batch.epoch == len(accounts[0].owed) - 1 or not one
        assert first_step(batch.epoch) <= step < first_step(batch.epoch + 1)
    books.change(steps)
    if one:
        assert_last_epoch_is_counted(plan, books.options, batches[plan.epoch_steps[0] :])
    used = Counter(batch.bucket for batch in batches)
    known = {bucket: number for bucket, number in plan.batches_per_bucket.items() if number}
    assert used == known if one else {*used} <= {*known}
    assert not any(batch.epoch_of_segments.any() for batch in batches[: plan.first_repeat()])
    assert_epochs_are_those_due(plan, accounts, steps)
    assert_coverage(plan, accounts, batches)
    if not access:
        return
    if one:
        more = (len(event.get("more", ())) for _, event in events)
        grown = itertools.accumulate(more, initial=len(corpora[0]))
        given = stored(lengths[""], per_file, grown)
    else:
        given = by_name(lengths, per_file)
    assert_random_access(plan, given, batches)
