"""The long runs of what CI runs shortly.

    python -m tests.properties fuzz --minutes 20             # hostile inputs
    python -m tests.properties fuzz --property states --seed 7  # a round whose seed found something
    python -m tests.properties kills --prepare 350 --train 150 --write 300
    python -m tests.properties kills --prepare 0 --train 0 --write 0 --train-in-storage 100
    python -m tests.properties takeovers --number 300        # of a lock in a bucket
    python -m tests.properties histories --number 200        # of corpora that grow
    python -m tests.properties soak --batches 100000         # in constant memory

Kills: `prepare`, `Writer` (on disk, and a third of them in a bucket) and `train.py` (on disk and in
a bucket, with files of others beside it) end at random instants, and go on to an equal end: the
bytes of corpora, with each example once; losses, parameters, moments, checkpoints, plans and audits
of runs. The instants are uniform over a run, before a change of a file that the run makes (of a
short stream, before each), and inside checkpoints, evaluations and requests.

Takeovers: four processes want a lock in a bucket; its holders are killed, or stopped for longer
than it lasts.

Histories: writers and readers of corpora that grow, alone and in mixtures, are killed and started
again, readers on one host and on two; each batch and state is compared with those of a reader who
opens the corpora after their end.
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
from tests.properties.takeovers import take_over

KINDS = ("prepare", "prepare_sides", "from_arrays")
# Workers take seconds to start, so only some corpora are prepared by them.
BY_WORKERS = 20


def kill(prepare: int, train: int, write: int, in_storage: int, seed: int) -> None:
    """Kills as many preparations, trainings and writers as said; prints what it finds."""
    with contextlib.ExitStack() as stack:
        folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        text = folder / "documents.jsonl"
        write_documents(text)
        prepare_environment(folder)
        some = min(BY_WORKERS, prepare // 10)
        trials: list[tuple[Trial, int | None]] = [
            (Preparation(text, kind), (prepare - some + at) // 4) for at, kind in enumerate(KINDS)
        ]
        trials += [(Preparation(text, workers=2), some), (Training(text), train)]
        if write:
            trials += [(Stream(30), None), (Stream(), write - write // 3)]
        if write > 2 or in_storage:
            bucket = stack.enter_context(serve_bucket(folder))
            trials += [(Stream(bucket=bucket), write // 3)]
            trials += [(Training(text, bucket=bucket), in_storage)]
        for number, (trial, count) in enumerate(trials):
            if count != 0:
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
    parser.add_argument("what", choices=("fuzz", "kills", "takeovers", "histories", "soak"))
    parser.add_argument("--seed", type=int, default=0, help="of all but the soak (0)")
    parser.add_argument("--minutes", type=float, default=20, help="of fuzz (20)")
    parser.add_argument("--property", help="of fuzz: one round of this property alone")
    parser.add_argument("--prepare", type=int, default=350, help="kills of preparations (350)")
    parser.add_argument("--train", type=int, default=150, help="kills of train.py (150)")
    parser.add_argument("--write", type=int, default=300, help="kills of writers (300)")
    parser.add_argument(
        "--train-in-storage", type=int, default=100, help="kills of train.py in a bucket (100)"
    )
    parser.add_argument("--number", type=int, default=300, help="takeovers, or histories (300)")
    parser.add_argument("--batches", type=int, default=100_000, help="of the soak (100000)")
    asked = parser.parse_args()
    if asked.what == "fuzz":
        from tests.properties.fuzz import fuzz  # which needs hypothesis, as the others do not

        fuzz(asked.minutes, asked.seed, asked.property)
    elif asked.what == "kills":
        counts = asked.prepare, asked.train, asked.write, asked.train_in_storage
        kill(*counts, asked.seed)
    elif asked.what == "takeovers":
        print(take_over(asked.number, asked.seed))
    elif asked.what == "histories":
        from tests.properties.histories import tell  # which imports JAX, as kills must not

        for line in tell(asked.number, asked.seed):
            print(line, flush=True)
    else:
        load(asked.batches)


if __name__ == "__main__":
    main()
