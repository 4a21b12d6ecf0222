"""The training program in processes of its own, as a user starts it; on one host or several."""

import time

from tests.processes import TIME_LIMIT, Group, environment, free_port
from tests.runs.runs import lines

CONFIG = "--config=tests/runs/tiny_config.py:buckets"
SLOW = "tests/runs/slow_train.py"  # the program, to be stopped midway


def variables(text, programs="programs"):
    """What tells where the text is, and a folder for all programs that are compiled."""
    return {
        "TINY_TEXT": str(text),
        "JAX_COMPILATION_CACHE_DIR": str(text.parent / programs),
    }


def start(text, workdir, program="train.py", config=(CONFIG,)):
    """Starts the program; one device, as on a user's machine."""
    command = [program, *config, f"--workdir={workdir}"]
    return _group([command], text, text.parent, "programs")


def wait_for_step(group, workdir, step):
    """Waits until a group of processes has made a step."""
    deadline = time.monotonic() + TIME_LIMIT
    while all(each.is_alive() for each in group.processes) and time.monotonic() < deadline:
        if any(line["step"] >= step and "loss" in line for line in lines(workdir)):
            return
        time.sleep(0.02)
    group.kill()
    raise AssertionError(f"step {step} was not reached:\n" + "\n\n".join(group.outputs())[-6000:])


def start_hosts(
    text,
    workdir,
    count,
    *flags,
    program="train.py",
    own=None,
    logs=None,
):
    """The program in `count` processes; `own` has further flags by process, of those that start.

    `logs` is where the output goes: the work directory, if it is local.
    """
    command = [program, "--config=tests/runs/tiny_config.py:hosts", *flags]
    join = [f"--coordinator=127.0.0.1:{free_port()}", f"--num_processes={count}", "--wait=15"]
    commands = []
    for index, more in (own or dict.fromkeys(range(count), ())).items():
        hosts = [*join, f"--process_id={index}"] if count > 1 else []
        commands.append([*command, f"--workdir={workdir}", *hosts, *more])
    return _group(commands, text, logs or workdir, f"programs{count}")


def _group(commands, text, folder, programs):
    env = environment(**variables(text, programs))
    return Group(commands, folder / f"logs{time.monotonic_ns()}", env)


def run_hosts(text, workdir, count, *flags):
    return start_hosts(text, workdir, count, *flags).end_with(0)
