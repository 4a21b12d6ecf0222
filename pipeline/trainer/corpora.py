"""From the fields of a config to corpora: all fields are checked, then corpora are prepared."""

import functools
import importlib
import inspect
import json
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from etils import epath

from pipeline.corpus.corpora import Corpora
from pipeline.corpus.in_place import InPlace
from pipeline.corpus.interface import AnyCorpus
from pipeline.corpus.links import link
from pipeline.corpus.masked import Masked
from pipeline.corpus.middle import FillInTheMiddle
from pipeline.corpus.opening import open_corpus
from pipeline.corpus.preparation import prepare
from pipeline.corpus.tasks import CAUSAL, Task
from pipeline.errors import InvalidValue, require_one_of, require_share
from pipeline.planning.identity import fingerprint_of
from pipeline.steps import hosts
from pipeline.text import sources, templates, tokenizers

TEMPLATES: dict[str, Callable] = {
    "": lambda: None,
    "chat": templates.Chat,
    "answer": templates.Answer,
    "preference": templates.Preference,
}
VIEWS: dict[str, Callable] = {"causal": lambda corpus, seed: corpus}
VIEWS |= {view.kind: view for view in (Masked, FillInTheMiddle)}
SOURCES = ("source", "files")
MAKER = "such as configs.vision:make_corpus"
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
    source: Any = _import(path, f"{name}.source", example)(fields["split"])
    return source if hasattr(source, "fingerprint") else sources.Records(source)


def _import(path: str, what: str, example: str) -> Any:
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


def open_template(fields: Mapping[str, Any]) -> templates.Template | None:
    """The template that `fields` describe: its `kind`, "" for none, and its own fields.

    A field may itself be a template, such as the sides of "preference". A kind MODULE:NAME is that
    function, whose attribute `features` describes the sides that it returns.
    """
    if ":" in (kind := fields["kind"]):
        return _import(kind, "template.kind", "such as my_data:with_pictures")
    make, options = _choose(fields, "template", TEMPLATES)
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


def open_view(fields: Mapping[str, Any], seed: int) -> Callable[[Any], Any]:
    """A function from a corpus to the view of the `kind` and options in `fields`."""
    make, options = _choose(fields, "task", VIEWS, corpus=None, seed=seed)
    return functools.partial(make, seed=seed, **options)


def _choose(
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


@dataclass(frozen=True)
class Text:
    """The text of a corpus that is not prepared yet."""

    source: sources.Source | sources.Sharded
    field: str
    template: templates.Template | None
    rules: Mapping[str, Any]  # `on_error` and `strict`, as for `prepare`

    @property
    def texts(self) -> tuple[Any, Any]:
        """The source and what holds its text, as for `train_sentencepiece`."""
        template = self.template
        of = self.field if template is None else functools.partial(templates.texts, template)
        return self.source, of

    def prepare(
        self,
        tokenizer: tokenizers.Tokenizer,
        directory: epath.Path,
        task: Task = CAUSAL,
        **options: Any,
    ) -> Any:
        """The corpus in `directory`; `options` are other options of `prepare`."""
        options |= {**self.rules, "field": self.field, "template": self.template, "task": task}
        return prepare(self.source, tokenizer, directory, **options)


def _open_text(name: str, fields: Any, config: Any) -> Text:
    template = open_template(fields.get("template", config.template).to_dict())
    field = fields.field
    if not isinstance(field, str):
        if template is not None or config.task.kind != "causal":
            raise InvalidValue(
                f"{name}.field is {field!r}; it must be one name, or two for pairs, with "
                "template.kind '' and task.kind 'causal'"
            )
        field, template = "", templates.Pair.of(field)
    return Text(open_source(fields, name), field, template, config.get("prepare", {}))


@dataclass(frozen=True)
class Part:
    """A corpus of a config: of text, in token files, made by a function, or another program's."""

    folder: str  # its directory in that of all corpora
    name: str  # of its fields, for messages
    fields: Any
    text: Text | None = None
    make: Callable | None = None  # the function that the field `corpus` names

    @classmethod
    def of(cls, folder: str, fields: Any, config: Any) -> "Part":
        """The part with these fields of `config`, which are checked."""
        name = f"config.{folder.replace('/', '.')}"
        if path := fields.get("corpus"):
            return cls(folder, name, fields, make=_import(path, f"{name}.corpus", MAKER))
        if fields.get("format"):
            return cls(folder, name, fields)
        return cls(folder, name, fields, text=_open_text(name, fields, config))

    def link(self, directory: epath.Path, tokenizer: Any, task: Task, config: Any) -> None:
        """Links its token files, if it has such, as a corpus in its directory."""
        fields = self.fields
        if not fields.get("format"):
            return
        if config.template.kind:
            raise InvalidValue(f"{self.name} has tokens, but also a template; remove one of them")
        if not isinstance(fields.files, str) or not fields.files:
            raise InvalidValue(
                f"{self.name}.files is {fields.files!r}; with a format, it must name token files, "
                "as text, with commas between several"
            )
        options = {**fields.get("options", {}), "task": task, "tokenizer": tokenizer}
        tokens = InPlace(fields.format, fields.files.split(","), **options)
        if tokens.vocab_size is None:
            raise InvalidValue(
                f"the number of ids is unknown; give {self.name}.options.vocab_size, or the "
                "tokenizer of the ids as config.tokenizer"
            )
        link(tokens, directory / self.folder)


def open_tokenizer(
    fields: Mapping[str, Any],
    texts: Sequence[Text],
    model: epath.Path,
    seed: int = 0,
    advice: str = ADVICE,
) -> tokenizers.Tokenizer:
    """The tokenizer that `fields` describe.

    They are its `kind`, its `model`, and whether it marks `begin` and `end` of texts, with its own
    tokens, or with those in `begin_token` and `end_token`, if they are given. If only one is given,
    a tokenizer that adds no other mark has only that one. Without a model, that of "sentencepiece"
    is trained, with `vocab_size` ids, on a sample of `texts` that `seed` draws, and stored as the
    file `model`. `advice` says what to do if the tokenizer lacks a mark.
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
        every = [text.texts for text in texts]
        size = fields["vocab_size"]
        return tokenizers.train_sentencepiece(every, size, model, seed=seed, **marks)
    except tokenizers.UnknownMark as error:
        other = "end" if error.option == "begin" else "begin"
        if fields.get(f"{error.option}_token") is None and fields.get(f"{other}_token"):
            only = {**fields, error.option: False}
            return open_tokenizer(only, texts, model, seed, advice)
        raise InvalidValue(f"{error.seen}; {advice.format(error.option)}") from error


def prepare_corpora(config: Any, directory: epath.Path) -> tuple[Any, Any]:
    """The corpora for training and evaluation, prepared now if they do not exist yet.

    All fields are checked first. configs/quickstart.py describes them.

    Args:
        config: `train` and `eval`, each with the fields of `open_source` and `field`, the name of
            a record's text, or for pairs two names, of inputs and targets; or for token files of
            another program `format`, `files` and `options`; or `corpus`, MODULE:NAME of a function
            that takes `split` and the directory, and returns a corpus of any kind that it writes
            there; for a mixture, `sources` instead of `train`, such fields by name; if others may
            join `train` later, `added`, by name. Without `train` and `sources`, only the second
            corpus is made. With `hold_out`, that share of the first is the second, and `eval` is
            not read.
        directory: the directory of the corpora, each in a directory called like its fields.

    Returns:
        The training corpus, and that for evaluation. The first is `Corpora` for a mixture, in the
        order in which phases name the sources, or with "train" first if others may join.
    """
    mixture, added = config.get("mixture", {}), config.get("added", {})
    if ("sources" in config) != ("weights" in mixture):
        raise InvalidValue(
            "config.sources has several corpora, and config.mixture.weights their shares; give "
            "both or neither"
        )
    # The fields of each corpus by its directory, beginning with those that training begins with.
    if "sources" in config:
        names, num_first = order_sources(config.sources, mixture.weights)
        training = {f"sources/{name}": config.sources[name] for name in names}
    elif "train" not in config:
        names, num_first, training = [], 0, {}
    else:
        names, num_first = ["train", *added], 1
        if "train" in added:
            raise InvalidValue("config.added has a corpus 'train'; give it another name")
        training = {"train": config.train, **{f"added/{name}": added[name] for name in added}}
    share, every = config.get("hold_out"), {**training, "eval": config.eval}
    if share:
        require_share("config.hold_out", share)
        del every["eval"]
    parts = [Part.of(folder, fields, config) for folder, fields in every.items()]
    texts = [part.text for part in parts if part.text]
    pairs = {hasattr(text.template, "sides") for text in texts}
    if len(pairs) > 1:
        raise InvalidValue(
            "some corpora of the config are pairs, which have two fields, and others have one; "
            "give each corpus one name, or for pairs each corpus two"
        )
    view = open_view(config.task.to_dict(), config.seed)
    task = getattr(VIEWS[config.task.kind], "needs", CAUSAL)
    trained = config.tokenizer.kind == "sentencepiece" and not config.tokenizer.model
    tokenizer: Any = None
    if texts or not trained:
        first_texts = [part.text for part in parts[:num_first] if part.text]
        model = directory / "tokenizer.model"
        tokenizer = open_tokenizer(config.tokenizer, first_texts, model, config.seed)
    for part in parts:
        part.link(directory, tokenizer, task, config)
    for part in parts:
        if part.text is not None:
            part.text.prepare(tokenizer, directory / part.folder, task)
    cached = config.get("cache", {})
    cache: Any = {"cache": cached.get("directory"), "cache_bytes": cached.get("bytes")}
    opened: list[Any] = []
    for part in parts:
        place = directory / part.folder
        made = part.make(part.fields.split, place) if part.make else open_corpus(place, **cache)
        opened.append(view(made))
    several = opened[: len(training)]
    if not several:
        return None, opened[-1]
    first = (
        several[0]
        if len(several) == 1 and "sources" not in config
        else Corpora(dict(zip(names, several, strict=True)))
    )
    try:
        return first.split(share) if share else (first, opened[-1])
    except InvalidValue as error:
        raise InvalidValue(f"config.{error}") from error


def prepare_test(config: Any, workdir: epath.Path) -> tuple[AnyCorpus, epath.Path]:
    """The corpus of evaluations, for a run in `workdir`; and a directory for scores.

    It is what `config.hold_out` holds out, or that of `config.eval`, with the run's tokenizer. Each
    value of these fields has a directory of its own.
    """
    fields = json.loads(config.to_json())
    tested = fields.get("hold_out") or fields["eval"]
    directory = workdir / "tests" / fingerprint_of([tested, fields["template"]])
    if config.get("hold_out"):
        _, corpus = prepare_on_hosts(config, workdir / "corpus")
        return corpus, directory
    test = config.copy_and_resolve_references()
    with test.unlocked():
        for name in {"train", "sources", "mixture", "added"} & {*test}:
            del test[name]
        if test.tokenizer.kind == "sentencepiece" and not test.tokenizer.model:
            test.tokenizer.model = os.fspath(workdir / "corpus" / "tokenizer.model")
    _, corpus = prepare_on_hosts(test, directory)
    return corpus, directory


def prepare_on_hosts(config: Any, directory: epath.Path) -> tuple[Any, Any]:
    """The result of `prepare_corpora`, which process 0 of a run calls first."""
    return hosts.main_process_first(
        "preparing the corpus", lambda: prepare_corpora(config, directory)
    )


def order_sources(names: Collection[str], weights: Any) -> tuple[list[str], int]:
    """Sources in the order in which the phases of `weights` name them, and the number in the first.

    >>> order_sources(["code", "news", "prose"], [(0, {"prose": 1}), (9, {"code": 1})])
    (['prose', 'code', 'news'], 1)
    """
    phases = [phase for _, phase in weights] if isinstance(weights, list | tuple) else [weights]
    order = dict.fromkeys(name for phase in (*phases, names) for name in names if name in phase)
    return [*order], sum(name in phases[0] for name in names)
