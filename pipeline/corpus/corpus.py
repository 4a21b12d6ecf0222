"""Corpus: tokenised examples on disk, with their lengths and a fingerprint."""

import errno
import functools
import os
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypedDict, Unpack, overload

import numpy as np
from etils import epath

from pipeline.corpus.added import Store, add_features, find_added
from pipeline.corpus.cache import PartCache, default_directory
from pipeline.corpus.groups import Groups, divide_groups
from pipeline.corpus.growing import Growing
from pipeline.corpus.manifest import (
    LENGTHS,
    MANIFEST,
    Manifest,
    damage,
    is_finished,
    open_part,
    read_lengths,
    require_same_origin,
)
from pipeline.corpus.reader import LocalParts, PartStore, Reader
from pipeline.corpus.stored import Stored
from pipeline.corpus.tasks import CAUSAL, GROUPS, Task
from pipeline.corpus.writer import ARRAYS, PartWriter, complete
from pipeline.errors import InvalidValue, require_whole
from pipeline.fs.atomic import as_path, atomic_write, directory_lock, is_local
from pipeline.planning.lengths import digest
from pipeline.text.features import Feature
from pipeline.text.ragged import divide_arrays


class OpenOptions(TypedDict, total=False):
    """The options of `Corpus.open`, for type checkers."""

    features: Iterable[str]
    cache: str | os.PathLike | None
    cache_bytes: int | None


class Corpus(Stored):
    """Examples of token ids in a directory; made by `prepare`, `from_arrays` or `open`.

    Opening reads a small manifest, and the lengths, and checks their digest; tokens are mapped when
    first read, and never all copied. A corpus pickles as its directory.

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

    Attributes:
        directory, origin: see `Stored`.
        identity, fingerprint: see `Stored`. They depend on content alone: not on paths, times, or
            worker processes.
        lengths_digest: the digest of its lengths, by `pipeline.planning.lengths.digest`.
    """

    def __init__(
        self,
        directory: epath.PathLike,
        *,
        features: Iterable[str] = (),
        cache: str | os.PathLike | None = None,
        cache_bytes: int | None = None,
    ):
        if cache is not None and not (os.fspath(cache) and is_local(cache)):
            raise InvalidValue(f"cache is {os.fspath(cache)!r}; give a local directory")
        if cache_bytes is not None:
            require_whole("cache_bytes", cache_bytes, 1)
        place = as_path(directory)
        if cache is None and not is_local(place):
            cache = default_directory()
        if cache is None and cache_bytes is not None:
            raise InvalidValue(
                f"cache_bytes is {cache_bytes}, but {os.fspath(place)} is local and there is no "
                "cache=; omit cache_bytes"
            )
        manifest = Manifest.of(place)
        added = find_added(place, features, manifest.digest)
        super().__init__(place, manifest, manifest.digest)
        self._stores = [Store(place, manifest), *added]
        for each in added:
            self.features = {**self.features, **each.manifest.features}
        if added:
            of_added = "+".join(sorted(each.manifest.digest for each in added))
            self.identity = {**self.identity, "features": of_added}
        self.num_learnt, self.text_bytes = manifest.learnt, manifest.text_bytes
        self.lengths_digest = manifest.lengths_digest
        self.files = manifest.table.numbers("examples")
        self._caches: list[PartCache] = []
        # The options that open the same corpus.
        self._options: dict[str, Any] = {"features": self.added}
        if cache is None:
            self.lengths = read_lengths(place / LENGTHS, manifest)
            return
        root, total = pathlib.Path(cache).expanduser(), sum(m.bytes for _, m in self._stores)
        self._caches = [
            # Each gets its share of the space, by its bytes.
            PartCache(
                place,
                each.table,
                root / each.digest,
                cache_bytes and cache_bytes * each.bytes // total,
            )
            for place, each in self._stores
        ]
        room = sum(each.max_bytes for each in self._caches)
        self._options |= {"cache": os.fspath(root), "cache_bytes": room}
        self.lengths = self._caches[0].read_copy(LENGTHS, lambda path: read_lengths(path, manifest))

    @overload
    @classmethod
    def open(
        cls,
        directory: epath.PathLike,
        *,
        follow: Literal[False] = False,
        **options: Unpack[OpenOptions],
    ) -> "Corpus": ...

    @overload
    @classmethod
    def open(cls, directory: epath.PathLike, *, follow: Literal[True]) -> Growing: ...

    @classmethod
    def open(
        cls, directory: epath.PathLike, *, follow: bool = False, **options: Any
    ) -> "Corpus | Growing":
        """The corpus in `directory`, after cheap checks that all of it is there.

        Args:
            directory: a local path, or one of object storage (`gs://…`).
            follow: whether to read a corpus while it is written, part by part as it is sealed; see
                `Growing`. It reads a finished corpus in the same way.
            **options: those of `Corpus`.

        Raises:
            FileNotFoundError: there is no corpus there.
            ValueError: it is half-written, damaged, or of another schema version, or the arguments
                contradict each other.
        """
        if follow:
            if options.get("cache") is not None or options.get("features"):
                raise InvalidValue(
                    "with follow=True, parts in object storage are kept in the default cache, and "
                    "there are no added features; omit cache= and features="
                )
            return Growing(directory)
        corpus = cls(directory, **options)
        return Groups(corpus) if corpus.task == GROUPS else corpus  # type: ignore[return-value]

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
        add_features(self._stores[0], self._stored.count_tokens(), columns, features)
        names = [*self.added, *features]
        return Corpus(self.directory, **{**self._options, "features": names})

    @property
    def added(self) -> list[str]:
        """See `AnyCorpus`."""
        return [name for each in self._stores[1:] for name in each.manifest.features]

    @classmethod
    def from_arrays(
        cls,
        columns: Any,
        directory: epath.PathLike,
        *,
        features: Mapping[str, Feature] | None = None,
        vocab_size: int | None = None,
        task: Task = CAUSAL,
    ) -> "Corpus":
        """A corpus of tokenised examples, written into `directory`.

        Args:
            columns: 1-D integer arrays (or lists) of token ids, marks included; may be a generator.
                A causal example of `n` ids has length `n - 1`. Or a dict of such columns: "tokens",
                optionally "weights" (of the loss, a number from 0 up for each token; without them
                1 everywhere, which takes no space), and each of `features` by its name.
            directory: where to write. If it holds a corpus of the same examples, that is opened.
            features: the schemas of the other columns, by name.
            vocab_size: if given, ids must be below it.
            task: decides the fields and the lengths; see `pipeline.corpus.tasks`.

        Raises:
            ValueError: an example is not a 1-D array of ids, there is none, a column does not match
                its feature or the tokens, or `directory` holds other data.
        """
        features, directory = task.check(features), as_path(directory)
        vocab_size = None if vocab_size is None else require_whole("vocab_size", vocab_size, 1)
        parts = divide_arrays(columns, features, vocab_size)
        with directory_lock(directory, "writing a corpus"):
            complete(directory)
            if is_finished(directory):
                corpus = cls(directory)
                require_same_origin(directory, corpus.origin, ARRAYS)
                corpus.require_task(task)
                there = corpus._manifest.table.strings("sha256")
                if [part.digest for part in parts] != there or vocab_size != corpus.vocab_size:
                    raise InvalidValue(
                        f"{os.fspath(directory)} holds a corpus of other examples "
                        f"({len(corpus):,} of them, {corpus.fingerprint}); choose another "
                        "directory, or delete this one"
                    )
                return corpus
            manifest = Manifest(task=task.name, origin=ARRAYS, vocab_size=vocab_size)
            writer = PartWriter(directory, manifest)
            if writer.sealed:
                raise InvalidValue(
                    f"{os.fspath(directory)} holds a corpus that grows; finish it with "
                    "pipeline.Writer, or choose another directory"
                )
            for part in parts:
                writer.add(part)
            writer.finish()
        return cls(directory)

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

    @functools.cached_property
    def _stored(self) -> Reader:  # type: ignore[override]  # made when it is first read
        """The reader of the tokens and of added features."""
        local = [LocalParts(place, each.table) for place, each in self._stores]
        stores: Sequence[PartStore] = self._caches or local
        features = [self._manifest.of_tokens, *(each.features for _, each in self._stores)]
        known = {name: feature for each in features for name, feature in each.items()}
        examples = self._manifest.table.numbers("examples")
        return Reader(self.task, self.lengths, examples, known, stores)

    @property
    def caches(self) -> tuple[tuple[PartCache, int], ...]:
        """See `AnyCorpus`."""
        return tuple((cache, 0) for cache in self._caches)

    def cached_file(self, name: str, make: Callable[[], bytes]) -> bytes:
        """See `AnyCorpus`; one process makes it, and the others that share a directory wait."""
        path = self.directory / name
        if path.exists():
            return path.read_bytes()
        try:
            with directory_lock(self.directory, f"making {name}"):
                if not path.exists():
                    content = make()
                    with atomic_write(path) as file:
                        file.write(content)
                return path.read_bytes()
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise
            return make()

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
        for place, manifest in self._stores[1:]:
            for part in manifest.parts:
                open_part(place, part, verify=True)
        expected: dict[str, Any] = {"lengths_digest": digest(np.concatenate(lengths))}
        if self.tokenizer is not None:
            expected["vocab_size"] = self.tokenizer.vocab_size
        for name, value in expected.items():
            if (said := getattr(self._manifest, name)) != value:
                raise damage(self.directory / MANIFEST, f"its {name} is {said}, not {value}")
        files = {*self._manifest.table.strings("file")}
        for path in self.directory.glob("part-*.arrow"):
            if path.name not in files:
                raise damage(path, f"it is not one of the parts in {MANIFEST}")

    def require_task(self, task: Task) -> None:
        """Raises a `ValueError` if this corpus is of another task."""
        if self.task != task:
            raise InvalidValue(
                f"{os.fspath(self.directory)} holds a corpus of the task {self.task.name!r}, not "
                f"{task.name!r}; choose another directory, or delete this one"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial(Corpus, os.fspath(self.directory), **self._options), ()

    def __repr__(self) -> str:
        return f"Corpus.open({os.fspath(self.directory)!r})"
