"""Config: from the fields of a config, or flags, to a source, a template and a tokenizer."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath

from pipeline import registry
from pipeline.errors import InvalidValue
from pipeline.registry import import_object
from pipeline.text import sources, templates, tokenizers

ADVICE = "name it in config.tokenizer.{0}_token, or set config.tokenizer.{0} to False for no mark"


def open_source(fields: Mapping[str, Any], name: str) -> sources.Source | sources.Sharded:
    """The source that `fields` describe.

    They are either `source` (MODULE:NAME of a function or class that takes a split and returns a
    source or a sequence of records) and its `split`, or `files` (a name or glob, or a list of them)
    and their `kind`, or "", and its `options`. Errors call them `name`.
    """
    for key in ("source", "split", "kind"):
        if not isinstance(fields.get(key, ""), str):
            raise InvalidValue(f"{name}.{key} is {fields[key]!r:.200}; it must be text")
    path, files = fields.get("source", ""), fields.get("files", "")
    names = files if isinstance(files, list | tuple) else [files]
    if not all(isinstance(name, str) for name in names):
        raise InvalidValue(
            f"{name}.files is {files!r:.200}; give a name or glob, or a list or tuple of them"
        )
    if bool(path) == bool(files):
        raise InvalidValue(
            f"{name} has source={path!r} and files={files!r}; give one of them and leave the other "
            "empty, as in --config.train.files='data/*.jsonl.gz' --config.train.source="
        )
    if files:
        options = {n: value for n, value in fields.get("options", {}).items() if value is not None}
        return sources.open_files(files, fields.get("kind", ""), **options)
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
    if (chosen := registry.choose("templates", fields, "template", none="")) is None:
        return None
    template, options = chosen
    for name, value in options.items():
        if isinstance(value, str) and (escape := re.search(r"\\[nrt]", value)):
            raise InvalidValue(
                f"template.{name} is {value!r}, in which {escape[0]} is two characters, not a line "
                "break or a tab; in a shell, write $'…\\n…', with a dollar sign before the quotes; "
                "for a backslash, write your own template"
            )
        if isinstance(value, dict) and "kind" in value:
            options[name] = open_template(value)
    return template.make(**options)


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
    name, path = fields["kind"], fields["model"]
    kind = registry.find("tokenizers", name, "tokenizer.kind")
    make: Any = kind.make
    marks: Any = {
        option: fields[option] and (fields.get(f"{option}_token") or True)
        for option in ("begin", "end")
    }
    try:
        if not hasattr(make, "file"):
            if path:
                raise InvalidValue(
                    f"tokenizer.kind is {name!r}, which has no model, but tokenizer.model is "
                    f"{path!r}; leave it empty, or give the kind of that model"
                )
            return make(**marks)
        if path:
            return make(path, **marks)
        if not hasattr(make, "train"):
            raise InvalidValue(
                f"tokenizer.kind is {name!r} and tokenizer.model is empty; give the path of a "
                f"{make.file}, as in --config.tokenizer.model={make.file}"
            )
        if not texts:
            raise InvalidValue(
                "other programs write the first corpora, so there is no text to train a tokenizer "
                "on; give the tokenizer that they use, as in --config.tokenizer.model=PATH, or "
                "hold out examples for evaluation with config.hold_out"
            )
        return make.train(texts, fields["vocab_size"], model, seed=seed, **marks)
    except tokenizers.UnknownMark as error:
        other = "end" if error.option == "begin" else "begin"
        if fields.get(f"{error.option}_token") is None and fields.get(f"{other}_token"):
            only = {**fields, error.option: False}
            return open_tokenizer(only, texts, model, seed, advice)
        raise InvalidValue(f"{error.seen}; {advice.format(error.option)}") from error
