"""Groups of real processes on this machine, joined over loopback, each with a time limit."""

import os
import pathlib
import socket
import subprocess
import time

ROOT = pathlib.Path(__file__).parent.parent
TIME_LIMIT = 240  # seconds for a group of processes


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def environment(**more):
    """That of a user's machine: one device in each process."""
    kept = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "NPROC")}
    return kept | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"} | more


class Group:
    """Processes of one run, each writing its output to a file of its own."""

    def __init__(self, commands, folder, env):
        folder.mkdir(parents=True, exist_ok=True)
        self.logs = [folder / f"{index}.log" for index in range(len(commands))]
        self.processes = [
            subprocess.Popen(
                command, cwd=ROOT, env=env, stdout=log.open("w"), stderr=subprocess.STDOUT
            )
            for command, log in zip(commands, self.logs, strict=True)
        ]

    def outputs(self):
        return [log.read_text() for log in self.logs]

    def wait(self, limit=TIME_LIMIT):
        """Exit codes of all; those that are not done in time are killed and fail the test."""
        deadline = time.monotonic() + limit
        try:
            return [
                process.wait(max(deadline - time.monotonic(), 0.1)) for process in self.processes
            ]
        except subprocess.TimeoutExpired:
            raise AssertionError("\n\n".join(self.outputs())[-6000:]) from None
        finally:
            self.kill()

    def kill(self):
        """Ends those that still run, by their own numbers."""
        for process in self.processes:
            if process.poll() is None:
                process.kill()
                process.wait()
