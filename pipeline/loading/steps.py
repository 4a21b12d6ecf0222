"""Random access by step: Grain's transformations of batches, which remember the plan.

Of a `MapDataset`, Grain's iterators keep an index alone. So a transformation of a `StepDataset` is
one again, and `to_iter_dataset` knows what the steps belong to.
"""

from typing import Any

import grain

from pipeline.errors import InvalidValue, require_whole
from pipeline.loading.iteration import StateKey, Steps
from pipeline.planning.plan import Plan


class StepDataset(grain.MapDataset):
    """A Grain data set whose transformations, and whose iterators, keep the state of a plan.

    Attributes:
        origin: what the state of an iterator belongs to.
        read_options: how `to_iter_dataset` reads ahead by default.
    """

    origin: StateKey
    read_options: grain.ReadOptions

    @property
    def _inside(self) -> grain.MapDataset:
        """The data set that Grain's transformations are applied to."""
        return self

    def map(self, transform: Any) -> "StepDataset":
        """See `grain.MapDataset.map`."""
        return self._transform("map", transform)

    def map_with_index(self, transform: Any) -> "StepDataset":
        """See `grain.MapDataset.map_with_index`; the index is the step."""
        return self._transform("map_with_index", transform)

    def random_map(self, transform: Any, *, seed: int | None = None) -> "StepDataset":
        """See `grain.MapDataset.random_map`."""
        return self._transform("random_map", transform, seed=seed)

    def filter(self, transform: Any) -> "StepDataset":
        """See `grain.MapDataset.filter`; a step that is filtered out still counts as a step."""
        return self._transform("filter", transform)

    def seed(self, seed: int) -> "StepDataset":
        """See `grain.MapDataset.seed`."""
        return self._transform("seed", seed)

    def slice(self, sl: slice) -> "StepDataset":
        """See `grain.MapDataset.slice`."""
        return self._transform("slice", sl).reordered(f"slice({sl.start}, {sl.stop}, {sl.step})")

    def shuffle(self, seed: int | None = None) -> "StepDataset":
        """See `grain.MapDataset.shuffle`; a plan is shuffled without it."""
        steps = self._transform("shuffle", seed)
        seed = steps._inside._default_seed if seed is None else seed
        return steps.reordered(f"shuffle({seed})")

    def batch(
        self, batch_size: int, *, drop_remainder: bool = False, batch_fn: Any = None
    ) -> "StepDataset":
        """See `grain.MapDataset.batch`: stacks batches, which must then have one shape.

        Raises:
            ValueError: the plan has batches of several shapes, and there is no `batch_fn`.
        """
        shapes = sum(map(bool, self.origin.plan.batches_per_bucket.values()))
        if shapes > 1 and batch_fn is None:
            raise InvalidValue(
                f"the plan has batches of {shapes} shapes, which batch({batch_size}) cannot stack: "
                "give one bucket, or a batch_fn. (ElasticIterator stacks too; iterators of these "
                "batches go on with any number of hosts without it)"
            )
        options = {"drop_remainder": drop_remainder, "batch_fn": batch_fn}
        steps = self._transform("batch", batch_size, **options)
        return steps.reordered(f"batch({batch_size}, drop_remainder={drop_remainder})")

    def to_iter_dataset(
        self, read_options: grain.ReadOptions | None = None, *, allow_nones: bool = False
    ) -> "Steps":
        """An iterable data set whose iterators have the data state of this plan."""
        return Steps(self._inside, self.origin, read_options or self.read_options, allow_nones)

    def _transform(self, name: str, *args: Any, **options: Any) -> "TransformedSteps":
        inside = getattr(grain.MapDataset, name)(self._inside, *args, **options)
        return TransformedSteps(inside, self.origin, self.read_options)


class TransformedSteps(StepDataset):
    """What a transformation of Grain made of a `StepDataset`."""

    def __init__(self, inside: grain.MapDataset, origin: StateKey, read_options: grain.ReadOptions):
        super().__init__(inside)
        self.origin, self.read_options = origin, read_options

    @property
    def _inside(self) -> grain.MapDataset:
        return self._parent

    def __len__(self) -> int:
        return len(self._parent)

    def __getitem__(self, index: Any) -> Any:
        return self.slice(index) if isinstance(index, slice) else self._parent[index]

    def __str__(self) -> str:
        return f"Steps({self._parent})"

    @property
    def _element_spec(self) -> Any:
        return grain.experimental.get_element_spec(self._parent)

    def repeat(
        self, num_epochs: int | None = None, *, reseed_each_epoch: bool = True
    ) -> StepDataset:
        """See `grain.MapDataset.repeat`."""
        check_repeat(self.origin.plan, num_epochs)
        if self.origin.plan.finite:
            return self
        steps = self._transform("repeat", num_epochs, reseed_each_epoch=reseed_each_epoch)
        return steps if reseed_each_epoch else steps.reordered("reseed_each_epoch=False")

    def reordered(self, order: str) -> "TransformedSteps":
        """The same, of which the index is no step of the plan, because of a transformation."""
        self.origin = self.origin._replace(order=(*self.origin.order, order))
        return self


def check_repeat(plan: Plan, num_epochs: int | None) -> None:
    """Raises a ValueError if batches of `plan` cannot be repeated `num_epochs` times."""
    if num_epochs is not None:
        require_whole("num_epochs", num_epochs, 1)
    if plan.finite and num_epochs not in (None, 1):
        raise InvalidValue(
            f"num_epochs is {num_epochs}, and this plan ends once and for all; give None or "
            "1, or ending='repeat' to go on"
        )
