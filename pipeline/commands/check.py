"""Check: that a corpus is what was written, and that a plan deals out each position once."""

from collections.abc import Callable

import numpy as np

from pipeline.planning.plan import Plan
from pipeline.storage.corpus import Corpus
from pipeline.storage.parts import read_part
from pipeline.storage.writer import tokens_digest

# Tokens that are read at a time.
READ = 1 << 22


def check_corpus(corpus: Corpus, tell: Callable[[str], None]) -> None:
    """Reads all of a corpus: digests, offsets, fingerprint, and ids against the vocabulary.

    Args:
        corpus: what to check; opening it has compared the sizes of its files.
        tell: is told what was found to be right.

    Raises:
        ValueError: names the first thing that is wrong, and what to do.
    """
    corpus.verify()
    tell("files: whole, and their digests are those in the manifest")
    _check_offsets(corpus, tell)
    _check_vocabulary(corpus, tell)


def _check_offsets(corpus: Corpus, tell: Callable[[str], None]) -> None:
    read = [read_part(path) for path in sorted(corpus.directory.glob("part-*.arrow"))]
    if not read:
        return
    counts = np.concatenate([counts for _, counts, _ in read])
    expected = corpus.task.lengths(counts)
    lengths = np.asarray(corpus.lengths)
    if len(expected) != len(lengths):
        raise ValueError(
            f"the parts hold {len(expected):,} examples and the lengths are of {len(lengths):,}; "
            "delete corpus.json and prepare again, which redoes what is not whole"
        )
    if len(wrong := np.flatnonzero(expected != lengths)):
        at = int(wrong[0])
        raise ValueError(
            f"example {at:,} has length {int(lengths[at]):,} in the list of lengths and "
            f"{int(expected[at]):,} by its tokens ({len(wrong):,} examples differ); delete "
            "corpus.json and prepare again, which redoes what is not whole"
        )
    tell(f"offsets: {len(counts):,} examples of {int(counts.sum()):,} tokens, as their lengths say")
    digest = tokens_digest([part for part, _, _ in read])
    if f"tokens={digest};" not in corpus.fingerprint:
        raise ValueError(
            f"the fingerprint of the tokens is {digest} and the manifest says "
            f"{corpus.fingerprint!r}; delete corpus.json and prepare again"
        )
    tell(f"fingerprint: {corpus.fingerprint}")


def _check_vocabulary(corpus: Corpus, tell: Callable[[str], None]) -> None:
    lengths = np.asarray(corpus.lengths).astype(np.int64)
    blocks = np.cumsum(lengths) // READ
    low, high = 0, -1
    for block in np.unique(blocks):
        first, last = np.searchsorted(blocks, [block, block + 1])
        examples = np.arange(first, last)
        fields = corpus.read(examples, np.zeros_like(examples), lengths[first:last])
        for name, ids in fields.items():
            if not len(ids) or name == "loss_weights":
                continue
            low, high = min(low, int(ids.min())), max(high, int(ids.max()))
            limit = (1 << 31) if corpus.vocab_size is None else corpus.vocab_size
            if low < 0 or high >= limit:
                where = int(np.flatnonzero((ids < 0) | (ids >= limit))[0])
                ends = np.cumsum(lengths[first:last])
                example = first + int(np.searchsorted(ends, where, side="right"))
                raise ValueError(
                    f"{name} of example {example:,} holds the id {int(ids[where])}, and ids must "
                    f"be from 0 to {limit - 1:,}; prepare the corpus again with a tokenizer of "
                    "that vocabulary"
                )
    size = "of unknown size" if corpus.vocab_size is None else f"of {corpus.vocab_size:,}"
    tell(f"vocabulary {size}: ids are from {low} to {high:,}")


def check_plan(lengths: np.ndarray, plan: Plan, epoch: int, tell: Callable[[str], None]) -> None:
    """Walks one epoch: every position of every example is in exactly one row, and no row is over.

    What `overflow` truncates or drops must be in none.

    Args:
        lengths: positions of each example, as the plan was made from.
        plan: what to check.
        epoch: which epoch.
        tell: is told what was found to be right.

    Raises:
        ValueError: names the first batch or example that is wrong.
    """
    steps = plan.num_batches(epoch)
    single = np.full(len(lengths), -1, np.int64)  # the length of an example's only segment
    several: list[np.ndarray] = []
    for step in range(epoch * steps, (epoch + 1) * steps):
        planned = plan.batch(step)
        row, example, start, size = planned.segments.T
        _check_rows(step, planned, row, size)
        plain = (start == 0) & (single[example] < 0)
        first = np.zeros(len(example), bool)
        first[np.unique(example, return_index=True)[1]] = True
        plain &= first
        single[example[plain]] = size[plain]
        several.append(planned.segments[~plain, 1:])
    expected = np.asarray(lengths).astype(np.int64)
    longest = plan.buckets[-1].length
    if plan.overflow == "truncate":
        expected = np.minimum(expected, longest)
    elif plan.overflow == "drop":
        expected[expected > longest] = 0
    covered = _joined(np.maximum(single, 0), np.concatenate(several))
    if len(wrong := np.flatnonzero(covered != expected)):
        at = int(wrong[0])
        raise ValueError(
            f"epoch {epoch} does not deal out example {at:,} exactly once: it has "
            f"{int(expected[at]):,} positions to train on ({len(wrong):,} such examples). This is "
            "a defect of Lockstep: please report it with the plan's fingerprint"
        )
    tell(
        f"plan: epoch {epoch} is a partition of {int(expected.sum()):,} positions into {steps:,} "
        "batches"
    )


def _check_rows(step: int, planned, row: np.ndarray, size: np.ndarray) -> None:
    filled = np.bincount(row, size, planned.bucket.rows)
    if len(filled) > planned.bucket.rows or filled.max(initial=0) > planned.bucket.length:
        raise ValueError(
            f"the batch of step {step:,} does not fit its bucket {planned.bucket}. This is a "
            "defect of Lockstep: please report it with the plan's fingerprint"
        )


def _joined(covered: np.ndarray, rest: np.ndarray) -> np.ndarray:
    """How far each example is covered from 0 on without gap or overlap; −1 where it is not.

    Args:
        covered: how far by its first segment.
        rest: example, start and length of all further segments.
    """
    rest = rest[np.lexsort((rest[:, 1], rest[:, 0]))]
    if len(rest) == 0:
        return covered
    example, start, size = rest.T
    ahead = np.cumsum(size) - size
    first = np.flatnonzero(np.diff(example, prepend=-1))
    base = np.repeat(ahead[first], np.diff(first, append=len(rest)))
    meets = start == covered[example] + ahead - base
    ends = covered.copy()
    np.maximum.at(ends, example, start + size)
    ends[example[~meets]] = -1
    return ends
