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
of runs. The instants are uniform over a run, before a change of a file that the run makes, and
inside checkpoints, evaluations and requests.

Takeovers: four processes want a lock in a bucket; its holders are killed, or stopped for longer
than it lasts.

Histories: writers and readers of corpora that grow, alone and in mixtures, are killed and started
again, readers on one host and on two; each batch and state is compared with those of a reader who
opens the corpora after their end.
"""

import argparse
import contextlib
import functools
import multiprocessing
import os
import pathlib
import tempfile

from tests.fs import object_servers
from tests.properties.kills import (
    Kills,
    Preparation,
    Stream,
    Training,
    Trial,
    prepare_environment,
    write_documents,
)
from tests.properties.soak import soak
from tests.properties.takeovers import take_over

FORK = multiprocessing.get_context("fork")
KINDS = ("prepare", "prepare_pairs", "index", "from_arrays")
# Workers take seconds to start, so only some corpora are prepared by them.
BY_WORKERS = 20


def kill(prepare: int, train: int, write: int, in_storage: int, seed: int, together: int) -> None:
    """Kills as many preparations, trainings and writers as said; prints what it finds."""
    with contextlib.ExitStack() as stack:
        folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        text = folder / "documents.jsonl"
        write_documents(text)
        prepare_environment(folder)
        some = min(BY_WORKERS, prepare // 10)
        shares = [(prepare - some) * (at + 1) // 4 - (prepare - some) * at // 4 for at in range(4)]
        trials: list[tuple[Trial, int]] = [
            (Preparation(text, kind), share) for kind, share in zip(KINDS, shares, strict=True)
        ]
        trials += [(Preparation(text, workers=2), some), (Training(text), train)]
        trials += [(Stream(), write - write // 3)]
        if write > 2 or in_storage:
            (folder / "server").mkdir()
            port = stack.enter_context(object_servers.s3(folder / "server"))
            os.environ |= object_servers.s3_environment(port)
            bucket = folder / "server" / object_servers.BUCKET
            trials += [(Stream(bucket=bucket), write // 3)]
            trials += [(Training(text, bucket=bucket), in_storage)]
        for number, (trial, count) in enumerate(trials):
            processes = []
            for at in range(min(together, count)):
                share = count * (at + 1) // together - count * at // together
                task = functools.partial(kill_one, trial, folder / f"{number}-{at}", seed + at)
                processes.append(FORK.Process(target=task, args=(share,)))
                processes[-1].start()
            for process in processes:
                process.join()


def kill_one(trial: Trial, folder: pathlib.Path, seed: int, count: int) -> None:
    """Kills so many processes of one trial; prints what it finds."""
    kills = Kills(trial, folder, seed)
    kills.run(count, report=lambda found: print(found, flush=True))
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
    parser.add_argument("--together", type=int, default=1, help="kills that go on at a time (1)")
    parser.add_argument("--number", type=int, default=300, help="takeovers, or histories (300)")
    parser.add_argument("--batches", type=int, default=100_000, help="of the soak (100000)")
    asked = parser.parse_args()
    if asked.what == "fuzz":
        from tests.properties.fuzz import fuzz  # which needs hypothesis, as the others do not

        fuzz(asked.minutes, asked.seed, asked.property)
    elif asked.what == "kills":
        counts = asked.prepare, asked.train, asked.write, asked.train_in_storage
        kill(*counts, asked.seed, asked.together)
    elif asked.what == "takeovers":
        print(take_over(asked.number, asked.seed))
    elif asked.what == "histories":
        from tests.properties.histories import tell  # which imports JAX, as kills must not

        for place, seen in tell(asked.number, asked.seed).items():
            print(f"{place}: {seen}")
    else:
        load(asked.batches)


if __name__ == "__main__":
    main()
