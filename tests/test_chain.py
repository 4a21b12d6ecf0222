"""Plans that take over from one another: nothing lost, nothing repeated, exact at every step."""

import json
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pipeline
from pipeline import Batches, Bucket, Plan
from pipeline.loading.checkpoint import check_data_state, data_state
from pipeline.planning.schedule import plan_of
from pipeline.training.ledger import ledger

SHORT = (Bucket(2, 8), Bucket(1, 16))
LONG = (Bucket(4, 16), Bucket(1, 40))
WIDE = (Bucket(3, 12),)

options = st.fixed_dictionaries(
    {},
    optional={
        "buckets": st.sampled_from([SHORT, LONG, WIDE]),
        "seed": st.integers(0, 9),
        "packing": st.sampled_from(["best_fit", "none"]),
        "overflow": st.sampled_from(["split", "truncate", "drop"]),
        "shuffle": st.booleans(),
        "window": st.integers(1, 60),
        "max_segments": st.sampled_from([None, 1, 3]),
        # Two examples short of all, so that something is always left.
        "leave_out": st.lists(st.integers(2, 9), max_size=3),
        "more": st.lists(st.integers(0, 30), min_size=1, max_size=9),
    },
)
chains = st.lists(st.tuples(st.integers(0, 40), options), min_size=1, max_size=4)
sizes = st.lists(st.integers(0, 70), max_size=40).map(lambda more: [5, 11, *[3] * 8, *more])


def chain_of(lengths, begin, changes):
    """The plan, changed at ascending steps; "more" are the lengths of new examples."""
    plan = Plan(np.array(lengths), **({"buckets": SHORT} | begin))
    for step, change in sorted(changes, key=lambda each: each[0]):
        change = dict(change)
        if more := change.pop("more", None):
            lengths = [*lengths, *more]
            change["lengths"] = np.array(lengths)
        plan = plan.after(step, **change)
    return plan


class Ledger:
    """Which positions an epoch owes, worked out position by position from what was asked for."""

    def __init__(self, lengths, options):
        self.lengths, self.options = lengths, {"buckets": SHORT, "overflow": "split"} | options
        self.options["leave_out"] = set(self.options.get("leave_out", ()))
        self.begin()

    def runs(self, runs):
        """What the options make of runs of positions: example, first, one past the last."""
        longest = self.options["buckets"][-1].length
        for example, first, last in runs:
            if example in self.options["leave_out"]:
                continue
            if self.options["overflow"] == "truncate":
                last = min(last, first + longest)
            elif self.options["overflow"] == "drop" and last - first > longest:
                continue
            yield from ((example, position) for position in range(first, last))

    def begin(self):
        self.owed = set(self.runs((i, 0, length) for i, length in enumerate(self.lengths)))
        self.begun = False

    def change(self, options):
        left_out = self.options["leave_out"] | set(options.get("leave_out", ()))
        self.options = self.options | options | {"leave_out": left_out}
        first = len(self.lengths)
        self.lengths = [*self.lengths, *options.get("more", ())]
        if self.begun:  # what is new joins the epoch
            new = enumerate(self.lengths[first:], first)
            self.owed |= {(example, position) for example, n in new for position in range(n)}
        runs = []
        for example, position in sorted(self.owed):
            if runs and runs[-1][0] == example and runs[-1][2] == position:
                runs[-1][2] += 1
            else:
                runs.append([example, position, position + 1])
        self.owed = set(self.runs(runs))
        if not self.begun:
            self.begin()

    def take(self, batch):
        for _, example, start, size in batch.segments.tolist():
            for position in range(start, start + size):
                self.owed.remove((example, position))  # KeyError: lost before, or repeated
        self.begun = True
        done = not self.owed
        if done:
            self.begin()
        return done


@settings(max_examples=150)
@given(sizes, st.sampled_from([{}, {"overflow": "truncate"}, {"window": 20}]), chains)
def test_each_epoch_is_a_partition_of_what_should_be_there(lengths, begin, changes):
    plan = chain_of(lengths, begin, changes)
    ledger, epoch, waiting = Ledger(lengths, begin), 0, sorted(changes, key=lambda each: each[0])
    step = begun = 0
    # All of the epoch of the last change, and one more.
    while waiting or step < plan.first_step(plan.links[-1].epoch + 1):
        while waiting and waiting[0][0] == step:
            ledger.change(waiting.pop(0)[1])
            if ledger.begun and not ledger.owed:  # all that was left is left out
                assert plan.num_batches(epoch) == step - begun
                ledger.begin()
                epoch, begun = epoch + 1, step
        batch = plan.batch(step)
        assert batch.epoch == epoch
        assert plan.first_step(epoch) == begun
        fill = np.bincount(batch.segments[:, 0], batch.segments[:, 3], batch.bucket.rows)
        assert len(fill) == batch.bucket.rows
        assert fill.max() <= batch.bucket.length
        assert batch.bucket in ledger.options["buckets"]
        assert batch.segments[:, 2:].sum(axis=1).max() <= plan.max_position + 1
        assert np.bincount(batch.segments[:, 0]).max() <= plan.most_segments()[batch.bucket]
        done = ledger.take(batch)
        step += 1
        if done:
            assert plan.num_batches(epoch) == step - begun
            epoch, begun = epoch + 1, step


class Grown:
    """The lengths of several corpora, of which the first few can be had, as of `Joined`."""

    def __init__(self, lengths, counts):
        self.lengths, self.first = np.array(lengths), [0, *counts]

    def begin(self, count):
        return self.lengths[:count]

    def __len__(self):
        return len(self.lengths)


@settings(max_examples=100)
@given(sizes, chains)
def test_a_plan_made_of_what_was_written_down_is_the_same_and_balances(lengths, changes):
    plan = chain_of(lengths, {}, changes)
    written = json.loads(json.dumps(plan.changes))
    grown = Grown(plan.links[-1].lengths, plan.counts)
    if plan.links[-1].left_out.size == len(grown):
        return
    again = plan_of(grown, written)
    assert (again.entries, again.changes) == (plan.entries, plan.changes)
    steps = plan.first_step(plan.links[-1].epoch + 1)
    book = ledger(again, grown.lengths, lambda said: None)
    for step in range(steps):
        batch = again.batch(step)
        assert batch.digest == plan.batch(step).digest
        book.add(batch)
    book.finish(steps)


@settings(max_examples=25)
@given(sizes, chains)
def test_every_step_is_random_access_for_a_plan_made_anew(lengths, changes):
    plan = chain_of(lengths, {}, changes)
    steps = plan.first_step(plan.links[-1].epoch + 1)
    digests = [plan.batch(step).digest for step in range(steps)]
    again = pickle.loads(pickle.dumps(chain_of(lengths, {}, changes)))
    assert again.fingerprint == plan.fingerprint
    for step in np.random.default_rng(0).permutation(steps).tolist():
        assert again.batch(step).digest == digests[step]
        assert plan.onward(step).batch(step).digest == digests[step]


FOURS = (Bucket(16, 16), Bucket(8, 32), Bucket(4, 64))
four_rows = st.fixed_dictionaries(
    {},
    optional={
        "buckets": st.sampled_from([FOURS, (Bucket(8, 64),), (Bucket(4, 24), Bucket(4, 96))]),
        "seed": st.integers(0, 9),
        "packing": st.sampled_from(["best_fit", "none"]),
        "leave_out": st.lists(st.integers(0, 299), max_size=40),
    },
)


def resumes_on_1_2_and_4_hosts(corpus, plan, changes):
    """Checks that the states of the first 28 steps do, for a plan that is made anew each time."""

    def parts(count):
        return [
            Batches(corpus, plan(), process_index=index, process_count=count).repeat()
            for index in range(count)
        ]

    iterator, seen, states = iter(parts(1)[0].to_iter_dataset()), [], []
    for _ in range(28):
        states.append(json.dumps(iterator.get_state()))
        seen.append(next(iterator))
    for count in (1, 2, 4):
        for at in (0, 1, 13, 27, *changes):
            iterators = [iter(part.to_iter_dataset()) for part in parts(count)]
            for each in iterators:
                each.set_state(json.loads(states[at]))
                assert json.dumps(each.get_state()) == states[at]
            built = [next(each) for each in iterators]
            for name, values in seen[at].items():
                joined = np.concatenate([batch[name] for batch in built])
                np.testing.assert_array_equal(joined, values)


@settings(max_examples=6)
@given(st.lists(st.tuples(st.integers(0, 25), four_rows), min_size=1, max_size=4))
def test_every_state_resumes_exactly_on_1_2_and_4_hosts(corpus, changes):
    def plan():
        made = Plan(corpus, FOURS)
        for step, change in sorted(changes, key=lambda each: each[0]):
            made = made.after(step, **change)
        return made

    resumes_on_1_2_and_4_hosts(corpus, plan, [step for step, _ in changes])


@pytest.fixture(scope="module")
def new_corpus(tmp_path_factory):
    examples = [np.arange(size) for size in (20, 3, 40, 1, 60, 9, 9, 30)]
    return pipeline.Corpus.from_arrays(examples, tmp_path_factory.mktemp("new"), vocab_size=1000)


def test_states_resume_where_other_corpora_join(corpus, new_corpus):
    both = pipeline.Joined({"first": corpus, "new": new_corpus})

    def plan():
        return Plan(corpus, FOURS).after(6, lengths=both, seed=2).after(15, leave_out=[301])

    resumes_on_1_2_and_4_hosts(both, plan, [5, 6, 7, 15, 16])
    seen = np.concatenate([plan().batch(step).segments for step in range(plan().num_batches(0))])
    # All of the new are in the epoch that was half done, but for one with nothing to train on.
    assert {*range(300, 308)} - {*seen[:, 1]} <= {301, 303}
    # A state from before they came goes on with them; one of another new corpus does not.
    early = data_state(6, Plan(corpus, FOURS), corpus)
    assert check_data_state(early, plan(), both) == 6
    late = data_state(9, plan(), both)
    assert late["plans"][1]["changes"] == {"seed": 2, "examples": 308}
    other = pipeline.Joined({"first": corpus, "new": corpus})
    with pytest.raises(ValueError, match=r"tokens of new was .* from step 6 on"):
        check_data_state(late, Plan(corpus, FOURS).after(6, lengths=other, seed=2), other)


PAIRED = (Bucket(8, (16, 12)), Bucket(4, (64, 48)))
paired_options = st.fixed_dictionaries(
    {},
    optional={
        "buckets": st.sampled_from([PAIRED, (Bucket(4, (64, 64)),), (Bucket(8, (20, 10)),)]),
        "seed": st.integers(0, 9),
        "packing": st.sampled_from(["best_fit", "none"]),
        "overflow": st.sampled_from(["truncate", "drop"]),
        "window": st.integers(1, 60),
        "leave_out": st.lists(st.integers(2, 9), max_size=3),
        "more": st.lists(st.tuples(*[st.integers(0, 30)] * 2), min_size=1, max_size=9),
    },
)
side = st.integers(0, 80)


class PairLedger:
    """Which pairs an epoch owes, and how much of each, worked out pair by pair."""

    def __init__(self, pairs):
        self.pairs, self.room, self.overflow, self.left_out = pairs, (64, 48), "truncate", set()
        self.begin()

    def taken(self, pairs):
        found = {}
        for number, pair in pairs.items():
            fits = all(size <= room for size, room in zip(pair, self.room, strict=True))
            if number in self.left_out or not pair[1] or (self.overflow == "drop" and not fits):
                continue
            found[number] = tuple(map(min, pair, self.room))
        return found

    def begin(self):
        self.owed, self.begun = self.taken(dict(enumerate(self.pairs))), False

    def change(self, options):
        self.room = options["buckets"][-1].length if "buckets" in options else self.room
        self.overflow = options.get("overflow", self.overflow)
        self.left_out |= set(options.get("leave_out", ()))
        new = dict(enumerate(options.get("more", ()), len(self.pairs)))
        self.pairs = [*self.pairs, *new.values()]
        self.owed = self.taken(self.owed | new)
        if not self.begun:
            self.begin()


@settings(max_examples=80)
@given(
    st.lists(st.tuples(side, side), max_size=40).map(lambda more: [(5, 3)] * 10 + more),
    st.lists(st.tuples(st.integers(0, 20), paired_options), min_size=1, max_size=4),
)
def test_pairs_are_in_each_epoch_once_whatever_changes(pairs, changes):
    begin = {"buckets": PAIRED, "overflow": "truncate"}
    changes = sorted(changes, key=lambda each: each[0])
    plan, ledger, epoch, waiting = chain_of(pairs, begin, changes), PairLedger(pairs), 0, changes
    step = 0
    while waiting or step < plan.first_step(plan.links[-1].epoch + 1):
        while waiting and waiting[0][0] == step:
            ledger.change(waiting[0][1])
            waiting = waiting[1:]
            if ledger.begun and not ledger.owed:
                ledger.begin()
                epoch += 1
        batch = plan.batch(step)
        assert batch.epoch == epoch
        for row, example, start, *size in batch.segments.tolist():
            assert row < batch.bucket.rows
            assert start == 0
            assert ledger.owed.pop(example) == tuple(size)
        for planned in batch.sides:
            filled = np.bincount(planned.segments[:, 0], planned.segments[:, 3])
            assert filled.max() <= planned.bucket.length
        assert batch.segments[:, 3:].max() <= plan.max_position + 1
        ledger.begun = True
        step += 1
        if not ledger.owed:
            ledger.begin()
            epoch += 1


def test_states_of_pairs_resume_exactly(pairs):
    def plan():
        made = Plan(pairs, PAIRED, overflow="truncate")
        return made.after(3, seed=2, leave_out=[5]).after(8, buckets=[Bucket(8, (64, 64))])

    resumes_on_1_2_and_4_hosts(pairs, plan, [3, 8])


def test_a_plan_that_changes_by_hand():
    plan = Plan([5, 3, 4, 2, 9, 6], [Bucket(1, 8)], shuffle=False)
    assert [plan.batch(step).segments.tolist() for step in range(4)] == [
        [[0, 0, 0, 5], [0, 1, 0, 3]],
        [[0, 2, 0, 4], [0, 4, 8, 1]],
        [[0, 4, 0, 8]],
        [[0, 5, 0, 6], [0, 3, 0, 2]],
    ]
    later = plan.after(2, buckets=[Bucket(1, 16)], leave_out=[3])
    assert [later.batch(step).segments.tolist() for step in range(5)] == [
        [[0, 0, 0, 5], [0, 1, 0, 3]],
        [[0, 2, 0, 4], [0, 4, 8, 1]],
        [[0, 4, 0, 8], [0, 5, 0, 6]],
        [[0, 0, 0, 5], [0, 2, 0, 4], [0, 1, 0, 3]],
        [[0, 4, 0, 9], [0, 5, 0, 6]],
    ]
    assert later.fingerprint == (
        f"{plan.fingerprint};change@2=lengths+buckets;"
        f"lengths@2={plan.fingerprint.split('lengths=')[1][:16]} without 1 (35be322d);"
        "buckets@2=1x16"
    )
    assert (
        "from step 2 on, without 1 examples that are left out, 1 batches for the 14 positions"
        in (str(later))
    )
    assert "\n1 examples are left out, as asked" in str(later)
    assert "nothing to train on" not in str(later)


def test_pieces_that_follow_one_another_are_one_row_of_a_longer_bucket():
    plan = Plan([40], [Bucket(1, 10)], shuffle=False)
    consumed = plan.batch(0).segments.tolist()
    assert consumed == [[0, 0, 0, 10]]
    rest = plan.after(1, buckets=[Bucket(1, 32)]).batch(1)
    assert rest.segments.tolist() == [[0, 0, 10, 30]]


def test_the_state_is_the_chain_and_knows_what_another_would_change(corpus):
    plan = Plan(corpus, FOURS)
    chain = plan.after(10, seed=3).after(20, leave_out=range(50)).after(21, leave_out=range(50))
    state = data_state(15, chain, corpus)
    assert [entry["from"] for entry in state["plans"]] == [0, 10, 20, 21]
    assert state["plans"][3]["changes"] == {}  # all of them are left out already
    assert plan_of(corpus, chain.changes).fingerprint == chain.fingerprint
    assert state["plans"][0] == data_state(0, plan, corpus)["plans"][0]
    assert state["plans"][1]["changes"] == {"seed": 3}
    assert state["plans"][2]["changes"]["leave_out"]["number"] == 50
    assert len(json.dumps(state)) < 1500
    assert check_data_state(json.loads(json.dumps(state)), chain, corpus) == 15
    # What is to come may be added to, but not what was.
    assert check_data_state(data_state(15, plan.after(10, seed=3), corpus), chain, corpus) == 15
    assert check_data_state(data_state(10, plan, corpus), chain, corpus) == 10
    for other, sentence in (
        (plan, "seed was 3 and is now 0 from step 10 on"),
        (plan.after(10, seed=4), "seed was 3 and is now 4 from step 10 on"),
        (plan.after(11, seed=3), "seed was 3 and is now 0 from step 10 on"),
        (plan.after(10, seed=3).after(20, leave_out=[1]), "would have changed at step 20"),
        (plan.after(10, seed=3).after(12, packing="none"), "packing was best_fit and is now none"),
    ):
        with pytest.raises(ValueError, match="belongs to another plan") as error:
            check_data_state(state, other, corpus)
        assert sentence in str(error.value)


def test_what_was_planned_anew_is_another_plan_even_with_the_same_options():
    plan, same = Plan(np.arange(1, 90), FOURS), {"buckets": FOURS, "overflow": "split"}
    short = plan.after(5, buckets=[Bucket(8, 16)], overflow="drop").after(5, **same)
    for then, now in (
        (plan.after(5, seed=0), plan),
        (plan, plan.after(5, seed=0)),
        (plan.after(5, seed=1), plan.after(5, seed=1).after(10, seed=1)),
        (short, plan.after(5, **same)),
    ):
        with pytest.raises(ValueError, match=r"alone from step \d+ on|buckets was"):
            check_data_state(data_state(12, then), now)
        assert check_data_state(data_state(12, then), then) == 12


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda plan: plan.after(-1), "step is -1; it must be a whole number"),
        (lambda plan: plan.after(5, seed=1).after(4), "not before step 5"),
        (lambda plan: plan.after(5, sed=1), "no option that can change 'sed'; did you mean 'seed'"),
        (lambda plan: plan.after(5, seed=-1), "seed is -1"),
        (lambda plan: plan.after(5, seed=None), "seed is None; it must be a whole number"),
        (lambda plan: plan.after(float("nan")), "step is nan; it must be a whole number"),
        (lambda plan: plan.after(5, leave_out=[3]), "numbered from 0 to 2"),
        (lambda plan: plan.after(5, leave_out=["a"]), "list of numbers of examples"),
        (lambda plan: plan.after(5, leave_out=range(3)), "none of the 3 examples has a position"),
        (lambda plan: plan.after(5, buckets=[Bucket(1, 2)], overflow="error"), "example 0 has 5"),
    ],
)
def test_a_change_that_cannot_be_gets_a_sentence(change, sentence):
    with pytest.raises(ValueError) as error:
        change(Plan([5, 3, 4], [Bucket(1, 8)]))
    assert sentence in str(error.value)


def test_a_plan_that_begins_later_knows_no_earlier_steps_and_needs_no_earlier_buckets():
    plan = Plan([5, 3, 4, 2, 9, 6], [Bucket(1, 8)]).after(2, buckets=[Bucket(3, 16)])
    assert plan.buckets == (Bucket(1, 8), Bucket(3, 16))
    assert plan.onward(1).buckets == plan.buckets
    later = plan.onward(2)
    assert later.buckets == (Bucket(3, 16),)
    assert later.fingerprint == plan.fingerprint
    with pytest.raises(IndexError, match="knows steps from 2 on"):
        later.batch(1)


def test_examples_are_left_out_by_a_function_of_the_corpus(corpus):
    plan = Plan(corpus, FOURS).after(3, leave_out=lambda corpus: corpus.lengths > 100)
    assert plan.links[-1].left_out.tolist() == np.flatnonzero(corpus.lengths > 100).tolist()


def test_far_steps_cost_no_walk(monkeypatch):
    lengths = np.random.default_rng(0).integers(1, 60, 2000)
    plan, dealt = Plan(lengths, FOURS, window=300), []
    deal = pipeline.planning.windows.Windows.deal
    monkeypatch.setattr(
        pipeline.planning.windows.Windows,
        "deal",
        lambda self, *at: dealt.append(at) or deal(self, *at),
    )
    monkeypatch.setattr(plan, "batch", None)  # no batch is asked for one by one
    step = 10**9 + 7
    later = plan.after(step, seed=1)
    assert len(dealt) == 1
    assert later.batch(step).epoch == step // plan.num_batches()
