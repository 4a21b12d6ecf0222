"""Measures, prints one table with ratios, and writes `benchmarks/RESULTS.md`.

python -m benchmarks                       # all sections, some minutes
python -m benchmarks planner loader        # some of them
python -m benchmarks --lengths FILE        # lengths as in FILE instead of lognormal ones
"""

import argparse
import importlib

from benchmarks import histograms, results
from benchmarks.lengths import sample

SECTIONS = (
    *("agreement", "planner", "balance", "loader", "resume", "change", "growth", "end_to_end"),
    "score",
)


def main() -> None:
    """Runs the sections that the command line names."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "sections", nargs="*", help=f"of {', '.join(SECTIONS)} and scale; default: all but scale"
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
    parser.add_argument(
        "--examples", metavar="N", type=int, default=1_000_000_000, help="for scale"
    )
    arguments = parser.parse_args()
    if wrong := set(arguments.sections) - {*SECTIONS, "scale"}:
        parser.error(f"no section {', '.join(wrong)}; there are {', '.join(SECTIONS)} and scale")
    names = arguments.sections or (() if arguments.histogram else SECTIONS)
    lengths = sample(arguments.lengths) if names else None
    if arguments.histogram:
        show(histograms.measure(arguments.histogram))
    for name in names:
        module = importlib.import_module(f"benchmarks.{name}")
        show(module.measure(arguments.examples if name == "scale" else lengths))


def show(section: results.Section) -> None:
    """Prints a section, and keeps it in `RESULTS.md`."""
    print(section, end="\n\n", flush=True)
    results.write([section])


if __name__ == "__main__":
    main()
