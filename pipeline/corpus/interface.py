"""What a corpus is: sides, members, and where each example is in them; the rest follows."""

import functools
import operator
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import numpy as np

from pipeline.corpus.side import Side
from pipeline.corpus.stored.cache import PartCache
from pipeline.corpus.stored.gather import Fields, Pieces
from pipeline.corpus.stored.reader import Reader
from pipeline.corpus.tasks import Task
from pipeline.errors import InvalidType, InvalidValue, OutOfRange
from pipeline.planning import lengths as lengths_module
from pipeline.planning.identity import fingerprint_of
from pipeline.text.features import Feature
from pipeline.text.tokenizers import Tokenizer

T = TypeVar("T")

# The classes of corpora by their `kind`, as descriptions name them.
CLASSES: dict[str, type["AnyCorpus"]] = {}


def computed(find: Callable[[Any], T]) -> T:
    """An attribute that is computed when it is first asked for, which other classes may set."""
    attribute: Any = functools.cached_property(find)
    return attribute


def derived(find: Callable[[Any], T]) -> T:
    """An attribute that is made each time, and not kept, as it would refer to what has it."""
    attribute: Any = property(find)
    return attribute


class AnyCorpus:
    """Examples by number: a corpus, pairs, a view, a corpus read in place, or several as one.

    A class of corpora sets `sides`, `loss`, `lengths`, `identity`, `vocab_size` and `members`. It
    says by `locate` where its examples are in these, and by `arguments` how it is made again. All
    else follows. For corpora of the examples of others, `Renumbered` does most of it.

    Attributes:
        kind: the name of the class in descriptions; "": it is in none.
        of_machine: the names of arguments that tell of this machine alone, and are in none.
        members: the corpora that this one reads. Where they must agree, the first one decides.
        sides: where batches read tokens and arrays, by name; of one side, often the corpus itself.
        loss: the name of the side that carries the loss; None if none does.
        unpriced: the names of the sides of arrays beside others: what they cost must be given.
        lengths: positions of each example: `[n]`, of several sides `[n, sides]`. They are unsigned,
            so that a plan need not check a billion of them for negative ones. Make them int64
            before you subtract: differences of unsigned integers wrap.
        identity: describes the tokens, as JSON, so that errors can name the difference.
        fingerprint: a short digest of `identity`.
        vocab_size: token ids are below this; None if unknown.
        num_tokens: positions to train on: the sum of the lengths, of both sides of pairs.
        num_learnt: positions that carry loss; None if unknown.
        text_bytes: UTF-8 bytes of the text that is learnt; None if unknown.
        task: a `Task`, which decides the fields of an example, and so its length; None of several
            sides.
        lengths_digest: the digest of its lengths, by `pipeline.planning.lengths.digest`, if it is
            known.
        tokenizer: made the tokens, and decodes them; None if they were made from arrays.
        features: the features of all sides, by name.
        trees: as for `Side`; None of several sides.
        silent: the examples that have positions, but no loss, which plans leave out: int64,
            ascending.
        files: the number of examples in each file of tokens, in order: int64 `[files]`. A large
            corpus is planned in windows of whole files. None: there are no such files.
        caches: the caches that parts are fetched into, each with the number of its first file.
        directory: where it is stored; None if it is in memory, or several as one.
    """

    kind: ClassVar[str] = ""
    of_machine: ClassVar[tuple[str, ...]] = ()

    members: tuple["AnyCorpus", ...] = ()
    sides: Mapping[str, Side]
    loss: str | None = "inputs"
    unpriced: tuple[str, ...] = ()
    lengths: np.ndarray
    identity: Mapping[str, Any]
    vocab_size: int | None = None
    num_learnt: int | None = None
    text_bytes: int | None = None
    task: Any = None
    lengths_digest: str | None = None
    files: np.ndarray | None = None
    directory: Any = None

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if cls.kind:
            CLASSES[cls.kind] = cls

    def locate(self, examples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The member that each example is in, and its number there: two arrays, int64 [n].

        The members of a corpus of several sides have parts of all examples, under one number.
        """
        return np.zeros(len(examples), np.int64), examples

    def arguments(self) -> dict[str, Any]:
        """The arguments of the class that make the corpus again, members among them."""
        raise InvalidType(f"{self!r:.80} cannot be made again; its class must have `arguments`")

    @classmethod
    def make(cls, **arguments: Any) -> "AnyCorpus":
        """The corpus that has these `arguments`."""
        return cls(**arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return _make, (type(self), self.arguments())

    @property
    def side_names(self) -> tuple[str, ...]:
        """The names of the sides."""
        return tuple(self.sides)

    @computed
    def fingerprint(self) -> str:
        """A short digest of `identity`."""
        return fingerprint_of(self.identity)

    @computed
    def num_tokens(self) -> int:
        """Positions to train on: the sum of the lengths, of both sides of pairs."""
        return int(self.lengths.sum(dtype=np.int64))

    @computed
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer of the first member."""
        return self.members[0].tokenizer if self.members else None

    @computed
    def features(self) -> Mapping[str, Feature]:
        """The features of all sides, by name."""
        return {
            name: feature for side in self.sides.values() for name, feature in side.features.items()
        }

    @computed
    def trees(self) -> np.ndarray | None:
        """See `Side.trees`; None for several sides."""
        side, *others = self.sides.values()
        return None if others else side.trees

    @computed
    def silent(self) -> np.ndarray:
        """The examples that have positions, but no loss: int64, ascending; plans leave them out."""
        return lengths_module.NO_EXAMPLES

    @derived
    def partly_learnt(self) -> bool:
        """Whether plans leave out examples without loss, and some positions may have none."""
        return self.loss is not None and self.trees is None and self.sides[self.loss].weighted

    @computed
    def caches(self) -> tuple[tuple[PartCache, int], ...]:
        """The caches that parts are fetched into, each with the number of its first file."""
        first, caches = 0, []
        for member in self.members:
            caches += [(cache, first + number) for cache, number in member.caches]
            first += 0 if member.files is None else len(member.files)
        return tuple(caches)

    def cached_file(self, name: str, make: Callable[[], bytes]) -> bytes:
        """The content of the file `name` beside the corpus; `make` gives it if it is missing.

        A corpus without a directory calls `make` each time.
        """
        return self.members[0].cached_file(name, make) if self.members else make()

    def verify(self) -> None:
        """Reads all that is stored, and refuses what is not as it was written."""
        for member in self.members:
            member.verify()

    def covering(self) -> "AnyCorpus":
        """The same corpus, whose plans have examples without loss, too, as for `score`."""
        from pipeline.corpus.renumbered import Covering  # which derives from this class

        return Covering(self)

    def split(
        self, hold_out: float = 0.01, *, by: str | None = None
    ) -> tuple["AnyCorpus", "AnyCorpus"]:
        """Two views that have each example once: those to train on, and those held out.

        A hash of its number decides where an example is. So examples that are held out stay so if
        the share grows, or in a corpus that begins with the same examples and has more.

        >>> train, held_out = corpus.split(hold_out=0.01)  # doctest: +SKIP

        Args:
            hold_out: the share of examples that are held out, above 0 and below 1.
            by: a feature of examples, such as the conversation, file or author of each. A hash of
                its value decides, so examples with one value stay on one side, in any order and in
                any other corpus. `Feature("example", key=True)` keeps texts. A part that is split
                again by a key has another hash. Default None: numbers.
        """
        from pipeline.corpus.split import Split  # which derives from this class

        train, held_out = (
            Split(self, hold_out=hold_out, held_out=out, by=by) for out in (False, True)
        )
        return train, held_out

    def with_features(
        self, columns: Mapping[str, Iterable[Any]], *, features: Mapping[str, Feature]
    ) -> "AnyCorpus":
        """The same corpus with more features, which are stored beside it, in `features/`.

        It has another fingerprint. `Corpus.open(directory, features=names)` opens it again; without
        `features=`, the corpus is as it was. Groups and corpora that `prepare`, `from_arrays` and
        `Writer` made can have more features; others can be `Joined` with a corpus that has them.

        Args:
            columns: by name, an entry for each example, as for `from_arrays`; may be generators.
            features: their schemas, by the same names.

        Raises:
            TypeError: the corpus has no directory of its own.
            ValueError: a column does not match its feature or the corpus, a name is taken, or other
                values of the same names are there.
        """
        raise InvalidType(
            f"{self!r:.80} has no directory of its own, to store features in; give all columns at "
            "once, or join it with a corpus of the same examples: pipeline.corpus.Joined"
        )

    def find_unsplit(self, examples: np.ndarray) -> tuple[np.ndarray, int]:
        """The numbers of examples in the corpus whose `split` this is, and how many it has.

        For a view, that is the corpus that it shows.
        """
        return examples, len(self)

    def map_leaves(self, change: Callable[["AnyCorpus"], "AnyCorpus"]) -> "AnyCorpus":
        """The same corpus, with `change` applied to each corpus that is not joined or split."""
        return change(self)

    def read(self, examples: Any, starts: Any, lengths: Any, *more: Any, **options: Any) -> Fields:
        """Pieces of examples; see `Side.read`. Of several sides, each of `sides` has it."""
        side, *others = self.sides.values()
        if others:
            raise InvalidType(f"{self!r:.80} has several sides; read those of corpus.sides")
        return side.read(examples, starts, lengths, *more, **options)

    def read_examples(self, examples: Any, features: Iterable[str] | None = None) -> Fields:
        """The features of whole examples, of all sides; see `Side.read_examples`."""
        fields: Fields = {}
        for side in self.sides.values():
            names = None if features is None else side.select(features)
            fields |= side.read_examples(examples, names)
        return fields

    def require_task(self, task: Task) -> None:
        """Raises a `ValueError` if this corpus is of another task."""
        if self.task != task:
            raise InvalidValue(
                f"{self!r:.200} is a corpus of the task {getattr(self.task, 'name', None)!r}, not "
                f"{task.name!r}; open or make it with that task, in another directory"
            )

    def decode(self, index: int) -> str:
        """The text of an example's inputs and of its last target."""
        if self.task is None:
            raise InvalidType(f"{self!r:.80} has several sides; decode those of corpus.sides")
        if self.tokenizer is None:
            raise InvalidValue(f"{self!r:.200} was made without a tokenizer, so it has no text")
        fields, (inputs, *targets) = self[index], self.task.shifts
        ids = [fields[inputs], *(fields[name][-1:] for name in targets)]
        return self.tokenizer.decode(np.concatenate(ids))

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
        for side in self.sides.values():
            fields |= side.read([number], [0], [side.lengths[number]])
            for name, rows in side.read_examples([number]).items():
                fields[name] = rows[0] if side.features[name].of == "example" else rows
        return fields

    def __iter__(self) -> Iterator[Fields]:
        return (self[index] for index in range(len(self)))


def _make(cls: type[AnyCorpus], arguments: Mapping[str, Any]) -> AnyCorpus:
    """The corpus of a class that has these arguments; pickles call it."""
    return cls.make(**arguments)


def read_as(stored: AnyCorpus) -> AnyCorpus:
    """The corpus as it is read: of a task with the name of a kind, such as groups, by that kind."""
    kind = CLASSES.get(stored.task.name)
    return stored if kind is None else kind.make(nodes=stored)


class SingleCorpus(Side, AnyCorpus):
    """A corpus of single examples, whose only side is the corpus itself.

    Attributes:
        task: decides the fields of an example, `task.shifts`, and so its length.
        reader: reads their columns, if these are stored.
    """

    task: Task
    reader: Reader

    @derived
    def sides(self) -> Mapping[str, Side]:
        """The corpus itself."""
        return {"inputs": self}

    @derived
    def has_tokens(self) -> bool:
        """See `Side`."""
        return self.task.has_tokens

    def _read(self, pieces: Pieces, names: Sequence[str]) -> Fields:
        return self.reader.read(pieces, names)

    def _read_examples(self, examples: np.ndarray, names: Sequence[str]) -> Fields:
        return self.reader.read_examples(examples, names)

    def __str__(self) -> str:
        sizes, counts = lengths_module.histogram(self.lengths)
        at = np.searchsorted(np.cumsum(counts), np.array([0.5, 0.9, 0.99]) * len(self))
        shares = [f"p{p} {sizes[i]:,}" for p, i in zip((50, 90, 99), at, strict=True)]
        text = "" if self.text_bytes is None else f", from {self.text_bytes:,} bytes of text"
        learnt, empty = self.num_learnt, int(counts[sizes == 0].sum())
        weighted = "" if learnt in (None, self.num_tokens) else f", {learnt:,} of them with loss"
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
