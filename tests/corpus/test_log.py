"""The log of a writer: whatever happens to its files, no other corpus is read."""

import contextlib
import json
import shutil

import pytest

from pipeline import Corpus, Writer
from pipeline.corpus.stored import writer as writer_module
from pipeline.corpus.stored.directory import write_entries
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
    """All that a reader sees once the corpus is finished."""
    with Writer(directory) as writer:
        writer.finish()
    return [example["inputs"].tolist() for example in Corpus.open(directory)]


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
def test_a_writer_does_not_go_on_where_the_last_record_or_part_is_damaged(damage, place, tmp_path):
    path = place(write(tmp_path), 4)
    damage(path)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ValueError, match=f"{path.name}: it"):
        Writer(tmp_path)
    assert sorted(tmp_path.iterdir()) == before


def test_of_two_writers_at_once_one_seals_or_finishes_and_the_other_changes_nothing(
    tmp_path, monkeypatch
):
    """As when the lock of one was taken from it while it was stopped."""
    monkeypatch.setattr(writer_module, "directory_lock", lambda *_: contextlib.nullcontext())
    for act in ("seal", "finish"):
        directory = tmp_path / act
        stopped = Writer(directory)
        stopped.append([1] * 5)
        stopped.seal(cursor=1)
        with Writer(directory) as other:
            other.append([2] * 5)
            other.seal(cursor=2)
            before = contents(directory)
            stopped.append([3] * 9)
            with pytest.raises(FileExistsError, match="another process wrote it meanwhile"):
                getattr(stopped, act)()
            assert contents(directory) == before
            other.finish()
        assert [example["inputs"][0] for example in Corpus.open(directory)] == [1, 2]


def test_a_writer_that_is_killed_while_it_finishes_is_finished_by_the_next(tmp_path, monkeypatch):
    def die(*_):
        raise KeyError("killed")

    monkeypatch.setattr(writer_module, "finish", die)
    with pytest.raises(KeyError, match="killed"):
        write(tmp_path, finish=True)
    monkeypatch.undo()
    with pytest.raises(FileExistsError, match="is finished; read it"):
        Writer(tmp_path)
    assert len(Corpus.open(tmp_path)) == 20
    assert not (tmp_path / "shards").exists()
