"""Errors as a command shows them: a user's mistake is one sentence, a defect has a traceback."""

import sys
import traceback
from collections.abc import Iterable


def describe(error: BaseException, command: str, places: Iterable[str]) -> int:
    """Prints an error to stderr, and returns the exit code of the command.

    Args:
        error: any exception.
        command: its name, which begins the sentence.
        places: directories and files of code whose errors are sentences.

    Returns:
        2 after a sentence, for an error of the operating system or one that code in `places`
        raises; 1 after a traceback, for any other.
    """
    file = traceback.extract_tb(error.__traceback__)[-1].filename
    if isinstance(error, OSError | ImportError) or file.startswith(tuple(places)):
        text = error.args[0] if isinstance(error, KeyError) else error
        print(f"{command}: {text}", file=sys.stderr)
        return 2
    traceback.print_exception(error)
    return 1
