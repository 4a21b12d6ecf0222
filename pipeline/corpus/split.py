"""Split: the examples of a corpus that are held out, or all others."""

import numpy as np

from pipeline.corpus import prng
from pipeline.corpus.interface import AnyCorpus
from pipeline.corpus.view import View
from pipeline.errors import InvalidValue, counted, require_share, suggest_option
from pipeline.planning.identity import fingerprint_of


class Split(View):
    """The examples of a corpus that are held out, or all others; made by `AnyCorpus.split`.

    Attributes:
        numbers: the numbers of its examples in `corpus`, ascending: unsigned [examples]. `corpus`
            is a view itself, if that was split; `find_unsplit` gives numbers of the whole corpus.
    """

    kind = "split"

    def __init__(
        self, corpus: AnyCorpus, *, hold_out: float, held_out: bool, by: str | None = None
    ):
        self.hold_out, self.held_out = require_share("hold_out", hold_out), bool(held_out)
        self.by, count = by, len(corpus)
        if by is not None:
            _require_key(corpus, by)
        dtype = np.uint32 if count < 1 << 32 else np.int64
        is_held = np.unpackbits(self._find(corpus), count=count).view(bool)
        self.numbers = np.concatenate(
            [block[is_held[block] == self.held_out].astype(dtype) for block in prng.blocks(count)]
        )
        super().__init__(corpus, self.numbers)
        if not len(self.numbers):
            total = counted(count, "example")
            if by is not None and (keys := _count_keys(corpus, by)) < count:
                total = f"{total}, which have {counted(keys, 'value')} of {by!r},"
                if keys == 1:
                    raise InvalidValue(
                        f"by is {by!r}, and {total} would all be on one side; give a feature whose "
                        "values differ, or omit by="
                    )
            raise InvalidValue(
                f"hold_out is {self.hold_out}, and by their {by or 'numbers'} none of the {total} "
                f"{'is held out' if held_out else 'is left to train on'}; give a share nearer to "
                "one half, or split a larger corpus"
            )
        more = {} if by is None else {"by": by}
        self._describe(hold_out=self.hold_out, held_out=self.held_out, **more)

    def _find(self, corpus: AnyCorpus) -> np.ndarray:
        """Whether each example is held out, as bits: uint8 [examples / 8].

        With a key, which is read of all examples once, they are kept in a file beside the corpus.
        """
        by = self.by
        # A split of a split by the same hash would hold out all examples, or none.
        depth = 0 if by is None else _count_splits(corpus)

        def hash_of(block: np.ndarray) -> np.ndarray:
            if by is None:
                return prng.hash_numbers(block)
            return prng.hash_rows(corpus.read_examples(block, [by])[by], depth)

        def read() -> bytes:
            below, blocks = prng.threshold(self.hold_out), prng.blocks(len(corpus))
            return b"".join(np.packbits(hash_of(block) < below).tobytes() for block in blocks)

        if by is None:
            return np.frombuffer(read(), np.uint8)
        name = fingerprint_of([corpus.fingerprint, by, self.hold_out] + [depth] * (depth > 0))
        return np.frombuffer(corpus.cached_file(f"split-{name}.bits", read), np.uint8)


def _count_splits(corpus: AnyCorpus) -> int:
    """How many splits by a key are below one another in a corpus."""
    below = max(map(_count_splits, corpus.members), default=0)
    return below + (isinstance(corpus, Split) and corpus.by is not None)


def _count_keys(corpus: AnyCorpus, by: str) -> int:
    """How many values a feature has."""
    hashes: set[int] = set()
    for block in prng.blocks(len(corpus)):
        hashes |= {*prng.hash_rows(corpus.read_examples(block, [by])[by]).tolist()}
    return len(hashes)


def _require_key(corpus: AnyCorpus, by: str) -> None:
    """Refuses a key that is no feature of examples."""
    names = [name for name, feature in corpus.features.items() if feature.of == "example"]
    if by not in names:
        raise InvalidValue(
            f"by is {suggest_option(by, names)}; it must be a feature of examples, such as "
            "Feature('example', key=True), which keeps a text or a number of each record; give it "
            "to prepare or from_arrays, or add it by with_features"
        )
