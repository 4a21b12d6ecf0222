"""Grain's data sets and iterators over the steps of a plan, whose state is the step.

Grain's own iterators keep an index, or a state for each worker. Here is one class for each of
Grain's three kinds: a `StepDataset`, by index, gives a `StepIterDataset`, in order, which gives
iterators. Grain's transformations of a `StepDataset` are functions of the step, so the state
is the same for any of them, and for any number of workers of `mp_prefetch`.
"""

import copy
import functools
import operator
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import grain
from absl import flags

from pipeline.errors import InvalidState, InvalidType, InvalidValue, NotInstalled
from pipeline.loading.prefetch import Prefetch
from pipeline.loading.reports import Failure, Reports, as_error
from pipeline.loading.state import StateKey

# Grain has no public names for these. `_default_seed` is read here; the others are overridden.
PRIVATE = {
    grain.MapDataset: ("_default_seed", "_element_spec"),
    grain.IterDataset: ("_element_spec",),
    grain.DatasetIterator: ("_get_next_index", "_set_next_index"),
}


def require_names(owners: Mapping[type, tuple[str, ...]]) -> None:
    """Raises an ImportError that says what is missing, if a class lacks a name."""
    for owner, names in owners.items():
        for name in names:
            if not hasattr(owner, name):
                raise NotInstalled(
                    f"this version of Grain has no {owner.__name__}.{name}, on which batches as "
                    "data sets of Grain depend; install grain 0.2.18, with which this was tested"
                )


require_names(PRIVATE)

# Building a batch from memory takes about a millisecond, in many short calls of NumPy, each of
# which takes the interpreter's lock. On two cores, one thread is a tenth to a quarter faster than
# two that wait for one another (up to a third beside the threads that fill a cache), and the 99th
# percentile of a wait is half.
IN_ONE_THREAD = grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)


def _keep_state(transform: Callable[..., grain.MapDataset]) -> Callable[..., "StepDataset"]:
    """A transformation of Grain whose result has the states of the plan."""

    @functools.wraps(transform)
    def keep(steps: "StepDataset", *arguments: Any, **options: Any) -> "StepDataset":
        return steps._follow(transform(steps, *arguments, **options))

    return keep


def _call(function: Callable, share: int, *arguments: Any) -> Any:
    """`function(*arguments)`, whose last argument is a generator of random numbers if `share`."""
    if share:
        # Grain sets the last two of the four words of the counter, and drawing adds to the first.
        arguments[-1].bit_generator.advance(share << 64)
    try:
        return function(*arguments)
    except (StopIteration, StopAsyncIteration) as error:
        raise InvalidState(
            f"a function of the data set raised {error!r}, which would end it; raise a ValueError "
            "to report what is wrong"
        ) from error


def _wrap(transform: Any, kind: type, name: str, share: int = 0) -> Any:
    """A transformation of Grain, or a function, that `_call` calls."""
    function = getattr(transform, name) if isinstance(transform, kind) else transform
    calling: Any = functools.partial(_call, function, share)
    if hasattr(transform, "output_spec"):  # what Grain asks of it
        calling.output_spec = transform.output_spec
    return calling


class StepDataset(grain.MapDataset):
    """The steps of a plan after a transformation of Grain's; iterators keep the state of the plan.

    Args:
        origin: the key of the states of iterators.
        inside: the result of the transformation; none in a subclass with its own elements.

    Attributes:
        share: the place of this process's rows in a batch, in units of 2**-32, by which its random
            numbers differ from those of other processes; None: it depends on the bucket.
    """

    share: int | None = 0

    def __init__(self, origin: StateKey, *inside: grain.MapDataset):
        super().__init__(inside)
        self.origin = origin

    def _follow(self, inside: grain.MapDataset, **changes: Any) -> "StepDataset":
        """The steps after a transformation; `changes` are of the origin."""
        steps = StepDataset(self.origin._replace(**changes), inside)
        steps.share = self.share
        return steps

    def __len__(self) -> int:
        return len(self.parents[0])

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.slice(index)
        try:
            return self._make(index)
        except BaseException as error:
            what = f"the batch of step {index:,} was not built: a transform or the corpus"
            if (told := as_error(error, what)) is error:
                raise
            raise told from error

    def _make(self, step: Any) -> Any:
        return self.parents[0][step]

    def __str__(self) -> str:
        return f"Steps({self.parents[0]})"

    @property
    def _element_spec(self) -> Any:
        return grain.experimental.get_element_spec(self.parents[0])

    # Their index is the step; one that is filtered out still counts as a step.
    map = _keep_state(grain.MapDataset.map)
    map_with_index = _keep_state(grain.MapDataset.map_with_index)
    filter = _keep_state(grain.MapDataset.filter)
    seed = _keep_state(grain.MapDataset.seed)

    def random_map(self, transform: Any, *, seed: int | None = None) -> "StepDataset":
        """See `grain.MapDataset.random_map`; each process has random numbers of its own."""
        transform = _wrap(transform, grain.transforms.RandomMap, "random_map", require_share(self))
        return self._follow(super().random_map(transform, seed=seed))

    def slice(self, sl: slice) -> "StepDataset":
        """See `grain.MapDataset.slice`; the state counts the steps of the slice."""
        return self._reorder(super().slice(sl), f"slice({sl.start}, {sl.stop}, {sl.step})")

    def shuffle(self, seed: int | None = None) -> "StepDataset":
        """See `grain.MapDataset.shuffle`; a plan is shuffled without it."""
        if len(self) > 1 << 32:
            raise InvalidValue(
                "shuffle needs an end, and these batches have none; a plan is shuffled without it, "
                "in each epoch differently: omit shuffle, or give repeat a number of epochs"
            )
        steps = super().shuffle(seed)
        return self._reorder(steps, f"shuffle({steps._default_seed if seed is None else seed})")

    def batch(self, batch_size: int, **options: Any) -> grain.MapDataset:
        """Refuses to stack batches by index, which would have another state."""
        raise InvalidValue(
            f"batch({batch_size}) would stack batches; call it after to_iter_dataset(), or give "
            "buckets with more rows (iterators of batches resume on any number of hosts without "
            "ElasticIterator)"
        )

    def repeat(self, num_epochs: int | None = None, **options: Any) -> "StepDataset":
        """Refuses to repeat what is transformed: after a slice, it would leave the slice."""
        raise InvalidValue(
            f"repeat({num_epochs}) comes after a slice or another transformation; repeat batches "
            f"first, Batches(…).repeat({num_epochs}), and hold out examples with corpus.split(), "
            "since a step of a slice has other examples in each epoch"
        )

    def to_iter_dataset(
        self, read_options: grain.ReadOptions | None = None, *, allow_nones: bool = False
    ) -> "StepIterDataset":
        """An iterable data set whose iterators have the data state of this plan."""
        return StepIterDataset(self, read_options or IN_ONE_THREAD, allow_nones)

    def step_of(self, state: dict[str, Any]) -> int:
        """The step of `state`, after `origin.resume`; these batches must reach it."""
        step, length = self.origin.resume(state), len(self)
        if step > length:
            raise InvalidValue(
                f"the state is of step {step:,}, but these batches end after {length:,}; "
                "give more epochs, repeat(num_epochs)"
            )
        return step

    def _reorder(self, inside: grain.MapDataset, order: str) -> "StepDataset":
        """The result of a transformation whose index is no step of the plan."""
        return self._follow(inside, order=(*self.origin.order, order))


def require_share(steps: StepDataset) -> int:
    """The share of the steps, if it is the same in all buckets."""
    if steps.share is None:
        raise InvalidValue(
            "random_map gives each process random numbers of its own, but a row spans processes in "
            "some buckets and not in others; draw them in the training step, from a key and the "
            "numbers of rows"
        )
    return steps.share


class Transformed(grain.IterDataset):
    """An iterable data set, such as the result of one of its transformations.

    Its functions cannot end it by a `StopIteration`, and random numbers differ between processes.

    Args:
        steps: the steps that it began with.
        inside: the data set of Grain that makes its elements.
    """

    def __init__(self, steps: StepDataset, inside: Any):
        super().__init__(inside)
        self.steps = steps

    def __iter__(self) -> grain.DatasetIterator:
        return iter(self.parents[0])

    @property
    def _element_spec(self) -> Any:
        return grain.experimental.get_element_spec(self.parents[0])

    def __str__(self) -> str:
        return str(self.parents[0])

    def map(self, transform: Any) -> "Transformed":
        """See `grain.IterDataset.map`."""
        wrapped = _wrap(transform, grain.transforms.Map, "map")
        return Transformed(self.steps, super().map(wrapped))

    def map_with_index(self, transform: Any) -> "Transformed":
        """See `grain.IterDataset.map_with_index`."""
        wrapped = _wrap(transform, grain.transforms.MapWithIndex, "map_with_index")
        return Transformed(self.steps, super().map_with_index(wrapped))

    def filter(self, transform: Any) -> "Transformed":
        """See `grain.IterDataset.filter`."""
        wrapped = _wrap(transform, grain.transforms.Filter, "filter")
        return Transformed(self.steps, super().filter(wrapped))

    def random_map(self, transform: Any, *, seed: int | None = None) -> "Transformed":
        """See `grain.IterDataset.random_map`; each process has random numbers of its own."""
        share = require_share(self.steps)
        wrapped = _wrap(transform, grain.transforms.RandomMap, "random_map", share)
        return Transformed(self.steps, super().random_map(wrapped, seed=seed))

    def seed(self, seed: int) -> "Transformed":
        """See `grain.IterDataset.seed`."""
        return Transformed(self.steps, super().seed(seed))


class StepIterDataset(Transformed):
    """The elements of a `StepDataset` in order, made ahead in threads or in worker processes."""

    read_options: Any  # `grain.ReadOptions`, whose types name a class that cannot be made

    def __init__(self, steps: StepDataset, read_options: grain.ReadOptions, allow_nones: bool):
        # Grain looks at this parent to measure elements; it is not iterated over.
        super().__init__(steps, grain.MapDataset.to_iter_dataset(steps, read_options))
        self.read_options, self._allow_nones = read_options, allow_nones
        self._workers: tuple | None = None  # options and worker_init_fn of mp_prefetch

    def mp_prefetch(
        self,
        options: grain.MultiprocessingOptions | None = None,
        worker_init_fn: Callable[[int, int], None] | None = None,
        sequential_slice: bool = False,
    ) -> "StepIterDataset":
        """See `grain.IterDataset.mp_prefetch`; a state resumes with any number of workers."""
        if sequential_slice:
            raise InvalidValue(
                "sequential_slice is True, but workers take the steps of a plan in turns; use "
                "mp_prefetch(…, sequential_slice=False)"
            )
        options = options or grain.MultiprocessingOptions(num_workers=10)
        steps = copy.copy(self)
        steps._workers = (options, worker_init_fn) if options.num_workers else None
        return steps

    def set_slice(self, sl: slice, sequential_slice: bool = False) -> None:
        """Refuses the slices of Grain's own workers, whose states only as many can restore."""
        raise InvalidValue(
            "workers cannot share batches that are transformed after to_iter_dataset(); call "
            "mp_prefetch right after it, with all that workers should do before it: "
            "batches.map(…).to_iter_dataset().mp_prefetch(…)"
        )

    def __iter__(self) -> "StepIterator":
        options, workers = self.read_options, None
        make, threads = self.steps.__getitem__, options.num_threads
        if self._workers:
            make = workers = _Workers(self.steps, options, *self._workers)
            threads = 0
        size, end = options.prefetch_buffer_size, len(self.steps)
        ahead = Prefetch[Any](make, size, end=lambda: end, threads=threads)
        close = ahead.close if workers is None else functools.partial(_close, ahead, workers)
        return StepIterator(self.steps, ahead, close, allow_nones=self._allow_nones)


class _Workers:
    """Makes the elements of steps, one after another, in worker processes of Grain."""

    def __init__(self, steps: StepDataset, options: Any, *workers: Any):
        self._steps, self._options, self._workers = steps, options, workers
        self._elements: grain.DatasetIterator | None = None  # from the step `_next` on
        self._next = 0

    def __call__(self, step: int) -> Any:
        if step != self._next:
            self.close()
        if self._elements is None:
            if not flags.FLAGS.is_parsed():
                raise InvalidState(
                    "mp_prefetch reads Grain's flags, which this program has not parsed; run it "
                    "with absl.app.run(main), or call absl.flags.FLAGS.mark_as_parsed() first"
                )
            steps = grain.MapDataset.slice(Reports(self._steps), slice(step, None))
            elements = steps.to_iter_dataset(self._options, allow_nones=True)
            self._elements, self._next = iter(elements.mp_prefetch(*self._workers)), step
        try:
            element = next(self._elements)
            if isinstance(element, Failure):
                element.throw()
        except BaseException:
            self.close()  # another try begins with this step
            raise
        self._next += 1
        return element

    def close(self) -> None:
        """Ends the processes, until another call."""
        elements, self._elements = self._elements, None
        if elements is not None:
            elements.close()


def _close(ahead: Prefetch, workers: _Workers) -> None:
    ahead.close()
    workers.close()


class StepIterator(grain.DatasetIterator):
    """An iterator over steps that a `Prefetch` makes, with the data state of their plan.

    `allow_nones` says whether it returns None for steps that are filtered out.
    """

    _close: Callable[[], object] | None = None  # none, if a wrong argument ends `__init__`

    def __init__(
        self,
        steps: StepDataset,
        ahead: Prefetch,
        close: Callable[[], object],
        *,
        allow_nones: bool = True,
    ):
        super().__init__()
        self._steps, self._ahead, self._allow_nones = steps, ahead, allow_nones
        # Also before Python ends, when threads can no longer run.
        self._close = weakref.finalize(self, close)

    def __next__(self) -> Any:
        while (element := self._ahead.next()) is None and not self._allow_nones:
            pass
        return element

    def __reduce__(self) -> NoReturn:
        raise InvalidType(
            "a loader or iterator has threads, so it cannot be copied or pickled; save its "
            "get_state(), and give it to set_state of another one of the same corpus and options"
        )

    def get_state(self) -> dict[str, Any]:
        """The data state after the elements that `next` returned so far: small JSON."""
        return self._steps.origin.state(self._ahead.step)

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues from `state`; another plan's or corpus's state raises a `ValueError`."""
        self._ahead.jump(self._steps.step_of(state))

    def start_prefetch(self) -> None:
        """Begins to make elements now, before the first `next`."""
        self._ahead.start()

    def close(self) -> None:
        """Stops the background threads, as happens when the iterator is deleted.

        It waits for an element in the making for half a second at most.
        """
        if self._close is not None:
            super().close()
            self._close()

    def _get_next_index(self) -> int:
        return self._ahead.step

    def _set_next_index(self, index: int) -> None:
        self._ahead.jump(operator.index(index))
