"""Corpora that are written while they are read: what is sealed, and what a reader sees of it."""

import pickle
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline import Corpus, Writer, prepare
from pipeline.corpus import CAUSAL, INPUTS
from pipeline.corpus import log as log_module
from pipeline.corpus import reader as reader_module
from pipeline.corpus.corpora import sealed_parts
from pipeline.corpus.log import Log
from pipeline.fs import objects
from pipeline.text import ragged
from pipeline.text.sources import Records
from pipeline.text.tokenizers import Bytes
from tests.corpus.files import few_bytes, require_equal, wait_for
from tests.corpus.kinds import FEATURES, draw_columns

SMALL = {"TOKENS_PER_PART": 40, "LEAST": 60, "BLOCK": 20}


@settings(max_examples=25)
@given(data=st.data())
def test_what_a_writer_wrote_is_what_from_arrays_makes_of_the_same_examples(data, tmp_path_factory):
    """Whenever it seals, stops and goes on, and a reader that followed it has read the same."""
    folder = tmp_path_factory.mktemp("writer")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ragged, "TOKENS_PER_PART", data.draw(st.integers(1, 60), "tokens a part"))
        sizes = data.draw(st.lists(st.integers(0, 20), min_size=1, max_size=40), "sizes")
        names = data.draw(st.sets(st.sampled_from(["weights", *FEATURES])), "columns")
        task = data.draw(st.sampled_from([CAUSAL, INPUTS]), "task")
        if task == INPUTS:
            names -= {"weights", "logprob", "half"}
        features = {name: FEATURES[name] for name in FEATURES if name in names}
        drawn = draw_columns(sizes)
        columns = {name: drawn[name] for name in drawn if name in {"tokens", *names}}
        rows, reader = zip(*columns.values(), strict=True), None
        examples = [dict(zip(columns, row, strict=True)) for row in rows]
        options = {"features": features, "vocab_size": 1000, "task": task}
        acts = st.sampled_from(["append"] * 6 + ["seal", "stop", "kill"])
        writer, at, due = Writer(folder / "a", **options), 0, 0
        while at < len(examples):
            act = data.draw(acts, "act")
            if act == "append":
                writer.append(**examples[at])
                at += 1
                continue
            if act in ("seal", "stop"):
                writer.seal(cursor={"next": at})
                due = at
                if at:
                    reader = reader or Corpus.open(folder / "a", follow=True)
                    reader.refresh()
                    assert len(reader) == due
                    assert reader.refresh() == []
            if act == "kill" and due:  # while it writes a record
                (folder / f"a/shards/.000000-99999.json.{0:032}.tmp").write_bytes(b"{")
            if act in ("stop", "kill"):
                writer.close()
                writer = Writer(folder / "a", **options)
                at = (writer.cursor or {"next": 0})["next"]
                assert at == due == writer.examples
        writer.finish()
        with pytest.raises(RuntimeError, match="is closed; begin another"):
            writer.append([1])
        made = Corpus.from_arrays(columns, folder / "b", **options)
    corpus = Corpus.open(folder / "a")
    corpus.verify()
    require_equal(corpus, made)
    for name in ("lengths_digest", "num_tokens", "num_learnt", "text_bytes", "vocab_size"):
        assert getattr(corpus, name) == getattr(made, name)
    again = Corpus.open(folder / "a", follow=True)
    require_equal(again, made)
    if reader is not None:
        reader.refresh()
        require_equal(reader, made)
        assert reader.fingerprint == again.fingerprint
        assert [each.after for each in reader.entries] == [each.after for each in again.entries]
    assert not (folder / "a" / "shards").exists()


@pytest.mark.slow
def test_a_writer_holds_few_bytes_for_each_example(tmp_path, monkeypatch):
    monkeypatch.setattr(ragged, "TOKENS_PER_PART", 1 << 24)
    tokens = np.arange(16)
    with Writer(tmp_path) as writer, few_bytes(40_000 * 300):  # as it seals, more than twice 72
        for _ in range(40_000):
            writer.append(tokens)
        writer.seal()


@pytest.fixture
def corpus(tmp_path):
    """Five sealed parts of eight examples each, which are followed."""
    with Writer(tmp_path) as writer:
        for number in range(40):
            writer.append([number] * 5)
        writer.seal()
    return Corpus.open(tmp_path, follow=True)


def test_a_reader_drops_parts_and_takes_them_up_again(corpus, monkeypatch):
    monkeypatch.setattr("pipeline.corpus.log.TOGETHER", 2)
    assert corpus.read([39], [0], [1])["inputs"].tolist() == [39]  # looks for what is sealed
    corpus.refresh(start=3)
    assert corpus.entries[0].first == 24
    copy = pickle.loads(pickle.dumps(corpus))  # which opens what it needs
    for each in (corpus, copy):
        assert each.read([24, 39], [0, 2], [2, 1])["targets"].tolist() == [24, 24, 39]
    with pytest.raises(RuntimeError, match="not sealed yet, or no longer"):
        corpus.read([23], [0], [1])
    with pytest.raises(RuntimeError, match=r"lengths of the first parts of .* are not read"):
        _ = corpus.lengths
    with pytest.raises(RuntimeError, match="not sealed yet"):
        corpus.read([40], [0], [1])
    corpus.refresh(start=1)
    assert corpus.read([8], [0], [1])["inputs"].tolist() == [8]
    corpus.refresh(start=0)
    assert len(corpus.lengths) == 40
    with pytest.raises(ValueError, match=r"has 5 parts, and part 7 was sealed"):
        corpus.refresh(start=7)
    assert corpus.refresh(start=5) == []


def test_a_reader_holds_the_parts_that_batches_need_and_those_before_them(corpus):
    assert corpus.read([], [], [])["inputs"].tolist() == []  # of any part
    for parts, held in (
        (range(1, 2), [1]),
        (range(2, 4), [1, 2, 3]),
        (range(1, 3), [1, 2, 3]),
        (range(4, 5), [2, 3, 4]),
        (range(1), [0]),
        (range(0), [0, 1, 2, 3, 4]),  # of a corpus that is finished: all
    ):
        corpus.hold(parts)
        assert [entry.number for entry in corpus.entries] == held
        first = 8 * held[0]
        assert corpus.read([first], [0], [1])["inputs"].tolist() == [first]


def test_a_split_and_a_copy_read_and_wait_as_the_corpus_does(corpus):
    train, _ = Corpus(corpus.directory, follow=True, wait_seconds=7).split(0.2)
    for each in (train, pickle.loads(pickle.dumps(train))):
        assert (each.log.wait_seconds, each.hold_out) == (7, 0.2)
    assert [sealed_parts(train, wait).wait_seconds for wait in (None, 0)] == [7, 0]
    few = corpus.split(1e-6)[1]  # none is held out while there are few
    assert (len(few), few.lengths.tolist()) == (0, [])


def test_a_preparation_that_was_interrupted_has_sealed_what_it_continues(tmp_path):
    texts = [f"text {number}" for number in range(150)]

    def run(function, items):
        yield from map(function, items[:10])
        wait_for(lambda: Log(tmp_path).entries())
        raise KeyError("lost")

    engine = SimpleNamespace(run=run)
    with pytest.raises(KeyError, match="lost"):
        prepare(Records(texts), Bytes(), tmp_path, engine=engine, progress=False)
    corpus = Corpus.open(tmp_path, follow=True)
    before = corpus.refresh()
    other = Records(texts[1:]), Bytes(), tmp_path
    for act in (lambda: prepare(*other, progress=False), lambda: Writer(tmp_path)):
        with pytest.raises(ValueError, match="made with another source"):
            act()
    # A sealed part does not become another: readers may have trained on it.
    lost = (tmp_path / "part-000000-00000.arrow").rename(tmp_path / "lost")
    with pytest.raises(ValueError, match=r"part-000000-00000.arrow: it is missing. Restore that"):
        prepare(Records(texts), Bytes(), tmp_path, num_workers=0, progress=False)
    lost.rename(tmp_path / "part-000000-00000.arrow")
    done = prepare(Records(texts), Bytes(), tmp_path, num_workers=0, progress=False)
    corpus.refresh()
    assert [each.after for each in corpus.entries][: len(before)] == [each.after for each in before]
    require_equal(corpus, done)


def test_a_follower_reads_each_record_and_each_part_once(tmp_path, monkeypatch):
    """However often it refreshes and reads: a stream has no end."""
    calls, corpus = {}, None
    for module, name in (
        (log_module, "read_record"),
        (log_module, "list_records"),
        (objects, "_read_range"),
        (reader_module, "open_part"),
    ):
        calls[name] = mock.Mock(wraps=getattr(module, name))
        monkeypatch.setattr(module, name, calls[name])
    with Writer(tmp_path) as writer:
        for seal in range(12):
            for _ in range(20):  # in several parts
                writer.append([seal] * 5)
            writer.seal()
            corpus = Corpus.open(tmp_path, follow=True) if corpus is None else corpus
            corpus.refresh()
            for number in range(len(corpus)):
                corpus.read([number], [0], [1])
    parts = len(corpus.entries)
    assert parts == 12 * 3
    assert calls["open_part"].call_count == calls["_read_range"].call_count == parts
    # Of each seal, and at the end of each refresh for the next, which is not there yet.
    assert calls["read_record"].call_count <= 2 * 12 + 5
    assert calls["list_records"].call_count <= 3
