"""Columns beside ids that say where a loss is, which ids are padding, and where sequences end."""

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from pipeline.corpus.gather import gather
from pipeline.corpus.token_files import Lists
from pipeline.errors import InvalidValue
from pipeline.text.features import Feature
from pipeline.text.ragged import require_weights

# Columns that say on which ids to train, as several programs name them. The last has the number of
# ids of the prompt.
PROMPT = "sources_len"
MASKS = ("labels", "completion_mask", "assistant_masks", "loss_mask", PROMPT)

# What is 0 in this column is padding; and the lengths of the sequences that are packed into a row.
PADDING, PACKED = "attention_mask", "seq_lengths"

IGNORED = -100  # the label of an id without a loss


def choose(
    there: Collection[str],
    labels: str | None,
    weights: str | Sequence[str] | None,
    features: Mapping[str, Feature],
) -> dict[str, Feature]:
    """The columns to read besides ids and features, each with the kind of its values.

    Raises:
        ValueError: a column of masks is there, and no option says what to do with it.
    """
    named = [weights] if isinstance(weights, str) else [*(weights or ())]
    named += [] if labels is None else [labels]
    others = [name for name in MASKS if name in there and name not in {*named, *features}]
    if others and (named or weights is None):
        option = "labels" if others[0] == "labels" else "weights"
        raise InvalidValue(
            f"the column {others[0]!r} says on which tokens to train; give {option}="
            f"{others[0]!r}{' as well' * bool(named)}, or weights=() to train on all tokens"
        )
    named += [name for name in (PADDING, PACKED) if name in there and name not in features]
    return {name: Feature("example" if name == PROMPT else "targets") for name in named}


def cut(lists: dict[str, Lists], column: str, features: Mapping[str, Feature]) -> None:
    """Drops padding at the ends of rows, and divides rows into the sequences that they hold."""
    rows = lists[column][2]
    padding, packed = (
        lists.pop(name, None) if name not in features else None for name in (PADDING, PACKED)
    )
    row, start, counts = np.arange(len(rows)), np.zeros_like(rows), rows
    if padding is not None and not (mask := _mask_of(padding, rows, PADDING) != 0).all():
        places, before = np.flatnonzero(mask), np.cumsum(rows) - rows
        counts = np.bincount(row.repeat(rows)[places], minlength=len(rows))
        some, ends = counts > 0, np.cumsum(counts)
        start[some] = (places[(ends - counts)[some]]) - before[some]
        if (places[ends[some] - 1] - before[some] - start[some] + 1 != counts[some]).any():
            raise InvalidValue(
                f"{PADDING} is 0 between tokens of a row; it may be 0 before and after them"
            )
    if packed is not None:
        sizes, row = gather(*packed).astype(np.int64), row.repeat(packed[2])
        if PROMPT in lists or (np.bincount(row, sizes, len(rows)) != counts).any():
            raise InvalidValue(
                f"{PACKED} does not divide the tokens of each row, or {PROMPT} is there too; "
                "correct it, or remove the column"
            )
        before = np.cumsum(counts) - counts
        start, counts = start[row] + np.cumsum(sizes) - sizes - before[row], sizes
    if counts is rows:
        return
    for name, (values, begins, whole) in lists.items():
        feature = features.get(name)
        if name == PROMPT or (feature is not None and feature.per_example):
            lists[name] = values, begins[row], whole[row]
            continue
        unit = 1 if feature is None else feature.size
        if (whole != unit * rows).any():
            raise InvalidValue(f"{name} has other numbers of entries than tokens; correct it")
        lists[name] = values, begins[row] + unit * start, unit * counts


def weigh(
    lists: Mapping[str, Lists], column: str, names: Collection[str], labels: str | None
) -> Lists:
    """The weight of each token: the product of the masks in the columns `names`."""
    values, begins, counts = lists[column]
    first = np.cumsum(counts) - counts
    weights = np.ones(int(counts.sum()), np.float32)
    for name in names:
        if name == PROMPT:
            prompts, at, ones = lists[name]
            position = np.arange(len(weights)) - first.repeat(counts)
            mask = position >= gather(prompts, at, ones).repeat(counts)
        else:
            mask = _mask_of(lists[name], counts, name)
        if name == labels:
            mask, found = mask != IGNORED, mask
            if (found != gather(values, begins, counts))[mask].any():
                raise InvalidValue(
                    f"the labels in {name!r} are not the ids in {column!r} where there is a loss; "
                    "give labels that are not shifted, as Hugging Face has them"
                )
        weights *= mask
    require_weights(weights, f"the weights of {', '.join(names)}")
    small = weights.astype(bool)
    return (small if (small == weights).all() else weights), first, counts


def _mask_of(lists: Lists, counts: np.ndarray, name: str) -> np.ndarray:
    values, begins, sizes = lists
    if (sizes != counts).any():
        raise InvalidValue(f"{name} has other numbers of entries than tokens; correct it")
    return gather(values, begins, sizes)
