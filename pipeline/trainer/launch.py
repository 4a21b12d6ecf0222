"""The launch of a training program: parses flags, and lets hosts begin and end together.

Importing this module defines the flags of every such program.
"""

import logging
import pathlib
import sys
from collections.abc import Callable

import jax
from absl import app, flags

import pipeline
from pipeline.errors import InvalidValue, describe
from pipeline.fs import as_path
from pipeline.steps import hosts
from pipeline.trainer.run_config import NAME

COORDINATOR = flags.DEFINE_string("coordinator", None, "HOST:PORT of process 0.")
NUM_PROCESSES = flags.DEFINE_integer("num_processes", None, "Number of processes.")
PROCESS_ID = flags.DEFINE_integer("process_id", None, "Number of this process, from 0.")
WAIT = flags.DEFINE_integer("wait", 100, "Seconds of silence after which a host counts as gone.")
VERSION = flags.DEFINE_bool("version", False, "Print the version and exit.")


def run(main: Callable[[], int]) -> None:
    """Parses the flags, joins the hosts and ends with the status that `main()` returns.

    A mistake of the user is a sentence, and exit status 2. Process 0 prints the log of the library,
    and the others only warnings.
    """

    def start(_: list[str]) -> None:
        logging.basicConfig(
            level=logging.WARNING, format="%(message)s", stream=sys.stdout, force=True
        )
        logging.getLogger("absl").setLevel(logging.WARNING)
        with hosts.exit_together(_name()):
            hosts.connect(COORDINATOR.value, NUM_PROCESSES.value, PROCESS_ID.value, WAIT.value)
            if jax.process_index() == 0:
                logging.getLogger("pipeline").setLevel(logging.INFO)
            sys.exit(main())

    app.run(start, flags_parser=parse_flags)


def parse_flags(argv: list[str]) -> list[str]:
    """Parses the flags, among them `config` and `workdir`; exits if one is wrong."""
    try:
        rest = flags.FLAGS(argv)
        _ = flags.FLAGS.config.is_locked  # raises here if the file could not be read
        workdir, default = flags.FLAGS.workdir, flags.FLAGS["config"].using_default_value
        if workdir and default and not (as_path(workdir) / NAME).exists():
            raise flags.Error(f"there is no run in {workdir}; begin one with --config=FILE")
        if len(rest) > 1:
            raise flags.Error(f"{rest[1]!r} is not a flag; write --NAME=VALUE, and lists in quotes")
    except Exception as error:  # of the flags, or of the file of the config
        sys.exit(describe(InvalidValue(_explain(error)), command=_name()))
    if VERSION.value:
        print(f"lockstep {pipeline.__version__}")
        sys.exit()
    return rest


def _explain(error: Exception) -> str:
    """The message of an error of the flags; for an unknown field, it is inside another error."""
    seen = error.args[0] if error.args else repr(error)
    if not isinstance(seen, KeyError):
        return str(seen)
    name, _, hint = str(seen.args[0]).partition("\n")
    return f"the config has no field {name}. {hint or 'The file of the config shows its fields'}"


def _name() -> str:
    return pathlib.Path(sys.argv[0]).name
