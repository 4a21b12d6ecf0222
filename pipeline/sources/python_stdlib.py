"""The Python standard library: its own functions and methods, a data set that needs no download."""

import contextlib
import functools
import hashlib
import io
import os
import sysconfig
from pathlib import Path
from typing import Any

from etils import epath

from pipeline.atomic import directory_lock
from pipeline.sources.tfds import Tfds, require_tfds

# Directories of tests and of what is not the standard library's own, and one file of plain data.
SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
SKIPPED_FILES = {"pydoc_data/topics.py"}


class PythonStdlib(Tfds):
    """Records `{"text", "name", "module"}`: every function and method of the standard library.

    It is a TFDS data set, prepared in seconds on first use. A module is in one split only, so
    nothing of a module in `validation` (about 5%) was trained on. Another Python has another
    library, and so another data set, told apart by a hash of its files.

    Args:
        split: as TFDS spells it: `train`, `validation`, `train[:50%]`.
        data_dir: where to keep the data set; by default where TFDS keeps its own.
    """

    def __init__(self, split: str = "train", data_dir: epath.PathLike | None = None):
        super().__init__("python_stdlib", split, data_dir)

    @functools.cached_property
    def _builder(self) -> Any:
        require_tfds()
        from pipeline.sources.python_stdlib_builder import PythonStdlibBuilder

        def builder() -> Any:
            return PythonStdlibBuilder(data_dir=self.data_dir, file_format="array_record")

        made = builder()
        if not made.data_path.exists():
            with directory_lock(made.data_path.parent, "extracting the standard library"):
                # Another process may have done it while this one waited; then this does nothing.
                _prepare_quietly(builder())
            made = builder()
        return made

    @functools.cached_property
    def fingerprint(self) -> str:
        """See `Source`; from the files of the library, so it needs no data set to be there."""
        info = self._builder.info
        return f"{info.full_name}-{self.split}"

    def __str__(self) -> str:
        return f"the standard library of {self._builder.builder_config.description}, {self.split}"


def _prepare_quietly(builder: Any) -> None:
    """Prepares a TFDS data set without its bars and banners: it takes a few seconds."""
    tfds = require_tfds()
    tfds.disable_progress_bar()
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            builder.download_and_prepare()
    finally:
        tfds.enable_progress_bar()


def library_files() -> list[tuple[str, Path]]:
    """The (path below the library, file) of each module of the standard library, sorted."""
    root = Path(sysconfig.get_path("stdlib"))
    found = []
    for directory, below, names in os.walk(root):
        below[:] = [name for name in below if name not in SKIPPED]
        for name in names:
            path = Path(directory, name)
            relative = path.relative_to(root).as_posix()
            if path.suffix == ".py" and relative not in SKIPPED_FILES:
                found.append((relative, path))
    return sorted(found)


def library_digest() -> str:
    """A short hash of the names and contents of these files."""
    sha = hashlib.sha256()
    for relative, path in library_files():
        sha.update(f"{relative}\n".encode())
        sha.update(hashlib.sha256(path.read_bytes()).digest())
    return sha.hexdigest()[:8]
