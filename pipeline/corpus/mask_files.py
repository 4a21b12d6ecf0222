"""Files of masks: which files beside those of tokens are masks of them, told by their names."""

import logging
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from etils import epath

from pipeline.corpus.token_files import A_MASK, NPY, load_array
from pipeline.errors import InvalidValue, name_some
from pipeline.fs.atomic import absolute, as_path, is_local
from pipeline.text import files
from pipeline.text.content import read_head

logger = logging.getLogger(__name__)

# Words of names: of masks, and of what is a mask if it has an entry for each token. An ending has
# its dot, as `.loss` of datatrove.
MASK = re.compile(r"\.?[a-z0-9_]*masks?[0-9]*|\.loss")
PERHAPS = re.compile(r"\.?([a-z_]*(labels?|weights?)|loss(es)?|roles?)")


def leave_out_masks(paths: Sequence[epath.Path], weights: files.Paths | None) -> list[epath.Path]:
    """The files of tokens among those that were found, without masks of them, told by their names.

    A file with a word for a mask in its name belongs to the file beside it that shares its other
    words, rare ones first: `labels_mask_07.npy` to `token_ids_07.npy`. If there are several, it
    belongs to those with as many entries, if there are any.

    Raises:
        ValueError: `weights` is None, and there are masks of the files: among them, beside them,
            or of the same name in a folder of masks; or all of them are masks.
    """
    tokens, masks, unclear = list[epath.Path](), dict[epath.Path, epath.Path](), list[epath.Path]()
    for folder in dict.fromkeys(path.parent for path in paths):
        candidates = {path: _words(path) for path in paths if path.parent == folder}
        if weights is None or any(map(_marks, candidates.values())):
            words = {**_list(folder), **candidates}
        else:
            words = candidates
        marked = {path for path in words if _marks(words[path]) and path.is_file()}
        endings = {path.suffix for path in marked.union(candidates)}
        by_word = defaultdict[str, set[epath.Path]](set)
        for path in words if marked else ():
            if path in candidates or (path not in marked and path.suffix in endings):
                for word in ("", *words[path]):
                    by_word[word].add(path)
        owners = {path: _find_owners(path, words, by_word) for path in sorted(marked)}
        among = [path for path in candidates if path in marked and owners[path][1]]
        token_files = set(candidates).difference(among)
        if among and weights == ():
            text = "masks or labels by their names, and not read: %s"
            logger.warning(text, name_some([*map(os.fspath, among)], 3))
        if weights is None and not token_files:
            raise InvalidValue(
                f"{name_some([*map(os.fspath, among)], 3)} are masks or labels by their names; "
                "give the files of tokens, or weights=() to read these as tokens"
            )
        tokens += [path for path in candidates if path in token_files] or candidates
        for path, (token_paths, is_mask) in owners.items():
            file_owners = token_paths & token_files
            if is_mask:
                masks |= {owner: masks.get(owner, path) for owner in file_owners}
            elif file_owners and path.suffix in {candidate.suffix for candidate in candidates}:
                unclear.append(path)
    if weights is not None:
        return tokens
    if masks:
        token = next(path for path in paths if path in masks)
        names = name_some([repr(os.fspath(path)) for path in sorted({*masks.values()})], 2)
        raise InvalidValue(
            f"{os.fspath(masks[token])}, by its name, says of {token.name} on which tokens to "
            f"train; give weights={names}, a file {A_MASK} (write one if it has other entries), or "
            "weights=() to train on all"
        )
    if unclear:
        text = "beside the tokens, and not read: %s; for a mask, give weights=, a file %s"
        logger.warning(text, name_some([*map(os.fspath, unclear)], 3), A_MASK)
    return tokens


def _list(folder: epath.Path) -> dict[epath.Path, set[str]]:
    """The words of what is in a folder, and in folders of masks in it or beside it, as `masks`.

    The words of the name of such a folder are those of masks, or in the name of `folder`, too.
    """
    words_by_path = {path: _words(path) for path in _visible(folder)}
    whole = as_path(absolute(folder))
    for candidate in [*words_by_path, *(_visible(whole.parent) if is_local(folder) else ())]:
        new = _words(candidate) - _words(whole)
        if new <= _marks(new) and any(map(MASK.fullmatch, new)) and candidate.is_dir():
            words_by_path |= {path: new | _words(path) for path in _visible(candidate)}
    return words_by_path


def _visible(folder: epath.Path) -> list[epath.Path]:
    """The paths in a folder, without hidden ones; none if it cannot be listed."""
    try:
        return [path for path in folder.iterdir() if path.name[0] != "."]
    except PermissionError:
        return []


def _words(path: epath.Path) -> set[str]:
    """The words and numbers of a name: of `lossMask_07.npy`, loss, mask, 07 and .npy."""
    spaced = re.sub("([a-z])([A-Z])", r"\1 \2", path.stem).lower()
    return {*re.findall(r"[a-z]+|\d+", spaced), path.suffix.lower()}


def _marks(words: Iterable[str]) -> set[str]:
    """Those of some words that are for masks."""
    return {word for word in words if MASK.fullmatch(word) or PERHAPS.fullmatch(word)}


def _find_owners(
    path: epath.Path, words: Mapping[epath.Path, set[str]], by_word: Mapping[str, set[epath.Path]]
) -> tuple[set[epath.Path], bool]:
    """The files of tokens to which a file belongs, and whether it is a mask of them."""
    marks, none = _marks(words[path]), set[epath.Path]()
    owners = by_word[""].difference(
        set.intersection(*(by_word.get(m, none) for m in marks)), [path]
    )
    shared = [word for word in words[path] - marks - {path.suffix.lower()} if word in by_word]
    for word in sorted(shared, key=lambda word: len(by_word[word])):
        owners = owners & by_word[word] or owners
    counts = _counts(path)
    fitting = {owner for owner in owners if counts & _counts(owner)}
    by_name = any(MASK.fullmatch(word) for owner in owners for word in marks - words[owner])
    is_text = min(read_head(path), default=0) > 8
    return fitting or owners, bool(fitting) or (by_name and not is_text)


def _counts(path: epath.Path) -> set[int]:
    """The numbers of entries that a file may have."""
    if read_head(path).startswith(NPY):
        return {load_array(path).size}
    size = path.stat().length
    return {size // itemsize for itemsize in (1, 2, 4, 8) if size and size % itemsize == 0}
