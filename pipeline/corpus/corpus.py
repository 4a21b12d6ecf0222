"""Corpus: tokenised examples in a directory."""

import contextlib
import errno
import functools
import os
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypedDict, Unpack

import numpy as np
from etils import epath

from pipeline.corpus.added import AddedFeatures, add_features, find_added
from pipeline.corpus.interface import AnyCorpus, SingleCorpus, computed
from pipeline.corpus.joined import Joined
from pipeline.corpus.sides import Sides, record_sides, require_names
from pipeline.corpus.stored.cache import PartCache, default_directory
from pipeline.corpus.stored.directory import LENGTHS, MANIFEST, damage
from pipeline.corpus.stored.log import read_counts
from pipeline.corpus.stored.manifest import Manifest, open_part, read_lengths, require_same_origin
from pipeline.corpus.stored.reader import Reader
from pipeline.corpus.stored.writer import NO_ORIGIN, Writer
from pipeline.corpus.tasks import CAUSAL, GROUPS, TASKS, Task, is_single, read_columns
from pipeline.corpus.views.groups import Groups
from pipeline.corpus.views.trees import divide_groups
from pipeline.errors import Exists, InvalidValue, require_type, require_whole
from pipeline.fs.atomic import as_path, is_local, write_once
from pipeline.planning.lengths import NO_EXAMPLES, digest
from pipeline.text import tokenizers
from pipeline.text.features import Feature
from pipeline.text.ragged import Ragged
from pipeline.text.tokenizers import Tokenizer

# The file beside a corpus with the numbers of the examples that have no loss, if there are any.
SILENT = "silent.int64"


class OpenOptions(TypedDict, total=False):
    """The options of `Corpus.open`, for type checkers."""

    features: Iterable[str]
    cache: str | os.PathLike | None
    cache_bytes: int | None


class Corpus(SingleCorpus):
    """Examples of token ids in a directory; made by `prepare`, `from_arrays` or `open`.

    Opening reads a small manifest, and the lengths, and checks their digest; tokens are mapped when
    first read, and never all copied. A corpus pickles as its directory.

    Args:
        directory: as for `open`.
        cache: a local directory for the parts of the corpus, each of which is fetched before the
            plan needs it, and checked by its digest. All corpora and all processes of a machine may
            share one. Default None: for a corpus in object storage, the directory `lockstep` in
            that of the user's caches (`XDG_CACHE_HOME`, or `~/.cache`); files of a local corpus are
            mapped where they are.
        cache_bytes: the most bytes of the parts of this corpus in the cache; give room for two
            windows of the plan. Default None: 20 GB, or less if the disk has no room for them.

    Attributes:
        directory: where it is.
        manifest: the description of its parts.
        origin: fingerprints of the source and the tokenizer that it was made from, and the field.
        identity, fingerprint: the digest of its `tokens`, its tokenizer and its task, so that an
            error can say which of them changed; and a short digest of these. They depend on content
            alone: not on paths, times, or worker processes.
        lengths_digest: the digest of its lengths, by `pipeline.planning.lengths.digest`.
    """

    kind, of_machine = "stored", ("cache", "cache_bytes")

    def __init__(
        self,
        directory: epath.PathLike,
        *,
        cache: str | os.PathLike | None = None,
        cache_bytes: int | None = None,
    ):
        if cache is not None and not (os.fspath(cache) and is_local(cache)):
            raise InvalidValue(f"cache is {os.fspath(cache)!r}; give a local directory")
        if cache_bytes is not None:
            require_whole("cache_bytes", cache_bytes, 1)
        self.directory = directory = as_path(directory)
        if cache is None and not is_local(directory):
            cache = default_directory()
        if cache is None and cache_bytes is not None:
            raise InvalidValue(
                f"cache_bytes is {cache_bytes}, but {os.fspath(directory)} is local and there is "
                "no cache=; omit cache_bytes"
            )
        self.manifest = manifest = Manifest.of(directory)
        self.task, self.origin = TASKS[manifest.task], manifest.origin
        self.weighted, self.vocab_size = manifest.weighted, manifest.vocab_size
        self.num_learnt, self.text_bytes = map(manifest.parts.total, ("learnt", "text_bytes"))
        self.lengths_digest = manifest.lengths_digest
        self.identity: Mapping[str, Any] = {
            "tokens": manifest.digest,
            "tokenizer": self.origin["tokenizer"] or "none",
            "task": manifest.task,
        }
        self.features = manifest.features
        self.cache = None if cache is None else pathlib.Path(cache).expanduser()
        store = PartCache.find(directory, manifest, self.cache, cache_bytes)
        read = functools.partial(read_lengths, manifest=manifest)
        self.caches, self.lengths = store.caches, store.read_copy(LENGTHS, read)
        self.files = examples = manifest.parts.numbers("examples")
        columns = {**manifest.of_tokens, **self.features}
        self.reader = Reader(self.task, self.lengths, examples, columns, [store])

    @classmethod
    def open(cls, directory: epath.PathLike, **options: Unpack[OpenOptions]) -> AnyCorpus:
        """The corpus of any kind in `directory`, after cheap checks that all of it is there.

        It may have one side or several, groups, or stand for token files of another program, which
        have no such options.

        Args:
            directory: a local path, or one of object storage (`gs://…`).
            **options: `features`, the names of features that `with_features` added, to read besides
                those that the corpus was made with; and `cache` and `cache_bytes`, as for `Corpus`,
                of which each side gets an equal share.

        Raises:
            FileNotFoundError: there is no corpus there.
            ValueError: it is not finished, damaged, or of another schema version, or the arguments
                contradict each other.
        """
        from pipeline.corpus.opening import open_corpus  # which knows all kinds

        return open_corpus(directory, **options)

    @computed
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer that made the tokens, for decoding; None if there is none."""
        if self.manifest.tokenizer is None:
            return None
        try:
            loaded = tokenizers.load(self.manifest.tokenizer, self.directory)
            if loaded.fingerprint != self.origin["tokenizer"]:
                raise InvalidValue(f"it is {loaded.fingerprint}")
            return loaded
        except (KeyError, TypeError, ValueError) as error:
            reason = f"its tokenizer, {self.origin['tokenizer']}, cannot be loaded: {error}"
            raise damage(self.directory / MANIFEST, reason) from error

    def with_features(
        self, columns: Mapping[str, Iterable[Any]], *, features: Mapping[str, Feature]
    ) -> "WithFeatures":
        """See `AnyCorpus`."""
        return WithFeatures.add(self, (), columns, features, where_cached(self))

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
    ) -> AnyCorpus:
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
        require_type("loss", loss, str | None, "the name of a side, or None")
        tasks, vocab_size, parts = read_columns(columns, features, vocab_size, task)
        require_names(tasks)
        directory, single = as_path(directory), is_single(tasks, loss)
        with contextlib.ExitStack() as stack:
            writings = {}
            for name, side_task in tasks.items():
                folder = directory if single else directory / name
                writings[name] = stack.enter_context(_Writing(folder, side_task, vocab_size))
            for side, part in parts:
                writings[side].append(part)
            corpora = {name: writing.finish() for name, writing in writings.items()}
        if single:
            return corpora[task.side]
        record_sides(directory, [*tasks], loss)
        return Sides(corpora, loss=loss)

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
        columns, schemas = divide_groups(groups, features, vocab_size)
        nodes = cls.from_arrays(
            columns, directory, features=schemas, vocab_size=vocab_size, task=GROUPS
        )
        return Groups(nodes)

    def cached_file(self, name: str, make: Callable[[], bytes]) -> bytes:
        """See `AnyCorpus`; one process makes it, and the others that share a directory wait."""
        try:
            path = self.directory / name
            return write_once(path, f"making {name}", lambda file: file.write(make())).read_bytes()
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise
            return make()

    @computed
    def silent(self) -> np.ndarray:
        """The examples without loss, from a file beside the parts."""
        if not self.manifest.parts.numbers("silent").any():
            return NO_EXAMPLES
        return np.frombuffer(self.cached_file(SILENT, self._read_silent), np.int64)

    def _read_silent(self) -> bytes:
        """The content of `SILENT`: the numbers of examples without loss."""
        first, numbers = 0, []
        for part in self.manifest.parts:
            if part.silent:
                examples = open_part(self.directory, part).read()
                silent = self.task.find_silent(examples.counts, examples.weights, examples.columns)
                numbers.append(first + silent)
            first += part.examples
        return np.concatenate(numbers).astype(np.int64).tobytes()

    def verify(self) -> None:
        """Reads all parts, and refuses the first whose content is not what was written."""
        lengths = []
        for part in self.manifest.parts:
            file = open_part(self.directory, part, verify=True)
            try:
                require_same_origin(self.directory, self.origin, file.metadata["origin"])
            except (ValueError, LookupError) as error:
                raise damage(self.directory / part.file, str(error)) from error
            lengths.append(self.task.lengths(file.counts))
        expected: dict[str, Any] = {"lengths_digest": digest(np.concatenate(lengths))}
        if self.tokenizer is not None:
            expected["vocab_size"] = self.tokenizer.vocab_size
        for name, value in expected.items():
            if (recorded := getattr(self.manifest, name)) != value:
                raise damage(self.directory / MANIFEST, f"its {name} is {recorded}, not {value}")
        files = {*self.manifest.parts.strings("file")}
        for path in self.directory.glob("part-*.arrow"):
            if path.name not in files:
                raise damage(path, f"it is not one of the parts in {MANIFEST}")

    def arguments(self) -> dict[str, Any]:
        """See `AnyCorpus`."""
        return {"directory": os.fspath(self.directory), **where_cached(self)}

    def __repr__(self) -> str:
        return f"Corpus.open({os.fspath(self.directory)!r})"


def where_cached(corpus: AnyCorpus) -> dict[str, Any]:
    """The options for a cache with the room that the files of a corpus have; empty without one."""
    caches = [cache for cache, _ in corpus.caches]
    if not caches:
        return {}
    room = sum(cache.max_bytes for cache in caches)
    return {"cache": os.fspath(caches[0].directory.parent), "cache_bytes": room}


class WithFeatures(Joined):
    """A corpus in a directory with features that were added to it; made by `Corpus.open`.

    Args:
        directory: as for `Corpus`, as are the last two.
        features: names of features that `with_features` added.
        cache: for the parts of the corpus and of the features.
        cache_bytes: the most bytes of all of these; each gets its share, by its bytes.
    """

    kind, of_machine = "with_features", Corpus.of_machine
    corpus: Corpus

    def __init__(
        self,
        directory: epath.PathLike,
        features: Iterable[str],
        *,
        cache: str | os.PathLike | None = None,
        cache_bytes: int | None = None,
    ):
        directory = as_path(directory)
        manifest = Manifest.of(directory)
        added = find_added(directory, features, manifest.digest)
        manifests = [manifest, *(manifest for _, manifest in added)]
        sizes = [manifest.parts.total("bytes") for manifest in manifests]
        rooms: list[int | None] = [None] * len(sizes)
        if cache_bytes is not None:
            room = require_whole("cache_bytes", cache_bytes, 1)
            rooms = [max(room * size // sum(sizes), 1) for size in sizes]
        corpus = Corpus(directory, cache=cache, cache_bytes=rooms[0])
        others = [
            AddedFeatures(folder, manifest, corpus.lengths, corpus.cache, room)
            for (folder, manifest), room in zip(added, rooms[1:], strict=True)
        ]
        super().__init__(corpus, *others)

    @classmethod
    def add(
        cls,
        corpus: Corpus,
        earlier: Sequence[str],
        columns: Mapping[str, Iterable[Any]],
        features: Mapping[str, Feature],
        cached: Mapping[str, Any],
    ) -> "WithFeatures":
        """The corpus with new features, written now, beside `earlier` ones."""
        for name in corpus.task.check(features):
            if name in corpus.features or name in earlier:
                raise InvalidValue(f"the corpus has a feature {name!r} already; use another name")
        manifest = corpus.manifest
        counts = read_counts(corpus.directory, manifest.parts, corpus.task)
        add_features(corpus.directory, manifest, counts, columns, features)
        return cls(corpus.directory, [*earlier, *features], **cached)

    def with_features(
        self, columns: Mapping[str, Iterable[Any]], *, features: Mapping[str, Feature]
    ) -> "WithFeatures":
        """See `AnyCorpus`."""
        return self.add(self.corpus, self.added, columns, features, where_cached(self))

    @property
    def added(self) -> list[str]:
        """The names of features that were added."""
        return [name for corpus in self.others for name in corpus.features]

    def arguments(self) -> dict[str, Any]:
        """See `AnyCorpus`."""
        stored = {"directory": os.fspath(self.directory), "features": self.added}
        return stored | where_cached(self)

    @classmethod
    def make(cls, **arguments: Any) -> AnyCorpus:
        """See `AnyCorpus`."""
        return cls(**arguments)


class _Writing:
    """A corpus that is written part by part, or compared with the one that is there already."""

    def __init__(self, directory: epath.Path, task: Task, vocab_size: int | None):
        self._directory, self._task = directory, task
        self._vocab_size = vocab_size if task.has_tokens else None
        self._digests: list[str] = []

    def __enter__(self) -> "_Writing":
        self._writer: Writer | None = None
        with contextlib.suppress(Exists):
            self._writer = Writer(self._directory, vocab_size=self._vocab_size, task=self._task)
            if self._writer.examples:
                self._writer.close()
                raise InvalidValue(
                    f"{os.fspath(self._directory)} holds a corpus that is not finished; finish it "
                    "with pipeline.Writer, or choose another directory"
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
        require_same_origin(self._directory, corpus.origin, NO_ORIGIN)
        corpus.require_task(self._task)
        digests = corpus.manifest.parts.strings("sha256")
        if self._digests != digests or self._vocab_size != corpus.vocab_size:
            raise InvalidValue(
                f"{os.fspath(self._directory)} holds a corpus of other examples ({len(corpus):,} "
                f"of them, {corpus.fingerprint}); choose another directory, or delete this one"
            )
        return corpus

    def __exit__(self, *_: object) -> None:
        if self._writer is not None:
            self._writer.close()
