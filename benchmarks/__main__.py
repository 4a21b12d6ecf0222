"""Measures, prints one table with ratios, and writes `benchmarks/RESULTS.md`.

python -m benchmarks                       # all sections, some minutes
python -m benchmarks planner loader        # some of them
python -m benchmarks --lengths FILE        # lengths as in FILE instead of lognormal ones
python -m benchmarks peers --text FILE     # beside other input paths, see benchmarks/peers.py
python -m benchmarks histograms --histogram FILE  # best fit beside a proven bound
python -m benchmarks fill --lengths FILE   # padding and documents cut, beside best fit
python -m benchmarks tiers                 # steps of several processes, with and without tiers
python -m benchmarks why                   # spoilt documents, found by their losses
python -m benchmarks remote                # batches of a corpus in object storage
python -m benchmarks updates               # what was sampled a moment ago, packed for one update
python -m benchmarks groups                # continuations that share a prefix in a row
python -m benchmarks sides                 # rows of examples with several lengths
python -m benchmarks pictures              # pictures decoded ahead, packed, and learnt
python -m benchmarks speech                # frames and letters, packed, sorted, by a budget
python -m benchmarks stream                # a Grain data set as it comes, beside Grain's packers
python -m benchmarks tokens                # token files in place, beside a prepared corpus
python -m benchmarks mixture               # 1, 35 and 300 corpora, beside Grain's mixtures
python -m benchmarks curriculum            # a model that sees short rows first
python -m benchmarks programs              # training steps compiled for TPUs that are not here
"""

import argparse
import importlib

from benchmarks import results
from benchmarks.lengths import sample

SECTIONS = ("planner", "balance", "loader", "resume", "change", "growth")
# Run only if they are named.
NAMED = (
    *("fill", "scale", "peers", "tiers", "why", "remote", "updates", "groups"),
    *("sides", "tokens", "stream", "pictures", "speech", "histograms"),
    *("mixture", "curriculum", "programs"),
)
# The options that a section has; of the sections that run by default, beside the lengths.
OPTIONS = {
    "balance": ("histogram",),
    "fill": ("lengths", "histogram"),
    "histograms": ("histogram",),
    "scale": ("examples",),
    "peers": ("text", "interpreter", "row_length"),
    "tiers": ("processes",),
    "mixture": ("corpora",),
    "why": ("steps", "seed"),
    "pictures": ("steps",),
    "groups": ("widths",),
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
        default=[],
        help='JSON, a list or {"counts": a list}: entry i counts the examples of length i + 1; '
        "for histograms, balance and fill",
    )
    parser.add_argument("--examples", type=int, default=1_000_000_000, help="for scale (10⁹)")
    parser.add_argument("--seed", type=int, default=0, help="for why (0)")
    parser.add_argument(
        "--text",
        metavar="FILE",
        help="for peers: a document a line (functions of this Python)",
    )
    parser.add_argument("--row-length", type=int, default=512, help="for peers (512)")
    parser.add_argument(
        "--interpreter",
        metavar="LIBRARY=PYTHON",
        action="append",
        default=[],
        help="for peers: where grain, maxtext, trl or infinibatch is installed (this Python)",
    )
    parser.add_argument(
        "--processes", type=int, nargs="+", default=[2, 4], help="for tiers: how many (2 4)"
    )
    parser.add_argument(
        "--corpora", type=int, nargs="+", default=[1, 35, 300], help="for mixture (1 35 300)"
    )
    parser.add_argument("--steps", type=int, default=400, help="for why and pictures (400)")
    parser.add_argument(
        "--widths", type=int, nargs="+", default=[256, 1_024], help="for groups (256 1024)"
    )
    arguments = parser.parse_args()
    if wrong := set(arguments.sections) - {*SECTIONS, *NAMED}:
        there = ", ".join([*SECTIONS, *NAMED])
        parser.error(f"no section {', '.join(wrong)}; there are {there}")
    if "histograms" in arguments.sections and not arguments.histogram:
        parser.error("histograms needs --histogram FILE")
    names = arguments.sections or SECTIONS
    given = [sample(arguments.lengths)] if {*SECTIONS} & {*names} else []
    for name in names:
        module = importlib.import_module(f"benchmarks.{name}")
        options = [getattr(arguments, option) for option in OPTIONS.get(name, ())]
        lengths = given if name in SECTIONS else []
        show(module.measure(*lengths, *options))


def show(section: results.Section) -> None:
    """Prints a section, and keeps it in `RESULTS.md`."""
    print(section, end="\n\n", flush=True)
    results.write([section])


if __name__ == "__main__":
    main()
