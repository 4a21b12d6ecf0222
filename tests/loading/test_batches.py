"""Batches of any examples are those of the definition, on any hosts, from any step."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pipeline
from pipeline import Batches, Bucket, Corpora, Masked, Pairs, Plan, PlannedBatch
from pipeline.corpus import CAUSAL, INPUTS, TARGETS
from pipeline.corpus.examples import InMemory
from tests.loading.definition import (
    define_batch,
    define_numbers,
    join,
    require_defined,
    require_same,
)
from tests.loading.drawn import ARRAYS, FEATURES, Drawn

# Kinds of corpora, and the tasks that their examples may have.
KINDS = {
    "plain": [CAUSAL, INPUTS, TARGETS, None],
    "split": [CAUSAL, INPUTS, TARGETS, None],
    "pairs": [INPUTS],
    "masked": [INPUTS],
    "joined": [CAUSAL],
    "weighted": [CAUSAL],
}


@dataclasses.dataclass
class Case:
    """A corpus, what its examples have in each field, and how they are loaded."""

    corpus: pipeline.Examples
    fields: dict
    buckets: list
    options: dict
    names: list  # of features
    positions: str


def draw_corpus(draw, rng, kind, folder):
    """A corpus of a kind, and the fields of its examples; those of a view are not known."""
    task, arrays = draw(st.sampled_from(KINDS[kind])), []
    if kind not in ("pairs", "masked"):
        fewest = task in (TARGETS, None)  # targets alone are inputs to their reader
        more = st.lists(st.sampled_from(ARRAYS), min_size=fewest, max_size=3, unique=True)
        arrays = draw(more if fewest else st.just([]) | more)
    drawn = Drawn(rng, task, arrays, most=draw(st.sampled_from([9, 30])))
    if arrays:
        drawn.add_pointers()
    drawn.add_features(draw(st.permutations([*FEATURES])))
    if task in (CAUSAL, TARGETS) and draw(st.booleans()):
        drawn.columns["weights"] = [rng.integers(1, 4, len(n)) / 2 for n in drawn.columns["tokens"]]
    if kind == "pairs":
        other = Drawn(rng, TARGETS)
        other.add_features(["logprob", "halves"])
        place = folder.mktemp("pairs")
        features = drawn.features | other.features
        pairs = Pairs.from_arrays(drawn.columns, other.columns, place, features=features)
        return pairs, drawn.fields() | other.fields()
    if kind == "masked":
        columns = {name: drawn.columns[name] for name in drawn.features}
        return Masked(drawn.examples(), mask_id=90), drawn.fields(columns)
    if kind == "split":
        corpus = drawn.examples().split(0.5)[1]
        return corpus, drawn.fields(drawn.take(corpus.numbers))
    if kind == "plain":
        return drawn.examples(), drawn.fields()
    # Beside text without the other sides and without some features, which count as their fill.
    text = Drawn(rng, CAUSAL, examples=9)
    text.add_features(["logprob", "group"])
    lacking = {
        name: [
            np.full((n,) * (feature.of != "example") + feature.shape, lack(feature))
            for n in (text.sizes["inputs"] + 1 if feature.of in ("inputs", "targets") else [0] * 9)
        ]
        for name, feature in drawn.features.items()
    }
    lacking["weights"] = [np.ones(n + 1) for n in text.sizes["inputs"]]
    parts = [drawn, drawn.columns], [text, lacking | text.columns]
    parts = parts if draw(st.booleans()) else parts[::-1]
    corpus = Corpora({f"{n}": part.examples() for n, (part, _) in enumerate(parts)})
    columns = {name: [*parts[0][1][name], *parts[1][1][name]] for name in drawn.columns}
    return corpus, drawn.fields(columns)


def lack(feature):
    """What stands for a feature that a corpus lacks."""
    return -1 if feature.to else feature.fill or 0


def bucket_sizes(draw, corpus):
    """One bucket or two that four hosts can share; the capacities of some rows are small."""
    lengths = np.reshape(corpus.lengths, (len(corpus), -1))
    longest = dict(zip(corpus.side_names, lengths.max(axis=0, initial=1).tolist(), strict=True))
    large = {
        name: -(-max(n, 1) // 2) * 2 + 2 * draw(st.integers(0, 3)) for name, n in longest.items()
    }
    small = {name: max(2, n // 4 * 2) for name, n in large.items()}
    if len(longest) == 1 and draw(st.integers(0, 2)):
        return [Bucket(4, small)]  # overlong examples
    if small == large or draw(st.booleans()):
        return [Bucket(4, large)]
    return [Bucket(4, small), Bucket(4, large)]


@st.composite
def cases(draw, folder):
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    kind = draw(st.sampled_from([*KINDS]))
    corpus, fields = draw_corpus(draw, rng, kind, folder)
    names = [*corpus.features]
    one_side = len(corpus.side_names) == 1 and not any(f.to for f in corpus.features.values())
    numbers = corpus.numbers if kind == "split" else range(len(corpus))
    fields |= define_numbers(numbers)
    names = draw(st.permutations([*names, "example_id"]))[: draw(st.integers(0, len(names) + 1))]
    options = {
        "packing": draw(st.sampled_from(["best_fit", "none", *["fill"] * one_side])),
        "overflow": draw(st.sampled_from(["split", "split", "truncate"] * one_side + ["drop"])),
        "max_segments": draw(st.sampled_from([None, 2, 8])),
        "seed": draw(st.integers(0, 9)),
        "tiers": draw(st.sampled_from([1, 3])),
        "read_shares": draw(st.sampled_from([1, 2])),
        "exclude": draw(st.sampled_from([[], [3, 5]])),
    }
    if options["packing"] == "fill":
        names = [name for name in names if name in corpus.features]
        names = [name for name in names if corpus.features[name].of != "example"]
    else:
        options["align"] = {draw(st.sampled_from(corpus.side_names)): draw(st.sampled_from([1, 2]))}
    if kind == "weighted":
        options["weights"] = {"0": 1, "1": 2}
    left_out = {*corpus.features, "example_id"}.difference(names)
    fields = {name: field for name, field in fields.items() if name not in left_out}
    positions = draw(st.sampled_from(["continue", "restart"]))
    return Case(corpus, fields, bucket_sizes(draw, corpus), options, names, positions), rng


@given(data=st.data())
@settings(max_examples=40)
def test_every_field_is_that_of_the_definition_on_any_hosts_from_any_step(data, tmp_path_factory):
    case, rng = data.draw(cases(tmp_path_factory))
    corpus, options = case.corpus, case.options
    try:
        plan = Plan(corpus, case.buckets, **options)
    except ValueError as error:
        assert "has a position to train on" in str(error)  # noqa: PT017
        return
    if data.draw(st.booleans()):
        plan = plan.after(plan.next_block(1), buckets=case.buckets[-1:])

    def make(names=case.names, **part):
        given = {"features": names, "positions": case.positions, **part}
        return Batches(corpus, plan, **given).repeat()

    def define(planned):
        room = options["max_segments"] or plan.most_segments()[planned.bucket]
        align = options.get("align", 1)
        return define_batch(case.fields, planned, align, case.positions, example=room)

    batches, plain, hosts = make(), make(()), data.draw(st.sampled_from([2, 4]))
    parts = [make(process_index=number, process_count=hosts) for number in range(hosts)]
    iterator = iter(batches.to_iter_dataset())
    for step in rng.permutation(plan.first_step(2))[:4].tolist():
        batch, without = batches[step], plain[step]
        assert list(batch) == [*without, *case.names]
        require_defined(batch, {**without, **define(plan.batch(step))})
        require_same(join([part[step] for part in parts]), batch)
        iterator.set_state(batches.origin.state(step))
        require_same(next(iterator), batch)
    for bucket in plan.buckets:
        nothing = define(PlannedBatch(bucket, np.zeros((0, 3 + len(bucket.names)), np.int64)))
        require_defined(batches.empty(bucket), {**plain.empty(bucket), **nothing})


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("hosts", [1, 2, 4, 16])
def test_hosts_that_read_shares_have_the_batches_of_one(hosts, mixed):
    rng, corpora = np.random.default_rng(0), {}
    for name in ("a", "b")[: 1 + mixed]:
        tokens = [rng.integers(1, 99, length) for length in rng.integers(2, 40, 300)]
        corpora[name] = pipeline.Examples(tokens)
    corpus = Corpora(corpora) if mixed else corpora["a"]
    weights = {"weights": {"a": 2, "b": 1}} if mixed else {}
    plan = Plan(corpus, [Bucket(32, 16), Bucket(16, 40)], read_shares=8, **weights)
    plan = plan.after(7, exclude=[3, 8])
    whole = Batches(corpus, plan).repeat()
    parts = [
        Batches(corpus, plan, process_index=number, process_count=hosts).repeat()
        for number in range(hosts)
    ]
    for step in (0, 5, 7, 11, plan.first_step(1) - 1, plan.first_step(1)):
        require_same(join([part[step] for part in parts]), whole[step])


# ---- features


@pytest.mark.parametrize("names", [(), ["example_id"], ["reward", "logprob"], None])
def test_only_the_features_that_are_asked_for_are_read_and_none_is_in_a_state(names, monkeypatch):
    drawn, read = Drawn(np.random.default_rng(0)), []
    drawn.add_features()
    corpus = drawn.examples()
    plan = Plan(corpus, [Bucket(4, 16)], max_segments=16)

    def note(method):
        return lambda self, *given: read.extend(given[-1]) or method(self, *given)

    for method in ("_read", "_read_examples"):
        monkeypatch.setattr(InMemory, method, note(getattr(InMemory, method)))
    batches = Batches(corpus, plan, features=names)
    assert Batches(corpus, plan, features=["seen"]).origin.resume(batches.origin.state(0)) == 0
    assert {*(names or ())} <= {*batches[0]}
    assert sorted(read) == sorted(FEATURES if names is None else {*names} - {"example_id"})
