"""Decoded: features of a side that are made from the bytes of files when a batch is built."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from pipeline.corpus.interface import AnyCorpus, Readable, View
from pipeline.corpus.stored.gather import Fields
from pipeline.corpus.stored.reader import Pieces
from pipeline.errors import InvalidValue, suggest_option
from pipeline.text.features import Feature, check_features
from pipeline.text.fingerprints import fingerprint

# From the bytes of a file to an array `[n, *shape]` of each feature; if there is one, to it alone.
Decode = Callable[[bytes], Any]


class Decoded(View):
    """Examples whose files, such as pictures, are decoded when a batch is built.

    The corpus has the bytes of files on a side of their own, which the view leaves out; the number
    of bytes of each file, on a side of files; and on the side that is decoded, a pointer from each
    position to its file. So all lengths are known from headers. See docs/sides.md.

    Batches are decoded where they are built: ahead, in the threads of a `Loader` (`num_threads`),
    or in the threads or processes of Grain. A file that cannot be decoded, or that has not as many
    values as its header said, is an error that names the example.

    Args:
        corpus: examples of several sides.
        decode: a function of the bytes of a file, such as a partial of `pipeline.patchify`. It
            returns a tuple with an array `[n, *shape]` for each of `features`, in their order, or
            for one feature its array. Its fingerprint is part of that of the view.
        features: the features to add to the side that is decoded, with dtypes. If the corpus has
            one of them already, decoded values must be equal.
        files: the feature with the bytes (uint8).
        sizes: the feature with the number of bytes of each file.
    """

    kind = "decoded"

    def __init__(
        self,
        corpus: AnyCorpus,
        decode: Decode | str,
        *,
        features: Mapping[str, Any],
        files: str = "files",
        sizes: str = "file_bytes",
    ):
        super().__init__(corpus)
        if isinstance(decode, str):  # a description has its fingerprint, and features as JSON
            features = {name: Feature(**each) for name, each in features.items()}
        self.made, known = check_features(features), corpus.features
        for name in (files, sizes):
            if name not in known:
                raise InvalidValue(f"the corpus has no feature {suggest_option(name, [*known])}")
        raw, parts = known[files].of, known[sizes].of
        if beside := [n for n, each in known.items() if raw in (each.of, each.to) and n != files]:
            raise InvalidValue(
                f"{beside[0]} is on the side {raw!r} or points to it; the bytes of files must have "
                "a side of their own, which is not in batches"
            )
        sides = dict(zip(corpus.side_names, corpus.sides, strict=True))
        found = {each.of for each in self.made.values()}
        pointers = [n for n, each in known.items() if {each.of} == found and each.to == parts]
        if not pointers or any(each.to or each.dtype is None for each in self.made.values()):
            raise InvalidValue(
                f"features are {dict(features)!r:.200}; they must be of one side that points to "
                f"{parts!r}, the side of {sizes}, with dtypes, and no pointers"
            )
        self.names = files, sizes, pointers[0]
        self.decode, (of,) = decode, found
        made = _DecodedSide(self, sides[of], sides[raw], sides[parts])
        self.side_names = tuple(name for name in corpus.side_names if name != raw)
        self.sides = tuple(made if name == of else sides[name] for name in self.side_names)
        self.unpriced = tuple(name for name in corpus.unpriced if name != raw)
        self.lengths = corpus.lengths[:, [name != raw for name in corpus.side_names]]
        if corpus.loss_side is not None:
            self.loss_side = self.side_names.index(corpus.side_names[corpus.loss_side])
        if len(self.sides) == 1:
            self.lengths, self.unpriced = self.lengths[:, 0], ()
        self.text_bytes, self.num_learnt = corpus.text_bytes, corpus.num_learnt
        function = decode if isinstance(decode, str) else fingerprint(decode)
        schemas = {name: each.as_json for name, each in self.made.items()}
        self._describe(decode=function, features=schemas, files=files, sizes=sizes)
        # Under the name of the side, which text that is mixed with them lacks.
        identity = dict(self.identity)
        mine = {n: identity.pop(n) for n in (of, raw, self.kind) if n in identity}
        self.identity = {**identity, of: mine.pop(of, {}) | mine}

    def decode_file(self, content: bytes) -> list[np.ndarray]:
        """The values of each of the decoded features."""
        if isinstance(self.decode, str):
            raise InvalidValue(f"of its function, only the fingerprint {self.decode} is known here")
        given = self.decode(content)
        arrays = given if isinstance(given, tuple) else (given,)
        if len(arrays) != len(self.made):
            raise InvalidValue(f"decode gave {len(arrays)} arrays for {', '.join(self.made)}")
        columns = zip(self.made.items(), arrays, strict=True)
        return [each.convert([array], name, [len(arrays[0])]) for (name, each), array in columns]

    def __str__(self) -> str:
        return f"{self.corpus}\nseen as      decoded {', '.join(self.made)}"


class _DecodedSide(Readable):
    """The side that is decoded: that of the corpus, whose files are those of two other sides."""

    def __init__(self, view: Decoded, side: Readable, files: Readable, sizes: Readable):
        self._view, self._side, self._files, self._sizes = view, side, files, sizes
        self.lengths, self.features = side.lengths, {**side.features, **view.made}

    def _read(self, pieces: Pieces, names: Sequence[str]) -> Fields:
        fields = self._side.read(*pieces, [n for n in names if n in self._side.features])
        if missing := [name for name in names if name not in fields]:
            for name in missing:
                fields[name] = self.features[name].filled(int(pieces.reach.sum()))
            decoded, begins = self._decode(pieces.examples), np.cumsum(pieces.reach) - pieces.reach
            for values, begin, start, size in zip(
                decoded, begins, pieces.starts, pieces.lengths, strict=True
            ):
                for name in missing:
                    fields[name][begin : begin + size] = values[name][start : start + size]
        return fields

    def _read_examples(self, examples: np.ndarray, names: Sequence[str]) -> Fields:
        return self._side.read_examples(examples, names)

    def _decode(self, examples: np.ndarray) -> Iterator[Fields]:
        """The features of whole examples, one after another."""
        view, (files, sizes, pointer) = self._view, self._view.names
        stored = [name for name in (pointer, *view.made) if name in self._side.features]
        for number, content, counts, expected in zip(
            examples.tolist(),
            _read_whole(self._files, examples, [files]),
            _read_whole(self._sizes, examples, [sizes]),
            _read_whole(self._side, examples, stored),
            strict=True,
        ):
            ends = np.cumsum(counts[sizes], dtype=np.int64)
            try:
                parts = np.split(content[files], ends)[:-1]
                decoded = [view.decode_file(each.tobytes()) for each in parts]
            except Exception as error:  # of many kinds, for bytes of any kind
                raise InvalidValue(
                    f"example {number} cannot be decoded: {error}; leave it out: exclude=[{number}]"
                ) from error
            lengths = np.array([len(each[0]) for each in decoded], np.int64)
            values = {pointer: np.arange(len(decoded)).repeat(lengths)}
            for at, (name, feature) in enumerate(view.made.items()):
                values[name] = np.concatenate([feature.filled(0), *(each[at] for each in decoded)])
            for name in stored:
                if not np.array_equal(values[name], expected[name]):
                    raise InvalidValue(
                        f"example {number} decodes to {len(values[name]):,} values of {name}, "
                        f"which are not the {len(expected[name]):,} that its header said; make it "
                        "again"
                    )
            yield values


def _read_whole(side: Readable, examples: np.ndarray, names: Sequence[str]) -> Iterator[Fields]:
    """The features of whole examples, one after another."""
    lengths = side.lengths[examples].astype(np.int64)
    fields = side.read(examples, np.zeros_like(lengths), lengths, features=names)
    for end, length in zip(np.cumsum(lengths), lengths, strict=True):
        yield {name: fields[name][end - length : end] for name in names}
