"""Taking turns: contenders measured one after another, round after round, in one process.

A busy moment of the machine then hits all of them, and ratios hold where seconds do not.
"""

import time
from collections.abc import Callable


def best_seconds(
    contenders: dict[str, Callable[[], object]],
    rounds: int = 3,
    clock: Callable[[], float] = time.perf_counter,
    before: Callable[[], object] = lambda: None,
) -> dict[str, float]:
    """The shortest of `rounds` times of each contender, in seconds.

    For work of one thread, `clock=time.process_time` leaves out what other programs take. `before`
    is called before each turn, and is not timed.
    """
    seconds = dict.fromkeys(contenders, float("inf"))
    for _ in range(rounds):
        for name, run in contenders.items():
            before()
            begin = clock()
            run()
            seconds[name] = min(seconds[name], clock() - begin)
    return seconds
