"""The long runs of what CI runs shortly.

    python -m tests.properties fuzz --minutes 20             # hostile inputs
    python -m tests.properties fuzz --property states --seed 7  # a round whose seed found something
    python -m tests.properties kills --prepare 50 --train 150 --write 50
    python -m tests.properties kills --prepare 0 --train 0 --write 0 --train-in-storage 100
    python -m tests.properties soak --batches 100000         # in constant memory

Kills: real processes of `prepare`, with workers, of `Writer` and of `train.py` (on disk and in a
bucket, with files of others beside it) end at random instants, and go on to an equal end: the bytes
of corpora, with each example once; losses, parameters, moments, checkpoints, plans and audits of
runs. The instants are uniform over a run, before a change of a file that the run makes, and inside
checkpoints, evaluations and requests. `python -m tests.simulation` has all other crashes.
"""

import argparse
import contextlib
import pathlib
import tempfile

from tests.properties.kills import (
    Kills,
    Preparation,
    Stream,
    Training,
    Trial,
    prepare_environment,
    serve_bucket,
    write_documents,
)
from tests.properties.soak import soak


def kill(prepare: int, train: int, write: int, in_storage: int, seed: int) -> None:
    """Kills as many preparations, trainings and writers as said; prints what it finds."""
    with contextlib.ExitStack() as stack:
        folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        text = folder / "documents.jsonl"
        write_documents(text)
        prepare_environment(folder)
        trials: list[tuple[Trial, int]] = [
            (Preparation(text, workers=2), prepare),
            (Stream(), write),
            (Training(text), train),
        ]
        if in_storage:
            bucket = stack.enter_context(serve_bucket(folder))
            trials += [(Training(text, bucket=bucket), in_storage)]
        for number, (trial, count) in enumerate(trials):
            if count:
                kills = Kills(trial, folder / f"{number}", seed)
                kills.run(count)
                kinds = ", ".join(f"{n:,} {kind}" for kind, n in sorted(kills.kills.items()))
                print(f"{trial.name}: {kinds}; {len(kills.found)} unequal ends", flush=True)


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
    parser.add_argument("--prepare", type=int, default=50, help="kills of preparations (50)")
    parser.add_argument("--train", type=int, default=150, help="kills of train.py (150)")
    parser.add_argument("--write", type=int, default=50, help="kills of writers (50)")
    parser.add_argument(
        "--train-in-storage", type=int, default=100, help="kills of train.py in a bucket (100)"
    )
    parser.add_argument("--batches", type=int, default=100_000, help="of the soak (100000)")
    asked = parser.parse_args()
    if asked.what == "fuzz":
        from tests.properties.fuzz import fuzz  # which needs hypothesis, as the others do not

        fuzz(asked.minutes, asked.seed, asked.property)
    elif asked.what == "kills":
        counts = asked.prepare, asked.train, asked.write, asked.train_in_storage
        kill(*counts, asked.seed)
    else:
        load(asked.batches)


if __name__ == "__main__":
    main()
