"""Weights that change while a loader runs, against the plan that has them from their step on."""

import json
import threading
import time

import grain
import numpy as np
import pytest

import pipeline
from pipeline import Batches, Bucket, Corpora, Examples, Plan
from pipeline.loading import live
from pipeline.loading.loader import Loader
from pipeline.loading.prefetch import Prefetch
from tests.loading.definition import require_same
from tests.pages import SNIPPETS

BUCKETS = Bucket(8, 16), Bucket(4, 32), Bucket(2, 64)
STEPS = 30


class Run:
    """A loader of a drawn mixture, whose length and prefetch are drawn too."""

    def __init__(self, seed):
        self.rng = rng = np.random.default_rng([83, seed])
        self.names = [*"abcd"[: rng.integers(2, 5)]]
        self.corpus = Corpora({name: self.draw_corpus() for name in self.names})
        self.tiers = int(rng.choice([1, 1, 2, 5]))
        buckets = [each for each, keep in zip(BUCKETS, rng.random(3) < 0.6, strict=True) if keep]
        plan = Plan(
            self.corpus,
            buckets or BUCKETS[:1],
            weights=self.draw_weights(),
            seed=int(rng.integers(9)),
            tiers=self.tiers,
            by=str(rng.choice(["tokens", "examples"])),
        )
        phase = plan.next_block(int(rng.integers(9, 40)))
        self.plan = plan.after(phase, weights=self.draw_weights())
        self.epochs = rng.choice([None, 1, 2])
        self.every = rng.choice([None, 1, 4, 6])
        self.prefetch, self.threads = int(rng.integers(0, 5)), int(rng.integers(1, 4))

    def draw_corpus(self):
        rng = self.rng
        sizes = rng.integers(2, rng.choice([12, 70]), rng.integers(20, 90))
        return Examples([rng.integers(1, 90, size) for size in sizes])

    def draw_weights(self):
        # Some are 0 later; at the beginning, all buckets get a program.
        return {name: int(self.rng.integers(1, 9)) for name in self.names}

    def batches(self, plan):
        whole = Batches(self.corpus, plan)
        return whole if self.epochs == 1 else whole.repeat(self.epochs)

    def loader(self):
        options = {"prefetch": self.prefetch, "num_threads": self.threads}
        return Loader(self.batches(self.plan), changes_every=self.every, **options)

    def first_to_change(self, step, plan):
        """By the definition: no batch before it may be ready, and a block begins there."""
        at = step + self.prefetch + self.threads - 1
        while at % (self.every or 1) or plan.next_block(at) != at:
            at += 1
        return at


def json_of(state):
    return json.loads(json.dumps(state))


def require_rest(loader, batches, until):
    """The loader has the batches of a plan up to a step, or up to their end."""
    for step in range(loader.step, min(until, len(batches))):
        batch = next(loader)
        assert loader.planned.digest == batches.plan.batch(step).digest, step
        if step % 5 == 0:
            require_same(batch, batches[step])
    if len(batches) <= until:
        assert next(loader, None) is None


MORE = [pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 24)]


@pytest.mark.parametrize("seed", [*range(3), *MORE])
def test_a_change_at_any_step_is_the_plan_that_has_the_weights_from_then_on(seed):
    run = Run(seed)
    base = run.batches(run.plan)
    last = min(STEPS, len(base))
    with run.loader() as loader, run.loader() as other:
        states = [loader.get_state()]
        for _ in range(last):
            next(loader)
            states.append(loader.get_state())
        for step in range(seed % 2, last + 1, 2):
            loader.set_state(json_of(states[step]))
            if run.rng.random() < 0.5:
                loader.start_prefetch()
            weights = run.draw_weights()
            if run.rng.random() < 0.3:
                weights[str(run.rng.choice(run.names[1:]))] = 0
            at = loader.change(weights=weights)
            assert at == run.first_to_change(step, run.plan)
            changed = run.batches(run.plan.after(at, weights=weights))
            assert loader.plan.fingerprint == changed.plan.fingerprint
            state = loader.get_state()
            middle = min(step + int(run.rng.integers(8)), len(changed))
            require_rest(loader, changed, middle)
            later = loader.get_state()
            require_rest(loader, changed, step + 12)
            for each in (state, later):
                other.set_state(json_of(each))
                assert other.get_state() == each
                require_rest(other, changed, step + 12)
        # States from before a change continue without it.
        other.set_state(json_of(states[0]))
        require_rest(other, base, 12)


@pytest.mark.parametrize("seed", range(4))
def test_changes_follow_one_another_and_the_last_one_for_a_step_holds(seed):
    run = Run(100 + seed)
    plans, changes, digests, states = [run.plan], [], [], []
    with run.loader() as loader:
        for step in range(80):
            if run.rng.random() < 0.4:
                weights = run.draw_weights()
                at = loader.change(weights=weights)
                assert at == run.first_to_change(step, plans[-1])
                if changes and changes[-1][0] == at:
                    changes.pop()
                changes.append((at, weights))
                plans.append(run.plan)
                for each, given in changes:
                    plans[-1] = plans[-1].after(each, weights=given)
                assert loader.plan.fingerprint == plans[-1].fingerprint
            states.append((json_of(loader.get_state()), plans[-1]))
            if next(loader, None) is None:
                break
            digests.append(loader.planned.digest)
        assert len(changes) > 2
        assert digests == [plans[-1].batch(step).digest for step in range(len(digests))]
        assert len(digests) == min(80, len(run.batches(plans[-1])))
        # A state has the changes that were asked before it, also if they begin later.
        for number in run.rng.integers(0, len(states), 10).tolist():
            state, plan = states[number]
            loader.set_state(state)
            assert loader.get_state() == state
            require_rest(loader, run.batches(plan), number + 9)


def test_threads_build_each_batch_with_the_weights_of_its_step():
    run = Run(7)
    batches = Batches(run.corpus, run.plan, transform=lambda batch: batch).repeat()
    digests, done = [], threading.Event()

    def consume():
        for _ in range(400):
            next(loader)
            digests.append(loader.planned.digest)
        done.set()

    with Loader(batches, prefetch=3, num_threads=4) as loader:
        thread = threading.Thread(target=consume)
        thread.start()
        count = 0
        while not done.wait(0.002):
            loader.change(weights=run.draw_weights())
            count += 1
        thread.join()
        assert count > 5
        assert digests == [loader.plan.batch(step).digest for step in range(400)]


def mixture(**options):
    rng = np.random.default_rng(0)
    parts = {
        name: Examples([rng.integers(1, 90, size) for size in rng.integers(2, most, 60)])
        for name, most in (("short", 14), ("long", 60))
    }
    return pipeline.load(Corpora(parts), buckets=[BUCKETS[0], BUCKETS[2]], **options)


def test_weights_that_need_another_shape_are_refused_before_anything_changes():
    with mixture(weights={"short": 1, "long": 0}) as loader:
        assert [*loader.specs] == [BUCKETS[0]]
        with pytest.raises(ValueError, match=r"need batches of 2x64, .* small weight in place of"):
            loader.change(weights={"short": 1, "long": 1})
        assert len(loader.plan.stages) == 1
        assert "live" not in loader.get_state()
    with mixture(weights=[(0, {"short": 1, "long": 1}), (9, {"short": 1, "long": 0})]) as loader:
        assert loader.change(weights={"short": 0, "long": 1}) == 2
        for _ in range(20):
            next(loader)
        assert loader.planned.sources.keys() == {"long"}


def test_a_loader_of_later_steps_has_the_shapes_that_changed_weights_need():
    phases = [(0, {"short": 1, "long": 1}), (5, {"short": 1, "long": 0})]
    with mixture(weights=phases) as loader:
        plan, corpus = loader.plan, loader.corpus
        for _ in range(3):
            next(loader)
        assert loader.change(weights={"short": 1, "long": 1}) == 5
        for _ in range(5):
            next(loader)
        state, changed = json_of(loader.get_state()), loader.plan
    with Loader(Batches(corpus, plan.onward(8)).repeat()) as loader:
        assert [*loader.specs] == [BUCKETS[0]]
        loader.set_state(state)
        assert [*loader.specs] == [BUCKETS[0], BUCKETS[2]]
        require_rest(loader, Batches(corpus, changed).repeat(), 30)


@pytest.mark.parametrize("every", [None, 8])
def test_a_change_that_has_not_begun_is_replaced_after_a_restart_too(every):
    weights = {"short": 1, "long": 1}
    with mixture(weights=weights, changes_every=every) as loader:
        base = loader.plan
        at = loader.change(weights={"short": 5, "long": 1})
        state = json_of(loader.get_state())
    with mixture(weights=weights, changes_every=every) as loader:
        loader.set_state(state)
        assert loader.change(weights={"short": 1, "long": 3}) == at
        later = json_of(loader.get_state())
        wanted = base.after(at, weights={"short": 1, "long": 3})
        for _ in range(2):
            require_rest(loader, Batches(loader.corpus, wanted).repeat(), 40)
            loader.set_state(later)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"short": 1}, "give each a weight"),
        ({"short": 1, "long": 1, "other": 1}, "the corpora are short, long"),
        ({"short": 1, "long": -1}, "at least 0"),
        ({"short": 0, "long": 0}, "one above 0"),
        ({"short": float("nan"), "long": 1}, "at least 0"),
    ],
)
def test_wrong_weights_are_refused_and_change_nothing(weights, message):
    with mixture(weights={"short": 1, "long": 1}) as loader:
        state = loader.get_state()
        with pytest.raises(ValueError, match=message):
            loader.change(weights=weights)
        for other in (None, [(0, {"short": 1, "long": 1})]):
            with pytest.raises(TypeError, match="numbers by name"):
                loader.change(weights=other)
        assert loader.get_state() == state
        next(loader)


def test_what_has_no_weights_to_change_says_so(corpus):
    loader = pipeline.load(corpus, buckets=[Bucket(8, 256)])
    with pytest.raises(ValueError, match="weights are for several corpora"):
        loader.change(weights={"": 1})
    loader.close()
    with pytest.raises(ValueError, match="closed"):
        loader.change(weights={"": 1})
    with pytest.raises(ValueError, match="changes_every is 0"):
        Loader(loader.batches, changes_every=0)
    dataset = grain.MapDataset.source([[1, 2, 3]] * 9)
    with pytest.raises(ValueError, match="changes_every is given for a Grain data set"):
        pipeline.load(dataset, buckets=[Bucket(2, 8)], changes_every=4)
    stream = pipeline.load(dataset, buckets=[Bucket(2, 8)])
    with pytest.raises(ValueError, match="a stream has no plan"):
        stream.change(weights={"": 1})
    stream.close()


def test_later_options_stand_and_those_of_a_restart_come_after_changed_weights():
    with mixture(weights={"short": 1, "long": 1}) as loader:
        for _ in range(4):
            next(loader)
        assert loader.change(weights={"short": 3, "long": 1}) == 6
        state = json_of(loader.get_state())
        plan, corpus = loader.plan, loader.corpus
    begun = Plan(corpus, plan.options.buckets, weights={"short": 1, "long": 1})
    planned = begun.after(20, seed=5)
    with Loader(Batches(corpus, planned).repeat()) as loader:
        with pytest.raises(ValueError, match="last change of options is at step 20"):
            loader.change(weights={"short": 1, "long": 2})
        # The run restarts with options that change later: the past stands, and so do they.
        loader.set_state(state)
        assert loader.get_state() == state
        wanted = plan.after(20, seed=5)
        for step in range(4, 40):
            next(loader)
            assert loader.planned.digest == wanted.batch(step).digest
        assert loader.change(weights={"short": 1, "long": 2}) == 42
        later = json_of(loader.get_state())
        wanted = wanted.after(42, weights={"short": 1, "long": 2})
        loader.set_state(state)
        loader.set_state(later)
        for step in range(40, 50):
            next(loader)
            assert loader.planned.digest == wanted.batch(step).digest


def test_a_corpus_that_a_later_phase_would_add_can_join_with_a_change():
    rng = np.random.default_rng(1)
    parts = {
        name: Examples([rng.integers(1, 90, size) for size in rng.integers(2, 14, 60)])
        for name in "abc"
    }
    corpus, phases = Corpora(parts), [(0, {"a": 1, "b": 1}), (30, {"a": 1, "b": 1, "c": 1})]
    plan = Plan(corpus, BUCKETS[:1], weights=phases)
    with Loader(Batches(corpus, plan).repeat()) as loader, Loader(loader.batches) as other:
        with pytest.raises(ValueError, match="the corpora are a, b, c"):
            loader.change(weights={"a": 1, "b": 2})
        assert loader.change(weights={"a": 1, "b": 2, "c": 0.5}) == 2
        other.set_state(json_of(loader.get_state()))
        wanted = plan.after(2, weights={"a": 1, "b": 2, "c": 0.5}, lengths=corpus)
        for step in range(40):
            next(loader), next(other)
            assert loader.planned.digest == wanted.batch(step).digest == other.planned.digest
        assert other.get_state() == loader.get_state()


def test_a_plan_without_the_change_refuses_the_state_and_one_with_it_takes_it():
    with mixture(weights={"short": 1, "long": 1}) as loader:
        before, base = loader.batches, loader.plan
        at = loader.change(weights={"short": 3, "long": 1})
        state = loader.get_state()
        assert state["step"] < at
        with pytest.raises(ValueError, match="weight of short was 3/4 and is now 1/2 from step 2"):
            before.origin.resume(state)
        with_it = Batches(loader.corpus, base.after(at, weights={"short": 3, "long": 1}))
        assert with_it.origin.resume(state) == 0
        with Loader(with_it) as other:  # which has it already
            other.set_state(state)
            assert other.plan.fingerprint == loader.plan.fingerprint


def test_a_thread_of_before_a_restore_takes_no_word_of_after_it(monkeypatch):
    takers, restored, at = [], threading.Event(), live.LiveBatches.at

    class Words:
        def __init__(self, processes, *, seconds):
            self.threads = []
            takers.append(self.threads)

        def gather(self, word):
            self.threads.append(threading.current_thread())
            return [word, None]

        def close(self):
            pass

    def come_late(batches, *arguments):  # a thread that stands still until all has changed
        if threading.current_thread() in before:
            assert restored.wait(60)
        return at(batches, *arguments)

    monkeypatch.setattr(live, "Exchange", Words)
    monkeypatch.setattr(Batches, "processes", [0, 1])
    monkeypatch.setattr(live.LiveBatches, "at", come_late)
    whole, before = mixture(weights={"short": 1, "long": 1}).batches, []
    with Loader(whole, num_threads=2, changes_every=4) as loader:
        with loader._ahead.hold():  # no thread has begun
            loader.start_prefetch()
            before += loader._ahead._threads
        while loader._ahead._next < 2:
            time.sleep(0.01)
        loader.set_state(loader.get_state())
        restored.set()
        for _ in range(6):
            next(loader)
        assert takers[0] == []
        assert takers[1]
        assert not {*takers[1]} & {*before}


def test_an_end_that_comes_earlier_is_also_that_of_elements_that_are_ready():
    end, ready = 9, threading.Event()
    elements = Prefetch(lambda step: step, 8, end=lambda: end)
    assert [elements.next() for _ in range(3)] == [0, 1, 2]
    while len(elements._ready) < 6:
        ready.wait(0.01)
    end = 4
    assert elements.next() == 3
    with pytest.raises(StopIteration):
        elements.next()
    elements.close()


def test_batches_of_the_page_have_as_many_tokens_whatever_the_weights():
    (snippet,) = (each for each in SNIPPETS if "reference=None" in each.content)
    page = {"__name__": "page"}
    exec(compile(snippet.content, "mixtures.md", "exec"), page)
    loader, _ = page["begin"]()
    with loader:
        for good in (0.95, 0.3, 0.05):
            loader.change(weights={"good": good, "noise": 1 - good})
            for _ in range(20):
                next(loader)
                assert loader.planned.num_tokens == loader.planned.bucket.positions


def test_a_thread_that_waits_for_a_word_keeps_no_other_from_steps_that_have_theirs(monkeypatch):
    """Another process may give the word only once this one has these steps, too."""
    waits, begins, at = threading.Event(), threading.Event(), live.LiveBatches.at

    class Words:
        def __init__(self, processes, *, seconds):
            self.rounds = 0

        def gather(self, word):
            self.rounds += 1
            if self.rounds == 2:  # that of the second block
                waits.set()
                assert begins.wait(60)
            return [word, None]

        def close(self):
            pass

    def come_late(batches, step, *arguments):
        if step == 3:
            assert waits.wait(60)
        return at(batches, step, *arguments)

    monkeypatch.setattr(live, "Exchange", Words)
    monkeypatch.setattr(Batches, "processes", [0, 1])
    monkeypatch.setattr(live.LiveBatches, "at", come_late)
    batches = mixture(weights={"short": 1, "long": 1}).batches
    options = {"prefetch": 4, "num_threads": 2, "changes_every": 4}
    with Loader(batches, timeout_seconds=20, **options) as loader:
        try:
            seen = [next(loader) and loader.planned.digest for _ in range(4)]
        finally:
            begins.set()
        seen += [next(loader) and loader.planned.digest for _ in range(2)]
    assert seen == [batches.plan.batch(step).digest for step in range(6)]
