"""Split: the examples of a corpus that are held out, or all others."""

import functools

import numpy as np

from pipeline.corpus import prng
from pipeline.corpus.interface import AnyCorpus
from pipeline.corpus.view import View
from pipeline.errors import InvalidValue, require_share


class Split(View):
    """The examples of a corpus that are held out, or all others; made by `AnyCorpus.split`.

    Attributes:
        numbers: the numbers of its examples in the corpus, ascending: unsigned [examples].
    """

    kind = "split"

    def __init__(self, corpus: AnyCorpus, *, hold_out: float, held_out: bool):
        self.hold_out, self.held_out = require_share("hold_out", hold_out), bool(held_out)
        count, held = len(corpus), functools.partial(prng.is_held_out, share=self.hold_out)
        dtype = np.uint32 if count < 1 << 32 else np.int64
        self.numbers = np.concatenate(
            [some[held(some) == self.held_out].astype(dtype) for some in prng.blocks(count)]
        )
        super().__init__(corpus, self.numbers)
        if not len(self.numbers):
            raise InvalidValue(
                f"hold_out is {self.hold_out}, and by their numbers none of the {count:,} "
                f"examples {'is held out' if held_out else 'is left to train on'}; give a share "
                "nearer to one half, such as 0.1, or split a larger corpus"
            )
        self._describe(hold_out=self.hold_out, held_out=self.held_out)
