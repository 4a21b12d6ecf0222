"""Fuzz: the properties of `tests.properties.properties` on hostile inputs, for minutes or hours.

Each round of a property runs in a process of its own, with limits of time and memory: so that a
crash, an endless loop and a hunger for memory are findings, too.
"""

import collections
import faulthandler
import functools
import json
import pathlib
import resource
import tempfile
import time
import traceback

import hypothesis

from tests.processes import ROOT, Stuck, fork, wait
from tests.properties.properties import PROPERTIES, Property, run

ROUND = 150  # examples of one round
SECONDS = 30  # that one example may take
MEMORY = 6 << 30  # bytes of address space that a round may have


def fuzz(minutes: float, seed: int, name: str | None) -> None:
    """Runs rounds of all properties in turn, or one round of one; prints what it finds."""
    if name and name not in PROPERTIES:
        raise SystemExit(f"no property {name}; there are {', '.join(PROPERTIES)}")
    end = time.monotonic() + 60 * minutes
    examples: collections.Counter[str] = collections.Counter()
    found: dict[str, str] = {}
    number = seed
    while True:
        for one in [PROPERTIES[name]] if name else PROPERTIES.values():
            if one.name in found:
                continue
            count, wrong = _round(one, number)
            examples[one.name] += count
            if wrong:
                found[one.name] = wrong
                again = f"python -m tests.properties fuzz --property {one.name} --seed {number}"
                print(f"{one.name}, seed {number}: {wrong}\n  again: {again}\n", flush=True)
            if time.monotonic() > end and not name:
                break
        number += 1
        if name or time.monotonic() > end:
            break
    for each, count in examples.items():
        print(f"{each}: {count:,} examples, {'something' if each in found else 'nothing'} found")


def _round(one: Property, seed: int) -> tuple[int, str]:
    """The examples of a round, and what was found, or nothing."""
    with tempfile.TemporaryDirectory() as directory:
        place = pathlib.Path(directory)
        log = place / "log"
        try:
            ended = f"{wait(fork(functools.partial(_check, one, seed, place), log), log, 900)}"
        except Stuck as error:
            ended = f"{error}"
        if (result := place / "result").exists():
            count, wrong = json.loads(result.read_text())
            return count, wrong
        last = (place / "last").read_text() if (place / "last").exists() else "nothing"
        said = log.read_text()[-3000:]
        return 0, f"the process ended with {ended} on {last}:\n{said}"


def _check(one: Property, seed: int, place: pathlib.Path) -> None:
    """One round, in its process."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.enable()
    count, wrong = 0, ""

    def before(given) -> None:
        nonlocal count
        count += 1
        (place / "last").write_text(f"{given!r:.20000}")
        faulthandler.dump_traceback_later(SECONDS, exit=True)

    # Shrinking a slow example would take the time of many others.
    try:
        run(one, ROUND, seed, before=before, phases=(hypothesis.Phase.generate,))
    except Exception as error:
        wrong = _describe(error)
    (place / "result").write_text(json.dumps([count, wrong]))


def _describe(error: BaseException) -> str:
    """Errors in a few lines each: what, where, and for which example."""
    if isinstance(error, ExceptionGroup):
        return "\n".join(map(_describe, error.exceptions))
    package = str(ROOT / "pipeline")
    every = traceback.extract_tb(error.__traceback__)
    frames = [each for each in every if each.filename.startswith(package)]
    where = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    notes = "\n".join(getattr(error, "__notes__", []))
    return f"{type(error).__name__}{where}: {error!s:.1500}\n{notes:.1500}"
