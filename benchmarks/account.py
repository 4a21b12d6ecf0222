"""What became of documents: which of their tokens the batches of an input path train on."""

import dataclasses

import numpy as np

from benchmarks.input_paths import BEGIN, Batch


@dataclasses.dataclass(frozen=True)
class Account:
    """Counts over the batches of an epoch, in documents unless they say otherwise.

    Attributes:
        crossing: those with a token that is trained to predict a token which does not follow it.
        mixed: those whose tokens attend to a document before them in the row.
        lost: those of which no token is trained on.
        cut: those of which some tokens are not.
        repeated: those of which a token is trained on more than once.
        missing: the share of all tokens that is not trained on.
    """

    crossing: int
    mixed: int
    lost: int
    cut: int
    repeated: int
    missing: float


def numbered(sizes: np.ndarray) -> list[np.ndarray]:
    """Documents of these sizes whose ids are unique, but for BEGIN at the first place of each.

    >>> [each.tolist() for each in numbered(np.array([3, 2]))]
    [[1, 2, 3], [1, 4]]
    """
    ids = np.arange(BEGIN + 1, BEGIN + 1 + sizes.sum() - len(sizes), dtype=np.int32)
    return [
        np.concatenate([np.array([BEGIN], np.int32), part])
        for part in np.split(ids, np.cumsum(sizes - 1)[:-1])
    ]


def account(batches: list[Batch], sizes: np.ndarray) -> Account:
    """Where the tokens of `numbered(sizes)` went."""
    document = np.concatenate([[-1, -1], np.repeat(np.arange(len(sizes)), sizes - 1)])
    first = np.zeros(len(document), bool)
    first[BEGIN + 1 + np.cumsum(sizes - 1) - (sizes - 1)] = True
    trained = np.zeros(len(document), np.int64)
    crossing, mixed = np.zeros(len(sizes), bool), 0
    for batch in batches:
        inputs, segments = batch["inputs"], batch["inputs_segment_ids"]
        real = batch["loss_weights"] > 0
        here, after = inputs[real], batch["targets"][real]
        follows = np.where(
            here == BEGIN, first[after], (after == here + 1) & (document[after] == document[here])
        )
        trained += np.bincount(after[follows], minlength=len(document))
        crossing[document[here[~follows & (here != BEGIN)]]] = True
        begins = (inputs[:, 1:] == BEGIN) & (segments[:, 1:] == segments[:, :-1])
        mixed += int((begins & (segments[:, 1:] > 0)).sum())
    times = trained[BEGIN + 1 :]
    known = document[BEGIN + 1 :]
    some = np.bincount(known, times > 0, len(sizes))
    return Account(
        crossing=int(crossing.sum()),
        mixed=mixed,
        lost=int((some == 0).sum()),
        cut=int(((some > 0) & (some < sizes - 1)).sum()),
        repeated=len(np.unique(known[times > 1])),
        missing=float((times == 0).mean()),
    )
