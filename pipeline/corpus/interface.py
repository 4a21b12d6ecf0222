"""The base of all kinds of corpora: the interface for planning and loading."""

import copy
import functools
import operator
import os
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from pipeline.corpus import prng
from pipeline.corpus.stored.cache import PartCache
from pipeline.corpus.stored.gather import Fields
from pipeline.corpus.stored.reader import Pieces, Reader
from pipeline.corpus.tasks import Task
from pipeline.corpus.trees import Nodes
from pipeline.errors import (
    InvalidType,
    InvalidValue,
    OutOfRange,
    counted,
    require_share,
    suggest_option,
)
from pipeline.planning import lengths as lengths_module
from pipeline.planning.identity import fingerprint_of
from pipeline.text.features import Feature
from pipeline.text.tokenizers import Tokenizer

# Positions of pieces that are read together, if all of a corpus is.
TOGETHER = 1 << 22


class Readable:
    """One side of a corpus: the tokens of examples, the inputs or targets of pairs, or arrays.

    Attributes:
        lengths: positions of each example: unsigned [examples].
        weighted: whether `read` returns `loss_weights`, too; if not, every token weighs 1.
        features: the features of examples, by name.
        trees: the `Nodes.table` of all examples if some are groups, else None: int64 [examples, 3].
        reader: reads their columns, if these are stored; a view has none.
    """

    lengths: np.ndarray
    weighted: bool = False
    features: Mapping[str, Feature] = types.MappingProxyType({})
    trees: np.ndarray | None = None
    reader: Reader

    def __len__(self) -> int:
        return len(self.lengths)

    def read(
        self,
        examples: Any,
        starts: Any,
        lengths: Any,
        reach: Any = None,
        epoch: Any = 0,
        features: Iterable[str] | None = None,
    ) -> Fields:
        """Pieces of examples, one after another; all batches get their tokens from here.

        Args:
            examples: the example of each piece; ints, [pieces].
            starts: the first position of each piece, within its example.
            lengths: the positions of each piece; may be 0.
            reach: the places that each piece takes in the result, at least its length, or 0 for
                a piece of length 0; places beyond its length hold any numbers. None: `lengths`.
            epoch: decides the random choices of a view. For joined corpora, it may be one for each
                piece.
            features: names of features of tokens to read as well; None: all.

        Returns:
            A flat int32 array of `sum(reach)` for each field of the task (for causal text, `inputs`
            and `targets`), float32 `loss_weights` if tokens have weights, and an array
            `[sum(reach), *shape]` for each of the features.

        Raises:
            IndexError: there is no such example, or it is too short for its piece.
        """
        names = self._names(features, per_example=False)
        given = examples, starts, lengths, lengths if reach is None else reach
        epoch = np.asarray(epoch) if np.ndim(epoch) else epoch
        pieces = Pieces._make([*(np.asarray(each, np.int64) for each in given), epoch])
        require_numbers(pieces.examples, len(self))
        if not pieces.lengths.all():
            pieces = pieces.take(pieces.lengths != 0)
        self._require_positions(pieces)
        return self._read(pieces, names)

    def read_blocks(
        self, examples: np.ndarray, starts: np.ndarray, lengths: np.ndarray, features: Any = ()
    ) -> Iterator[tuple[slice, Fields]]:
        """The fields of many pieces, some `TOGETHER` positions at a time, and which pieces."""
        blocks = np.cumsum(lengths, dtype=np.int64) // TOGETHER
        for block in np.unique(blocks):
            mine = slice(*np.searchsorted(blocks, [block, block + 1]).tolist())
            yield mine, self.read(examples[mine], starts[mine], lengths[mine], features=features)

    def _require_positions(self, pieces: Pieces) -> None:
        """Refuses pieces that are not within their examples, or do not fit their places."""
        examples, starts, lengths, reach, _ = pieces
        room = self.lengths.take(examples).astype(np.int64)
        # A negative number has the highest bit, and so has the union of all.
        union = starts | lengths | (room - starts - lengths) | (reach - lengths)
        for at in np.flatnonzero(union < 0)[:1] if union.min(initial=0) < 0 else ():
            if reach[at] < lengths[at]:
                raise InvalidValue(
                    f"reach is {reach[at]} for a piece of length {lengths[at]}; give at least the "
                    "length"
                )
            end = int(starts[at]) + int(lengths[at])
            raise OutOfRange(
                f"piece {at} has positions {starts[at]} to {end} of example {examples[at]}, which "
                f"has length {room[at]}"
            )

    def _read(self, pieces: Pieces, names: Sequence[str]) -> Fields:
        """The fields of `read`, for checked pieces."""
        return self.reader.read(pieces, names)

    def read_examples(self, examples: Any, features: Iterable[str] | None = None) -> Fields:
        """The features of whole examples: an array `[n, *shape]` for each.

        For features of continuations, `[continuations, *shape]`; a document has none.

        Args:
            examples: their numbers; ints, [n].
            features: names of features of examples or continuations; None: all.
        """
        names = self._names(features, per_example=True)
        examples = np.asarray(examples, np.int64)
        require_numbers(examples, len(self))
        return self._read_examples(examples, names) if names else {}

    def _read_examples(self, examples: np.ndarray, names: Sequence[str]) -> Fields:
        """The features of `read_examples`, for checked arguments."""
        return self.reader.read_examples(examples, names)

    def read_nodes(self, examples: np.ndarray) -> Nodes:
        """The nodes of whole examples, int64 [n]; a document is one node."""
        return Nodes.of_documents(self.lengths[examples])

    def _names(self, features: Iterable[str] | None, *, per_example: bool) -> list[str]:
        """The names of the features to read, of examples or of positions; refuses unknown ones."""
        known = [name for name, each in self.features.items() if each.per_example == per_example]
        if features is None:
            return known
        names = list(features)
        for name in names:
            if name not in known:
                kind = "examples" if per_example else "tokens"
                raise InvalidValue(f"there is no feature of {kind} {suggest_option(name, known)}")
        return names


def require_numbers(examples: np.ndarray, count: int) -> None:
    """Raises an `IndexError` for numbers of examples that are not from 0 and below `count`."""
    # As an unsigned number, a negative one is higher than all others.
    if len(examples) and int(examples.view(np.uint64).max()) >= count:
        wrong = examples[(examples < 0) | (examples >= count)][0]
        raise OutOfRange(f"example {wrong} of {count:,}; examples are numbered from 0")


class AnyCorpus:
    """Examples by number: a corpus, pairs, a view, a corpus read in place, or several as one.

    Attributes:
        members: the corpora that this one reads. Where they must agree, the first one decides.
        sides: where batches read tokens and arrays: the corpus itself; of several sides, each.
        side_names: the names of the sides.
        loss_side: the number of the side that carries the loss; None if none does.
        unpriced: the names of the sides of arrays beside others: what they cost must be given.
        lengths: positions of each example: `[n]`, of several sides `[n, sides]`. They are unsigned,
            so that a plan need not check a billion of them for negative ones. Make them int64
            before you subtract: differences of unsigned integers wrap.
        identity: describes the tokens, as JSON, so that errors can name the difference.
        vocab_size: token ids are below this; None if unknown.
        num_learnt: positions that carry loss; None if unknown.
        text_bytes: UTF-8 bytes of the text that is learnt; None if unknown.
        tokenizer: made the tokens, and decodes them; None if they were made from arrays.
        covers_all: whether plans have examples without loss, too, as for `score`.
        files: the number of examples in each file of tokens, in order: int64 `[files]`. A large
            corpus is planned in windows of whole files. None: there are no such files.
        description: of a view, the argument of `view_of`, as JSON; else None.
        directory: where it is stored; None if it is in memory, or several as one.
    """

    members: tuple["AnyCorpus", ...] = ()
    sides: tuple[Readable, ...]
    side_names: tuple[str, ...] = ("inputs",)
    loss_side: int | None = 0
    unpriced: tuple[str, ...] = ()
    lengths: np.ndarray
    identity: Mapping[str, Any]
    vocab_size: int | None = None
    num_learnt: int | None = None
    text_bytes: int | None = None
    covers_all: bool = False
    files: np.ndarray | None = None
    description: dict[str, Any] | None = None
    directory: Any = None

    @functools.cached_property
    def fingerprint(self) -> str:
        """A short digest of `identity`."""
        return fingerprint_of(self.identity)

    @property
    def caches(self) -> tuple[tuple[PartCache, int], ...]:
        """The caches that parts are fetched into, each with the number of its first file."""
        first, found = 0, []
        for member in self.members:
            found += [(cache, first + number) for cache, number in member.caches]
            first += 0 if member.files is None else len(member.files)
        return tuple(found)

    @property
    def added(self) -> list[str]:
        """The names of features that `with_features` added."""
        return [name for member in self.members for name in member.added]

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer of the first member."""
        return self.members[0].tokenizer if self.members else None

    @functools.cached_property
    def num_tokens(self) -> int:
        """Positions to train on: the sum of the lengths, of both sides of pairs."""
        return int(self.lengths.sum(dtype=np.int64))

    def cached_file(self, name: str, make: Callable[[], bytes]) -> bytes:
        """The content of the file `name` beside the corpus; `make` gives it if it is missing.

        A corpus without a directory calls `make` each time.
        """
        return self.members[0].cached_file(name, make) if self.members else make()

    def verify(self) -> None:
        """Reads all that is stored, and refuses what is not as it was written."""
        for member in self.members:
            member.verify()

    @property
    def trees(self) -> np.ndarray | None:
        """See `Readable.trees`; None for several sides."""
        return self.sides[0].trees if len(self.sides) == 1 else None

    @property
    def features(self) -> Mapping[str, Feature]:
        """The features of all sides, by name."""
        return {name: each for side in self.sides for name, each in side.features.items()}

    @property
    def silent(self) -> np.ndarray:
        """The examples that have positions, but no loss: int64, ascending; plans leave them out."""
        return lengths_module.NO_EXAMPLES if self.covers_all else self._find_silent()

    def _find_silent(self) -> np.ndarray:
        return lengths_module.NO_EXAMPLES

    @property
    def partly_learnt(self) -> bool:
        """Whether plans leave out examples without loss, and some positions may have none."""
        if self.loss_side is None or self.covers_all or self.trees is not None:
            return False
        return self.sides[self.loss_side].weighted

    def covering(self) -> "AnyCorpus":
        """The same corpus, whose plans have examples without loss, too."""

        def change(corpus: AnyCorpus) -> AnyCorpus:
            whole = copy.copy(corpus)
            whole.covers_all = True
            return whole

        return self.with_each(change)

    def read(self, examples: Any, starts: Any, lengths: Any, *more: Any, **options: Any) -> Fields:
        """Pieces of examples; see `Readable.read`. Of several sides, each of `sides` has it."""
        side, *others = self.sides
        if others:
            raise InvalidType(f"{self!r:.80} has several sides; read those of corpus.sides")
        return side.read(examples, starts, lengths, *more, **options)

    def split(self, hold_out: float = 0.01) -> tuple["AnyCorpus", "AnyCorpus"]:
        """Two views that have each example once: those to train on, and those held out.

        A hash of its number decides where an example is. So examples that are held out stay so if
        the share grows, or in a corpus that begins with the same examples and has more.

        >>> train, held_out = corpus.split(hold_out=0.01)  # doctest: +SKIP

        Args:
            hold_out: the share of examples that are held out, above 0 and below 1.
        """
        train, held_out = (Split(self, hold_out=hold_out, held_out=out) for out in (False, True))
        return train, held_out

    def find_unsplit(self, examples: np.ndarray) -> tuple[np.ndarray, int]:
        """The numbers of examples in the corpus whose `split` this is, and how many it has.

        For a view, that is the corpus that it shows.
        """
        return examples, len(self)

    def with_each(self, change: Callable[["AnyCorpus"], "AnyCorpus"]) -> "AnyCorpus":
        """The same corpus, with `change` applied to each corpus that is not joined or split."""
        return change(self)

    def read_examples(self, examples: Any, features: Iterable[str] | None = None) -> Fields:
        """The features of whole examples, of all sides; see `Readable.read_examples`."""
        found: Fields = {}
        for side in self.sides:
            here = None if features is None else [n for n in features if n in side.features]
            found |= side.read_examples(examples, here)
        return found

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Fields:
        """One example, as in epoch 0.

        It has a 1-D array of its length for each field, an array `[length, *shape]` for each
        feature of tokens, `[continuations, *shape]` for each of continuations, and `shape` for each
        of an example.
        """
        number = operator.index(index)
        number += len(self) if number < 0 else 0
        if not 0 <= number < len(self):
            raise OutOfRange(f"example {index} of {len(self):,}")
        return self._example(number)

    def _example(self, number: int) -> Fields:
        fields: Fields = {}
        for side in self.sides:
            fields |= side.read([number], [0], [side.lengths[number]])
            for name, rows in side.read_examples([number]).items():
                fields[name] = rows[0] if side.features[name].of == "example" else rows
        return fields

    def __iter__(self) -> Iterator[Fields]:
        return (self[index] for index in range(len(self)))


class SingleCorpus(Readable, AnyCorpus):  # pyright: ignore  # features: an attribute
    """A corpus of single examples, whose only side is the corpus itself.

    Attributes:
        task: decides the fields of an example, `task.shifts`, and so its length.
    """

    task: Task

    @property
    def sides(self) -> tuple[Readable, ...]:  # type: ignore[override]  # others have an attribute
        """The corpus itself."""
        return (self,)

    def require_task(self, task: Task) -> None:
        """Raises a `ValueError` if this corpus is of another task."""
        if self.task != task:
            raise InvalidValue(
                f"{self!r:.200} is a corpus of the task {self.task.name!r}, not {task.name!r}; "
                "open or make it with that task, in another directory"
            )

    def decode(self, index: int) -> str:
        """The text of an example's inputs and of its last target."""
        if self.tokenizer is None:
            raise InvalidValue(f"{self!r:.200} was made without a tokenizer, so it has no text")
        fields, (inputs, *targets) = self[index], self.task.shifts
        ids = [fields[inputs], *(fields[name][-1:] for name in targets)]
        return self.tokenizer.decode(np.concatenate(ids))

    def __str__(self) -> str:
        sizes, counts = lengths_module.histogram(self.lengths)
        at = np.searchsorted(np.cumsum(counts), np.array([0.5, 0.9, 0.99]) * len(self))
        shares = [f"p{p} {sizes[i]:,}" for p, i in zip((50, 90, 99), at, strict=True)]
        text = "" if self.text_bytes is None else f", from {self.text_bytes:,} bytes of text"
        learnt, empty = self.num_learnt or 0, int(counts[sizes == 0].sum())
        weighted = f", {learnt:,} of them with loss" if 0 < learnt < self.num_tokens else ""
        vocab = "unknown" if self.vocab_size is None else f"{self.vocab_size:,} ids"
        return "\n".join(
            [
                f"corpus       {os.fspath(self.directory or repr(self))}",
                f"documents    {len(self):,}" + (f", {empty:,} of them of length 0" * bool(empty)),
                f"tokens       {self.num_tokens:,} to train on{weighted}{text}",
                f"lengths      {', '.join(shares)}, longest {sizes[-1]:,}",
                f"vocabulary   {vocab}",
                f"fingerprint  {self.fingerprint}",
            ]
        )


class View(AnyCorpus):
    """Another corpus, whose examples are chosen or changed when batches are built.

    It has no `text_bytes`: the loss on some tokens gives no bits per byte of the text.

    Attributes:
        corpus: the viewed corpus.
        identity: that of the corpus, and the options of the view.
    """

    kind: ClassVar[str]

    def __init__(self, corpus: AnyCorpus):
        self.corpus, self.members, self.files = corpus, (corpus,), corpus.files
        self.vocab_size, self.covers_all = corpus.vocab_size, corpus.covers_all
        self.side_names, self.loss_side = corpus.side_names, corpus.loss_side
        self.unpriced, self.directory = corpus.unpriced, corpus.directory

    def _find_silent(self) -> np.ndarray:
        return self.corpus.silent

    def find_unsplit(self, examples: np.ndarray) -> tuple[np.ndarray, int]:
        """See `AnyCorpus`."""
        return self.corpus.find_unsplit(examples)

    def _describe(self, **options: object) -> None:
        """Sets `description` and `identity`, from the options of the view."""
        self.description = {"kind": self.kind, **options}
        if self.corpus.description is not None:
            self.description["of"] = self.corpus.description
        # An identity goes into each checkpoint, so a digest stands for a long list.
        short = {
            name: value if len(f"{value}") < 100 else fingerprint_of(value)
            for name, value in options.items()
        }
        self.identity = {**self.corpus.identity, self.kind: short}

    def __str__(self) -> str:
        options = self.identity[self.kind].items()
        about = ", ".join(f"{name} {value}" for name, value in options)
        text = f"{self.corpus}\nseen as      {type(self).__name__}: {about}"
        if np.array_equal(self.lengths, self.corpus.lengths):
            return text
        tokens = np.atleast_2d(self.lengths.T).sum(axis=1, dtype=np.int64)
        names = self.side_names if len(tokens) > 1 else ["tokens"]
        counts = [f"{count:,} {name}" for count, name in zip(tokens, names, strict=True)]
        return f"{text}\nwhich has    {counted(len(self), 'document')}, {', '.join(counts)}"

    def __repr__(self) -> str:
        return f"{type(self).__name__} of {self.corpus!r}"


class Split(View):
    """The examples of a corpus that are held out, or all others; made by `AnyCorpus.split`.

    Attributes:
        numbers: the numbers of its examples in the corpus, ascending: int64 [examples].
        task: the task of the corpus; None for several sides.
    """

    kind = "split"

    def __init__(self, corpus: AnyCorpus, *, hold_out: float, held_out: bool):
        super().__init__(corpus)
        self.hold_out, self.held_out = require_share("hold_out", hold_out), bool(held_out)
        found = prng.is_held_out(np.arange(len(corpus)), self.hold_out)
        self.numbers = np.flatnonzero(found == self.held_out)
        if not len(self.numbers):
            raise InvalidValue(
                f"hold_out is {self.hold_out}, and by their numbers none of the {len(corpus):,} "
                f"examples {'is held out' if held_out else 'is left to train on'}; give a share "
                "nearer to one half, such as 0.1, or split a larger corpus"
            )
        self.lengths, self.task = corpus.lengths[self.numbers], getattr(corpus, "task", None)
        if corpus.files is not None:
            ends = np.searchsorted(self.numbers, np.cumsum(corpus.files))
            self.files = np.diff(ends, prepend=0)
        columns = np.atleast_2d(self.lengths.T)
        self.sides = tuple(
            _SplitSide(side, self.numbers, lengths)
            for side, lengths in zip(corpus.sides, columns, strict=True)
        )
        self._describe(hold_out=self.hold_out, held_out=self.held_out)

    def find_unsplit(self, examples: np.ndarray) -> tuple[np.ndarray, int]:
        """See `AnyCorpus`."""
        return self.corpus.find_unsplit(self.numbers[examples])

    def _find_silent(self) -> np.ndarray:
        return np.flatnonzero(np.isin(self.numbers, self.corpus.silent))

    def with_each(self, change: Callable[[AnyCorpus], AnyCorpus]) -> "Split":
        """See `AnyCorpus`."""
        viewed = self.corpus.with_each(change)
        return Split(viewed, hold_out=self.hold_out, held_out=self.held_out)

    def __reduce__(self) -> tuple[Any, ...]:
        make = functools.partial(Split, hold_out=self.hold_out, held_out=self.held_out)
        return make, (self.corpus,)


class _SplitSide(Readable):
    def __init__(self, side: Readable, numbers: np.ndarray, lengths: np.ndarray):
        self._side, self._numbers, self.lengths = side, numbers, lengths
        self.weighted, self.features = side.weighted, side.features
        self.trees = None if side.trees is None else side.trees[numbers]

    def _read(self, pieces: Pieces, names: Sequence[str]) -> Fields:
        return self._side.read(self._numbers[pieces.examples], *pieces[1:], names)

    def _read_examples(self, examples: np.ndarray, names: Sequence[str]) -> Fields:
        return self._side.read_examples(self._numbers[examples], names)

    def read_nodes(self, examples: np.ndarray) -> Nodes:
        return self._side.read_nodes(self._numbers[examples])
