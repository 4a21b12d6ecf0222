"""Tokens of other programs, in place: columns of Arrow and Parquet files, and flat arrays."""

import functools
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict, Unpack, get_args

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from etils import epath

from pipeline.corpus import column_masks, decoded, token_files
from pipeline.corpus.gather import Fields, address_of, gather
from pipeline.corpus.interface import SingleCorpus
from pipeline.corpus.parts import Segments
from pipeline.corpus.reader import InMemory, Pieces, Reader
from pipeline.corpus.tasks import CAUSAL, INPUTS, Task
from pipeline.corpus.token_files import Lists, TokenFiles
from pipeline.errors import InvalidType, InvalidValue, require_whole, suggest_option
from pipeline.planning.identity import fingerprint_of
from pipeline.text.features import (
    LOSS_WEIGHTS,
    TOKEN_IDS,
    TOKENS,
    WEIGHTS,
    Feature,
    check_features,
)
from pipeline.text.ragged import IDS
from pipeline.text.sources import ArrowFiles, ParquetFiles, files
from pipeline.text.tokenizers import Tokenizer


class Options(TypedDict, total=False):
    """The options of every kind of `InPlace`.

    task: decides the fields and the lengths (`CAUSAL`); see `pipeline.corpus.tasks`.
    vocab_size: ids are below this; default: that of the tokenizer, or unknown.
    tokenizer: made the ids. It decodes them, and lets the corpus join others of the same tokenizer.
    marks: the ids to read before and after each example, if the files lack them, or None, such as
        (1, None); the tokens are not copied. A last mark has the weight 1.
    """

    task: Task
    vocab_size: int | None
    tokenizer: Tokenizer | None
    marks: tuple[int | None, int | None]


class ColumnOptions(Options, total=False):
    """The options of `InPlace.arrow` and `InPlace.parquet`.

    features: columns to read as features, by name; for tokens, lists with a value for each.
    labels: a column of the ids themselves, or -100 where there is no loss, not shifted.
    weights: columns with a weight for each token, such as "completion_mask", whose product counts;
        `sources_len` has the number of tokens without a loss at the start. (): train on all tokens,
        though the files have such columns. In a column `attention_mask`, 0 is padding, which is
        dropped; a column `seq_lengths` divides rows into the sequences that are packed into them.
    """

    features: Mapping[str, Feature] | None
    labels: str | None
    weights: str | Sequence[str] | None


class InPlace(SingleCorpus):
    """Tokens that another program stored, read in place; made by one of its class methods.

    Memory holds where each example begins (8 bytes) and its length (4). Ids must be from 0 and
    below `vocab_size` and 2**31, which is checked as they are read; `verify` reads everything.
    Files in object storage are read into memory.

    Attributes:
        directory: the directory that stands for it, if it was opened by a link.
    """

    directory: epath.Path

    def __init__(
        self,
        lists: Sequence[Lists],
        *,
        fingerprint: str,
        make: functools.partial["InPlace"],
        features: Mapping[str, tuple[Feature, Sequence[Lists]]] | None = None,
        weights: Sequence[Lists] | None = None,
    ):
        self._make, self.task = make, make.keywords.get("task", CAUSAL)
        self._lists, columns = lists, {TOKENS: (TOKEN_IDS, lists), **(features or {})}
        self.weighted = weights is not None
        if weights is not None:
            columns[WEIGHTS] = LOSS_WEIGHTS, weights
        tokens = np.concatenate([counts for _, _, counts in lists])
        self.marks = _check_marks(make.keywords.get("marks"))
        self._counts = tokens if self.marks else tokens[:0]
        added = sum(mark is not None for mark in self.marks)
        self.lengths = self.task.lengths(tokens + added)
        self.lengths.flags.writeable = False
        for name, (_, some) in columns.items():
            if len(kinds := {f"{values.dtype}" for values, _, _ in some}) > 1:
                raise InvalidValue(
                    f"the {name} of {self!r} are {' and '.join(sorted(kinds))}; give them the same "
                    "type in all files, or join several corpora with Corpora"
                )
        segments = {name: _segments(of_column) for name, (_, of_column) in columns.items()}
        self.reader = Reader(
            INPUTS if self.marks else self.task,
            self.lengths,
            np.array([len(tokens)]),
            {name: feature for name, (feature, _) in columns.items()},
            [InMemory(segments, columns)],
            owner=f"{self!r}",
        )
        self.vocab_size, made_by = make.keywords.get("vocab_size"), "none"
        if self.tokenizer is not None:
            self.vocab_size = self.vocab_size or self.tokenizer.vocab_size
            made_by = self.tokenizer.fingerprint
        self.identity = {"tokens": fingerprint, "tokenizer": made_by, "task": self.task.name}
        if self.marks:
            self.identity["tokens"] += f"-marks-{fingerprint_of(self.marks)[:12]}"
        self.features = {name: feature for name, (feature, _) in (features or {}).items()}
        if self.marks and not all(each.per_example for each in self.features.values()):
            raise InvalidValue("features of tokens have no values for marks; omit one of the two")
        for name, feature in self.task.check(self.features).items():
            found = np.concatenate([counts for _, _, counts in columns[name][1]])
            due = (1 if feature.per_example else tokens) * feature.size
            for wrong in np.flatnonzero(found != due)[:1]:
                raise InvalidValue(
                    f"{name} of example {wrong:,} of {self!r} has {found[wrong]:,} numbers for "
                    f"{tokens[wrong]:,} tokens; correct it to match {feature}"
                )
        self.reader.vocab_size = min(self.vocab_size or IDS, IDS)

    @classmethod
    def arrow(
        cls,
        paths: files.Paths,
        column: str = "input_ids",
        *,
        split: str | None = None,
        **options: Unpack[ColumnOptions],
    ) -> "InPlace":
        """Lists of ids in Arrow IPC or Feather files, mapped into memory.

        Args:
            paths: names or globs, as for `sources.ArrowFiles`; or the folder of a Hugging Face data
                set that was saved to disk, whose `state.json` names its files.
            column: the column of ids, whose entries are lists of integers.
            split: the split to read, if the data set has some.
            **options: see `ColumnOptions`.
        """
        make = _call(cls.arrow, paths, column, split=split, **options)
        return cls._of_columns(ArrowFiles, token_files.saved_files(paths, split), make)

    @classmethod
    def parquet(
        cls, paths: files.Paths, column: str = "input_ids", **options: Unpack[ColumnOptions]
    ) -> "InPlace":
        """Lists of ids in Parquet files, all decoded into memory: 4 bytes for an int32.

        Parquet has no random access; prepare what does not fit into memory, or convert it to
        Arrow. Arguments are those of `arrow`.
        """
        make = _call(cls.parquet, paths, column, **options)
        return cls._of_columns(ParquetFiles, paths, make)

    @classmethod
    def npy(
        cls,
        tokens: epath.PathLike,
        offsets: epath.PathLike,
        **options: Unpack[Options],
    ) -> "InPlace":
        """A flat `.npy` array of ids, mapped, with the offsets of examples in another.

        Args:
            tokens: a file with an integer array [tokens].
            offsets: a file with integers [examples + 1], from 0 to the number of tokens: example
                `i` is `tokens[offsets[i]:offsets[i + 1]]`.
            **options: see `Options`.
        """
        found = files.find([tokens, offsets])
        flat, edges = (_array(path) for path in found)
        counts = np.diff(edges.astype(np.int64))
        if len(edges) < 2 or counts.min() < 0 or (edges[0], edges[-1]) != (0, len(flat)):
            raise InvalidValue(
                f"{os.fspath(found[1])} does not hold offsets into {len(flat):,} tokens; write "
                "one more than there are examples, ascending, from 0 to that number, as "
                "np.append(0, np.cumsum(lengths))"
            )
        make = _call(cls.npy, tokens, offsets, **options)
        lists = flat, edges[:-1].astype(np.int64), counts
        return cls([lists], fingerprint=f"npy-{files.digest(found)}", make=make)

    @classmethod
    def megatron(cls, prefixes: files.Paths, **options: Unpack[Options]) -> "InPlace":
        """The documents of Megatron's indexed data sets, mapped.

        Args:
            prefixes: one or several, or globs: `data/my_text_document` stands for the files
                `data/my_text_document.bin` and `.idx`. Several sequences of a document (of
                `…_sentence`) are one example.
            **options: see `Options`.
        """
        make = _call(cls.megatron, prefixes, **options)
        return cls._of_files(token_files.megatron(prefixes), make)

    @classmethod
    def flat(
        cls,
        paths: files.Paths,
        *,
        dtype: Any = None,
        end: int | tuple[()] | None = None,
        begin: int | None = None,
        skip: int = 0,
        weights: files.Paths | None = None,
        **options: Unpack[Options],
    ) -> "InPlace":
        """The documents of files that hold ids alone, as nanoGPT, llm.c and OLMo write; mapped.

        A document that goes on in the next file is one example, which is copied.

        Args:
            paths: names or globs; the order of the files is that of the tokens.
            dtype: of the ids, such as "uint16"; None: by the header of llm.c's files.
            end: the id that ends each document (nanoGPT: 50256); (): each file is one document.
            begin: the id that begins each document, instead of `end` (llm.c: by the header). A file
                `NAME.csv.gz` beside `NAME.npy`, with lines `start,end,…`, decides before both.
            skip: the bytes before the ids of each file.
            weights: names or globs of files with a byte for each token, 1 to train on it; (): train
                on all tokens, though there are files `labels_mask…` beside `token_ids…`.
            **options: see `Options`.
        """
        layout: Any = {"dtype": dtype, "end": end, "begin": begin, "skip": skip, "weights": weights}
        make = _call(cls.flat, paths, **layout, **options)
        return cls._of_files(token_files.flat(paths, **layout), make)

    @classmethod
    def datatrove(
        cls,
        paths: files.Paths,
        *,
        weights: str | tuple[()] | None = None,
        **options: Unpack[Options],
    ) -> "InPlace":
        """The documents of datatrove's `.ds` files, with the `.ds.index` of each, mapped.

        Args:
            paths: a folder of such files, or their names or globs.
            weights: "loss" to train on the tokens that `.ds.loss` says; (): on all, though there
                are such files.
            **options: see `Options`.
        """
        make = _call(cls.datatrove, paths, weights=weights, **options)
        return cls._of_files(token_files.datatrove(paths, weights), make)

    @classmethod
    def mds(
        cls,
        folder: epath.PathLike,
        column: str = "tokens",
        *,
        end: int | None = None,
        dtype: Any = "int64",
        **options: Unpack[ColumnOptions],
    ) -> "InPlace":
        """The samples of a folder of MosaicML's Streaming (MDS), decoded once into the cache.

        The Arrow file that holds them, in the directory of the user's caches, is then mapped.

        Args:
            folder: the folder of a split, with `index.json`.
            column: the column of ids: of arrays, or of bytes.
            end: the id that ends each document, if samples are windows over several; None: a sample
                is an example.
            dtype: of ids that are stored as bytes (int64, as LLM Foundry has them).
            **options: see `ColumnOptions`.
        """
        make = _call(cls.mds, folder, column, end=end, dtype=dtype, **options)
        return cls._of_columns(ArrowFiles, decoded.mds(folder, column, dtype, end), make)

    @classmethod
    def levanter(
        cls,
        folder: epath.PathLike,
        column: str = "input_ids",
        **options: Unpack[ColumnOptions],
    ) -> "InPlace":
        """The rows of a finished cache of Levanter's, decoded once into the cache, as for `mds`.

        Args:
            folder: the folder of a split, with `shard_ledger.json`; local.
            column: the column of ids.
            **options: see `ColumnOptions`.
        """
        make = _call(cls.levanter, folder, column, **options)
        return cls._of_columns(ArrowFiles, decoded.levanter(folder, column), make)

    @classmethod
    def _of_files(cls, found: TokenFiles, make: functools.partial["InPlace"]) -> "InPlace":
        layout = {
            name: f"{value}"
            for name, value in make.keywords.items()
            if value is not None and name not in ("weights", *Options.__annotations__)
        }
        if not any(len(counts) for _, _, counts in found.tokens):
            raise InvalidValue(f"{make.args[0]} holds no document; give files with at least one")
        name = f"{make.func.__name__}-{files.digest(found.files)}"
        name += f"-{fingerprint_of(layout)[:12]}" if layout else ""
        return cls(found.tokens, fingerprint=name, make=make, weights=found.weights)

    @classmethod
    def _of_columns(
        cls,
        kind: type[ArrowFiles | ParquetFiles],
        paths: files.Paths,
        make: functools.partial["InPlace"],
    ) -> "InPlace":
        column, given = make.args[1], make.keywords
        labels, wanted = given.get("labels"), check_features(given.get("features"))
        chosen = labels, given.get("weights"), wanted
        masks = column_masks.choose(kind(paths).names() - {column}, *chosen)
        source = kind(paths, columns=[column, *wanted, *masks])
        kinds, found = {column: None, **wanted, **masks}, []
        for place, table in source.groups():
            columns = [pa.chunked_array(table.column(name)).chunks for name in kinds]
            if any([*map(len, each)] != [*map(len, columns[0])] for each in columns):
                columns = [[pa.concat_arrays(each)] for each in columns]
            for pieces in zip(*columns, strict=True):
                lists = {
                    name: _lists(f"{place} {name}", piece, kinds[name])
                    for name, piece in zip(kinds, pieces, strict=True)
                }
                column_masks.cut(lists, column, wanted)
                if names := [name for name in masks if name in lists]:
                    lists[WEIGHTS] = column_masks.weigh(lists, column, names, labels)
                found.append(lists)
        if not found:
            raise InvalidValue(f"{source} is empty; give files with at least one row")
        by_name = {name: [lists[name] for lists in found] for name in found[0]}
        features = {
            name: (feature.infer(by_name[name][0][0][:0], name), by_name[name])
            for name, feature in wanted.items()
        }
        weights = by_name.get(WEIGHTS)
        if weights is not None and len({values.dtype for values, _, _ in weights}) > 1:
            weights = [(values.astype(np.float32), at, counts) for values, at, counts in weights]
        corpus = cls(
            by_name[column],
            fingerprint=source.fingerprint,
            make=make,
            features=features,
            weights=weights,
        )
        if weights is not None and not corpus.marks:
            corpus.num_learnt = sum(corpus.task.count_learnt(n, each) for each, _, n in weights)
        return corpus

    def _read(self, pieces: Pieces, names: Sequence[str]) -> Fields:
        if not self.marks:
            return super()._read(pieces, names)
        examples, starts, lengths, reach, _ = pieces
        begin, end = self.marks
        # A piece is read as three: a place for the mark before it, its tokens, and one after it.
        sizes, first = lengths + self.task.lookahead, starts - (begin is not None)
        before = (first < 0).astype(np.int64)
        first += before
        stored = np.minimum(sizes - before, self._counts[examples] - first)
        zeros = np.zeros_like(stored)
        parts = (
            (zeros, first, zeros),
            (zeros, stored, zeros),
            (before, stored, sizes - before - stored),
        )
        fields = self.reader.read(
            Pieces(examples.repeat(3), *(np.stack(each, axis=1).ravel() for each in parts)), ()
        )
        at, found = np.cumsum(sizes) - sizes, {}
        last = sizes > before + stored
        for name, values in fields.items():
            values = values.copy()
            values[at[before > 0]] = (begin or 0) if name == "inputs" else 1
            values[(at + sizes - 1)[last]] = (end or 0) if name == "inputs" else 1
            feature = LOSS_WEIGHTS if name == "loss_weights" else TOKEN_IDS
            of = WEIGHTS if name == "loss_weights" else TOKENS
            for field, shift in self.task.fields_of(of, feature).items():
                found[field] = gather(values, at + shift, lengths, reach)
        return found

    @property
    def call(self) -> tuple[str, files.Paths, Mapping[str, Any]]:
        """The name of the class method that made it, its paths, and its options."""
        bound = inspect.signature(self._make.func).bind(*self._make.args, **self._make.keywords)
        (_, paths), *others = bound.arguments.items()
        options = dict(others)
        return self._make.func.__name__, paths, options.pop("options", {}) | options

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer that was given."""
        return self._make.keywords.get("tokenizer")

    def verify(self) -> None:
        """Reads everything, and refuses ids that are negative or not below the vocabulary size."""
        example = 0
        for flat, begins, counts in self._lists:
            for begin, count in zip(begins.tolist(), counts.tolist(), strict=True):
                at = np.array([example])
                self.reader.require_ids(flat[begin : begin + count], at, np.array([count]))
                example += 1

    def __reduce__(self) -> tuple[Any, ...]:
        return self._make, ()

    def __repr__(self) -> str:
        return f"InPlace.{self._make.func.__name__}({', '.join(map(repr, self._make.args))})"


def _check_marks(given: Any) -> tuple[int | None, int | None] | tuple[()]:
    if given in (None, (), (None, None)):
        return ()
    if not isinstance(given, tuple) or len(given) != 2:
        raise InvalidValue(f"marks is {given!r}; give two ids or None, such as (1, None)")
    begin, end = (None if mark is None else require_whole("a mark", mark, 0) for mark in given)
    return begin, end


def _call(
    function: Callable[..., InPlace], *paths: Any, **options: Any
) -> functools.partial[InPlace]:
    """The call of a class method of `InPlace`; refuses options that it does not have."""
    parameters = [*inspect.signature(function).parameters.values()]
    of_all = get_args(parameters[-1].annotation)[0].__annotations__
    known = [*of_all, *(each.name for each in parameters if each.kind is each.KEYWORD_ONLY)]
    for name in options:
        if name not in known:
            raise InvalidType(f"{function.__name__}() has no option {suggest_option(name, known)}")
    return functools.partial(function, *paths, **options)


def _segments(lists: Sequence[Lists]) -> Segments:
    """Where the lists of a column are, which have one dtype: each at an address of its own."""
    begins = [address_of(flat) + flat.itemsize * begin for flat, begin, _ in lists]
    return Segments(lists[0][0].dtype, 0, np.concatenate(begins), 1)


def _array(path: epath.Path) -> np.ndarray:
    try:
        array = np.asarray(np.load(os.fspath(path), mmap_mode="r"))
    except (ValueError, EOFError) as error:
        raise InvalidValue(f"{os.fspath(path)} is not an .npy array: {error}") from error
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InvalidValue(
            f"{os.fspath(path)} holds an array of shape {array.shape} and dtype {array.dtype}; it "
            "must be one-dimensional and of integers"
        )
    return array


def _lists(place: str, column: pa.Array, feature: Feature | None) -> Lists:
    """The values of an Arrow column in any layout: lists of ids, or the values of a feature."""
    column = _decode(column)
    values, begins, counts = column, np.arange(len(column)), np.ones(len(column), np.int64)
    if feature is None or not feature.per_example:
        _require_all(place, column, begins, counts)
        values, begins, counts = _divide(place, column)
    size = 1 if feature is None else feature.size
    _require_all(place, values, begins, counts)
    if pa.types.is_fixed_size_list(values.type):
        if values.type.list_size != size:
            raise InvalidValue(f"{place} holds {column.type}, but the feature is {feature}")
        values, begins, counts = _decode(values.flatten()), begins * size, counts * size
        _require_all(place, values, begins, counts)
    elif size > 1:
        raise InvalidValue(
            f"{place} holds {column.type}, but the feature is {feature}; store values with a shape "
            "as fixed-size lists"
        )
    if feature is None and not pa.types.is_integer(values.type):
        raise InvalidValue(f"{place} holds {column.type}; tokens must be lists of integers")
    return values.to_numpy(zero_copy_only=False), begins, counts


def _decode(column: pa.Array) -> pa.Array:
    """The values of an array themselves, without an extension, runs or a dictionary."""
    if isinstance(column.type, pa.BaseExtensionType):
        return _decode(column.storage)
    if pa.types.is_run_end_encoded(column.type):
        return _decode(pc.call_function("run_end_decode", [column]))
    return _decode(column.dictionary_decode()) if pa.types.is_dictionary(column.type) else column


def _divide(place: str, column: pa.Array) -> tuple[pa.Array, np.ndarray, np.ndarray]:
    """The values of all lists of a column, where each list begins, and its size."""
    of = column.type
    if pa.types.is_fixed_size_list(of):
        begins = np.arange(len(column)) * of.list_size
        return _decode(column.flatten()), begins, np.full(len(column), of.list_size)
    if pa.types.is_list(of) or pa.types.is_large_list(of):
        edges = column.offsets.to_numpy().astype(np.int64)
        return _decode(column.values), edges[:-1], np.diff(edges)
    if pa.types.is_list_view(of) or pa.types.is_large_list_view(of):
        begins, counts = (
            each.to_numpy().astype(np.int64) for each in (column.offsets, column.sizes)
        )
        return _decode(column.values), begins, counts
    raise InvalidValue(f"{place} holds {of}; it must hold lists of numbers")


def _require_all(place: str, values: pa.Array, begins: np.ndarray, counts: np.ndarray) -> None:
    """Refuses values of lists that are missing."""
    if values.null_count:
        before = np.append(
            0, np.cumsum(pc.call_function("is_null", [values]).to_numpy(zero_copy_only=False))
        )
        for row in np.flatnonzero(before[begins + counts] - before[begins])[:1]:
            raise InvalidValue(
                f"{place} has missing entries, first {row:,} rows after that; leave them out, or "
                "fill them in"
            )
