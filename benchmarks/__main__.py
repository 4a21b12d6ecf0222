"""Measures, prints one table with ratios, and writes `benchmarks/RESULTS.md`.

python -m benchmarks                       # all sections, some minutes
python -m benchmarks planner loader        # some of them
python -m benchmarks --lengths FILE        # lengths as in FILE instead of lognormal ones
"""

import argparse
import importlib

from benchmarks import results
from benchmarks.lengths import sample

SECTIONS = ("planner", "loader", "resume", "end_to_end")


def main() -> None:
    """Runs the sections that the command line names."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("sections", nargs="*", choices=[[], *SECTIONS], help="default: all")
    parser.add_argument(
        "--lengths", metavar="FILE", help="a JSON list of lengths, or text: words of each line"
    )
    arguments = parser.parse_args()
    lengths = sample(arguments.lengths)
    sections = []
    for name in arguments.sections or SECTIONS:
        section = importlib.import_module(f"benchmarks.{name}").measure(lengths)
        print(section, end="\n\n", flush=True)
        sections.append(section)
        results.write([section])


if __name__ == "__main__":
    main()
