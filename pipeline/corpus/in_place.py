"""Tokens of other programs, in place: columns of Arrow files, and flat arrays."""

import abc
import functools
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from pipeline import registry
from pipeline.corpus.interface import SingleCorpus, computed
from pipeline.corpus.stored.gather import Fields, Pieces, address_of, gather
from pipeline.corpus.stored.memory import HeldPart, Segments
from pipeline.corpus.stored.reader import Reader
from pipeline.corpus.tasks import CAUSAL, INPUTS
from pipeline.corpus.token_files import Lists, TokenFiles
from pipeline.errors import InvalidType, InvalidValue, require_whole, suggest_option
from pipeline.fs.atomic import absolute
from pipeline.planning.identity import fingerprint_of
from pipeline.planning.lengths import NO_EXAMPLES
from pipeline.text import files
from pipeline.text.features import LOSS_WEIGHTS, OF_TOKENS, TOKEN_IDS, TOKENS, WEIGHTS
from pipeline.text.ragged import IDS
from pipeline.text.tokenizers import Tokenizer

# The options of all formats.
COMMON = "task", "vocab_size", "tokenizer", "marks"


class _Spellings(abc.ABCMeta):
    """Makes `InPlace.flat(paths, …)` of `InPlace("flat", paths, …)`, and so for each format."""

    def __getattr__(cls, name: str) -> Callable[..., "InPlace"]:
        formats = registry.names("tokens")
        if name not in formats:
            raise AttributeError(f"InPlace has no attribute {suggest_option(name, formats)}")

        def spelling(*paths: files.Paths, **options: Any) -> "InPlace":
            return cls(name, [*paths], **options)

        make = registry.find("tokens", name).make
        spelling.__name__, spelling.__doc__ = name, inspect.getdoc(make)
        return spelling

    def __dir__(cls) -> list[str]:
        return [*super().__dir__(), *registry.names("tokens")]


class InPlace(SingleCorpus, metaclass=_Spellings):
    """Tokens that another program stored, read in place, as `InPlace.flat("train.bin", …)`.

    `InPlace("flat", paths, …)` is the same, and so for each format: `arrow`, `npy`, `megatron` and
    `flat`; `help(InPlace.flat)` describes its files and options.

    Files are mapped. Memory holds where each example begins (8 bytes) and its length (4). Ids must
    be from 0 and below `vocab_size` and 2**31, which is checked as they are read; `verify` reads
    everything. Files in object storage are first copied into the directory of the user's caches.

    Args:
        format: the name of a format: a kind of `tokens`; see `pipeline.registry`.
        paths: names or globs of files, local or in a bucket, or what the format says.
        **options: those of the format, and four more. `task` decides the fields and the lengths
            (`CAUSAL`); see `pipeline.corpus.tasks`. Ids are below `vocab_size`; default: that of
            the tokenizer, or unknown. `tokenizer` made the ids: it decodes them, and lets the
            corpus join others of it. `marks` are the ids to read before and after each example, if
            the files lack them, or None, such as (1, None); the tokens are not copied, and a last
            mark has the weight 1.

    Attributes:
        format, paths, options: as given; without options that are None.
        marks: the ids before and after each example, or ().
        directory: the directory that stands for it, if it was opened by a link.

    Raises:
        ValueError: files are damaged, or do not fit each other or the options.
        TypeError: the format has no such option.
    """

    kind = "in_place"

    def __init__(self, format: str, paths: files.Paths, **options: Any):
        kind = self._kind = registry.find("tokens", format, "format")
        if not isinstance(paths, str | os.PathLike) and len(paths) == 1:
            (paths,) = paths
        self.format, self.paths = format, paths
        self.options = {name: value for name, value in options.items() if value is not None}
        allowed = {*COMMON, *kind.options}
        for name in self.options:
            if name not in allowed:
                raise InvalidType(
                    f"the format {format!r} has no option {suggest_option(name, allowed)}"
                )
        format_options = {n: value for n, value in self.options.items() if n not in COMMON}
        token_files = kind.make(paths, **format_options)
        if not token_files.sections:
            raise InvalidValue(f"{paths} holds no document; give files with at least one")
        self.task, self.marks = self.options.get("task", CAUSAL), _check_marks(options.get("marks"))
        self.vocab_size, made_by = self.options.get("vocab_size"), "none"
        if self.tokenizer is not None:
            self.vocab_size = self.vocab_size or self.tokenizer.vocab_size
            made_by = self.tokenizer.fingerprint
        self._limit = min(self.vocab_size or IDS, IDS)
        if wrong := [mark for mark in self.marks if mark is not None and mark >= self._limit]:
            raise InvalidValue(f"marks has the id {wrong[0]}; ids must be below {self._limit}")
        name = f"{format}-{files.digest(token_files.files)}"
        if layout := [entry for entry in (token_files.layout, [*self.marks]) if entry]:
            name += f"-{fingerprint_of(layout)[:12]}"
        self.identity = {"tokens": name, "tokenizer": made_by, "task": self.task.name}
        self._open(token_files)

    def _open(self, token_files: TokenFiles) -> None:
        """Sets what the lists of all columns decide."""
        sections = token_files.sections
        columns = {name: [section[name] for section in sections] for name in sections[0]}
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
            for name, feature in token_files.features.items()
        }
        if self.marks and not all(feature.per_example for feature in self.features.values()):
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
            [HeldPart(segments, columns)],
            owner=f"{self!r}",
            vocab_size=self._limit,
        )

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
        triples = (
            (zeros, first, zeros),
            (zeros, stored, zeros),
            (before, stored, sizes - before - stored),
        )
        thirds = (np.stack(triple, axis=1).ravel() for triple in triples)
        fields = self.reader.read(Pieces(examples.repeat(3), *thirds), ())
        begins, result = np.cumsum(sizes) - sizes, {}
        last = sizes > before + stored
        for name, values in fields.items():
            values = values.copy()
            values[begins[before > 0]] = (begin or 0) if name == "inputs" else 1
            values[(begins + sizes - 1)[last]] = (end or 0) if name == "inputs" else 1
            feature = LOSS_WEIGHTS if name == "loss_weights" else TOKEN_IDS
            column = WEIGHTS if name == "loss_weights" else TOKENS
            for field, shift in self.task.fields_of(column, feature).items():
                result[field] = gather(values, begins + shift, lengths, reach)
        return result

    @computed
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer that was given."""
        return self.options.get("tokenizer")

    @functools.cached_property
    def _loss(self) -> tuple[int | None, np.ndarray]:
        """The number of positions with loss, if tokens have weights; and the examples without."""
        learnt, silent, first = 0, [], 0
        if not self.weighted:
            return None, NO_EXAMPLES
        # With a mark before it, the first token is a target, too.
        task, end = (INPUTS, self.marks[1]) if self.marks else (self.task, None)
        for values, begins, counts in self._columns[WEIGHTS]:
            weights = gather(values, begins, counts)
            learnt += task.count_learnt(counts, weights) + (end is not None) * len(counts)
            silent += [] if end is not None else [first + task.find_silent(counts, weights)]
            first += len(counts)
        return learnt, np.concatenate([NO_EXAMPLES, *silent])

    @computed
    def num_learnt(self) -> int | None:
        """Positions that carry loss, counted when it is first asked for."""
        return self._loss[0]

    @computed
    def silent(self) -> np.ndarray:
        """The examples without loss."""
        return self._loss[1]

    def verify(self) -> None:
        """Reads everything, and refuses ids that are negative or not below the vocabulary size."""
        numbers = np.arange(len(self))
        for _ in self.read_blocks(numbers, 0 * numbers, self.lengths.astype(np.int64)):
            pass

    def arguments(self) -> dict[str, Any]:
        """See `AnyCorpus`."""
        options = {name: self._as_argument(name, value) for name, value in self.options.items()}
        return {"format": self.format, "paths": _absolute(self.paths), **options}

    def _as_argument(self, name: str, value: Any) -> Any:
        """The value of an option; names of files are whole, and features have their dtypes."""
        if isinstance(value, Mapping):
            return {key: self.features.get(key, feature) for key, feature in value.items()}
        option = self._kind.options.get(name)
        return _absolute(value) if option is not None and option.names_files else value

    def __repr__(self) -> str:
        return f"InPlace.{self.format}({self.paths!r})"


def _absolute(paths: Any) -> list[str]:
    """The whole names of files, which another working directory does not change."""
    named = [paths] if isinstance(paths, str | os.PathLike) else paths
    return [absolute(path) for path in named]


def _check_marks(marks: Any) -> tuple[int | None, int | None] | tuple[()]:
    if marks in (None, (), (None, None)):
        return ()
    if not isinstance(marks, tuple) or len(marks) != 2:
        raise InvalidValue(f"marks is {marks!r}; give two ids or None, such as (1, None)")
    begin, end = (None if mark is None else require_whole("a mark", mark, 0) for mark in marks)
    return begin, end


def _segments(lists: Sequence[Lists]) -> Segments:
    """Where the lists of a column are, which have one dtype: each at an address of its own."""
    begins = [address_of(flat) + flat.itemsize * begin for flat, begin, _ in lists]
    return Segments(lists[0][0].dtype, 0, np.concatenate(begins), 1)
