"""Small parts, and both ways to read them."""

import pytest

from pipeline.corpus.preparing import processes
from pipeline.text import ragged, source


@pytest.fixture(autouse=True, scope="module")
def _small(request):
    """Sizes of parts, of shards and of blocks that a module names in `SMALL`, for little text.

    Such a module uses no corpus of the whole session, which would be made with these sizes.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "count_cpus", lambda: 1)  # others take seconds to start
        for name, size in getattr(request.module, "SMALL", {}).items():
            patch.setattr(source if name in ("LEAST", "BLOCK") else ragged, name, size)
        yield


@pytest.fixture(scope="module", params=["mapped", "cached"])
def way(request, tmp_path_factory):
    """Options of `Corpus.open`: of a corpus whose files are mapped, or read through a cache."""
    return {} if request.param == "mapped" else {"cache": tmp_path_factory.mktemp("cache")}
