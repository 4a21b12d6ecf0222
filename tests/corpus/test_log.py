"""The log of a corpus that grows: whatever happens to its files, no other corpus is read."""

import contextlib
import json
import shutil

import pytest

from pipeline import Corpus, Writer
from pipeline.corpus import log as log_module
from pipeline.corpus import writer as writer_module
from pipeline.corpus.log import Log
from pipeline.corpus.manifest import write_entries
from tests.corpus.files import contents, flip

SMALL = {"TOKENS_PER_PART": 20}


def write(directory, count=20, begin=0, finish=False):
    """Examples `begin` to `count`, two parts to each record; goes on where it stopped."""
    with Writer(directory) as writer:
        for number in range(writer.cursor or 0, count):
            writer.append([begin + number] * 5)
            if number % 8 == 7 or number == count - 1:
                writer.seal(cursor=number + 1)
        if finish:
            writer.finish()
    return directory


def see(directory):
    """All that a reader sees who begins now."""
    corpus = Corpus.open(directory, follow=True)
    corpus.refresh()
    return [each["inputs"].tolist() for each in corpus]


def record(directory, number):
    return directory / "shards" / f"000000-{number:05d}.json"


def part(directory, number):
    return directory / f"part-000000-{number:05d}.arrow"


def cut(path):
    path.write_bytes(path.read_bytes()[:-20])


def reseal(directory, number, **entries):
    """Another record under the same name, whose own digest is right."""
    path = record(directory, number)
    content = {**json.loads(path.read_text()), **entries}
    del content["digest"]
    write_entries(path, content)


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda d: cut(record(d, 2)), "000000-00002.json: it is half-written or changed"),
        (lambda d: flip(record(d, 2), 100), "half-written or changed"),
        (lambda d: record(d, 2).unlink(), "2.json: it is missing, and 000000-00004.json is there"),
        (lambda d: shutil.copy(record(d, 2), record(d, 0)), "its number is 2, not 0: it is out of"),
        (
            lambda d: shutil.copy(record(d.parent / "other", 2), record(d, 2)),
            "part-000000-00002.arrow: its sha256 is",
        ),
        (
            lambda d: reseal(d, 4, parts=json.loads(record(d, 2).read_text())["parts"][:1]),
            "a part of it is 'part-000000-00002.arrow', not 'part-000000-00004.arrow'",
        ),
        (lambda d: reseal(d, 4, schema_version=99), "has schema version 99"),
        (lambda d: cut(d / "corpus.json"), "corpus.json: it is half"),
        (lambda d: part(d, 1).unlink(), "part-000000-00001.arrow: it is missing"),
        (lambda d: cut(part(d, 3)), r"arrow: it has \S+ bytes instead of"),
        (lambda d: shutil.copy(part(d.parent / "other", 1), part(d, 1)), "1.arrow: its sha256 is"),
    ],
)
def test_what_is_damaged_is_a_sentence_and_is_not_read(damage, sentence, tmp_path):
    write(tmp_path / "other", begin=100)
    damage(write(tmp_path / "log"))
    with pytest.raises(ValueError, match=sentence):
        see(tmp_path / "log")


@pytest.mark.parametrize(
    ("damage", "place"), [(cut, record), (lambda path: flip(path, 100), record), (cut, part)]
)
def test_a_writer_does_not_go_on_after_a_tail_that_is_damaged(damage, place, tmp_path):
    path = place(write(tmp_path), 4)
    damage(path)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ValueError, match=f"{path.name}: it"):
        Writer(tmp_path)
    assert sorted(tmp_path.iterdir()) == before


def test_a_reader_at_the_end_of_a_log_that_is_removed_does_not_wait_for_ever(tmp_path):
    log = Log(write(tmp_path))
    assert len(log.entries()) == 5
    (tmp_path / "corpus.json").unlink()
    with pytest.raises(ValueError, match=r"corpus\.json: it is gone: its source was edited"):
        log.entries(5)


@pytest.mark.parametrize("listed", [True, False])
@pytest.mark.parametrize("start", [None, 0, 4, 5])
def test_a_log_that_is_finished_while_it_is_listed_is_read(start, listed, tmp_path, monkeypatch):
    """Records that were listed are gone when they are read, or are gone before they are listed."""
    corpus = Corpus.open(write(tmp_path), follow=True)
    corpus.log.restart()
    keys, calls = log_module.list_records, []

    def list_and_finish(directory):
        calls.append(keys(directory))
        if len(calls) > 1:  # by the writer
            return calls[-1]
        write(tmp_path, 24, finish=True)
        return calls[0] if listed else keys(directory)

    monkeypatch.setattr(log_module, "list_records", list_and_finish)
    if start is None:
        assert corpus.read([], [], [])["inputs"].tolist() == []
    else:
        found = corpus.log.entries(start) or corpus.log.entries(start)
        assert [entry.number for entry in found] == [*range(start, 6)]


def test_a_record_stays_while_a_reader_holds_one_of_its_parts(tmp_path):
    log = Log(write(tmp_path))  # a record of parts 0 and 1, of 2 and 3, and of 4
    assert log.tail().number == 4
    for held, first in ((1, 0), (3, 2), (4, 4)):
        log.hold("run", held)
        log.trim(5)
        assert log.first() == first


def test_parts_that_no_reader_needs_are_deleted_and_a_reader_of_them_is_refused(
    tmp_path, monkeypatch
):
    options, corpus = {"keep_parts": 3}, None
    for number in range(80):
        with Writer(tmp_path, **options) as writer:
            assert writer.cursor == (number or None)
            for _ in range(4):
                writer.append([number] * 5)
            writer.seal(cursor=number + 1)
        corpus = corpus or Corpus.open(tmp_path, follow=True)
        if number == 19:  # nobody has said what is needed
            assert Log(tmp_path).first() == 0
        if number in (20, 50):
            Log(tmp_path).hold("slow-run", number - 10)
            Log(tmp_path).hold("fast", number - 2)
    assert Log(tmp_path).first() == 40
    assert {*tmp_path.glob("part-*")} == {part(tmp_path, number) for number in range(40, 80)}
    corpus.refresh(start=40)
    assert corpus.entries[0].first == 160
    assert corpus.read([160, 319], [0, 0], [1, 1])["inputs"].tolist() == [40, 79]
    with pytest.raises(ValueError, match=r"begins at part 40, and part 39 is needed: its writer"):
        Log(tmp_path).entries(39)
    Log(tmp_path).release("slow-run")

    def die(*arguments):
        write_entries(*arguments)
        raise KeyError("killed")

    monkeypatch.setattr(log_module, "write_entries", die)
    with pytest.raises(KeyError, match="killed"):
        Log(tmp_path).trim(41)  # what it had begun to delete
    monkeypatch.undo()
    assert part(tmp_path, 40).exists()
    with Writer(tmp_path, **options) as writer:
        assert not (tmp_path / "part-000000-00040.arrow").exists()
        writer.append([80] * 5)
        writer.finish()
    assert Log(tmp_path).first() == 48
    assert Log(tmp_path).finished
    assert [entry.number for entry in Log(tmp_path).entries(79)] == [79, 80]
    whole = Log(tmp_path).whole()  # what is left, and no lengths of what is not
    assert whole.array.tolist() == [0] * 48 * 4 + [4] * (32 * 4 + 1)
    assert whole.files.tolist() == [48 * 4, *[4] * 32, 1]
    assert len([*tmp_path.glob("part-*")]) == 81 - 48
    for refused in ("", "../x", "a b"):
        with pytest.raises(ValueError, match="letters, digits"):
            Log(tmp_path).hold(refused, 0)


def test_of_two_writers_at_once_one_seals_or_finishes_and_the_other_changes_nothing(
    tmp_path, monkeypatch
):
    """As when the lock of one was taken from it while it was stopped."""
    monkeypatch.setattr(writer_module, "directory_lock", lambda *_: contextlib.nullcontext())
    for act in ("seal", "finish"):
        place = tmp_path / act
        stopped = Writer(place)
        stopped.append([1] * 5)
        stopped.seal(cursor=1)
        with Writer(place) as other:
            other.append([2] * 5)
            other.seal(cursor=2)
            before = contents(place)
            stopped.append([3] * 9)
            with pytest.raises(FileExistsError, match="another process wrote it meanwhile"):
                getattr(stopped, act)()
            assert contents(place) == before
            other.finish()
        assert [each["inputs"][0] for each in Corpus.open(place)] == [1, 2]


def test_a_reader_holds_all_of_a_finished_corpus_while_its_records_are_removed(
    tmp_path, monkeypatch
):
    reader = Corpus.open(write(tmp_path), follow=True)
    monkeypatch.setattr(
        writer_module.Log, "remove", lambda _: record(tmp_path, 0).unlink(missing_ok=True)
    )
    write(tmp_path, finish=True)
    assert record(tmp_path, 2).exists()
    assert reader.log.first() == 0
    reader.hold(range(0))
    assert reader.read([0], [0], [1])["inputs"].tolist() == [0]
