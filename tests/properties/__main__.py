"""The long runs of what CI runs shortly.

    python -m tests.properties fuzz --minutes 20             # hostile inputs
    python -m tests.properties fuzz --property states --seed 7  # a round whose seed found something
    python -m tests.properties kills --train 150 --in-storage 100
    python -m tests.properties soak --batches 100000         # in constant memory

Kills: runs of train.py (on disk, and in a bucket with files of others beside it) end at random
instants, and go on to an equal end: losses, parameters, moments, checkpoints, plans and audits. The
instants are uniform over a run, before a change of a file that the run makes, and inside
checkpoints, evaluations and requests. `python -m tests.simulation` has all other crashes.
"""

import argparse
import collections
import contextlib
import faulthandler
import pathlib
import tempfile
import time

from tests.properties.kills import (
    Kills,
    Training,
    prepare_environment,
    serve_bucket,
    write_documents,
)
from tests.properties.soak import soak


def kill(train: int, in_storage: int, seed: int) -> None:
    """Kills as many runs as said; prints what it finds."""
    with contextlib.ExitStack() as stack:
        folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        text = folder / "documents.jsonl"
        write_documents(text)
        prepare_environment(folder)
        runs = [(Training(text), train)]
        if in_storage:
            runs += [(Training(text, stack.enter_context(serve_bucket(folder))), in_storage)]
        for number, (training, count) in enumerate(runs):
            if count:
                kills = Kills(training, folder / f"{number}", seed)
                kills.run(count)
                kinds = ", ".join(f"{n:,} {kind}" for kind, n in sorted(kills.kills.items()))
                print(f"{training.name}: {kinds}; {len(kills.found)} unequal ends", flush=True)


ROUND = 150  # examples of one round of a property
SECONDS = 60  # that one example may take; then this program ends with its stack


def fuzz(minutes: float, seed: int, name: str | None) -> None:
    """Runs rounds of all properties in turn, or one round of one; prints what it finds."""
    import hypothesis  # which the other runs do not need

    from tests.properties.properties import PROPERTIES, run

    if name and name not in PROPERTIES:
        raise SystemExit(f"no property {name}; there are {', '.join(PROPERTIES)}")
    end, examples, found = time.monotonic() + 60 * minutes, collections.Counter(), set()
    faulthandler.enable()
    while True:
        for one in [PROPERTIES[name]] if name else PROPERTIES.values():
            if one.name in found:
                continue
            again = f"python -m tests.properties fuzz --property {one.name} --seed {seed}"
            print(again, flush=True)
            # Shrinking a slow example would take the time of many others.
            only = (hypothesis.Phase.generate,)
            try:
                examples[one.name] += run(
                    one,
                    ROUND,
                    seed,
                    before=lambda _: faulthandler.dump_traceback_later(SECONDS, exit=True),
                    phases=only,
                )
            except Exception as error:
                found.add(one.name)
                notes = "\n".join(getattr(error, "__notes__", []))
                print(f"{type(error).__name__}: {error!s:.1500}\n{notes:.1500}\n", flush=True)
            if time.monotonic() > end and not name:
                break
        seed += 1
        if name or time.monotonic() > end:
            break
    for each, count in examples.items():
        print(f"{each}: {count:,} examples, {'something' if each in found else 'nothing'} found")


def load(batches: int) -> None:
    """Loads so many batches, of plans that change, and takes the state now and then."""
    with tempfile.TemporaryDirectory() as directory:
        first, last, seconds = soak(directory, batches)
    print(f"{batches:,} batches in {seconds:,.0f} s")
    print(f"after a tenth of them: {first}")
    print(f"after all of them:     {last}")


def main() -> None:
    """Runs what the command line names."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.properties",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", choices=("fuzz", "kills", "soak"))
    parser.add_argument("--seed", type=int, default=0, help="of all but the soak (0)")
    parser.add_argument("--minutes", type=float, default=20, help="of fuzz (20)")
    parser.add_argument("--property", help="of fuzz: one round of this property alone")
    parser.add_argument("--train", type=int, default=150, help="kills of train.py (150)")
    parser.add_argument("--in-storage", type=int, default=100, help="and in a bucket (100)")
    parser.add_argument("--batches", type=int, default=100_000, help="of the soak (100000)")
    asked = parser.parse_args()
    if asked.what == "fuzz":
        fuzz(asked.minutes, asked.seed, asked.property)
    elif asked.what == "kills":
        kill(asked.train, asked.in_storage, asked.seed)
    else:
        load(asked.batches)


if __name__ == "__main__":
    main()
