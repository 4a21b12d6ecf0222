"""Files of ranges of steps."""

from etils import epath

from pipeline.fs import StepFiles


def test_files_of_steps_ignore_what_is_not_theirs(tmp_path):
    files = StepFiles(epath.Path(tmp_path), "arrow")
    files.write(range(3, 5), b"one")
    (tmp_path / "notes.arrow").write_text("not a range")
    (tmp_path / ".000000003-000000004-ab.arrow.1.tmp").write_text("interrupted")
    assert files.ranges() == [range(3, 5)]
    assert files.read(range(3, 5)) == b"one"
    files.remove(4)
    assert files.ranges() == [range(3, 5)]
    files.remove(3)
    assert files.ranges() == []
