"""Registry: the kinds of records, tokens, templates, tokenizers and views, each by its name.

A kind is a class or a function that is called with options:

    find("templates", "chat").make(last_only=True)

Its keyword parameters are its options. They have the same names in Python, in a shell
(`--template chat last_only=true`) and in a config (`config.template.last_only = True`). Their help
is what its docstring says of them, under `Args:`, `Attributes:` or `Options:`.

`KINDS` lists those of this package. Another package registers a kind by an entry point in its
pyproject.toml, of the group `lockstep.records`, `.tokens`, `.templates`, `.tokenizers` or `.views`:

    [project.entry-points."lockstep.templates"]
    shout = "shouting:Shout"

Once that package is installed, `--template shout field=question` works, and so does a config with
`template.kind = "shout"`. `examples/shouting` is such a package. Nothing is imported before its
kind is used.
"""

import ast
import functools
import importlib
import importlib.metadata
import inspect
import json
import os
import re
import textwrap
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.errors import InvalidType, InvalidValue, require_one_of, suggest_option

# By group, the kinds of this package: MODULE:NAME of what makes one. It is called with
# - records: the paths, and options; it returns a `pipeline.text.sources.Sharded`
# - tokens: the paths, and options; it returns a `pipeline.corpus.token_files.TokenFiles`
# - templates: options; it returns a `pipeline.text.templates.Template`
# - tokenizers: the path of its file, if it has an attribute `file`, and options; it returns a
#   `pipeline.text.tokenizers.Tokenizer`
# - views: the corpus, and options; it returns a `pipeline.corpus.view.View`
KINDS: dict[str, dict[str, str]] = {
    "records": {
        "text": "pipeline.text.sources.lines:TextFiles",
        "jsonl": "pipeline.text.sources.lines:JsonLines",
        "csv": "pipeline.text.sources.csv_files:Csv",
        "parquet": "pipeline.text.sources.parquet_files:ParquetFiles",
        "arrow": "pipeline.text.sources.arrow_files:ArrowFiles",
    },
    "tokens": {
        "arrow": "pipeline.corpus.tokens.arrow:arrow",
        "npy": "pipeline.corpus.tokens.npy:npy",
        "megatron": "pipeline.corpus.tokens.megatron:megatron",
        "flat": "pipeline.corpus.tokens.flat:flat",
    },
    "templates": {
        "answer": "pipeline.text.templates:Answer",
        "chat": "pipeline.text.templates:Chat",
        "preference": "pipeline.text.templates:Preference",
    },
    "tokenizers": {
        "bytes": "pipeline.text.tokenizers:Bytes",
        "sentencepiece": "pipeline.text.tokenizers:SentencePiece",
        "huggingface": "pipeline.text.tokenizers:HuggingFace",
    },
    "views": {
        "masked": "pipeline.corpus.views.masked:Masked",
        "fill_in_the_middle": "pipeline.corpus.views.middle:FillInTheMiddle",
    },
}


@dataclass(frozen=True)
class Option:
    """An option of a kind.

    Attributes:
        name: the same in Python, in a shell and in a config.
        type: the annotation of the parameter; None if it has none.
        required: whether it has no default.
        help: what the docstring says of it, on one line; "" if nothing.
    """

    name: str
    type: Any
    required: bool
    help: str

    @property
    def names_files(self) -> bool:
        """Whether its values are names of files: its type has `os.PathLike`.

        >>> Option("weights", str | os.PathLike | None, False, "").names_files
        True
        """
        return os.PathLike in (self.type, *typing.get_args(self.type))

    def read(self, text: str) -> Any:
        """The value of a text from a shell, as JSON or Python spell it, or the text itself.

        If the option takes texts, only lists and dicts are read so.

        >>> Option("end", int | None, False, "").read("50256")
        50256
        >>> Option("null", str | dict, False, "").read("0")
        '0'
        """
        for read in () if self.type is str else (json.loads, ast.literal_eval):
            try:
                value = read(text)
            except (ValueError, SyntaxError, RecursionError, MemoryError):
                continue
            if str not in typing.get_args(self.type) or isinstance(value, list | dict | tuple):
                return value
        return text


@dataclass(frozen=True)
class Kind:
    """A kind of a group.

    Attributes:
        group: such as "templates".
        name: by which commands and configs call it.
        make: the class or function; it is called with the options as keywords.
    """

    group: str
    name: str
    make: Callable[..., Any]

    @property
    def about(self) -> str:
        """The first sentence of its docstring."""
        return " ".join((inspect.getdoc(self.make) or "").partition("\n\n")[0].split())

    @functools.cached_property
    def options(self) -> dict[str, Option]:
        """The options by name, without what it is called with beside them, such as paths."""
        help_of, hints = _read_help(self.make), _read_types(self.make)
        # Before them are the paths, or the corpus of a view; of tokenizers, the path of a file.
        has_file = self.group == "tokenizers" and hasattr(self.make, "file")
        first = 1 if has_file or self.group in ("records", "tokens", "views") else 0
        parameters = [*inspect.signature(self.make).parameters.values()][first:]
        return {
            each.name: Option(
                each.name,
                hints.get(each.name),
                each.default is each.empty,
                help_of.get(each.name, ""),
            )
            for each in parameters
            if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
        }

    def check(self, given: Mapping[str, Any], what: str) -> None:
        """Refuses options that it does not have, or that are missing; `what` names it in errors.

        Raises:
            TypeError: one is unknown, or one that has no default is not given.
        """
        for name in given:
            if name not in self.options:
                raise InvalidType(
                    f"{what} {self.name!r} has no option {suggest_option(name, [*self.options])}"
                )
        for name, option in self.options.items():
            if option.required and name not in given:
                raise InvalidType(
                    f"{what} {self.name!r} needs {name!r}"
                    f"{f', {option.help}' if option.help else ''}; give it as well"
                )

    def read(self, texts: Sequence[str], flag: str) -> dict[str, Any]:
        """The options of `NAME=VALUE …`, as a shell gives them to `flag`."""
        given: dict[str, Any] = {}
        for name, equals, value in (text.partition("=") for text in texts):
            if not equals:
                raise InvalidValue(
                    f"{flag} {self.name} has {name!r}, which is no option; give NAME=VALUE, with "
                    f"the names {', '.join(self.options) or 'of none'}"
                )
            if name in given:
                raise InvalidValue(f"{name}= is given twice to {flag}; remove one of the two")
            given[name] = self.options.get(name, Option(name, None, False, "")).read(value)
        return given

    def __str__(self) -> str:
        lines = [f"{self.name}: {self.about}"]
        for option in self.options.values():
            about = f"{option.name}=  {option.help}".rstrip()
            lines += textwrap.wrap(about, 96, initial_indent="  ", subsequent_indent="      ")
        return "\n".join(lines)


def names(group: str) -> list[str]:
    """The names of all kinds of a group: those of this package, then those of others, sorted."""
    return [*KINDS[group], *sorted({*_registered(group)} - {*KINDS[group]})]


def find(group: str, name: str, what: str = "", *others: str) -> Kind:
    """The kind of a group with a name; `what` names the option in errors, such as `--template`.

    `others` are values of the option that are no kinds.

    Raises:
        ValueError: there is none, several packages register it, or it cannot be imported.
    """
    require_one_of(what or f"the kind of {group}", name, [*others, *names(group)])
    registered = _registered(group).get(name, [])
    if len(registered) + (name in KINDS[group]) > 1:
        packages = ["this package"] * (name in KINDS[group])
        packages += [package for _, package in registered]
        raise InvalidValue(
            f"{' and '.join(packages)} each have a kind {name!r} of {group}; uninstall one of them"
        )
    place = registered[0][0] if registered else KINDS[group][name]
    return Kind(group, name, import_object(place, f"the kind {name!r} of {group}"))


def choose(
    group: str, fields: Mapping[str, Any], what: str, none: str | None = None
) -> tuple[Kind, dict[str, Any]] | None:
    """The kind that `fields["kind"]` names, and its options: the other fields that are not None.

    `what` names the fields in errors. The kind `none` stands for no kind; then this is None.

    Raises:
        ValueError: see `find`.
        TypeError: see `Kind.check`.
    """
    options = {key: value for key, value in fields.items() if value is not None}
    if (name := options.pop("kind")) == none:
        return None
    kind = find(group, name, f"{what}.kind", *[] if none is None else [none])
    kind.check(options, f"{what}.kind")
    return kind, options


def kinds(group: str) -> Iterator[Kind]:
    """All kinds of a group."""
    return (find(group, name) for name in names(group))


def list_options(*groups: str) -> dict[str, Any]:
    """The types of the options of all kinds of some groups, by name.

    An option of several types is a text if it is one in any kind; else its type is None.
    """
    found: dict[str, list[Any]] = {}
    for kind in (kind for group in groups for kind in kinds(group)):
        for option in kind.options.values():
            found.setdefault(option.name, []).append(option.type)
    return {
        name: str if str in types else types[0] if len({*map(str, types)}) == 1 else None
        for name, types in found.items()
    }


def import_object(place: str, what: str, advice: str = "") -> Any:
    """The function or class at MODULE:NAME.

    Raises:
        ValueError: it cannot be imported or called. `what` names it, and `advice` is an example.
    """
    module, _, attribute = place.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
        if not callable(found):
            raise InvalidValue(f"{attribute} is a {type(found).__name__}")
        return found
    except (ImportError, AttributeError, ValueError) as error:
        raise InvalidValue(
            f"{what} is {place!r}, which cannot be imported: {error}. It must be MODULE:NAME"
            f"{advice and f', {advice}'}, and Python must find MODULE in the current directory or "
            "on PYTHONPATH"
        ) from error


@functools.cache
def _registered(group: str) -> dict[str, list[tuple[str, str]]]:
    """By name, the place of each kind that other packages register, and its package."""
    found: dict[str, list[tuple[str, str]]] = {}
    for entry in importlib.metadata.entry_points(group=f"lockstep.{group}"):
        package = entry.dist.name if entry.dist else entry.value
        found.setdefault(entry.name, []).append((entry.value, package))
    return found


def _read_types(make: Callable[..., Any]) -> Mapping[str, Any]:
    """The types of the parameters of a function or class."""
    function: Any = make.__init__ if isinstance(make, type) else make  # type: ignore[misc]
    try:
        return typing.get_type_hints(function)
    except (NameError, TypeError):  # names that only a type checker has
        return getattr(function, "__annotations__", {})


def _read_help(make: Callable[..., Any]) -> dict[str, str]:
    """What the docstring of a function or class, or of its base, says of each parameter."""
    found: dict[str, str] = {}
    for each in reversed(make.__mro__) if isinstance(make, type) else [make]:
        text = inspect.cleandoc(each.__doc__ or "")
        for section in re.findall(r"^(?:Args|Attributes|Options):\n((?:(?: .*)?\n?)*)", text, re.M):
            entries = re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", section, re.M)
            found |= {name: " ".join(about.split()) for name, about in entries}
    return found
