"""Tokenisation: the recipe of a corpus, and its examples of a block of records."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from pipeline.corpus.groups import add_parents
from pipeline.corpus.tasks import ABOVE, CAUSAL, GROUPS, Task
from pipeline.errors import InvalidType, InvalidValue, require_one_of
from pipeline.planning.identity import fingerprint_of
from pipeline.text import templates
from pipeline.text.features import TOKEN_IDS, TOKENS, WEIGHTS, Column, Feature, check_features
from pipeline.text.ragged import IDS, Ragged
from pipeline.text.sources import Sharded, Source
from pipeline.text.sources.source import Block, sharded, text_of, with_place
from pipeline.text.templates import Template
from pipeline.text.tokenizers import Tokenizer
from pipeline.text.values import collect_notes, count_bytes

# By what is not trained on: how many records have it, of how many that were looked at (0: all),
# and the first of them.
Notes: TypeAlias = dict[str, tuple[int, int, str]]

# The records of a block, at most, whose tokens are compared with their text, and their characters.
COMPARED, CHARACTERS = 64, 1 << 16
SILENT = "have no loss on any token; they are in no batch of training"
UNPARSED = "have a mark that stays text"
CHANGED = "change when they are encoded and decoded again"
TWICE = "have the begin or end mark of the tokenizer twice"
ONCE = "remove it from the template, or give the tokenizer begin=False or end=False"


def add_notes(notes: Notes, more: Mapping[str, Any]) -> Notes:
    """`notes` with the counts of later records added."""
    for about, (count, of, first) in more.items():
        before, of_before, earlier = notes.get(about, (0, 0, ""))
        notes[about] = before + count, of_before + of, earlier or first
    return notes


OnError: TypeAlias = Literal["raise", "skip"]

# The members of a tokenizer: see `pipeline.text.tokenizers.Tokenizer`.
OF_TOKENIZERS = (
    *("kind", "vocab_size", "fingerprint", "begin_id", "end_id"),
    *("encode_batch", "decode", "save"),
)


@dataclasses.dataclass(frozen=True)
class Job:
    """The recipe of a corpus: all that decides its tokens; every worker gets a copy of it.

    Args:
        source: the records; see `pipeline.text.sources`.
        tokenizer: see `pipeline.text.tokenizers`; it is stored with the corpus.
        field: the field of each record that holds its text, all of which is trained on.
        template: in place of `field`, a function from a record to spans of text with loss weights;
            see `pipeline.text.templates`. With `task=INPUTS`, all weights must be 1. A template of
            groups, such as `templates.Preference`, makes a corpus like `Corpus.from_groups`.
        features: the features of examples, by name, each with a dtype. Each is read from the field
            of its name in the records; with a template, those of tokens come from the third entry
            of each span.
        task: decides the fields and the lengths; see `pipeline.corpus.tasks`.
        on_error: "raise" (default) ends the work at a record that fails. "skip" makes it an example
            without tokens, which no batch has, and lists it in `skipped.jsonl`.
        strict: whether a record fails if its tokens do not decode to its text, among the first of
            each shard, rather than being counted.
        of_pair: whether it is one side of pairs, the other one of which decides the weights.

    Raises:
        ValueError: the arguments do not fit each other.
        TypeError: `source` is no source, or `tokenizer` no tokenizer.
    """

    source: Source | Sharded
    tokenizer: Tokenizer
    field: str = "text"
    template: Template | None = None
    features: Mapping[str, Feature] | None = None
    task: Task = CAUSAL
    on_error: OnError = "raise"
    strict: bool = False
    of_pair: bool = False

    def __post_init__(self) -> None:
        require_tokenizable(self.source, self.tokenizer)
        require_one_of("on_error", self.on_error, get_args(OnError))
        if self.nodes > 1 and self.task != CAUSAL:
            raise InvalidValue(
                f"the template {templates.fingerprint(self.template)} makes groups, which are of "
                f"the task 'causal', and the task is {self.task.name!r}; leave task= out"
            )
        for name, feature in self.columns.items():
            if feature.dtype is None:
                raise InvalidValue(
                    f"the feature {name!r} has no dtype; records that are prepared in several "
                    "processes need one, as in Feature('example', dtype='float32')"
                )

    @functools.cached_property
    def records(self) -> Sharded:
        """The source, cut into shards."""
        return sharded(self.source)

    @property
    def nodes(self) -> int:
        """The number of examples that are stored of a record: 1, or the nodes of a group."""
        return templates.count_nodes(self.template)

    @property
    def stored_task(self) -> Task:
        """The task of the stored examples."""
        return GROUPS if self.nodes > 1 else self.task

    @functools.cached_property
    def columns(self) -> dict[str, Feature]:
        """The features of the stored examples."""
        known = check_features(self.features)
        return self.stored_task.check(add_parents(known) if self.nodes > 1 else known)

    @functools.cached_property
    def origin(self) -> dict[str, str | None]:
        """Fingerprints, computed once, of all that decides the tokens; and the field."""
        template = None if self.template is None else templates.fingerprint(self.template)
        origin = {
            "source": self.source.fingerprint,
            "tokenizer": self.tokenizer.fingerprint,
            "field": self.field if template is None else None,
            "template": template,
        }
        if self.columns:
            known = {name: feature.as_json for name, feature in self.columns.items()}
            origin["features"] = fingerprint_of(known)
        return origin if self.on_error == "raise" else origin | {"on_error": self.on_error}

    def require_unchanged(self) -> None:
        """Refuses a source that was edited since `origin` was first read."""
        now = self.source.fingerprint
        if now != self.origin["source"]:
            raise InvalidValue(
                f"the source changed while it was read ({self.source}): its fingerprint was "
                f"{self.origin['source']} and is now {now}. Stop what writes to it, open it again, "
                "and run again"
            )

    def run(
        self, block: Block, *, compare: bool = False
    ) -> tuple[Ragged, dict[int, Exception], Notes]:
        """The examples of a block, by number why records failed, and what is not trained on.

        Examples of records that failed are empty. Unless `on_error` is "skip", the first failure
        that is found is raised. The block has at least one record. With `compare`, the tokens of
        its first records are compared with their text.
        """
        of_block = _OfBlock(self, block)
        return of_block.encode(compare), of_block.failed, of_block.notes


class _OfBlock:
    """The tokenisation of one block."""

    def __init__(self, job: Job, block: Block):
        self._job, self._block = job, block
        self.failed: dict[int, Exception] = {}
        self.notes: Notes = {}
        self._left_out: set[int] = set()  # records without an example, and without an error

    def _fail(self, number: int, error: Exception) -> None:
        """Keeps the error of a record; raises it if none may fail."""
        if isinstance(error, OSError | MemoryError):  # not the fault of the record
            raise error
        if self._job.on_error == "raise":
            raise with_place(error, self._block.where(number))
        self.failed[number] = error

    def encode(self, compare: bool) -> Ragged:
        """The examples; those of records that failed have no tokens."""
        job, records = self._job, self._block.records
        items, noted = [], collect_notes()
        for number in range(len(records)):
            items.append(self._prepare(number))
            for about, example in noted.items():
                self._note(about, example, number)
            noted.clear()
        chunk = Ragged.concatenate(self._encode(items, 0))
        self._require_ids(chunk)
        if compare:
            self._compare(items, chunk)
        columns = dict(chunk.columns)
        weights = None if job.task.has_targets else columns.pop(WEIGHTS, None)
        if weights is not None and not job.of_pair:
            self._require_equal_weights(chunk.counts, weights.values)
        if job.nodes > 1:
            self._require_nodes(chunk.counts)
            above = np.tile(np.arange(job.nodes, dtype=np.int32), len(records))
            columns[ABOVE] = Column(job.columns[ABOVE], above)
        if missing := {name: each for name, each in job.columns.items() if name not in columns}:
            columns |= self._read_features(chunk.counts, missing)
        of_features = {name: columns.pop(name) for name in job.columns}  # always in one order
        chunk = self._empty_failed(dataclasses.replace(chunk, columns=columns | of_features))
        loss = chunk.weights if job.nodes == 1 else None  # a prefix never has any
        silent = job.task.find_silent(chunk.counts, loss)
        if len(silent):
            place = self._block.where(int(silent[0]), count=False)
            add_notes(self.notes, {SILENT: (len(silent), 0, place)})
        ids = Column(TOKEN_IDS, chunk.flat.astype(np.int32, copy=False))  # which fit by now
        return dataclasses.replace(chunk, columns={**chunk.columns, TOKENS: ids})

    # ---- items: what the tokenizer gets of each record

    def _prepare(self, number: int) -> Any:
        """The text of a record, or the spans of each of its nodes."""
        job, record = self._job, self._block.records[number]
        try:
            if isinstance(record, Exception):
                raise record
            if job.template is None:
                return text_of(record, job.field)
            return templates.fill(job.template, record, self._of_spans)
        except templates.LeftOut as error:
            self._left_out.add(number)
            self._note(f"{error}; they are left out", "", number)
            return self._nothing
        except Exception as error:
            self._fail(number, error)
            return self._nothing

    def _note(self, about: str, example: str, number: int) -> None:
        """Counts a record in the notes, with its place if it is the first."""
        place = self._block.where(number, count=False)  # or each record would cost a reading
        where = ": ".join(filter(None, [place, example]))
        add_notes(self.notes, {about: (1, 0, where)})

    @functools.cached_property
    def _of_spans(self) -> dict[str, Feature]:
        return {name: each for name, each in self._job.columns.items() if not each.per_example}

    @property
    def _nothing(self) -> Any:
        if self._job.template is None:
            return ""
        values = {n: np.zeros((1, *each.shape), each.dtype) for n, each in self._of_spans.items()}
        return [[("", 0.0, values)]] * self._job.nodes

    def _encode(self, items: Sequence[Any], first: int) -> list[Ragged]:
        """The examples of items, the first of which is of the record `first`.

        If the tokenizer fails, halves are tried, to find the records that it fails for.
        """
        try:
            return [self._encode_now(items)]
        except Exception as error:
            if len(items) == 1:
                self._fail(first, error)
                return [self._encode_now([self._nothing])]
        half = len(items) // 2
        return self._encode(items[:half], first) + self._encode(items[half:], first + half)

    def _encode_now(self, items: Sequence[Any]) -> Ragged:
        job = self._job
        if job.template is not None:
            return templates.encode(items, job.tokenizer, self._of_spans)
        sizes = np.fromiter(map(count_bytes, items), np.int64, len(items))
        return Ragged.of(*job.tokenizer.encode_batch(list(items)), text_bytes=sizes)

    # ---- checks of the examples

    def _fail_examples(self, examples: np.ndarray, describe: Any) -> None:
        """Fails the records of some examples, each with a description."""
        for example in examples.tolist():
            number = example // self._job.nodes
            if number not in self.failed and number not in self._left_out:
                self._fail(number, InvalidValue(describe(example)))

    def _require_ids(self, chunk: Ragged) -> None:
        flat, tokenizer = chunk.flat, self._job.tokenizer
        if not len(flat):
            return
        if flat.dtype.kind not in "iu":
            raise InvalidValue(
                f"the tokenizer {tokenizer.fingerprint} gave ids of dtype {flat.dtype}; they must "
                "be integers"
            )
        if flat.min() >= 0 and flat.max() < min(tokenizer.vocab_size, IDS):
            return
        wrong = np.flatnonzero((flat < 0) | (flat >= min(tokenizer.vocab_size, IDS)))
        of = np.searchsorted(np.cumsum(chunk.counts), wrong, side="right")
        examples, first = np.unique(of, return_index=True)
        ids = dict(zip(examples.tolist(), flat[wrong[first]].tolist(), strict=True))
        self._fail_examples(
            examples,
            lambda example: (
                f"the tokenizer {tokenizer.fingerprint} gave the id {ids[example]}, and its "
                f"vocab_size is {tokenizer.vocab_size}; ids must be at least 0 and below it, and "
                "below 2**31"
            ),
        )

    def _compare(self, items: Sequence[Any], chunk: Ragged) -> None:
        """Notes records whose tokens do not decode to their text, and marks that stay text."""
        job, size, compared, characters = self._job, self._job.nodes, 0, 0
        counts = chunk.counts[: COMPARED * size]
        ids = np.split(chunk.flat[: counts.sum()], np.cumsum(counts)[:-1])
        find_unparsed = getattr(job.tokenizer, "find_unparsed", lambda text: None)
        spell = getattr(job.tokenizer, "spell", job.tokenizer.decode)
        for number, item in enumerate(items[:COMPARED]):
            if number in self.failed or number in self._left_out:
                continue
            nodes = [[(item,)]] if job.template is None else item
            texts = ["".join(text for text, *_ in spans) for spans in nodes]
            characters += sum(map(len, texts))
            if characters > CHARACTERS and compared:
                break
            compared += 1
            unparsed = map(find_unparsed, (text for spans in nodes for text, *_ in spans))
            if found := next(filter(None, unparsed), None):
                example, is_own = found
                # The text of a record is text as it should be, and `strict` allows it.
                (self._differ if is_own else self._note)(UNPARSED, example, number)
            own = ids[number * size : (number + 1) * size]
            wholes = [(texts[0], own[0])]
            if size > 1:  # a continuation goes on from its prefix
                pairs = zip(texts[1:], own[1:], strict=True)
                wholes = [(texts[0] + text, np.append(own[0], each)) for text, each in pairs]
            decoded = ((text, spell(each)) for text, each in wholes)
            if changed := next((pair for pair in decoded if pair[0] != pair[1]), None):
                self._differ(CHANGED, _describe_change(*changed), number)
            marks = [job.tokenizer.begin_id] * 2, [job.tokenizer.end_id] * 2
            if own[0][:2].tolist() == marks[0] or own[-1][-2:].tolist() == marks[1]:
                self._note(TWICE, ONCE, number)
        add_notes(self.notes, dict.fromkeys((UNPARSED, CHANGED, TWICE), (0, compared, "")))

    def _differ(self, about: str, example: str, number: int) -> None:
        """Notes, or with `strict` refuses, a record that the tokenizer cannot hold."""
        if self._job.strict:
            raise with_place(
                InvalidValue(
                    f"{example}; give another tokenizer, or train on this text without strict"
                ),
                self._block.where(number),
            )
        self._note(about, example, number)

    def _require_equal_weights(self, counts: np.ndarray, weights: np.ndarray) -> None:
        """Refuses weights other than 1, except for that of a begin mark, which is 0."""
        ends = np.cumsum(counts)
        other = weights != 1
        if self._job.tokenizer.begin_id is not None:
            other[(ends - counts)[counts > 0]] = False
        at = np.flatnonzero(other)
        examples, first = np.unique(np.searchsorted(ends, at, side="right"), return_index=True)
        found = dict(zip(examples.tolist(), weights[at[first]].tolist(), strict=True))
        self._fail_examples(
            examples,
            lambda example: (
                f"the template gave a text the weight {found[example]:g}, and examples of the task "
                "'inputs', for masked text and span corruption, have no weights: any of their "
                "tokens may be hidden. Give all texts the weight 1, leave out those that are not "
                "to be learnt, or train on the task 'causal'"
            ),
        )

    def _require_nodes(self, counts: np.ndarray) -> None:
        self._fail_examples(
            np.flatnonzero(counts == 0),
            lambda _: (
                "its prefix or a continuation has no token; give each of them text, or the "
                "tokenizer marks"
            ),
        )

    def _read_features(
        self, counts: np.ndarray, features: Mapping[str, Feature]
    ) -> dict[str, Column]:
        """Features from fields of the records; those of records that failed are zeros."""
        nodes = self._job.nodes
        found: dict[str, list[np.ndarray]] = {name: [] for name in features}
        for number, record in enumerate(self._block.records):
            sizes = counts[number * nodes : (number + 1) * nodes].tolist()
            values: dict[str, list[np.ndarray]] = {}
            try:
                if number not in self.failed and number not in self._left_out:
                    for name, feature in features.items():
                        values[name] = _values_of(record, name, feature, sizes)
            except Exception as error:
                self._fail(number, error)
            if number in self.failed or number in self._left_out:
                for name, each in features.items():
                    shapes = [(1 if each.per_example else size, *each.shape) for size in sizes]
                    values[name] = [np.zeros(shape, each.dtype) for shape in shapes]
            for name, of_record in values.items():
                found[name] += of_record
        return {name: Column(each, np.concatenate(found[name])) for name, each in features.items()}

    def _empty_failed(self, chunk: Ragged) -> Ragged:
        """The examples, without the tokens of those of records that failed."""
        if not (empty := self._left_out.union(self.failed)):
            return chunk
        stays = np.ones(len(self._block.records), bool)
        stays[list(empty)] = False
        stays = np.repeat(stays, self._job.nodes)
        tokens = np.repeat(stays, chunk.counts)
        columns = {
            name: each if each.feature.per_example else Column(each.feature, each.values[tokens])
            for name, each in chunk.columns.items()
        }
        texts = None if chunk.text_bytes is None else chunk.text_bytes * stays
        return Ragged(chunk.counts * stays, columns, texts)


def _describe_change(text: str, decoded: str) -> str:
    """The first difference of two texts, and what is around it."""
    pairs = enumerate(zip(text, decoded, strict=False))
    at = next((n for n, (one, other) in pairs if one != other), min(len(text), len(decoded)))
    before, after = (each[max(at - 20, 0) : at + 20] for each in (text, decoded))
    return f"the tokenizer loses text: {before!r} becomes {after!r} when it is decoded"


def _values_of(
    record: Mapping[str, Any], name: str, feature: Feature, sizes: Sequence[int]
) -> list[np.ndarray]:
    """The values of a feature for each example of a record, which have so many tokens."""
    if name not in record or (record[name] is None and feature.fill is not None):
        if feature.fill is None:
            raise InvalidValue(
                f"{name} is no field of it (its fields: {', '.join(map(str, record))}); name the "
                "feature like its field, or give it a fill="
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
    return [feature.convert([each], name, [size]) for each, size in pairs]


def require_tokenizable(source: Any, tokenizer: Any) -> None:
    """Raises a `TypeError` for an object that is not a source, or not a tokenizer."""
    if not hasattr(source, "fingerprint"):
        raise InvalidType(
            f"source is {source!r:.80}; it must be a source, as sources.TextFiles('*.txt') or "
            "sources.Records([{'text': '…'}])"
        )
    if isinstance(tokenizer, type) or not hasattr(tokenizer, "encode_batch"):
        raise InvalidType(
            f"tokenizer is {tokenizer!r:.80}; it must be a tokenizer, as tokenizers.Bytes()"
        )
    if missing := [name for name in OF_TOKENIZERS if not hasattr(tokenizer, name)]:
        raise InvalidType(
            f"the tokenizer {type(tokenizer).__name__} has no {', '.join(missing)}; a tokenizer "
            f"has {', '.join(OF_TOKENIZERS)}, as pipeline.text.tokenizers.Tokenizer says"
        )
