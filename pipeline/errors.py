"""Errors as a command shows them: a user's mistake is one sentence, a defect has a traceback."""

import sys
import traceback
from collections.abc import Sequence
from types import ModuleType


def describe(error: BaseException, *, command: str, modules: Sequence[ModuleType | str]) -> int:
    """Prints an error to stderr, and returns the exit code of the command.

    Args:
        error: any exception.
        command: its name, which begins the sentence.
        modules: packages, and paths of files, whose errors are sentences.

    Returns:
        2 after a sentence, for an error of the operating system or one that `modules`
        raise; 1 after a traceback, for any other.
    """
    file = traceback.extract_tb(error.__traceback__)[-1].filename
    places = tuple(each if isinstance(each, str) else each.__path__[0] for each in modules)
    if isinstance(error, OSError | ImportError) or file.startswith(places):
        text = error.args[0] if isinstance(error, KeyError) else error
        print(f"{command}: {text}", file=sys.stderr)
        return 2
    traceback.print_exception(error)
    return 1
