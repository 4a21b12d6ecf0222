"""Arrow: columns with lists of ids, and what is beside them."""

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from etils import epath

from pipeline.corpus.token_files import Lists, TokenFiles, local_copy, signs, values_of
from pipeline.errors import InvalidValue
from pipeline.text import files
from pipeline.text.features import MASKS, PADDING, PROMPT, TOKENS, WEIGHTS, Feature, check_features
from pipeline.text.ragged import require_weights
from pipeline.text.sources import ArrowFiles, is_saved, saved_files

logger = logging.getLogger(__name__)

# Masks that are 1 where there is a loss in some programs, and in others where there is none.
UNCLEAR = "prompt_mask", "input_mask"

PACKED = "seq_lengths"  # the lengths of the sequences that are packed into a row

# Other columns that tell sequences of a row apart: whether one begins, from the value of a token
# and of the one before it.
NUMBERS = "segment_ids", "seq_idx", "sequence_id", "document_ids", "inputs_segmentation"
BEGINS = {"position_ids": np.less_equal, **dict.fromkeys(NUMBERS, np.not_equal)}

# Columns that divide rows, too, by where sequences begin, which are not read.
STARTS = ("seq_start_id", "cu_seqlens", "cu_seqlens_q", "cu_seq_lens_q", "cu_doc_lens", "doc_lens")

IGNORED = -100  # the label of an id without a loss


def _recognise(path: epath.Path) -> bool:
    if not path.is_dir() or not is_saved(path):
        return False
    splits = [path / "state.json", *path.glob("*/state.json")]
    folder = next((split.parent for split in splits if split.exists()), path)
    return "input_ids" in ArrowFiles(folder).names()


@signs(_recognise)
def arrow(
    paths: files.Paths,
    *,
    split: str | None = None,
    column: str = "input_ids",
    labels: str | None = None,
    weights: str | Sequence[str] | None = None,
    features: Mapping[str, Feature] | None = None,
) -> TokenFiles:
    """Lists of ids, the entries of a column of Arrow IPC or Feather files.

    Or of the folder of a Hugging Face data set that was saved to disk, whose `state.json` names its
    files. In a column `attention_mask`, 0 is padding, which is dropped; a column `seq_lengths`
    divides rows into the sequences that are packed into them.

    Options:
        column: the column with the lists of ids ('input_ids').
        split: the split to read, of a data set that was saved with several.
        labels: a column of the ids themselves, or -100 where there is no loss, not shifted.
        weights: columns with a weight for each token, such as 'completion_mask', whose product
            counts; 'sources_len' has the number of tokens without a loss at the start. (): train on
            all tokens, though there are such columns.
        features: columns to read as features, by name; for tokens, lists with a value for each.
    """
    originals = files.leave_out_repeats(saved_files(paths, split))
    copies = [local_copy(path) for path in originals]
    schemas = check_features(features)
    masks = _choose(ArrowFiles(copies).names() - {column}, labels, weights, schemas)
    _say_others(ArrowFiles(copies), column, {*schemas, *masks})
    source = ArrowFiles(copies, columns=[column, *schemas, *masks])
    kinds, sections = {column: None, **schemas, **masks}, []
    for place, table in source.groups():
        lists = {
            name: _lists(f"{place} {name}", table.column(name).chunk(0), feature)
            for name, feature in kinds.items()
        }
        _cut(lists, column, schemas)
        section = {TOKENS: lists[column], **{name: lists[name] for name in schemas}}
        if names := [name for name in masks if name in lists]:
            section[WEIGHTS] = _weigh(lists, column, names, labels)
        sections.append(section)
    if len({section[WEIGHTS][0].dtype for section in sections if WEIGHTS in section}) > 1:
        for section in sections:
            values, begins, counts = section[WEIGHTS]
            section[WEIGHTS] = values.astype(np.float32), begins, counts
    return TokenFiles(originals, sections, [column, labels, [*masks], [*schemas]], schemas)


def _lists(place: str, column: pa.Array, feature: Feature | None) -> Lists:
    """The values of an Arrow column in any layout: lists of ids, or the values of a feature."""
    values, counts = _decode(column), np.ones(len(column), np.int64)
    if feature is None or not feature.per_example:
        values, counts = _flatten(place, values, counts)
    size = 1 if feature is None else feature.size
    if pa.types.is_fixed_size_list(values.type) and values.type.list_size == size:
        values, counts = _flatten(place, values, counts)[0], counts * size
    elif feature is not None and (size > 1 or pa.types.is_nested(values.type)):
        raise InvalidValue(
            f"{place} holds {column.type}, but the feature is {feature}; store values with a shape "
            "as fixed-size lists"
        )
    _require_all(place, values, counts)
    kinds, advice = [pa.types.is_integer], "tokens must be lists of integers, one for each example"
    if feature is not None:
        kinds, advice = [*kinds, pa.types.is_floating, pa.types.is_boolean], "give numbers"
    if not any(is_kind(values.type) for is_kind in kinds):
        raise InvalidValue(f"{place} holds {column.type}; {advice}")
    return values.to_numpy(zero_copy_only=False), np.cumsum(counts) - counts, counts


def _decode(column: pa.Array) -> pa.Array:
    """The values of an array themselves, without an extension, runs or a dictionary."""
    if isinstance(column.type, pa.BaseExtensionType):
        return _decode(column.storage)
    if pa.types.is_run_end_encoded(column.type):
        return _decode(pc.call_function("run_end_decode", [column]))
    return _decode(column.dictionary_decode()) if pa.types.is_dictionary(column.type) else column


def _flatten(place: str, lists: pa.Array, counts: np.ndarray) -> tuple[pa.Array, np.ndarray]:
    """The values of lists of any kind, one list after another, and the size of each."""
    _require_all(place, lists, counts)
    if not hasattr(lists, "flatten") or pa.types.is_struct(lists.type):
        raise InvalidValue(f"{place} holds {lists.type}; it must hold lists of numbers")
    sizes = pc.call_function("list_value_length", [lists])
    return _decode(lists.flatten()), sizes.to_numpy().astype(np.int64)


def _require_all(place: str, values: pa.Array, counts: np.ndarray) -> None:
    """Refuses values of rows that are missing; each row has `counts` of them."""
    if values.null_count:
        first = int(np.argmax(pc.call_function("is_null", [values]).to_numpy(zero_copy_only=False)))
        row = np.searchsorted(np.cumsum(counts), first, side="right")
        raise InvalidValue(
            f"{place} has missing entries, first {row:,} rows after that; leave them out, or "
            "fill them in"
        )


# ---- masks


def _choose(
    columns: Collection[str],
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
    masks = [
        name for name in (*MASKS, *UNCLEAR) if name in columns and name not in {*named, *features}
    ]
    if masks and (named or weights is None):
        option = "labels" if masks[0] == "labels" else "weights"
        if masks[0] in UNCLEAR:
            raise InvalidValue(
                f"the column {masks[0]!r} says of each token whether it is trained on, or whether "
                f"it is one of a prompt, or padding; if 1 is a token with a loss, give weights="
                f"{masks[0]!r}{' as well' * bool(named)}; else write its opposite as a column "
                "'loss_mask', and remove it; or give weights=() to train on all tokens"
            )
        raise InvalidValue(
            f"the column {masks[0]!r} says on which tokens to train; give {option}="
            f"{masks[0]!r}{' as well' * bool(named)}, or weights=() to train on all tokens"
        )
    if PACKED not in columns and (starts := [name for name in STARTS if name in columns]):
        raise InvalidValue(
            f"the column {starts[0]!r} divides rows into sequences; add a column {PACKED}, the "
            f"sizes of the sequences of each row, or remove {starts[0]} to read each row as one"
        )
    layout = PADDING, PACKED, *BEGINS
    named += [name for name in layout if name in columns and name not in features]
    return {name: Feature("example" if name == PROMPT else "targets") for name in named}


def _say_others(source: ArrowFiles, column: str, read: Collection[str]) -> None:
    """Warns of columns that are not read: what they mean to whoever wrote them is not known."""
    expected = {column, PADDING, PACKED, *BEGINS, *STARTS, *MASKS, *UNCLEAR, *read}
    types = source.types()
    if names := sorted(source.names() - expected):
        logger.warning(
            "%s: columns that are not read: %s; give one that says on which tokens to train as "
            "weights= or labels=, and a feature in features=",
            source,
            ", ".join(f"{name!r} ({types.get(name, 'of some files')})" for name in names),
        )


def _cut(lists: dict[str, Lists], column: str, features: Mapping[str, Feature]) -> None:
    """Drops padding at the ends of rows, and divides rows into the sequences that they hold."""
    rows = lists[column][2]
    layout = PADDING, PACKED, *BEGINS
    columns = {name: lists.pop(name) for name in layout if name in lists and name not in features}
    padding, packed = columns.pop(PADDING, None), columns.pop(PACKED, None)
    row, start, counts = np.arange(len(rows)), np.zeros_like(rows), rows
    numbers = 1 if padding is None else require_weights(_mask_of(padding, rows, PADDING), PADDING)
    mask = np.broadcast_to(numbers != 0, int(rows.sum()))
    if not mask.all():
        positions, before = np.flatnonzero(mask), np.cumsum(rows) - rows
        counts = np.bincount(row.repeat(rows)[positions], minlength=len(rows))
        some, ends = counts > 0, np.cumsum(counts)
        start[some] = (positions[(ends - counts)[some]]) - before[some]
        if (positions[ends[some] - 1] - before[some] - start[some] + 1 != counts[some]).any():
            raise InvalidValue(
                f"{PADDING} is 0 between tokens of a row; it may be 0 before and after them"
            )
    if packed is None:
        _require_one(PADDING, np.broadcast_to(numbers, len(mask))[mask], np.not_equal, counts)
        for name, marks in columns.items():
            _require_one(name, _mask_of(marks, rows, name)[mask], BEGINS[name], counts)
    else:
        sizes, row = values_of(packed).astype(np.int64), row.repeat(packed[2])
        if PROMPT in lists or (np.bincount(row, sizes, len(rows)) != counts).any():
            raise InvalidValue(
                f"{PACKED} does not divide the tokens of each row, or {PROMPT} is there too; "
                "correct it, or remove the column"
            )
        before = np.cumsum(counts) - counts
        start, counts = start[row] + np.cumsum(sizes) - sizes - before[row], sizes
    if counts is rows:
        return
    for name, (values, begins, old_counts) in lists.items():
        feature = features.get(name)
        if name == PROMPT or (feature is not None and feature.per_example):
            lists[name] = values, begins[row], old_counts[row]
            continue
        unit = 1 if feature is None else feature.size
        if (old_counts != unit * rows).any():
            raise InvalidValue(f"{name} has other numbers of entries than tokens; correct it")
        lists[name] = values, begins[row] + unit * start, unit * counts


def _require_one(name: str, values: np.ndarray, begins: Any, counts: np.ndarray) -> None:
    """Refuses rows of `counts` tokens with several sequences, by a value and the one before it."""
    firsts = np.flatnonzero(begins(values[1:], values[:-1])) + 1
    if np.setdiff1d(firsts, np.cumsum(counts)).size:
        raise InvalidValue(
            f"{name} tells apart several sequences in a row; add a column {PACKED}, the sizes of "
            f"the sequences of each row, or remove {name} to read each row as one"
        )


def _weigh(
    lists: Mapping[str, Lists], column: str, names: Collection[str], labels: str | None
) -> Lists:
    """The weight of each token: the product of the masks in the columns `names`."""
    counts = lists[column][2]
    first = np.cumsum(counts) - counts
    weights = np.ones(int(counts.sum()), np.float32)
    for name in names:
        if name == PROMPT:
            sizes = values_of(lists[name])
            for row in np.flatnonzero((sizes < 0) | (sizes > counts))[:1]:
                raise InvalidValue(
                    f"{name} is {sizes[row]} in a row of {counts[row]:,} tokens; it must be the "
                    "number of tokens at the start that have no loss; correct it"
                )
            position = np.arange(len(weights)) - first.repeat(counts)
            mask = position >= sizes.repeat(counts)
        else:
            mask = _mask_of(lists[name], counts, name)
        if name == labels:
            mask, values = mask != IGNORED, mask
            if (values != values_of(lists[column]))[mask].any():
                raise InvalidValue(
                    f"the labels in {name!r} are not the ids in {column!r} where there is a loss; "
                    "give labels that are not shifted, as Hugging Face has them"
                )
        _require_scale(mask, name)
        weights *= mask
    require_weights(weights, f"the weights of {', '.join(names)}")
    small = weights.astype(bool)
    return (small if (small == weights).all() else weights), first, counts


def _require_scale(mask: np.ndarray, name: str) -> None:
    """Refuses whole weights that are all 0 or one number above 1, as of a mask with 255."""
    if (
        mask.dtype.kind in "iu"
        and (top := mask.max(initial=0)) > 1
        and np.isin(mask, (0, top)).all()
    ):
        raise InvalidValue(
            f"the weights of {name} are 0 and {top} alone; a mask has 1 where there is a loss. "
            "Write 1 in its place, or floats if that weight is wanted"
        )


def _mask_of(lists: Lists, counts: np.ndarray, name: str) -> np.ndarray:
    if (lists[2] != counts).any():
        of_targets = " (put a 0 before those of each row)" * bool((lists[2] == counts - 1).all())
        raise InvalidValue(
            f"{name} has other numbers of entries than tokens{of_targets}; correct it"
        )
    return values_of(lists)
