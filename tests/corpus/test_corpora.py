"""Several corpora read as one: whatever they are, each gives what it would give alone."""

import pickle

import numpy as np
import pytest

import pipeline
from pipeline import Batches, Bucket, Corpora, Corpus, Pairs, Plan
from pipeline.corpus.corpora import CorporaSide
from pipeline.corpus.on_read import tokenize_on_read
from pipeline.corpus.tasks import INPUTS
from pipeline.corpus.views import Masked, SpanCorruption
from pipeline.text.sources import Records
from pipeline.text.tokenizers import Bytes

COUNTS = {"few": 9, "many": 40}
WEIGHTS = {"few": 1, "many": 2}
KINDS = ["pairs", "masked", "corrupted", "index", "weighted"]


def make(kind, name, directory):
    """Corpora of 9 and of 40 examples; those of two names have nothing in common."""
    rng = np.random.default_rng(COUNTS[name])
    sizes = rng.integers(0, 60, COUNTS[name])
    texts = ["".join(map(chr, rng.integers(97, 123, size))) for size in sizes]
    options = {"num_workers": 0, "progress": False}
    match kind:
        case "pairs":
            sides = [[rng.integers(2, 99, n) for n in part] for part in (sizes, sizes[::-1] + 1)]
            return Pairs.from_arrays(*sides, directory, vocab_size=99)
        case "weighted":  # the second of the two
            ids = [rng.integers(2, 99, n) for n in sizes]
            weights = [rng.random(n, np.float32) for n in sizes] if name == "many" else None
            return Corpus.from_arrays(ids, directory, vocab_size=99, weights=weights)
        case "index":
            return tokenize_on_read(Records(texts), Bytes(), directory, **options)
    corpus = pipeline.prepare(Records(texts), Bytes(), directory, task=INPUTS, **options)
    if kind == "masked":
        return Masked(corpus, seed=7)
    return SpanCorruption(corpus, max_length=25, seed=7)


@pytest.fixture(scope="module", params=KINDS)
def joined(request, tmp_path_factory):
    base = tmp_path_factory.mktemp("joined")
    return Corpora({name: make(request.param, name, base / name) for name in COUNTS})


def plan_of(joined, **options):
    if joined.lengths.ndim == 2:
        buckets = Bucket(4, (32, 24)), Bucket(4, (64, 64))
        return Plan(joined, buckets, overflow="drop", **options)
    return Plan(joined, [Bucket(4, 24), Bucket(4, 40)], **options)


def require_what_each_gives_alone(joined, planned, batch):
    """Compares a batch, row for row, with what each corpus's own sides read."""
    corpora = list(joined.corpora.values())
    for number, side in enumerate(planned.sides):
        ids = batch["targets_segment_ids" if number else "inputs_segment_ids"]
        columns = np.zeros(side.bucket.rows, int)
        for (row, example, start, size), epoch in zip(
            side.segments.tolist(), planned.epoch_of_segments.tolist(), strict=True
        ):
            which = int(np.searchsorted(joined.first, example, side="right")) - 1
            own = corpora[which].sides[number]
            found = own.read([example - joined.first[which]], [start], [size], epoch=epoch)
            here = row, slice(columns[row], columns[row] + size)
            for name, values in found.items():
                np.testing.assert_array_equal(batch[name][here], values)
            if "loss_weights" not in found and (number or len(planned.sides) == 1):
                assert (batch["loss_weights"][here] == 1).all()
            assert (ids[here] > 0).all()
            columns[row] += size
        for row, end in enumerate(columns):
            assert not ids[row, end:].any()
            for name in found:
                assert not batch[name][row, end:].any()


def test_batches_of_a_plan_with_weights_are_what_each_corpus_gives_alone(joined):
    plan = plan_of(joined, weights=WEIGHTS, window=16).after(9, seed=3, exclude=[2])
    steps, batches = range(2 * plan.num_batches()), Batches(joined, plan).repeat()
    every = [plan.batch(step) for step in steps]
    assert any(len(np.unique(planned.epochs)) > 1 for planned in every)
    assert any(len(planned.sources) == 2 for planned in every)
    for step in steps:
        require_what_each_gives_alone(joined, every[step], batches[step])
        assert batches[step]["inputs"].dtype == np.int32


def test_so_are_those_of_a_plan_where_each_example_comes_once_an_epoch(joined):
    plan = plan_of(joined, seed=1)
    batches = Batches(joined, plan).repeat(2)
    different = {batches[step]["inputs"].tobytes() for step in range(len(batches))}
    assert len(different) >= len(batches) - 1  # a last batch of one row may come again
    for step in range(len(batches)):
        require_what_each_gives_alone(joined, plan.batch(step), batches[step])


def test_hosts_and_other_processes_build_the_same(joined):
    plan = plan_of(joined, weights=WEIGHTS)
    whole = Batches(joined, plan).repeat()
    hosts = [Batches(joined, plan, process_index=p, process_count=2).repeat() for p in range(2)]
    hosts = pickle.loads(pickle.dumps(hosts))
    for step in range(plan.num_batches()):
        batch, parts = whole[step], [host[step] for host in hosts]
        for name, values in batch.items():
            np.testing.assert_array_equal(np.concatenate([p[name] for p in parts]), values)


def test_a_batch_of_nothing_has_the_fields_of_all_others(joined):
    batches = Batches(joined, plan_of(joined, weights=WEIGHTS))
    for bucket in batches.plan.buckets:
        empty = batches.empty(bucket)
        assert list(empty) == list(batches[0])
        assert not any(values.any() for values in empty.values())


def test_pieces_of_several_epochs_come_back_in_their_places(joined):
    rng = np.random.default_rng(0)
    every, corpora = np.flatnonzero(joined.lengths.reshape(len(joined), -1).all(axis=1)), []
    examples, epochs = rng.choice(every, 50), rng.integers(0, 3, 50)
    for corpus in joined.corpora.values():
        corpora += [(corpus, number) for number in range(len(corpus))]
    for number, side in enumerate(joined.sides):
        assert isinstance(side, CorporaSide)
        assert len(side) == len(joined)
        sizes = joined.lengths.reshape(len(joined), -1)[examples, number]
        read = side.read(examples, 0 * examples, sizes, epoch=epochs)
        alone = []
        for example, epoch, size in zip(examples, epochs.tolist(), sizes, strict=True):
            corpus, own = corpora[example]
            found = corpus.sides[number].read([own], [0], [size], epoch=epoch)
            ones = {"loss_weights": np.ones(size, np.float32)} if "loss_weights" in read else {}
            alone.append(ones | found)
        assert set(read) == set(alone[0])
        for name, values in read.items():
            np.testing.assert_array_equal(values, np.concatenate([each[name] for each in alone]))


def test_examples_are_those_of_the_corpora_one_after_another(joined):
    alone = [example for corpus in joined.corpora.values() for example in corpus]
    assert len(alone) == len(joined) == len(joined.lengths)
    for number, example in enumerate(alone):
        assert {name: values.tolist() for name, values in joined[number].items()} == {
            name: values.tolist() for name, values in example.items()
        }
    assert joined.num_tokens == joined.lengths.sum()


def test_pairs_and_examples_of_one_length_are_not_joined(pairs, corpus):
    for several in ({"a": pairs, "b": corpus}, {"a": corpus, "b": pairs}):
        with pytest.raises(ValueError, match="corpora that are read as one must agree"):
            Corpora(several)
