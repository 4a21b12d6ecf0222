"""Arguments: the parser of the command line, and its help."""

import argparse
import functools
from collections.abc import Callable, Sequence
from typing import Any

import pipeline
from pipeline import registry
from pipeline.planning.options import CURRICULA
from pipeline.planning.packing import PACKINGS
from pipeline.planning.pieces import OVERFLOWS

ABOUT = """\
Look before you train. Prepare a corpus once. Then report shows what padding costs on it and what
Lockstep saves, buckets chooses shapes, show prints a batch, and check verifies everything. After
training, audit compares the batches of a run with its plan, and why names the documents behind a
loss.

  lockstep prepare 'data/*.jsonl.gz' --into corpus
  lockstep report corpus --html report.html
  lockstep buckets corpus --max-buckets 2
  lockstep show corpus --step 100 | less -R
  lockstep check corpus
  lockstep audit runs/mine
  lockstep why runs/mine --worst 20
"""

CODES = """\
exit status: 0 all is well; 1 check found an error in the corpus or the plan, or audit in the run;
2 the command was wrong, or its input cannot be read; a sentence on stderr says why.
"""

TOKENS = """\
DATA is the directory of a corpus; the work directory of a run, whose plan is shown with all its
changes; or a config (FILE.py or FILE.py:ARGUMENT), whose corpus is prepared first if it does not
exist yet, and whose options are used."""

LENGTHS = f"""{TOKENS}
Or with --lengths, lengths alone: a .npy array of integers, or .json that maps length to count, as
{{"12": 3400, "13": 3120}}."""

IN = f"""\
the names are token files of another program, which are read in place; FORMAT is one of
{", ".join(registry.names("tokens"))}, as in --tokens flat dtype=uint16 end=50256 (options: lockstep
kinds tokens)"""


def _whole(text: str, least: int = -(1 << 63)) -> int:
    try:
        value = int(text.replace(",", ""))
    except ValueError:  # also if Python does not read so many digits
        value = 1 << 63
    if not least <= value < 1 << 63:
        seen = text if len(text) <= 20 else f"{text[:20]}…"
        above = f" from {least}" if least > 0 else ""
        raise argparse.ArgumentTypeError(f"{seen!r} is not a whole number{above} below 2**63")
    return value


_count = functools.partial(_whole, least=1)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text[:20]!r} is not a number") from None


def _by_side(text: str, kind: Callable[[str], float] = _whole) -> Any:
    """A number, or numbers by side: `inputs=4096,patches=8192`."""
    if "=" not in text:
        return kind(text)
    sides = (side.partition("=") for side in text.split(","))
    return {name.strip(): kind(value) for name, _, value in sides}


# Options of buckets and plans: name, type, help. Those of lengths may differ between sides, as in
# inputs=128,patches=64.
PLANNING: tuple[tuple[str, Any, str], ...] = (
    ("tokens_per_batch", _whole, "the most positions in a global batch (16384)"),
    ("max_buckets", _whole, "the most buckets; each is one compilation (4)"),
    ("max_length", _by_side, "positions in the longest row, rounded up (longest example)"),
    ("length_multiple", _by_side, "lengths of buckets are multiples of this (128, or less)"),
    ("row_multiple", _whole, "rows are multiples of this: the devices that share them (1)"),
    ("packing", tuple(PACKINGS), "how rows are filled (best_fit)"),
    ("overflow", OVERFLOWS, "for examples longer than every bucket (split)"),
    ("align", _by_side, "segments begin at multiples of this (1)"),
    (
        "cost",
        functools.partial(_by_side, kind=_number),
        "what a position costs, of several sides as inputs=1,patches=0.5,images=0 (1)",
    ),
    ("tiers", _whole, "steps among which rows are sorted by cost (1)"),
    ("curriculum", CURRICULA, "the order of buckets in each cycle (none: evenly spread)"),
    ("cycles", _whole, "how often in an epoch the curriculum begins (1)"),
    ("read_shares", _whole, "shares of each window's files, of which a row needs one (1)"),
    ("attention", ("dense", "segment"), "the attention of the model, by which rows cost (dense)"),
    ("width", _whole, "width of the model: weighs attention against the rest (1024)"),
    ("seed", _whole, "decides every shuffle (0)"),
)


class _Once(argparse.Action):
    """Keeps the value of a flag, which may be given once, since the last would win silently."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option: Any = None) -> None:
        seen = vars(namespace).setdefault("seen", set())
        if option and self.dest in seen:
            raise argparse.ArgumentError(self, "it is given twice; remove one of the two")
        seen.add(self.dest)
        setattr(namespace, self.dest, values)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments of a command; ends Python with the usage of that command if they are wrong."""
    parsed, unknown = parser().parse_known_args(arguments)
    if unknown:
        parsed.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    return parsed


def parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    whole = argparse.ArgumentParser(
        prog="lockstep",
        description=ABOUT,
        epilog=CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    whole.add_argument("--version", action="version", version=f"lockstep {pipeline.__version__}")
    commands = whole.add_subparsers(required=True, dest="command", metavar="COMMAND")

    def add(name: str, about: str, more: str = "", data: str = "") -> Callable[..., Any]:
        """Adds a command, with the help of its dataset if it takes one; returns `add_argument`."""
        command = commands.add_parser(
            name,
            help=about,
            description=f"{about[0].upper()}{about[1:]}. {more}".strip(),
            epilog=f"{data}\n\n{CODES}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.register("action", None, _Once)
        command.set_defaults(parser=command)
        if not data:
            return command.add_argument
        if data == TOKENS:
            command.add_argument("data", help="a corpus, a run, or a config; see below")
        else:
            command.add_argument("data", nargs="+", help="see below; several are one mixture")
        _add_planning(command)
        if data == LENGTHS:
            about = "DATA are files of lengths: .npy arrays, or .json that maps length to count"
            command.add_argument("--lengths", action="store_true", help=about)
        command.add_argument("--tokens", nargs="+", metavar=("FORMAT", "NAME=VALUE"), help=IN)
        return command.add_argument

    flag = add("report", "what padding costs on this data, and what Lockstep saves", data=LENGTHS)
    flag("--html", metavar="FILE", help="write one page with plots, for a browser")
    flag("--json", metavar="FILE", nargs="?", const="-", help="write figures; or print them")

    more = "The output\nis Python: pass it to pipeline.load or pipeline.Plan as buckets=buckets."
    add("buckets", "buckets that fit this data, ready to paste", more, LENGTHS)

    flag = add(
        "show",
        "a batch in colour, as it reaches the model",
        "Each segment has a letter\nand a colour; · is padding. Small letters are positions "
        "without loss; if a segment has some, its\ntext with loss stands between ⟦ and ⟧.",
        TOKENS,
    )
    flag("--step", type=_whole, default=0, help="the step of the batch, over all epochs (0)")
    flag("--row", type=_whole, help="show one row with all its text")
    flag("--ids", action="store_true", help="also print token ids, targets and loss weights")
    flag("--color", choices=("auto", "always", "never"), default="auto")
    flag("--svg", metavar="FILE", help="draw it instead, as SVG for light and for dark pages")

    flag = add(
        "check",
        "verify a corpus, and that its plan is a partition",
        "Reads all files:\ndigests, offsets, fingerprint, ids against the vocabulary, exact "
        "copies; then walks\none epoch of the plan.",
        TOKENS,
    )
    flag("--epoch", type=_whole, default=0, help="the epoch to walk (0)")

    flag = add(
        "audit",
        "whether a run trained on each position as planned",
        "It reads plans.json and\nthe digests in metrics.jsonl, over restarts, other numbers "
        "of hosts and changes of the plan.",
    )
    flag("workdir", help="the work directory of a run, with plans.json and metrics.jsonl")

    flag = add(
        "why",
        "the documents behind a loss",
        "Losses are\nmeans in nats. The usual loss is that of the same corpus, from 8 steps before "
        "to 8 after.\nDocuments whose loss was not finite come first.",
    )
    flag("workdir", help="the work directory of a run, with plans.json and losses/")
    group = commands.choices["why"].add_mutually_exclusive_group(required=True)
    group.add_argument("--step", type=_whole, help="the documents of a step, by loss")
    worst = "the N documents of the run whose loss is most above the usual, over all epochs"
    group.add_argument("--worst", type=_count, metavar="N", help=worst)
    group.add_argument("--document", type=_whole, metavar="N", help="the history of a document")

    flag = add(
        "kinds",
        "the kinds of records, tokens, templates, tokenizers and views, with their options",
        "A config\nand Python spell the options alike. Kinds of other packages that are installed "
        "are among them.",
    )
    flag("group", nargs="?", choices=[*registry.KINDS], help="one group (all)")

    more = "If it is\ninterrupted, run it again to continue."
    flag = add("prepare", "tokenise text into a corpus, once and in parallel", more)
    flag(
        "source",
        nargs="*",
        help="text, .jsonl or .csv files, or globs, also compressed; .parquet, .arrow or .feather "
        "files; the folder of a saved Hugging Face data set; or one config (.py), for which "
        "training and evaluation corpora are made",
    )
    flag("--tokens", nargs="+", metavar=("FORMAT", "NAME=VALUE"), help=IN)
    flag("--into", metavar="DIRECTORY", help="the directory of the corpus")
    about = "the kind of files, if their names do not say it: "
    about += f"{', '.join(registry.names('records'))} (options: lockstep kinds records)"
    flag("--kind", nargs="+", metavar=("KIND", "NAME=VALUE"), default=[""], help=about)
    flag("--field", default="text", help="the field of a record that holds its text (text)")
    about = "instead of --field, the text of a record and its loss; KIND is one of "
    about += f"{', '.join(registry.names('templates'))}, as in --template answer "
    about += "prompt='{question}' answer='{answer}' (fields: lockstep kinds templates); or "
    about += "MODULE:NAME of a function, whose attribute features describes the sides it returns"
    flag("--template", nargs="+", metavar=("KIND", "NAME=TEXT"), help=about)
    flag(
        "--tokenizer",
        default="bytes",
        help=f"{', '.join(registry.names('tokenizers'))}; or the file of one, such as "
        "tokenizer.json or a sentencepiece .model; sentencepiece is trained on this text (bytes)",
    )
    flag("--vocab-size", type=_count, default=8192, help="of a tokenizer that is trained (8192)")
    about = "the mark {} each text; '' for none (the tokenizer's own)"
    flag("--begin-token", metavar="TOKEN", help=about.format("before"))
    flag("--end-token", metavar="TOKEN", help=about.format("after"))
    flag("--no-marks", action="store_true", help="do not mark where texts begin and end")
    about = "a field that names what a record is of, such as its conversation, for "
    about += "corpus.split(by=FIELD) and config.hold_out_by"
    flag("--key", metavar="FIELD", help=about)
    about = "at a record that fails: raise ends; skip leaves it without tokens (raise)"
    flag("--on-error", choices=("raise", "skip"), default="raise", help=about)
    about = (
        "refuse text that the tokenizer changes, in a sample of the records, instead of counting it"
    )
    flag("--strict", action="store_true", help=about)
    flag("--workers", type=_count, help="processes (one for each CPU, if there is enough to do)")
    flag("--workdir", help="for a config: its work directory (runs/NAME)")
    engines = ("processes", "ray")
    flag("--engine", choices=engines, default="processes", help="runs the work (processes)")
    flag("--engine-options", metavar="TEXT", help="the address of a Ray cluster")
    flag("--task", type=_whole, metavar="I", help="do share I only, from 0; see --of")
    about = "the number of shares, which may run anywhere; without --task and --of, assemble the "
    about += "corpus"
    flag("--of", type=_count, metavar="N", help=about)
    return whole


def _add_planning(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group(
        "buckets and plan", "these override the options of a config; defaults in brackets"
    )
    group.add_argument("--workdir", help="for a config: its work directory (runs/NAME)")
    for name, kind, about in PLANNING:
        form: dict[str, Any]
        form = {"choices": kind} if isinstance(kind, tuple) else {"type": kind, "metavar": "N"}
        group.add_argument(f"--{name.replace('_', '-')}", help=about, **form)
