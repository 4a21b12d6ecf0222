"""Errors as a command shows them: a user's mistake is one sentence, a defect has a traceback."""

import os
import sys
import traceback
from collections.abc import Sequence
from types import ModuleType

# What this package raises for a user's mistake. Any other of its errors is a defect.
RAISED = (ValueError, TypeError, IndexError, RuntimeError, MemoryError, FloatingPointError)


def sentence(error: BaseException, modules: Sequence[ModuleType | str] = ()) -> str | None:
    """What to tell of an error that is a user's mistake; None for a defect.

    A mistake is an error of the operating system or of an import; a `RAISED` error of this package;
    and any error that other code raises, in `modules`.

    `modules` are other packages, and paths of files.
    """
    file = traceback.extract_tb(error.__traceback__)[-1].filename
    places = tuple(each if isinstance(each, str) else each.__path__[0] for each in modules)
    ours = isinstance(error, RAISED) and file.startswith(os.path.dirname(__file__))
    if isinstance(error, OSError | ImportError) or ours or file.startswith(places):
        return str(error.args[0] if isinstance(error, KeyError) else error)
    return None


def describe(error: BaseException, *, command: str, modules: Sequence[ModuleType | str]) -> int:
    """Prints an error to stderr; returns the exit code of `command`, with which a sentence begins.

    It is 2 after a sentence, for a user's mistake; 1 after a traceback, for any other error.
    """
    if (text := sentence(error, modules)) is not None:
        print(f"{command}: {text}", file=sys.stderr)
        return 2
    traceback.print_exception(error)
    return 1
