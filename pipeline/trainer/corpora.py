"""From the fields of a config to corpora: all fields are checked, then corpora are prepared."""

import functools
import importlib
import inspect
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from etils import epath

from pipeline.corpus import views
from pipeline.corpus.corpora import Corpora
from pipeline.corpus.growing import open_growing
from pipeline.corpus.log import fail_growing
from pipeline.corpus.pairs import open_corpus
from pipeline.corpus.preparation import prepare, prepare_pairs
from pipeline.corpus.tasks import CAUSAL, INPUTS, Task
from pipeline.errors import InvalidValue, require_one_of
from pipeline.steps import hosts
from pipeline.text import sources, templates, tokenizers

TEMPLATES: dict[str, Callable] = {
    "": lambda: None,
    "chat": templates.Chat,
    "answer": templates.Answer,
    "preference": templates.Preference,
}
VIEWS: dict[str, Callable] = {"causal": lambda corpus, seed: corpus, **views.KINDS}
TOKENIZERS = ("sentencepiece", "huggingface", "bytes")


def open_source(fields: Mapping[str, Any], name: str) -> sources.Source:
    """The source that `fields` describe.

    Args:
        fields: one of `source` (MODULE:NAME of a function or class that takes a split and returns
            a source or a sequence of records), `files` (names or globs, separated by commas, as
            for `sources.open_files`) and `tfds` (the name of a prepared data set), the others
            empty or absent; `split`; for files a `kind`, or "", or for parallel text `targets`, the
            names or globs of the target text; `begin` and `end`, the share of the records to use,
            from 0.0 to 1.0.
        name: of these fields, for errors.

    Raises:
        ValueError: none or several of the three are given, or the source cannot be opened.
        FileNotFoundError: there are no such files, or no such data set.
    """
    for key in ("source", "files", "tfds", "split", "kind"):
        if not isinstance(fields.get(key, ""), str):
            seen = f"{name}.{key} is {fields[key]!r:.200}"
            raise InvalidValue(f"{seen}; it must be text, with commas between several files")
    given = {key: fields.get(key, "") for key in ("source", "files", "tfds")}
    split = fields["split"]
    if sum(map(bool, given.values())) != 1:
        raise InvalidValue(
            f"{name} has {', '.join(f'{key}={value!r}' for key, value in given.items())}; give one "
            "of them and leave the others empty, as in --config.train.files='data/*.jsonl.gz' "
            "--config.train.source="
        )
    targets, kind = fields.get("targets"), fields.get("kind", "")
    if targets and not (given["files"] and kind in ("", "text")):
        raise InvalidValue(
            f"{name} has targets={targets!r} with files={given['files']!r} and kind={kind!r}; "
            "targets need text files in both"
        )
    source: sources.Source
    if given["source"]:
        source = _import_source(given["source"], split, name)
    elif given["tfds"]:
        source = sources.Tfds(given["tfds"], split)
    elif targets:
        source = sources.ParallelText(given["files"].split(","), targets.split(","))
    else:
        source = sources.open_files([*filter(None, given["files"].split(","))], kind)
    begin, end = fields["begin"], fields["end"]
    return source if (begin, end) == (0.0, 1.0) else sources.Slice(source, begin, end)


def _import_source(path: str, split: str, name: str) -> sources.Source:
    module, _, attribute = path.partition(":")
    try:
        make = getattr(importlib.import_module(module), attribute)
        if not callable(make):
            raise InvalidValue(f"{attribute} is a {type(make).__name__}")
    except (ImportError, AttributeError, ValueError) as error:
        raise InvalidValue(
            f"{name}.source is {path!r}, which cannot be imported: {error}. It must be "
            "MODULE:NAME, such as configs.python_data:Functions, and Python must find MODULE in "
            "the current directory or on PYTHONPATH"
        ) from error
    source: Any = make(split)
    return source if hasattr(source, "fingerprint") else sources.Records(source)


def open_template(fields: Any) -> templates.Template | None:
    """The template that `fields` describe: its `kind`, "" for none, and its own fields.

    A field may itself be a template, such as the sides of "preference".

    Raises:
        ValueError: there is no such kind, or a field of it is missing or wrong.
    """
    plain = fields if isinstance(fields, dict) else fields.to_dict()
    given = [name for name, value in plain.items() if value is not None and name != "kind"]
    if plain["kind"] == "" and given:
        kind = "chat" if given[0] in inspect.signature(templates.Chat).parameters else "answer"
        raise InvalidValue(
            f"template.{given[0]} is given and template.kind is empty; set template.kind={kind} as "
            "well"
        )
    make, options = _choose(fields, "template", TEMPLATES)
    for name, value in options.items():
        if isinstance(value, str) and (found := re.search(r"\\[nrt]", value)):
            raise InvalidValue(
                f"template.{name} is {value!r}, in which {found[0]} is two characters, not a line "
                "break or a tab; in a shell, write $'…\\n…', with a dollar sign before the quotes; "
                "for a backslash, write your own template"
            )
        if isinstance(value, dict) and "kind" in value:
            options[name] = open_template(value)
    return make(**options)


def open_view(fields: Any, seed: int) -> Callable[[Any], Any]:
    """A function from a corpus to the view that `fields` describe: its `kind`, and its options.

    For the kind "causal" it returns the corpus itself.

    Raises:
        ValueError: there is no such kind, or a field of it is missing or unknown.
    """
    make, options = _choose(fields, "task", VIEWS, corpus=None, seed=seed)
    return functools.partial(make, seed=seed, **options)


def _choose(
    fields: Any, name: str, kinds: Mapping[str, Callable], **given: Any
) -> tuple[Callable, dict[str, Any]]:
    """The callable that `fields.kind` names, and its arguments: the other fields that are not None.

    The callable also takes the arguments `given`.
    """
    plain = fields if isinstance(fields, dict) else fields.to_dict()
    options = {key: value for key, value in plain.items() if value is not None}
    kind = options.pop("kind")
    require_one_of(f"{name}.kind", kind, kinds)
    try:
        inspect.signature(kinds[kind]).bind(**given, **options)
    except TypeError as error:  # it names the field
        raise InvalidValue(f"{name}.kind {kind!r} does not fit its other fields: {error}") from None
    return kinds[kind], options


def open_tokenizer(fields: Any) -> tokenizers.Tokenizer | None:
    """The tokenizer that `fields` describe; None if it must be trained.

    Raises:
        ValueError: there is no such kind, or `model` is not a tokenizer of that kind.
        FileNotFoundError: there is no file `model`.
    """
    marks = {"begin": fields.begin, "end": fields.end}
    require_one_of("tokenizer.kind", fields.kind, TOKENIZERS)
    if fields.kind == "bytes":
        if fields.model:
            raise InvalidValue(
                f"tokenizer.kind is 'bytes', which has no model, but tokenizer.model is "
                f"{fields.model!r}; leave it empty, or give the kind of that model"
            )
        return tokenizers.Bytes(**marks)
    if fields.kind == "sentencepiece":
        return tokenizers.SentencePiece(fields.model, **marks) if fields.model else None
    if not fields.model:
        raise InvalidValue(
            "tokenizer.kind is 'huggingface' and tokenizer.model is empty; give the path of a "
            "tokenizer.json, as in --config.tokenizer.model=tokenizer.json"
        )
    return tokenizers.HuggingFace(fields.model, **marks)


@dataclass(frozen=True)
class Part:
    """One corpus of a config or a command, before it is prepared: its records, and their text."""

    source: sources.Source
    field: Any  # one name, or for pairs two, of inputs and targets
    template: templates.Template | None

    @property
    def text(self) -> tuple[sources.Source, Any]:
        """Records with all the text, and the field or fields that hold it."""
        if self.template is None:
            return self.source, self.field
        return templates.FilledSource(self.source, self.template), "text"

    def prepare(
        self,
        tokenizer: tokenizers.Tokenizer,
        directory: epath.Path,
        task: Task = CAUSAL,
        **options: Any,
    ) -> Any:
        """The corpus in `directory`, or pairs; `options` are other options of `prepare`."""
        if not isinstance(self.field, str):
            return prepare_pairs(self.source, tokenizer, directory, fields=self.field, **options)
        options |= {"field": self.field, "template": self.template, "task": task}
        return prepare(self.source, tokenizer, directory, **options)


def _open_part(name: str, fields: Any, config: Any) -> Part:
    template = open_template(fields.get("template", config.template))
    field = sources.ParallelText.fields if fields.get("targets") else fields.field
    if not isinstance(field, str) and (
        len(field) != 2
        or template is not None
        or config.task.kind != "causal"
        or not config.tokenizer.begin
    ):
        raise InvalidValue(
            f"config.{name}.field is {field!r}; it must be one name, or two for pairs, with "
            "template.kind '', task.kind 'causal' and tokenizer.begin True"
        )
    return Part(open_source(fields, f"config.{name}"), field, template)


def _train_tokenizer(parts: Sequence[Part], config: Any, model: epath.Path) -> Any:
    """A sentencepiece model of the text of these parts."""
    texts = [part.text for part in parts]
    fields = {field for _, field in texts}
    if len(fields) > 1:
        raise InvalidValue(
            f"the sources have their text in different fields, {', '.join(map(str, fields))}; "
            "train a tokenizer on one of them first, and give it as tokenizer.model"
        )
    return tokenizers.train_sentencepiece(
        sources.Concatenated([source for source, _ in texts]) if len(texts) > 1 else texts[0][0],
        config.tokenizer.vocab_size,
        model,
        seed=config.seed,
        field=fields.pop(),
        begin=config.tokenizer.begin,
        end=config.tokenizer.end,
    )


def prepare_corpora(
    config: Any, directory: epath.Path, *, writes: bool = True, whole: bool = False
) -> tuple[Any, Any]:
    """The corpora for training and evaluation, prepared now if they do not exist yet.

    A training corpus that has `follow` is prepared meanwhile, in a thread of the process that
    `writes`, and can be opened once its first part is sealed.

    Args:
        config: `train` and `eval`, each with the fields of `open_source` and `field`, the name of
            a record's text, or for pairs two names, of inputs and targets (ignored with `targets`);
            for a mixture, `sources` instead of `train`, such fields by name, and `mixture` with
            their `weights`; if others may join `train` later, `added`, by name;
            `follow` and `wait_seconds`, as for `load`, of each training corpus, which another
            program writes if it has no source;
            `template`, which a source may also have; `task`, with the fields of `open_view`;
            `tokenizer`, with `kind`, `begin` and `end` marks, `model`, and for sentencepiece
            without a model the `vocab_size` of the one to train on the text that training begins
            with; `seed`; `cache`, with `directory` and `bytes`, as for `Corpus.open`.
        directory: the directory of the corpora.
        writes: whether this process writes corpora that are followed.
        whole: whether followed corpora must be finished; they are prepared to their end or, if
            another program writes them, refused if they are not finished.

    Returns:
        The training corpus, and that for evaluation. The first is `Corpora` for a mixture, in the
        order in which phases name the sources, or with "train" first if others may join.

    Raises:
        ValueError: a field is not as above, which is found before anything is prepared; or as for
            `prepare`.
        FileNotFoundError: there are no such files.
    """
    # The fields of each corpus by its directory, beginning with those that training begins with.
    if ("sources" in config) != ("mixture" in config):
        raise InvalidValue(
            "config.sources has several corpora, and config.mixture their shares; give both or "
            "neither"
        )
    if mixture := "sources" in config:
        names, begin = _joining(list(config.sources), config.get("mixture", {}))
        sections = {f"train/{name}": (f"sources.{name}", config.sources[name]) for name in names}
    else:
        added = config.get("added", {})
        names, begin = ["train", *added], 1
        if "train" in added:
            raise InvalidValue("config.added has a corpus 'train'; give it another name")
        sections = {"train": ("train", config.train)}
        sections |= {f"added/{name}": (f"added.{name}", added[name]) for name in added}
    training = [*sections]
    followed = {place: fields for place, (_, fields) in sections.items() if fields.get("follow")}
    for place, fields in followed.items():
        if not any(fields.get(key) for key in ("source", "files", "tfds")):
            del sections[place]  # another program writes it
    sections["eval"] = "eval", config.eval
    parts = {place: _open_part(*pair, config) for place, pair in sections.items()}
    if len({isinstance(part.field, str) for part in parts.values()}) > 1:
        fields = ", ".join(str(part.field) for part in parts.values())
        raise InvalidValue(
            f"the corpora of the config have the fields {fields}; give each corpus one name, or "
            "for pairs each corpus two"
        )
    pairs = not isinstance(parts["eval"].field, str)
    if followed and (pairs or config.task.kind != "causal" or config.get("added")):
        raise InvalidValue(
            f"follow is True for {', '.join(followed)}, but needs task.kind 'causal', one field "
            "of text, and no config.added; set it to False, or change those"
        )
    view = open_view(config.task, config.seed)
    task = CAUSAL if config.task.kind == "causal" else INPUTS
    tokenizer = open_tokenizer(config.tokenizer)
    if tokenizer is None:
        of_training = [parts[place] for place in training[:begin] if place in parts]
        if not of_training:
            raise InvalidValue(
                "other programs write the first corpora, so there is no text to train a tokenizer "
                "on; give the tokenizer that they use, as in --config.tokenizer.model=PATH"
            )
        tokenizer = _train_tokenizer(of_training, config, directory / "tokenizer.model")
    kept = config.get("cache") or {}
    cache: Any = {"cache": kept.get("directory"), "cache_bytes": kept.get("bytes")}
    corpora: dict[str, Any] = {}
    for place in (*training, "eval"):
        if whole or place not in followed:
            if place in parts:
                corpora[place] = parts[place].prepare(tokenizer, directory / place, task)
            if place not in parts or any(cache.values()):
                corpora[place] = open_corpus(directory / place, **cache)
    growing = [place for place in followed if place not in corpora]
    for place in growing if writes else ():
        if place in parts:
            _prepare_meanwhile(parts[place], tokenizer, directory / place, task)
    for place in growing:
        corpora[place] = open_growing(directory / place, followed[place].get("wait_seconds"))
    first, *others = (view(corpora[place]) for place in training)
    if mixture or others:
        first = Corpora(dict(zip(names, (first, *others), strict=True)))
    return first, view(corpora["eval"])


def prepare_on_hosts(config: Any, directory: epath.Path, **options: Any) -> tuple[Any, Any]:
    """The result of `prepare_corpora`, which process 0 of a run calls first."""
    options["writes"] = jax.process_index() == 0
    return hosts.main_process_first(
        "preparing the corpus", lambda: prepare_corpora(config, directory, **options)
    )


def _prepare_meanwhile(
    part: Part, tokenizer: tokenizers.Tokenizer, directory: epath.Path, task: Task
) -> None:
    """Prepares a corpus in a thread; if that fails, the process stops."""

    def work() -> None:
        try:
            part.prepare(tokenizer, directory, task)
        except BaseException as error:
            fail_growing(directory, error)

    threading.Thread(target=work, name="preparing", daemon=True).start()


def _joining(names: list[str], mixture: Any) -> tuple[list[str], int]:
    """Sources in the order in which a mixture's phases name them, and the number in the first.

    >>> _joining(["code", "news", "prose"], {"weights": [(0, {"prose": 1}), (9, {"code": 1})]})
    (['prose', 'code', 'news'], 1)
    """
    weights = mixture.get("weights", dict.fromkeys(names, 1))
    phases = [each for _, each in weights] if isinstance(weights, list | tuple) else [weights]
    order = dict.fromkeys(name for phase in phases for name in names if name in phase)
    return [*order, *(name for name in names if name not in order)], len(phases[0])
