"""Batches: the batches of a plan as a Grain data set."""

import contextlib
import inspect
import operator
import sys
from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction
from typing import TYPE_CHECKING, Any, SupportsIndex, overload

import grain
import numpy as np

from pipeline.corpus.corpora import Corpora
from pipeline.corpus.interface import AnyCorpus
from pipeline.errors import (
    InvalidType,
    InvalidValue,
    require_one_of,
    require_type,
    require_whole,
)
from pipeline.fields.batch import EXAMPLE_ID, OFFSETS, Batch
from pipeline.loading.ahead import ReadAhead
from pipeline.loading.collate import collate, collate_examples
from pipeline.loading.dynamic_context import DynamicContext
from pipeline.loading.iteration import StepDataset
from pipeline.loading.segments import POSITIONS, Positions
from pipeline.loading.sharding import (
    CONTEXT_ORDERS,
    Block,
    ContextOrder,
    batch_sharding,
    block_of_sharding,
    sharding_of,
    slice_of_process,
)
from pipeline.loading.state import StateKey
from pipeline.loading.transfer import field_specs
from pipeline.planning.bucket import Bucket
from pipeline.planning.identity import fingerprint_of
from pipeline.planning.plan import Plan
from pipeline.planning.planned import PlannedBatch
from pipeline.text.features import Feature, require_known

if TYPE_CHECKING:
    import jax

# Names what a thread does in profiles of JAX.
phase: Any = contextlib.nullcontext
with contextlib.suppress(ImportError):  # programs without JAX use batches, too
    from jax.profiler import TraceAnnotation as phase

# What an argument must be that is examples.
A_CORPUS = "a corpus or a view of one: of text by prepare, of arrays by Corpus.from_arrays"


Transform = Callable[..., Mapping[str, Any]]


class Batches(StepDataset):
    """The batches of a plan, by step: `Batches(corpus, plan)[step]` is a dict of arrays.

    A batch is a `Batch` of NumPy arrays, of the rows of this process.

    Steps count from 0 over all epochs. The length is one epoch; `repeat` gives several epochs, or
    an endless number, each shuffled differently. Iterators have the state of
    `pipeline.loading.state`, and refuse the state of another plan or corpus, also after Grain's
    transformations.

    Args:
        corpus: a corpus, a view of one, pairs, or `Corpora`.
        plan: the plan of its batches.
        sharding: as for `pipeline.load`; this process then builds exactly the rows and columns
            that its devices hold.
        process_index: instead of `sharding`: process `p` of `process_count` `P` builds the rows
            `[p·rows/P, (p+1)·rows/P)`; default 0.
        process_count: the number of processes that share the rows; default 1.
        positions: as for `pipeline.load`.
        transform: as for `pipeline.load`. Unlike functions of a later `map`, a `Loader` and
            `specs` know it. It must accept empty rows. If it takes two arguments, the second is the
            `PlannedBatch`, of the rows of all hosts.
        context_order: the order of the columns of a row whose length `sharding` divides:
            "contiguous" (default), or "zigzag" or "striped", with which the parts of a row cost
            about the same in causal attention. All fields of positions have the same order, and
            `inputs_columns` tells it.
        features: as for `pipeline.load`; no others are read.

    Attributes:
        sharding: the `NamedSharding` of global batches, or the `DynamicContext`; None: they are on
            one device. A pickled copy, such as that of a worker, has none.
        blocks: by bucket, the `Block` of each side that this process builds.
        features: the `Feature`s of the batches by name, in the order of their fields.
        ahead: the `ReadAhead` of caches.
        origin: the `StateKey`: `origin.state(step)` is the data state after `step` batches, and
            `origin.resume(state)` its step, for loops without an iterator.

    Raises:
        TypeError: `features` is not a list of names, or `sharding` is not a sharding.
        ValueError: an argument is not as above, there is no such feature, both `sharding` and
            `process_count` are given, the rows of a bucket do not divide, or the plan is for other
            examples.
    """

    def __init__(
        self,
        corpus: AnyCorpus,
        plan: Plan,
        *,
        sharding: "jax.sharding.Mesh | jax.sharding.NamedSharding | DynamicContext | None" = None,
        process_index: int = 0,
        process_count: int = 1,
        positions: Positions = "continue",
        transform: Transform | None = None,
        context_order: ContextOrder = "contiguous",
        features: Iterable[str] | None = None,
    ):
        require_type("corpus", corpus, "fingerprint", A_CORPUS)
        require_type("plan", plan, Plan, "a pipeline.Plan, as Plan(corpus, buckets)")
        process_count = require_whole("process_count", process_count, 1)
        process_index = require_whole("process_index", process_index, 0)
        if len(corpus) != plan.num_examples:
            raise InvalidValue(
                f"the corpus has {len(corpus):,} examples and the plan is for "
                f"{plan.num_examples:,}; make the plan from corpus.lengths"
            )
        if (planned := plan.buckets[0].names) != corpus.side_names:
            raise InvalidValue(
                f"the plan has the sides {', '.join(planned)}, and the corpus has "
                f"{', '.join(corpus.side_names)}; make the plan from this corpus"
            )
        if len({*plan.examples_per_stage}) > 1 and not isinstance(corpus, Corpora):
            raise InvalidValue(
                f"the plan begins with {plan.examples_per_stage[0]:,} examples, and others join "
                "later; give Corpora({'first': corpus, 'new': …}), so that a state can tell them "
                "apart"
            )
        require_one_of("positions", positions, POSITIONS)
        require_one_of("context_order", context_order, CONTEXT_ORDERS)
        if corpus.trees is not None and context_order != "contiguous":
            raise InvalidValue(
                f"context_order is {context_order!r}, but the corpus has groups, which need their "
                "columns in order; use 'contiguous'"
            )
        self.features = _choose_features(corpus, features)
        of_examples = [name for name, feature in self.features.items() if feature.per_example]
        cuts = any(stage.options.cuts for stage in plan.stages)
        if cuts and (uncut := [name for name in of_examples if name in corpus.features]):
            raise InvalidValue(
                f"packing is 'fill', which cuts examples, but {uncut[0]!r} is a feature of whole "
                "examples; plan with packing='best_fit', or omit it from features="
            )
        require_whole_sides(corpus, plan, self.features)
        if sharding is not None and process_count != 1:
            raise InvalidValue(
                "both sharding and process_count say which rows to build; give one of them"
            )
        super().__init__(StateKey(plan, corpus, positions))
        self.corpus = corpus
        self.positions: Positions = positions
        self._function = transform
        if transform is not None and not callable(transform):
            raise InvalidType(f"transform is {transform!r:.80}; it must be a function of a batch")
        self._arguments = _count_arguments(transform)
        self._epochs: int | None = 1
        self._planned = False
        self.sharding = None if sharding is None else batch_sharding(sharding)
        self._process, self._order = (process_index, process_count), context_order
        self._set_plan(plan)

    def _set_plan(self, plan: Plan) -> None:
        """Takes the buckets of a plan, with what this process builds of them."""
        self.plan, corpus = plan, self.corpus
        # The columns of features of examples, and of continuations.
        self._room: dict[str, dict[Bucket, int]] = {}
        least = max([stage.options.max_segments or 1 for stage in plan.stages], default=1)
        kinds = {feature.of for feature in self.features.values()}
        if "example" in kinds:
            most = plan.most_segments().items()
            self._room["example"] = {bucket: max(count, least) for bucket, count in most}
        if "continuation" in kinds:
            of_group = 1 if corpus.trees is None else int(corpus.trees[:, 1].max())
            most = plan.most_continuations().items()
            self._room["continuation"] = {b: max(count, least * of_group) for b, count in most}
        self.blocks: dict[Bucket, tuple[Block, ...]] = {
            bucket: tuple(
                slice_of_process(side.shape, *self._process)
                if self.sharding is None
                else block_of_sharding(
                    sharding_of(self.sharding, bucket.rows), side.shape, self._order
                )
                for side in bucket.sides
            )
            for bucket in plan.buckets
        }
        rows = {bucket: blocks[0].rows for bucket, blocks in self.blocks.items()}
        self.ahead = ReadAhead(corpus, plan, rows)
        firsts = {
            Fraction(int(block.rows[0]), bucket.rows) for bucket, (block, *_) in self.blocks.items()
        }
        self.share = int(firsts.pop() * (1 << 32)) if len(firsts) == 1 else None

    def __repr__(self) -> str:
        buckets = ", ".join(map(str, self.plan.buckets))
        total = "endless" if self.endless else f"{len(self):,} in all"
        # Grain's DataLoader refuses a state whose source is printed in another way.
        origin = self.plan.fingerprint, self.corpus.fingerprint, self.positions
        return (
            f"Batches({len(self.corpus):,} examples, buckets {buckets}, "
            f"{self.plan.num_batches():,} batches an epoch, {total}, "
            f"fingerprint {fingerprint_of(origin)})"
        )

    __str__ = __repr__

    @property
    def endless(self) -> bool:
        """Whether they have no end."""
        return self._epochs is None

    def __len__(self) -> int:
        return sys.maxsize if self._epochs is None else self.plan.first_step(self._epochs)

    @overload
    def __getitem__(self, step: slice) -> grain.MapDataset[Batch[np.ndarray]]: ...

    @overload
    def __getitem__(self, step: SupportsIndex) -> Batch[np.ndarray]: ...

    def __getitem__(self, step: Any) -> Any:
        return super().__getitem__(step)

    def _make(self, step: Any) -> Any:
        with phase("plan"):
            planned = self.plan.batch(step)
        self.ahead.begin(operator.index(step), self.plan)
        batch = self._build(planned)
        return (planned, batch) if self._planned else batch

    def with_origin(self, origin: StateKey) -> "Batches":
        """The same batches under another plan of the corpus, that of `origin`."""
        batches = self._copy(origin=origin)
        batches._set_plan(origin.plan)
        return batches

    @property
    def processes(self) -> list[int]:
        """The processes of JAX that share the batches, as `sharding` says; without it, none."""
        if self.sharding is None:
            return []
        mesh: Any = self.sharding.mesh
        return sorted({device.process_index for device in mesh.devices.flat})

    def with_plans(self) -> "Batches":
        """The same batches, each with its plan: `(PlannedBatch, batch)`."""
        return self._copy(_planned=True)

    def _copy(self, **changes: Any) -> "Batches":
        batches: Any = object.__new__(Batches)
        batches.__dict__.update(self.__dict__, **changes)
        return batches

    def note_fitted(self, fitted: dict[str, Any] | None) -> "Batches":
        """The same batches, whose states tell how `load` chose the shapes."""
        return self._copy(origin=self.origin._replace(fitted=fitted))

    __copy__ = _copy  # keeps `sharding`, which a pickled copy does not have

    def __deepcopy__(self, memo: object) -> "Batches":
        return self._copy()

    def __getstate__(self) -> dict[str, Any]:
        # Devices cannot be pickled. Workers have the blocks of this process, and need no more.
        return {name: v for name, v in vars(self).items() if name != "sharding" or v is None}

    @property
    def specs(self) -> "dict[Bucket, dict[str, jax.ShapeDtypeStruct]]":
        """See `Loader.specs`; without a `sharding`, batches are on the first local device."""
        sharding = batch_sharding(self.sharding)
        return {
            bucket: field_specs(fields, sharding_of(sharding, bucket.rows), bucket, self.features)
            for bucket, fields in self._empty_batches().items()
        }

    def empty(self, bucket: Bucket) -> Mapping[str, np.ndarray]:
        """A batch of only padding, with the fields, shapes and dtypes of this process's batches."""
        return self._build(PlannedBatch(bucket, np.zeros((0, 3 + len(bucket.lengths)), np.int64)))

    def _empty_batches(self) -> dict[Bucket, Mapping[str, np.ndarray]]:
        """An empty batch of each bucket that the plan uses."""
        used = self.plan.batches_per_bucket.items()
        return {bucket: self.empty(bucket) for bucket, number in used if number}

    @property
    def _element_spec(self) -> dict[Bucket, dict[str, grain.experimental.ShapeDtypeStruct]]:
        spec = grain.experimental.ShapeDtypeStruct
        return {
            bucket: {name: spec(field.shape, field.dtype) for name, field in fields.items()}
            for bucket, fields in self._empty_batches().items()
        }

    def _build(self, planned: PlannedBatch) -> Mapping[str, Any]:
        with phase("collate"):
            batch = self._collate(planned)
        if self._function is None:
            return batch
        with phase("transform"):
            return self._transform(batch, planned)

    def _transform(self, *batch_and_plan: Any) -> Mapping[str, Any]:
        fields: Any = self._function(*batch_and_plan[: self._arguments])  # type: ignore[misc]
        if not isinstance(fields, Mapping):
            raise InvalidType(
                f"transform returned a {type(fields).__name__}; it must return a dict of arrays"
            )
        # They may be its own scratch arrays, into which it writes the next batch while this one
        # waits, or while a device reads it.
        return {
            name: field.copy() if isinstance(field, np.ndarray) else field
            for name, field in fields.items()
        }

    def _collate(self, planned: PlannedBatch) -> dict[str, np.ndarray]:
        blocks, features = self.blocks[planned.bucket], self.features.items()
        of_positions = [name for name, feature in features if not feature.per_example]
        batch = collate(self.corpus, planned, blocks, self.positions, of_positions)
        if room := {of: columns[planned.bucket] for of, columns in self._room.items()}:
            of_examples = {name: feature for name, feature in features if feature.per_example}
            batch |= collate_examples(self.corpus, planned, blocks[0].rows, room, of_examples)
        return batch | {name: batch.pop(name) for name in self.features}  # features come last

    def repeat(self, num_epochs: int | None = None, **options: Any) -> "Batches":
        """The batches of `num_epochs` epochs; None: endless."""
        if num_epochs is not None:
            require_whole("num_epochs", num_epochs, 1)
        if options or self._epochs != 1:
            raise InvalidValue(
                f"repeat(num_epochs={num_epochs}, {options}): the batches are repeated "
                f"{self._epochs} times already; call repeat once, without other options"
            )
        return self._copy(_epochs=num_epochs)


def _choose_features(corpus: AnyCorpus, names: Iterable[str] | None) -> dict[str, Feature]:
    """The features with these names; None: all of the corpus but keys."""
    if names is None:
        return {name: feature for name, feature in corpus.features.items() if not feature.key}
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise InvalidType(f"features is {names!r}; give a list of names, or () for none")
    names = list(names)
    of_segments = [EXAMPLE_ID, *(f"{side}{OFFSETS}" for side in corpus.side_names)]
    schema = Feature("example", dtype=np.int32)
    schemas = {**corpus.features, **dict.fromkeys(of_segments, schema)}
    require_known(names, schemas)
    last = np.array([len(corpus) - 1] * bool(len(corpus)), np.int64)
    most = int(corpus.find_unsplit(last)[0].max(initial=-1)) + 1
    if EXAMPLE_ID in names and most > np.iinfo(np.int32).max:
        raise InvalidValue(
            f"the corpus has {most:,} examples, too many for {EXAMPLE_ID}, which is int32; "
            "omit it from features="
        )
    return {name: schemas[name] for name in names}


def require_whole_sides(corpus: AnyCorpus, plan: Plan, features: Mapping[str, Feature]) -> None:
    """Refuses plans that cut sides that pointers point to."""
    for name, feature in features.items():
        if feature.to is None:
            continue
        side = corpus.side_names.index(feature.to)
        longest = np.reshape(corpus.lengths, (len(corpus), -1))[:, side].max(initial=0)
        for stage in plan.stages:
            options = stage.options
            over = longest > options.buckets[-1].lengths[side]
            if options.cuts or (over and options.overflow in ("split", "truncate")):
                which = "packing" if options.cuts else "overflow"
                raise InvalidValue(
                    f"{which} is {getattr(options, which)!r}, but {name} points to {feature.to}, "
                    f"so {feature.to} cannot be cut; give overflow='drop' and packing='best_fit', "
                    "or longer buckets"
                )


def _count_arguments(transform: Any) -> int:
    """1 for a function that can be called with one positional argument, otherwise 2."""
    with contextlib.suppress(ValueError):  # some compiled functions have no signature
        try:
            inspect.signature(transform).bind(None)
        except TypeError:
            return 2
    return 1
