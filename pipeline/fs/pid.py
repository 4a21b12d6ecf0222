"""Pids: the numbers of the processes of this machine."""

import os


def is_running(pid: int) -> bool:
    """Whether a process has this number, be it of another user."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True
