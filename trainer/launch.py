"""The launch of a training program: parses flags, and lets hosts begin and end together.

Importing this module defines the flags of every such program.
"""

import logging
import os
import pathlib
import signal
import sys
from collections.abc import Callable
from typing import Any

import jax
from absl import app, flags
from etils import epath
from ml_collections import ConfigDict, config_flags

import pipeline
from pipeline.errors import InvalidValue, UserError, describe
from pipeline.fs import as_path
from pipeline.steps import hosts
from trainer.config import CHECKOUT, default_workdir, load_config, stored_config
from trainer.model import Model
from trainer.scoring import score
from trainer.workdir import suggest_commands

LOGGERS = "pipeline", "trainer", "models"  # those of the project

DEFAULT = os.fspath(CHECKOUT / "configs" / "quickstart.py")

MODE = flags.DEFINE_enum("mode", "train", ["train", "score", "evaluate"], "What to do.")
SCORES = flags.DEFINE_string(
    "scores",
    None,
    "Where --mode=score and --mode=evaluate write; default: WORKDIR/scores/STEP, and "
    "WORKDIR/tests/CORPUS/STEP.",
)
WORKDIR = flags.DEFINE_string(
    "workdir", None, "Directory of corpus, checkpoints, metrics; default: runs/NAME of the config."
)
COORDINATOR = flags.DEFINE_string("coordinator", None, "HOST:PORT of process 0.")
NUM_PROCESSES = flags.DEFINE_integer("num_processes", None, "Number of processes.")
PROCESS_ID = flags.DEFINE_integer("process_id", None, "Number of this process, from 0.")
WAIT = flags.DEFINE_integer("wait", 100, "Seconds of silence after which a host counts as gone.")
VERSION = flags.DEFINE_bool("version", False, "Print the version and exit.")


def run(
    train: Callable[[ConfigDict, epath.Path], int],
    make_model: Callable[[ConfigDict, Any], Model],
) -> None:
    """Parses the flags, joins the hosts, trains or scores, and ends with the status of that.

    Process 0 prints the log of the library, and the others only warnings. `train(config, workdir)`
    returns the status; scores are made by `score`, with the model of `make_model`.
    """
    # Until a run begins, ^C ends the process as SIGTERM does: JAX runs inside callbacks of Python's
    # garbage collector, where a KeyboardInterrupt would be lost.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

    def start(_: list[str]) -> None:
        logging.basicConfig(
            level=logging.WARNING, format="%(message)s", stream=sys.stdout, force=True
        )
        logging.getLogger("absl").setLevel(logging.WARNING)
        with hosts.exit_together(_name()):
            hosts.connect(COORDINATOR.value, NUM_PROCESSES.value, PROCESS_ID.value, WAIT.value)
            if jax.process_index() == 0:
                for name in LOGGERS:
                    logging.getLogger(name).setLevel(logging.INFO)
            config, workdir = flags.FLAGS.config, as_path(flags.FLAGS.workdir)
            if MODE.value == "train":
                if not (status := train(config, workdir)):
                    suggest_commands(workdir)
                sys.exit(status)
            score(config, workdir, make_model, SCORES.value, test=MODE.value == "evaluate")

    app.run(start, flags_parser=parse_flags)


def parse_flags(arguments: list[str]) -> list[str]:
    """Parses the flags, among them `config` and `workdir`; exits if one is wrong.

    The config is that of --config, or of the run in --workdir, or of configs/quickstart.py.
    """
    try:
        program, *words = _parse(flags.FLAGS.read_flags_from_files, arguments, force_gnu=False)
        file, words = _take("config", words)
        workdir, words = _take("workdir", words)
        config = stored_config(workdir) if workdir and file is None else None
        if config is None:
            config = load_config(DEFAULT if file is None else file)
        about = "FILE.py or FILE.py:ARGUMENT; its fields are flags, as in --config.steps=500."
        _parse(config_flags.DEFINE_config_dict, "config", config, about, sys_argv=words)
        for flag in (flags.FLAGS["config"], *flags.FLAGS.flags_by_module_dict()[__name__]):
            flags.FLAGS.register_key_flag_for_module(sys.argv[0], flag)  # for --help
        rest = _parse(flags.FLAGS, [program, *words])
        if len(rest) > 1:
            raise InvalidValue(
                f"{rest[1]!r} is not a flag; write --NAME=VALUE, and lists in quotes"
            )
        if SCORES.value and MODE.value == "train":
            raise InvalidValue(
                "--scores needs --mode=score or evaluate, and --mode is train; remove it"
            )
    except UserError as error:
        sys.exit(describe(error, command=_name()))
    if VERSION.value:
        print(f"lockstep {pipeline.__version__}")
        sys.exit()
    flags.FLAGS["workdir"].value = workdir or default_workdir(file or DEFAULT)
    return rest


def _take(name: str, words: list[str]) -> tuple[str | None, list[str]]:
    """The value of a flag among the words of a command line, the last if several; other words."""
    value, others, following = None, [], iter(words)
    for word in following:
        flag, equals, given = word.partition("=")
        if flag not in (f"--{name}", f"-{name}"):
            others.append(word)
        elif equals:
            value = given
        elif (value := next(following, None)) is None:
            raise InvalidValue(f"--{name} has no value; write --{name}=VALUE")
    return value, others


def _parse(parse: Callable, *arguments: Any, **options: Any) -> Any:
    """The result of a parser of flags, whose errors become those of the user."""
    try:
        return parse(*arguments, **options)
    except Exception as error:
        raise InvalidValue(_explain(error)) from error


def _explain(error: Exception) -> str:
    """The message of an error of the flags; for an unknown field, it is inside another error."""
    seen = error.args[0] if error.args else repr(error)
    if not isinstance(seen, KeyError):
        return str(error)
    name, _, hint = str(seen.args[0]).partition("\n")
    return f"the config has no field {name}. {hint or 'The file of the config shows its fields'}"


def _name() -> str:
    return pathlib.Path(sys.argv[0]).name
