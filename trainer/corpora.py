"""From the fields of a config to corpora: all fields are checked, then corpora are prepared."""

import contextlib
import functools
import logging
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from etils import epath

from pipeline.corpus.corpora import Corpora
from pipeline.corpus.in_place import InPlace
from pipeline.corpus.interface import AnyCorpus
from pipeline.corpus.links import link
from pipeline.corpus.opening import open_corpus
from pipeline.corpus.preparing.preparation import prepare
from pipeline.corpus.tasks import CAUSAL, Task
from pipeline.errors import InvalidValue, require_share
from pipeline.planning.identity import fingerprint_of
from pipeline.registry import choose, import_object
from pipeline.steps import hosts
from pipeline.text import sources, templates, tokenizers
from pipeline.text.config import open_source, open_template, open_tokenizer
from pipeline.text.features import Feature
from trainer.config import as_json
from trainer.schedule import Schedule

logger = logging.getLogger(__name__)

MAKER = "such as configs.vision:make_corpus"


def open_view(fields: Mapping[str, Any], seed: int) -> tuple[Callable[[Any], Any], Task]:
    """A function from a corpus to the view of the `kind` and options in `fields`, and its task.

    The task is that of the corpus. The view "causal" is the corpus itself.
    """
    if (chosen := choose("views", {"seed": seed, **fields}, "task", none="causal")) is None:
        return (lambda corpus: corpus), CAUSAL
    kind, options = chosen
    return functools.partial(kind.make, **options), getattr(kind.make, "needs", CAUSAL)


@dataclass(frozen=True)
class Text:
    """The text of a corpus that is not prepared yet."""

    source: sources.Source | sources.Sharded
    field: str
    template: templates.Template | None
    rules: Mapping[str, Any]  # `on_error`, `strict` and `features`, as for `prepare`

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
    rules = dict(config.get("prepare", {}))
    if key := config.get("hold_out_by"):
        known = templates.traits_of(template).features
        rules["features"] = {**known, key: Feature("example", key=True)}
    return Text(open_source(fields, name), field, template, rules)


@contextlib.contextmanager
def _naming_field(name: str) -> Iterator[None]:
    """Errors that name the option `field=` name the flag of these fields of a config instead."""
    try:
        yield
    except InvalidValue as error:
        text = re.sub(r"(?<![\w.-])field=(?=$|[\s;,)])", f"--{name}.field=", str(error))
        raise type(error)(text) from error


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
            return cls(folder, name, fields, make=import_object(path, f"{name}.corpus", MAKER))
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


def prepare_corpora(
    config: Any, directory: epath.Path, *, seed: int | None = None
) -> tuple[Any, Any]:
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
        seed: of views, and of the text for a tokenizer; None: `config.seed`.

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
    if config.get("hold_out_by") and not share:
        raise InvalidValue(
            f"config.hold_out_by is {config.hold_out_by!r}, and config.hold_out is {share}; give "
            "the share that is held out, or remove hold_out_by"
        )
    if share:
        require_share("config.hold_out", share)
        del every["eval"]
    parts = [Part.of(folder, fields, config) for folder, fields in every.items()]
    texts = [part.text for part in parts if part.text]
    pairs = {bool(templates.traits_of(text.template).sides) for text in texts}
    if len(pairs) > 1:
        raise InvalidValue(
            "some corpora of the config are pairs, which have two fields, and others have one; "
            "give each corpus one name, or for pairs each corpus two"
        )
    seed = config.seed if seed is None else seed
    view, task = open_view(config.task.to_dict(), seed)
    trained = config.tokenizer.kind == "sentencepiece" and not config.tokenizer.model
    tokenizer: Any = None
    if texts or not trained:
        first_texts = [part.text.texts for part in parts[:num_first] if part.text]
        model = directory / "tokenizer.model"
        with _naming_field(parts[0].name):
            tokenizer = open_tokenizer(config.tokenizer, first_texts, model, seed)
    for part in parts:
        part.link(directory, tokenizer, task, config)
    for part in parts:
        if part.text is not None:
            with _naming_field(part.name):
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
        by = config.get("hold_out_by")
        return first.split(share, by=by) if share else (first, opened[-1])
    except InvalidValue as error:
        raise InvalidValue(f"config.{error}") from error


def prepare_scored(config: Any, workdir: epath.Path, *, test: bool) -> tuple[AnyCorpus, epath.Path]:
    """The corpus to score with the parameters of the run in `workdir`; and a directory for scores.

    It is that of training, or with `test`, what `config.hold_out` holds out, or that of
    `config.eval`, with the run's tokenizer. Each value of these fields has a directory of its own.
    """
    if not test:
        return prepare_on_hosts(config, workdir / "corpus")[0], workdir / "scores"
    fields = as_json(config)
    by = fields.get("hold_out_by")
    tested = [fields["hold_out"], by] if by else fields.get("hold_out") or fields["eval"]
    directory = workdir / "tests" / fingerprint_of([tested, fields["template"]])
    if config.get("hold_out"):
        _, corpus = prepare_on_hosts(config, workdir / "corpus")
        return corpus, directory
    scored = config.copy_and_resolve_references()
    with scored.unlocked():
        for name in {"train", "sources", "mixture", "added"} & {*scored}:
            del scored[name]
        if scored.tokenizer.kind == "sentencepiece" and not scored.tokenizer.model:
            scored.tokenizer.model = os.fspath(workdir / "corpus" / "tokenizer.model")
    _, corpus = prepare_on_hosts(scored, directory)
    return corpus, directory


def prepare_run(config: Any, schedule: Schedule, workdir: epath.Path) -> tuple[Any, AnyCorpus]:
    """The corpora for training and evaluation of a run, which process 0 prepares first."""
    corpora, held_out = prepare_on_hosts(config, workdir / "corpus", seed=schedule.seed)
    corpus = schedule.select(corpora)
    logger.info(f"{corpus}")
    return corpus, held_out


def prepare_on_hosts(
    config: Any, directory: epath.Path, *, seed: int | None = None
) -> tuple[Any, Any]:
    """The result of `prepare_corpora`, which process 0 of a run calls first."""
    return hosts.main_process_first(
        "preparing the corpus", lambda: prepare_corpora(config, directory, seed=seed)
    )


def order_sources(names: Collection[str], weights: Any) -> tuple[list[str], int]:
    """Sources in the order in which the phases of `weights` name them, and the number in the first.

    >>> order_sources(["code", "news", "prose"], [(0, {"prose": 1}), (9, {"code": 1})])
    (['prose', 'code', 'news'], 1)
    """
    phases = [phase for _, phase in weights] if isinstance(weights, list | tuple) else [weights]
    order = dict.fromkeys(name for phase in (*phases, names) for name in names if name in phase)
    return [*order], sum(name in phases[0] for name in names)
