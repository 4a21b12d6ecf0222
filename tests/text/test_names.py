"""Names and globs find the files that they name, each once, or say what keeps them from it."""

import os
import pathlib

import pytest

from pipeline.text.config import open_source
from pipeline.text.files import find
from pipeline.text.sources import TextFiles, open_files
from tests.text.record_files import make

ALL = {
    "a.txt": "a",
    "b.txt": "b",
    "a.txt,b.txt": "both",
    "Doe, J.txt": "doe",
    "x,y/z.txt": "z",
    "data [v2]/1.txt": "v2",
    "data v/1.txt": "wrong",
    "what?.txt": "what",
    "[ab].txt": "set",
    "deep/1.txt": "1",
    "deep/in/2.txt": "2",
    "deep/in/er/3.txt": "3",
    "deep/.git/4.txt": "4",
    "{x}.txt": "braces",
    " .txt": "space",
    "é.txt": "é",
    "deep/.hid.txt": "hid",
    "~.txt": "home",
    "#1.txt": "hash",
}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in ALL.items():
        path = pathlib.Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("names", "texts"),
    [
        *(([name], [text]) for name, text in ALL.items()),
        (["a.txt", "a.txt,b.txt"], ["a", "both"]),
        (["a.txt,*.txt"], ["both"]),
        (["x,y/*.txt"], ["z"]),
        (["data [v2]/*.txt"], ["v2"]),
        (["data [[]v2]/*.txt"], ["v2"]),
        (["data [v]/*.txt"], ["wrong"]),
        (["da*/1.txt"], ["v2", "wrong"]),
        (["*/[1].txt"], ["v2", "wrong", "1"]),
        (["deep/**"], ["1", "2", "3"]),
        (["**/in/**/*.txt"], ["2", "3"]),
        (["deep/.*.txt"], ["hid"]),
        (["deep/in/../1.txt"], ["1"]),
    ],
)
def test_a_name_that_exists_is_that_file_and_others_are_globs(names, texts, folder):
    assert [record["text"] for record in TextFiles(names)] == texts
    fields = {"split": "", "kind": "text"}
    for files in (names, tuple(names), *(names if len(names) == 1 else ())):
        source = open_source({**fields, "files": files}, "config.train")
        assert [record["text"] for record in source] == texts
    absolute = TextFiles([folder / name for name in names])
    assert [record["text"] for record in absolute] == texts


def test_linked_folders_are_read_once(folder, caplog):
    outside = folder.parent / "outside"
    (outside / "more").mkdir(parents=True)
    (outside / "more" / "out.txt").write_text("out")
    os.symlink(outside, "deep/again")
    os.symlink(outside / "more", "deep/in/more")
    os.symlink(folder / "deep" / "in", "deep/aa")  # sorts before the folder itself
    os.symlink(folder, "deep/in/er/circle")
    (folder / "deep" / ".git" / "x.txt").write_text("hidden")
    found = find("deep/**/*.txt")
    names = [str(path) for path in found]
    assert names[:3] == ["deep/1.txt", "deep/again/more/out.txt", "deep/in/2.txt"]
    assert {path.read_text() for path in found} >= {"1", "2", "3", "out", "a", "wrong"}
    assert "hidden" not in {path.read_text() for path in found}
    assert len({os.path.realpath(path) for path in found}) == len(found)
    assert "given twice" not in caplog.text
    assert [path.read_text() for path in find("deep/in/**/2.txt")] == ["2"]


def test_a_file_that_is_given_twice_is_read_once_and_named_by_both(folder, caplog):
    os.symlink("a.txt", "link.txt")
    os.link("a.txt", "hard.txt")
    (folder / "loop").symlink_to(folder)
    for names, count, seen in (
        (["b.txt", "[b].txt"], 1, "b.txt (first as b.txt)"),
        (["a.txt", folder / "a.txt"], 1, f"{folder}/a.txt (first as a.txt)"),
        (["a.txt", "./deep/../a.txt"], 1, "deep/../a.txt (first as a.txt)"),
        (["loop/a.txt", "a.txt"], 1, "a.txt (first as loop/a.txt)"),
        (["link.txt", "hard.txt", "b.txt"], 2, "hard.txt (first as link.txt)"),
    ):
        caplog.clear()
        assert len(TextFiles(names).files) == count
        assert "given twice, by overlapping globs, links or spellings, and read" in caplog.text
        assert seen in caplog.text
    assert len(find(["a.txt", "a.txt"])) == 2
    for name in ("link.txt", "hard.txt"):
        os.unlink(name)
    found = TextFiles("**/*.txt").files  # which does not follow the links of folders
    assert len(found) == sum("/." not in name for name in ALL)


def test_missing_files_of_a_numbered_set_are_told(tmp_path, caplog):
    for number, warns in ((0, True), (2, True), (1, False)):
        caplog.clear()
        (tmp_path / f"part-0000{number}-of-00003.txt").write_text("a rose")
        TextFiles(tmp_path / "part-*.txt")
        assert ("part-*-of-00003.txt: only" in caplog.text) == warns


@pytest.mark.parametrize(
    ("name", "error", "sentence"),
    [
        ("no/no.txt", FileNotFoundError, "there is no file no/no.txt; check the path"),
        ("{a,b}.txt", FileNotFoundError, r"no file matches .*\{…\} is no pattern"),
        ("deep", ValueError, r"deep is a directory, and no .* with a glob such as deep/\*.txt"),
        ("dee*", ValueError, r"dee\* is a directory, and no .* name its files with a glob"),
        ("bro*.txt", FileNotFoundError, "broken.txt is a link to nowhere, which does not exist"),
        ("self.txt", OSError, "self.txt cannot be opened: Too many levels of symbolic links"),
        ("locked.txt", PermissionError, "locked.txt cannot be read: permission denied"),
    ],
)
def test_what_cannot_be_opened_is_named(name, error, sentence, monkeypatch):
    os.symlink("nowhere", "broken.txt")
    os.symlink("self.txt", "self.txt")
    pathlib.Path("locked.txt").touch()
    readable = os.access
    monkeypatch.setattr(
        os, "access", lambda path, mode: "locked" not in str(path) and readable(path, mode)
    )
    with pytest.raises(error, match=sentence) as raised:
        TextFiles(name)
    assert type(raised.value).__module__ == "pipeline.errors"


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "parquet", "feather", "arrow"])
def test_a_name_that_is_not_utf8_is_a_name_like_others(kind, folder):
    records = [{"text": f"{number}"} for number in range(30)]
    make(kind, folder, records)
    name = os.fsdecode(b"latin-\xe9.") + kind
    os.rename(f"0.{kind}", name)
    source = open_files([name])
    assert list(source) == records[:25]
    assert source.fingerprint != open_files([f"1.{kind}"]).fingerprint
