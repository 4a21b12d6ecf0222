"""Inspection: one look at a sample of the records, before all of them are prepared.

It finds what costs too much to look for in every record: what a template leaves out, marks that
stay text, and text that the tokenizer changes.
"""

import collections
import dataclasses
import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np

from pipeline.corpus.preparing.block import BlockEncoder, Notes, add_notes
from pipeline.corpus.preparing.job import Job
from pipeline.errors import InvalidValue, counted
from pipeline.text import templates
from pipeline.text.notes import collect_notes
from pipeline.text.ragged import Ragged
from pipeline.text.source import Block, Shard, with_place
from pipeline.text.sources import Sharded
from pipeline.text.tokenizer import extend
from pipeline.text.tokenizers import Tokenizer
from pipeline.text.turns import is_empty

logger = logging.getLogger(__name__)

# The records of a sample, at most, and the characters of text after which no other is looked at.
SAMPLE, CHARACTERS = 1024, 1 << 21
LONGEST = 1 << 20  # of a text that is compared, in characters
# The most shards that they are of, the most blocks, and the bytes of a block of many shards.
SHARDS, DEPTH, FEWEST = 64, 8, 1 << 16

UNPARSED = "have a mark that stays text"
CHANGED = "change when they are encoded and decoded again"
LOST = "lose characters that the tokenizer has no token for"
TWICE = "have the begin or end mark of the tokenizer twice"
ONCE = "remove it from the template, or give the tokenizer begin=False or end=False"


@dataclasses.dataclass
class Inspection:
    """What a sample of records has that is not trained on.

    Attributes:
        records: the number of records that were looked at.
        characters: of their text.
        tokens: of all of them.
        findings: by what is found, how many of the records have it, and the first of them.
        fields: how many of the records have each field.
        read: the names of fields that are read.
        lost: how often the tokenizer lost each character.
    """

    records: int = 0
    characters: int = 0
    tokens: int = 0
    findings: Notes = dataclasses.field(default_factory=dict)
    fields: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    read: set[str] = dataclasses.field(default_factory=set)
    lost: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

    def __str__(self) -> str:
        ratio = self.characters / max(self.tokens, 1)
        return (
            f"looked at {self.records:,} records, spread over the source: {self.characters:,} "
            f"characters in {self.tokens:,} tokens, {ratio:.2f} characters a token"
        )

    def describe(self) -> Iterator[str]:
        """A sentence for each finding, with figures."""
        for about, (count, first) in self.findings.items():
            more = ""
            if about == LOST:
                most = ", ".join(repr(character) for character, _ in self.lost.most_common(5))
                more = f" ({self.lost.total():,} of {self.characters:,} characters, as {most})"
            share = f"{count:,} of {counted(self.records, 'record')}"
            yield f"in a sample, {share} {about}{more}; the first: {first}"
        unused = {name: n for name, n in self.fields.items() if name not in self.read}
        if unused:
            names = (
                f"{n!r}" + f" of {count:,}" * (count < self.records) for n, count in unused.items()
            )
            yield (
                f"in a sample of {counted(self.records, 'record')}, fields that are not used: "
                f"{', '.join(names)}; if one decides what is learnt, use it in a template"
            )

    def log(self) -> None:
        """Says what was found."""
        logger.info("%s", self)
        for sentence in self.describe():
            logger.warning("%s", sentence)


def inspect(job: Job, shards: Sequence[Shard]) -> Inspection:
    """What a sample of up to 1,024 records has, spread over the shards of a source.

    Records that fail are left out: the work names them.

    Raises:
        ValueError: the job is strict, and the tokenizer changes the text of a record.
    """
    inspection, lenient = Inspection(), dataclasses.replace(job, on_error="skip")
    inspection.read |= {*job.columns, *(job.fields or {}).values()}
    with collect_notes(inspection.read):
        for block in _draw(job.records, shards):
            _Look(lenient, block, inspection).run()
            if inspection.characters >= CHARACTERS:
                break
    return inspection


def _draw(records: Sharded, shards: Sequence[Shard]) -> Iterator[Block]:
    """Some records of each of some shards, those of distant shards first.

    Of many shards, they are from the first block; of few, from several blocks.
    """
    count = min(len(shards), SHARDS)
    bits = count.bit_length()
    for number in sorted(range(count), key=lambda n: f"{n:0{bits}b}"[::-1]):
        shard = shards[number * len(shards) // count]
        size = min(max(CHARACTERS // count, FEWEST), shard.block)
        depth = min(max(DEPTH // count, 1), -(-max(shard.bytes, 1) // size))
        most = max(SAMPLE // (count * depth), 1)
        read = records.read(dataclasses.replace(shard, block=size))
        for block in itertools.islice(read, depth):
            total = len(block.records)
            chosen = sorted({at * total // most for at in range(most)}) if total else []
            sample = [block.records[at] for at in chosen], [block.places[at] for at in chosen]
            yield Block(*sample, block.unit, None)


class _Look:
    """A look at the sample of a block."""

    def __init__(self, job: Job, block: Block, inspection: Inspection):
        self._job, self._block, self._inspection = job, block, inspection
        self._encoder, self._tokenizer = BlockEncoder(job, block), job.tokenizer

    def run(self) -> None:
        """Adds what is found to the inspection."""
        encoder, inspection = self._encoder, self._inspection
        if not self._block.records:
            return
        chunks = encoder.encode()
        inspection.records += len(self._block.records)
        add_notes(inspection.findings, encoder.template_notes)
        for number, record in enumerate(self._block.records):
            if number not in encoder.failed:
                # Columns of tables are not read for this.
                names = [
                    n for n in record if not isinstance(record, dict) or not is_empty(record[n])
                ]
                inspection.fields.update(names)
        if self._tokenizer is None:
            return
        size = self._job.nodes
        of_tokens = {task.side: chunks[task.side] for task in self._job.tasks}
        ids = {side: _split(chunk) for side, chunk in of_tokens.items()}
        for number, item in enumerate(encoder.items):
            if number in encoder.failed:
                continue
            for side, of_side in ids.items():
                is_text = self._job.fields is not None
                nodes = [[(item[side],)]] if is_text else item[side]
                self._compare(nodes, of_side[number * size : (number + 1) * size], number)
        inspection.tokens += sum(int(chunk.counts.sum()) for chunk in of_tokens.values())

    def _note(self, about: str, example: str, number: int) -> None:
        place = self._block.where(number, count=False)
        add_notes(self._inspection.findings, {about: (1, f"{place}: {example}")})

    def _compare(self, nodes: Sequence[Any], node_ids: list[np.ndarray], number: int) -> None:
        """Compares the ids of the nodes of a record, of one side, with their spans."""
        tokenizer = extend(cast(Tokenizer, self._tokenizer))
        texts = ["".join(text for text, *_ in spans) for spans in nodes]
        self._inspection.characters += (length := sum(map(len, texts)))
        if length > LONGEST:
            return
        if slots := [t.id for spans in nodes for t, *_ in spans if isinstance(t, templates.Slots)]:
            node_ids = [ids[~np.isin(ids, slots)] for ids in node_ids]
        unparsed = map(tokenizer.find_unparsed, (text for spans in nodes for text, *_ in spans))
        if finding := next(filter(None, unparsed), None):
            example, is_own = finding
            # The text of a record is text as it should be, and `strict` allows it.
            (self._differ if is_own else self._note)(UNPARSED, example, number)
        sequences = [(texts[0], node_ids[0])]
        if len(nodes) > 1:  # a continuation goes on from its prefix
            pairs = zip(texts[1:], node_ids[1:], strict=True)
            sequences = [(texts[0] + text, np.append(node_ids[0], ids)) for text, ids in pairs]
        changed = [(text, now) for text, ids in sequences if (now := tokenizer.spell(ids)) != text]
        if changed:
            lost = _find_lost(*changed[0])
            self._inspection.lost += lost
            self._differ(LOST if lost else CHANGED, _describe_change(*changed[0]), number)
        marks = [tokenizer.begin_id] * 2, [tokenizer.end_id] * 2
        if node_ids[0][:2].tolist() == marks[0] or node_ids[-1][-2:].tolist() == marks[1]:
            self._note(TWICE, ONCE, number)

    def _differ(self, about: str, example: str, number: int) -> None:
        """Notes, or for a strict job refuses, a record that the tokenizer cannot hold."""
        if self._job.strict:
            raise with_place(
                InvalidValue(
                    f"{example}; give another tokenizer, or train on this text without strict"
                ),
                self._block.where(number),
            )
        self._note(about, example, number)


def _split(chunk: Ragged) -> list[np.ndarray]:
    """The ids of each example."""
    return np.split(chunk.flat, np.cumsum(chunk.counts)[:-1])


def _find_lost(text: str, decoded: str) -> Mapping[str, int]:
    """The characters of a text that are gone, without any others in their place; no spaces."""
    before, after = collections.Counter(text), collections.Counter(decoded)
    gone = before - after
    if after - before or not "".join(gone).strip():
        return collections.Counter()
    return gone


def _describe_change(text: str, decoded: str) -> str:
    """The first difference of two texts, and what is around it."""
    pairs = enumerate(zip(text, decoded, strict=False))
    at = next((n for n, (one, other) in pairs if one != other), min(len(text), len(decoded)))
    before, after = (version[max(at - 20, 0) : at + 20] for version in (text, decoded))
    return f"the tokenizer loses text: {before!r} becomes {after!r} when it is decoded"
