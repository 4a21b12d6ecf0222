"""Config: from the fields of a config, or flags, to a source, a template and a tokenizer."""

import importlib
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from etils import epath

from pipeline.errors import InvalidValue, require_one_of
from pipeline.text import sources, templates, tokenizers

TEMPLATES: dict[str, Callable] = {
    "": lambda: None,
    "chat": templates.Chat,
    "answer": templates.Answer,
    "preference": templates.Preference,
}
SOURCES = ("source", "files")
ADVICE = "name it in config.tokenizer.{0}_token, or set config.tokenizer.{0} to False for no mark"


def open_source(fields: Mapping[str, Any], name: str) -> sources.Source | sources.Sharded:
    """The source that `fields` describe.

    They are either `source` (MODULE:NAME of a function or class that takes a split and returns a
    source or a sequence of records) and its `split`, or `files` (a name or glob, or a list of them)
    and their `kind`, or "". Errors call them `name`.
    """
    for key in ("source", "split", "kind"):
        if not isinstance(fields.get(key, ""), str):
            raise InvalidValue(f"{name}.{key} is {fields[key]!r:.200}; it must be text")
    path, files = (fields.get(key, "") for key in SOURCES)
    several = files if isinstance(files, list | tuple) else [files]
    if not all(isinstance(each, str) for each in several):
        raise InvalidValue(
            f"{name}.files is {files!r:.200}; give a name or glob, or a list or tuple of them"
        )
    if bool(path) == bool(files):
        raise InvalidValue(
            f"{name} has source={path!r} and files={files!r}; give one of them and leave the other "
            "empty, as in --config.train.files='data/*.jsonl.gz' --config.train.source="
        )
    if files:
        return sources.open_files(files, fields.get("kind", ""))
    example = "such as configs.python_data:Functions"
    source: Any = import_object(path, f"{name}.source", example)(fields["split"])
    return source if hasattr(source, "fingerprint") else sources.Records(source)


def open_template(fields: Mapping[str, Any]) -> templates.Template | None:
    """The template that `fields` describe: its `kind`, "" for none, and its own fields.

    A field may itself be a template, such as the sides of "preference". A kind MODULE:NAME is that
    function, whose attribute `features` describes the sides that it returns.
    """
    if ":" in (kind := fields["kind"]):
        return import_object(kind, "template.kind", "such as my_data:with_pictures")
    make, options = choose(fields, "template", TEMPLATES)
    for name, value in options.items():
        if isinstance(value, str) and (escape := re.search(r"\\[nrt]", value)):
            raise InvalidValue(
                f"template.{name} is {value!r}, in which {escape[0]} is two characters, not a line "
                "break or a tab; in a shell, write $'…\\n…', with a dollar sign before the quotes; "
                "for a backslash, write your own template"
            )
        if isinstance(value, dict) and "kind" in value:
            options[name] = open_template(value)
    return make(**options)


def open_tokenizer(
    fields: Mapping[str, Any],
    texts: Sequence[tuple[Any, Any]],
    model: epath.Path,
    seed: int = 0,
    advice: str = ADVICE,
) -> tokenizers.Tokenizer:
    """The tokenizer that `fields` describe.

    They are its `kind`, its `model`, and whether it marks `begin` and `end` of texts, with its own
    tokens, or with those in `begin_token` and `end_token`, if they are given. If only one is given,
    a tokenizer that adds no other mark has only that one. Without a model, that of "sentencepiece"
    is trained, with `vocab_size` ids, on a sample that `seed` draws, and stored as the file
    `model`. `texts` are pairs of a source and what holds its text, as for `train_sentencepiece`.
    `advice` says what to do if the tokenizer lacks a mark.
    """
    kind, path = fields["kind"], fields["model"]
    marks: Any = {
        name: fields[name] and (fields.get(f"{name}_token") or True) for name in ("begin", "end")
    }
    require_one_of("tokenizer.kind", kind, ("sentencepiece", "huggingface", "bytes"))
    try:
        if kind == "bytes":
            for option, mark in marks.items():
                if isinstance(mark, str):
                    raise tokenizers.UnknownMark(f"bytes have no token {mark!r}", option)
            if path:
                raise InvalidValue(
                    "tokenizer.kind is 'bytes', which has no model, but tokenizer.model is "
                    f"{path!r}; leave it empty, or give the kind of that model"
                )
            return tokenizers.Bytes(**marks)
        if kind == "huggingface":
            if not path:
                raise InvalidValue(
                    "tokenizer.kind is 'huggingface' and tokenizer.model is empty; give the path "
                    "of a tokenizer.json, as in --config.tokenizer.model=tokenizer.json"
                )
            return tokenizers.HuggingFace(path, **marks)
        if path:
            return tokenizers.SentencePiece(path, **marks)
        if not texts:
            raise InvalidValue(
                "other programs write the first corpora, so there is no text to train a tokenizer "
                "on; give the tokenizer that they use, as in --config.tokenizer.model=PATH, or "
                "hold out examples for evaluation with config.hold_out"
            )
        size = fields["vocab_size"]
        return tokenizers.train_sentencepiece(texts, size, model, seed=seed, **marks)
    except tokenizers.UnknownMark as error:
        other = "end" if error.option == "begin" else "begin"
        if fields.get(f"{error.option}_token") is None and fields.get(f"{other}_token"):
            only = {**fields, error.option: False}
            return open_tokenizer(only, texts, model, seed, advice)
        raise InvalidValue(f"{error.seen}; {advice.format(error.option)}") from error


def import_object(path: str, what: str, example: str) -> Any:
    """The function, class or object at MODULE:NAME that can be called."""
    module, _, attribute = path.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
        if not callable(found):
            raise InvalidValue(f"{attribute} is a {type(found).__name__}")
        return found
    except (ImportError, AttributeError, ValueError) as error:
        raise InvalidValue(
            f"{what} is {path!r}, which cannot be imported: {error}. It must be MODULE:NAME, "
            f"{example}, and Python must find MODULE in the current directory or on PYTHONPATH"
        ) from error


def choose(
    fields: Mapping[str, Any], name: str, kinds: Mapping[str, Callable], **others: Any
) -> tuple[Callable, dict[str, Any]]:
    """The callable that `fields["kind"]` names, and the other fields that are not None."""
    options = {key: value for key, value in fields.items() if value is not None}
    kind = options.pop("kind")
    require_one_of(f"{name}.kind", kind, kinds)
    try:
        inspect.signature(kinds[kind]).bind(**others, **options)
    except TypeError as error:  # it names the field
        raise InvalidValue(
            f"{name}.kind {kind!r} does not fit its other fields: {error}; give the fields of that "
            f"kind, or another one of {', '.join(filter(None, kinds))}"
        ) from None
    return kinds[kind], options
