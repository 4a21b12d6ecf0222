"""npy: a flat array of token ids, with offsets in another."""

import os

import numpy as np
from etils import epath

from pipeline.corpus.mask_files import leave_out_masks
from pipeline.corpus.token_files import NPY, TokenFiles, between, divide, load_array, signs
from pipeline.errors import InvalidValue
from pipeline.text import files
from pipeline.text.content import read_head


def _recognise(path: epath.Path) -> bool:
    return path.suffix == ".npy" and path.is_file() and read_head(path).startswith(NPY)


@signs(_recognise, lambda path: (["offsets.npy"], {}))
def npy(paths: files.Paths, *, weights: files.Paths | None = None) -> TokenFiles:
    """A flat `.npy` array of ids [tokens], with offsets [examples + 1] in another.

    Offsets are integers from 0 to the number of tokens: example `i` is
    `tokens[offsets[i]:offsets[i + 1]]`.

    Options:
        weights: a file with a byte for each token, or an array of NumPy, 1 to train on it; ():
            train on all tokens, though there are files of masks or labels beside them.
    """
    pair = files.find(paths)
    if len(pair) != 2:
        raise InvalidValue(f"{paths} are {len(pair)} files; give that of tokens, and of offsets")
    leave_out_masks(pair, weights)
    tokens, edges = (_load(path) for path in pair)
    if problem := _describe(edges, tokens, pair[0].name):
        raise InvalidValue(f"{os.fspath(pair[1])} {problem}")
    borders = between(pair[1], edges, len(tokens), of=pair[0])
    return divide(pair, [tokens], weights, [borders])


def _load(path: epath.Path) -> np.ndarray:
    array = load_array(path)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InvalidValue(
            f"{os.fspath(path)} holds an array of shape {array.shape} and dtype {array.dtype}; it "
            "must be one-dimensional and of integers"
        )
    return array


def _describe(edges: np.ndarray, tokens: np.ndarray, name: str) -> str:
    """What an array seems to hold in place of offsets, and what to give; "" if unknown."""
    count, size = len(tokens), tokens.itemsize
    first, last = _span(edges)
    if (first, last) == (0, count):
        return ""
    if last == count:
        return f"seems to hold ends, up to {count:,} tokens; give np.append(0, ends)"
    if len(edges) and (edges >= 0).all() and edges.sum() == count:
        return (
            f"seems to hold lengths, which sum to {count:,} tokens; give "
            "np.append(0, np.cumsum(lengths))"
        )
    if first == 0 and last == count * size:
        return f"seems to count bytes, {last:,} for {count:,} tokens; give offsets // {size}"
    if first == 0 and last < count:
        return (
            f"is cut short, or does not belong to {name}: {name} has {count:,} tokens, and it ends "
            f"at {last:,}; if it holds where examples begin, give np.append(starts, {count}), or "
            "else copy both again"
        )
    if _span(tokens) == (0, len(edges)):
        return f"seems to hold the tokens, and {name} the offsets; give the file of tokens first"
    return ""


def _span(edges: np.ndarray) -> tuple[int, int]:
    """The first and the last number of an array, or (-1, -1) if it does not ascend."""
    if not len(edges) or (edges[1:] < edges[:-1]).any():
        return -1, -1
    return int(edges[0]), int(edges[-1])
