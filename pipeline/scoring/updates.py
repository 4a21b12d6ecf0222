"""Updates: samples of a policy, packed into batches, and their results unpacked again."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from pipeline.corpus.interface import AnyCorpus
from pipeline.errors import InvalidValue, counted, name_some, require_one_of, require_type
from pipeline.fields.batch import Batch
from pipeline.loading.batches import Batches
from pipeline.loading.dynamic_context import DynamicContext
from pipeline.loading.sharding import batch_sharding, sharding_of
from pipeline.loading.transfer import field_specs, place
from pipeline.planning.bucket import Bucket
from pipeline.planning.options import BySide
from pipeline.planning.pieces import Overflow
from pipeline.planning.planned import PlannedBatch
from pipeline.scoring.update_plan import plan_update
from pipeline.scoring.values import (
    REDUCE,
    SINGLE,
    Records,
    continuations_of,
    kinds_of,
    make_value,
)
from pipeline.steps import hosts


def pack(
    examples: AnyCorpus,
    buckets: Iterable[Bucket],
    *,
    sharding: Mesh | NamedSharding | DynamicContext | None = None,
    overflow: Overflow = "error",
    align: BySide = 1,
    cost: BySide = 1,
    max_segments: int | None = None,
    features: Iterable[str] | None = None,
) -> "Packed":
    """The batches of one pass through some examples, in shapes that are compiled already.

    An update of reinforcement learning has new lengths each time. Its rows are packed by best fit,
    and the rows of all its batches are sorted by cost and dealt, so that the devices of a step
    finish together. The same examples always make the same batches.

    >>> for planned, batch in pack(examples, buckets):  # doctest: +SKIP
    ...     results.append((planned, step(params, batch)))

    Args:
        examples: `pipeline.Examples`, or any corpus, the same on all hosts.
        buckets: the shapes, ascending by length. Of several buckets of one length, those with fewer
            rows are tails: they hold its last rows, so that few rows are empty. With
            `Bucket(32, 4096)` and `Bucket(8, 4096)`, 45 rows are a batch of 32 rows and two of 8.
        sharding: the devices that share a batch, as for `load`; None: the first local device.
        overflow: what to do with an example longer than every bucket, as for `Plan`.
        align: as for `Plan`.
        cost: as for `Plan`.
        max_segments: the most segments in a row. Features of examples need it, since it decides
            their shape. Default None: no limit.
        features: names of features to read, as for `load`; None: all.

    Returns:
        An iterable over the plan of each batch and the batch, a dict of global jax.Arrays. With its
        `specs`, `pipeline.steps.Compiled` compiles a step for every bucket at the first update,
        also for tails that only later updates use.

    Raises:
        ValueError: an example has nothing to train on, or is too long; no position carries loss; or
            hosts have different examples.
    """
    require_type("examples", examples, AnyCorpus, "a corpus; make pipeline.Examples of arrays")
    empty = np.flatnonzero(np.reshape(examples.lengths, (len(examples), -1)).max(axis=1) == 0)
    if len(empty):
        raise InvalidValue(
            f"{counted(len(empty), 'example')} of {len(examples):,} have length 0, and so nothing "
            f"to train on: {name_some(empty.tolist())}; remove them"
        )
    if examples.num_learnt == 0:
        raise InvalidValue(
            f"none of the {counted(len(examples), 'example')} has a position that carries loss; "
            "give an update with weights that are not all 0"
        )
    options: dict[str, Any] = {"overflow": overflow, "max_segments": max_segments, "align": align}
    options["cost"] = cost
    plan = plan_update(examples.covering(), buckets, **options)
    batches = Batches(examples, plan, sharding=sharding, features=features)
    of_examples = [name for name, each in batches.features.items() if each.per_example]
    if of_examples and max_segments is None:
        raise InvalidValue(
            f"{name_some(of_examples)} have a column for each segment of a row, whose number "
            "differs between updates; give max_segments= to fix the shape, or features= without "
            "them"
        )
    if jax.process_count() > 1:  # the digest of all tokens takes longer than their plan
        hosts.require_agreement({"examples": {"of": examples.identity, "plan": plan.identity}})
    return Packed(batches)


class Packed:
    """The batches of an update; each iterator begins at the first. `plan` is their plan."""

    def __init__(self, batches: Batches):
        self.plan, self._batches = batches.plan, batches
        self._sharding = batch_sharding(batches.sharding)
        self._commit = batches.sharding is not None

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[tuple[PlannedBatch, Batch]]:
        sharding, features = self._sharding, self._batches.features
        ahead: Any = self._batches.with_plans()
        for step in range(len(self)):
            planned, batch = ahead[step]
            on = sharding_of(sharding, planned.bucket.rows)
            specs = field_specs(batch, on, planned.bucket, features)
            fields: Any = place(batch, specs, commit=self._commit)
            yield planned, fields

    @property
    def specs(self) -> dict[Bucket, dict[str, jax.ShapeDtypeStruct]]:
        """For each bucket, used or not, a `jax.ShapeDtypeStruct` for each field of a batch."""
        empty, features = self._batches.empty, self._batches.features
        shardings = {b: sharding_of(self._sharding, b.rows) for b in self.plan.buckets}
        return {b: field_specs(empty(b), on, b, features) for b, on in shardings.items()}


def unpack(
    results: Iterable[tuple[PlannedBatch, Any]],
    examples: AnyCorpus,
    *,
    per: str | Mapping[str, str],
    combine: str | None = None,
) -> Any:
    """The results of steps, as a list with an array for each example, in their order.

    Pieces of a split example are joined. An example that is in no batch has an empty array, and one
    whose last pieces are in no batch a shorter one.

    >>> logprobs = unpack(results, examples, per="position")  # doctest: +SKIP
    >>> [each.shape for each in logprobs] == [(n,) for n in examples.lengths]  # doctest: +SKIP
    True

    Args:
        results: the plan of each batch, and the step's result for it: an array of the whole batch,
            or a dict of arrays. On several hosts, each host has the whole arrays.
        examples: the argument of `pack`, or the corpus of a plan.
        per: as for `score`.
        combine: "sum" or "mean" (weighted by positions) over the records of an example that is
            split into several segments. None: per segment and row, such an example is refused.

    Returns:
        A list of NumPy arrays, `[positions, …]` per position, `[continuations, …]` per
        continuation, and otherwise one record; or a dict of such lists, if steps returned dicts.

    Raises:
        ValueError: an array is not as above, or results have a piece of an example twice, or a
            later piece without those before it.
    """
    if combine is not None:
        require_one_of("combine", combine, REDUCE)
    if not (pairs := list(results)):
        raise InvalidValue("results are empty; give the plan and the values of each batch")
    values = [each if isinstance(each, Mapping) else {"values": each} for _, each in pairs]
    kinds = kinds_of(values[0], per)
    found = {}
    for number, each in enumerate(values):
        if each.keys() != kinds.keys():
            raise InvalidValue(
                f"result {number:,} has {', '.join(each)}, and the first one {', '.join(kinds)}; "
                "give the same values for each batch"
            )
    for name, kind in kinds.items():
        arrays = [_as_whole(name, each[name]) for each in values]
        batches = [(planned, array) for (planned, _), array in zip(pairs, arrays, strict=True)]
        found[name] = _unpack(name, batches, examples, kind, combine)
    return found if isinstance(pairs[0][1], Mapping) else found["values"]


def _unpack(
    name: str,
    batches: Sequence[tuple[PlannedBatch, np.ndarray]],
    examples: AnyCorpus,
    per: str,
    combine: str | None,
) -> list[np.ndarray]:
    """One of the values as a list of arrays, one for each of the examples."""
    count, continuations = len(examples), continuations_of(name, per, examples.trees)
    pieces = np.concatenate([batch.segments for batch, _ in batches])
    _require_whole(pieces, count)
    arrays = []
    for batch, array in batches:
        weights = None if continuations is None else continuations[batch.segments[:, 1]]
        most = int(np.bincount(batch.segments[:, 0], weights).max(initial=0))
        arrays.append((batch.bucket, array, most))
    value = make_value(name, per, arrays, combine if per in SINGLE else None, examples)
    positions = np.zeros((count, pieces.shape[1] - 3), np.int64)
    np.add.at(positions, pieces[:, 1], pieces[:, 3:])
    collected = Records(value, positions)
    collected.add(pieces, np.concatenate([value.cut(array, batch) for batch, array in batches]))
    found = collected.read(0, count)
    if value.ragged:
        return np.split(found, np.cumsum(collected.counts)[:-1])
    pieces_of = np.bincount(pieces[:, 1], minlength=count)
    split = np.flatnonzero(pieces_of > 1)
    if len(split) and combine is None:
        raise InvalidValue(
            f"{name} has one record a {per}, and {counted(len(split), 'example')} are split into "
            f"several segments, first {split[0]}; give combine='sum' or 'mean', or use longer "
            "buckets"
        )
    return [found[at] if number else found[:0] for at, number in enumerate(pieces_of)]


def _as_whole(name: str, given: Any) -> np.ndarray:
    """The values of a whole batch as a NumPy array."""
    if not (getattr(given, "is_fully_addressable", True) or given.is_fully_replicated):
        raise InvalidValue(
            f"{name} is sharded over hosts as {given.sharding}; return it whole on every host, "
            "with out_shardings=NamedSharding(mesh, PartitionSpec())"
        )
    return np.asarray(given)


def _require_whole(pieces: np.ndarray, count: int) -> None:
    """Refuses segments of a plan that leave gaps in examples, or overlap."""
    pieces = pieces[np.lexsort((pieces[:, 2], pieces[:, 1]))]
    example, start, size = pieces[:, 1], pieces[:, 2], pieces[:, 3]
    if len(example) and example[-1] >= count:
        raise InvalidValue(
            f"results are for example {example[-1]:,}, and there are {count:,}; give the examples "
            "that were packed"
        )
    new = np.diff(example, prepend=-1) != 0
    due = np.where(new, 0, np.roll(start + size, 1))
    if (wrong := np.flatnonzero(start != due)).size:
        at = wrong[0]
        raise InvalidValue(
            f"results of example {example[at]} continue at position {start[at]}, but position "
            f"{due[at]} is next; give each batch of a pass once"
        )
