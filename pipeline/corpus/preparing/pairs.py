"""Pairs: text of two fields to inputs and targets, by the template that makes both."""

from typing import Unpack

from etils import epath

from pipeline.corpus.preparing.preparation import PrepareOptions, prepare
from pipeline.corpus.sides import Sides
from pipeline.text.sources import Sharded, Source
from pipeline.text.templates import Pair, Template
from pipeline.text.tokenizers import Tokenizer


def prepare_pairs(
    source: Source | Sharded,
    tokenizer: Tokenizer,
    directory: epath.PathLike,
    *,
    fields: tuple[str | Template, str | Template] = ("inputs", "targets"),
    **options: Unpack[PrepareOptions],
) -> Sides:
    """The pairs of `source`, for sequence to sequence: `prepare` with the template `Pair`.

    Args:
        source: records by number, each with two texts.
        tokenizer: for both texts; it must have a begin mark, from which the decoder starts.
        directory: where to write.
        fields: the fields of each record that hold inputs and targets, or templates; the template
            of the targets decides which tokens carry loss. Default: "inputs" and "targets".
        **options: as for `prepare`.
    """
    pair = Pair.of(fields)
    corpus = prepare(source, tokenizer, directory, template=pair, **options)
    assert isinstance(corpus, Sides)
    return corpus
