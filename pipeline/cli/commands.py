"""The command line: `lockstep COMMAND`; see `--help`."""

import argparse
import dataclasses
import datetime
import io
import json
import os
import re
import shlex
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

from pipeline.cli.arguments import PLANNING, parse
from pipeline.errors import InvalidState, InvalidValue, StorageError, UserError, counted
from pipeline.fs.atomic import as_path

FINE, DAMAGED, WRONG = 0, 1, 2


class Damaged(Exception):
    """A corpus, a plan or a run is not as it should be."""


def _open(arguments: argparse.Namespace, *, tokens: bool = False) -> tuple[Any, Any]:
    """The dataset and the options of the command line; `tokens`: not only lengths."""
    from pipeline.cli.prepare import open_flags, prepare_config
    from pipeline.history.plans import NAME, read_history
    from pipeline.history.run_config import read_config
    from pipeline.report import Options, from_corpus, from_run, open_dataset, read_run

    paths = [arguments.data] if isinstance(arguments.data, str) else arguments.data
    flags = {name: getattr(arguments, name) for name, _, _ in PLANNING}
    flags = {name: value for name, value in flags.items() if value is not None}
    workdir = as_path(paths[0])
    configs = [path for path in paths if _is_config(path)]
    if len(paths) == 1 and (workdir / NAME).exists():
        if flags:
            raise InvalidState(
                f"{', '.join('--' + name.replace('_', '-') for name in flags)} cannot change the "
                f"plan of the run in {paths[0]}; remove the options, or give the corpus"
            )
        corpus, plan = read_history(workdir)
        batches = (read_config(workdir) or {}).get("batches", {})  # none of another loop
        batches = {name: value for name, value in batches.items() if value is not None}
        run = read_run(workdir) if arguments.command == "report" else None
        dataset = from_run(corpus, paths[0], plan, batches, run)
    elif arguments.tokens:
        dataset = from_corpus(open_flags(arguments.tokens, paths), " + ".join(paths))
    elif configs and len(paths) > 1:
        raise InvalidValue(
            "a config is given together with other paths; give it alone, or give directories of "
            "corpora"
        )
    elif configs:
        corpus, options = prepare_config(paths[0], arguments.workdir)
        dataset = from_corpus(corpus, paths[0], options)
    else:
        dataset = open_dataset(paths, lengths=getattr(arguments, "lengths", False))
    if tokens and dataset.corpus is None:
        raise InvalidState(
            f"{arguments.command} needs a corpus with its tokens, not {dataset.name}; "
            "give the directory of one, the work directory of a run, or a config"
        )
    return dataset, Options({**dataset.options, **flags}).for_lengths(dataset.lengths)


def _is_config(path: str) -> bool:
    """Whether a path is FILE.py or FILE.py:ARGUMENT."""
    return path.split(":", 1)[0].endswith(".py")


def kinds(arguments: argparse.Namespace) -> None:
    """Prints the kinds of a group, or of all, with their options."""
    from pipeline import registry

    for group in [arguments.group] if arguments.group else registry.KINDS:
        print(f"{group}\n")
        for kind in registry.kinds(group):
            print(textwrap.indent(f"{kind}", "  "), end="\n\n")


def report(arguments: argparse.Namespace) -> None:
    """Measures; writes the files asked for, and prints a table, or JSON."""
    from pipeline.report import format_page, format_text, measure

    dataset, options = _open(arguments)
    figures = measure(dataset, options, _progress())
    if arguments.html:
        command = shlex.join(["lockstep", *arguments.command_line])
        page = format_page(figures, command=command, date=datetime.date.today())
        _write(arguments.html, page.encode())
    text = json.dumps(dataclasses.asdict(figures), indent=1) + "\n"
    if arguments.json == "-":
        print(text, end="")
        return
    if arguments.json:
        _write(arguments.json, text.encode())
    width = shutil.get_terminal_size((130, 40)).columns
    print(format_text(figures, width=width, colour=_coloured("auto")))


def buckets(arguments: argparse.Namespace) -> None:
    """Prints the fitted buckets as Python."""
    dataset, options = _open(arguments)
    plan = dataset.plan or options.plan(dataset.examples)
    print("from pipeline import Bucket\n")
    print(f"# {'The last buckets of' if dataset.plan else 'Fitted to'} {dataset.name}")
    if not dataset.plan:
        names = ("tokens_per_batch", "max_buckets", "row_multiple", "packing", "attention", "width")
        print(f"# {', '.join(f'{name}={options[name]!r}' for name in names)}")
    figures = plan.count(*plan.epoch_steps)
    counts = {bucket: int(figures.buckets[bucket][0]) for bucket in plan.options.buckets}
    print(f"# {counted(sum(counts.values()), 'batch')} an epoch, {figures.padding:.3%} padding.")
    print("buckets = (")
    for bucket, batches in counts.items():
        number = counted(batches, "batch")
        print(f"    {bucket!r},  # {number}")
    print(")")


def show(arguments: argparse.Namespace) -> None:
    """Prints a batch, or draws it."""
    from pipeline.cli.picture import draw
    from pipeline.cli.show import Shown

    dataset, options = _open(arguments, tokens=True)
    plan = dataset.plan or options.plan(dataset.examples)
    shown = Shown(dataset.examples, plan, arguments.step)
    if arguments.svg:
        _write(arguments.svg, draw(shown, row=arguments.row).encode())
        return
    width = shutil.get_terminal_size((110, 40)).columns
    colour = _coloured(arguments.color)
    for line in shown.lines(row=arguments.row, width=width, colour=colour, ids=arguments.ids):
        print(line)


def check(arguments: argparse.Namespace) -> None:
    """Verifies a corpus and its plan."""
    from pipeline.cli.check import check_corpus, check_duplicates, check_plan

    try:
        dataset, options = _open(arguments, tokens=True)
    except InvalidValue as error:
        if as_path(arguments.data).is_dir():
            raise Damaged(error) from error
        raise  # the command is wrong, not a corpus
    plan = dataset.plan or options.plan(dataset.examples)
    try:
        check_corpus(dataset.examples, print)
        check_duplicates(dataset.examples, print)
        check_plan(plan, arguments.epoch, print)
    except InvalidValue as error:
        raise Damaged(error) from error


def audit(arguments: argparse.Namespace) -> None:
    """Compares the batches of a run with its plan."""
    from pipeline.history import NotAsPlanned, audit

    try:
        audit(as_path(arguments.workdir), print)
    except NotAsPlanned as error:
        raise Damaged(error) from error


def why(arguments: argparse.Namespace) -> None:
    """Prints the documents behind a loss."""
    from pipeline.cli.show import printable
    from pipeline.history import Why

    run = Why(as_path(arguments.workdir))
    ways = {"step": run.step, "worst": run.worst, "document": run.document}
    ((name, number),) = ((n, v) for n, v in vars(arguments).items() if n in ways and v is not None)
    width = None if name == "document" else shutil.get_terminal_size((110, 40)).columns
    for line in ways[name](number):
        print(printable(line)[:width])


def prepare(arguments: argparse.Namespace) -> None:
    """Prepares a corpus, pairs, or the corpora of a config."""
    from pipeline.cli.prepare import prepare_config, prepare_files

    if [*map(_is_config, arguments.source)] != [True]:
        print(prepare_files(arguments))
        return
    if (arguments.engine, arguments.of, arguments.on_error) != ("processes", None, "raise"):
        raise InvalidValue(
            "--engine, --task and --on-error need files, and a config is given; prepare its files "
            "into the corpus directory of the config's run"
        )
    print(prepare_config(arguments.source[0], arguments.workdir)[0])


def _progress() -> Callable[[str], None]:
    """Shows progress on one line of a terminal, which the next message overwrites."""
    if not sys.stderr.isatty():
        return lambda text: None
    return lambda text: print(f"\r\033[K{text} …\r", end="", file=sys.stderr, flush=True)


def _coloured(when: str) -> bool:
    if when == "auto":
        return sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    return when == "always"


def _write(path: str, content: bytes) -> None:
    try:
        as_path(path).write_bytes(content)
    except OSError as error:
        raise StorageError(
            f"{path} cannot be written: {error.strerror or error}; check the path, and make room"
        ) from error
    print(f"wrote {path}", file=sys.stderr)


COMMANDS = {
    command.__name__: command
    for command in (report, buckets, show, check, audit, why, kinds, prepare)
}


def main(words: Sequence[str] | None = None) -> int:
    """Runs a command of these words, or of those of the shell; returns its exit status."""
    arguments = parse(words)
    arguments.command_line = sys.argv[1:] if words is None else words
    if isinstance(sys.stdout, io.TextIOWrapper):  # whose encoding may be ASCII, as in a container
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        COMMANDS[arguments.command](arguments)
    except BrokenPipeError:  # `show | head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        advice = "; finished work is kept; run the same command to continue"
        print(f"stopped{advice if arguments.command == 'prepare' else ''}", file=sys.stderr)
        return 130
    except Damaged as error:
        print(f"wrong: {error}", file=sys.stderr)
        return DAMAGED
    except UserError as error:
        print(f"error: {_name_flags(str(error), arguments)}", file=sys.stderr)
        return WRONG
    return FINE


def _name_flags(text: str, arguments: argparse.Namespace) -> str:
    """A message that names options as on the command line: `--field` instead of `field=`."""
    usage = arguments.parser.format_usage()
    for name in vars(arguments):
        flag, ending = f"--{name.replace('_', '-')}", r"=(?=[\s,;]|$)"
        if "_" in name:  # which is not an English word
            ending += r"|(?![\w/-]|\.\w)"
        if flag in usage:
            text = re.sub(rf"(?<![\w/.-]){name}(?:{ending})", flag, text)
    return text
