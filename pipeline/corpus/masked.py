"""Masked language modelling: some tokens are hidden, and the model predicts them."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from pipeline.corpus import prng
from pipeline.corpus.corpus import Corpus
from pipeline.corpus.gather import as_pieces
from pipeline.corpus.view import View, require_vocabulary
from pipeline.errors import require_share, require_whole

# The shares of selected tokens that become the mask, and a random token; the rest stays.
MASK, RANDOM = 0.8, 0.1


class Masked(View):
    """Inputs with some tokens hidden, targets, and a loss on those (BERT, Devlin et al., 2019).

    Each token is selected with probability `rate`, independently of all others. A selected token
    becomes `mask_id` in 80% of cases, any token of the vocabulary in 10%, and stays in 10%. Lengths
    are those of the corpus. Epochs differ; within one, an example is the same whenever and wherever
    it is read.

    Args:
        corpus: tokens as they are (`prepare(…, task=pipeline.corpus.INPUTS)`).
        mask_id: of the mask; None: a new id after those of the corpus's vocabulary.
        rate: the share of tokens that are selected, above 0 and below 1.
        seed: decides the selection.
        keep_ids: tokens that are never selected; None: the marks of the corpus's tokenizer.

    Raises:
        ValueError: the corpus is for another task, `rate` is out of range, or a new id is wanted
            for a vocabulary of unknown size.
    """

    kind = "masked"
    weighted = True

    def __init__(
        self,
        corpus: Corpus,
        *,
        mask_id: int | None = None,
        rate: float = 0.15,
        seed: int = 0,
        keep_ids: Sequence[int] | None = None,
    ):
        super().__init__(corpus)
        if mask_id is None:
            mask_id = require_vocabulary(corpus, "mask_id")
        self.mask_id, self.rate = require_whole("mask_id", mask_id, 0), require_share("rate", rate)
        self.seed = require_whole("seed", seed, 0)
        marks = [mark for mark in self.marks if mark is not None]
        kept = marks if keep_ids is None else keep_ids
        self.keep_ids = sorted({require_whole("an id of keep_ids", each, 0) for each in kept})
        self.lengths, self.num_tokens = corpus.lengths, corpus.num_tokens
        self.vocab_size = self._num_ids = max(corpus.vocab_size or 0, self.mask_id + 1)
        self._describe(
            {name: getattr(self, name) for name in ("mask_id", "rate", "seed", "keep_ids")},
            mask=self.mask_id,
            rate=self.rate,
            mask_seed=self.seed,
            unmasked="+".join(map(str, self.keep_ids)) or "none",
        )

    def read(
        self, examples: Any, starts: Any, lengths: Any, reach: Any = None, epoch: Any = 0
    ) -> dict[str, np.ndarray]:
        """Pieces of examples as in an epoch: `inputs`, `targets` and `loss_weights`.

        See `Corpus.read`.
        """
        examples, starts, lengths, reach = as_pieces(examples, starts, lengths, reach, len(self))
        targets = self.corpus.read(examples, starts, lengths, reach)["inputs"]
        bits = prng.draw(self.seed, epoch, examples, starts, reach)
        selected = bits < prng.share(self.rate)
        for keep in self.keep_ids:
            selected &= targets != keep
        places = np.flatnonzero(selected)
        # Selected places have small bits, so these are mixed once more.
        fate = prng.mix(bits[places])
        inputs = targets.copy()
        inputs[places[fate < prng.share(MASK)]] = self.mask_id
        other = (fate >= prng.share(MASK)) & (fate < prng.share(MASK + RANDOM))
        random = prng.below(prng.mix(fate[other]), self._num_ids)
        inputs[places[other]] = random
        return {"inputs": inputs, "targets": targets, "loss_weights": selected.astype(np.float32)}
