"""Corpus: tokenised examples in a directory, all of them or those that are sealed so far."""

import contextlib
import errno
import functools
import os
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypedDict, Unpack

import numpy as np
from etils import epath

from pipeline.corpus.added import Added, add_features, find_added
from pipeline.corpus.cache import PartCache, default_directory
from pipeline.corpus.gather import Fields
from pipeline.corpus.groups import Groups, divide_groups
from pipeline.corpus.interface import Readable, SingleCorpus, Split
from pipeline.corpus.log import Entry, Log
from pipeline.corpus.manifest import (
    LENGTHS,
    MANIFEST,
    Manifest,
    damage,
    open_part,
    read_lengths,
    require_same_origin,
)
from pipeline.corpus.parts import PartTable
from pipeline.corpus.prng import is_held_out
from pipeline.corpus.reader import LocalParts, PartStore, Reader
from pipeline.corpus.sides import Sides, read_sides, record_sides
from pipeline.corpus.tasks import A_TASK, CAUSAL, GROUPS, TASKS, Task
from pipeline.corpus.tasks import ARRAYS as OF_ARRAYS
from pipeline.corpus.writer import ARRAYS, Writer
from pipeline.errors import (
    Exists,
    InvalidState,
    InvalidValue,
    Missing,
    require_share,
    require_type,
    require_whole,
)
from pipeline.fs.atomic import as_path, is_local, write_once
from pipeline.fs.fork import Handles
from pipeline.planning.lengths import NO_EXAMPLES, digest
from pipeline.text import tokenizers
from pipeline.text.features import Feature
from pipeline.text.ragged import Ragged, divide_arrays
from pipeline.text.tokenizers import Tokenizer

# The file beside a corpus with the numbers of the examples that have no loss, if there are any.
SILENT = "silent.int64"


class OpenOptions(TypedDict, total=False):
    """The options of `Corpus.open` for a finished corpus, for type checkers."""

    features: Iterable[str]
    cache: str | os.PathLike | None
    cache_bytes: int | None


def open_growing(directory: epath.PathLike, wait_seconds: float | None = None) -> "Corpus":
    """The corpus that grows in `directory`, once something is sealed there.

    Raises:
        NotSealed: nothing was sealed within `wait_seconds`.
    """
    for _ in Log(directory, wait_seconds).looks(0):
        with contextlib.suppress(Missing):
            return Corpus(directory, follow=True, wait_seconds=wait_seconds)
    raise AssertionError("looks() ends only with an error")


class Section(Readable):
    """Consecutive parts of a corpus, whose examples are numbered from 0. It never changes.

    Attributes:
        reader: reads their columns.
        files: the number of examples of each part: int64 [parts].
        entries: their places in the log of a corpus that grows.
        first: the number of their first example in the corpus.
    """

    def __init__(
        self,
        corpus: "Corpus",
        lengths: np.ndarray,
        files: np.ndarray,
        columns: Mapping[str, Feature],
        stores: Sequence[PartStore],
        entries: Sequence[Entry] = (),
    ):
        self.lengths, self.files, self.entries = lengths, files, entries
        self.weighted, self.features = corpus.weighted, corpus.features
        self.reader = Reader(corpus.task, lengths, files, columns, stores)
        self.first = entries[0].first if entries else 0
        self._hold_out = corpus.hold_out

    @functools.cached_property
    def planned(self) -> np.ndarray:
        """The lengths, with 0 for examples that plans leave out: uint32 [examples]."""
        if not self._hold_out:
            return self.lengths
        numbers = self.first + np.arange(len(self.lengths))
        return np.where(is_held_out(numbers, self._hold_out), np.uint32(0), self.lengths)

    def lengths_of(self, number: int) -> np.ndarray | None:
        """The lengths of the part with this number in the corpus; None if it is not here."""
        place = number - self.entries[0].number
        if not 0 <= place < len(self.files):
            return None
        first = self.entries[place].first - self.first
        return self.lengths[first : first + int(self.files[place])]


class Corpus(Handles, SingleCorpus):
    """Examples of token ids in a directory; made by `prepare`, `from_arrays` or `open`.

    Opening reads a small manifest, and the lengths, and checks their digest; tokens are mapped when
    first read, and never all copied. A corpus pickles as its directory.

    With `follow`, it gains parts while it is written, and examples are numbered as in the finished
    corpus. Those of `entries` can be read. The first use of `refresh` or `lengths` opens all that
    is sealed; later, `refresh` adds new parts, and `hold` drops those that are no longer needed, so
    that only parts in use take memory. Nothing else about it depends on what is sealed now.

    Args:
        directory: as for `open`.
        features: names of features that `with_features` added, to read besides those that
            the corpus was made with.
        cache: a local directory for the parts of the corpus, each of which is fetched before the
            plan needs it, and checked by its digest. All corpora and all processes of a machine may
            share one. Default None: for a corpus in object storage, the directory `lockstep` in
            that of the user's caches (`XDG_CACHE_HOME`, or `~/.cache`); files of a local corpus are
            mapped where they are.
        cache_bytes: the most bytes of the parts of this corpus in the cache; give room for two
            windows of the plan. Default None: 20 GB, or less if the disk has no room for them.
        follow: see `open`.
        wait_seconds: with `follow`, the longest wait for a part, in seconds; None: no limit.
        hold_out: with `follow`, the share of examples that its plans leave out; see `split`.

    Attributes:
        directory: where it is.
        origin: fingerprints of the source and the tokenizer that it was made from, and the field.
        identity, fingerprint: the digest of its `tokens`, its tokenizer and its task, so that an
            error can say which of them changed; and a short digest of these. They depend on content
            alone: not on paths, times, or worker processes. If it grows, the first part stands for
            its tokens, and the digests of the log cover what was read of it.
        lengths_digest: the digest of its lengths, by `pipeline.planning.lengths.digest`; None if it
            grows, as is `num_learnt` and `text_bytes`.
        log: the sealed parts in order; `Plan(corpus.log, …)` plans those of one that grows.
    """

    lengths_digest: str | None = None

    def __init__(
        self,
        directory: epath.PathLike,
        *,
        features: Iterable[str] = (),
        cache: str | os.PathLike | None = None,
        cache_bytes: int | None = None,
        follow: bool = False,
        wait_seconds: float | None = None,
        hold_out: float = 0.0,
    ):
        if cache is not None and not (os.fspath(cache) and is_local(cache)):
            raise InvalidValue(f"cache is {os.fspath(cache)!r}; give a local directory")
        if cache_bytes is not None:
            require_whole("cache_bytes", cache_bytes, 1)
        if follow and (cache is not None or features):
            raise InvalidValue(
                "with follow=True, parts in object storage are kept in the default cache, and "
                "there are no added features; omit cache= and features="
            )
        if not follow and (wait_seconds is not None or hold_out):
            raise InvalidValue(
                f"wait_seconds is {wait_seconds} and hold_out is {hold_out}; both are for a corpus "
                "that grows: give follow=True, or use split"
            )
        place = as_path(directory)
        if cache is None and not is_local(place):
            cache = default_directory()
        if cache is None and cache_bytes is not None:
            raise InvalidValue(
                f"cache_bytes is {cache_bytes}, but {os.fspath(place)} is local and there is no "
                "cache=; omit cache_bytes"
            )
        self.directory, self.grows, self.hold_out = place, follow, hold_out
        self.log = Log(place, wait_seconds, hold_out)
        self._cache = None if cache is None else pathlib.Path(cache).expanduser()
        try:
            self._manifest = manifest = self.log.about() if follow else Manifest.of(place)
        except Missing:
            if read_sides(place) is not None:
                raise InvalidValue(
                    f"{os.fspath(place)} holds a corpus of several sides, which cannot grow yet; "
                    "open it with pipeline.corpus.open_corpus or pipeline.load, without follow=True"
                ) from None
            raise
        self.task, self.origin = TASKS[manifest.task], manifest.origin
        self.weighted, self.vocab_size = manifest.weighted, manifest.vocab_size
        self.features: Mapping[str, Feature] = manifest.features
        self._digest = self.log.begin if follow else manifest.digest
        self.identity: Mapping[str, Any] = {
            "tokens": f"those of a log that begins with {self._digest}" if follow else self._digest,
            "tokenizer": self.origin["tokenizer"] or "none",
            "task": manifest.task,
        }
        self._held, self._caches = range(0), list[PartCache]()
        self._section: Section | None = None
        self._added: Sequence[Added] = ()
        # The options that open the same corpus.
        self._options: dict[str, Any] = {}
        if follow:
            self._options = {"follow": True, "wait_seconds": wait_seconds, "hold_out": hold_out}
        else:
            self._open_all(find_added(place, features, manifest.digest), cache_bytes)
        if follow and self.task == GROUPS:
            raise InvalidValue(
                f"{os.fspath(place)} holds groups, which cannot be followed; open it without "
                "follow=True once it is finished"
            )
        if hold_out:
            split = {"hold_out": hold_out, "held_out": False}
            self.identity = {**self.identity, Split.kind: split}
        self.__setstate__({})

    def _open_all(self, added: Sequence[Added], cache_bytes: int | None) -> None:
        """Opens a finished corpus, with features that were added to it."""
        place, manifest, self._added = self.directory, self._manifest, added
        folders = [Added(place, manifest), *added]
        for each in added:
            self.features = {**self.features, **each.manifest.features}
        if added:
            of_added = "+".join(sorted(each.manifest.digest for each in added))
            self.identity = {**self.identity, "features": of_added}
        self.num_learnt, self.text_bytes = map(manifest.parts.total, ("learnt", "text_bytes"))
        self.lengths_digest = manifest.lengths_digest
        self._options["features"] = self.added
        stores: Sequence[PartStore] = [LocalParts(at, each.parts) for at, each in folders]
        if self._cache is None:
            lengths = read_lengths(place / LENGTHS, manifest)
        else:
            sizes = [each.parts.total("bytes") for _, each in folders]
            stores = self._caches = [
                # Each gets its share of the space, by its bytes.
                PartCache(
                    at,
                    each.parts,
                    self._cache / each.digest,
                    cache_bytes and cache_bytes * size // sum(sizes),
                )
                for (at, each), size in zip(folders, sizes, strict=True)
            ]
            room = sum(each.max_bytes for each in self._caches)
            self._options |= {"cache": os.fspath(self._cache), "cache_bytes": room}
            lengths = self._caches[0].read_copy(LENGTHS, lambda path: read_lengths(path, manifest))
        files, columns = manifest.parts.numbers("examples"), {**manifest.of_tokens, **self.features}
        self._section = Section(self, lengths, files, columns, stores)

    @classmethod
    def open(
        cls,
        directory: epath.PathLike,
        *,
        follow: bool = False,
        **options: Unpack[OpenOptions],
    ) -> "Corpus":
        """The corpus in `directory`, after cheap checks that all of it is there.

        Args:
            directory: a local path, or one of object storage (`gs://…`).
            follow: whether to read a corpus while it is written, part by part as it is sealed. It
                reads a finished corpus in the same way.
            **options: those of `Corpus`.

        Raises:
            FileNotFoundError: there is no corpus there.
            ValueError: it is half-written, damaged, or of another schema version, or the arguments
                contradict each other.
        """
        corpus = cls(directory, follow=follow, **options)
        return Groups(corpus) if corpus.task == GROUPS else corpus  # type: ignore[return-value]

    # ---- what can be read

    @property
    def entries(self) -> Sequence[Entry]:
        """For a corpus that grows, the entries whose examples can be read, in order."""
        return () if self._section is None else self._section.entries

    def refresh(self, start: int | None = None) -> list[Entry]:
        """Opens what was sealed meanwhile; returns the new entries.

        Args:
            start: if given, the parts from this number on replace all that can be read.

        Raises:
            ValueError: see `Log.entries`; or a part is missing or changed.
        """
        if not self.grows:
            return []
        with self._lock:
            known = [] if start is not None else list(self.entries)
            new = self.log.entries(known[-1].number + 1 if known else start or 0)
            if new:
                self._show([*known, *new])
            elif start is not None:
                self._section = None
            return new

    def hold(self, parts: range) -> None:
        """Makes only these parts of a corpus that grows readable.

        And those held before if they are adjacent. If it is finished, an empty range means all
        parts.
        """
        if not self.grows:
            return
        if not parts:
            first = self.log.first()
            parts = range(first, first + len(self.log.entries(first)))
        with self._lock:
            if self.entries:
                begin, end = self.entries[0].number, self.entries[-1].number + 1
                if begin <= parts.start and parts.stop <= end:
                    return
            last, self._held = self._held, parts
            if last.start <= parts.stop and parts.start <= last.stop:
                parts = range(min(last.start, parts.start), max(last.stop, parts.stop))
            found = [self.log.find(number) for number in parts]
            self._show([entry for entry in found if entry is not None])

    def _show(self, entries: list[Entry]) -> None:
        """Makes these entries readable; reads what is not in memory yet."""
        before, parts = self._section, [entry.part for entry in entries]
        known = [None if before is None else before.lengths_of(each.number) for each in entries]
        new = [part for part, lengths in zip(parts, known, strict=True) if lengths is None]
        self.log.require_files(new)
        read = iter(self.log.read_lengths(new))
        lengths = np.concatenate([next(read) if each is None else each for each in known])
        store: PartStore = LocalParts(self.directory, parts)
        if self._cache is not None:
            store = PartCache(self.directory, PartTable(parts), self._cache / self._digest)
        files = np.array([part.examples for part in parts], np.int64)
        columns = {**self._manifest.of_tokens, **self.features}
        section = Section(self, lengths, files, columns, [store], entries)
        if before is not None:
            section.reader.adopt(before.reader, before.entries[0].number - entries[0].number)
        self._section = section

    def _opened(self) -> Section:
        """The parts that can be read; all that are kept if none were opened yet."""
        if self._section is None:
            self.refresh(self.log.first())
        if self._section is None:
            raise InvalidState(f"{self!r} has no part that is sealed")
        return self._section

    def _find(self, examples: Any) -> tuple[Section, np.ndarray]:
        """The parts that have these examples, and the numbers of the examples there."""
        numbers = np.asarray(examples, np.int64)
        if not numbers.size:  # any part has all columns
            with self._lock:
                if self._section is None:
                    self._show(self.log.entries(self.log.first())[-1:])
        section = self._opened()
        if not self.grows:
            return section, numbers
        least, most = int(numbers.min(initial=1 << 62)), int(numbers.max(initial=-1))
        if most >= section.first + len(section):
            self.refresh()
            section = self._opened()
        if least < section.first or most >= section.first + len(section):
            wrong = most if least >= section.first else least
            raise InvalidState(
                f"example {wrong:,} of {self!r} is in a part that is not sealed yet, or no longer "
                "held; refresh(start=…) opens parts from a number on"
            )
        return section, numbers - section.first

    def __len__(self) -> int:
        section = self._opened()
        return section.first + len(section)

    def read(self, examples: Any, *place: Any, **options: Any) -> Fields:
        """Pieces of examples; see `Readable.read`."""
        section, numbers = self._find(examples)
        return section.read(numbers, *place, **options)

    def read_examples(self, examples: Any, features: Any = None) -> Fields:
        """The features of whole examples; see `Readable.read_examples`."""
        section, numbers = self._find(examples)
        return section.read_examples(numbers, features)

    @property
    def lengths(self) -> np.ndarray:  # type: ignore[override]  # others have an attribute
        """Positions of each example, of one that grows sealed so far; 0 if held out: uint32 [n]."""
        if (section := self._opened()).first:
            raise InvalidState(
                f"the lengths of the first parts of {self!r} are not read; refresh(start=0) reads "
                "them, if its writer has kept the parts"
            )
        return section.planned

    @property
    def num_tokens(self) -> int:  # pyright: ignore
        """Positions of the examples, of one that grows sealed so far."""
        return int(self._opened().planned.sum(dtype=np.int64))

    @property
    def files(self) -> np.ndarray:  # type: ignore[override]  # others have an attribute
        """The number of examples in each part that can be read, in order: int64 [parts]."""
        return self._opened().files

    @functools.cached_property
    def tokenizer(self) -> Tokenizer | None:  # pyright: ignore
        """The tokenizer that made the tokens, for decoding; None if there is none."""
        if self._manifest.tokenizer is None:
            return None
        try:
            loaded = tokenizers.load(self._manifest.tokenizer, self.directory)
            if loaded.fingerprint != self.origin["tokenizer"]:
                raise InvalidValue(f"it is {loaded.fingerprint}")
            return loaded
        except (KeyError, TypeError, ValueError) as error:
            seen = f"its tokenizer, {self.origin['tokenizer']}, cannot be loaded: {error}"
            raise damage(self.directory / MANIFEST, seen) from error

    def split(self, hold_out: float = 0.01) -> "tuple[Corpus | Split, Split]":
        """The examples to train on, and those held out; see `AnyCorpus.split`.

        As a corpus grows, examples that are held out stay so. They keep their numbers in the first
        corpus, whose plans leave them out. The second has those that are sealed so far, and does
        not grow.

        Args:
            hold_out: the share of examples that are held out, above 0 and below 1.
        """
        if not self.grows:
            return super().split(hold_out)  # type: ignore[return-value]
        if self.hold_out:
            raise InvalidValue(f"{self!r} is split already; split the corpus itself")
        options = {**self._options, "hold_out": require_share("hold_out", hold_out)}
        held_out = Split(Corpus(self.directory, follow=True), hold_out=hold_out, held_out=True)
        return Corpus(self.directory, **options), held_out

    def with_features(
        self, columns: Mapping[str, Iterable[Any]], *, features: Mapping[str, Feature]
    ) -> "Corpus":
        """The same corpus with more features, which are stored beside it, in `features/`.

        It has another fingerprint. `Corpus.open(directory, features=names)` opens it again; without
        `features=`, the corpus is as it was.

        Args:
            columns: by name, an entry for each example, as for `from_arrays`; may be generators.
            features: their schemas, by the same names.

        Raises:
            ValueError: a column does not match its feature or the corpus, a name is taken, or other
                values of the same names are there.
        """
        for name in self.task.check(features):
            if name in self.features:
                raise InvalidValue(f"the corpus has a feature {name!r} already; use another name")
        counts = self.log.read_counts(self._manifest.parts, self.task)
        add_features(Added(self.directory, self._manifest), counts, columns, features)
        names = [*self.added, *features]
        return Corpus(self.directory, **{**self._options, "features": names})

    @property
    def added(self) -> list[str]:
        """See `AnyCorpus`."""
        return [name for each in self._added for name in each.manifest.features]

    @classmethod
    def from_arrays(
        cls,
        columns: Any,
        directory: epath.PathLike,
        *,
        features: Mapping[str, Feature] | None = None,
        vocab_size: int | None = None,
        task: Task = CAUSAL,
        loss: str | None = None,
    ) -> "Corpus":
        """A corpus of tokenised examples, written into `directory`.

        Args:
            columns: as for `Examples`, as are the next four; columns may be generators. Without
                weights, all tokens weigh 1, which takes no space.
            directory: where to write. If it holds a corpus of the same examples, that is opened.
            features: the schemas of the other columns, by name.
            vocab_size: if given, ids must be below it.
            task: decides the fields and the lengths.
            loss: the side of arrays that carries the loss, if one does.

        Raises:
            ValueError: as for `Examples`; or `directory` holds other data.
        """
        require_type("task", task, Task, A_TASK)
        require_type("loss", loss, str | None, "the name of a side, or None")
        sides, directory = task.divide(columns, features), as_path(directory)
        vocab_size = None if vocab_size is None else require_whole("vocab_size", vocab_size, 1)
        parts = divide_arrays(columns, sides, vocab_size, task.lookahead)
        single = [*sides] == [task.side] and loss is None
        with contextlib.ExitStack() as stack:
            made = {}
            for name in sides:
                of = (task, vocab_size) if name == task.side else (OF_ARRAYS, None)
                place = directory if single else directory / name
                made[name] = stack.enter_context(_Made(place, *of))
            for side, part in parts:
                made[side].append(part)
            corpora = {name: each.finish() for name, each in made.items()}
        if single:
            return corpora[task.side]
        record_sides(directory, [*sides], loss)
        return Sides(corpora, loss=loss)  # type: ignore[return-value]  # as of groups

    @classmethod
    def from_groups(
        cls,
        groups: Any,
        directory: epath.PathLike,
        *,
        features: Mapping[str, Feature] | None = None,
        vocab_size: int | None = None,
    ) -> Groups:
        """A corpus of groups: prefixes with several continuations, each prefix computed once.

        >>> groups = [([1, 5, 6, 2], [[7, 8, 3], [9, 3]])]
        >>> corpus = Corpus.from_groups(groups, "preferences")  # doctest: +SKIP
        >>> corpus.lengths.tolist()  # P - 1 + ΣR columns  # doctest: +SKIP
        [8]

        Args:
            groups: pairs `(prefix, [continuation, …])` of 1-D integer arrays (or lists) of token
                ids, at least one each; a continuation may be such a pair again, which makes a tree.
                May be a generator. Or a dict of columns: "tokens", the groups; each of `features`
                by its name; and optionally "weights".

                A feature of "inputs" or "targets" is nested like the tokens, with a value for each
                token; one of "continuation" is a list for each group, with a value for each
                continuation, in order; one of "example" has a value for each group.

                Weights are nested like the tokens, with a number for each token or for all of a
                node; or a list with a number for each continuation: a prefix then weighs the sum of
                those below it, as in separate rows. Default: every continuation weighs 1.
            directory: where to write, as for `from_arrays`; `Corpus.open` opens it again.
            features: the schemas of the other columns, by name.
            vocab_size: if given, ids must be below it.

        Raises:
            ValueError: a prefix or a continuation has no token, an entry is not as above, or
                `directory` holds other data.
        """
        columns, known = divide_groups(groups, features, vocab_size)
        nodes = cls.from_arrays(
            columns, directory, features=known, vocab_size=vocab_size, task=GROUPS
        )
        return Groups(nodes)

    @property
    def caches(self) -> tuple[tuple[PartCache, int], ...]:
        """See `AnyCorpus`."""
        return tuple((cache, 0) for cache in self._caches)

    def cached_file(self, name: str, make: Callable[[], bytes]) -> bytes:
        """See `AnyCorpus`; one process makes it, and the others that share a directory wait."""
        try:
            path = self.directory / name
            return write_once(path, f"making {name}", lambda file: file.write(make())).read_bytes()
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise
            return make()

    def _find_silent(self) -> np.ndarray:
        if not self._manifest.parts.numbers("silent").any():
            return NO_EXAMPLES
        return np.frombuffer(self.cached_file(SILENT, self._read_silent), np.int64)

    def _read_silent(self) -> bytes:
        """The content of `SILENT`: the numbers of examples without loss."""
        first, found = 0, []
        for part in self._manifest.parts:
            if part.silent:
                examples = open_part(self.directory, part).read()
                silent = self.task.find_silent(examples.counts, examples.weights, examples.columns)
                found.append(first + silent)
            first += part.examples
        return np.concatenate(found).astype(np.int64).tobytes()

    def verify(self) -> None:
        """Reads all parts, and refuses the first whose content is not what was written."""
        lengths = []
        for part in self._manifest.parts:
            file = open_part(self.directory, part, verify=True)
            try:
                require_same_origin(self.directory, self.origin, file.metadata["origin"])
            except (ValueError, LookupError) as error:
                raise damage(self.directory / part.file, str(error)) from error
            lengths.append(self.task.lengths(file.counts))
        for place, manifest in self._added:
            for part in manifest.parts:
                open_part(place, part, verify=True)
        expected: dict[str, Any] = {"lengths_digest": digest(np.concatenate(lengths))}
        if self.tokenizer is not None:
            expected["vocab_size"] = self.tokenizer.vocab_size
        for name, value in expected.items():
            if (said := getattr(self._manifest, name)) != value:
                raise damage(self.directory / MANIFEST, f"its {name} is {said}, not {value}")
        files = {*self._manifest.parts.strings("file")}
        for path in self.directory.glob("part-*.arrow"):
            if path.name not in files:
                raise damage(path, f"it is not one of the parts in {MANIFEST}")

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial(Corpus, os.fspath(self.directory), **self._options), ()

    def __str__(self) -> str:
        if not self.grows:
            return super().__str__()
        vocabulary = "unknown" if self.vocab_size is None else f"{self.vocab_size:,} ids"
        return f"corpus       {os.fspath(self.directory)}, which grows\nvocabulary   {vocabulary}"

    def __repr__(self) -> str:
        follow = ", follow=True" if self.grows else ""
        return f"Corpus.open({os.fspath(self.directory)!r}{follow})"


class _Made:
    """A corpus that is written part by part, or compared with the one that is there already."""

    def __init__(self, directory: epath.Path, task: Task, vocab_size: int | None):
        self._directory, self._task, self._vocab_size = directory, task, vocab_size
        self._digests: list[str] = []

    def __enter__(self) -> "_Made":
        self._writer: Writer | None = None
        with contextlib.suppress(Exists):
            self._writer = Writer(self._directory, vocab_size=self._vocab_size, task=self._task)
            if self._writer.examples:
                self._writer.close()
                raise InvalidValue(
                    f"{os.fspath(self._directory)} holds a corpus that grows; finish it with "
                    "pipeline.Writer, or choose another directory"
                )
        return self

    def append(self, part: Ragged) -> None:
        if self._writer is None:
            self._digests.append(part.digest)
        else:
            self._writer.append_part(part)

    def finish(self) -> Corpus:
        """The finished corpus."""
        if self._writer is not None:
            self._writer.finish()
            return Corpus(self._directory)
        corpus = Corpus(self._directory)
        require_same_origin(self._directory, corpus.origin, ARRAYS)
        corpus.require_task(self._task)
        there = corpus._manifest.parts.strings("sha256")
        if self._digests != there or self._vocab_size != corpus.vocab_size:
            raise InvalidValue(
                f"{os.fspath(self._directory)} holds a corpus of other examples ({len(corpus):,} "
                f"of them, {corpus.fingerprint}); choose another directory, or delete this one"
            )
        return corpus

    def __exit__(self, *_: object) -> None:
        if self._writer is not None:
            self._writer.close()
