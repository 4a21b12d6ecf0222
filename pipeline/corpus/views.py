"""Views of tokens for other tasks: masked, cut and reordered; drawn again for each epoch."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, get_args

import numpy as np

from pipeline import registry
from pipeline.corpus import prng
from pipeline.corpus.decoded import Decoded
from pipeline.corpus.interface import AnyCorpus, SingleCorpus, Split, View
from pipeline.corpus.stored.gather import Fields, gather
from pipeline.corpus.stored.reader import Pieces
from pipeline.corpus.tasks import CAUSAL, INPUTS, Task
from pipeline.errors import InvalidValue, require_one_of, require_share, require_whole
from pipeline.planning.layout import ranges

__all__ = ["FillInTheMiddle", "Masked", "View", "view_of"]

# The shares of selected tokens that become the mask, and a random token; the rest stays.
MASK, RANDOM = 0.8, 0.1


class TokenView(View, SingleCorpus):
    """A view that makes its fields from a corpus's tokens, by random choices of each epoch.

    Attributes:
        needs: the task of the corpus.
    """

    needs: ClassVar[Task] = INPUTS

    def __init__(self, corpus: AnyCorpus):
        super().__init__(corpus)
        task, needs = getattr(corpus, "task", None), self.needs.name
        if task != self.needs or corpus.trees is not None:
            groups = "" if corpus.trees is None else " and groups"
            raise InvalidValue(
                f"{type(self).__name__} needs documents of the task {needs!r}, but {corpus!r} has "
                f"the task {getattr(task, 'name', None)!r}{groups}; prepare it with "
                f"task=pipeline.corpus.{needs.upper()}"
            )
        if corpus.sides[0].weighted:
            raise InvalidValue(
                f"{corpus!r} has weights, and {type(self).__name__} may hide or move any token, "
                "whatever its weight; open or make the corpus without labels= or weights="
            )

    _find_silent = AnyCorpus._find_silent  # the loss differs from epoch to epoch

    @property
    def marks(self) -> tuple[int | None, int | None]:
        """The ids that begin and end each example; None if there is none."""
        tokenizer = self.tokenizer
        return (None, None) if tokenizer is None else (tokenizer.begin_id, tokenizer.end_id)

    def _read_examples(self, examples: np.ndarray, names: Sequence[str]) -> Fields:
        return self.corpus.read_examples(examples, names)

    def _new_id(self, option: str) -> int:
        """The first id after those of the corpus's vocabulary."""
        if self.corpus.vocab_size is None:
            raise InvalidValue(
                f"{self.corpus!r} has no vocab_size; give {option}=, or write the corpus with "
                "vocab_size="
            )
        return self.corpus.vocab_size


class Masked(TokenView):
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
    weighted = True

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
        kept = marks if keep_ids is None else keep_ids
        self.keep_ids = sorted({require_whole("an id of keep_ids", each, 0) for each in kept})
        self.lengths, self.num_tokens = corpus.lengths, corpus.num_tokens
        self.features = dict(corpus.features)
        self.vocab_size = self._num_ids = max(corpus.vocab_size or 0, self.mask_id + 1)
        names = "mask_id", "rate", "seed", "keep_ids"
        self._describe(**{name: getattr(self, name) for name in names})

    def _read(self, pieces: Pieces, names: Sequence[str]) -> Fields:
        fields = self.corpus.read(*pieces, names)
        targets = fields.pop("inputs")
        examples, starts, _, reach, epoch = pieces
        bits = prng.draw(self.seed, epoch, examples, starts, reach)
        selected = bits < prng.threshold(self.rate)
        for keep in self.keep_ids:
            selected &= targets != keep
        places = np.flatnonzero(selected)
        # Selected places have small bits, so these are mixed once more.
        fate = prng.mix(bits[places])
        inputs = targets.copy()
        inputs[places[fate < prng.threshold(MASK)]] = self.mask_id
        other = (fate >= prng.threshold(MASK)) & (fate < prng.threshold(MASK + RANDOM))
        random = prng.below(prng.mix(fate[other]), self._num_ids)
        inputs[places[other]] = random
        weights = selected.astype(np.float32)
        return {"inputs": inputs, "targets": targets, **fields, "loss_weights": weights}


Mode = Literal["psm", "spm"]
Loss = Literal["all", "middle"]


class FillInTheMiddle(TokenView):
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
    needs = task = CAUSAL

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
        self.rate = require_share("rate", rate) if rate != 0 else 0.0
        self.seed = require_whole("seed", seed, 0)
        require_one_of("mode", mode, get_args(Mode))
        require_one_of("loss", loss, get_args(Loss))
        self.mode, self.loss = mode, loss
        names = "prefix", "middle", "suffix"
        self.prefix, self.middle, self.suffix = (
            self._new_id(name) + place if id_ is None else require_whole(name, id_, 0)
            for place, (name, id_) in enumerate(zip(names, (prefix, middle, suffix), strict=True))
        )
        ids = [self.prefix, self.middle, self.suffix]
        if len({*ids}) < len(ids):
            raise InvalidValue(f"{', '.join(names)} are {ids}; give three different ids")
        begins, ends = [each is not None for each in self.marks] if marks is None else marks
        self.begins, self.ends = bool(begins), bool(ends)
        self.weighted = loss == "middle"
        self.features = {n: each for n, each in corpus.features.items() if each.per_example}
        self.vocab_size = max(corpus.vocab_size or 0, max(ids) + 1)
        count = len(corpus)
        bits = prng.draw(seed, 0, np.arange(count), np.full(count, 1 << 32), np.ones(count, int))
        self._cut = (bits < prng.threshold(self.rate)) & (corpus.lengths > 0)
        self.lengths = corpus.lengths + np.uint32(3) * self._cut
        options = {name: getattr(self, name) for name in (*names, "mode", "loss", "rate", "seed")}
        self._describe(**options, marks=[self.begins, self.ends])

    def _runs(self, examples: np.ndarray, epoch: int) -> list[tuple[int | None, Any, Any]]:
        """The runs that follow one another in each example: an id, the first token and the end.

        A run of text has no id, and tokens of the corpus. A mark has one token, or if the example
        is not cut, none. The first token of an example is a run of its own.
        """
        cut, count = self._cut[examples], self.corpus.lengths[examples].astype(np.int64) + 1
        end, draws = count - self.ends, np.full(len(examples), 2)
        bits = prng.draw(self.seed, epoch, examples, 0 * draws, draws).reshape(-1, 2)
        one, two = np.where(cut, np.sort(1 + prng.below(bits, end[:, None]), axis=1).T, end)
        first, last = (None, 0, 1), (None, end, count)
        head, prefix = [first] * self.begins, [first] * (not self.begins) + [(None, 1, one)]
        middle, rest = (None, one, two), (None, two, end)
        before, between, after = ((id_, 0, cut) for id_ in (self.prefix, self.middle, self.suffix))
        if self.mode == "psm":
            return [*head, before, *prefix, after, rest, between, middle, last]
        return [*head, before, after, rest, between, *prefix, middle, last]

    def _read(self, pieces: Pieces, names: Sequence[str]) -> Fields:
        examples, starts, lengths, reach, epoch = pieces
        ids, *edges = zip(*self._runs(examples, epoch), strict=True)
        begin, end = (
            np.stack([np.broadcast_to(run, len(examples)) for run in each], axis=1).astype(np.int64)
            for each in edges
        )
        # The part of each run that is in its piece, which has one more token than positions.
        origin = np.cumsum(end - begin, axis=1) - (end - begin)
        low = np.maximum(origin, starts[:, None])
        high = np.minimum(origin + end - begin, (starts + lengths + 1)[:, None])
        size, token = np.maximum(high - low, 0), begin + low - origin
        place = (np.cumsum(size) - size.ravel()).reshape(size.shape)
        tokens = np.empty(size.sum(), np.int32)
        is_text = np.array([id_ is None for id_ in ids])
        for mark in np.flatnonzero(~is_text):
            tokens[place[size[:, mark] > 0, mark]] = ids[mark]
        piece, run = np.nonzero((size > 0) & is_text)
        token, place, count = token[piece, run], place[piece, run], size[piece, run]
        # A token is read as a target, except the first of an example, which is none.
        read = self.corpus.read(examples[piece], np.maximum(token - 1, 0), count, features=())
        tokens[ranges(place, count)] = read["targets"]
        firsts = np.flatnonzero(token == 0)
        tokens[place[firsts]] = read["inputs"][(np.cumsum(count) - count)[firsts]]

        at = np.cumsum(lengths + 1) - lengths - 1
        fields = {
            name: gather(tokens, at + shift, lengths, reach)
            for name, shift in self.task.shifts.items()
        }
        if self.weighted:
            learnt = np.where(self._cut[examples, None], np.arange(len(ids)) >= len(ids) - 2, 1)
            weights = learnt.astype(np.float32).ravel().repeat(size.ravel())
            fields["loss_weights"] = gather(weights, at + 1, lengths, reach)
        return fields


def view_of(corpus: AnyCorpus, description: Mapping[str, Any]) -> View:
    """The view of a corpus with the `description` of another view."""
    options = dict(description)
    kind, viewed = options.pop("kind"), options.pop("of", None)
    if viewed is not None:
        corpus = view_of(corpus, viewed)
    own: dict[str, Any] = {Split.kind: Split, Decoded.kind: Decoded}
    return (own.get(kind) or registry.find("views", kind).make)(corpus, **options)
