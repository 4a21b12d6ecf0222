"""Block: the examples of consecutive records, tokenised in memory."""

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np

from pipeline.corpus.preparing.job import Job
from pipeline.corpus.tasks import ABOVE, Task
from pipeline.errors import InvalidValue
from pipeline.text import templates
from pipeline.text.features import TOKEN_IDS, TOKENS, WEIGHTS, Column, Feature
from pipeline.text.notes import take_notes
from pipeline.text.ragged import IDS, Ragged, find_lead, measure
from pipeline.text.source import Block, Doubted, text_of, with_place
from pipeline.text.template import traits_of
from pipeline.text.templates import Template
from pipeline.text.values import count_bytes, name_fields

# By what is not trained on: how many records have it, and the first of them.
Notes: TypeAlias = dict[str, tuple[int, str]]

EMPTY = "have no text{}; of such a one, at most the marks of the tokenizer are trained on"
SILENT = "have no loss on any token; they are in no batch of training"


def add_notes(notes: Notes, more: Mapping[str, Any]) -> Notes:
    """`notes` with the counts of later records added."""
    for about, (count, first) in more.items():
        before, earlier = notes.get(about, (0, ""))
        notes[about] = before + count, earlier or first
    return notes


class Encoded(NamedTuple):
    """Consecutive examples of a shard: of a block, or of a part.

    Attributes:
        examples: the examples by side; none if it is empty.
        failed: a description of each record that failed, as JSON, with its `example` among these.
        next: where the shard continues; None at its end.
        notes: of its records.
    """

    examples: Mapping[str, Ragged]
    failed: list[dict[str, Any]]
    next: Any
    notes: Notes

    @property
    def num_examples(self) -> int:
        """The number of examples."""
        return len(next(iter(self.examples.values())).counts) if self.examples else 0


def encode_block(job: Job, block: Block) -> Encoded:
    """The examples of a block; those of records that failed are empty.

    Unless `on_error` is "skip", the first failure that is found is raised.
    """
    if not block.records:
        return Encoded({}, [], block.next, {})
    encoder = BlockEncoder(job, block)
    examples, failed = encoder.encode(), []
    for number, error in encoder.failed.items():
        named = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        reason = {"example": number * job.nodes, "reason": f"{named}{error}"}
        if not isinstance(error, templates.LeftOut):
            failed.append(block.place(number) | reason)
    return Encoded(examples, failed, block.next, encoder.notes)


class BlockEncoder:
    """The tokenisation of one block.

    Attributes:
        items: by number of record and by side, its text, or the spans of each of its nodes.
        failed: by number, why records have no example: the first error of each.
        notes: of the records.
        template_notes: what the template leaves out of them, if that is collected.
    """

    def __init__(self, job: Job, block: Block):
        self._job, self._block = job, block
        self._tokenizer: Any = job.tokenizer  # None: there is no side of tokens
        self.items: list[dict[str, Any]] = []
        self.template_notes: Notes = {}
        self.failed: dict[int, Exception] = {}
        self.notes: Notes = {}

    def _fail(self, number: int, error: Exception) -> None:
        """Keeps the error of a record; raises it if none may fail."""
        if isinstance(error, OSError | MemoryError):  # not the fault of the record
            raise error
        if isinstance(error, templates.LeftOut):
            self._note(f"{error}; they are left out", [number])
        elif self._job.on_error == "raise" and number not in self.failed:
            raise with_place(error, self._block.where(number))
        self.failed.setdefault(number, error)

    def _note(self, about: str, records: Sequence[int] | np.ndarray) -> None:
        """Counts records in the notes, if there are any."""
        if len(records):
            add_notes(self.notes, {about: (len(records), self._place(int(records[0])))})

    def encode(self) -> dict[str, Ragged]:
        """The examples by side; those of records that failed have no tokens or arrays."""
        for number, record in enumerate(self._block.records):
            if isinstance(record, Doubted):
                self._note(record.doubt, [number])
            self.items.append(self._prepare(number))
            for about, example in take_notes().items():
                add_notes(self.template_notes, {about: (1, self._place(number, example))})
        chunks = self._read_features(
            {task.side: self._encode_side(task) for task in self._job.tasks}
        )
        for task in self._job.tasks:
            chunks[task.side] = self._finish_side(task, chunks[task.side])
        return chunks

    def _encode_side(self, task: Task) -> Ragged:
        """The examples of a side of tokens, with the features of spans."""
        job = self._job
        items = [item[task.side] for item in self.items]
        chunk = Ragged.concatenate(self._encode(items, task.side, 0))
        self._require_ids(chunk)
        columns = dict(chunk.columns)
        if not task.has_targets or traits_of(job.template).unweighted:
            weights = columns.pop(WEIGHTS, None)
            if weights is not None and len(job.tasks) == 1:
                self._require_equal_weights(chunk.counts, weights.values)
        if job.nodes > 1:
            for node in np.flatnonzero(chunk.counts == 0).tolist():
                error = InvalidValue(
                    "its prefix or a continuation has no token; give each of them text, or the "
                    "tokenizer marks"
                )
                self._fail(node // job.nodes, error)
            above = np.tile(np.arange(job.nodes, dtype=np.int32), len(items))
            columns[ABOVE] = Column(job.columns[ABOVE], above)
        return dataclasses.replace(chunk, columns=columns)

    def _finish_side(self, task: Task, chunk: Ragged) -> Ragged:
        """The examples of a side of tokens without those of records that failed."""
        chunk = self._empty_failed(chunk)
        loss = chunk.weights if self._job.nodes == 1 else None  # a prefix never has any
        self._note(SILENT, task.find_silent(chunk.counts, loss))
        side = f" on the side {task.side!r}" if len(self._job.tasks) > 1 else ""
        self._note(EMPTY.format(side), self._find_empty(chunk.counts))
        ids = Column(TOKEN_IDS, chunk.flat.astype(np.int32, copy=False))  # which fit by now
        return dataclasses.replace(chunk, columns={**chunk.columns, TOKENS: ids})

    def _find_empty(self, counts: np.ndarray) -> np.ndarray:
        """The records that did not fail, of which no node has a token besides those of marks."""
        marks = self._tokenizer.begin_id, self._tokenizer.end_id
        most = sum(mark is not None for mark in marks)
        per_record = counts.reshape(-1, self._job.nodes)
        empty = np.flatnonzero((per_record <= most).all(axis=1))
        return np.setdiff1d(empty, list(self.failed))

    # ---- items: what the tokenizer gets of each record

    def _prepare(self, number: int) -> dict[str, Any]:
        """By side, the text of a record, the spans of each of its nodes, or arrays by feature."""
        job, record = self._job, self._block.records[number]
        try:
            if isinstance(record, Exception):
                raise record
            if job.fields is not None:
                return {side: text_of(record, field) for side, field in job.fields.items()}
            arrays = {
                side: features for side, features in job.sides.items() if side not in self._of_spans
            }
            template = cast(Template, job.template)
            return templates.fill(template, record, self._of_spans, arrays)
        except Exception as error:
            self._fail(number, error)
            return self._nothing

    def _place(self, number: int, example: str = "") -> str:
        """The place of a record, and an example from it."""
        place = self._block.where(number, count=False)  # or each record would cost a reading
        return ": ".join(filter(None, [place, example]))

    @functools.cached_property
    def _of_spans(self) -> dict[str, dict[str, Feature]]:
        """The features of each side of tokens that have a value for each token."""
        return {
            task.side: {n: f for n, f in self._job.sides[task.side].items() if not f.per_example}
            for task in self._job.tasks
        }

    @functools.cached_property
    def _nothing(self) -> dict[str, Any]:
        """What stands for a record that failed, until its tokens are removed."""
        if self._job.fields is not None:
            return dict.fromkeys(self._of_spans, "")
        nodes = self._job.nodes
        return {
            side: [[("", 0.0, {n: feature.filled(1) for n, feature in features.items()})]] * nodes
            for side, features in self._of_spans.items()
        }

    def _encode(self, items: Sequence[Any], side: str, first: int) -> list[Ragged]:
        """The examples of items of a side, the first of which is of the record `first`.

        If the tokenizer fails, halves are tried, to find the records that it fails for.
        """
        try:
            return [self._encode_now(items, side)]
        except Exception as error:
            if len(items) == 1:
                self._fail(first, error)
                return [self._encode_now([self._nothing[side]], side)]
        half = len(items) // 2
        before = self._encode(items[:half], side, first)
        return before + self._encode(items[half:], side, first + half)

    def _encode_now(self, items: Sequence[Any], side: str) -> Ragged:
        if self._job.fields is None:
            return templates.encode(items, self._tokenizer, self._of_spans[side])
        sizes = np.fromiter(map(count_bytes, items), np.int64, len(items))
        return Ragged.of(*self._tokenizer.encode_batch(list(items)), text_bytes=sizes)

    # ---- checks of the examples

    def _fail_tokens(
        self, counts: np.ndarray, wrong: np.ndarray, describe: Callable[[int], str]
    ) -> None:
        """Fails the records of wrong tokens, each with the description of its first."""
        positions = np.flatnonzero(wrong)
        numbers = np.searchsorted(np.cumsum(counts), positions, side="right") // self._job.nodes
        records, first = np.unique(numbers, return_index=True)
        for number, position in zip(records.tolist(), positions[first].tolist(), strict=True):
            self._fail(number, InvalidValue(describe(position)))

    def _require_ids(self, chunk: Ragged) -> None:
        flat, tokenizer = chunk.flat, self._tokenizer
        if not len(flat):
            return
        if flat.dtype.kind not in "iu":
            raise InvalidValue(
                f"the tokenizer {tokenizer.fingerprint} gave ids of dtype {flat.dtype}; they must "
                "be integers"
            )
        if flat.min() >= 0 and flat.max() < min(tokenizer.vocab_size, IDS):
            return
        self._fail_tokens(
            chunk.counts,
            (flat < 0) | (flat >= min(tokenizer.vocab_size, IDS)),
            lambda at: (
                f"the tokenizer {tokenizer.fingerprint} gave the id {flat[at]}, and its "
                f"vocab_size is {tokenizer.vocab_size}; ids must be at least 0 and below it, and "
                "below 2**31"
            ),
        )

    def _require_equal_weights(self, counts: np.ndarray, weights: np.ndarray) -> None:
        """Refuses weights other than 1, except for that of a begin mark, which is 0."""
        ends = np.cumsum(counts)
        other = weights != 1
        if self._tokenizer.begin_id is not None:
            other[(ends - counts)[counts > 0]] = False
        self._fail_tokens(
            counts,
            other,
            lambda at: (
                f"the template gave a text the weight {weights[at]:g}, and examples of the task "
                "'inputs', for masked text, have no weights: any of their tokens may be hidden. "
                "Give all texts the weight 1, leave out those that are not to be learnt, or train "
                "on the task 'causal'"
            ),
        )

    def _read_features(self, chunks: Mapping[str, Ragged]) -> dict[str, Ragged]:
        """The examples of all sides, with features that are not of spans.

        Features of records that failed are zeros, and they have no arrays.
        """
        job, nodes = self._job, self._job.nodes
        of_spans = {name for chunk in chunks.values() for name in chunk.columns}
        arrays: dict[str, list[np.ndarray]] = {n: [] for n in job.columns if n not in of_spans}
        pointers = {
            name: np.split(chunk.columns[name].values, np.cumsum(chunk.counts)[:-1])
            for side, chunk in chunks.items()
            for name, feature in job.sides[side].items()
            if feature.to is not None and name in of_spans
        }
        for number, item in enumerate(self.items) if arrays or pointers else ():
            rows = slice(number * nodes, (number + 1) * nodes)
            counts = {side: chunk.counts[rows].tolist() for side, chunk in chunks.items()}
            example, values = {name: pointer[number] for name, pointer in pointers.items()}, {}
            try:
                if number not in self.failed:
                    values = self._values_of(number, item, counts, example, arrays)
            except Exception as error:
                self._fail(number, error)
            for side, features in job.sides.items():
                sizes = counts.get(side, [0])
                for name in features.keys() & arrays.keys():
                    arrays[name] += values.get(name) or _zeros(features[name], sizes)
        result = {}
        for side, features in job.sides.items():
            columns = dict(chunks[side].columns) if side in chunks else {}
            for name, schema in features.items():  # always in one order
                own_values = arrays[name] if name in arrays else [columns.pop(name).values]
                columns[name] = Column(schema, np.concatenate(own_values))
            if side in chunks:
                result[side] = dataclasses.replace(chunks[side], columns=columns)
            else:
                sizes = [len(values) for values in arrays[cast(str, find_lead(features))]]
                result[side] = Ragged(np.array(sizes, np.int64), columns)
        return result

    def _values_of(
        self,
        number: int,
        item: Mapping[str, Any],
        counts: Mapping[str, list[int]],
        example: dict[str, Any],
        names: Collection[str],
    ) -> dict[str, list[np.ndarray]]:
        """The values of features of a record, by name, each checked.

        `counts` has the tokens of each node, by side, and `example` the pointers of spans.
        """
        job, record = self._job, self._block.records[number]
        values: dict[str, list[np.ndarray]] = {}
        for side, features in job.sides.items():
            for name in [name for name in features if name in names]:
                feature = features[name]
                if side in counts or feature.per_example:
                    values[name] = _features_of(record, name, feature, counts.get(side, [1]))
                    example |= {} if feature.to is None else {name: values[name][0]}
                else:
                    example[name] = _array_of(item.get(side, record), name, feature)
        sizes = {task.side: max(counts[task.side][0] - task.lookahead, 0) for task in job.tasks}
        measure(example, job.sides, sizes)
        for name in (example.keys() & {*names}) - values.keys():
            feature = job.columns[name]
            values[name] = [feature.convert([example[name]], name, [sizes[feature.of]])]
        return values

    def _empty_failed(self, chunk: Ragged) -> Ragged:
        """The examples, without the tokens of those of records that failed."""
        if not self.failed:
            return chunk
        stays = np.ones(len(self._block.records), bool)
        stays[list(self.failed)] = False
        stays = np.repeat(stays, self._job.nodes)
        tokens = np.repeat(stays, chunk.counts)
        columns = {
            name: Column(feature, values if feature.per_example else values[tokens])
            for name, (feature, values) in chunk.columns.items()
        }
        texts = None if chunk.text_bytes is None else chunk.text_bytes * stays
        return Ragged(chunk.counts * stays, columns, texts)


def _zeros(feature: Feature, sizes: Sequence[int]) -> list[np.ndarray]:
    """Zeros for examples of these sizes."""
    shapes = [(1 if feature.per_example else size, *feature.shape) for size in sizes]
    return [np.zeros(shape, feature.dtype) for shape in shapes]


def _array_of(side: Mapping[str, Any], name: str, feature: Feature) -> Any:
    """The array of a feature of a side; an empty one if the side is empty, or it is null."""
    if side and name not in side:
        raise InvalidValue(
            f"{name} of the side {feature.of!r} is missing; there are "
            f"{', '.join(map(str, side))}: name the feature like its field, or return all arrays "
            "of the side, or none"
        )
    array = side[name] if side else None
    return np.zeros((0, *feature.shape), feature.dtype) if array is None else array


def _features_of(
    record: Mapping[str, Any], name: str, feature: Feature, sizes: Sequence[int]
) -> list[np.ndarray]:
    """The values of a feature for each example of a record, which have so many tokens."""
    if name not in record or (record[name] is None and feature.fill is not None):
        if feature.fill is None:
            raise InvalidValue(
                f"{name} is no field of it (its fields: {name_fields(record)}); name the feature "
                f"like its field, or give {'the record a key' if feature.key else 'it a fill='}"
            )
        return [feature.filled(1 if feature.per_example else size) for size in sizes]
    value, nodes = record[name], len(sizes)
    if nodes == 1:
        return [feature.convert([value], name, sizes)]
    none = np.zeros(feature.shape, feature.dtype)  # a prefix has the value of the group
    if feature.of == "example":
        values = [value] + [none] * (nodes - 1)
    elif np.shape(value)[:1] == (nodes - 1,):
        values = [none, *value]
    else:
        raise InvalidValue(
            f"{name} is {value!r:.60}; give a value for each of the {nodes - 1} continuations"
        )
    pairs = zip(values, sizes, strict=True)
    return [feature.convert([entry], name, [size]) for entry, size in pairs]
