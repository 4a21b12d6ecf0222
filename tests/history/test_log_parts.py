"""Logs in parts: read as one, also if a start was killed while it joined them."""

import itertools

import pytest
from etils import epath

from pipeline.history.log_parts import read_log, remove_parts, write_part


def test_a_log_and_its_parts_are_read_as_one(tmp_path):
    path = epath.Path(tmp_path) / "log"
    assert read_log(path) == b""
    path.write_bytes(b"a\n")
    assert write_part(path, 2, b"") == 2
    assert write_part(path, 2, b"b\n") == 4
    assert write_part(path, 4, b"c\n" * 8) == 20
    assert write_part(path, 20, b"d\n") == 22
    for other in ("log.old", "log.000000000000022.tmp", "log2.000000000000022"):
        (path.parent / other).write_bytes(b"of others")
    assert read_log(path) == b"a\nb\n" + b"c\n" * 8 + b"d\n"
    remove_parts(path)
    assert read_log(path) == b"a\n"
    assert len([*tmp_path.iterdir()]) == 4


@pytest.mark.parametrize("kept", range(7))
def test_a_log_that_a_killed_start_began_to_join_has_no_byte_twice(kept, tmp_path):
    whole = b"abcdef"
    for number, left in enumerate(itertools.product([False, True], repeat=2)):
        path = epath.Path(tmp_path) / f"{number}"
        path.write_bytes(whole[:kept])  # the new log; these parts are not removed yet
        for begin in itertools.compress((2, 4), left):
            write_part(path, begin, whole[begin : begin + 2])
        found = read_log(path)
        assert found == whole[: len(found)]
        assert len(found) >= kept
