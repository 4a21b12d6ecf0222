"""Token files: what a reader of another program's files returns, and tools to write one."""

import os
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import pyarrow as pa
from etils import epath

from pipeline.corpus.stored.cache import local_copy as local_copy  # for formats, too
from pipeline.corpus.stored.cache import path_of
from pipeline.corpus.stored.gather import gather
from pipeline.corpus.stored.parts import read_content
from pipeline.errors import InvalidValue
from pipeline.fs.atomic import write_once
from pipeline.text import files
from pipeline.text.content import read_head
from pipeline.text.features import TOKENS, WEIGHTS, Feature

NPY = b"\x93NUMPY"  # the first bytes of an array that NumPy saved
A_MASK = "with a byte for each token, 1 to train on it"
CHECKED = 1 << 24  # entries of a mask that are looked at when it is opened

# The numbers of some lists, where each list begins in them, and the size of each.
Lists: TypeAlias = tuple[np.ndarray, np.ndarray, np.ndarray]


class TokenFiles(NamedTuple):
    """The examples in files of another program.

    Attributes:
        files: those that hold them, as they were given: of a bucket, not their local copies.
        sections: some examples each, in order: their `TOKENS`, `WEIGHTS` if these are not all 1,
            and features, by name.
        layout: the options that decide how the files are read, as JSON.
        features: the schemas of the features among the columns, by name.
    """

    files: list[epath.Path]
    sections: list[dict[str, Lists]]
    layout: Any = None
    features: Mapping[str, Feature] = types.MappingProxyType({})


Read = TypeVar("Read", bound=Callable[..., TokenFiles])
# More arguments and options for a path, for the user to complete, as `([], {"dtype": "uint16"})`.
Suggestion: TypeAlias = tuple[list[str], dict[str, Any]]


def signs(
    recognises: Callable[[epath.Path], bool],
    suggest: Callable[[epath.Path], Suggestion] = lambda path: ([], {}),
    *,
    by_name: bool = False,
) -> Callable[[Read], Read]:
    """Gives a reader of token files its signs: whether a path seems to name such files.

    The reader is a function `(paths, **options) -> TokenFiles`; its docstring describes `paths`,
    and under `Options:` each option, for help in Python, in a shell and in configs. The registry
    lists it. An option names files if its type has `os.PathLike`, as `files.Paths` has.

    With `by_name`, a name alone decides, which files of other formats may have, too: so all other
    formats are asked before it.
    """

    def mark(read: Read) -> Read:
        reader: Any = read
        reader.recognises, reader.suggest, reader.by_name = recognises, suggest, by_name
        return read

    return mark


def damaged(path: epath.Path, seen: object) -> InvalidValue:
    """The error for a file that its program cannot have finished as it is."""
    return InvalidValue(
        f"{os.fspath(path)} is damaged, cut short, or not what its name says: {seen}; copy it again"
    )


def map_content(path: epath.Path) -> pa.Buffer:
    """The bytes of a file, mapped; of a bucket, those of a copy in the user's caches."""
    return read_content(local_copy(path))


def values_of(lists: Lists) -> np.ndarray:
    """The numbers of some lists, one list after another."""
    return gather(*lists)


def keep_array(key: Any, make: Callable[[], np.ndarray]) -> np.ndarray:
    """What `make` returns, which the user's caches keep; `key` is JSON that decides it."""
    path = path_of(key, "array.npy")
    return np.load(write_once(path, "searching", lambda file: np.save(file, make())))


def between(
    path: epath.Path,
    edges: np.ndarray,
    count: int,
    what: str = "tokens",
    *,
    of: epath.Path | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Where each of the things between edges begins, and its size; refuses edges out of order.

    `path` holds the edges. `of` is the file with the `count` things, if that is another one.
    """
    edges = edges.astype(np.int64)
    ordered = len(edges) > 0 and edges[0] == 0 and not (np.diff(edges) < 0).any()
    if of is not None and ordered and len(edges) > 1:
        require_size(of, count, path, int(edges[-1]))
    if not ordered or edges[-1] != count:
        raise damaged(
            path,
            f"it does not hold offsets into {count:,} {what}: one more than there are examples, "
            "ascending from 0 to that number, as np.append(0, np.cumsum(lengths))",
        )
    return edges[:-1], np.diff(edges)


def require_size(path: epath.Path, tokens: int, index: epath.Path, due: int) -> None:
    """Refuses a file whose number of tokens is not the one that the file `index` is written for."""
    if tokens == due:
        return
    first, second = (path, index) if tokens < due else (index, path)
    raise InvalidValue(
        f"{os.fspath(first)} is cut short, or does not belong to {os.fspath(second)}: "
        f"{path.name} has {tokens:,} tokens, and {index.name} is written for {due:,}; copy both "
        "again"
    )


def read_numbers(path: epath.Path, dtype: np.dtype, skip: int = 0) -> np.ndarray:
    """The numbers of a file after `skip` bytes, mapped."""
    content = map_content(path)
    if content.size < skip or (content.size - skip) % dtype.itemsize:
        raise damaged(path, f"its {content.size:,} bytes are not {skip:,} and some {dtype}")
    return np.frombuffer(content, dtype, offset=skip)


def load_array(path: epath.Path) -> np.ndarray:
    """The array in a file that NumPy saved, mapped."""
    try:
        return np.asarray(np.load(os.fspath(local_copy(path)), mmap_mode="r"))
    except (ValueError, EOFError) as error:
        raise damaged(path, f"NumPy finds no whole .npy array in it ({error})") from error


def _read_mask(path: epath.Path, tokens: int, owner: epath.Path) -> np.ndarray:
    """The mask of the tokens of the file `owner`: bools [tokens], of bytes or an array of NumPy."""
    is_array = read_head(path).startswith(NPY)
    values = load_array(path) if is_array else read_numbers(path, np.dtype(np.uint8))
    advice = f"give a file {A_MASK}"
    if values.shape != (tokens,):
        cut = "is cut short, or " if values.size < tokens else ""
        raise InvalidValue(
            f"{os.fspath(path)} {cut}does not belong to {os.fspath(owner)}: it has {values.size:,} "
            f"{'entries' if is_array else 'bytes'} for {tokens:,} tokens; {advice}"
        )
    entries = values[:CHECKED]
    for wrong in entries[(entries != 0) & (entries != 1)][:1]:
        raise InvalidValue(f"{os.fspath(path)} holds {wrong}, which is not 0 or 1; {advice}")
    return values.view(bool) if values.itemsize == 1 else values.astype(bool)


def divide(
    token_paths: Sequence[epath.Path],
    arrays: Sequence[np.ndarray],
    weights: files.Paths | None,
    borders: Sequence[tuple[np.ndarray, np.ndarray]],
    layout: Any = None,
) -> TokenFiles:
    """The examples in arrays that lie end to end; those in several arrays are copied.

    `weights` are as many files of masks, or none. `borders` are where examples begin, and their
    sizes, of each array, or once of all. The first files are those of the arrays.
    """
    columns, paths = {TOKENS: arrays}, files.find(weights) if weights else []
    if paths and len(paths) != len(arrays):
        raise InvalidValue(
            f"there are {len(paths)} files of weights for {len(arrays)} of tokens; give a file "
            f"{A_MASK}, for each file of tokens"
        )
    if paths:
        triples = zip(paths, arrays, token_paths, strict=False)
        columns[WEIGHTS] = [_read_mask(path, len(values), owner) for path, values, owner in triples]
    firsts, sections = np.cumsum([0, *map(len, arrays)]), []
    begins = np.concatenate([at + n for (at, _), n in zip(borders, firsts, strict=False)])
    counts = np.concatenate([sizes for _, sizes in borders])
    ends = begins + counts
    # The array in which each example begins. Those of a section begin in one array, and end in it
    # or later.
    array = np.minimum(np.searchsorted(firsts, begins, "right"), len(arrays)) - 1
    changes = np.flatnonzero(np.diff(2 * array + (ends > firsts[array + 1]))) + 1
    for chosen in np.split(np.arange(len(begins)), changes) if len(begins) else ():
        first, low, high = int(array[chosen[0]]), begins[chosen].min(), ends[chosen].max()
        span = slice(first, max(int(np.searchsorted(firsts, high)), first + 1))
        section = {}
        for name, column in columns.items():
            pieces = [
                values[max(low - begin, 0) : high - begin]
                for values, begin in zip(column[span], firsts[span], strict=True)
            ]
            values = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
            section[name] = values, begins[chosen] - low, counts[chosen]
        sections.append(section)
    return TokenFiles([*token_paths, *paths], sections, layout)
