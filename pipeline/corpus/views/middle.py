"""FillInTheMiddle: documents that are cut twice, with the middle moved to the end."""

from collections.abc import Sequence
from typing import Any, Literal, get_args

import numpy as np

from pipeline.corpus import prng
from pipeline.corpus.interface import AnyCorpus, computed
from pipeline.corpus.side import Side
from pipeline.corpus.stored.gather import Fields, Pieces, gather
from pipeline.corpus.tasks import CAUSAL
from pipeline.corpus.view import DrawnView
from pipeline.errors import InvalidValue, require_one_of, require_share, require_whole
from pipeline.planning.layout import ranges

Mode = Literal["psm", "spm"]
Loss = Literal["all", "middle"]


class FillInTheMiddle(DrawnView):
    """Documents of which some are cut twice, with the middle moved to the end (Bavarian et al.).

    A hash of its number decides, once and for all, whether an example is cut; so lengths are known:
    those of the corpus, and three more for the marks. Each epoch draws where. A model that predicts
    the next token then learns to fill a gap. With the text `A B C D E F`, begin and end marks, and
    cuts after `B` and `D`, the tokens are

        psm  begin <prefix> A B <suffix> E F <middle> C D end
        spm  begin <prefix> <suffix> E F <middle> A B C D end

    An example is cut before the plan splits or truncates it. Then its parts may lie in several
    rows, so leave long ones out with `overflow="drop"`, or make examples that fit. Features of
    examples stay; those of tokens are left out.

    Args:
        corpus: a causal corpus.
        rate: the share of examples that are cut, below 1; 0 cuts none, so that a corpus can be
            joined with others that are cut.
        prefix: the id of the mark before the prefix; None: a new one after those of the corpus's
            vocabulary. So are the next two.
        middle: the id of the mark before the middle.
        suffix: the id of the mark before the suffix.
        mode: "psm", or "spm", with which the prefix stands beside the middle that continues it.
        loss: "all", or "middle": in an example that is cut, only the middle and the end mark.
        marks: whether each example begins, and ends, with a mark that stays there; None: as the
            corpus's tokenizer marks texts, or without one, no.
        seed: decides which examples are cut, and where.
    """

    kind = "fill_in_the_middle"
    needs = CAUSAL

    def __init__(
        self,
        corpus: AnyCorpus,
        rate: float = 0.5,
        *,
        prefix: int | None = None,
        middle: int | None = None,
        suffix: int | None = None,
        mode: Mode = "psm",
        loss: Loss = "all",
        marks: Sequence[bool] | None = None,
        seed: int = 0,
    ):
        super().__init__(corpus)
        rate = require_share("rate", rate) if rate != 0 else 0.0
        seed = require_whole("seed", seed, 0)
        require_one_of("mode", mode, get_args(Mode))
        require_one_of("loss", loss, get_args(Loss))
        names = "prefix", "middle", "suffix"
        self.prefix, self.middle, self.suffix = ids = [
            self._new_id(name) + offset if id_ is None else require_whole(name, id_, 0)
            for offset, (name, id_) in enumerate(zip(names, (prefix, middle, suffix), strict=True))
        ]
        if len({*ids}) < len(ids):
            raise InvalidValue(f"{', '.join(names)} are {ids}; give three different ids")
        begins, ends = [mark is not None for mark in self.marks] if marks is None else marks
        options: dict[str, Any] = dict(zip(names, ids, strict=True))
        options |= {"mode": mode, "loss": loss, "rate": rate}
        options |= {"seed": seed, "marks": [bool(begins), bool(ends)]}
        self._describe(**options)
        self.vocab_size = max(corpus.vocab_size or 0, max(ids) + 1)
        self.sides = {"inputs": _MiddleSide(self.side, **options)}

    @computed
    def lengths(self) -> np.ndarray:
        """Positions of each example, marks included: uint32 [examples]."""
        return self.sides["inputs"].lengths


class _MiddleSide(Side):
    """The tokens of a corpus, some of its examples cut; options are those of `FillInTheMiddle`."""

    def __init__(
        self,
        side: Side,
        *,
        prefix: int,
        middle: int,
        suffix: int,
        mode: Mode,
        loss: Loss,
        rate: float,
        seed: int,
        marks: Sequence[bool],
    ):
        self._side, self._seed, self._mode = side, seed, mode
        self._marks, (self._begins, self._ends) = (prefix, middle, suffix), marks
        self._threshold = prng.threshold(rate)
        self.weighted = loss == "middle"
        self.features = {n: feature for n, feature in side.features.items() if feature.per_example}

    @computed
    def lengths(self) -> np.ndarray:
        """Positions of each example, marks included: uint32 [examples]."""
        lengths = np.array(self._side.lengths)
        for numbers in prng.blocks(len(lengths)):
            lengths[numbers] += np.uint32(len(self._marks)) * self._is_cut(numbers)
        return lengths

    def __len__(self) -> int:
        return len(self._side)

    def _is_cut(self, examples: np.ndarray) -> np.ndarray:
        """Whether each example is cut, in all epochs: bool [n]."""
        ones = np.ones_like(examples)
        bits = prng.draw(self._seed, 0, examples, ones << 32, ones)
        return (bits < self._threshold) & (self._side.lengths[examples] > 0)

    def _runs(self, examples: np.ndarray, epoch: int) -> list[tuple[int | None, Any, Any]]:
        """The runs that follow one another in each example: an id, the first token and the end.

        A run of text has no id, and tokens of the corpus. A mark has one token, or if the example
        is not cut, none. The first token of an example is a run of its own.
        """
        cut, count = self._is_cut(examples), self._side.lengths[examples].astype(np.int64) + 1
        end, draws = count - self._ends, np.full(len(examples), 2)
        bits = prng.draw(self._seed, epoch, examples, 0 * draws, draws).reshape(-1, 2)
        one, two = np.where(cut, np.sort(1 + prng.below(bits, end[:, None]), axis=1).T, end)
        first, last = (None, 0, 1), (None, end, count)
        head, prefix = [first] * self._begins, [first] * (not self._begins) + [(None, 1, one)]
        middle, rest = (None, one, two), (None, two, end)
        before, between, after = ((id_, 0, cut) for id_ in self._marks)
        if self._mode == "psm":
            return [*head, before, *prefix, after, rest, between, middle, last]
        return [*head, before, after, rest, between, *prefix, middle, last]

    def _read(self, pieces: Pieces, names: Sequence[str]) -> Fields:
        examples, starts, lengths, reach, epoch = pieces
        ids, *edges = zip(*self._runs(examples, epoch), strict=True)
        begin, end = (
            np.stack([np.broadcast_to(run, len(examples)) for run in edge], axis=1).astype(np.int64)
            for edge in edges
        )
        # The part of each run that is in its piece, which has one more token than positions.
        origin = np.cumsum(end - begin, axis=1) - (end - begin)
        low = np.maximum(origin, starts[:, None])
        high = np.minimum(origin + end - begin, (starts + lengths + 1)[:, None])
        size, token = np.maximum(high - low, 0), begin + low - origin
        offset = (np.cumsum(size) - size.ravel()).reshape(size.shape)
        tokens = np.empty(size.sum(), np.int32)
        is_text = np.array([id_ is None for id_ in ids])
        for mark in np.flatnonzero(~is_text):
            tokens[offset[size[:, mark] > 0, mark]] = ids[mark]
        piece, run = np.nonzero((size > 0) & is_text)
        token, offset, count = token[piece, run], offset[piece, run], size[piece, run]
        # A token is read as a target, except the first of an example, which is none.
        read = self._side.read(examples[piece], np.maximum(token - 1, 0), count, features=())
        tokens[ranges(offset, count)] = read["targets"]
        firsts = np.flatnonzero(token == 0)
        tokens[offset[firsts]] = read["inputs"][(np.cumsum(count) - count)[firsts]]

        at = np.cumsum(lengths + 1) - lengths - 1
        fields = {
            name: gather(tokens, at + shift, lengths, reach)
            for name, shift in CAUSAL.shifts.items()
        }
        if self.weighted:
            cut, learnt_runs = self._is_cut(examples)[:, None], np.arange(len(ids)) >= len(ids) - 2
            learnt = np.where(cut, learnt_runs, 1)
            weights = learnt.astype(np.float32).ravel().repeat(size.ravel())
            fields["loss_weights"] = gather(weights, at + 1, lengths, reach)
        return fields

    def _read_examples(self, examples: np.ndarray, names: Sequence[str]) -> Fields:
        return self._side.read_examples(examples, names)
