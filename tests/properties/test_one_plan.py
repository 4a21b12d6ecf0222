"""Any plan, of one corpus or several, whatever changes: held against what was asked for."""

import itertools
import json
import pickle
from collections import Counter

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline import Bucket, Plan
from pipeline.history.auditing import Ledger
from pipeline.planning import figures
from pipeline.planning.stream import expected_positions

EXAMPLES = 40
STEPS = 90  # of plans that do not end, at most

TEXT = (
    (Bucket(2, 8), Bucket(1, 16)),
    (Bucket(4, 16), Bucket(1, 40)),
    (Bucket(3, 12),),
)
PAIRS = (
    (Bucket(4, (16, 12)), Bucket(2, (40, 36))),
    (Bucket(2, (8, 20)), Bucket(2, (20, 8)), Bucket(1, (32, 32))),
    (Bucket(3, (20, 10)),),
)


# ---- what is asked for, drawn at random


def options_of(pairs):
    return {
        "buckets": st.sampled_from(PAIRS if pairs else TEXT),
        "seed": st.integers(0, 9),
        "shuffle": st.booleans(),
        "packing": st.sampled_from(["best_fit", "none"]),
        "overflow": st.sampled_from(["truncate", "drop"] + ["split"] * (not pairs)),
        "window": st.integers(1, 60),
        "max_segments": st.sampled_from([None, 1, 3]),
        "tiers": st.sampled_from([1, 2, 5]),
    }


def sizes_of(pairs, most):
    """Lengths of some examples; the first two are short, so that something is always left."""
    size = st.integers(0, 45)
    few = [(5, 3), (3, 4)] if pairs else [5, 3]
    more = st.lists(st.tuples(size, size) if pairs else size, max_size=most)
    return more.map(lambda sizes: few + sizes)


@st.composite
def asked(draw):
    """What a plan is made of, and its changes: (steps later, what changes).

    Weights are numbers without names, for those corpora that there are then.
    """
    pairs, several = draw(st.booleans()), draw(st.booleans())
    begin = {"buckets": (PAIRS if pairs else TEXT)[0], "overflow": "truncate"}
    begin |= draw(st.fixed_dictionaries({}, optional=options_of(pairs)))
    change = options_of(pairs) | {"exclude": st.lists(st.integers(0, 99), max_size=5)}
    if several:
        weights = st.lists(st.integers(0, 5), min_size=7, max_size=7).filter(lambda w: w[0])
        change |= {"weights": weights, "joins": sizes_of(pairs, 8)}
        change |= {"by": st.sampled_from(["tokens", "examples"])}
        begin["by"] = draw(change["by"])
        begin["ending"] = draw(st.sampled_from(["repeat", "stop"]))
        corpora = draw(st.lists(sizes_of(pairs, 10), min_size=1, max_size=3))
        phases = draw(st.lists(st.tuples(st.integers(1, 30), weights), max_size=2))
        phases = [(0, draw(weights)), *phases]
    else:
        corpora, phases = [draw(sizes_of(pairs, 25))], []
        change["more"] = sizes_of(pairs, 7)
    steps = st.tuples(st.integers(0, 20), st.fixed_dictionaries({}, optional=change))
    return corpora, phases, begin, draw(st.lists(steps, max_size=4))


def made(corpora, phases, begin, changes):
    """The plan; all lengths by name, of one corpus with the name ""; and when what changed.

    Of what changed "exclude" are examples, counted over all corpora, and "more" new lengths.
    """
    if not phases:
        lengths = {"": corpora[0]}
        plan = Plan(np.array(corpora[0]), **begin)
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
        plan = Plan(arrays(lengths), weights=named, **begin)
    events, step = [], 0
    for gap, change in changes:
        step += gap
        if plan.finite:
            step = min(step, plan.num_batches())
        step = plan.next_block(step)
        given, there = dict(change), plan.until(step).names
        lengths = {name: lengths[name] for name in (lengths if "weights" not in given else there)}
        if more := given.pop("more", None):
            lengths = {"": lengths[""] + more}
            given["lengths"] = np.array(lengths[""])
        if new := given.pop("joins", None):
            lengths = {name: lengths[name] for name in there} | {f"j{len(events)}": new}
            given["lengths"], there = arrays(lengths), lengths
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
        used = [used_buckets(source) for source in plan.until(step).stages[-1].streams]
        events.append((step, {**change, "exclude": given["exclude"], "used": used}))
    return plan, {name: lengths[name] for name in plan.names}, events


def used_buckets(source):
    """The buckets that whole epochs of a source have rows of; others, its remainder has not."""
    pairs = zip(source.options.buckets, source.whole.rows.tolist(), strict=True)
    return [bucket for bucket, rows in pairs if rows or not source.name]


def of_names(names, weights):
    return dict(zip(names, weights, strict=False))


def arrays(lengths):
    return {name: np.array(sizes) for name, sizes in lengths.items()}


# ---- what is due, worked out from what was asked for


class Account:
    """What each epoch of a corpus owes, position by position; of pairs, pair by pair."""

    def __init__(self, lengths, first, options):
        self.lengths, self.first, self.options = [np.atleast_1d(n) for n in lengths], first, options
        self.excluded = set()
        #: Of each epoch that has begun what is owed, and how often each example was trained on.
        self.owed, self.had = [], []

    def units(self, runs):
        """Runs (example, first position, positions of one or two sides) in their smallest parts."""
        for example, first, *sizes in runs:
            if len(sizes) == 2:
                yield example, first, *sizes
            else:
                yield from ((example, place, 1) for place in range(first, first + sizes[0]))

    def runs(self, units):
        """Some units; those that follow one another are one run."""
        found = []
        for example, first, *sizes in sorted(units):
            last = found[-1] if found else None
            if len(sizes) == 1 and last and last[0] == example and last[1] + last[2] == first:
                last[2] += sizes[0]
            else:
                found.append([example, first, *sizes])
        return found

    def kept(self, runs):
        """What the options leave of some runs."""
        room, overflow = self.options["buckets"][-1].lengths, self.options["overflow"]
        for example, first, *sizes in runs:
            over = any(size > most for size, most in zip(sizes, room, strict=True))
            if example in self.excluded or not sizes[-1] or (over and overflow == "drop"):
                continue
            if overflow == "truncate":
                sizes = map(min, sizes, room)
            yield example, first, *sizes

    def whole(self):
        """What a whole epoch owes."""
        runs = [(example, 0, *sizes) for example, sizes in enumerate(self.lengths)]
        return set(self.units(self.kept(runs)))

    def change(self, options, excluded, more, used):
        """Other options, of whose buckets the corpus has those that are `used`."""
        self.options, self.excluded = options, self.excluded | excluded
        new = [(len(self.lengths) + n, 0, *np.atleast_1d(size)) for n, size in enumerate(more)]
        self.lengths += [np.atleast_1d(size) for size in more]
        for epoch, owed in enumerate(self.owed):
            if owed:
                joins = new if epoch == len(self.owed) - 1 else []
                runs = self.kept([*self.runs(owed), *joins])
                self.owed[epoch] = set(self.units(each for each in runs if fits(each, used)))

    def take(self, epoch, segments):
        """Notes some segments without their rows; a KeyError where they are not owed."""
        while epoch >= len(self.owed):  # a block of tiers may have a later epoch first
            self.owed.append(self.whole())
            self.had.append(Counter())
        for example, *rest in segments.tolist():
            for unit in self.units([(example - self.first, *rest)]):
                self.owed[epoch].remove(unit)
                self.had[epoch][unit[0]] += np.array(unit[2:])

    def due(self, epoch):
        """What an epoch has in all, as `expected_positions`."""
        owed, had = self.whole(), Counter()
        if epoch < len(self.owed):
            owed, had = self.owed[epoch], self.had[epoch]
        found = np.zeros((len(self.lengths), len(self.lengths[0])), int)
        for example, _, *sizes in owed:
            found[example] += sizes
        for example, sizes in had.items():
            found[example] += sizes
        return found

    @property
    def over(self):
        """Of each epoch that has begun, whether it is over."""
        return [not owed for owed in self.owed]


def fits(run, used):
    """Whether one of some buckets holds a run; text is split, and fits everywhere."""
    sizes = run[2:]
    return len(sizes) == 1 or any(
        all(size <= most for size, most in zip(sizes, bucket.lengths, strict=True))
        for bucket in used
    )


class Accounts:
    """Those of all corpora of a plan, by name, and the options in force."""

    def __init__(self, corpora, options, events):
        self.options, self._events, self._first, self.by_name = options, list(events), [0], {}
        for name, sizes in corpora.items():
            self.by_name[name] = Account(sizes, self._first[-1], options)
            self._first.append(self._first[-1] + len(sizes))

    def change(self, step):
        """Does what changes at a step."""
        while self._events and self._events[0][0] == step:
            event = self._events.pop(0)[1]
            self.options = self.options | {n: v for n, v in event.items() if n in options_of(False)}
            # Corpora that have not joined yet use no buckets.
            for account, used in itertools.zip_longest(self.by_name.values(), event["used"]):
                excluded = {number - account.first for number in event["exclude"]}
                account.change(self.options, excluded, event.get("more", ()), used)

    def take(self, batch):
        """Notes a batch; the real positions of each corpus in it."""
        tokens = {}
        of = np.searchsorted(self._first[:-1], batch.segments[:, 1], side="right") - 1
        for number, (name, account) in enumerate(self.by_name.items()):
            for epoch in np.unique(batch.epoch_of_segments[of == number]).tolist():
                chosen = (of == number) & (batch.epoch_of_segments == epoch)
                account.take(epoch, batch.segments[chosen, 1:])
                tokens[name] = tokens.get(name, 0) + int(batch.segments[chosen, 3:].sum())
        return tokens


# ---- what holds for every plan


def assert_batch_fits(batch, options, plan):
    """Its rows hold what they hold, in order, and it is of a bucket that was asked for."""
    rows = batch.segments[:, 0]
    assert batch.bucket in options["buckets"]
    assert (np.diff(rows) >= 0).all()
    most = 1 if options.get("packing") == "none" else options.get("max_segments")
    assert most is None or np.bincount(rows).max() <= most
    assert np.bincount(rows).max() <= plan.most_segments()[batch.bucket]
    for side in batch.sides:
        filled = np.bincount(rows, side.segments[:, 3], side.bucket.rows)
        assert len(filled) == side.bucket.rows
        assert filled.max() <= side.bucket.length
    ends = batch.segments[:, 2] + batch.segments[:, 3:].max(axis=1)
    assert ends.max() <= plan.max_position + 1


def assert_epochs_are_those_due(plan, accounts, steps):
    """Every epoch that the plan says is over is over, and owed what the plan says was due."""
    over, last = figures.whole_epochs(plan, steps), plan.stages[-1]
    for number, (source, account) in enumerate(zip(last.streams, accounts, strict=True)):
        assert over[source.name] <= len(account.over)
        assert all(account.over[: over[source.name]])
        for epoch in range(len(account.owed) + 1):
            due = expected_positions(plan.streams_of(number), epoch)
            np.testing.assert_array_equal(due, account.due(epoch))
        if last.weights is None:
            assert account.over == [True] * over[source.name]
        elif plan.finite:
            assert len(account.owed) <= 1


def assert_ledger_balances(plan, accounts, batches):
    said = []
    book = Ledger(plan, said.append)
    for batch in batches:
        book.add(batch)
    book.finish(len(batches))
    assert sum("each once" in line for line in said) == sum(sum(a.over) for a in accounts)
    for name, account in zip(plan.names, accounts, strict=True):
        if account.over and account.over[0]:
            of = f"epoch 0 of {name}" if name else "epoch 0"
            due = f"{of}: {account.due(0).sum():,} positions, each once"
            assert any(line.split(";")[0] == due for line in said)


def assert_random_access(plan, lengths, batches):
    """Any step in any order, also of plans made of what is written down, and copied."""
    again = Plan.replay(lengths, json.loads(json.dumps(plan.changes)))
    copy = pickle.loads(pickle.dumps(plan))
    assert again.fingerprint == copy.fingerprint == plan.fingerprint
    assert (again.entries, again.changes) == (plan.entries, plan.changes)
    for step in np.random.default_rng(0).permutation(len(batches)).tolist():
        batch, onward = batches[step], plan.between(step)
        for other in (again, copy, onward):
            assert other.batch(step).digest == batch.digest
        assert batch.bucket in onward.buckets
        assert onward.first_step(batch.epoch) == plan.first_step(batch.epoch)
        assert onward.num_batches(batch.epoch) == plan.num_batches(batch.epoch)


@settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck))
@given(asked())
def test_every_plan_is_what_was_asked_for(what):
    corpora, _, begin, _ = what
    try:
        plan, lengths, events = made(*what)
    except ValueError as error:
        if "the plan has no step" in str(error):
            return
        raise
    last, one = plan.stages[-1], plan.stages[-1].weights is None
    if one or plan.finite:  # the epochs in progress where it changes, and one more
        steps = plan.first_step(plan.first_whole_epoch + 1) if one else plan.num_batches()
    else:
        steps = max(STEPS, last.start + 20)
    books = Accounts({"": corpora[0]} if one else lengths, begin, events)
    accounts, batches = list(books.by_name.values()), []
    for step in range(steps):
        books.change(step)
        batch = plan.batch(step)
        tokens = books.take(batch)
        batches.append(batch)
        assert_batch_fits(batch, books.options, plan)
        assert batch.sources == ({} if one else tokens)
        assert batch.epoch == len(accounts[0].owed) - 1 or not one
        assert plan.first_step(batch.epoch) <= step < plan.first_step(batch.epoch + 1)
    books.change(steps)
    used = Counter(batch.bucket for batch in batches)
    known = {bucket: number for bucket, number in plan.batches_per_bucket.items() if number}
    assert used == known if one or plan.finite else {*used} <= {*known}
    assert_epochs_are_those_due(plan, accounts, steps)
    assert_ledger_balances(plan, accounts, batches)
    assert_random_access(plan, np.array(lengths[""]) if one else arrays(lengths), batches)
