import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline import Bucket, Plan
from pipeline.loading.state import StateKey
from pipeline.planning.quota import Quota
from tests.planning.corpora import digests, lognormal
from tests.processes import ROOT

BUCKETS = (Bucket(8, 16), Bucket(4, 32), Bucket(2, 64))
WEIGHTS = {"code": 0.6, "prose": 0.3, "chat": 0.1}
FEW = {"code": 0.7, "prose": 0.3}


SOURCES = {
    "code": lognormal(150, 3, least=0, most=200),
    "prose": lognormal(60, 4, least=0, most=200, seed=1),
    "chat": lognormal(90, 2, least=0, most=200, seed=2),
}


# ---- shares


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(-9, 9)), min_size=2, max_size=8),
    st.integers(0, 10**6),
    st.integers(1, 40),
)
def test_a_quota_names_the_takers_of_a_range_of_places_and_may_begin_there(takers, begin, count):
    shares, owed = zip(*[(1, -sum(due for _, due in takers)), *takers], strict=True)
    quota = Quota(shares, owed, 3)
    before, after = quota.before(begin), quota.before(begin + count)
    each = enumerate(zip(before, after, strict=True))
    expected = [(taker, first, end) for taker, (first, end) in each if first < end]
    assert quota.between(begin, begin + count) == expected
    later = Quota(shares, owed, 3, first=begin)
    assert later.between(0, count) == [(who, 0, end - first) for who, first, end in expected]
    assert later.before(count) == [end - first for first, end in zip(before, after, strict=True)]


def largest_deviations(mixture, first, steps, run, count=None):
    """Of each corpus, the most that its share of `run` steps in a row is off its weight."""
    names = mixture.names
    count = count or (lambda planned: [planned.sources.get(name, 0) for name in names])
    counts = np.array([count(mixture.batch(step)) for step in range(first, first + steps)])
    sums = np.cumsum(np.concatenate([0 * counts[:1], counts]), axis=0)
    parts = sums[run:] - sums[:-run]
    weights = [float(share) for share in mixture.stages[0].weights.values()]
    return np.abs(parts / parts.sum(axis=1, keepdims=True) - weights).max(axis=0)


# The table of docs/mixtures.md: buckets of 16,384 positions, and the largest deviations in percent.
REACHED = [((512,), 0.5, 0.3), ((128, 1024), 0.8, 0.4), ((64, 256, 512, 2048), 1.0, 0.5)]


@pytest.mark.parametrize(("lengths_of_rows", "of_200", "of_400"), REACHED)
@pytest.mark.parametrize("seed", range(2))
def test_shares_are_as_close_as_the_page_says(lengths_of_rows, of_200, of_400, seed):
    rng = np.random.default_rng(seed)
    corpora = {
        "short": rng.integers(5, 60, 2000),
        "even": np.full(1000, rng.integers(100, 900)),
        "long": lognormal(1500, 6.5, least=0, most=4000, seed=seed),
    }
    weights = dict(zip(corpora, rng.dirichlet([2, 2, 2]) + 0.02, strict=True))
    buckets = [Bucket(16_384 // length, length) for length in lengths_of_rows]
    mixture = Plan(corpora, buckets, weights=weights)
    for run, most in ((200, of_200), (400, of_400)):
        assert 100 * largest_deviations(mixture, 1000, 600, run).max() < most
    page = (ROOT / "docs/mixtures.md").read_text()
    assert f"| {of_200}% | {of_400}% |" in page


def test_weights_times_tokens_for_each_with_loss_are_shares_of_loss():
    text, answers = np.random.default_rng(0).integers(20, 60, (2, 1000))
    weights = {"text": 1, "answers": answers.sum() / 4000}
    mixture = Plan({"text": text, "answers": answers}, [Bucket(8, 128)], weights=weights)
    tokens = mixture.count(0, 1000).tokens
    assert tokens["text"] == pytest.approx(tokens["answers"] * 4000 / answers.sum(), rel=0.02)


# ---- repeats


@pytest.mark.parametrize("tiers", [1, 7])
@pytest.mark.parametrize("weights", [WEIGHTS, {"code": 0, "prose": 1, "chat": 9}])
def test_no_position_comes_twice_before_the_first_repeat(weights, tiers):
    mixture = Plan(SOURCES, BUCKETS, weights=weights, tiers=tiers)
    for plan in (mixture, mixture.after(14, seed=1), Plan(SOURCES["code"], BUCKETS, tiers=tiers)):
        batches = map(plan.batch, range(10**6))
        step = next(n for n, each in enumerate(batches) if each.epoch_of_segments.any())
        begin = plan.first_repeat()
        assert begin == step if tiers == 1 else step - tiers < begin <= step
    late = mixture.after(mixture.first_repeat() + 7 * tiers, seed=1)
    assert late.first_repeat() == mixture.first_repeat()


# ---- phases


def test_weights_change_at_their_step():
    phases = [(0, WEIGHTS), (40, {"code": 1, "prose": 1, "chat": 0}), (300, WEIGHTS)]
    mixture = Plan(SOURCES, BUCKETS, weights=phases)
    shares = mixture.count(40, 300).shares
    assert shares == pytest.approx({"code": 0.5, "prose": 0.5, "chat": 0}, abs=0.01)
    assert mixture.count(300, 2000).shares == pytest.approx(WEIGHTS, abs=0.01)
    # So do they in a plan that changes, whose later phases are gone, and under other options.
    other = Plan(SOURCES, BUCKETS, weights=[(0, WEIGHTS), (70, {**WEIGHTS, "chat": 1})])
    changed = other.after(40, weights=phases[1][1]).after(300, weights=WEIGHTS)
    assert changed.fingerprint == mixture.fingerprint
    assert [each.start for each in mixture.after(20, seed=1).stages] == [0, 20, 40, 300]
    later = Plan(SOURCES, BUCKETS, weights=WEIGHTS).after(45, buckets=[Bucket(12, 24)], seed=3)
    for step in (0, 40, 111):
        assert later.count(step, step + 200).shares == pytest.approx(WEIGHTS, abs=0.01)


@pytest.mark.parametrize("steps", [1, 2, 5, 50])
def test_a_small_share_is_had_over_phases_of_any_length(steps):
    weights = {"code": 96, "prose": 4, "chat": 10}, {"code": 66, "prose": 4, "chat": 0}
    phases = [(step, weights[step // steps % 2]) for step in range(0, 600, steps)]
    shares = Plan(SOURCES, BUCKETS, weights=phases).count(0, 600).shares
    assert shares == pytest.approx({"code": 0.908, "prose": 0.0467, "chat": 0.0455}, abs=0.003)


def test_another_corpus_joins_at_its_step():
    two = {name: SOURCES[name] for name in FEW}
    grown = Plan(two, BUCKETS, weights=FEW).after(60, weights=WEIGHTS, lengths=SOURCES)
    assert grown.examples_per_stage == (210, 300)
    assert grown.count(60, 260).shares == pytest.approx(WEIGHTS, abs=0.01)
    phases = [(0, FEW), (60, WEIGHTS)]
    assert Plan(SOURCES, BUCKETS, weights=phases).fingerprint == grown.fingerprint
    less = grown.after(60, exclude=[5, 250])
    streams = less.stages[-1].streams
    left_out = [np.flatnonzero(~each.lengths.stays).tolist() for each in streams]
    assert left_out == [[5], [], [40]]
    assert less.after(70, exclude=[250]).fingerprint == less.fingerprint


def test_a_run_goes_on_under_new_weights_only_if_a_phase_says_so():
    def key(*later, lengths=SOURCES, **options):
        weights = {"weights": [(0, WEIGHTS), *later]} | options
        return StateKey(Plan(lengths, BUCKETS, **weights))

    state, other = key().state(100), {"code": 1, "prose": 1, "chat": 1}
    for start in (100, 250):
        assert key((start, other)).resume(state) == 100
    less = SOURCES | {"chat": SOURCES["chat"][1:]}
    changed = r"weight of code was 3/5 and is now 1/3"
    for now, sentence in (
        (key(weights=other), rf"corpus: {changed}; weight of prose"),
        (key((99, other)), f"{changed} from step 99 on"),
        (key(by="examples"), "by was tokens and is now examples"),
        (key(lengths=less), "lengths of chat was"),
    ):
        with pytest.raises(ValueError, match=sentence):
            now.resume(state)
    # A phase that was planned, and had not begun, may be left out or be another.
    assert key((250, other)).state(100) == state


def test_the_epoch_of_a_mixture_is_the_least_of_its_corpora():
    mixture = Plan(SOURCES, BUCKETS, weights=WEIGHTS)
    second, third = mixture.first_step(1), mixture.first_step(2)
    for step in (second + 1, third - 1):
        for change in ({"weights": dict.fromkeys(WEIGHTS, 1)}, {"seed": 1}):
            later = mixture.after(step, **change)
            assert [later.batch(at).epoch for at in (step - 1, step)] == [1, 1]
        whole = later.whole_epochs(later.first_step(2))
        assert min(whole.values()) == 2
    # One that has a weight again has an epoch of its own from there on.
    gone = mixture.after(third, weights={**WEIGHTS, "chat": 0})
    back = gone.after(third + 40, weights={**WEIGHTS, "chat": 0.01})
    assert back.count(third + 40, back.first_step(4)).passes["chat"] >= 1


# ---- as a plan


def test_shares_of_examples_come_near_weights_of_examples():
    corpora = {name: np.tile(each, 12) for name, each in SOURCES.items()}
    mixture = Plan(corpora, BUCKETS, weights=WEIGHTS, by="examples")
    first = np.cumsum([0, *map(len, corpora.values())])

    def count(planned):
        return np.histogram(planned.segments[planned.segments[:, 2] == 0, 1], first)[0]

    # Of tokens, "chat" has 2.7% in place of 10%.
    assert largest_deviations(mixture, 0, mixture.num_batches(0), 200, count).max() < 0.04


def test_a_mixture_made_today_is_the_mixture_made_next_year():
    # When this fails because batches have changed, raise options.VERSION with it.
    corpora = {"a": np.arange(150) * 37 % 61 + 1, "b": np.arange(60) * 29 % 90 + 5}
    mixture = Plan(corpora, BUCKETS, weights={"a": 2, "b": 1}, seed=3)
    assert mixture.identity["corpora"] == {
        "a": {"number": 0, "lengths": "590bec908c91b7f5", "window": None, "weight": "2/3"},
        "b": {"number": 1, "lengths": "67f55221dd006a14", "window": None, "weight": "1/3"},
    }
    assert mixture.fingerprint == "e89fa3faceda0e04"
    order = "".join("sml"[BUCKETS.index(mixture.batch(step).bucket)] for step in range(24))
    assert order == "lllllllllmllllllllllllll"
    expected = ["74df08551a560965", "7f2be14d37b6691f", "e10a5ec86b4ce350"]
    assert digests(mixture, (0, 300, 10**9)) == expected
    assert digests(mixture.after(5, seed=4), [5]) == ["6257afe4eccbbd31"]


def test_names_of_corpora_and_sides_are_text_as_in_a_state():
    with pytest.raises(ValueError, match="1, 'a'; names must be text"):
        Plan({1: [4], "a": [5]}, [Bucket(1, 8)], weights={1: 1, "a": 1})
    plan = Plan({1: [4, 3], "a": [2, 2]}, [Bucket(1, {1: 8, "a": 8})], overflow="drop")
    assert (plan.buckets[0].names, plan.num_batches()) == (("1", "a"), 1)
