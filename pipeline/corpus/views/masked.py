"""Masked: inputs with some tokens hidden, drawn again for each epoch."""

from collections.abc import Sequence

import numpy as np

from pipeline.corpus import prng
from pipeline.corpus.interface import AnyCorpus
from pipeline.corpus.side import Side
from pipeline.corpus.stored.gather import Fields, Pieces
from pipeline.corpus.tasks import INPUTS
from pipeline.corpus.view import DrawnView
from pipeline.errors import require_share, require_whole

# The shares of selected tokens that become the mask, and a random token; the rest stays.
MASK, RANDOM = 0.8, 0.1


class Masked(DrawnView):
    """Inputs with some tokens hidden, and a loss on these alone (BERT, Devlin et al., 2019).

    Each token is selected with probability `rate`, independently of all others. A selected token
    becomes `mask_id` in 80% of cases, any token of the vocabulary in 10%, and stays in 10%. Lengths
    are those of the corpus. Epochs differ; within one, an example is the same whenever and wherever
    it is read.

    Args:
        corpus: a corpus of unshifted tokens (`prepare(…, task=pipeline.corpus.INPUTS)`).
        mask_id: the id of the mask; None: a new one after those of the corpus's vocabulary.
        rate: the share of tokens that are selected, above 0 and below 1.
        seed: decides the selection.
        keep_ids: ids that are never selected; None: the marks of the corpus's tokenizer.
    """

    kind = "masked"
    needs = INPUTS

    def __init__(
        self,
        corpus: AnyCorpus,
        *,
        mask_id: int | None = None,
        rate: float = 0.15,
        seed: int = 0,
        keep_ids: Sequence[int] | None = None,
    ):
        super().__init__(corpus)
        if mask_id is None:
            mask_id = self._new_id("mask_id")
        self.mask_id, self.rate = require_whole("mask_id", mask_id, 0), require_share("rate", rate)
        self.seed = require_whole("seed", seed, 0)
        marks = [mark for mark in self.marks if mark is not None]
        ids = marks if keep_ids is None else keep_ids
        self.keep_ids = sorted({require_whole("an id of keep_ids", id_, 0) for id_ in ids})
        self.vocab_size = num_ids = max(corpus.vocab_size or 0, self.mask_id + 1)
        names = "mask_id", "rate", "seed", "keep_ids"
        self._describe(**{name: getattr(self, name) for name in names})
        self.sides = {"inputs": _MaskedSide(self, num_ids)}


class _MaskedSide(Side):
    """The tokens of a corpus, masked."""

    weighted = True

    def __init__(self, view: Masked, num_ids: int):
        self._side, self._seed, self._mask_id = view.side, view.seed, view.mask_id
        self._keep_ids, self._num_ids = view.keep_ids, num_ids
        self._threshold = prng.threshold(view.rate)
        self.lengths, self.features = view.side.lengths, view.side.features

    def _read(self, pieces: Pieces, names: Sequence[str]) -> Fields:
        fields = self._side.read(*pieces, names)
        targets = fields.pop("inputs")
        examples, starts, _, reach, epoch = pieces
        bits = prng.draw(self._seed, epoch, examples, starts, reach)
        selected = bits < self._threshold
        for keep in self._keep_ids:
            selected &= targets != keep
        positions = np.flatnonzero(selected)
        # Selected places have small bits, so these are mixed once more.
        fate = prng.mix(bits[positions])
        inputs = targets.copy()
        inputs[positions[fate < prng.threshold(MASK)]] = self._mask_id
        other = (fate >= prng.threshold(MASK)) & (fate < prng.threshold(MASK + RANDOM))
        random = prng.below(prng.mix(fate[other]), self._num_ids)
        inputs[positions[other]] = random
        weights = selected.astype(np.float32)
        return {"inputs": inputs, "targets": targets, **fields, "loss_weights": weights}

    def _read_examples(self, examples: np.ndarray, names: Sequence[str]) -> Fields:
        return self._side.read_examples(examples, names)
