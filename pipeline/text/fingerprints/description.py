"""Description: all that a value depends on, found by following what it names and holds."""

import contextlib
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import hashlib
import importlib
import inspect
import logging
import pathlib
import re
import sys
import types
import uuid
from collections.abc import Mapping
from typing import Any, cast

import numpy as np

from pipeline.errors import InvalidValue
from pipeline.text.fingerprints import names, syntax

PLAIN = (bool, int, float, complex, str, bytes)

# Types whose `repr` says all there is to a value.
CLEAR = (
    *(type(None), type(...), range, slice, np.dtype, np.ufunc, uuid.UUID, pathlib.PurePath),
    *(datetime.date, datetime.time, datetime.timedelta, datetime.timezone),
    *(decimal.Decimal, fractions.Fraction, types.GenericAlias, types.UnionType),
)


def is_dataclass(value: Any) -> bool:
    """Whether a value is an object of a dataclass."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


class Description:
    """A hash of values and all that they depend on; errors say that `root` has none."""

    def __init__(self, root: str):
        self._root = root
        self._sha = hashlib.sha256()
        # Functions, classes and modules, with their numbers: they may name each other.
        self._found: dict[int, tuple[int, Any]] = {}
        self._around: list[int] = []  # the containers and objects around a value

    @property
    def digest(self) -> str:
        """Twelve hexadecimal digits."""
        return self._sha.hexdigest()[:12]

    def _say(self, *words: object) -> None:
        for word in words:
            text = str(word).encode(errors="surrogatepass")
            self._sha.update(b"%d:%b" % (len(text), text))

    def _refusal(self, value: Any, place: str, why: str) -> ValueError:
        subject = "it" if place == self._root else place
        example = "…" if "<" in self._root else self._root.rpartition(".")[2]
        return InvalidValue(
            f"{self._root} has no fingerprint: {subject} is {value!r:.80}, {why}. Use functions of "
            "modules, and dataclasses of plain values; or give a fingerprint of your own, and "
            "change it whenever the result would change: "
            f'pipeline.text.Function({example}, fingerprint="v1")'
        )

    def add(self, value: Any, place: str) -> None:
        """Hashes a value that was found at `place`.

        Raises:
            ValueError: it depends on something of which nothing is known.
        """
        kind = type(value)
        if isinstance(value, enum.Enum):
            self._say("enum", value.name)
            self.add(kind, f"the class of {place}")
        elif isinstance(value, PLAIN):
            base: Any = next(each for each in PLAIN if isinstance(value, each))
            self._say(kind.__name__, base.__repr__(value))
        elif isinstance(value, CLEAR) or kind.__module__ == "typing":
            self._say(kind.__name__, repr(value))
        elif isinstance(value, re.Pattern):
            self._say("pattern", repr(value.pattern), value.flags)
        elif isinstance(value, logging.Logger):
            self._say("logger", value.name)
        elif isinstance(value, types.ModuleType):
            self._add_module(value, place)
        elif isinstance(value, types.FunctionType | type):
            self._add_definition(value, place)
        elif isinstance(value, functools._lru_cache_wrapper):
            self.add(value.__wrapped__, place)
        elif inspect.isroutine(value):
            self._say("routine", names.name_of(value))
            owner = getattr(value, "__self__", None)
            if isinstance(value, types.MethodType):
                self.add(value.__func__, place)
            if not isinstance(owner, types.ModuleType):
                self.add(owner, f"the object of {place}")
        elif isinstance(given := getattr(value, "fingerprint", None), str):
            self._say("fingerprint", kind.__qualname__, given)
        elif id(value) in self._around:
            raise self._refusal(value, place, "which contains itself")
        else:
            self._around.append(id(value))
            self._add_object(value, place)
            self._around.pop()

    def _add_object(self, value: Any, place: str) -> None:
        """Containers by their entries, and objects of dataclasses by their fields."""
        kind = type(value)
        if isinstance(value, functools.partial):
            self._say("partial")
            self.add(value.func, f"the function of {place}")
            self.add([value.args, value.keywords], f"the arguments of {place}")
        elif isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
            digest = hashlib.sha256(value.tobytes()).hexdigest()
            self._say("array", value.dtype, value.shape, digest)
        elif isinstance(value, list | tuple):
            self._say(kind.__name__, len(value), getattr(value, "_fields", ()))
            for entry in value:
                self.add(entry, f"an entry of {place}")
        elif isinstance(value, Mapping):
            self._say(kind.__name__, len(value))
            self.add(getattr(value, "default_factory", None), f"the default of {place}")
            for key, entry in value.items():
                self.add(key, f"a key of {place}")
                self.add(entry, f"entry {key!r} of {place}")
        elif isinstance(value, set | frozenset):
            entries = [Description(self._root) for _ in value]
            for description, entry in zip(entries, value, strict=True):
                description.add(entry, f"an entry of {place}")
            self._say(kind.__name__, *sorted(each.digest for each in entries))
        elif is_dataclass(value):
            self.add(kind, f"the class of {place}")
            every = dataclasses.fields(cast(Any, value))
            fields = {field.name: getattr(value, field.name) for field in every}
            if "__dataclass_fields__" not in vars(kind):  # a subclass, with attributes of its own
                fields |= getattr(value, "__dict__", {})
            for name, entry in fields.items():
                self._say(name)
                self.add(entry, f"{place}.{name}")
        else:
            raise self._refusal(value, place, f"and no {kind.__qualname__} says what it is")

    def _is_new(self, definition: Any) -> bool:
        """Whether a definition was not found before; hashes which one it is, and notes it."""
        new = id(definition) not in self._found
        if new:
            self._found[id(definition)] = len(self._found), definition
        self._say("definition", self._found[id(definition)][0])
        return new

    def _add_module(self, module: types.ModuleType, place: str) -> None:
        """A module as a whole: a user's own by its text."""
        if not names.is_own(module.__name__):
            self._say("module", module.__name__, names.version_of(module.__name__))
        elif self._is_new(module):
            self._say(syntax.dump(self._parse(module, place)))

    def _parse(self, definition: Any, place: str) -> Any:
        try:
            return syntax.parse(definition)
        except (OSError, TypeError, SyntaxError) as error:
            raise self._refusal(definition, place, f"without its source ({error})") from error

    def _add_definition(self, value: Any, place: str) -> None:
        """A function or a class: its code, and what it captured and names."""
        if not names.is_own(module := names.module_of(value)):
            self._say("installed", names.name_of(value), names.version_of(module))
            return
        if not self._is_new(value):
            return
        tree = self._parse(value, place)
        self._say(syntax.dump(tree))
        functions = [value]
        if isinstance(value, type):
            for base in value.__bases__:
                self.add(base, f"the base {base.__name__} of {place}")
            functions = syntax.methods_of(value)
            if "<locals>" in value.__qualname__:  # of values that the class captured
                for name, entry in vars(value).items():
                    if not name.startswith("_") and not hasattr(entry, "__get__"):
                        self.add(entry, f"{place}.{name}")
        captured: dict[str, Any] = {}
        for function in functions:
            defaults = [function.__defaults__, function.__kwdefaults__]
            self.add(defaults, f"the defaults of {place}")
            captured |= _captured(function)
        for name, entry in sorted(captured.items()):
            self._say("captured", name)
            self.add(entry, f"{name}, which {place} captured,")
        known = functions[0].__globals__ if functions else vars(sys.modules[module])
        for name, *attributes in syntax.find_names(tree, captured):
            if name in known and not name.startswith("__"):
                self._add_global(known[name], [name, *attributes], place)
        for imported, name in syntax.find_imports(tree, known.get("__package__")):
            with contextlib.suppress(ImportError):  # the code may never come to that line
                chain = [imported, name] if name else [imported]
                self._add_global(importlib.import_module(imported), chain, place)

    def _add_global(self, value: Any, chain: list[str], place: str) -> None:
        """A global that code names, or what it names in a user's own modules."""
        self._say("global", *chain)
        for attribute in chain[1:]:
            if isinstance(value, types.ModuleType) and names.is_own(value.__name__):
                value = getattr(value, attribute, None)
        self.add(value, f"{'.'.join(chain)}, which {place} names,")


def _captured(function: types.FunctionType) -> dict[str, Any]:
    """The values that a function took from those around it; without the class it is in."""
    captured = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # not set yet
            captured[name] = cell.cell_contents
    return captured
