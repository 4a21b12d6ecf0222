"""The command line: look at data and plans before a run, and at a run afterwards.

`main` runs `lockstep COMMAND`. It prints a `pipeline.errors.UserError` as a sentence, and leaves
any other error to Python, as a traceback.
"""

from pipeline.cli.commands import main

__all__ = ["main"]
