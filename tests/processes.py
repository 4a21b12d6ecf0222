"""Real processes on this machine, each with a time limit: groups joined by loopback, and forks."""

import importlib.metadata
import multiprocessing
import os
import pathlib
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable

ROOT = pathlib.Path(__file__).parent.parent
TIME_LIMIT = 240  # seconds for a group of processes
STUCK = 120  # seconds after which a fork counts as stuck
SECONDS = 20  # that a child has for a moment's work

# Programs of tests run for milliseconds; compiling them takes seconds.
COMPILE_QUICKLY = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
# One module of LLVM in place of up to 32: a quarter less work for programs as small as these.
COMPILE_QUICKLY += " --xla_cpu_parallel_codegen_split_count=1"
if importlib.metadata.version("jaxlib").startswith("0.10."):  # later ones do not know the flag
    COMPILE_QUICKLY += " --xla_cpu_use_fusion_emitters=false"


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def environment(**more):
    """One device in each process, as on a user's machine, and programs that compile quickly."""
    own = {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "XLA_FLAGS": COMPILE_QUICKLY}
    return {k: v for k, v in os.environ.items() if k != "NPROC"} | own | more


def call(*command, cwd=ROOT, limit=TIME_LIMIT, input=None, **more):
    """A program that has ended, with its output; `more` is of its environment."""
    return subprocess.run(
        [*map(str, command)],
        cwd=cwd,
        env=environment(**more),
        capture_output=True,
        text=True,
        input=input,
        timeout=limit,
    )


# Importing takes longer than all else that a small program does. So the programs of groups are
# forks of one process, which has imported this, and has no backend of JAX.
IMPORTS = ["optax", "orbax.checkpoint", "tensorboardX", "models", "trainer"]
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(IMPORTS)


def run_program(command, log, env):
    """Does what `python *command` does in an environment, its output in a file."""
    import jax

    with log.open("a") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    sys.stdout.reconfigure(line_buffering=True)
    os.chdir(ROOT)
    os.environ.clear()
    os.environ.update(env)
    jax.config.update("jax_compilation_cache_dir", env.get("JAX_COMPILATION_CACHE_DIR"))
    sys.argv = command
    runpy.run_path(command[0], run_name="__main__")


class Group:
    """Python programs that run together, each with its output in a file of its own.

    Args:
        commands: the path of each program, and its arguments.
        folder: for the output.
        env: the environment of all of them.
    """

    def __init__(self, commands, folder, env):
        folder.mkdir(parents=True, exist_ok=True)
        self.logs = [folder / f"{index}.log" for index in range(len(commands))]
        self.processes = []
        for command, log in zip(commands, self.logs, strict=True):
            log.touch()
            arguments = [*map(str, command)], log, env
            self.processes.append(FORKS.Process(target=run_program, args=arguments))
            self.processes[-1].start()

    def outputs(self):
        return [log.read_text() for log in self.logs]

    def wait(self, limit=TIME_LIMIT):
        """Exit codes of all; those that are not done in time are killed and fail the test."""
        deadline = time.monotonic() + limit
        for process in self.processes:
            process.join(max(deadline - time.monotonic(), 0.1))
        codes = [process.exitcode for process in self.processes]
        self.kill()
        assert None not in codes, "\n\n".join(self.outputs())[-6000:]
        return codes

    def end_with(self, code, limit=TIME_LIMIT):
        """The outputs of all, each of which must end with this exit code."""
        codes, outputs = self.wait(limit), self.outputs()
        assert codes == [code] * len(codes), "\n\n".join(outputs)[-6000:]
        return outputs

    def kill(self):
        """Ends those that still run."""
        for process in self.processes:
            process.kill()
            process.join()


class Stuck(Exception):
    """A process did not end in time."""


def fork(work: Callable[[], None], log: pathlib.Path) -> int:
    """The number of a child that does `work`, its output in `log`; it ends with 1 on an error."""
    if pid := os.fork():
        return pid
    code = 1
    try:
        with log.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def wait(pid: int, log: pathlib.Path, limit: float = STUCK) -> int:
    """The exit code of a child, negative for a signal; one that is stuck is killed.

    Raises:
        Stuck: it did not end in `limit` seconds; with the end of its output.
    """
    end, pause = time.monotonic() + limit, 1e-3
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(pause)
        pause = min(pause * 1.2, 0.02)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise Stuck(f"not done in {limit} s:\n{log.read_text()[-2000:]}")


def in_child(work) -> bool:
    """Whether `work()` is true in a forked child, within `SECONDS`."""

    def check():
        assert work()

    with tempfile.TemporaryDirectory() as folder:
        log = pathlib.Path(folder, "log")
        code = wait(fork(check, log), log, SECONDS)
        print(log.read_text())
    return code == 0
