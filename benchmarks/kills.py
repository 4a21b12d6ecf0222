"""Kills: `prepare` and `train.py` end at random instants, and go on to an equal end.

    python -m benchmarks kills --prepare 350 --train 150 --seed 0

Half of the instants are uniform over a run; the others are before a change of a file that the run
makes, and inside checkpoints and evaluations.
"""

import pathlib
import tempfile

from benchmarks.results import Line, Section
from tests.kills import Kills, Preparation, Training, Trial, prepare_environment, write_documents

KINDS = ("prepare", "prepare_pairs", "index", "from_arrays")
# Workers take seconds to start, so only some corpora are prepared by them.
BY_WORKERS = 20


def measure(prepare: int, train: int, seed: int) -> Section:
    """Kills as many preparations and trainings as said; prints what it finds."""
    with tempfile.TemporaryDirectory() as directory:
        folder = pathlib.Path(directory)
        text = folder / "documents.jsonl"
        write_documents(text)
        prepare_environment(folder)
        some = min(BY_WORKERS, prepare // 10)
        shares = [(prepare - some) * (at + 1) // 4 - (prepare - some) * at // 4 for at in range(4)]
        trials: list[tuple[Trial, int]] = [
            (Preparation(text, kind), share) for kind, share in zip(KINDS, shares, strict=True)
        ]
        trials += [(Preparation(text, workers=2), some), (Training(text), train)]
        lines = []
        for number, (trial, count) in enumerate(trials):
            if count:
                kills = Kills(trial, folder / str(number), seed)
                kills.run(count, report=lambda found: print(found, flush=True))
                lines.append(_line(kills))
                print(lines[-1], flush=True)
    return Section(
        "kills",
        f"Processes killed at random, seed {seed}; each is run again to its end and compared with "
        "one that nothing disturbed: the bytes of corpora; losses, parameters and moments, "
        "checkpoints, plans and audits of runs.",
        lines,
    )


def _line(kills: Kills) -> Line:
    count = sum(kills.kills.values())
    kinds = ", ".join(f"{number:,} {kind}" for kind, number in sorted(kills.kills.items()))
    return Line(f"{kills.trial.name}: {count:,} kills", f"{len(kills.found)} unequal ends", kinds)
