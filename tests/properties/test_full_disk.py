"""A disk that is full at every write: a sentence, and a rerun with room ends as if nothing was."""

import errno
import os

import numpy as np
import pytest

from pipeline.errors import StorageError
from pipeline.fs.atomic import _name_errors, atomic_write
from pipeline.text import ragged
from pipeline.text.sources import source
from tests.properties.disk import Disk, fails
from tests.properties.kills import Preparation, Stream, write_documents

PAGE = 4096


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    # Trials set these, in processes of their own.
    for module, name in ((ragged, "TOKENS_PER_PART"), (source, "LEAST"), (source, "BLOCK")):
        monkeypatch.setattr(module, name, getattr(module, name))


@pytest.fixture
def text(tmp_path):
    write_documents(tmp_path / "documents.jsonl", 60)
    return tmp_path / "documents.jsonl"


@pytest.mark.parametrize("kind", ["prepare", "prepare_pairs", "from_arrays", "Writer"])
def test_preparations_end_with_a_sentence_and_go_on_with_room(kind, text, tmp_path, capsys):
    trial = Stream(60) if kind == "Writer" else Preparation(text, kind)
    trial.notes = False  # which would be on the disk as well
    (tmp_path / "whole").mkdir()
    trial.run(tmp_path / "whole")
    expected, refusals = trial.result(tmp_path / "whole"), 0
    rooms = [{"size": pages * PAGE} for pages in range(1, 40, 6)]
    rooms += [{"files": files} for files in range(2, 16, 2)]
    with Disk(tmp_path / "disk") as disk:
        for room in rooms:
            refusals += fails(trial.run, disk.make(**room))
            disk.grow()
            trial.run(disk.place)
            assert trial.result(disk.place) == expected
    assert refusals > 1
    assert "Traceback" not in capsys.readouterr().err


def test_an_error_of_a_source_is_not_told_as_one_of_the_file_that_is_written(tmp_path):
    def copy(error):
        with atomic_write(tmp_path / "copy") as file:
            file.write(b"begun")
            raise error

    gone = FileNotFoundError(2, "No such file or directory", "source.txt")
    for error in (gone, StorageError("s3://mine/x cannot be reached"), OSError(5, "I/O error")):
        with pytest.raises(OSError) as seen:
            copy(error)
        assert seen.value is error
        assert list(tmp_path.iterdir()) == []


def test_an_error_of_the_file_that_is_written_names_it(tmp_path):
    with pytest.raises(StorageError, match=r"could not write .*none/copy: No such file"):
        atomic_write(tmp_path / "none" / "copy").__enter__()
    owned = rf"user {os.getuid()} owns {tmp_path}, and you are user {os.getuid()}: ask"
    with pytest.raises(StorageError, match=owned), _name_errors(tmp_path / "none" / "copy"):
        raise PermissionError(errno.EACCES, "Permission denied")
    with Disk(tmp_path / "disk") as disk:
        place = disk.make(size=2 * PAGE)
        for write in (
            lambda file: file.write(bytes(9 * PAGE)),
            lambda file: np.save(file, np.zeros(9 * PAGE)),
        ):
            with (
                pytest.raises(StorageError, match=r"could not write .*copy: No space left"),
                atomic_write(place / "copy") as file,
            ):
                write(file)
            assert list(place.iterdir()) == []
