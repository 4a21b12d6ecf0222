"""The command line: `python -m pipeline COMMAND`. Each command says more with --help."""

import argparse
import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence

from pipeline.commands.arguments import PLANNING, parser

FINE, DAMAGED, WRONG = 0, 1, 2


class WrongCommand(RuntimeError):
    """The command line asks for what cannot be; the message says why."""


def _opened(arguments: argparse.Namespace):
    """The subject and the options that the command line gives.

    Of a work directory, the corpus of its run and its plan, with all changes.
    """
    from etils import epath

    from pipeline.report import Options, open_subject
    from pipeline.report.subject import of_corpus
    from pipeline.training.history import NAME, read_history

    paths = [arguments.subject] if isinstance(arguments.subject, str) else arguments.subject
    given = {name: getattr(arguments, name) for name, _, _ in PLANNING}
    given = {name: value for name, value in given.items() if value is not None}
    workdir = epath.Path(paths[0]).expanduser()
    if len(paths) == 1 and (workdir / NAME).exists():
        if given:
            raise WrongCommand(
                f"{', '.join('--' + name.replace('_', '-') for name in given)} cannot be given "
                f"with {paths[0]}, whose plan is that of its run"
            )
        corpus, plan = read_history(workdir)
        options = plan.options.as_json(("packing", "overflow", "seed"))
        options["tokens_per_batch"] = max(bucket.positions for bucket in plan.options.buckets)
        subject = of_corpus(corpus, paths[0], options, plan)
    else:
        subject = open_subject(paths, arguments.workdir)
    return subject, Options({**subject.options, **given}).for_lengths(subject.lengths)


def report(arguments: argparse.Namespace) -> int:
    """Measures, and writes what was asked for; a table if nothing else goes to the terminal."""
    from pipeline.report import measure
    from pipeline.report.measure import SAMPLE

    if arguments.png:  # says what is missing before it measures
        from pipeline.report.figure import figure, require_matplotlib

        require_matplotlib()
    subject, options = _opened(arguments)
    figures = measure(
        subject, options, sample=arguments.sample or SAMPLE, optimal=arguments.optimal, tell=_tell()
    )
    if arguments.html:
        from pipeline.report.page import page

        _write(arguments.html, page(figures))
    if arguments.png:
        figure(figures, arguments.png)
    text = json.dumps(figures, indent=1) + "\n"
    if arguments.json == "-":
        print(text, end="")
    else:
        from pipeline.report.terminal import terminal

        if arguments.json:
            _write(arguments.json, text)
        width = shutil.get_terminal_size((130, 40)).columns
        print(terminal(figures, width=width, colour=_coloured("auto")))
    return FINE


def buckets(arguments: argparse.Namespace) -> int:
    """Prints the fitted buckets as Python."""
    from pipeline.planning import figures

    subject, options = _opened(arguments)
    plan = subject.plan or options.plan(subject.examples)
    print("from pipeline import Bucket\n")
    fitted = ("tokens_per_batch", "max_buckets", "row_multiple", "packing", "attention", "width")
    if subject.plan is None:
        print(f"# Fitted to {subject.name}")
        for some in (fitted[:3], fitted[3:]):
            print(f"# {', '.join(f'{name}={options[name]!r}' for name in some)}")
    else:
        print(f"# Those of {subject.name} in the end")
    found = figures.epoch_batches(plan)
    print(f"# {sum(found.values()):,} batches an epoch, {plan.padding:.3%} padding.")
    print("buckets = (")
    for bucket, batches in found.items():
        print(f"    Bucket(rows={bucket.rows}, length={bucket.length}),  # {batches:,} batches")
    print(")")
    return FINE


def show(arguments: argparse.Namespace) -> int:
    """Prints a batch, or draws it."""
    from pipeline.commands.show import Shown

    subject, options = _opened(arguments)
    shown = Shown(subject.corpus, subject.plan or options.plan(subject.corpus), arguments.step)
    if arguments.png:
        shown.picture(arguments.png)
        print(f"wrote {arguments.png}")
        return FINE
    width = shutil.get_terminal_size((110, 40)).columns
    for line in shown.lines(row=arguments.row, width=width, colour=_coloured(arguments.color)):
        print(line)
    return FINE


def check(arguments: argparse.Namespace) -> int:
    """Verifies; 1 if something is wrong."""
    from etils import epath

    from pipeline.commands.check import check_corpus, check_plan

    try:
        subject, options = _opened(arguments)
    except ValueError as error:
        if not epath.Path(arguments.subject).is_dir():
            raise  # it is not a corpus that is wrong
        print(f"wrong: {error}", file=sys.stderr)
        return DAMAGED
    plan = subject.plan or options.plan(subject.corpus)
    try:
        check_corpus(subject.corpus, print)
        check_plan(plan, arguments.epoch, print)
    except ValueError as error:
        print(f"wrong: {error}", file=sys.stderr)
        return DAMAGED
    return FINE


def audit(arguments: argparse.Namespace) -> int:
    """Compares what a run did with its plan; 1 if that differs."""
    from etils import epath

    from pipeline.training.audit import NotAsPlanned, audit

    try:
        audit(epath.Path(arguments.workdir).expanduser(), print)
    except NotAsPlanned as error:
        print(f"wrong: {error}", file=sys.stderr)
        return DAMAGED
    return FINE


def prepare(arguments: argparse.Namespace) -> int:
    """Prepares a corpus, or those of a config."""
    from etils import epath

    import pipeline
    from pipeline.configuration import open_source
    from pipeline.report import open_subject

    if [os.path.splitext(each)[1] for each in arguments.source] == [".py"]:
        print(open_subject(arguments.source, arguments.workdir).corpus)
        return FINE
    if not arguments.into:
        raise ValueError("--into is missing; say in which directory the corpus goes")
    directory = epath.Path(arguments.into).expanduser()
    fields = {
        "tfds": arguments.tfds or "",
        "files": ",".join(arguments.source),
        "split": arguments.split,
        "kind": arguments.kind or "",
        "begin": arguments.begin,
        "end": arguments.end,
    }
    source = open_source(fields, "the command")
    marks = {"begin": not arguments.no_marks, "end": not arguments.no_marks}
    tokenizer: pipeline.tokenizers.Tokenizer
    if arguments.tokenizer == "bytes":
        tokenizer = pipeline.tokenizers.Bytes(**marks)
    elif arguments.tokenizer == "sentencepiece":
        tokenizer = pipeline.tokenizers.train_sentencepiece(
            source,
            arguments.vocab_size,
            directory / "tokenizer.model",
            field=arguments.field,
            **marks,
        )
    elif arguments.tokenizer.endswith(".json"):
        tokenizer = pipeline.tokenizers.HuggingFace(arguments.tokenizer, **marks)
    else:
        tokenizer = pipeline.tokenizers.SentencePiece(arguments.tokenizer, **marks)
    workers = arguments.workers
    print(
        pipeline.prepare(source, tokenizer, directory, field=arguments.field, num_workers=workers)
    )
    print(f"\nnow look at it: python -m pipeline report {arguments.into}")
    return FINE


def _tell() -> Callable[[str], None]:
    """Says on a terminal what is going on, on one line that is written over."""
    if not sys.stderr.isatty():
        return lambda what: None
    return lambda what: print(f"\r\033[K{what} …\r", end="", file=sys.stderr, flush=True)


def _coloured(when: str) -> bool:
    if when == "auto":
        return sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    return when == "always"


def _write(path: str, text: str) -> None:
    from etils import epath

    epath.Path(path).expanduser().write_text(text)
    print(f"wrote {path}", file=sys.stderr)


COMMANDS = {
    "report": report,
    "buckets": buckets,
    "show": show,
    "check": check,
    "audit": audit,
    "prepare": prepare,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit status."""
    given = parser().parse_args(arguments)
    try:
        return COMMANDS[given.command](given)
    except (ValueError, OSError, ImportError, RuntimeError) as error:
        if isinstance(error, BrokenPipeError):  # `show | head` has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return FINE
        print(f"error: {error}", file=sys.stderr)
        return WRONG
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
