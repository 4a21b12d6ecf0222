"""Prepare: makes a corpus, pairs, or the corpora of a config from the command line."""

import argparse
import functools
import importlib
import os
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

from pipeline import registry
from pipeline.corpus.engines import Engine, Processes, Ray
from pipeline.corpus.in_place import InPlace
from pipeline.corpus.interface import AnyCorpus
from pipeline.corpus.links import link
from pipeline.corpus.preparing.job import Job
from pipeline.corpus.preparing.preparation import prepare, prepare_share
from pipeline.corpus.token_formats import describe_use, recognise
from pipeline.errors import InvalidValue, NotInstalled
from pipeline.fs.atomic import as_path
from pipeline.text import sources, templates
from pipeline.text.config import open_template, open_tokenizer
from pipeline.text.features import Feature
from pipeline.text.templates import Template

MARK_ADVICE = "name it with --{0}-token TOKEN, or give --{0}-token '' for no mark"


def prepare_config(path: str, workdir: str | None) -> tuple[AnyCorpus, dict[str, Any]]:
    """Prepares the corpora of a config; returns the training corpus and the options of its plan."""
    trainer = _import_trainer()
    config = trainer.load_config(path)
    directory = as_path(workdir or trainer.default_workdir(path)) / "corpus"
    corpus, _ = trainer.prepare_corpora(config, directory)
    return corpus, {**config.batches, **config.get("mixture", {}), "seed": config.seed}


def _import_trainer() -> Any:
    """The package `trainer` beside this one, or in the current directory: that of a checkout."""
    for folder in (pathlib.Path(__file__).resolve().parents[2], pathlib.Path.cwd()):
        if (folder / "trainer" / "corpora.py").exists() and os.fspath(folder) not in sys.path:
            sys.path.append(os.fspath(folder))
    try:
        trainer = importlib.import_module("trainer")
    except ModuleNotFoundError as error:
        if error.name != "trainer":
            raise
        trainer = None
    if hasattr(trainer, "prepare_corpora"):  # and not a package of another project
        return trainer
    raise NotInstalled(
        "a config is read by trainer/ of a checkout of Lockstep, which is not installed with the "
        "package; run this command in a checkout, or give the directory of a corpus or a run"
    )


def open_flags(tokens: Sequence[str], paths: Sequence[str]) -> InPlace:
    """The corpus that `--tokens FORMAT NAME=VALUE …` describes."""
    form, *texts = tokens
    return InPlace(form, paths, **registry.find("tokens", form, "--tokens").read(texts, "--tokens"))


def prepare_files(arguments: argparse.Namespace) -> str:
    """Prepares a corpus or pairs, or tokenises a share of one; returns a message."""
    if not arguments.into:
        raise InvalidValue("--into is missing; give the directory of the corpus")
    if not any(arguments.source):
        raise InvalidValue("no files are given; name some, such as data/*.txt")
    directory = as_path(arguments.into)
    if arguments.tokens:
        linked = link(open_flags(arguments.tokens, arguments.source), directory)
        return f"{linked}\n\nnow look at it: lockstep report {arguments.into}"
    kind, *options = arguments.kind
    for name in arguments.source:
        if not kind and (form := recognise(name)):
            raise InvalidValue(f"{name} {describe_use(name, form)}")
    engine = _engine(arguments)
    values = registry.find("records", kind, "--kind").read(options, "--kind") if kind else {}
    source = sources.open_files(arguments.source, kind, **values)
    columns = set() if arguments.template else source.names()
    if arguments.field not in columns and "input_ids" in columns:
        if source.in_place:
            form = registry.find("tokens", source.in_place)
            raise InvalidValue(f"{source} {describe_use(arguments.source[0], form)}")
        raise InvalidValue(
            f"{source} holds tokens, and prepare makes them of text; copy these in Python with "
            "pipeline.Corpus.from_arrays(record['input_ids'] for record in source), where source "
            f"is pipeline.sources.{type(source).__name__}({arguments.source[0]!r})"
        )
    template = _template(arguments.template) if arguments.template else None
    of = functools.partial(templates.texts, template) if template else arguments.field
    model = directory / "tokenizer.model"
    tokenizer = open_tokenizer(
        _tokenizer_fields(arguments), [(source, of)], model, advice=MARK_ADVICE
    )
    recipe: Any = {
        "field": arguments.field,
        "template": template,
        "on_error": arguments.on_error,
        "strict": arguments.strict,
    }
    if arguments.key is not None:
        key = {arguments.key: Feature("example", key=True)}
        recipe["features"] = {**templates.traits_of(template).features, **key}
    if arguments.of is not None:
        job = Job(source, tokenizer, **recipe)
        prepare_share(job, directory, (arguments.task, arguments.of), engine=engine)
        return (
            f"task {arguments.task} of {arguments.of} is done; when all are, run the same command "
            "without --task and --of to assemble the corpus"
        )
    corpus = prepare(source, tokenizer, directory, engine=engine, **recipe)
    return f"{corpus}\n\nnow look at it: lockstep report {arguments.into}"


def _template(words: Sequence[str]) -> Template | None:
    name, *options = words
    sys.path.append(os.getcwd())  # for MODULE:NAME
    if ":" in name:
        return open_template({"kind": name})
    kind = registry.find("templates", name, "--template")
    return open_template({"kind": name, **kind.read(options, "--template")})


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
    kinds = registry.kinds("tokenizers")
    files = {kind.name: getattr(kind.make, "file", "") for kind in kinds}
    if name in files or not name:  # the last is refused
        return {"kind": name, "model": "", **fields}
    endings = {kind: os.path.splitext(file)[1] for kind, file in files.items() if file}
    matches = [kind for kind, ending in endings.items() if name.endswith(ending)]
    matches += [kind for kind in endings if (as_path(name) / files[kind]).exists()]
    return {"kind": next(iter(matches), "sentencepiece"), "model": name, **fields}
