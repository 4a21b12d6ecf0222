"""Decoded: features of a side that are made from the bytes of files when a batch is built."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from pipeline.corpus.interface import AnyCorpus, computed
from pipeline.corpus.side import Side
from pipeline.corpus.stored.gather import Fields, Pieces
from pipeline.corpus.view import ChangedView
from pipeline.errors import InvalidValue, suggest_option
from pipeline.text.features import Feature, check_features
from pipeline.text.fingerprints import fingerprint

# From the bytes of a file to an array `[n, *shape]` of each feature; if there is one, to it alone.
Decode = Callable[[bytes], Any]


class Decoded(ChangedView):
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
        features: Mapping[str, Feature],
        files: str = "files",
        sizes: str = "file_bytes",
    ):
        super().__init__(corpus)
        self.made, stored = check_features(features), corpus.features
        for name in (files, sizes):
            if name not in stored:
                raise InvalidValue(f"the corpus has no feature {suggest_option(name, [*stored])}")
        raw, size_side = stored[files].of, stored[sizes].of
        if beside := [n for n, f in stored.items() if raw in (f.of, f.to) and n != files]:
            raise InvalidValue(
                f"{beside[0]} is on the side {raw!r} or points to it; the bytes of files "
                "must have a side of their own, which is not in batches"
            )
        of_sides = {feature.of for feature in self.made.values()}
        pointers = [n for n, f in stored.items() if {f.of} == of_sides and f.to == size_side]
        if not pointers or any(f.to or f.dtype is None for f in self.made.values()):
            raise InvalidValue(
                f"features are {dict(features)!r:.200}; they must be of one side that points to "
                f"{size_side!r}, the side of {sizes}, with dtypes, and no pointers"
            )
        (target,), sides = of_sides, corpus.sides
        self._function, names = decode, (files, sizes, pointers[0])
        made = _DecodedSide(sides[target], sides[raw], sides[size_side], names, decode, self.made)
        self.sides = {n: made if n == target else side for n, side in sides.items() if n != raw}
        several = len(self.sides) > 1
        self.unpriced = tuple(name for name in corpus.unpriced if name != raw and several)
        function = decode if isinstance(decode, str) else fingerprint(decode)
        schemas = {name: feature.as_json for name, feature in self.made.items()}
        self._describe(decode=function, features=schemas, files=files, sizes=sizes)
        # Under the name of the side, which text that is mixed with them lacks.
        identity = dict(self.identity)
        entries = {n: identity.pop(n) for n in (target, raw, self.kind) if n in identity}
        self.identity = {**identity, target: entries.pop(target, {}) | entries}

    @computed
    def lengths(self) -> np.ndarray:
        """Positions of each example, on the sides that the view has."""
        columns = [name in self.sides for name in self.corpus.side_names]
        lengths = self.corpus.lengths[:, columns]
        return lengths if len(self.sides) > 1 else lengths[:, 0]

    @computed
    def num_learnt(self) -> int | None:
        """That of the corpus."""
        return self.corpus.num_learnt

    @computed
    def text_bytes(self) -> int | None:
        """That of the corpus."""
        return self.corpus.text_bytes

    def arguments(self) -> dict[str, Any]:
        """See `AnyCorpus`."""
        return super().arguments() | {"decode": self._function, "features": self.made}

    def __str__(self) -> str:
        return f"{self.corpus}\nseen as      decoded {', '.join(self.made)}"


class _DecodedSide(Side):
    """The side that is decoded: that of the corpus, whose files are those of two other sides.

    `names` are those of the features with bytes and sizes, and of the pointer to files.
    """

    def __init__(
        self,
        side: Side,
        files: Side,
        sizes: Side,
        names: tuple[str, str, str],
        decode: Decode | str,
        schemas: Mapping[str, Feature],
    ):
        self._side, self._files, self._sizes, self._feature_names = side, files, sizes, names
        self._function, self._made = decode, schemas
        self.has_tokens, self.features = side.has_tokens, {**side.features, **schemas}

    @computed
    def lengths(self) -> np.ndarray:
        """Positions of each example."""
        return self._side.lengths

    def _read(self, pieces: Pieces, names: Sequence[str]) -> Fields:
        fields = self._side.read(*pieces, self._side.select(names))
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

    def _decode_file(self, content: bytes) -> list[np.ndarray]:
        """The values of each of the decoded features."""
        if isinstance(self._function, str):
            raise InvalidValue(
                f"of its function, only the fingerprint {self._function} is known here"
            )
        output = self._function(content)
        arrays = output if isinstance(output, tuple) else (output,)
        if len(arrays) != len(self._made):
            raise InvalidValue(f"decode gave {len(arrays)} arrays for {', '.join(self._made)}")
        columns = zip(self._made.items(), arrays, strict=True)
        return [
            feature.convert([array], name, [len(arrays[0])]) for (name, feature), array in columns
        ]

    def _decode(self, examples: np.ndarray) -> Iterator[Fields]:
        """The features of whole examples, one after another."""
        files, sizes, pointer = self._feature_names
        stored = self._side.select((pointer, *self._made))
        for number, content, counts, expected in zip(
            examples.tolist(),
            _read_whole(self._files, examples, [files]),
            _read_whole(self._sizes, examples, [sizes]),
            _read_whole(self._side, examples, stored),
            strict=True,
        ):
            ends = np.cumsum(counts[sizes], dtype=np.int64)
            try:
                file_bytes = np.split(content[files], ends)[:-1]
                decoded = [self._decode_file(raw.tobytes()) for raw in file_bytes]
            except Exception as error:  # of many kinds, for bytes of any kind
                raise InvalidValue(
                    f"example {number} cannot be decoded: {error}; leave it out: exclude=[{number}]"
                ) from error
            lengths = np.array([len(arrays[0]) for arrays in decoded], np.int64)
            values = {pointer: np.arange(len(decoded)).repeat(lengths)}
            for column, (name, feature) in enumerate(self._made.items()):
                values[name] = np.concatenate(
                    [feature.filled(0), *(arrays[column] for arrays in decoded)]
                )
            for name in stored:
                if not np.array_equal(values[name], expected[name]):
                    raise InvalidValue(
                        f"example {number} decodes to {len(values[name]):,} values of {name}, "
                        f"which are not the {len(expected[name]):,} that its header said; make it "
                        "again"
                    )
            yield values


def _read_whole(side: Side, examples: np.ndarray, names: Sequence[str]) -> Iterator[Fields]:
    """The features of whole examples, one after another."""
    lengths = side.lengths[examples].astype(np.int64)
    fields = side.read(examples, np.zeros_like(lengths), lengths, features=names)
    for end, length in zip(np.cumsum(lengths), lengths, strict=True):
        yield {name: fields[name][end - length : end] for name in names}
