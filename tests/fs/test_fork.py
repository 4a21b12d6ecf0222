"""A forked child works, whatever the threads of its parent were doing when it was forked."""

import contextlib
import functools
import os
import threading

import numpy as np

import pipeline
from pipeline import Corpus, sources
from pipeline.planning import windows
from pipeline.text import files
from tests.processes import in_child


@contextlib.contextmanager
def in_the_middle(monkeypatch, owner, name, act):
    """Runs `act` in a thread and stops it inside `owner.name` while the block runs."""
    inside, go_on = threading.Event(), threading.Event()
    original, parent = getattr(owner, name), os.getpid()

    @functools.wraps(original)
    def slow(*arguments, **options):
        if os.getpid() == parent:
            inside.set()
            go_on.wait(60)
        return original(*arguments, **options)

    monkeypatch.setattr(owner, name, slow)
    thread = threading.Thread(target=act)
    thread.start()
    try:
        assert inside.wait(60)
        yield
    finally:
        go_on.set()
        thread.join()


def test_a_child_deals_a_window_that_its_parent_was_dealing(monkeypatch):
    lengths = np.arange(1, 1000) % 50 + 1
    plan, same = (pipeline.Plan(lengths, [pipeline.Bucket(8, 64)]) for _ in range(2))
    expected = same.batch(3).segments
    with in_the_middle(monkeypatch, windows, "sort_by_group", lambda: plan.batch(3)):
        assert in_child(lambda: np.array_equal(plan.batch(3).segments, expected))
    assert np.array_equal(plan.batch(3).segments, expected)


def test_a_child_computes_a_property_that_its_parent_was_computing(tmp_path, monkeypatch):
    path = tmp_path / "lines.txt"
    path.write_text("a\nb\n")
    source = sources.TextFiles(path)
    with in_the_middle(monkeypatch, files, "digest", lambda: source.fingerprint):
        assert in_child(lambda: sources.TextFiles(path).fingerprint.startswith("text-line-"))


def test_a_child_reads_a_corpus_through_a_cache_after_its_parent_did(tmp_path):
    Corpus.from_arrays([np.arange(5), np.arange(9)], tmp_path / "corpus")
    corpus = Corpus.open(tmp_path / "corpus", cache=tmp_path / "cache")
    assert corpus[1]["inputs"].tolist() == list(range(8))
    assert in_child(lambda: corpus[0]["inputs"].tolist() == [0, 1, 2, 3])
