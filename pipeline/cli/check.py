"""Check: a corpus is whole and agrees with its manifest; a plan has each position once."""

from collections.abc import Callable

import numpy as np

from pipeline.corpus import duplicates
from pipeline.corpus.added import AddedFeatures
from pipeline.corpus.corpus import Corpus
from pipeline.corpus.in_place import InPlace
from pipeline.corpus.interface import AnyCorpus
from pipeline.errors import InvalidValue, counted
from pipeline.history.coverage import Coverage
from pipeline.planning.plan import Plan
from pipeline.planning.planned import PlannedBatch


def check_corpus(corpus: AnyCorpus, report: Callable[[str], None]) -> None:
    """Reads all of a corpus and its members: digests, offsets, fingerprint, ids by the vocabulary.

    `report` gets a line for each check that passes; an error names the first that fails.
    """
    for member in corpus.members:
        check_corpus(member, report)
    if isinstance(corpus, AddedFeatures):
        corpus.verify()
        report(f"{', '.join(corpus.features)}: whole, and their digests are those in the manifest")
        return
    if isinstance(corpus, InPlace):
        corpus.verify()
        report(f"files: read in place, {counted(len(corpus), 'example')}; they have no digests")
    elif isinstance(corpus, Corpus):
        corpus.verify()
        report("files: whole, and their digests are those in the manifest")
        report(f"offsets: {counted(len(corpus), 'example')}, as their lengths say")
    else:
        return
    report(f"fingerprint: {corpus.fingerprint}")
    if corpus.has_tokens:
        _check_vocabulary(corpus, report)


def _check_vocabulary(corpus: Corpus | InPlace, report: Callable[[str], None]) -> None:
    lengths = corpus.lengths.astype(np.int64)
    limit = (1 << 31) if corpus.vocab_size is None else corpus.vocab_size
    low, high, examples = limit, -1, np.arange(len(lengths))
    for block, fields in corpus.read_blocks(examples, 0 * examples, lengths):
        for name, ids in fields.items():
            if not len(ids) or name == "loss_weights":
                continue
            low, high = min(low, int(ids.min())), max(high, int(ids.max()))
            if low < 0 or high >= limit:
                at = int(np.flatnonzero((ids < 0) | (ids >= limit))[0])
                ends = np.cumsum(lengths[block])
                example = block.start + int(np.searchsorted(ends, at, side="right"))
                raise InvalidValue(
                    f"{name} of example {example:,} holds the id {int(ids[at])}; ids must be "
                    f"from 0 to {limit - 1:,}; prepare the corpus again with a tokenizer of that "
                    "vocabulary"
                )
    size = "of unknown size" if corpus.vocab_size is None else f"of {corpus.vocab_size:,}"
    seen = f"ids are from {low:,} to {high:,}" if high >= 0 else "there are no ids"
    report(f"vocabulary {size}: {seen}")


def check_duplicates(corpus: AnyCorpus, report: Callable[[str], None]) -> None:
    """Tells `report` how many examples are exact copies of earlier ones, which is not an error."""
    hint = "; pipeline.corpus.duplicates(corpus), given as exclude, leaves them out of a plan"
    copies = len(duplicates(corpus))
    counts = f"{copies:,} of {counted(len(corpus), 'example')}, exact copies of earlier ones"
    report(f"duplicates: {counts}{hint if copies else ''}")


def check_plan(plan: Plan, epoch: int, report: Callable[[str], None]) -> None:
    """Walks an epoch: no row exceeds its length, and each position is in exactly one row.

    Epochs of several corpora end at different steps: it checks those that end before the plan's.
    """
    last = plan.first_step(epoch + 1)
    epoch = epoch if plan.stages[0].weights is None else 0
    first = plan.first_step(epoch)
    coverage = Coverage(plan, lambda said: report(f"plan: {said}"), epoch)
    for step in range(first, last):
        planned = plan.batch(step)
        for side in planned.sides:
            _check_rows(step, side)
        coverage.add(planned)
    coverage.finish()
    report(f"plan: {counted(last - first, 'batch')}, no row over its length")


def _check_rows(step: int, planned: PlannedBatch) -> None:
    ends = planned.columns + planned.segments[:, 3]
    rows = planned.segments[:, 0].max(initial=-1) + 1
    if rows > planned.bucket.rows or ends.max(initial=0) > planned.bucket.length:
        raise InvalidValue(
            f"the batch of step {step:,} does not fit its bucket {planned.bucket}. This is a "
            "defect of Lockstep: please report it with the plan's fingerprint"
        )
