"""Tokenisation: records to chunks of tokens."""

import dataclasses
import functools
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias, TypeVar, get_args

import numpy as np

from pipeline.corpus.groups import ABOVE
from pipeline.corpus.tasks import CAUSAL, Task
from pipeline.errors import InvalidType, InvalidValue, require_one_of
from pipeline.planning.identity import fingerprint_of
from pipeline.text import templates
from pipeline.text.features import LOSS_WEIGHTS, TOKEN_IDS, TOKENS, WEIGHTS, Column, Feature
from pipeline.text.ragged import Ragged
from pipeline.text.sources import Source
from pipeline.text.sources.source import read_records, read_texts, where
from pipeline.text.templates import Template
from pipeline.text.tokenizers import Tokenizer
from pipeline.text.tokenizers.markup import MarkError

logger = logging.getLogger(__name__)

OnError: TypeAlias = Literal["raise", "skip"]

# Records are read in groups of up to `GROUP`. A chunk ends at `TEXT` characters, or if there is a
# template at `TEXT` tokens. Neither number changes a result.
GROUP, TEXT = 16, 1 << 22

# The members of a tokenizer: see `pipeline.text.tokenizers.Tokenizer`.
OF_TOKENIZERS = (
    *("kind", "vocab_size", "fingerprint", "begin_id", "end_id"),
    *("encode_batch", "decode", "save"),
)

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Job:
    """Reads and tokenises records by number; every worker gets a copy of it.

    A task without targets drops the weights of a template, and refuses weights other than 1, unless
    the records are `of_pair`, where the other side decides. If `on_error` is "skip", a record that
    fails becomes an example without tokens. `features` are read from the fields of these names, or,
    if they are of tokens and there is a template, from its spans. Each node of a group is an
    example, and `source` repeats each record for each of its nodes.
    """

    source: Source
    tokenizer: Tokenizer
    field: str = "text"
    template: Template | None = None
    task: Task = CAUSAL
    on_error: OnError = "raise"
    features: Mapping[str, Feature] = dataclasses.field(default_factory=dict)
    of_pair: bool = False

    def __post_init__(self) -> None:
        require_tokenizable(self.source, self.tokenizer)
        require_one_of("on_error", self.on_error, get_args(OnError))
        if self._nodes > 1 and ABOVE not in self.features:
            raise InvalidValue(
                f"the template {templates.fingerprint(self.template)} makes groups, which are "
                "stored as tokens; prepare() them"
            )
        for name, feature in self.task.check(self.features).items():
            if feature.dtype is None:
                raise InvalidValue(
                    f"the feature {name!r} has no dtype; records that are prepared in several "
                    "processes need one, as in Feature('example', dtype='float32')"
                )

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
        if self.features:
            origin["features"] = fingerprint_of({n: f.as_json for n, f in self.features.items()})
        return origin if self.on_error == "raise" else origin | {"on_error": self.on_error}

    def count_records(self) -> int:
        """The number of records; refuses a source that is empty or that changes."""
        if not (count := len(self.source)):
            raise InvalidValue(
                f"the source is empty ({self.source}); check that it names the right files"
            )
        self.require_unchanged()  # such as one whose fingerprint is never the same twice
        return count

    def require_unchanged(self) -> None:
        """Refuses a source that was edited since `origin` was first read."""
        now = self.source.fingerprint
        if now != self.origin["source"]:
            raise InvalidValue(
                f"the source changed while it was read ({self.source}): its fingerprint was "
                f"{self.origin['source']} and is now {now}. Stop what writes to it, open it again, "
                "and run again"
            )

    def run(self, records: Sequence[int]) -> Ragged:
        """The tokens of the records with these numbers."""
        return Ragged.concatenate(list(self.chunks(records)))

    def chunks(self, records: Sequence[int]) -> Iterator[Ragged]:
        """The tokens of the records with these numbers, in chunks."""
        while len(records):
            # Popped, or this generator would keep the chunk in memory while its caller works on it.
            chunk = [self.run_first(records)]
            records = records[len(chunk[0].counts) :]
            yield chunk.pop()

    def run_first(self, records: Sequence[int]) -> Ragged:
        """The tokens of the first records, up to `TEXT` characters or tokens.

        Errors, also those of the source, the template or the tokenizer, name the record.
        """
        while True:
            try:
                return self._run_first(records)
            except OSError:  # not the fault of a record
                raise
            except Exception as error:
                if len(records) == 1:
                    if self.on_error == "skip":
                        place = where(self.source, records[0])
                        logger.warning("%s failed and gets no tokens: %s", place, error)
                        return self._make_empty(records[:1])
                    if isinstance(error, MarkError):
                        raise InvalidValue(f"{where(self.source, records[0])}: {error}") from error
                    error.add_note(f"This was record {records[0]:,} of {self.source}, from 0.")
                    raise
            records = records[: len(records) // 2]  # to find the one that fails

    def _make_empty(self, records: Sequence[int]) -> Ragged:
        """One example without tokens."""
        one = np.zeros(1, np.int64)
        known = {TOKENS: TOKEN_IDS}
        known |= {WEIGHTS: LOSS_WEIGHTS} if self.template and self.task.has_targets else {}
        columns = {
            # No batch has this example, so its values do not matter.
            name: Column(each, np.zeros((int(each.per_example), *each.shape), each.dtype))
            for name, each in {**known, **self.features}.items()
        }
        columns |= self._place_nodes(records)
        return Ragged(one, columns, one)

    def _run_first(self, records: Sequence[int]) -> Ragged:
        groups = _divide(records)
        if (template := self.template) is not None:
            of_tokens = {n: each for n, each in self.features.items() if not each.per_example}
            rest = self.tokenizer, of_tokens
            encode = (templates.encode(template, self.source, group, *rest) for group in groups)
            chunk = Ragged.concatenate(_take(encode, lambda group: len(group.flat)))
        else:
            read = (read_texts(self.source, group, self.field) for group in groups)
            texts = list(itertools.chain(*_take(read, lambda group: sum(map(len, group)))))
            sizes = np.fromiter((len(text.encode()) for text in texts), np.int64, len(texts))
            chunk = Ragged.of(*self.tokenizer.encode_batch(texts), text_bytes=sizes)
        flat, most = chunk.flat, self.tokenizer.vocab_size
        if flat.min(initial=0) < 0 or flat.max(initial=-1) >= most:
            wrong = np.flatnonzero((flat < 0) | (flat >= most))
            record = records[int(np.searchsorted(np.cumsum(chunk.counts), wrong[0], side="right"))]
            raise InvalidValue(
                f"{where(self.source, record)}: the tokenizer {self.tokenizer.fingerprint} gave "
                f"the id {flat[wrong[0]]}, and its vocab_size is {self.tokenizer.vocab_size}; ids "
                "must be at least 0 and below it"
            )
        columns = dict(chunk.columns)
        weights = None if self.task.has_targets else columns.pop(WEIGHTS, None)
        if weights is not None and not self.of_pair:
            self._require_equal_weights(records, chunk.counts, weights.values)
        if self._nodes > 1 and (empty := np.flatnonzero(chunk.counts == 0)).size:
            raise InvalidValue(
                f"{where(self.source, records[empty[0]])}: its prefix or a continuation has no "
                "token; give each of them text, or the tokenizer marks"
            )
        columns |= self._place_nodes(records[: len(chunk.counts)])
        if missing := {n: each for n, each in self.features.items() if n not in columns}:
            columns |= self._read_features(records[: len(chunk.counts)], chunk.counts, missing)
        of_features = {name: columns.pop(name) for name in self.features}  # always in one order
        return dataclasses.replace(chunk, columns=columns | of_features)

    @property
    def _nodes(self) -> int:
        return templates.count_nodes(self.template)

    def _place_nodes(self, records: Sequence[int]) -> dict[str, Column]:
        """For groups, how many nodes back the prefix of each node is."""
        if ABOVE not in self.features:
            return {}
        above = np.array(records) % self._nodes
        return {ABOVE: Column(self.features[ABOVE], above.astype(np.int32))}

    def _require_equal_weights(
        self, records: Sequence[int], counts: np.ndarray, weights: np.ndarray
    ) -> None:
        """Refuses weights other than 1, except for that of a begin mark, which is 0."""
        ends = np.cumsum(counts)
        other = weights != 1
        if self.tokenizer.begin_id is not None:
            other[(ends - counts)[counts > 0]] = False
        if other.any():
            at = int(other.argmax())
            record = records[int(np.searchsorted(ends, at, side="right"))]
            raise InvalidValue(
                f"{where(self.source, record)}: the template gave a text the weight "
                f"{weights[at]:g}, and examples of the task 'inputs', for masked text and span "
                "corruption, have no weights: any of their tokens may be hidden. Give all texts "
                "the weight 1, leave out those that are not to be learnt, or train on the task "
                "'causal'"
            )

    def _read_features(
        self, records: Sequence[int], counts: np.ndarray, features: Mapping[str, Feature]
    ) -> dict[str, Column]:
        """Features from fields of the records, which have `counts` tokens."""
        found: dict[str, list[np.ndarray]] = {name: [] for name in features}
        read = read_records(self.source, records)
        for index, record, tokens in zip(records, read, counts.tolist(), strict=True):
            for name, feature in features.items():
                what = f"{where(self.source, index)}: {name}"
                if name not in record and feature.fill is None:
                    raise InvalidValue(
                        f"{what} is no field of it (its fields: {', '.join(map(str, record))}); "
                        "name the feature like its field, or give it a fill="
                    )
                node, each = index % self._nodes, record.get(name)
                if self._nodes > 1 and name in record:
                    each = _value_of_node(each, feature, node, self._nodes, what)
                found[name].append(
                    feature.convert([each], what, [tokens])
                    if name in record
                    else feature.filled(1 if feature.per_example else tokens)
                )
        return {name: Column(each, np.concatenate(found[name])) for name, each in features.items()}


def _value_of_node(value: Any, feature: Feature, node: int, nodes: int, what: str) -> Any:
    """The part of a record's value for one node; the prefix has the value of the group."""
    none = np.zeros(feature.shape, feature.dtype)
    if feature.of == "example":
        return none if node else value
    if np.shape(value)[:1] != (nodes - 1,):
        raise InvalidValue(
            f"{what} is {value!r:.60}; give a value for each of the {nodes - 1} continuations"
        )
    return value[node - 1] if node else none


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


def _divide(records: Sequence[int]) -> Iterator[Sequence[int]]:
    """Groups of records that are read at once: at first small ones, as records may be huge."""
    at, size = 0, 1
    while at < len(records):
        yield records[at : at + size]
        at, size = at + size, min(2 * size, GROUP)


def _take(groups: Iterable[T], size: Callable[[T], int]) -> list[T]:
    """The first groups, until their sizes add up to `TEXT`."""
    taken, total = [], 0
    for group in groups:
        taken.append(group)
        total += size(group)
        if total >= TEXT:
            break
    return taken
