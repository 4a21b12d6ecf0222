"""From the fields of a config to corpora: which source, which tokenizer, prepared where."""

from typing import Any

from etils import epath

from pipeline import sources, tokenizers
from pipeline.corpus import Corpus
from pipeline.joined import Joined
from pipeline.pairs import Pairs
from pipeline.preparation import prepare, prepare_pairs


def open_source(fields: Any, data_dir: epath.Path) -> sources.Source:
    """The source that `fields` describe.

    Args:
        fields: has `tfds` (the name of a prepared data set, or "python_stdlib" or
            "python_docstrings", which make themselves, or "python_reference", which is there) or
            `files` (names or globs, separated by commas, of a kind that `sources.open_files` tells
            from their ends), one of them empty; `split`, of a data set that has some; `begin` and
            `end`, the share of the records that is wanted, from 0.0 to 1.0.
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
    elif fields.tfds == "python_docstrings":
        source = sources.Docstrings(fields.split, data_dir=data_dir)
    elif fields.tfds == "python_reference":
        source = sources.PythonReference()
    elif fields.tfds:
        source = sources.Tfds(fields.tfds, fields.split)
    else:
        source = sources.open_files(fields.files.split(","), fields.split)
    if (fields.begin, fields.end) != (0.0, 1.0):
        source = sources.Slice(source, fields.begin, fields.end)
    return source


def prepare_corpora(
    config: Any, directory: epath.Path
) -> tuple[Corpus | Joined | Pairs, Corpus | Pairs]:
    """The corpora for training and evaluation, prepared now if they are not yet there.

    Args:
        config: `train` and `eval`, each with the fields of `open_source` and `field`, the name of
            a record's text, or of pairs two names, of inputs and targets; of a mixture, `sources`
            in place of `train`, such fields by name; `tokenizer`, with `kind` ("bytes",
            "sentencepiece" or "huggingface"), `begin` and `end` marks, a `model` file for the
            latter two, and for sentencepiece, where there is none, the `vocab_size` of one to be
            trained on the training text; `seed`.
        directory: where to keep them.

    Raises:
        ValueError: a field is not as above, or what `prepare` raises.
    """
    mixed = dict(config.sources) if "sources" in config else {}
    described = {f"train/{name}": fields for name, fields in mixed.items()}
    described = {**(described or {"train": config.train}), "eval": config.eval}
    parts = {name: open_source(fields, directory / "tfds") for name, fields in described.items()}
    of_training = [name for name in parts if name != "eval"]
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
        names = {described[name].field for name in of_training}
        if len(names) > 1:
            raise ValueError(
                f"the sources have their text in different fields, {', '.join(map(str, names))}; "
                "train a tokenizer on one of them first, and give it as tokenizer.model"
            )
        tokenizer = tokenizers.train_sentencepiece(
            sources.Together([parts[name] for name in of_training]) if mixed else parts["train"],
            spec.vocab_size,
            directory / "tokenizer.model",
            seed=config.seed,
            field=names.pop(),
            **marks,
        )
    else:
        raise ValueError(
            f"tokenizer.kind is {spec.kind!r}; it must be 'sentencepiece', 'huggingface' or 'bytes'"
        )

    def prepared(name: str) -> Any:
        field = described[name].field
        if isinstance(field, str):
            return prepare(parts[name], tokenizer, directory / name, field=field)
        return prepare_pairs(parts[name], tokenizer, directory / name, fields=tuple(field))

    corpora = {name: prepared(name) for name in parts}
    held_out = corpora.pop("eval")
    if mixed:
        return Joined(dict(zip(mixed, corpora.values(), strict=True))), held_out
    return corpora["train"], held_out
