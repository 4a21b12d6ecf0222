"""Features: the arrays that examples carry beside their tokens, such as rewards or log-probs."""

import dataclasses
import difflib
import hashlib
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from ml_dtypes import bfloat16, finfo

from pipeline.errors import (
    InvalidType,
    InvalidValue,
    counted,
    require_type,
    require_whole,
    suggest_option,
)
from pipeline.fields.batch import FIELDS

# What may have a value beside the positions of a side that a corpus names itself.
OF = "inputs", "targets", "continuation", "example"

# The columns of examples that are not features.
TOKENS, WEIGHTS = "tokens", "weights"

# Names that features may not have.
RESERVED = (TOKENS, WEIGHTS, *FIELDS)

# The dtype and shape of the hashes of keys.
KEY = np.dtype(np.uint32), (2,)

# What a pointer holds where it points to nothing.
NOWHERE = -1


def as_array(values: Any, what: str) -> np.ndarray:
    """`values` as an array; `what` names them in errors."""
    if isinstance(values, np.ma.MaskedArray):
        raise InvalidValue(
            f"{what} is a masked array, whose masked entries would count; give its .compressed() "
            "or .filled()"
        )
    try:
        return np.asarray(values)
    except (ValueError, TypeError, OverflowError) as error:
        raise InvalidValue(
            f"{what} cannot be an array: {error}; give an array or a list of numbers"
        ) from error


def concatenate(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Several arrays, one after another; the dtype of empty ones does not count."""
    return np.concatenate([array for array in arrays if array.size] or arrays[:1])


def _hash_key(key: Any, what: str) -> np.ndarray:
    """64 bits of the hash of a key: uint32 [2]; those of a text of digits are those of the number.

    >>> _hash_key("17", "it").tolist(), _hash_key(17, "it").tolist()
    ([257172293, 399311893], [257172293, 399311893])
    """
    if isinstance(key, np.ndarray) and (key.dtype, key.shape) == KEY:
        return key  # of another corpus
    key = key.item() if isinstance(key, np.generic) else key
    is_text = isinstance(key, str | bytes)
    if not (key.strip() if is_text else isinstance(key, int) and not isinstance(key, bool)):
        raise InvalidValue(
            f"{what} is {key!r:.60} ({type(key).__name__}); a key is a text or a whole number, "
            "and not empty: convert others in the records, such as a date to text and 7.0 to 7, "
            "give an entry of a dict a field of its own, and a record without a key one of its own"
        )
    content = key if isinstance(key, bytes) else str(key).encode(errors="surrogatepass")
    return np.frombuffer(hashlib.sha256(content).digest()[:8], "<u4").astype(np.uint32)


def _kind(dtype: np.dtype) -> str:
    """The `kind` of a dtype; that of bfloat16, which NumPy does not know, is "f"."""
    return "f" if dtype == bfloat16 else dtype.kind


def _can_hold(dtype: np.dtype, value: float) -> bool:
    """Whether a dtype can hold a number; floating-point dtypes may round it."""
    if _kind(dtype) == "f":
        return abs(value) == math.inf or abs(value) <= float(finfo(dtype).max)
    least, most = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    return least <= value <= most and value == int(value)


@dataclasses.dataclass(frozen=True)
class Feature:
    """The schema of a column that examples carry beside their tokens.

    >>> Feature("targets", dtype="float32")  # one number for each token that is predicted
    Feature(of='targets', dtype=dtype('float32'), shape=(), fill=None, to=None)
    >>> Feature("patches", dtype="uint8", shape=588)  # a side of arrays: a patch at each position
    Feature(of='patches', dtype=dtype('uint8'), shape=(588,), fill=None, to=None)

    Args:
        of: "inputs" or "targets": an array `[n, *shape]` for an example of n tokens. In a batch,
            the entry of a token lies where the token is an input, or where it is predicted, as
            `loss_weights` do. "example": one value, of `shape`, for an example. "continuation", for
            groups: a value for each continuation of an example, `[continuations, *shape]`. Any
            other name is that of a side, whose features are `[n, *shape]` for its n positions in an
            example.
        dtype: in the batch, boolean or a number of at most 32 bits, also "bfloat16". Default None:
            that of the first example's data, with 32 bits in place of 64.
        shape: that of the value of one token, or of one example; default a number.
        fill: the value where the feature is missing: in a corpus of a mixture, a record, or a span
            of a template; default None: refused.
        to: makes the feature a pointer: its values, int32, are positions of this side in the same
            example, or -1 for none. In a batch, they are columns of the row, and -1 on padding.
        key: makes the feature a key of examples, such as the conversation that each is of: a text
            or a whole number, of which 64 bits of a hash are kept, as uint32 [2]. `split` holds
            examples with one key out together. Batches have it on request alone.

    Raises:
        ValueError: an argument is not as above.
    """

    of: str
    dtype: Any = dataclasses.field(default=None, kw_only=True)
    shape: tuple[int, ...] = dataclasses.field(default=(), kw_only=True)
    fill: float | None = dataclasses.field(default=None, kw_only=True)
    to: str | None = dataclasses.field(default=None, kw_only=True)
    key: bool = dataclasses.field(default=False, kw_only=True, repr=False)

    def __post_init__(self) -> None:
        self._check_sides()
        if self.key:
            is_default = self.dtype in (None, KEY[0]) and self.shape in ((), [*KEY[1]], KEY[1])
            if self.of != "example" or not is_default or self.fill is not None:
                raise InvalidValue(
                    f"key is {self.key!r} for values of {self.of!r} with dtype {self.dtype}, shape "
                    f"{self.shape} and fill {self.fill}; a key is of an 'example', and has none of "
                    "these"
                )
            object.__setattr__(self, "dtype", KEY[0])
            object.__setattr__(self, "shape", KEY[1])
        shape = self.shape if isinstance(self.shape, tuple | list) else (self.shape,)
        object.__setattr__(self, "shape", tuple(require_whole("shape", n, 1) for n in shape))
        if self.fill is not None:
            fill: Any = self.fill.item() if isinstance(self.fill, np.generic) else self.fill
            if not isinstance(fill, int | float):
                raise InvalidValue(f"fill is {fill!r}; it must be a number")
            object.__setattr__(self, "fill", fill)
        if self.dtype is not None:
            try:
                dtype = np.dtype(self.dtype)
            except TypeError as error:
                raise InvalidValue(f"dtype is {self.dtype!r}; {error}") from error
            if _kind(dtype) not in "biuf" or dtype.itemsize > 4:
                raise InvalidValue(
                    f"dtype is {dtype}; it must be bool, or of integers or floating-point numbers "
                    "of at most 32 bits, as devices have them"
                )
            object.__setattr__(self, "dtype", dtype)
            if self.fill is not None and not _can_hold(dtype, self.fill):
                raise InvalidValue(f"fill is {self.fill!r}, which {dtype} cannot hold")

    def _check_sides(self) -> None:
        of, taken = self.of, {*RESERVED} - {*OF}
        if not isinstance(of, str) or not of.isidentifier() or of in taken:
            raise InvalidValue(
                f"of is {of!r}; it must be one of {', '.join(OF)}, or the name of a side, of "
                "letters, digits and _"
            )
        if self.of_arrays and (meant := difflib.get_close_matches(of, OF, 1, 0.85)):
            raise InvalidValue(f"of is {of!r}, too like {meant[0]!r} for the name of a side")
        if self.to is not None:
            if self.per_example or self.dtype not in (None, np.int32, "int32"):
                raise InvalidValue(
                    f"to is {self.to!r}, which makes a pointer; its dtype is int32, and it is of "
                    f"the positions of a side, not {self.dtype} of {of}"
                )
            object.__setattr__(self, "dtype", np.dtype(np.int32))
            object.__setattr__(self, "fill", NOWHERE)

    @property
    def per_example(self) -> bool:
        """Whether an example has one value, rather than one for each of its tokens.

        Nodes of groups are stored as examples, each with one value of "continuation".
        """
        return self.of in ("example", "continuation")

    @property
    def of_arrays(self) -> bool:
        """Whether it is of a side of arrays, rather than of tokens, continuations or an example."""
        return self.of not in OF

    @property
    def size(self) -> int:
        """The count of numbers in one value."""
        return math.prod(self.shape)

    @property
    def as_json(self) -> dict[str, Any]:
        """The arguments, as JSON; the dtype must be known."""
        shown = {"of": self.of, "dtype": self.dtype.name, "shape": [*self.shape], "fill": self.fill}
        shown |= {} if self.to is None else {"to": self.to}
        return shown | ({"key": True} if self.key else {})

    def filled(self, count: int) -> np.ndarray:
        """`count` values that are `fill`, or 0: `[count, *shape]`."""
        return np.full((count, *self.shape), self.fill or 0, self.dtype)

    def infer(self, values: Any, what: str) -> "Feature":
        """The same feature with a dtype, by default that of `values`."""
        if self.dtype is not None:
            return self
        array = as_array(values, what)
        if not array.size and not hasattr(values, "dtype"):
            raise InvalidValue(
                f"{what} is an empty list, which tells no dtype; give the feature a dtype=, or an "
                "empty array that has it"
            )
        dtype = array.dtype
        narrow = {"i": np.int32, "u": np.uint32, "f": np.float32}
        if _kind(dtype) not in "biuf":
            raise InvalidValue(f"{what} has dtype {dtype}; give booleans or numbers, or a dtype=")
        if dtype.itemsize > 4:
            dtype = np.dtype(narrow[dtype.kind])
        return dataclasses.replace(self, dtype=dtype)

    def as_stored(self, values: np.ndarray) -> np.ndarray:
        """Values as they are stored: booleans as bytes, those of bfloat16 as their bits, uint16."""
        if self.dtype.kind == "b":
            return values.view(np.uint8)
        return values.view(np.uint16) if self.dtype == bfloat16 else values

    def restore(self, stored: np.ndarray) -> np.ndarray:
        """Stored numbers, flat, as values `[n, *shape]`; a boolean is stored as a byte."""
        as_bits = self.dtype.kind == "b" or self.dtype == bfloat16
        values = stored.view(self.dtype) if as_bits else stored.astype(self.dtype, copy=False)
        return values.reshape(-1, *self.shape)

    def convert(self, entries: Sequence[Any], what: str, counts: Sequence[int]) -> np.ndarray:
        """The entries of examples with `counts` tokens as one array of this dtype: `[n, *shape]`.

        A wrong shape, numbers that the dtype cannot hold, and NaN are refused; `what` names the
        entry in the error.
        """
        arrays = [(_hash_key if self.key else as_array)(entry, what) for entry in entries]
        for array, tokens in zip(arrays, counts, strict=True):
            shape = self.shape if self.per_example else (tokens, *self.shape)
            if array.shape != shape:
                why = "" if self.per_example else ", one value for each token"
                raise InvalidValue(f"{what} must have shape {shape}{why}, not {array.shape}")
        return self.cast(np.stack(arrays) if self.per_example else concatenate(arrays), what)

    def cast(self, array: np.ndarray, what: str) -> np.ndarray:
        """`array` of any shape as one of this dtype; errors are those of `convert`."""
        is_float = _kind(array.dtype) == "f"
        if array.dtype == self.dtype and not (is_float and np.isnan(array).any()):
            return array
        if array.size == 0:
            return array.astype(self.dtype)
        kinds = {"b": "b", "i": "biu", "u": "biu", "f": "biuf"}[_kind(self.dtype)]
        if _kind(array.dtype) not in kinds:
            raise InvalidValue(
                f"{what} cannot be cast from {array.dtype} to {self.dtype}; convert it, or give "
                "the feature another dtype="
            )
        if self.dtype.kind in "iu":
            allowed, least, most = np.iinfo(self.dtype), int(array.min()), int(array.max())
            if least < allowed.min or most > allowed.max:
                wrong = least if least < allowed.min else most
                raise InvalidValue(
                    f"{what} holds {wrong}; {self.dtype} holds {allowed.min} to {allowed.max}"
                )
        if is_float and np.isnan(array).any():
            raise InvalidValue(
                f"{what} cannot hold NaN; give a number, and a mask as another feature"
            )
        with np.errstate(over="ignore"):
            cast = array.astype(self.dtype, copy=False)
        if _kind(self.dtype) == "f" and (over := np.isinf(cast) & np.isfinite(array)).any():
            limit = float(finfo(self.dtype).max)
            raise InvalidValue(
                f"{what} holds {array[over][0]:g}; {self.dtype} holds numbers up to {limit:.3g}"
            )
        return cast


# Tokens and loss weights are features with names of their own: the columns "tokens" and
# "weights" of examples, and fields of the task and "loss_weights" of batches.
TOKEN_IDS = Feature("inputs", dtype=np.int32)
LOSS_WEIGHTS = Feature("targets", dtype=np.float32, fill=1.0)
OF_TOKENS = {TOKENS: TOKEN_IDS, WEIGHTS: LOSS_WEIGHTS}

# Columns that say on which tokens to train, as several programs name them. The last has the number
# of tokens of the prompt.
PROMPT = "sources_len"
MASKS = (
    *("labels", "completion_mask", "assistant_masks", "assistant_mask", "loss_mask", "loss_masks"),
    *("response_mask", "targets_loss_mask", PROMPT),
)
PADDING = "attention_mask"  # what is 0 in this column is padding


class Column(NamedTuple):
    """The values of a feature of some examples, one example after another.

    Attributes:
        feature: the schema of the values.
        values: `[tokens, *shape]` over all examples; for a feature of examples,
            `[examples, *shape]`.
    """

    feature: Feature
    values: np.ndarray


def check_features(features: Mapping[str, Feature] | None) -> dict[str, Feature]:
    """`features` as a dict, after checking their names."""
    features = {} if features is None else features
    require_type("features", features, Mapping, "a dict of pipeline.Feature by name")
    features = dict(features)
    for name, feature in features.items():
        if not isinstance(feature, Feature):
            raise InvalidType(
                f"features[{name!r}] is {feature!r:.80}; it must be a pipeline.Feature, such as "
                "Feature('targets') or Feature('example')"
            )
        if not isinstance(name, str) or not name.isidentifier() or name in RESERVED:
            raise InvalidValue(
                f"a feature is named {name!r}; a name is that of a field (give an entry of one a "
                "field of its own in the records), has letters, digits and _, and is none of "
                f"{', '.join(RESERVED)}, which batches have"
            )
    return features


def split_columns(
    columns: Any, features: Mapping[str, Feature] | None
) -> tuple[dict[str, Any], dict[str, Feature]]:
    """Columns by name, among them `TOKENS`; and the features of the others and of the weights.

    Args:
        columns: a sequence of arrays of token ids; or a dict with such a sequence as `"tokens"`,
            optionally `"weights"`, and a column for each feature by its name.
        features: the features by name.
    """
    features = check_features(features)
    if not isinstance(columns, Mapping):
        if features:
            raise InvalidValue(
                f"features are {', '.join(features)}, but only tokens are given; give a dict of "
                "columns, {'tokens': …, "
                f"{next(iter(features))!r}: …}}"
            )
        return {TOKENS: columns}, {}
    has_arrays = any(feature.of_arrays for feature in features.values())
    if TOKENS not in columns and (WEIGHTS in columns or not has_arrays):
        raise InvalidValue(
            f"columns are {', '.join(map(str, columns)) or 'none'}; one of them must be 'tokens', "
            "the token ids of each example, or have a feature of a side of arrays"
        )
    for name in columns:
        if name not in (TOKENS, WEIGHTS, *features):
            if name in (*MASKS, PADDING, "loss_weights"):
                how = {
                    "labels": ": labels != -100",
                    PROMPT: ": 0 for tokens of the prompt, and 1",
                    PADDING: "; or drop the padding",
                }.get(name, "")
                raise InvalidValue(
                    f"the column {name!r} says on which tokens to train, which batches read from "
                    f"the column 'weights' alone, a number for each token; give it as that{how}"
                )
            raise InvalidValue(
                f"the column {name!r} has no feature; describe it with features="
                f"{{{name!r}: pipeline.Feature('targets')}}, or remove it"
            )
    if missing := [name for name in features if name not in columns]:
        raise InvalidValue(f"the feature {missing[0]!r} has no column; give one, or remove it")
    columns = dict(columns)
    if columns.get(WEIGHTS) is None:
        columns.pop(WEIGHTS, None)
    return columns, features | ({WEIGHTS: LOSS_WEIGHTS} if WEIGHTS in columns else {})


def require_known(names: Iterable[str], features: Mapping[str, Feature]) -> None:
    """Refuses names of features that batches of a corpus cannot have; `features` are these."""
    for name in names:
        if name not in features:
            raise InvalidValue(
                f"the corpus has no feature {suggest_option(str(name), [*features])}"
            )


def zip_columns(columns: Mapping[str, Iterable[Any]]) -> Iterator[tuple[int, dict[str, Any]]]:
    """The number of each example, and its entry in each column; columns must have equal sizes."""
    for name, column in columns.items():
        kind = "__getitem__" if hasattr(column, "__getitem__") else "__iter__"
        wanted = "a list, or an array, with one entry an example"
        require_type(f"columns[{name!r}]", column, kind, wanted)
    missing = object()
    for number, row in enumerate(itertools.zip_longest(*columns.values(), fillvalue=missing)):
        entries = dict(zip(columns, row, strict=True))
        for name in [name for name, entry in entries.items() if entry is missing][:1]:
            raise InvalidValue(
                f"the column {name!r} ends after {counted(number, 'example')}, before the others; "
                "each column has one entry for each example"
            )
        yield number, entries
