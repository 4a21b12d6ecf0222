"""Formats: by which signs the token files of other programs are recognised."""

import os
from typing import Any

from etils import epath

from pipeline import registry
from pipeline.fs.atomic import as_path
from pipeline.text import files


def recognise(path: epath.PathLike) -> registry.Kind | None:
    """The format of the token files that a path or a glob names; None without a sign of any."""
    location, name = as_path(path), os.fspath(path)
    if any(sign in name for sign in "*?["):
        return recognise(paths[0]) if (paths := files.find(name)) else None
    # Those of other packages may have no signs.
    for kind in sorted(registry.kinds("tokens"), key=lambda k: getattr(k.make, "by_name", False)):
        recognises = getattr(kind.make, "recognises", None)
        if recognises is not None and recognises(location):
            return kind
    return None


def describe_use(path: epath.PathLike, format: registry.Kind) -> str:
    """How to open token files of a format, as the end of a sentence."""
    make: Any = format.make
    more, options = make.suggest(as_path(path))
    arguments = [repr(os.fspath(path)), *map(repr, more)]
    arguments += [f"{name}={value!r}" for name, value in options.items()]
    flags = "".join(f" {name}={value}" for name, value in options.items())
    return (
        f"holds tokens, which need no preparing: pipeline.InPlace.{format.name}"
        f"({', '.join(arguments)}) opens them, and commands take --tokens {format.name}{flags}"
    )
