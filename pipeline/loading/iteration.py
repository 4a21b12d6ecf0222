"""Grain's data sets and iterators over the steps of a plan, whose state is the step.

Grain composes the state of an iterator from those of its parts, one for each worker, and iterators
of a `MapDataset` keep only an index. Here all transformations are functions of the step, so the
state is the same for any of them, and for any number of workers of `mp_prefetch`. A transformation
of a `StepDataset` is a `StepDataset`, and knows the plan of its steps.
"""

import copy
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import grain
from absl import flags

from pipeline.errors import InvalidState, InvalidValue, OutOfRange, require_whole
from pipeline.loading.state import StateKey
from pipeline.planning.plan import Plan

Made = TypeVar("Made")

# Elements are made in the thread that requests them.
AT_ONCE = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
NO_RUNS = (
    "sequential_slice is True, but workers take the steps of a plan in turns; use "
    "mp_prefetch(…, sequential_slice=False)"
)


class Ended(OutOfRange):
    """A step after the last epoch of a corpus that grows, whose end was not known before."""


class _Transformations(Generic[Made]):
    """The transformations of data sets of steps, by index and in order."""

    def _apply(self, name: str, *args: Any, **options: Any) -> Made:
        """The data set after Grain's transformation `name`."""
        raise NotImplementedError

    def map(self, transform: Any) -> Made:
        """See `grain.MapDataset.map`."""
        return self._apply("map", transform)

    def map_with_index(self, transform: Any) -> Made:
        """See `grain.MapDataset.map_with_index`; the index is the step."""
        return self._apply("map_with_index", transform)

    def random_map(self, transform: Any, *, seed: int | None = None) -> Made:
        """See `grain.MapDataset.random_map`; random numbers depend on the step alone."""
        return self._apply("random_map", transform, seed=seed)

    def filter(self, transform: Any) -> Made:
        """See `grain.MapDataset.filter`; a step that is filtered out still counts as a step."""
        return self._apply("filter", transform)

    def seed(self, seed: int) -> Made:
        """See `grain.MapDataset.seed`."""
        return self._apply("seed", seed)


class StepDataset(_Transformations["StepDataset"], grain.MapDataset):
    """A Grain data set whose transformations, and whose iterators, keep the state of a plan.

    Args:
        origin: the key of the states of iterators.
        read_options: how `to_iter_dataset` reads ahead by default.
        inside: the result of Grain's transformations; none in a subclass with its own elements.
    """

    def __init__(
        self, origin: StateKey, read_options: grain.ReadOptions, *inside: grain.MapDataset
    ):
        super().__init__(*inside)
        self.origin, self.read_options = origin, read_options

    @property
    def _inside(self) -> grain.MapDataset:
        """The data set that Grain's transformations are applied to."""
        return self._parent if self._parents else self

    def __len__(self) -> int:
        return len(self._parent)

    def __getitem__(self, index: Any) -> Any:
        return self.slice(index) if isinstance(index, slice) else self._parent[index]

    def __str__(self) -> str:
        return f"Steps({self._parent})"

    @property
    def _element_spec(self) -> Any:
        return grain.experimental.get_element_spec(self._parent)

    def slice(self, sl: slice) -> "StepDataset":
        """See `grain.MapDataset.slice`."""
        return self._apply("slice", sl)._reorder(f"slice({sl.start}, {sl.stop}, {sl.step})")

    def shuffle(self, seed: int | None = None) -> "StepDataset":
        """See `grain.MapDataset.shuffle`; a plan is shuffled without it."""
        steps = self._apply("shuffle", seed)
        seed = steps._inside._default_seed if seed is None else seed
        return steps._reorder(f"shuffle({seed})")

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
                f"the plan has batches of {shapes} shapes, which batch({batch_size}) cannot stack; "
                "give one bucket, or a batch_fn (iterators of these batches resume on any number "
                "of hosts without ElasticIterator)"
            )
        steps = self._apply("batch", batch_size, drop_remainder=drop_remainder, batch_fn=batch_fn)
        return steps._reorder(f"batch({batch_size}, drop_remainder={drop_remainder})")

    def repeat(
        self, num_epochs: int | None = None, *, reseed_each_epoch: bool = True
    ) -> "StepDataset":
        """See `grain.MapDataset.repeat`."""
        check_repeat(self.origin.plan, num_epochs)
        if self.origin.plan.finite:
            return self
        steps = self._apply("repeat", num_epochs, reseed_each_epoch=reseed_each_epoch)
        return steps if reseed_each_epoch else steps._reorder("reseed_each_epoch=False")

    def to_iter_dataset(
        self, read_options: grain.ReadOptions | None = None, *, allow_nones: bool = False
    ) -> "Steps":
        """An iterable data set whose iterators have the data state of this plan."""
        return Steps(self._inside, self.origin, read_options or self.read_options, allow_nones)

    def _apply(self, name: str, *args: Any, **options: Any) -> "StepDataset":
        inside = getattr(grain.MapDataset, name)(self._inside, *args, **options)
        return StepDataset(self.origin, self.read_options, inside)

    def _reorder(self, order: str) -> "StepDataset":
        """The same data set, whose index is no longer a step of the plan."""
        self.origin = self.origin._replace(order=(*self.origin.order, order))
        return self


def check_repeat(plan: Plan, num_epochs: int | None) -> None:
    """Raises a ValueError if batches of `plan` cannot be repeated `num_epochs` times."""
    if num_epochs is not None:
        require_whole("num_epochs", num_epochs, 1)
    if plan.finite and num_epochs not in (None, 1):
        raise InvalidValue(
            f"num_epochs is {num_epochs}, but this plan has an end; give None or 1, or make the "
            "plan with ending='repeat'"
        )


class Steps(_Transformations["grain.IterDataset"], grain.IterDataset):
    """The elements of a data set of steps, in order; iterators have the data state of the plan.

    Transformations are applied by step, in the thread that iterates, or in the workers of a later
    `mp_prefetch`. So they give the same elements for any number of workers.
    """

    def __init__(
        self,
        inside: grain.MapDataset,
        origin: StateKey,
        read_options: grain.ReadOptions,
        allow_nones: bool,
    ):
        # Grain looks at this parent to measure elements; it is not iterated over.
        super().__init__(
            grain.MapDataset.to_iter_dataset(inside, read_options, allow_nones=allow_nones)
        )
        self._inside, self._origin = inside, origin
        self._read_options, self._allow_nones = read_options, allow_nones
        self._transformations: tuple[tuple[str, tuple, dict], ...] = ()
        self._workers: tuple | None = None  # options and worker_init_fn of mp_prefetch
        self._start, self._stride = 0, 1

    def __str__(self) -> str:
        return f"Steps({self._inside})"

    @property
    def _element_spec(self) -> Any:
        return grain.experimental.get_element_spec(self._transform(self._inside))

    def filter(self, transform: Any) -> grain.IterDataset:
        """See `grain.IterDataset.filter`."""
        # By step, it would leave None for filtered elements.
        if self._allow_nones:
            return grain.IterDataset.filter(self, transform)
        return super().filter(transform)

    def mp_prefetch(
        self,
        options: grain.MultiprocessingOptions | None = None,
        worker_init_fn: Callable[[int, int], None] | None = None,
        sequential_slice: bool = False,
    ) -> "Steps":
        """See `grain.IterDataset.mp_prefetch`; a state resumes with any number of workers."""
        if sequential_slice:
            raise InvalidValue(NO_RUNS)
        if self._workers:
            raise InvalidValue(
                "mp_prefetch is called twice; call it once, since workers cannot nest"
            )
        options = options or grain.MultiprocessingOptions(num_workers=10)
        if not options.num_workers:
            return self
        inside = self._transform(self._inside)
        steps = Steps(inside, self._origin, self._read_options, self._allow_nones)
        steps._workers = options, worker_init_fn
        steps._start, steps._stride = self._start, self._stride
        return steps

    def set_slice(self, sl: slice, sequential_slice: bool = False) -> None:
        """Keeps the steps of one worker, if Grain divides a data set that contains this one."""
        if sequential_slice:
            raise InvalidValue(NO_RUNS)
        start, _, stride = sl.indices(len(self._inside))
        self._start, self._stride = self._start + start * self._stride, stride * self._stride

    def __iter__(self) -> grain.DatasetIterator:
        ahead = _Lookahead(self._inside, self._read, self._stride)
        steps = self._transform(ahead)
        if (self._start, self._stride) != (0, 1):
            steps = grain.MapDataset.slice(steps, slice(self._start, None, self._stride))
        elements = grain.MapDataset.to_iter_dataset(steps, AT_ONCE, allow_nones=self._allow_nones)
        return _StepIterator(iter(elements), self, ahead)

    def _read(self, steps: grain.MapDataset) -> grain.IterDataset:
        """One element for each of some steps, made in threads or workers."""
        elements = grain.MapDataset.to_iter_dataset(steps, self._read_options, allow_nones=True)
        return elements.mp_prefetch(*self._workers) if self._workers else elements

    def _apply(self, name: str, *args: Any, **options: Any) -> "Steps":
        steps = copy.copy(self)
        steps._transformations = (*self._transformations, (name, args, options))
        steps._transform(self._inside)  # refuses wrong arguments now
        return steps

    def _transform(self, inside: grain.MapDataset) -> grain.MapDataset:
        if not self._transformations:
            return inside
        if not isinstance(inside, _Lookahead):  # Grain derives seeds from the depth
            inside = _Lookahead(inside)
        for name, args, options in self._transformations:
            inside = getattr(grain.MapDataset, name)(inside, *args, **options)
        return inside


class _Lookahead(grain.MapDataset):
    """Elements of its parent, made ahead by `read`, if given, for steps `stride` apart."""

    def __init__(
        self,
        parent: grain.MapDataset,
        read: Callable[[grain.MapDataset], grain.IterDataset] | None = None,
        stride: int = 1,
    ):
        super().__init__(parent)
        self._read, self._stride = read, stride
        self._iterator: grain.DatasetIterator | None = None
        self._next = 0  # the step whose element the iterator gives next

    def __len__(self) -> int:
        return len(self._parent)

    def __str__(self) -> str:
        return "ReadAhead"

    @property
    def _element_spec(self) -> Any:
        return grain.experimental.get_element_spec(self._parent)

    def __getitem__(self, step: Any) -> Any:
        if self._read is None:
            return self._parent[step]
        try:
            element = next(self.start(step))
        except flags.UnparsedFlagAccessError as error:
            self.close()
            raise InvalidState(
                "mp_prefetch reads Grain's flags, which this program has not parsed; run it with "
                "absl.app.run(main), or call absl.flags.FLAGS.mark_as_parsed() first"
            ) from error
        except Exception:
            self.close()  # another try begins with this step
            raise
        self._next = step + self._stride
        return element

    def start(self, step: int) -> grain.DatasetIterator:
        """Begins to make elements from `step` on, unless it has begun."""
        assert self._read is not None
        if self._iterator is None or step != self._next:
            self.close()
            steps = grain.MapDataset.slice(self._parent, slice(step, None, self._stride))
            self._iterator, self._next = iter(self._read(steps)), step
        return self._iterator

    def close(self) -> None:
        """Stops threads and workers."""
        if self._iterator is not None:
            self._iterator.close()
        self._iterator = None


class _StepIterator(grain.DatasetIterator):
    """An iterator over some steps of a plan, `start`, `start + stride`, …, with its data state."""

    def __init__(self, parent: grain.DatasetIterator, steps: Steps, ahead: _Lookahead):
        super().__init__(parent)
        self._origin, self._ahead, self._length = steps._origin, ahead, len(steps._inside)
        self._start, self._stride = steps._start, steps._stride

    def __next__(self) -> Any:
        try:
            return next(self._parent)
        except Ended:
            raise StopIteration from None

    def get_state(self) -> dict[str, Any]:
        index = self._get_next_index()
        # Steps before this one are done, here and in the other workers.
        step = self._start + (index - 1) * self._stride + 1 if index else 0
        return self._origin.state(step)

    def set_state(self, state: dict[str, Any]) -> None:
        step = self._origin.step(state)
        if step > self._length:
            raise InvalidValue(
                f"the state is of step {step:,}, but these batches end after {self._length:,}; "
                "give more epochs, repeat(num_epochs)"
            )
        self._set_next_index(max(0, -(-(step - self._start) // self._stride)))

    def _get_next_index(self) -> int:
        return grain.experimental.get_next_index(self._parent)

    def _set_next_index(self, index: int) -> None:
        grain.experimental.set_next_index(self._parent, index)

    def start_prefetch(self) -> None:
        super().start_prefetch()
        step = self._start + self._get_next_index() * self._stride
        self._ahead.start(step).start_prefetch()

    def close(self) -> None:
        super().close()
        self._ahead.close()
