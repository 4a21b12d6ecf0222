"""Each source with each task: every position once an epoch, on any hosts, from any step."""

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import feather

import pipeline
from pipeline import Batches, Bucket, sources
from pipeline.corpus.in_place import InPlace
from pipeline.corpus.tasks import INPUTS
from pipeline.corpus.views import FillInTheMiddle, Masked, SpanCorruption
from pipeline.text.sources.source import sharded, text_of
from pipeline.text.templates import Chat
from pipeline.text.tokenizers import Bytes
from tests.corpus.kinds import require_pieces
from tests.properties.properties import prepare, prepare_pairs
from tests.properties.questions import RECORDS, write_questions
from tests.text.record_files import make

# Two buckets that four hosts can share, and the same for pairs.
BUCKETS = Bucket(4, 32), Bucket(4, 80)
PAIRED = Bucket(4, (32, 16)), Bucket(4, (80, 64))


def question(record):
    return record["text"][: record["text"].index("?") + 1]


def answer(record):
    return record["text"][len(question(record)) :]


def answered(record):
    return [(question(record), 0.0), (answer(record), 1.0)]


def asked_of_pair(record):
    return [(question(record), 1.0)]


def answer_of_pair(record):
    return [(answer(record), 0.5)]


def chat(record):
    turns = {"user": question(record), "assistant": answer(record)}
    return Chat()({"messages": [{"role": r, "content": c} for r, c in turns.items()]})


def make_source(kind, directory):
    if kind == "tfds":
        write_questions(directory)
        return sources.Tfds("questions", "train", directory)
    if kind == "txt":
        path = directory / "data.txt"
        path.write_text("".join(record["text"] + "\n" for record in RECORDS))
        return sources.open_files([str(path)])
    return make(kind, directory, RECORDS)


def make_corpus(task, source, directory):
    options = {"source": source, "directory": directory / task}
    match task:
        case "causal":
            return prepare(**options)
        case "answers":
            return prepare(**options, template=answered)
        case "chat":
            return prepare(**options, template=chat)
        case "masked":
            return Masked(prepare(**options, task=INPUTS), seed=3)
        case "middle":
            return FillInTheMiddle(prepare(**options), seed=3)
        case "corrupted":
            return SpanCorruption(prepare(**options, task=INPUTS), max_length=20, seed=3)
        case "pairs":
            return prepare_pairs(**options, fields=(asked_of_pair, answer_of_pair))
        case "in place":
            texts = [text_of(record, "text") for record in sharded(source)]
            ids = [Bytes().encode_batch([text])[0].tolist() for text in texts]
            feather.write_feather(pa.table({"input_ids": ids}), str(directory / "ids.arrow"))
            return InPlace.arrow(directory / "ids.arrow", vocab_size=259)
    raise AssertionError(task)


OTHERS = ["txt", "jsonl", "parquet", "feather", "array_record", "tfds", "map_dataset"]
TASKS = ["causal", "answers", "chat", "masked", "middle", "corrupted", "pairs", "in place"]


@pytest.fixture(scope="module", params=OTHERS)
def source(request, tmp_path_factory):
    source = make_source(request.param, tmp_path_factory.mktemp(request.param))
    assert len(list(sharded(source))) == len(RECORDS)
    return source


def same(one, other):
    return list(one) == list(other) and all(np.array_equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("task", TASKS)
def test_each_source_gives_every_task_the_examples_of_a_list(source, task, tmp_path):
    texts = [text_of(record, "text") for record in sharded(source)]
    assert sorted(texts) == sorted(record["text"] for record in RECORDS)  # TFDS has its own order
    records = sources.Records([{"text": text} for text in texts])
    (tmp_path / "listed").mkdir()
    corpus = make_corpus(task, source, tmp_path)
    listed = make_corpus(task, records, tmp_path / "listed")
    np.testing.assert_array_equal(corpus.lengths, listed.lengths)
    columns = np.reshape(corpus.lengths, (len(corpus), -1)).T
    for mine, theirs, lengths in zip(corpus.sides, listed.sides, columns, strict=True):
        every = np.arange(len(corpus)), np.zeros(len(corpus), np.int64), lengths
        for epoch in (0, 1):
            assert same(mine.read(*every, epoch=epoch), theirs.read(*every, epoch=epoch))


@pytest.mark.parametrize("task", TASKS)
def test_two_epochs_on_any_hosts_from_any_step(task, tmp_path):
    corpus = make_corpus(task, make_source("list", tmp_path), tmp_path)
    paired = np.asarray(corpus.lengths).ndim == 2
    buckets, overflow = (PAIRED, "error") if paired else (BUCKETS, "split")
    plan = pipeline.Plan(corpus, buckets, overflow=overflow)
    batches = Batches(corpus, plan).repeat(2)
    every = [batches[step] for step in range(len(batches))]
    seen = np.zeros((2, len(corpus), len(corpus.sides)), np.int64)
    for step, batch in enumerate(every):
        planned = plan.batch(step)
        require_pieces(corpus, planned, batch)
        for number, side in enumerate(planned.sides):
            np.add.at(seen[planned.epoch], (side.segments[:, 1], number), side.segments[:, 3])
    assert (seen == np.reshape(corpus.lengths, seen.shape[1:])).all()
    parts = [Batches(corpus, plan, process_index=p, process_count=4).repeat(2) for p in range(4)]
    iterator = iter(batches.to_iter_dataset())
    state = iterator.get_state()
    for step in np.random.default_rng(0).permutation(len(every)).tolist():
        iterator.set_state(state | {"step": step})
        batch = every[step]
        assert same(next(iterator), batch)
        joined = {name: np.concatenate([part[step][name] for part in parts]) for name in batch}
        assert same(joined, batch)
        assert all(values.dtype in (np.int32, np.float32) for values in batch.values())
    fresh = [batch["inputs"].tobytes() for batch in every]
    assert len(set(fresh)) == len(fresh)
