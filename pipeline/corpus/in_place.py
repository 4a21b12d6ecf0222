"""Tokens of other programs, in place: columns of Arrow and Parquet files, and flat arrays."""

import functools
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict, Unpack, get_args

import numpy as np
from etils import epath

from pipeline.corpus import decoded, token_columns, token_files
from pipeline.corpus.copies import read_blocks
from pipeline.corpus.gather import Fields, address_of, gather
from pipeline.corpus.interface import SingleCorpus
from pipeline.corpus.parts import Segments
from pipeline.corpus.reader import InMemory, Pieces, Reader
from pipeline.corpus.tasks import CAUSAL, INPUTS, Task
from pipeline.corpus.token_files import Lists, TokenFiles
from pipeline.errors import InvalidType, InvalidValue, require_one_of, require_whole, suggest_option
from pipeline.planning.identity import fingerprint_of
from pipeline.text.features import LOSS_WEIGHTS, OF_TOKENS, TOKEN_IDS, TOKENS, WEIGHTS, Feature
from pipeline.text.ragged import IDS
from pipeline.text.sources import files
from pipeline.text.tokenizers import Tokenizer

# How the files of each format are read; a class method of `InPlace` has the same name.
READERS: dict[str, Callable[..., TokenFiles]] = {
    "arrow": token_columns.arrow,
    "parquet": token_columns.parquet,
    "npy": token_files.npy,
    "megatron": token_files.megatron,
    "flat": token_files.flat,
    "datatrove": token_files.datatrove,
    "mds": decoded.mds,
    "levanter": decoded.levanter,
}


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
    """The options of kinds of `InPlace` whose files have columns.

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


class FlatOptions(Options, total=False):
    """The options of `InPlace.flat`.

    dtype: of the ids, such as "uint16"; None: by the header of llm.c's files.
    end: the id that ends each document (nanoGPT: 50256); (): each file is one document.
    begin: the id that begins each document, instead of `end` (llm.c: by the header). A file
        `NAME.csv.gz` beside `NAME.npy`, with lines `start,end,…`, decides before both.
    skip: the bytes before the ids of each file.
    weights: names or globs of files with a byte for each token, 1 to train on it; (): train on all
        tokens, though there are files `labels_mask…` beside `token_ids…`.
    """

    dtype: Any
    end: int | tuple[()] | None
    begin: int | None
    skip: int
    weights: files.Paths | None


class InPlace(SingleCorpus):
    """Tokens that another program stored, read in place; made by a class method for their format.

    `InPlace("megatron", paths, …)` is `InPlace.megatron(paths, …)`.

    Memory holds where each example begins (8 bytes) and its length (4). Ids must be from 0 and
    below `vocab_size` and 2**31, which is checked as they are read; `verify` reads everything.
    Files in object storage are first copied into the directory of the user's caches.

    Attributes:
        format, paths, options: as given; without options that are None.
        marks: the ids before and after each example, or ().
        directory: the directory that stands for it, if it was opened by a link.
    """

    directory: epath.Path

    def __init__(self, format: str, paths: files.Paths, **options: Any):
        require_one_of("format", format, READERS)
        if not isinstance(paths, str | os.PathLike) and len(paths) == 1:
            (paths,) = paths
        self.format, self.paths = format, paths
        self.options = {name: value for name, value in options.items() if value is not None}
        known = _list_options(format)
        for name in self.options:
            if name not in known:
                raise InvalidType(f"{format}() has no option {suggest_option(name, known)}")
        own = {n: value for n, value in self.options.items() if n not in Options.__annotations__}
        found = READERS[format](paths, **own)
        if not found.groups:
            raise InvalidValue(f"{paths} holds no document; give files with at least one")
        self.task, self.marks = self.options.get("task", CAUSAL), _check_marks(options.get("marks"))
        self.vocab_size, made_by = self.options.get("vocab_size"), "none"
        if self.tokenizer is not None:
            self.vocab_size = self.vocab_size or self.tokenizer.vocab_size
            made_by = self.tokenizer.fingerprint
        name = f"{format}-{files.digest(found.files)}"
        if layout := [each for each in (found.layout, [*self.marks]) if each]:
            name += f"-{fingerprint_of(layout)[:12]}"
        self.identity = {"tokens": name, "tokenizer": made_by, "task": self.task.name}
        self._open(found.groups)

    def _open(self, groups: Sequence[Mapping[str, Lists]]) -> None:
        """Sets what the lists of all columns decide."""
        columns = {name: [group[name] for group in groups] for name in groups[0]}
        self.weighted, self._columns = WEIGHTS in columns, columns
        for name, lists in columns.items():
            if len(kinds := {f"{values.dtype}" for values, _, _ in lists}) > 1:
                raise InvalidValue(
                    f"the {name} of {self!r} are {' and '.join(sorted(kinds))}; give them the same "
                    "type in all files, or join several corpora with Corpora"
                )
        tokens = np.concatenate([counts for _, _, counts in columns[TOKENS]])
        self._counts = tokens if self.marks else tokens[:0]
        self.lengths = self.task.lengths(tokens + sum(mark is not None for mark in self.marks))
        self.lengths.flags.writeable = False
        self.features = {
            name: feature.infer(columns[name][0][0][:0], name)
            for name, feature in self.options.get("features", {}).items()
        }
        if self.marks and not all(each.per_example for each in self.features.values()):
            raise InvalidValue("features of tokens have no values for marks; omit one of the two")
        for name, feature in self.task.check(self.features).items():
            numbers = np.concatenate([counts for _, _, counts in columns[name]])
            due = (1 if feature.per_example else tokens) * feature.size
            for wrong in np.flatnonzero(numbers != due)[:1]:
                raise InvalidValue(
                    f"{name} of example {wrong:,} of {self!r} has {numbers[wrong]:,} numbers for "
                    f"{tokens[wrong]:,} tokens; correct it to match {feature}"
                )
        segments = {name: _segments(lists) for name, lists in columns.items()}
        self.reader = Reader(
            INPUTS if self.marks else self.task,
            self.lengths,
            np.array([len(tokens)]),
            {name: {**OF_TOKENS, **self.features}[name] for name in columns},
            [InMemory(segments, columns)],
            owner=f"{self!r}",
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
        return cls("arrow", paths, column=column, split=split, **options)

    @classmethod
    def parquet(
        cls, paths: files.Paths, column: str = "input_ids", **options: Unpack[ColumnOptions]
    ) -> "InPlace":
        """Lists of ids in Parquet files, all decoded into memory: 4 bytes for an int32.

        Parquet has no random access; prepare what does not fit into memory, or convert it to
        Arrow. Arguments are those of `arrow`.
        """
        return cls("parquet", paths, column=column, **options)

    @classmethod
    def npy(
        cls, tokens: epath.PathLike, offsets: epath.PathLike, **options: Unpack[Options]
    ) -> "InPlace":
        """A flat `.npy` array of ids, mapped, with the offsets of examples in another.

        Args:
            tokens: a file with an integer array [tokens].
            offsets: a file with integers [examples + 1], from 0 to the number of tokens: example
                `i` is `tokens[offsets[i]:offsets[i + 1]]`.
            **options: see `Options`.
        """
        return cls("npy", [tokens, offsets], **options)

    @classmethod
    def megatron(cls, prefixes: files.Paths, **options: Unpack[Options]) -> "InPlace":
        """The documents of Megatron's indexed data sets, mapped.

        Args:
            prefixes: one or several, or globs: `data/my_text_document` stands for the files
                `data/my_text_document.bin` and `.idx`. Several sequences of a document (of
                `…_sentence`) are one example.
            **options: see `Options`.
        """
        return cls("megatron", prefixes, **options)

    @classmethod
    def flat(cls, paths: files.Paths, **options: Unpack[FlatOptions]) -> "InPlace":
        """The documents of files that hold ids alone, as nanoGPT, llm.c and OLMo write; mapped.

        A document that goes on in the next file is one example, which is copied.

        Args:
            paths: names or globs; the order of the files is that of the tokens.
            **options: see `FlatOptions`.
        """
        return cls("flat", paths, **options)

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
        return cls("datatrove", paths, weights=weights, **options)

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
        return cls("mds", folder, column=column, end=end, dtype=dtype, **options)

    @classmethod
    def levanter(
        cls, folder: epath.PathLike, column: str = "input_ids", **options: Unpack[ColumnOptions]
    ) -> "InPlace":
        """The rows of a finished cache of Levanter's, decoded once into the cache, as for `mds`.

        Args:
            folder: the folder of a split, with `shard_ledger.json`.
            column: the column of ids.
            **options: see `ColumnOptions`.
        """
        return cls("levanter", folder, column=column, **options)

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
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer that was given."""
        return self.options.get("tokenizer")

    @functools.cached_property
    def _loss(self) -> tuple[int | None, np.ndarray]:
        """The number of positions with loss, if tokens have weights; and the examples without."""
        learnt, silent, first = 0, [], 0
        if not self.weighted:
            return None, super()._find_silent()
        # With a mark before it, the first token is a target, too.
        task, end = (INPUTS, self.marks[1]) if self.marks else (self.task, None)
        for values, begins, counts in self._columns[WEIGHTS]:
            weights = gather(values, begins, counts)
            learnt += task.count_learnt(counts, weights) + (end is not None) * len(counts)
            silent += [] if end is not None else [first + task.find_silent(counts, weights)]
            first += len(counts)
        return learnt, np.concatenate([super()._find_silent(), *silent])

    @property
    def num_learnt(self) -> int | None:  # type: ignore[override]  # others have an attribute
        """Positions that carry loss, counted when it is first asked for."""
        return self._loss[0]

    def _find_silent(self) -> np.ndarray:
        return self._loss[1]

    def verify(self) -> None:
        """Reads everything, and refuses ids that are negative or not below the vocabulary size."""
        for _ in read_blocks(self, np.arange(len(self)), self.lengths.astype(np.int64)):
            pass

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial(InPlace, self.format, self.paths, **self.options), ()

    def __repr__(self) -> str:
        return f"InPlace.{self.format}({self.paths!r})"


def _list_options(format: str) -> set[str]:
    """The names of the options of a format."""
    _, *others, last = inspect.signature(getattr(InPlace, format)).parameters.values()
    named = {each.name for each in others} if format != "npy" else set()
    return named | {*get_args(last.annotation)[0].__annotations__}


def _check_marks(given: Any) -> tuple[int | None, int | None] | tuple[()]:
    if given in (None, (), (None, None)):
        return ()
    if not isinstance(given, tuple) or len(given) != 2:
        raise InvalidValue(f"marks is {given!r}; give two ids or None, such as (1, None)")
    begin, end = (None if mark is None else require_whole("a mark", mark, 0) for mark in given)
    return begin, end


def _segments(lists: Sequence[Lists]) -> Segments:
    """Where the lists of a column are, which have one dtype: each at an address of its own."""
    begins = [address_of(flat) + flat.itemsize * begin for flat, begin, _ in lists]
    return Segments(lists[0][0].dtype, 0, np.concatenate(begins), 1)
