"""From the fields of a config to corpora: which source, which tokenizer, prepared where."""

from collections.abc import Callable
from typing import Any

from etils import epath

from pipeline import sources, templates, tokenizers, views
from pipeline.storage.corpora import Corpora
from pipeline.storage.preparation import prepare, prepare_pairs
from pipeline.tasks import CAUSAL, INPUTS

TEMPLATES: dict[str, Callable[..., templates.Template]] = {
    "chat": templates.Chat,
    "answer": templates.Answer,
}
VIEWS: dict[str, Callable[..., Any] | None] = {"causal": None, **views.KINDS}


def open_source(fields: Any, data_dir: epath.Path) -> sources.Source:
    """The source that `fields` describe.

    Args:
        fields: has `tfds` (the name of a prepared data set, or "python_stdlib",
            "python_docstrings", "python_dialogues" or "python_reference", which make themselves) or
            `files` (names or globs, separated by commas, of a kind that `sources.open_files` tells
            from their ends, or that a field `kind` names), one of them empty; `split`, of a data
            set that has some; `begin` and `end`, the share of the records that is wanted, from 0.0
            to 1.0.
        data_dir: where those that make themselves are made.

    Raises:
        ValueError: both or neither of `tfds` and `files` are given.
    """
    if bool(fields.files) == bool(fields.tfds):
        raise ValueError(
            f"files is {fields.files!r} and tfds is {fields.tfds!r}; give one of them and leave "
            "the other empty, as in --config.train.files='data/*.jsonl.gz' --config.train.tfds=''"
        )
    source: sources.Source
    if fields.tfds == "python_stdlib":
        source = sources.PythonStdlib(fields.split, data_dir=data_dir)
    elif fields.tfds == "python_dialogues":
        source = sources.Dialogues(fields.split, data_dir=data_dir)
    elif fields.tfds == "python_docstrings":
        source = sources.Docstrings(fields.split, data_dir=data_dir)
    elif fields.tfds == "python_reference":
        source = sources.PythonReference()
    elif fields.tfds:
        source = sources.Tfds(fields.tfds, fields.split)
    else:
        names = fields.files.split(",")
        source = sources.open_files(names, fields.split, getattr(fields, "kind", ""))
    if (fields.begin, fields.end) != (0.0, 1.0):
        source = sources.Slice(source, fields.begin, fields.end)
    return source


def open_template(fields: Any) -> templates.Template | None:
    """The template that `fields` describe: its `kind` ("chat", "answer" or ""), and its own fields.

    Raises:
        ValueError: there is no such kind.
    """
    options = fields.to_dict()
    kind = options.pop("kind")
    if kind == "":
        return None
    if kind not in TEMPLATES:
        raise ValueError(f"template.kind is {kind!r}; it must be one of {', '.join(TEMPLATES)}")
    return TEMPLATES[kind](**options)


def prepare_corpora(config: Any, directory: epath.Path) -> tuple[Any, Any]:
    """The corpora for training and evaluation, prepared now if they are not yet there.

    Args:
        config: `train` and `eval`, each with the fields of `open_source` and `field`, the name of
            a record's text, or of pairs two names, of inputs and targets; of a mixture, `sources`
            in place of `train`, such fields by name, and `mixture` with their `weights`; where
            others may join `train` later on, `added`, by name; `tokenizer`, with `kind` ("bytes",
            "sentencepiece" or "huggingface"), `begin` and `end` marks, a `model` file for the
            latter two, and for sentencepiece, where there is none, the `vocab_size` of one to be
            trained on the text that training begins with; `template`, as for `open_template`;
            `task`, with `kind` ("causal", "masked" or "corrupted") and what that view takes;
            `seed`.
        directory: where to keep them.

    Returns:
        The training corpus, and that for evaluation. Of a mixture the first is `Corpora`, in the
        order in which phases name the sources; and so it is, "train" first, where there are others
        that may join.

    Raises:
        ValueError: a field is not as above, or what `prepare` raises.
    """
    # Sources by the names of their corpora, those first with which training begins.
    if "sources" in config:
        names, begin = _joining(list(config.sources), config.get("mixture", {}))
        joined = {name: (f"train/{name}", config.sources[name]) for name in names}
    else:
        joined, begin = {"train": ("train", config.train)}, 1
        added = dict(config.get("added", {}))
        if "train" in added:
            raise ValueError("config.added has a corpus 'train'; give it another name")
        joined |= {name: (f"added/{name}", fields) for name, fields in added.items()}
    places = {name: place for name, (place, _) in joined.items()}
    described = {**dict(joined.values()), "eval": config.eval}
    options = config.task.to_dict()
    kind = options.pop("kind")
    if kind not in VIEWS:
        raise ValueError(f"task.kind is {kind!r}; it must be one of {', '.join(VIEWS)}")
    template, view = open_template(config.template), VIEWS[kind]
    parts = {name: open_source(fields, directory / "tfds") for name, fields in described.items()}
    of_training = list(places.values())[:begin]
    spec = config.tokenizer
    marks = {"begin": spec.begin, "end": spec.end}
    tokenizer: tokenizers.Tokenizer
    if spec.kind == "bytes":
        tokenizer = tokenizers.Bytes(**marks)
    elif spec.kind == "huggingface":
        tokenizer = tokenizers.HuggingFace(spec.model, **marks)
    elif spec.kind == "sentencepiece" and spec.model:
        tokenizer = tokenizers.SentencePiece(spec.model, **marks)
    elif spec.kind == "sentencepiece":
        texts = [parts[name] for name in of_training]
        fields = {described[name].field for name in of_training}
        if template is not None:
            texts, fields = [templates.Filled(text, template) for text in texts], {"text"}
        if len(fields) > 1:
            raise ValueError(
                f"the sources have their text in different fields, {', '.join(map(str, fields))}; "
                "train a tokenizer on one of them first, and give it as tokenizer.model"
            )
        tokenizer = tokenizers.train_sentencepiece(
            sources.Concatenated(texts) if len(texts) > 1 else texts[0],
            spec.vocab_size,
            directory / "tokenizer.model",
            seed=config.seed,
            field=fields.pop(),
            **marks,
        )
    else:
        raise ValueError(
            f"tokenizer.kind is {spec.kind!r}; it must be 'sentencepiece', 'huggingface' or 'bytes'"
        )

    def prepared(name: str) -> Any:
        field, place = described[name].field, directory / name
        if not isinstance(field, str):
            return prepare_pairs(parts[name], tokenizer, place, fields=tuple(field))
        task = CAUSAL if view is None else INPUTS
        what: dict[str, Any] = {"field": field} if template is None else {"template": template}
        corpus = prepare(parts[name], tokenizer, place, task=task, **what)
        return corpus if view is None else view(corpus, seed=config.seed, **options)

    corpora = {name: prepared(name) for name in parts}
    held_out = corpora.pop("eval")
    if "sources" in config or len(joined) > 1:
        return Corpora({name: corpora[place] for name, place in places.items()}), held_out
    return corpora["train"], held_out


def _joining(names: list[str], mixture: Any) -> tuple[list[str], int]:
    """Sources in the order in which a mixture's phases name them, and how many begin.

    >>> _joining(["code", "news", "prose"], {"weights": [(0, {"prose": 1}), (9, {"code": 1})]})
    (['prose', 'code', 'news'], 1)
    """
    weights = mixture.get("weights", dict.fromkeys(names, 1))
    phases = [each for _, each in weights] if isinstance(weights, list | tuple) else [weights]
    order = dict.fromkeys(name for phase in phases for name in names if name in phase)
    return [*order, *(name for name in names if name not in order)], len(phases[0])
