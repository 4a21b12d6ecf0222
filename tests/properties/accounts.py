"""What a plan owes, worked out from what was asked for, and what holds for every plan."""

import itertools
import json
import pickle
from collections import Counter
from functools import cache

import numpy as np

from pipeline import Plan
from pipeline.history.coverage import Coverage
from pipeline.planning.stream import expected_positions

# ---- what is due, worked out from what was asked for


class Account:
    """What each epoch of a corpus owes, position by position; of pairs, pair by pair."""

    def __init__(self, lengths, first, options):
        self.lengths, self.first, self.options = [np.atleast_1d(n) for n in lengths], first, options
        self.excluded = set()
        #: Of each epoch that has begun what is owed, and how often each example was trained on.
        self.owed, self.had = [], []

    def units(self, runs):
        """Runs (example, first position, positions of each side) in their smallest parts."""
        for example, first, *sizes in runs:
            if len(sizes) > 1:
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
            if example in self.excluded or not any(sizes) or (over and overflow == "drop"):
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


def by_side(option, names):
    """The value of an option for each side: it is one number, one for each, or some by name."""
    if isinstance(option, dict):
        return [option.get(name, 1) for name in names]
    return list(option) if isinstance(option, tuple | list) else [option] * len(names)


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
            self.options = self.options | event
            # Corpora that have not joined yet use no buckets.
            for account, used in itertools.zip_longest(self.by_name.values(), event["used"]):
                excluded = {number - account.first for number in event["exclude"]}
                account.change(self.options, excluded, event.get("more", ()), used)

    def take(self, batch):
        """Notes a batch; the real positions of each corpus in it."""
        tokens, costs = {}, by_side(self.options.get("cost", 1), batch.bucket.names)
        of = np.searchsorted(self._first[:-1], batch.segments[:, 1], side="right") - 1
        assert ((np.diff(of) == 0) | (np.diff(batch.segments[:, 0]) > 0)).all()  # a row is of one
        for number, (name, account) in enumerate(self.by_name.items()):
            for epoch in np.unique(batch.epoch_of_segments[of == number]).tolist():
                chosen = (of == number) & (batch.epoch_of_segments == epoch)
                account.take(epoch, batch.segments[chosen, 1:])
                cost = (batch.segments[chosen, 3:] * costs).sum()
                tokens[name] = tokens.get(name, 0) + cost
        return {name: cost for name, cost in tokens.items() if cost}


# ---- what holds for every plan


def batches_of(plan, epoch=0):
    return [plan.batch(step) for step in range(plan.first_step(epoch), plan.first_step(epoch + 1))]


def assert_batch_fits(batch, options, plan):
    """Its rows hold what they hold, in order, and it is of a bucket that was asked for."""
    rows = batch.segments[:, 0]
    assert batch.bucket in options["buckets"]
    assert (np.diff(rows) >= 0).all()
    most = 1 if options.get("packing") == "none" else options.get("max_segments")
    assert most is None or np.bincount(rows).max() <= most
    assert np.bincount(rows).max() <= plan.most_segments()[batch.bucket]
    aligns = by_side(options.get("align", 1), batch.bucket.names)
    for side, align in zip(batch.sides, aligns, strict=True):
        begins, ends = side.columns, side.columns + side.segments[:, 3]
        assert rows.max() < side.bucket.rows
        assert ends.max() <= side.bucket.length
        assert not (begins % align).any()
        new = np.diff(rows, prepend=-1) > 0
        assert ((begins == 0) | ~new).all()
        assert ((begins[1:] >= ends[:-1]) | new[1:]).all()
    ends = batch.segments[:, 2] + batch.segments[:, 3:].max(axis=1)
    assert ends.max() <= plan.max_position + 1


def assert_each_position_once(plan, lengths, epochs=1, exclude=()):
    """Of a plan of one corpus that does not change: its first epochs; their batches."""
    options, batches = vars(plan.options), []
    account = Account(lengths, 0, options)
    account.excluded = {int(each) for each in exclude}
    for step in range(plan.first_step(epochs)):
        batches.append(plan.batch(step))
        assert_batch_fits(batches[-1], options, plan)
        account.take(batches[-1].epoch, batches[-1].segments[:, 1:])
    assert account.over == [True] * epochs
    return batches


def assert_epochs_are_those_due(plan, accounts, steps):
    """Every epoch that the plan says is over is over, and owed what the plan says was due."""
    over, last = plan.whole_epochs(steps), plan.stages[-1]
    for number, (source, account) in enumerate(zip(last.streams, accounts, strict=True)):
        assert over[source.name] <= len(account.over)
        assert all(account.over[: over[source.name]])
        for epoch in range(len(account.owed) + 1):
            due, _ = expected_positions(plan.streams_of(number), epoch)
            np.testing.assert_array_equal(due, account.due(epoch))
        if last.weights is None:
            assert account.over == [True] * over[source.name]


def assert_coverage(plan, accounts, batches):
    said = []
    coverage = Coverage(plan, said.append)
    for batch in batches:
        coverage.add(batch)
    coverage.finish()
    over, known = sum(sum(a.over) for a in accounts), sum("each once" in line for line in said)
    if plan.stages[-1].start >= len(batches) and known < over:
        return  # what a change leaves out at the end of a plan ends epochs that no batch ends
    assert known == over
    for name, account in zip(plan.names, accounts, strict=True):
        if account.over and account.over[0]:
            of = f"epoch 0 of {name}" if name else "epoch 0"
            due = f"{of}: {account.due(0).sum():,} positions, each once"
            assert due in said


def assert_random_access(plan, lengths, batches):
    """Any step in any order, also of plans made of what is written down, and copied."""
    again = Plan.replay(lengths, json.loads(json.dumps(plan.changes)))
    copy = pickle.loads(pickle.dumps(plan))
    assert again.fingerprint == copy.fingerprint == plan.fingerprint
    assert (again.entries, again.changes) == (plan.entries, plan.changes)
    first_step, num_batches = cache(plan.first_step), cache(plan.num_batches)
    for step in np.random.default_rng(0).permutation(len(batches)).tolist():
        batch, onward = batches[step], plan.onward(step)
        for other in (again, copy, onward):
            assert other.batch(step).digest == batch.digest
        assert batch.bucket in onward.buckets
        assert onward.first_step(batch.epoch) == first_step(batch.epoch)
        assert onward.num_batches(batch.epoch) == num_batches(batch.epoch)
