import errno
import os
import pickle
import sys
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline import Feature
from pipeline.corpus import INPUTS, Corpus
from pipeline.corpus.stored import parts, reader
from pipeline.text import ragged
from tests.corpus.files import few_bytes
from tests.processes import call

# 30 examples of 0 to 17 tokens over several parts; id = 100 · example + place.
COUNTS = [(7 * number) % 18 for number in range(30)]
EXAMPLES = [np.arange(count) + 100 * number for number, count in enumerate(COUNTS)]
SMALL = {"TOKENS_PER_PART": 40, "EXAMPLES_PER_PART": 6}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("corpus")
    Corpus.from_arrays(EXAMPLES, directory)
    assert len(list(directory.glob("part-*.arrow"))) > 4
    return directory


@pytest.fixture(scope="module")
def corpus(directory, way):
    return Corpus.open(directory, **way)


@pytest.fixture
def damaged(tmp_path):
    """A corpus of its own for each test that spoils one."""
    return Corpus.from_arrays(EXAMPLES, tmp_path / "corpus")


def test_the_shift_happens_inside_each_example(tmp_path):
    corpus = Corpus.from_arrays([[5, 6, 7], [8], [], [9, 2**31 - 1]], tmp_path)
    assert corpus.lengths.tolist() == [2, 0, 0, 1]
    assert corpus.lengths.dtype == np.uint32
    assert corpus[0]["inputs"].tolist() == [5, 6]
    assert corpus[0]["targets"].tolist() == [6, 7]
    assert corpus[1]["inputs"].tolist() == corpus[2]["targets"].tolist() == []
    assert corpus[-1]["targets"].tolist() == [2**31 - 1]
    assert (len(corpus), corpus.num_tokens, corpus.vocab_size) == (4, 3, None)
    assert (corpus.text_bytes, corpus.tokenizer) == (None, None)
    with pytest.raises(ValueError, match="was made without a tokenizer"):
        corpus.decode(0)
    with pytest.raises(ValueError, match="read-only"):
        corpus.lengths[0] = 1


@given(st.lists(st.integers(0, 60), min_size=1, max_size=40))
def test_parts_do_not_depend_on_how_examples_arrive(counts):
    flat = np.arange(sum(counts), dtype=np.int32)
    examples = np.split(flat, np.cumsum(counts)[:-1])

    def stream():
        """One by one, each in the same memory as the one before."""
        held = np.zeros(60, np.int32)
        for example in examples:
            held[: len(example)] = example
            yield held[: len(example)]

    sides = {"inputs": {"value": Feature("inputs", dtype=np.int32)}}
    columns = ({"tokens": examples, "value": examples}, {"tokens": stream(), "value": stream()})
    parts, again = ([part for _, part in ragged.divide_arrays(c, sides, None)] for c in columns)
    assert [part.digest for part in again] == [part.digest for part in parts]
    assert np.array_equal(np.concatenate([part.flat for part in parts]), flat)
    for part in parts:
        assert len(part.flat) == part.counts.sum()
        assert len(part.counts) <= ragged.EXAMPLES_PER_PART
        assert part.counts[:-1].sum() < ragged.TOKENS_PER_PART


@pytest.mark.parametrize(
    ("piece", "sentence"),
    [
        ((30, 0, 1), "example 30 of 30"),
        ((-1, 0, 1), "example -1 of 30"),
        ((1, 0, 7), "positions 0 to 7 of example 1, which has length 6"),
        ((1, -1, 2), "positions -1 to 1 of example 1"),
        ((1, 3, -1), "positions 3 to 2 of example 1"),
        ((1, 2**63 - 1, 1), "of example 1, which has length 6"),
    ],
)
def test_a_piece_beyond_its_example_is_refused(corpus, piece, sentence):
    with pytest.raises(IndexError, match=sentence):
        corpus.read(*[[number] for number in piece])
    with pytest.raises(IndexError):
        corpus[len(corpus)]
    with pytest.raises(ValueError, match="reach is -1 for a piece of length 3"):
        corpus.read([1], [0], [3], [-1])


@pytest.mark.parametrize(("vocab_size", "size"), [(1 << 16, 2), ((1 << 16) + 1, 4), (None, 4)])
def test_ids_of_small_vocabularies_are_stored_in_two_bytes(vocab_size, size, tmp_path):
    ids = np.arange(65_530, 65_536)
    corpus = Corpus.from_arrays([ids[:4], ids[4:]], tmp_path, vocab_size=vocab_size)
    segments = parts.read_part(corpus.directory / "part-000000-00000.arrow").segments
    assert segments["tokens"].dtype.itemsize == size
    corpus.verify()
    read = corpus.read([1, 0], [0, 1], [1, 2], [2, 2])
    assert read["inputs"].dtype == read["targets"].dtype == np.int32
    assert read["inputs"][[0, 2, 3]].tolist() == [65_534, 65_531, 65_532]
    assert read["targets"][[0, 2, 3]].tolist() == [65_535, 65_532, 65_533]


def test_few_parts_are_mapped_at_a_time_and_none_holds_its_file_open(directory, monkeypatch):
    monkeypatch.setattr(reader, "MAPPED", 2)
    corpus, before = Corpus.open(directory), len(os.listdir("/dev/fd"))
    for number in [*range(30), *range(0, 30, 7)]:
        assert corpus[number]["inputs"].tolist() == EXAMPLES[number][:-1].tolist()
        assert len(corpus.reader._table.opened) <= 2
    assert len(os.listdir("/dev/fd")) <= before + 2
    every = np.arange(30)
    read = corpus.read(every, 0 * every, corpus.lengths)["targets"]
    assert read.tolist() == np.concatenate([example[1:] for example in EXAMPLES]).tolist()


def test_nothing_is_read_beyond_a_map(tmp_path, monkeypatch):
    # In a process of its own, which would be killed.
    program = """if True:
        import sys
        from pipeline import Corpus
        from tests.corpus.files import map_apart

        map_apart()
        corpus = Corpus.open(sys.argv[1])
        for example in range(len(corpus)):
            read = corpus.read([example, 0], [1_048_000, 0], [9, 9], [2_000_000, 20])
            assert read["inputs"][:9].tolist() == list(range(1_048_000, 1_048_009))
            assert read["targets"][2_000_000:2_000_009].tolist() == list(range(1, 10))
    """
    monkeypatch.setattr(ragged, "EXAMPLES_PER_PART", 1)
    # Too large for the holes that other maps left.
    Corpus.from_arrays([np.arange(1 << 20)] * 4, tmp_path)
    assert call(sys.executable, "-c", program, tmp_path).returncode == 0


def test_a_corpus_prints_itself_in_little_memory(corpus):
    text = str(corpus)
    for seen in ("30, 3 of them of length 0", f"{corpus.num_tokens} to train", "longest 16"):
        assert seen in text
    assert corpus.fingerprint in text
    assert repr(corpus).startswith("Corpus.open(")
    assert len(pickle.dumps(corpus)) < 500  # its directory
    huge = Corpus.open(corpus.directory)
    huge.lengths = np.array([3, 3, (1 << 31) - 1], np.uint32)
    with few_bytes(1 << 26):
        assert "p50 3, p90 2,147,483,647, p99 2,147,483,647, longest 2,147,483,647" in str(huge)


def test_any_arrow_reader_can_read_the_parts(directory):
    seen = []
    for path in sorted(directory.glob("part-*.arrow")):
        seen += pa.ipc.open_file(path.read_bytes()).read_all().column("tokens").to_pylist()
    assert seen == [example.tolist() for example in EXAMPLES]


def test_the_fingerprint_depends_on_content_alone(directory, tmp_path):
    corpus = Corpus.open(directory)
    elsewhere = Corpus.from_arrays([e.astype(np.uint16) for e in EXAMPLES], tmp_path / "a")
    assert elsewhere.fingerprint == corpus.fingerprint
    other = Corpus.from_arrays([*EXAMPLES[:-1], EXAMPLES[-1] + 1], tmp_path / "b")
    assert other.lengths.tolist() == corpus.lengths.tolist()
    assert other.fingerprint != corpus.fingerprint
    changed = {name for name in other.identity if other.identity[name] != corpus.identity[name]}
    assert changed == {"tokens"}
    columns = ({"tokens": EXAMPLES, "weights": [[w] * count for count in COUNTS]} for w in (0.5, 1))
    one, two = (Corpus.from_arrays(column, tmp_path / f"{n}") for n, column in enumerate(columns))
    assert one.fingerprint != two.fingerprint


def test_the_same_arrays_again_open_the_corpus_and_others_are_refused(damaged):
    before = (damaged.directory / "corpus.json").read_bytes()
    again = Corpus.from_arrays(EXAMPLES, damaged.directory)
    assert again.fingerprint == damaged.fingerprint
    for others in (EXAMPLES[:-1], EXAMPLES[::-1], [*EXAMPLES, [1, 2]]):
        with pytest.raises(ValueError, match="holds a corpus of other examples"):
            Corpus.from_arrays(others, damaged.directory)
    for options in ({"vocab_size": 9999}, {"task": INPUTS}):
        with pytest.raises(ValueError, match=r"a corpus of (other examples|the task 'causal')"):
            Corpus.from_arrays(EXAMPLES, damaged.directory, **options)
    assert (damaged.directory / "corpus.json").read_bytes() == before
    damaged.verify()


def test_an_interrupted_corpus_of_arrays_is_written_anew(tmp_path):
    def interrupted():
        yield from (example + 1 for example in EXAMPLES[:20])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Corpus.from_arrays(interrupted(), tmp_path)
    corpus = Corpus.from_arrays(EXAMPLES, tmp_path)
    corpus.verify()
    assert corpus[3]["inputs"].tolist() == EXAMPLES[3][:-1].tolist()


PART, LENGTHS = "part-000000-00002.arrow", "lengths.npy"
MANIFEST, PARTS = "corpus.json", "parts.arrow"


@pytest.mark.parametrize(
    ("name", "change", "sentence"),
    [
        (PART, lambda it: it[:-10], "it has .* bytes instead of"),
        (LENGTHS, lambda it: it.replace(b"(30,)", b"(29,)"), "it has shape .29,."),
        (LENGTHS, lambda it: it[:-8] + it[-4:] + it[-8:-4], "its digest differs"),  # the same sum
        (PARTS, lambda it: it[:90] + b"?" + it[91:], "its digest differs"),
        (PARTS, None, ".*cannot be read"),
        (MANIFEST, lambda it: it.replace(b": null", b": 7"), ".*do not match its digest"),
        (MANIFEST, lambda it: it[:200], "it is half-written"),
        (MANIFEST, lambda _: b'{"schema_version": 4}', "has .* 4, but .* 7; write the corpus"),
        (MANIFEST, lambda _: None, "it is a directory"),
    ],
)
def test_what_is_no_whole_corpus_is_refused_on_opening(damaged, name, change, sentence):
    path = damaged.directory / name
    content = change and change(path.read_bytes())
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    elif change:
        path.mkdir()
    with pytest.raises(ValueError, match=f"(damaged at .*{name}:|{name}) {sentence}"):
        Corpus.open(damaged.directory)


def test_a_part_that_two_threads_open_at_once_is_taken_once(tmp_path, monkeypatch):
    """One that is replaced would be unmapped under the thread that reads it."""
    corpus = Corpus.from_arrays([[1, 2, 3]], tmp_path / "corpus")
    both, opened, add = threading.Barrier(2), reader.LocalParts.open, reader._Table.add

    def open_together(self, numbers):
        found = opened(self, numbers)
        both.wait(30)
        return found

    monkeypatch.setattr(reader.LocalParts, "open", open_together)
    take = mock.patch.object(reader._Table, "add", autospec=True, side_effect=add)
    with ThreadPoolExecutor(2) as threads, take as taken:
        read = [each["inputs"].tolist() for each in threads.map(corpus.__getitem__, [0, 0])]
    assert (read, taken.call_count) == ([[1, 2]] * 2, 1)


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS])
def test_what_cannot_be_stored_beside_a_corpus_is_made_each_time(code, tmp_path, monkeypatch):
    def refuse(path, **options):
        raise OSError(code, "no", str(path))

    Corpus.from_arrays({"tokens": [[5, 6], [7, 8]], "weights": [[1, 0], [1, 1]]}, tmp_path)
    monkeypatch.setattr("pipeline.fs.atomic.atomic_write", refuse)  # root may write anywhere
    for _ in range(2):
        assert Corpus.open(tmp_path).silent.tolist() == [0]
    assert not list(tmp_path.glob("silent*"))


def test_parts_that_are_open_hold_nothing_for_each_example(tmp_path, monkeypatch):
    count = 50_000
    for name in SMALL:  # one part
        monkeypatch.setattr(ragged, name, 2 * count)
    corpus = Corpus.from_arrays([np.arange(2)] * count, tmp_path / "corpus", vocab_size=9)
    corpus.read([0], [0], [1])  # imports
    opened = Corpus.open(corpus.directory)
    tracemalloc.start()
    try:
        opened.read([0, count - 1], [0, 0], [1, 1])
        assert tracemalloc.get_traced_memory()[0] < count  # bytes
    finally:
        tracemalloc.stop()
