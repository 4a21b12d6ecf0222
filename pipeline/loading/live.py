"""Live batches: a loader's batches, whose weights change at the same step on all processes.

A change belongs to a step that no process has begun. One process knows this of its own threads, and
not of those of others. So several processes divide steps into blocks of `every`, and exchange a
word at the beginning of each: process 0 says the weights that change there, or nothing. Its change
takes the next block that is not begun, so the word of a block never changes once it is given. Other
processes build no batch of a block before they have its word.
"""

import math
import threading
from collections.abc import Callable, Collection, Mapping
from typing import Any

from pipeline.errors import InvalidState, InvalidValue, name_some, require_whole
from pipeline.loading.batches import Batches
from pipeline.loading.exchange import Exchange
from pipeline.planning.bucket import Bucket


class LiveBatches:
    """The batches of a loader, with the weights that were changed so far.

    Args:
        batches: those that the loader was made with.
        buckets: those that programs are compiled for; others are refused.
        every: changes begin at multiples of this many steps, on one process as on several, which
            need it. None: at any step, and on several processes never.

    Attributes:
        batches: the `Batches`, with their changes.
        end: the number of their steps.
    """

    batches: Batches
    end: int

    def __init__(self, batches: Batches, buckets: Collection[Bucket], every: int | None):
        self._every = None if every is None else require_whole("changes_every", every, 1)
        self._base, self._buckets = batches, buckets
        self._exchange: Exchange | None = None
        self._told = threading.Condition()  # when a block has its word
        self._asked: Exchange | None = None  # in which a thread waits for a word
        self.begin(batches, 0)

    def at(self, step: int, is_wanted: Callable[[], bool]) -> Batches:
        """Batches with their plans, of which that of a step is final; any thread may call it.

        `is_wanted` says whether the loader has not gone to another step since. A thread of before
        must take no word of after: others might give it only once this process goes on.
        """
        if (exchange := self._exchange) is not None:
            if not is_wanted():
                raise InvalidState("the loader went to another step")
            with self._told:
                while exchange is self._exchange and self._due <= step:
                    if self._asked is exchange:
                        self._told.wait()
                    else:
                        self._exchange_word(exchange)
        return self._with_plans

    def change(self, first: int, weights: Mapping[str, float]) -> int:
        """Changes the weights at the first step from `first` on that can change; returns it.

        Steps before `first` may be begun meanwhile, but no others.
        """
        others = [n for n in self._base.processes if n != self._me]
        if others and self._me > others[0]:
            raise InvalidState(
                f"process {self._me} changes weights, which process {min(others)} decides for all; "
                "call change there alone, as in: if jax.process_index() == 0: loader.change(…)"
            )
        if others and self._every is None:
            raise InvalidState(
                f"{1 + len(others)} processes share the batches, and must change weights at the "
                "same step; make the loader with changes_every=16, so that they tell one another "
                "every 16 steps"
            )
        every, plan, step = self._every or 1, self.batches.plan, None
        first = max(first, self._said)
        while step != first:  # until it begins a block of both kinds
            step, first = first, plan.next_block(-(-first // every) * every)
        origin = self.batches.origin.change(first, weights)
        used = origin.plan.onward(first).batches_per_bucket.items()
        if missing := [bucket for bucket, number in used if number and bucket not in self._buckets]:
            raise InvalidValue(
                f"these weights need batches of {name_some(missing)}, which the loader did not "
                "have before, so no program is compiled for them; begin with a small weight in "
                "place of 0 for each corpus"
            )
        changed = self.batches._copy(origin=origin, plan=origin.plan)  # of buckets that it has
        if others and len(changed) <= first < self.end:
            raise InvalidValue(
                f"with these weights, the epoch is over at step {first:,}, where other processes "
                "wait for their word; leave a weight to each corpus whose epoch is not over"
            )
        self._set(changed)
        return first

    def follow(self, state: Any) -> Batches:
        """The batches that a state continues; see `StateKey.follow`."""
        origin = self._base.origin.follow(state)
        return self._base if origin is self._base.origin else self._base.with_origin(origin)

    def begin(self, batches: Batches, step: int) -> None:
        """Goes on from a step with some batches; all processes do so in the same order."""
        self.close()
        with self._told:
            self._set(batches)
            every, processes = self._every, self._base.processes
            self._due = 0 if every is None else -(-step // every) * every
            self._said, self._exchange = 0, None
            if every is not None and len(processes) > 1:
                self._exchange = Exchange(processes, seconds=math.inf)

    def close(self) -> None:
        """Ends a wait for other processes within a second."""
        if self._exchange is not None:
            self._exchange.close()

    @property
    def _me(self) -> int:
        if not self._base.processes:
            return 0
        import jax

        return jax.process_index()

    def _set(self, batches: Batches) -> None:
        self.batches, self._with_plans = batches, batches.with_plans()
        self.end = len(batches)

    def _exchange_word(self, exchange: Exchange) -> None:
        """Exchanges the word of the block `_due`, and does what process 0 says.

        Threads with steps of blocks before it do not wait: others may need these steps before they
        come to this block.
        """
        origin = self.batches.origin
        mine = origin.live_weights(self._due)
        self._said = self._due + 1  # a word is final, also if the loader goes back
        self._asked = exchange
        self._told.release()
        try:
            word = exchange.gather(mine)[0]
        finally:
            self._told.acquire()
            self._told.notify_all()
            if self._asked is exchange:
                self._asked = None
        if exchange is not self._exchange:  # the loader went to another step meanwhile
            return
        if word is None and mine is not None:
            raise InvalidState(
                f"the weights change at step {self._due:,} in the state that this process "
                "continues, and not in that of process 0; give all processes the state of process 0"
            )
        if word is not None and word != mine:
            origin = origin.change(self._due, word)
            self._set(self.batches._copy(origin=origin, plan=origin.plan))
        self._due += self._every or 1
