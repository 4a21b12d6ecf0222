"""A short soak; `python -m tests.properties soak` is the long one."""

import pytest

from tests.properties.soak import soak


@pytest.mark.slow
def test_many_batches_leave_memory_threads_and_files_as_they_were(tmp_path):
    first, last, _ = soak(tmp_path, 10_000)
    assert last.threads <= first.threads
    assert last.files <= first.files
    assert last.memory < first.memory + (8 << 20)
