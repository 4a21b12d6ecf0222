"""Prepare: makes a corpus, pairs, or the corpora of a config from the command line."""

import argparse
import ast
import contextlib
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from pipeline.corpus.engines import Engine, Processes, Ray
from pipeline.corpus.in_place import InPlace
from pipeline.corpus.interface import AnyCorpus
from pipeline.corpus.links import link
from pipeline.corpus.preparing.job import Job
from pipeline.corpus.preparing.preparation import prepare_share
from pipeline.corpus.tokens.formats import FORMATS, describe_use, recognise
from pipeline.errors import InvalidValue
from pipeline.fs.atomic import as_path
from pipeline.text import sources
from pipeline.text.sources.tables import Tables
from pipeline.text.templates import Template
from pipeline.trainer import corpora
from pipeline.trainer.run_config import default_workdir, load_config

JSON_FIELDS = ("weights", "last_only", "rejected")  # fields of templates that may be no text
MARK_ADVICE = "name it with --{0}-token TOKEN, or give --{0}-token '' for no mark"


def prepare_config(path: str, workdir: str | None) -> tuple[AnyCorpus, dict[str, Any]]:
    """Prepares the corpora of a config; returns the training corpus and the options of its plan."""
    config = load_config(path)
    directory = as_path(workdir or default_workdir(path)) / "corpus"
    corpus, _ = corpora.prepare_corpora(config, directory)
    return corpus, {**config.batches, **config.get("mixture", {}), "seed": config.seed}


def open_flags(tokens: Sequence[str], paths: Sequence[str]) -> InPlace:
    """The corpus that `--tokens FORMAT NAME=VALUE …` describes; values are Python, or strings."""
    form, *texts = tokens
    if bare := [text for text in texts if "=" not in text]:
        raise InvalidValue(f"{bare[0]!r} is no option; give NAME=VALUE, such as dtype=uint16")
    options: dict[str, Any] = _split(texts, "--tokens")
    for name, value in options.items():
        with contextlib.suppress(ValueError, SyntaxError):
            options[name] = ast.literal_eval(value)
    return InPlace(form, paths, **options)


def _split(texts: Sequence[str], flag: str) -> dict[str, Any]:
    """The values of `NAME=VALUE …` by name, as text."""
    found: dict[str, Any] = {}
    for name, _, value in (text.partition("=") for text in texts):
        if name in found:
            raise InvalidValue(f"{name}= is given twice to {flag}; remove one of the two")
        found[name] = value
    return found


def prepare_files(arguments: argparse.Namespace) -> str:
    """Prepares a corpus or pairs, or tokenises a share of one; returns a message."""
    if not arguments.into:
        raise InvalidValue("--into is missing; give the directory of the corpus")
    if not any(arguments.source):
        raise InvalidValue("no files are given; name some, such as data/*.txt")
    directory = as_path(arguments.into)
    if arguments.tokens:
        corpus = link(open_flags(arguments.tokens, arguments.source), directory)
        return f"{corpus}\n\nnow look at it: lockstep report {arguments.into}"
    for name in arguments.source:
        if not arguments.kind and (form := recognise(name)):
            raise InvalidValue(f"{name} {describe_use(name, form)}")
    engine = _engine(arguments)
    source = sources.open_files(arguments.source, arguments.kind)
    columns = source.names() if isinstance(source, Tables) and not arguments.template else set()
    if arguments.field not in columns and "input_ids" in columns:
        if isinstance(source, sources.ArrowFiles):
            raise InvalidValue(f"{source} {describe_use(arguments.source[0], FORMATS['arrow'])}")
        raise InvalidValue(
            f"{source} holds tokens, and prepare makes them of text; copy these in Python with "
            "pipeline.Corpus.from_arrays(record['input_ids'] for record in source), where source "
            f"is pipeline.sources.ParquetFiles({arguments.source[0]!r})"
        )
    rules: Any = {"on_error": arguments.on_error, "strict": arguments.strict}
    template = _template(arguments.template) if arguments.template else None
    text = corpora.Text(source, arguments.field, template, rules)
    model = directory / "tokenizer.model"
    tokenizer = corpora.open_tokenizer(
        _tokenizer_fields(arguments), [text], model, advice=MARK_ADVICE
    )
    if arguments.of is not None:
        job = Job(source, tokenizer, arguments.field, template, **rules)
        prepare_share(job, directory, (arguments.task, arguments.of), engine=engine)
        return (
            f"task {arguments.task} of {arguments.of} is done; when all are, run the same command "
            "without --task and --of to assemble the corpus"
        )
    corpus = text.prepare(tokenizer, directory, engine=engine)
    return f"{corpus}\n\nnow look at it: lockstep report {arguments.into}"


def _template(words: Sequence[str]) -> Template | None:
    kind, *given = words
    if not all("=" in each for each in given):
        raise InvalidValue(
            f"--template is {' '.join(words)!r}; give a kind and fields as NAME=TEXT, as in "
            "--template answer prompt='{question}' answer='{answer}', or a function as MODULE:NAME"
        )
    sys.path.append(os.getcwd())  # for MODULE:NAME
    fields = _split([f"kind={kind}", *given], "--template")
    for name in {*JSON_FIELDS} & {*fields}:
        with contextlib.suppress(ValueError):  # other values are refused by the template
            fields[name] = json.loads(fields[name])
    return corpora.open_template(fields)


def _engine(arguments: argparse.Namespace) -> Engine:
    if (arguments.task is None) != (arguments.of is None):
        raise InvalidValue("--task and --of go together; give both, as in --task 0 --of 100")
    if arguments.engine == "processes":
        if arguments.engine_options:
            raise InvalidValue("--engine-options need --engine ray; remove them")
        return Processes(arguments.workers)
    if arguments.workers is not None or arguments.of is not None:
        raise InvalidValue(
            "--workers, --task and --of need --engine processes, not ray; remove them"
        )
    return Ray(arguments.engine_options)


def _tokenizer_fields(arguments: argparse.Namespace) -> dict[str, Any]:
    """The fields of `open_tokenizer`; `--tokenizer` is a kind, or the file of a model."""
    name, fields = arguments.tokenizer, {"vocab_size": arguments.vocab_size}
    for mark in ("begin", "end"):
        token = getattr(arguments, f"{mark}_token")
        if token and arguments.no_marks:
            raise InvalidValue(f"--{mark}-token is {token!r}, and --no-marks is given; remove one")
        fields |= {mark: token != "" and not arguments.no_marks, f"{mark}_token": token}
    if name in ("bytes", "sentencepiece", ""):  # the last is refused
        return {"kind": name, "model": "", **fields}
    is_json = name.endswith(".json") or (as_path(name) / "tokenizer.json").exists()
    kind = "huggingface" if is_json else "sentencepiece"
    return {"kind": kind, "model": name, **fields}
