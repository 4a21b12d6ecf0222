"""The command line: look at data and plans before a run, and at a run afterwards.

`main` runs `lockstep COMMAND`. It prints a `pipeline.errors.UserError` as a sentence; any other
error is a traceback.
"""

from pipeline.cli.commands import main

__all__ = ["main"]
