"""Job: the recipe of a corpus, which decides every token of it."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias, cast, get_args

from pipeline.corpus.tasks import (
    A_TASK,
    CAUSAL,
    GROUPS,
    OF_PAIRS,
    TARGETS,
    Task,
    add_parents,
    divide_features,
    is_single,
    tasks_of,
)
from pipeline.errors import InvalidType, InvalidValue, require_one_of, require_type
from pipeline.planning.identity import fingerprint_of
from pipeline.text import templates
from pipeline.text.features import Feature, check_features
from pipeline.text.source import sharded
from pipeline.text.sources import Sharded, Source
from pipeline.text.template import traits_of
from pipeline.text.templates import Template
from pipeline.text.tokenizers import Tokenizer

OnError: TypeAlias = Literal["raise", "skip"]

# The members of a tokenizer.
OF_TOKENIZERS = [name for name in vars(Tokenizer) if not name.startswith("_")]


@dataclasses.dataclass(frozen=True)
class Job:
    """The recipe of a corpus: all that decides its tokens; every worker gets a copy of it.

    Args:
        source: the records; see `pipeline.text.sources`.
        tokenizer: see `pipeline.text.tokenizers`; it is stored with the corpus. None: there is no
            side of tokens.
        field: the field of each record that holds its text, all of which is trained on.
        template: in place of `field`, a function from a record to spans of text with loss weights;
            see `pipeline.text.templates`. With `task=INPUTS`, all weights must be 1. A template of
            groups, such as `templates.Preference`, makes a corpus like `Corpus.from_groups`. One
            may return several sides.
        features: the features of examples, by name, each with a dtype. Each is read from the field
            of its name in the records; with a template, those of tokens come from the third entry
            of each span, and those of sides of arrays from the sides that it returns. Default
            None: the attribute `features` of the template, if it has one.
        task: decides the fields and the lengths; see `pipeline.corpus.tasks`.
        on_error: "raise" (default) ends the work at a record that fails. "skip" makes it an example
            without tokens, which no batch has, and lists it in `skipped.jsonl`.
        strict: whether it is an error if the tokens of a record do not decode to its text, in a
            sample of the records, rather than being counted.
        loss: the side of arrays that carries the loss, if one does; see `Sides`.

    Raises:
        ValueError: the arguments do not fit each other.
        TypeError: `source` is no source, or `tokenizer` no tokenizer.
    """

    source: Source | Sharded
    tokenizer: Tokenizer | None
    field: str = "text"
    template: Template | None = None
    features: Mapping[str, Feature] | None = None
    task: Task = CAUSAL
    on_error: OnError = "raise"
    strict: bool = False
    loss: str | None = None

    def __post_init__(self) -> None:
        require_tokenizable(self.source, self.tokenizer)
        require_one_of("on_error", self.on_error, get_args(OnError))
        require_type("task", self.task, Task, A_TASK)
        require_type("field", self.field, str, "the name of a field of records")
        require_type("loss", self.loss, str | None, "the name of a side, or None")
        if self.task != CAUSAL and self.tasks != [self.task]:
            kinds = "pairs" if traits_of(self.template).sides else "groups"
            raise InvalidValue(
                f"the template {templates.fingerprint(self.template)} makes {kinds}, which are of "
                f"the task 'causal', and the task is {self.task.name!r}; leave task= out"
            )
        if TARGETS in self.tasks and cast(Tokenizer, self.tokenizer).begin_id is None:
            raise InvalidValue(
                f"the tokenizer {cast(Tokenizer, self.tokenizer).fingerprint} does not mark where "
                "texts begin, and a decoder begins with that mark; make the tokenizer with "
                "begin=True"
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
        return traits_of(self.template).nodes

    @functools.cached_property
    def tasks(self) -> list[Task]:
        """The tasks of the sides of tokens."""
        if self.tokenizer is None:
            return []
        if self.nodes > 1:
            return [GROUPS]
        return [OF_PAIRS[name] for name in traits_of(self.template).sides] or [self.task]

    @functools.cached_property
    def sides(self) -> dict[str, dict[str, Feature]]:
        """The features of each side of the stored examples; those of tokens first."""
        features = traits_of(self.template).features if self.features is None else self.features
        schemas = check_features(features)
        if self.nodes > 1:
            schemas = add_parents(GROUPS.check(schemas))
        if self.tokenizer is None and not any(feature.of_arrays for feature in schemas.values()):
            raise InvalidValue(
                "tokenizer is None, and features describe no side of arrays; give a tokenizer for "
                "text, or features such as {'patches': Feature('patches', dtype='uint8')}"
            )
        return divide_features(self.tasks, schemas)

    @functools.cached_property
    def fields(self) -> Mapping[str, str] | None:
        """The field that is the text of each side of tokens; None if a template makes spans."""
        if self.template is None:
            return {task.side: self.field for task in self.tasks}
        return traits_of(self.template).fields

    @functools.cached_property
    def side_tasks(self) -> dict[str, Task]:
        """The task of each side, by name."""
        return tasks_of(self.sides, self.tasks)

    @property
    def is_single(self) -> bool:
        """Whether the examples have one side, of tokens."""
        return is_single(self.side_tasks, self.loss)

    @functools.cached_property
    def columns(self) -> dict[str, Feature]:
        """The features of the stored examples."""
        return {
            name: feature for features in self.sides.values() for name, feature in features.items()
        }

    @functools.cached_property
    def origin(self) -> dict[str, str | None]:
        """Fingerprints, computed once, of all that decides the tokens; and the field."""
        template = None if self.template is None else templates.fingerprint(self.template)
        origin = {
            "source": self.source.fingerprint,
            "tokenizer": None if self.tokenizer is None else self.tokenizer.fingerprint,
            "field": self.field if template is None else None,
            "template": template,
        }
        if self.columns:
            schemas = {name: feature.as_json for name, feature in self.columns.items()}
            origin["features"] = fingerprint_of(schemas)
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


def require_tokenizable(source: Any, tokenizer: Any) -> None:
    """Raises a `TypeError` for an object that is not a source, or not a tokenizer or None."""
    if not hasattr(source, "fingerprint"):
        raise InvalidType(
            f"source is {source!r:.80}; it must be a source, as sources.TextFiles('*.txt') or "
            "sources.Records([{'text': '…'}])"
        )
    if tokenizer is None:
        return
    if isinstance(tokenizer, type) or not hasattr(tokenizer, "encode_batch"):
        raise InvalidType(
            f"tokenizer is {tokenizer!r:.80}; it must be a tokenizer, as tokenizers.Bytes()"
        )
    if missing := [name for name in OF_TOKENIZERS if not hasattr(tokenizer, name)]:
        raise InvalidType(
            f"the tokenizer {type(tokenizer).__name__} has no {', '.join(missing)}; a tokenizer "
            f"has {', '.join(OF_TOKENIZERS)}, as pipeline.text.tokenizers.Tokenizer says"
        )
