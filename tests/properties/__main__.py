"""Kills of train.py at random instants, as many as you like.

    python -m tests.properties --train 150 --in-storage 100

Runs of train.py (on disk, and in a bucket) end at random instants, and go on to an equal end:
losses, parameters, moments, checkpoints, plans and audits. The instants are uniform over a run,
before a change of a file that the run makes, and inside checkpoints, evaluations and requests.
`python -m tests.simulation` has all other crashes.
"""

import argparse
import contextlib
import pathlib
import tempfile

from tests.properties.kills import (
    Kills,
    Training,
    prepare_environment,
    serve_bucket,
    write_documents,
)


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


def main() -> None:
    """Runs what the command line names."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.properties",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seed", type=int, default=0, help="of the instants (0)")
    parser.add_argument("--train", type=int, default=150, help="kills of train.py (150)")
    parser.add_argument("--in-storage", type=int, default=100, help="and in a bucket (100)")
    asked = parser.parse_args()
    kill(asked.train, asked.in_storage, asked.seed)


if __name__ == "__main__":
    main()
