"""Fingerprints of functions and objects: they change if the results may change.

The fingerprint of a function covers its source, its defaults, the values it captures, and the
functions, classes and values of its own module that it names; names from other modules count by
name alone. For a lambda, or a function without source, it covers the code instead. For an instance
of a dataclass it covers the fields and the methods of the class, and for a plain value its content.
"""

import contextlib
import dataclasses
import datetime
import decimal
import dis
import enum
import functools
import hashlib
import inspect
import logging
import pathlib
import re
import sys
import textwrap
import types
from collections.abc import Iterator, Mapping
from typing import Any, cast

import numpy as np

from pipeline.errors import InvalidValue

PLAIN = (bool, int, float, complex, str, bytes)

# Types whose `repr` describes a value completely.
CLEAR = (
    *(type(None), type(...), range, np.dtype, np.ufunc, pathlib.PurePath, decimal.Decimal),
    *(datetime.date, datetime.time, datetime.timedelta, datetime.timezone),
    *(types.GenericAlias, types.UnionType),
)
CODE = ("code", "names", "varnames", "freevars", "flags", "argcount", "kwonlyargcount")


def fingerprint(value: Any) -> str:
    """The name of a function or of an object's class, and a hash of all that it depends on.

    Args:
        value: a function, an instance of a dataclass, a `functools.partial` of these, or anything
            with a string attribute `fingerprint`, which is returned.

    Raises:
        ValueError: it holds or names something that cannot be described; the message names that.
    """
    if isinstance(stated := getattr(value, "fingerprint", None), str):
        return stated
    name = _name(value)
    described = repr(_Description(name).of(value, name)).encode(errors="surrogatepass")
    if dataclasses.is_dataclass(type(value)) and _is_clear(value):
        return repr(value)
    return name if _is_named(value) else f"{name}-{hashlib.sha256(described).hexdigest()[:12]}"


def _name(value: Any) -> str:
    """The module and the name of a function or class, or of the class of an object."""
    if isinstance(value, functools.partial):
        return _name(value.func)
    module = getattr(value, "__module__", None) or "builtins"
    if module in ("__main__", "__mp_main__"):  # take its name as an imported module
        main = sys.modules["__main__"]
        spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", "__main__")
        module = spec.name if spec else pathlib.PurePath(file).stem
    return f"{module}.{getattr(value, '__qualname__', type(value).__qualname__)}"


def _is_clear(value: Any) -> bool:
    """Whether `repr` describes a value completely, without an address in memory."""
    if isinstance(value, Mapping):
        return all(map(_is_clear, (*value, *value.values())))
    if isinstance(value, list | tuple):
        return all(map(_is_clear, value))
    if dataclasses.is_dataclass(type(value)) and _is_named(type(value)):
        fields = dataclasses.fields(cast(Any, value))
        return all(_is_clear(getattr(value, field.name)) for field in fields)
    return type(value) in PLAIN or isinstance(value, CLEAR)


def _is_routine(value: Any) -> bool:
    """Whether a value is a function, a method or one of their kinds; since 3.14 partials are."""
    return inspect.isroutine(value) and not isinstance(value, functools.partial)


def _is_named(value: Any) -> bool:
    """Whether the name of a function or class is enough: it is compiled, Python's or Lockstep's."""
    if not isinstance(getattr(value, "__self__", None), types.ModuleType | None):
        return False  # a bound method, which depends on its object
    if isinstance(value, types.FunctionType | type):
        return str(value.__module__).partition(".")[0] in {*sys.stdlib_module_names, "pipeline"}
    return _is_routine(value) and not hasattr(value, "__wrapped__")


class _Description:
    """Describes values in tuples of strings and numbers; errors name `root`, which holds them."""

    def __init__(self, root: str):
        self._root = root
        # The numbers of functions and classes, which may name each other, by their ids.
        self._numbers: dict[int, tuple[int, Any]] = {}

    def _refusal(self, value: Any, what: str, why: str) -> InvalidValue:
        subject = "it" if what == self._root else what
        return InvalidValue(
            f"{self._root} has no fingerprint: {subject} is {value!r:.80}, {why}. Use functions of "
            "modules, and dataclasses of plain values; or give the object an attribute "
            "`fingerprint`, or the function a fingerprint, and change it whenever the result would "
            'change: pipeline.templates.Function(…, fingerprint="v1")'
        )

    def of(self, value: Any, what: str) -> Any:
        """The description of a value, which `what` names in errors."""
        kind = type(value)
        if isinstance(value, enum.Enum):
            return _name(kind), value.name, self.of(value.value, what)
        if isinstance(value, PLAIN):
            base: Any = next(plain for plain in PLAIN if isinstance(value, plain))
            return kind.__name__, base.__repr__(value), getattr(value, "parts", None)
        if isinstance(value, CLEAR) or kind.__module__ == "typing":
            return kind.__name__, repr(value)
        if isinstance(value, types.CodeType):
            return self._of_code(value, what)
        if isinstance(value, re.Pattern):
            return "pattern", value.pattern, value.flags
        if isinstance(value, types.ModuleType | logging.Logger):
            return kind.__name__, getattr(value, "__name__", getattr(value, "name", ""))
        if isinstance(value, types.FunctionType | type) and not _is_named(value):
            is_new = id(value) not in self._numbers
            number, _ = self._numbers.setdefault(id(value), (len(self._numbers), value))
            describe: Any = self._of_class if isinstance(value, type) else self._of_function
            return number, describe(value, what) if is_new else None
        if not isinstance(value, types.FunctionType) and hasattr(value, "__wrapped__"):
            return self.of(value.__wrapped__, what)  # wrapped by a cache or a compiler
        if _is_routine(value) or isinstance(value, type):
            method = getattr(value, "__func__", None), getattr(value, "__self__", None)
            return _name(value), self.of(method, what)
        if isinstance(stated := getattr(value, "fingerprint", None), str):
            return kind.__qualname__, stated
        try:
            return kind.__name__, self._of_object(value, what)
        except RecursionError:
            raise self._refusal(value, what, "which contains itself") from None

    def _of_object(self, value: Any, what: str) -> Any:
        if isinstance(value, functools.partial):
            return self.of((value.func, value.args, value.keywords), what)
        if isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
            return str(value.dtype), value.shape, hashlib.sha256(value.tobytes()).hexdigest()
        if isinstance(value, list | tuple):
            return getattr(value, "_fields", ()), [self.of(entry, what) for entry in value]
        if isinstance(value, Mapping):
            entries = [*value.items(), getattr(value, "default_factory", None)]
            return [self.of(entry, what) for entry in entries]
        if isinstance(value, set | frozenset):  # their order differs between processes
            return sorted(repr(_Description(self._root).of(entry, what)) for entry in value)
        if not dataclasses.is_dataclass(value):
            raise self._refusal(value, what, f"an instance of {type(value).__name__}")
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        if "__dataclass_fields__" not in vars(type(value)):  # a subclass with its own attributes
            fields |= getattr(value, "__dict__", {})
        described = [(name, self.of(field, f"{what}.{name}")) for name, field in fields.items()]
        return self.of(type(value), what), described

    def _of_class(self, kind: type, what: str) -> Any:
        """The description of a class: its bases, and what its body defines."""
        described = [self.of(kind.__bases__, what)]
        fields = getattr(kind, "__dataclass_fields__", {})
        for name, entry in sorted({**vars(kind), **getattr(kind, "__members__", {})}.items()):
            if isinstance(entry, property | functools.cached_property):
                entry = getattr(entry, "fget", getattr(entry, "func", None))
            if isinstance(function := inspect.unwrap(cast(Any, entry)), types.FunctionType):
                by_dataclass = function.__code__.co_qualname.startswith("__create_fn__")
                skip = by_dataclass or name == "__annotate_func__"  # of annotations, since 3.14
            else:
                skip = hasattr(entry, "__get__") or name in fields
                skip |= name == "_abc_impl" or name[:1] == name[-1:] == "_"
            if not skip:
                described.append((name, self.of(entry, f"{what}.{name}")))
        return described

    def _of_function(self, function: types.FunctionType, what: str) -> Any:
        code = function.__code__
        defaults = [function.__defaults__, function.__kwdefaults__]
        described = [self._of_code(code, what), self.of(defaults, f"the defaults of {what}")]
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            if cell != types.CellType():  # not set yet
                content = self.of(cell.cell_contents, f"{name}, which {what} captured,")
                described.append((name, content))
        for name in sorted(set(_find_globals(code)) & set(function.__globals__)):
            value = function.__globals__[name]
            defined = _is_routine(value) or isinstance(value, type)
            if defined and getattr(value, "__module__", None) != function.__module__:
                described.append((name, _name(value)))
            elif not name.startswith("__"):
                described.append((name, self.of(value, f"{name}, which {what} names,")))
        return described

    def _of_code(self, code: types.CodeType, what: str) -> Any:
        with contextlib.suppress(OSError, TypeError, SyntaxError):
            source = textwrap.dedent(inspect.getsource(code))
            # If the file changed after it was imported, other lines are there.
            if re.search(rf"^(async )?def {code.co_name}\b", source, re.MULTILINE):
                return source
        return [getattr(code, f"co_{name}") for name in CODE], self.of(code.co_consts, what)


def _find_globals(code: types.CodeType) -> Iterator[str]:
    """The names that a function, and the functions inside it, look up in its module."""
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _find_globals(constant)
