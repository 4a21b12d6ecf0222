"""Measures, prints one table with ratios, and writes `benchmarks/RESULTS.md`.

python -m benchmarks                       # all sections, some minutes
python -m benchmarks planner loader        # some of them
python -m benchmarks --lengths FILE        # lengths as in FILE instead of lognormal ones
python -m benchmarks fuzz --minutes 20     # hostile inputs, in search of what should not be
python -m benchmarks kills                 # processes killed at random, which must end the same
python -m benchmarks soak                  # many batches, in constant memory
python -m benchmarks why                   # spoilt documents, found by their losses
"""

import argparse
import importlib

from benchmarks import histograms, results
from benchmarks.lengths import sample

SECTIONS = (
    *("agreement", "planner", "balance", "loader", "resume", "change", "growth", "end_to_end"),
    "score",
)
# Run only if they are named; and the options that each has.
NAMED = {
    "scale": ("examples",),
    "fuzz": ("minutes", "seed", "property"),
    "kills": ("prepare", "train", "seed"),
    "soak": ("batches",),
    "why": ("steps",),
}


def main() -> None:
    """Runs the sections that the command line names."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "sections",
        nargs="*",
        help=f"of {', '.join(SECTIONS)}, which are the default, and of {', '.join(NAMED)}",
    )
    parser.add_argument(
        "--lengths", metavar="FILE", help="a JSON list of lengths, or text: words of each line"
    )
    parser.add_argument(
        "--histogram",
        metavar="FILE",
        action="append",
        help='JSON, a list or {"counts": a list}: entry i counts the examples of length i + 1',
    )
    parser.add_argument("--examples", type=int, default=1_000_000_000, help="for scale (10⁹)")
    parser.add_argument("--minutes", type=float, default=20, help="for fuzz (20)")
    parser.add_argument("--property", help="for fuzz: one round of this property alone")
    parser.add_argument("--seed", type=int, default=0, help="for fuzz and kills (0)")
    parser.add_argument("--prepare", type=int, default=350, help="for kills: of preparations (350)")
    parser.add_argument("--train", type=int, default=150, help="for kills: of train.py (150)")
    parser.add_argument("--batches", type=int, default=100_000, help="for soak (100000)")
    parser.add_argument("--steps", type=int, default=400, help="for why (400)")
    arguments = parser.parse_args()
    if wrong := set(arguments.sections) - {*SECTIONS, *NAMED}:
        there = ", ".join([*SECTIONS, *NAMED])
        parser.error(f"no section {', '.join(wrong)}; there are {there}")
    names = arguments.sections or (() if arguments.histogram else SECTIONS)
    lengths = sample(arguments.lengths) if {*SECTIONS} & {*names} else None
    if arguments.histogram:
        show(histograms.measure(arguments.histogram))
    for name in names:
        module = importlib.import_module(f"benchmarks.{name}")
        options = [getattr(arguments, option) for option in NAMED.get(name, ())]
        show(module.measure(*(options or [lengths])))


def show(section: results.Section) -> None:
    """Prints a section, and keeps it in `RESULTS.md`."""
    print(section, end="\n\n", flush=True)
    results.write([section])


if __name__ == "__main__":
    main()
