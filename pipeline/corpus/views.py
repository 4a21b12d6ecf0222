"""Views of tokens for other tasks: masked, cut and reordered; drawn again for each epoch."""

import numbers
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, get_args

import numpy as np

from pipeline.corpus import prng
from pipeline.corpus.from_bytes import Decoded
from pipeline.corpus.gather import Fields, gather
from pipeline.corpus.interface import AnyCorpus, Readable, SingleCorpus, Split, View
from pipeline.corpus.reader import Pieces
from pipeline.corpus.tasks import CAUSAL, INPUTS, TARGETS, Task
from pipeline.errors import InvalidValue, require_one_of, require_share, require_whole
from pipeline.planning.layout import ranges

__all__ = ["KINDS", "FillInTheMiddle", "Masked", "SpanCorruption", "View", "view_of"]

# The shares of selected tokens that become the mask, and a random token; the rest stays.
MASK, RANDOM = 0.8, 0.1


class TokenView(View):
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


class Masked(TokenView, SingleCorpus):
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


class FillInTheMiddle(TokenView, SingleCorpus):
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
        _require_distinct(", ".join(names), [self.prefix, self.middle, self.suffix])
        begins, ends = [each is not None for each in self.marks] if marks is None else marks
        self.begins, self.ends = bool(begins), bool(ends)
        self.weighted = loss == "middle"
        self.features = {n: each for n, each in corpus.features.items() if each.per_example}
        highest = max(self.prefix, self.middle, self.suffix)
        self.vocab_size = max(corpus.vocab_size or 0, highest + 1)
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


def _require_distinct(names: str, ids: Sequence[int]) -> None:
    if len({*ids}) < len(ids) or min(ids, default=0) < 0:
        raise InvalidValue(f"{names} are {ids!r:.80}; give ids from 0 up, each of them once")


class SpanCorruption(TokenView):
    """Pairs of a text with gaps and the text of the gaps (T5, Raffel et al., 2020).

    A text of `n` tokens, marks not counted, loses `round(n · density)` of them, in as many spans as
    `mean_span` gives; each epoch draws new spans. Inputs have a sentinel in place of each span,
    targets have each sentinel before its span, and both end with the end mark. Both lengths follow
    from `n` alone, so they are the same in every epoch. Features of examples stay; those of tokens
    have no place in a text with gaps, and are left out.

        tokens   A B C D E F G H
        inputs   A B <0> E F <1> H end
        targets  <0> C D <1> G end

    Args:
        corpus: a corpus of unshifted tokens (`prepare(…, task=pipeline.corpus.INPUTS)`).
        max_length: examples of more tokens are cut into equal pieces of at most this many, each a
            pair of its own; at least 3. A text of a single token has no gap: its length is 0.
        density: the share of tokens that are taken out, above 0 and below 1.
        mean_span: tokens in a span, on average; at least 1.
        sentinels: the ids that stand for spans, in order; None: new ones after those of the
            corpus's vocabulary.
        end_id: the id of the end mark; None: that of the corpus's tokenizer, which must have one.
        start_id: the first id of the decoder; None: the begin mark, or else 0, which is padding.
        seed: decides the spans.

    Attributes:
        lengths: positions of inputs and of targets, of each pair: uint32 [pairs, 2].
        inputs, targets: the sides, each read like a corpus.
    """

    kind = "corrupted"
    find_unsplit = AnyCorpus.find_unsplit  # its pieces have numbers of their own

    def __init__(
        self,
        corpus: AnyCorpus,
        *,
        max_length: int,
        density: float = 0.15,
        mean_span: float = 3.0,
        sentinels: Sequence[int] | None = None,
        end_id: int | None = None,
        start_id: int | None = None,
        seed: int = 0,
    ):
        super().__init__(corpus)
        self.max_length = require_whole("max_length", max_length, 3)
        self.density, self.mean_span = require_share("density", density), mean_span
        if not issubclass(type(mean_span), numbers.Real) or not mean_span >= 1:
            raise InvalidValue(f"mean_span is {mean_span!r}; it must be a number from 1 up")
        begin, end = marks = self.marks
        end = end if end_id is None else end_id
        if end is None:
            raise InvalidValue(f"{corpus!r} has no tokenizer with an end mark; give end_id=")
        self.end_id = require_whole("end_id", end, 0)
        start = start_id if start_id is not None else begin or 0
        self.start_id = require_whole("start_id", start, 0)
        self.seed = require_whole("seed", seed, 0)
        # Marks before and after a text are not part of it.
        self._before = int(begin is not None)
        around = sum(mark is not None for mark in marks)
        counts = np.maximum(np.asarray(corpus.lengths, np.int64) - around, 0)
        # At least one piece each, so that examples keep their numbers if nothing is cut.
        cut = np.maximum(-(-counts // self.max_length), 1)
        self._counts, self._first = counts, np.concatenate([[0], np.cumsum(cut)])
        if corpus.files is not None:
            self.files = np.diff(self._first[np.cumsum(corpus.files)], prepend=0)
        sizes = self._sizes(np.arange(self._first[-1]))[2]
        noise, spans = self._shape(sizes)
        some = sizes >= 2
        pairs = np.stack([sizes - noise + spans + 1, noise + spans + 1], axis=1)
        self.lengths = (pairs * some[:, None]).astype(np.uint32)
        self.inputs, self.targets = _Side(self, 0, INPUTS.shifts), _Side(self, 1, TARGETS.shifts)
        self.sides = self.inputs, self.targets
        self.side_names, self.loss_side = (INPUTS.side, TARGETS.side), 1
        self._latest: tuple[int, np.ndarray, tuple[np.ndarray, ...]] | None = None
        wanted = int(self._shape(np.array([self.max_length]))[1][0])
        if sentinels is None:
            sentinels = range(self._new_id("sentinels"), 1 << 31)[:wanted]
        if len(sentinels) < wanted:
            raise InvalidValue(
                f"{self.max_length} tokens have {wanted} spans, but there are {len(sentinels)} "
                "sentinels; give more sentinels, or a smaller max_length or density"
            )
        _require_distinct("sentinels", sentinels[:wanted])
        self.sentinels = np.asarray(sentinels, np.int32)[:wanted]
        highest = max(int(self.sentinels.max(initial=0)), self.end_id, self.start_id)
        self.vocab_size = max(corpus.vocab_size or 0, highest + 1)
        names = ("max_length", "density", "mean_span", "end_id", "start_id", "seed")
        options = {name: getattr(self, name) for name in names}
        self._describe(**options, sentinels=self.sentinels.tolist())

    def _sizes(self, pairs: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The example of each pair, its first token of text there, and the number of these."""
        example = self.examples_of(pairs)
        number = pairs - self._first[example]
        pieces = self._first[example + 1] - self._first[example]
        count = self._counts[example]
        start = count * number // pieces
        return example, start + self._before, count * (number + 1) // pieces - start

    def examples_of(self, pairs: np.ndarray) -> np.ndarray:
        """The example of the corpus that each pair is a piece of."""
        return np.searchsorted(self._first, pairs, side="right") - 1

    def _shape(self, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The number of tokens to take out of a text of each size, and of their spans."""
        noise = np.clip(np.rint(sizes * self.density), 1, np.maximum(sizes - 1, 1))
        spans = np.clip(np.rint(noise / self.mean_span), 1, np.minimum(noise, sizes - noise))
        return noise.astype(np.int64), np.maximum(spans, 1).astype(np.int64)

    def draw(self, pairs: np.ndarray, epoch: int) -> tuple[np.ndarray, ...]:
        """The result of `corrupt`, kept for the other side, which reads the same pairs."""
        latest = self._latest
        if latest is None or latest[0] != epoch or not np.array_equal(latest[1], pairs):
            latest = self._latest = epoch, pairs, self.corrupt(pairs, epoch)
        return latest[2]

    def corrupt(self, pairs: np.ndarray, epoch: int) -> tuple[np.ndarray, ...]:
        """Inputs and targets of whole pairs, with the random choices of an epoch.

        They are the inputs, one after another, and the first place of each; then the targets, with
        the start id before each, and their places.
        """
        example, start, size = self._sizes(pairs)
        text = self.corpus.read(example, start, size, features=())["inputs"]
        noise, spans = self._shape(size)
        # A pair has two streams of bits: places below 2**32 for runs to remove, others above.
        removed = self._runs(noise, spans, pairs, epoch, 0)
        kept = self._runs(size - noise, spans, pairs, epoch, 1 << 32)
        # Runs alternate: one is kept, the next removed.
        runs = np.stack([kept, removed], axis=1).reshape(-1)
        remove = np.repeat(np.arange(len(runs)) % 2 == 1, runs)
        last = np.cumsum(spans) - 1
        number = ranges(np.zeros_like(spans), spans)
        sentinels = self.sentinels[number]
        ends, starts = np.full(len(pairs), self.end_id), np.full(len(pairs), self.start_id)

        # Inputs: a sentinel after each run that is kept, and the end mark after the last of a pair.
        # Marks for one place keep the order in which they are given.
        after = np.cumsum(kept)
        inputs = np.insert(
            text[~remove], np.concatenate([after, after[last]]), np.concatenate([sentinels, ends])
        )
        # Targets: the start id, a sentinel before each run that is removed, and the end mark.
        after = np.cumsum(removed)
        before = after - removed
        targets = np.insert(
            text[remove],
            np.concatenate([after[last], before[number == 0], before]),
            np.concatenate([ends, starts, sentinels]),
        )
        inputs_sizes, targets_sizes = size - noise + spans + 1, noise + spans + 2
        inputs_first = np.cumsum(inputs_sizes) - inputs_sizes
        return inputs, inputs_first, targets, np.cumsum(targets_sizes) - targets_sizes

    def _runs(
        self, totals: np.ndarray, runs: np.ndarray, pairs: np.ndarray, epoch: int, stream: int
    ) -> np.ndarray:
        """The sizes of `runs` runs that add up to `totals`, every division equally likely."""
        group = np.repeat(np.arange(len(totals), dtype=np.uint64), totals)
        bits = prng.draw(self.seed, epoch, pairs, np.full(len(pairs), stream), totals)
        begins = np.cumsum(totals) - totals
        # A run begins at the first token of a pair, and where the bits of tokens are lowest. Their
        # top 40 decide, so that no choice depends on what else is read; ties keep their order.
        keys = group << np.uint64(40) | bits >> np.uint64(24)
        keys[begins] = group[begins] << np.uint64(40)
        order = np.argsort(keys, kind="stable")
        rank = np.arange(len(order)) - np.repeat(begins, totals)
        cuts = np.zeros(len(order), bool)
        cuts[order[rank < np.repeat(runs, totals)]] = True
        return np.diff(np.flatnonzero(cuts), append=len(cuts))


class _Side(Readable):
    def __init__(self, view: SpanCorruption, number: int, shifts: Mapping[str, int]):
        self._view, self._number, self._shifts = view, number, shifts
        self.lengths = view.lengths[:, number]
        if shifts == TARGETS.shifts:
            every = view.corpus.features.items()
            self.features = {name: each for name, each in every if each.per_example}

    def _read_examples(self, examples: np.ndarray, names: Sequence[str]) -> Fields:
        return self._view.corpus.read_examples(self._view.examples_of(examples), names)

    def _read(self, pieces: Pieces, names: Sequence[str]) -> Fields:
        if not len(pieces.examples):
            return {field: np.zeros(0, np.int32) for field in self._shifts}
        made = self._view.draw(pieces.examples, pieces.epoch)
        flat, first = made[2 * self._number : 2 * self._number + 2]
        return {
            field: gather(flat, first + pieces.starts + shift, pieces.lengths, pieces.reach)
            for field, shift in self._shifts.items()
        }


KINDS: dict[str, type[Masked] | type[FillInTheMiddle] | type[SpanCorruption]] = {
    view.kind: view for view in (Masked, FillInTheMiddle, SpanCorruption)
}


def view_of(corpus: AnyCorpus, description: Mapping[str, Any]) -> View:
    """The view of a corpus with the `description` of another view."""
    options = dict(description)
    kind, viewed = options.pop("kind"), options.pop("of", None)
    if viewed is not None:
        corpus = view_of(corpus, viewed)
    return {**KINDS, Split.kind: Split, Decoded.kind: Decoded}[kind](corpus, **options)
