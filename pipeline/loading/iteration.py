"""Iteration over steps: a Grain data set whose state is the step, and what the steps belong to.

Grain composes the state of an iterator from those of its parts, one for each worker. Here all
transformations are functions of the step, so the state is the same for any of them, and for any
number of workers of `mp_prefetch`.
"""

import copy
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import grain
from absl import flags

from pipeline.corpus.interface import AnyCorpus
from pipeline.errors import InvalidState, InvalidValue
from pipeline.loading.data_state import check_data_state, data_state
from pipeline.planning.plan import Plan

# Elements are made in the thread that asks for them.
AT_ONCE = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
NO_RUNS = (
    "workers take turns at the steps of a plan and cannot have runs of them; use "
    "mp_prefetch(…, sequential_slice=False)"
)


class StateKey(NamedTuple):
    """What a state belongs to.

    Attributes:
        plan, corpus, positions: the arguments of `data_state` after the step.
        order: transformations after which a step is no longer one of the plan, such as slices.
    """

    plan: Plan
    corpus: AnyCorpus
    positions: str
    order: tuple[str, ...] = ()

    def state(self, step: int) -> dict[str, Any]:
        """The data state of `step`; with an `order`, of the plan as a whole."""
        if not self.order:
            return data_state(step, *self[:3])
        whole = data_state(sys.maxsize, *self[:3])
        return {**whole, "step": step, "order": [*self.order]}

    def step(self, state: Any) -> int:
        """The step of `state`; a ValueError if it belongs to something else."""
        step = check_data_state(state, *self[:3])
        if (order := state.get("order", [])) != [*self.order]:
            raise InvalidValue(
                f"the state of step {step:,} counts steps after {order or 'no slice or the like'}, "
                f"and is restored after {[*self.order] or 'none'}; transform the batches as when "
                "it was saved"
            )
        if self.order:
            check_data_state({**state, "step": sys.maxsize}, *self[:3])
        return step


class Steps(grain.IterDataset):
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
        # Grain looks for this parent where it measures elements; it is not iterated over.
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

    def map(self, transform: Any) -> "Steps":
        """See `grain.IterDataset.map`."""
        return self._then("map", transform)

    def map_with_index(self, transform: Any) -> "Steps":
        """See `grain.IterDataset.map_with_index`; the index is the step."""
        return self._then("map_with_index", transform)

    def random_map(self, transform: Any, *, seed: int | None = None) -> "Steps":
        """See `grain.IterDataset.random_map`; numbers are those of the step."""
        return self._then("random_map", transform, seed=seed)

    def filter(self, transform: Any) -> grain.IterDataset:
        """See `grain.IterDataset.filter`."""
        # By step, it would leave None for what it filters out.
        return super().filter(transform) if self._allow_nones else self._then("filter", transform)

    def seed(self, seed: int) -> "Steps":
        """See `grain.IterDataset.seed`."""
        return self._then("seed", seed)

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
            raise InvalidValue("mp_prefetch is there already; workers cannot have workers")
        options = options or grain.MultiprocessingOptions(num_workers=10)
        if not options.num_workers:
            return self
        inside = self._transform(self._inside)
        steps = Steps(inside, self._origin, self._read_options, self._allow_nones)
        steps._workers = options, worker_init_fn
        steps._start, steps._stride = self._start, self._stride
        return steps

    def set_slice(self, sl: slice, sequential_slice: bool = False) -> None:
        """Keeps the steps of one worker, where Grain divides the data set that this is part of."""
        if sequential_slice:
            raise InvalidValue(NO_RUNS)
        start, _, stride = sl.indices(len(self._inside))
        self._start, self._stride = self._start + start * self._stride, stride * self._stride

    def __iter__(self) -> grain.DatasetIterator:
        ahead, read_options = None, self._read_options
        inside = self._inside
        if self._workers or (self._transformations and read_options.num_threads):
            inside = ahead = _ReadAhead(self._inside, self._read, self._stride)
            read_options = AT_ONCE
        steps = self._transform(inside)
        if (self._start, self._stride) != (0, 1):
            steps = grain.MapDataset.slice(steps, slice(self._start, None, self._stride))
        elements = grain.MapDataset.to_iter_dataset(
            steps, read_options, allow_nones=self._allow_nones
        )
        return _StepIterator(iter(elements), self, ahead)

    def _read(self, steps: grain.MapDataset) -> grain.IterDataset:
        """One element for each of some steps, made in threads or workers."""
        elements = grain.MapDataset.to_iter_dataset(steps, self._read_options, allow_nones=True)
        return elements.mp_prefetch(*self._workers) if self._workers else elements

    def _then(self, name: str, *args: Any, **options: Any) -> "Steps":
        steps = copy.copy(self)
        steps._transformations = (*self._transformations, (name, args, options))
        steps._transform(self._inside)  # refuses wrong arguments now
        return steps

    def _transform(self, inside: grain.MapDataset) -> grain.MapDataset:
        if not self._transformations:
            return inside
        # Grain derives seeds from the depth, which must not depend on who reads ahead.
        if not isinstance(inside, _ReadAhead):
            inside = _ReadAhead(inside)
        for name, args, options in self._transformations:
            inside = getattr(grain.MapDataset, name)(inside, *args, **options)
        return inside


class _ReadAhead(grain.MapDataset):
    """Elements of its parent, made ahead from any step on, while steps come in order.

    Args:
        parent: the elements by step.
        read: makes an iterable of elements of steps; None: nothing is made ahead.
        stride: the distance between two steps that come in order.
    """

    def __init__(
        self,
        parent: grain.MapDataset,
        read: Callable[[grain.MapDataset], grain.IterDataset] | None = None,
        stride: int = 1,
    ):
        super().__init__(parent)
        self._read, self._stride = read, stride
        self._iterator: grain.DatasetIterator | None = None
        self._next: int | None = None  # the step whose element the iterator gives next

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
                "mp_prefetch reads Grain's flags, which this program has not parsed: run it with "
                "absl.app.run(main), or call absl.flags.FLAGS.mark_as_parsed() first"
            ) from error
        except Exception:
            self.close()  # a second try begins with this step
            raise
        self._next = step + self._stride
        return element

    def start(self, step: int) -> grain.DatasetIterator:
        """Begins to make elements from `step` on, unless that is done."""
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

    def __init__(self, parent: grain.DatasetIterator, steps: Steps, ahead: _ReadAhead | None):
        super().__init__(parent)
        self._origin, self._ahead, self._length = steps._origin, ahead, len(steps._inside)
        self._start, self._stride = steps._start, steps._stride

    def __next__(self) -> Any:
        try:
            return next(self._parent)
        except StopIteration:
            raise
        except Exception:
            # Grain has dropped the element without counting its step: make it anew.
            self._set_next_index(self._get_next_index())
            raise

    def get_state(self) -> dict[str, Any]:
        index = self._get_next_index()
        # Steps before this one are done, here and in the other workers.
        step = self._start + (index - 1) * self._stride + 1 if index else 0
        return self._origin.state(step)

    def set_state(self, state: dict[str, Any]) -> None:
        step = self._origin.step(state)
        if step > self._length:
            raise InvalidValue(
                f"the state is of step {step:,}, and these batches end after {self._length:,}; "
                "give more epochs, repeat(num_epochs)"
            )
        self._set_next_index(max(0, -(-(step - self._start) // self._stride)))

    def _get_next_index(self) -> int:
        return grain.experimental.get_next_index(self._parent)

    def _set_next_index(self, index: int) -> None:
        grain.experimental.set_next_index(self._parent, index)

    def start_prefetch(self) -> None:
        super().start_prefetch()
        if self._ahead is not None:
            step = self._start + self._get_next_index() * self._stride
            self._ahead.start(step).start_prefetch()

    def close(self) -> None:
        super().close()
        if self._ahead is not None:
            self._ahead.close()
