"""Pairs: inputs and targets for sequence to sequence, each a corpus of its own."""

from typing import Any

import numpy as np
from etils import epath

from pipeline.corpus import Corpus
from pipeline.preparation import prepare
from pipeline.sources import Source
from pipeline.templates import Template
from pipeline.tokenizers import Tokenizer


class Pairs:
    """Example `i` of two corpora, read together: inputs for the encoder, targets for the decoder.

    Args:
        inputs: of the task "encoder".
        targets: of the task "decoder": the decoder starts from the begin mark.

    Attributes:
        sides: both corpora; batches read each of them with its own lengths.
        lengths: positions of inputs and of targets: uint32 [pairs, 2].

    Raises:
        ValueError: they are for other tasks, or differ in their number of examples.
    """

    def __init__(self, inputs: Corpus, targets: Corpus):
        for corpus, task in ((inputs, "encoder"), (targets, "decoder")):
            if corpus.task.name != task:
                raise ValueError(
                    f"{corpus!r} is for the task {corpus.task.name!r}; in pairs it must be "
                    f"{task!r}, so prepare it with task={task!r}"
                )
        if len(inputs) != len(targets):
            raise ValueError(
                f"there are {len(inputs):,} inputs and {len(targets):,} targets; example i of one "
                "belongs to example i of the other"
            )
        self.sides = inputs, targets
        self.lengths = np.stack([inputs.lengths, targets.lengths], axis=1)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """One pair: `inputs`, and `decoder_inputs` and `targets` of another length."""
        return self.sides[0][index] | self.sides[1][index]

    @property
    def fingerprint(self) -> str:
        """Those of both sides."""
        return ";".join(
            f"{name}_{part}"
            for name, corpus in zip(("inputs", "targets"), self.sides, strict=True)
            for part in corpus.fingerprint.split(";")
        )

    @property
    def vocab_size(self) -> int | None:
        """Token ids of both sides are below this; None if nobody said."""
        sizes = [corpus.vocab_size for corpus in self.sides]
        return None if None in sizes else max(size for size in sizes if size is not None)

    @property
    def num_tokens(self) -> int:
        """Positions of both sides."""
        return sum(corpus.num_tokens for corpus in self.sides)

    def __str__(self) -> str:
        return "\n".join(map(str, self.sides))

    def __repr__(self) -> str:
        return f"Pairs({self.sides[0]!r}, {self.sides[1]!r})"


def prepare_pairs(
    source: Source,
    tokenizer: Tokenizer,
    directory: epath.PathLike,
    *,
    inputs: str | Template,
    targets: str | Template,
    **options: Any,
) -> Pairs:
    """The pairs of a source, prepared as `prepare` does: once, in parallel, resumable.

    Args:
        source: records that hold both sides.
        tokenizer: for both; it needs a begin mark, from which the decoder starts.
        directory: where to write; `inputs` and `targets` become directories in it.
        inputs: the field of a record that holds the input, or a template.
        targets: the same for the target; a template says what of it is learnt.
        **options: `num_workers` and `progress`, as for `prepare`.

    Raises:
        ValueError: the tokenizer has no begin mark, or as `prepare` raises.
    """
    if tokenizer.begin_id is None:
        raise ValueError(
            f"the tokenizer {tokenizer.fingerprint} puts no begin mark, from which a decoder "
            "starts; make it with begin=True"
        )
    sides = []
    for name, task, wanted in (("inputs", "encoder", inputs), ("targets", "decoder", targets)):
        what = {"field": wanted} if isinstance(wanted, str) else {"template": wanted}
        place = epath.Path(directory) / name
        sides.append(prepare(source, tokenizer, place, task=task, **what, **options))
    return Pairs(*sides)
