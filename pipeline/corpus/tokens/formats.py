"""Formats: the token files that can be read, and by which signs they are recognised."""

import os

from etils import epath

from pipeline.corpus.tokens import arrow, flat, megatron, npy
from pipeline.corpus.tokens.token_files import TokenFormat
from pipeline.errors import require_one_of
from pipeline.fs.atomic import as_path
from pipeline.text.sources import files

# In the order in which their signs are looked for: `flat` takes what is left.
FORMATS = {each.FORMAT.name: each.FORMAT for each in (arrow, npy, megatron, flat)}


def find_format(name: str) -> TokenFormat:
    """The format with a name; refuses others."""
    require_one_of("format", name, FORMATS)
    return FORMATS[name]


def recognise(path: epath.PathLike) -> TokenFormat | None:
    """The format of the token files that a path or a glob names; None without a sign of any."""
    place, name = as_path(path), os.fspath(path)
    if any(each in name for each in "*?["):
        return recognise(found[0]) if (found := files.find(name)) else None
    return next((each for each in FORMATS.values() if each.recognises(place)), None)


def describe_use(path: epath.PathLike, format: TokenFormat) -> str:
    """How to open token files of a format, as the end of a sentence."""
    more, options = format.suggest(as_path(path))
    arguments = [repr(os.fspath(path)), *map(repr, more)]
    arguments += [f"{name}={value!r}" for name, value in options.items()]
    flags = "".join(f" {name}={value}" for name, value in options.items())
    return (
        f"holds tokens, which need no preparing: pipeline.InPlace.{format.name}"
        f"({', '.join(arguments)}) opens them, and commands take --tokens {format.name}{flags}"
    )
