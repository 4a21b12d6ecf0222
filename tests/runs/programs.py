"""The training program in processes of its own, as a user starts it; on one host or several."""

import subprocess
import sys
import time

from tests.processes import ROOT, TIME_LIMIT, Group, environment, free_port
from tests.runs.runs import lines


def start(text, workdir, *flags, program="train.py"):
    """Starts the program; one device, as on a user's machine."""
    programs = str(text.parent / "programs")  # of all starts
    command = [sys.executable, program, "--config=tests/runs/tiny_config.py"]
    return subprocess.Popen(
        [*command, f"--workdir={workdir}", *flags],
        cwd=ROOT,
        env=environment(TINY_TEXT=str(text), JAX_COMPILATION_CACHE_DIR=programs),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def run(text, workdir, *flags):
    """Runs the program to its end: exit code and output."""
    process = start(text, workdir, *flags)
    try:
        output, _ = process.communicate(timeout=TIME_LIMIT)
    finally:
        process.kill()
    return process.returncode, output


def wait_for_step(process, workdir, step):
    deadline = time.monotonic() + TIME_LIMIT
    while process.poll() is None and time.monotonic() < deadline:
        if any(line["step"] >= step and "loss" in line for line in lines(workdir)):
            return
        time.sleep(0.02)
    process.kill()
    raise AssertionError(f"step {step} was not reached:\n{process.communicate()[0]}")


def start_hosts(
    text,
    workdir,
    count,
    *flags,
    program="train.py",
    config="hosts_config",
    own=None,
    logs=None,
):
    """The program in `count` processes; `own` has further flags by process, of those that start.

    `logs` is where the output goes: the work directory, if it is local.
    """
    command = [sys.executable, program, f"--config=tests/runs/{config}.py", *flags]
    join = [f"--coordinator=127.0.0.1:{free_port()}", f"--num_processes={count}", "--wait=15"]
    programs = str(text.parent / f"programs{count}")
    env = environment(TINY_TEXT=str(text), JAX_COMPILATION_CACHE_DIR=programs)
    commands = []
    for index, more in (own or dict.fromkeys(range(count), ())).items():
        hosts = [*join, f"--process_id={index}"] if count > 1 else []
        commands.append([*command, f"--workdir={workdir}", *hosts, *more])
    return Group(commands, (logs or workdir) / f"logs{time.monotonic_ns()}", env)


def run_hosts(text, workdir, count, *flags):
    group = start_hosts(text, workdir, count, *flags)
    codes = group.wait()
    assert codes == [0] * count, "\n\n".join(group.outputs())[-6000:]
    return group.outputs()
