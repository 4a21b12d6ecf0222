"""npy: a flat array of token ids, with offsets in another."""

import os

import numpy as np
from etils import epath

from pipeline.corpus.token_files import TokenFiles, between, damaged, divide, local_copy, signs
from pipeline.errors import InvalidValue
from pipeline.text import files
from pipeline.text.content import read_head

NPY = b"\x93NUMPY"  # the first bytes of an array that NumPy saved


def _recognise(path: epath.Path) -> bool:
    return path.suffix == ".npy" and path.is_file() and read_head(path).startswith(NPY)


@signs(_recognise, lambda path: (["offsets.npy"], {}))
def npy(paths: files.Paths) -> TokenFiles:
    """A flat `.npy` array of ids [tokens], with offsets [examples + 1] in another.

    Offsets are integers from 0 to the number of tokens: example `i` is
    `tokens[offsets[i]:offsets[i + 1]]`.
    """
    found = files.find(paths)
    if len(found) != 2:
        raise InvalidValue(f"{paths} are {len(found)} files; give that of tokens, and of offsets")
    tokens, edges = (_load(path) for path in found)
    return divide(found, [tokens], (), [between(found[1], edges, len(tokens), of=found[0])])


def _load(path: epath.Path) -> np.ndarray:
    try:
        array = np.asarray(np.load(os.fspath(local_copy(path)), mmap_mode="r"))
    except (ValueError, EOFError) as error:
        raise damaged(path, f"NumPy finds no whole .npy array in it ({error})") from error
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InvalidValue(
            f"{os.fspath(path)} holds an array of shape {array.shape} and dtype {array.dtype}; it "
            "must be one-dimensional and of integers"
        )
    return array
