"""Loading a corpus that grows: the same batches live, later, resumed, and on any hosts."""

import json
import threading
import time

import numpy as np
import pytest

import pipeline
from pipeline import Bucket, Corpus
from pipeline.corpus.writer import Writer
from pipeline.planning import growing

BUCKETS = [Bucket(8, 32), Bucket(4, 64)]
OPTIONS = {"buckets": BUCKETS, "window": 60, "follow": True}


@pytest.fixture(autouse=True, scope="module")
def _short_chapters():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(growing, "CHAPTER", 3)
        yield


def draw_documents(seed=0, number=400):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 255, size) for size in rng.integers(2, 60, number)]


def write(directory, documents, pause=0.0, finish=True):
    """Appends the documents that are not there yet, and seals 20 at a time."""
    with Writer(directory) as writer:
        for number, tokens in enumerate(documents[writer.cursor or 0 :], writer.cursor or 0):
            writer.append(tokens)
            if (number + 1) % 20 == 0:
                writer.seal(cursor=number + 1)
                time.sleep(pause)
        if finish:
            writer.finish()


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    directory = tmp_path_factory.mktemp("finished")
    write(directory, draw_documents())
    return directory


def test_what_a_corpus_that_grows_cannot_leave_out_is_refused_first(finished):
    with pytest.raises(ValueError, match=r"exclude cannot be given while a corpus grows"):
        pipeline.load(finished, follow=True, tokens_per_batch=256, max_length=64, exclude=[1 << 40])


def take(corpus, state=None, **options):
    """Digests and sums of batches, and the states before and after each."""
    found = []
    with pipeline.load(corpus, **{"num_epochs": 1, **OPTIONS, **options}) as loader:
        if state is not None:
            loader.set_state(state)
        states = [loader.get_state()]
        for batch in loader:
            found.append((loader.planned.digest, int(batch["inputs"].sum())))
            states.append(json.loads(json.dumps(loader.get_state())))
    return found, states


@pytest.fixture(scope="module")
def whole(finished):
    return take(finished)


def test_batches_are_the_same_while_the_corpus_is_written(tmp_path, whole):
    writer = threading.Thread(target=write, args=(tmp_path, draw_documents(), 0.02))
    writer.start()
    assert take(tmp_path)[0] == whole[0]
    writer.join()


def test_a_wait_is_said_and_has_a_limit(tmp_path, caplog):
    write(tmp_path, draw_documents()[:40], finish=False)
    with pytest.raises(TimeoutError, match=r"no part was added to .* for 1.2 s \(wait_seconds\)"):
        take(tmp_path, wait_seconds=1.2)
    assert "waiting for part 2 of" in caplog.text
    with pytest.raises(TimeoutError, match="nothing is sealed yet"):
        take(tmp_path / "nothing", wait_seconds=0.1)


def test_buckets_are_fitted_to_the_first_window(finished):
    options = {"tokens_per_batch": 1024, "max_length": 64, "length_multiple": 16}
    lengths = [len(tokens) - 1 for tokens in draw_documents()[:100]]
    with pipeline.load(finished, follow=True, window=100, **options) as loader:
        assert loader.plan.buckets == pipeline.fit_buckets(lengths, max_buckets=4, **options)


def test_states_of_other_corpora_are_refused(tmp_path, finished, whole):
    _, states = whole
    write(tmp_path / "other", draw_documents(seed=1))
    with pytest.raises(ValueError, match="no longer what the state was trained on"):
        take(tmp_path / "other", states[20])
    write(tmp_path / "short", draw_documents()[:60], finish=False)
    with pytest.raises(ValueError, match=r"the log of .* has 3 parts, and part"):
        take(tmp_path / "short", states[-1])
    for options, said in (({"seed": 1}, "seed was 0"), ({"window": 20}, "window was 60")):
        with pytest.raises(ValueError, match=said):
            take(finished, states[20], **options)
    with pipeline.load(finished, buckets=BUCKETS) as loader:
        with pytest.raises(ValueError, match="belongs to another plan or corpus"):
            loader.set_state(states[20])
        ordinary = loader.get_state()
    with pytest.raises(ValueError, match="belongs to a corpus that was planned as a whole"):
        take(finished, ordinary)


def test_examples_that_are_held_out_are_in_no_batch_whenever_they_come(tmp_path, finished):
    documents = draw_documents()
    write(tmp_path, documents[:200], finish=False)
    held_out = Corpus.open(finished).split(0.2)[1].numbers
    train, evaluation = Corpus.open(tmp_path, follow=True).split(0.2)
    assert not train.lengths[evaluation.numbers].any()  # nor has a plan of what is there now
    assert evaluation.numbers.tolist() == held_out[held_out < 200].tolist()
    write(tmp_path, documents)
    options = {"num_epochs": 2, "buckets": BUCKETS, "window": 60, "features": ["example_id"]}
    had = np.zeros((2, len(documents)), np.int64)
    with pipeline.load(train, wait_seconds=0.1, **options) as loader:
        batches = [loader.planned for _ in loader]
        state = loader.get_state()
    for batch in batches:
        np.add.at(had[batch.epoch], batch.segments[:, 1], batch.segments[:, 3])
    due = np.array([len(tokens) - 1 for tokens in documents])
    due[held_out] = 0
    assert had.tolist() == [due.tolist()] * 2
    with pipeline.load(Corpus.open(finished, follow=True).split(0.2)[0], **options) as loader:
        assert [loader.planned.digest for _ in loader] == [batch.digest for batch in batches]
    with (
        pipeline.load(Corpus.open(tmp_path, follow=True).split(0.3)[0], **options) as loader,
        pytest.raises(ValueError, match=r"hold_out of split was 0\.2 and is now 0\.3"),
    ):
        loader.set_state(state)
    with pytest.raises(ValueError, match="is split already"):
        train.split(0.2)
