"""Histories of crashes and orders, each replayed from one number.

    python -m tests.simulation --seeds 0:1000
    python -m tests.simulation --seed 4711 -v    # as a story

On one core it is faster, as its threads take turns: `taskset -c 0 python -m tests.simulation`.

A history has some processes of the project, a disk and storage. Its seed decides the order of all
their calls, who is killed where, when power is lost and what the disk keeps then.
"""

import argparse
import collections
import hashlib
import os
import sys
import time


def main() -> int:
    """Runs what the command line names; the number of seeds that are wrong, at most 1."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seeds", default="0:100", help="from and before, as 0:1000")
    parser.add_argument("--seed", type=int, help="one seed")
    parser.add_argument("--only", help="a scenario, in place of all")
    parser.add_argument("--repeat", type=int, default=1, help="how often each seed (1)")
    parser.add_argument("--digests", action="store_true", help="prints a digest of each trace")
    parser.add_argument("--break", dest="broken", help="a fault that is planted in the project")
    parser.add_argument("--first", action="store_true", help="ends with the first that is wrong")
    parser.add_argument("-v", "--verbose", action="store_true", help="tells the whole story")
    asked = parser.parse_args()
    from tests.simulation import seam

    seam.install()
    from tests.simulation.faults import FAULTS
    from tests.simulation.scenarios import play
    from tests.simulation.scheduler import describe

    if asked.broken:
        FAULTS[asked.broken]()
    first, _, last = asked.seeds.partition(":")
    seeds = range(int(first), int(last)) if asked.seed is None else [asked.seed]
    begin, busy = time.monotonic(), time.process_time()
    counts, wrong = collections.Counter[str](), 0
    for seed in [seed for seed in seeds for _ in range(asked.repeat)]:
        history, error = play(seed, asked.only)
        counts.update(history.account.counts)
        counts["histories"] += 1
        if asked.digests or asked.verbose:
            trace = describe(history.scheduler.trace).replace(history.world.folder, "")
        if asked.digests:
            print(seed, hashlib.sha256(trace.encode()).hexdigest()[:16], flush=True)
        if asked.verbose:
            print(trace)
        if error is not None:
            wrong += 1
            print(f"seed {seed}, {history.scenario}: {error}", flush=True)
            if asked.first:
                break
    seconds, busy = time.monotonic() - begin, time.process_time() - busy
    figures = ", ".join(f"{number:,} {name}" for name, number in sorted(counts.items()))
    rate = 60 * counts["histories"] / seconds
    print(
        f"{figures} in {seconds:.1f} s, {busy:.1f} s of them at work "
        f"({rate:,.0f} a minute); {wrong} wrong"
    )
    return min(wrong, 1)


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":  # the order of sets of strings
        command = [sys.executable, "-m", "tests.simulation", *sys.argv[1:]]
        os.execve(sys.executable, command, os.environ | {"PYTHONHASHSEED": "0"})
    sys.exit(main())
