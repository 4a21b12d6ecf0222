"""Arguments: what the command line takes, and the help that teaches it."""

import argparse
from typing import Any

from pipeline.packing.cascade import PACKINGS
from pipeline.planning.pieces import OVERFLOWS

ABOUT = """\
Look before you train. A corpus is prepared once; then report shows what padding costs on it and
what Lockstep saves, buckets chooses shapes, show prints a batch, and check verifies everything.
Afterwards, audit compares what was trained on with what was planned.

  python -m pipeline prepare 'data/*.jsonl.gz' --into corpus
  python -m pipeline report corpus --html report.html
  python -m pipeline buckets corpus --max-buckets 2
  python -m pipeline show corpus --step 100 | less -R
  python -m pipeline check corpus
  python -m pipeline audit runs/mine
"""

CODES = """\
exit status: 0 all is well; 1 check found something wrong with the corpus or the plan, or audit with
the run; 2 the command was wrong, or what it was given cannot be read; a sentence on stderr says
what.
"""

DATA = """\
what may be given: the directory of a corpus; the work directory of a run, whose plan is shown with
all its changes; a config (.py), whose corpus is prepared first if it
is not there yet, and whose options are used; lengths alone, as a .npy array of integers, or as
.json that maps length to count, such as {"12": 3400, "13": 3120}.
"""

# Options of buckets and plans: name, type, what it says.
PLANNING: tuple[tuple[str, Any, str], ...] = (
    ("tokens_per_batch", int, "positions in a global batch, at most (16384)"),
    ("max_buckets", int, "the most buckets; each is one compilation (4)"),
    ("max_length", int, "the longest row; longer examples overflow (the longest example)"),
    ("length_multiple", int, "lengths of buckets are multiples of this (128)"),
    ("row_multiple", int, "rows are multiples of this: the devices that share them (1)"),
    ("packing", tuple(PACKINGS), "how rows are filled (best_fit)"),
    ("overflow", OVERFLOWS, "what becomes of examples longer than every bucket (split)"),
    ("attention", ("dense", "segment"), "what buckets are fitted for (dense)"),
    ("width", int, "of the model: weighs attention against the rest (1024)"),
    ("seed", int, "decides every shuffle (0)"),
)


def parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    whole = argparse.ArgumentParser(
        prog="python -m pipeline",
        description=ABOUT,
        epilog=CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = whole.add_subparsers(required=True, dest="command", metavar="COMMAND")

    def add(name: str, about: str, more: str = "") -> argparse.ArgumentParser:
        return commands.add_parser(
            name,
            help=about,
            description=f"{about[0].upper()}{about[1:]}. {more}".strip(),
            epilog=f"{DATA if name not in ('prepare', 'audit') else ''}\n{CODES}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    command = add("report", "what padding costs on this data, and what Lockstep saves")
    command.add_argument("data", nargs="+", help="see below; several are one mixture")
    command.add_argument("--html", metavar="FILE", help="write one page with plots, for a browser")
    command.add_argument(
        "--json",
        metavar="FILE",
        nargs="?",
        const="-",
        help="write figures; without FILE, print them",
    )
    command.add_argument("--png", metavar="FILE", help="write the comparison as a picture")
    command.add_argument(
        "--sample",
        type=_count,
        metavar="N",
        help="examples to simulate other strategies on, at most (1000000)",
    )
    command.add_argument(
        "--optimal",
        action="store_true",
        help="include optimal packing also for many different lengths, which may take minutes",
    )
    _add_planning(command)

    command = add(
        "buckets",
        "buckets that fit this data, ready to paste",
        "What is\nprinted is Python: pass it to pipeline.load or pipeline.Plan as buckets=buckets.",
    )
    command.add_argument("data", nargs="+", help="see below; several are one mixture")
    _add_planning(command)

    command = add(
        "show",
        "a batch in colour, as it reaches the model",
        "Each segment has a letter\nand a colour; · is padding.",
    )
    command.add_argument("data", help="the directory of a corpus, or a config; see below")
    command.add_argument("--step", type=int, default=0, help="which batch, over all epochs (0)")
    command.add_argument("--row", type=int, help="show one row with all its text")
    command.add_argument(
        "--png", metavar="FILE", help="draw rows × positions into a picture instead"
    )
    command.add_argument("--color", choices=("auto", "always", "never"), default="auto")
    _add_planning(command)

    command = add(
        "check",
        "verify a corpus, and that its plan is a partition",
        "Reads all files:\ndigests, offsets, fingerprint, ids against the vocabulary; then walks "
        "one epoch of the plan.",
    )
    command.add_argument("data", help="the directory of a corpus, or a config; see below")
    command.add_argument("--epoch", type=int, default=0, help="the epoch to walk (0)")
    _add_planning(command)

    command = add(
        "audit",
        "whether a run trained on what was planned, each position as often as that says",
        "From\nplans.json and the digests in metrics.jsonl: over restarts, numbers of hosts and "
        "changes of the plan.",
    )
    command.add_argument("workdir", help="the work directory of a run of train.py")

    command = add(
        "prepare",
        "text to a corpus: tokenised once, in parallel, resumable",
        "Run it again\nafter an interruption and it goes on from there.",
    )
    command.add_argument(
        "source",
        nargs="*",
        help="text or .jsonl files, or globs, also .gz and .zst; .parquet, .arrow, .feather or "
        ".array_record files; a Hugging Face data set saved to disk; or one config (.py), for "
        "which training and evaluation corpora are made",
    )
    command.add_argument("--into", metavar="DIRECTORY", help="where the corpus goes")
    command.add_argument("--tfds", metavar="NAME", help="a prepared TFDS data set instead of files")
    command.add_argument("--split", default="train", help="of a data set that has some (train)")
    command.add_argument(
        "--kind",
        choices=("text", "jsonl", "parquet", "arrow", "array_record"),
        help="of the files, where the ends of their names do not say it",
    )
    command.add_argument("--field", default="text", help="of a record, that holds its text (text)")
    command.add_argument("--begin", type=float, default=0.0, help="first share of records (0.0)")
    command.add_argument("--end", type=float, default=1.0, help="last share of records (1.0)")
    command.add_argument(
        "--tokenizer",
        default="bytes",
        help="bytes; or sentencepiece, trained on this text; or a sentencepiece .model; or a "
        "Hugging Face tokenizer.json (bytes)",
    )
    command.add_argument("--vocab-size", type=_count, default=8192, help="when training (8192)")
    command.add_argument("--no-marks", action="store_true", help="mark no begin and end of texts")
    command.add_argument("--workers", type=_count, help="processes (as many as CPUs, if worth it)")
    command.add_argument("--workdir", help="for a config: where it runs (runs/NAME)")
    return whole


def _count(text: str) -> int:
    value = int(text.replace("_", "").replace(",", ""))
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value


def _add_planning(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group(
        "buckets and plan", "over those of a config, if one is given; defaults in brackets"
    )
    group.add_argument("--workdir", help="for a config: where it runs (runs/NAME)")
    for name, kind, about in PLANNING:
        flag = f"--{name.replace('_', '-')}"
        if isinstance(kind, tuple):
            group.add_argument(flag, choices=kind, help=about)
        else:
            group.add_argument(flag, type=kind, metavar="N", help=about)
