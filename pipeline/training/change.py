"""Changes that a run did not plan: what `--change` asks for where it goes on."""

import dataclasses
import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pipeline.training.schedule import MORE, Stage, check_options, options
from pipeline.training.schedule import stages as made


def parsed(text: str) -> dict[str, Any]:
    """The options that the text of a `--change` asks for.

    Raises:
        ValueError: it is not a JSON object.
    """
    try:
        asked = json.loads(text or "{}")
    except ValueError as error:
        asked = error
    if not isinstance(asked, dict):
        raise ValueError(
            f"--change is {text!r}; it must be a JSON object of options, as in "
            """--change='{"tokens_per_batch": 8192, "leave_out": [17]}'"""
        )
    return asked


def applied(config: Mapping[str, Any], stages: Iterable[Stage]) -> dict[str, Any]:
    """A config, as JSON, with the changes that were made to it since."""
    begun = [entry for entry in config["schedule"] if entry[0] == 0]
    found = {**config, "batches": dict(config["batches"]), "schedule": begun}
    for stage in stages:
        if stage.planned:
            found["schedule"] += [[stage.step, stage.asked]] * (stage.step > 0)
            continue
        for name, value in stage.asked.items():
            if name == "seed":
                found["seed"] = value
            elif name in found["batches"]:
                found["batches"][name] = value
    return found


def resumed(config: Mapping[str, Any], stages: Iterable[Stage], step: int) -> dict[str, Any]:
    """A config, as JSON, whose schedule has what the run at `step` has had of one.

    Raises:
        ValueError: the schedule says something else of the past.
    """
    given = [list(entry) for entry in config["schedule"]]
    had = _past(stages, step, [entry for entry in given if entry[0]])
    first, later = ([e for e in given if e[0] == 0], [e for e in given if e[0] > step])
    return {**config, "schedule": [*first, *had, *later]}


def _past(stages: Iterable[Stage], step: int, given: Iterable[list[Any]]) -> list[list[Any]]:
    """What a run at `step` has had of its schedule, of which `given` may only leave out some."""
    had = [[each.step, each.asked] for each in stages if each.planned and 0 < each.step <= step]
    for entry in given:
        if entry[0] <= step and entry not in had:
            raise ValueError(
                f"the schedule has {entry}, and up to step {step:,}, where the run is, it was "
                f"{had}; only what comes later can change"
            )
    return had


def changed(stages: Sequence[Stage], step: int, asked: Mapping[str, Any]) -> list[Stage]:
    """The stages with one more, not planned, of those options that are not in force at `step`.

    The same stages where all of them are, or were the last thing that was asked for so: a command
    may be given again after a stop. Stages that come later are worked out again.

    Args:
        stages: those of the run so far.
        step: where it goes on.
        asked: options, as in a stage; and `schedule`, to plan other stages after `step`.

    Raises:
        ValueError: an option is none, or the schedule is another one up to `step`.
    """
    asked = dict(asked)
    before = [stage for stage in stages if stage.step <= step]
    later = [stage for stage in stages if stage.step > step]
    if "schedule" in asked:
        later = _planned(before, later, step, asked.pop("schedule"))
    check_options(asked)
    more = _not_in_force(before, asked)
    unplanned = [number for number, stage in enumerate(before) if not stage.planned]
    again = False
    if unplanned:
        last = unplanned[-1]
        again = _not_in_force(before[:last], asked) == before[last].asked
    if again or not more:
        return [*before, *later]
    later = [dataclasses.replace(stage, changes={}) for stage in later]
    return [*before, Stage(step, more, planned=False), *later]


def _planned(
    before: Sequence[Stage], later: list[Stage], step: int, schedule: Iterable[Sequence]
) -> list[Stage]:
    """The stages of another schedule that come after `step`; `later`, if they are the same.

    What has passed may be left out of the schedule, but not be another.
    """
    planned = [stage for stage in made(schedule, {}) if stage.step > 0]
    _past(before, step, [[stage.step, stage.asked] for stage in planned])
    after = [stage for stage in planned if stage.step > step]
    same = [(stage.step, stage.asked) for stage in later] == [(s.step, s.asked) for s in after]
    return later if same else after


def _not_in_force(stages: Sequence[Stage], asked: Mapping[str, Any]) -> dict[str, Any]:
    """What of the options that are asked for is not so after some stages."""
    force = options(stages)
    more = {name: value for name, value in asked.items() if force.get(name) != value}
    for name in MORE:
        if name in more:
            more[name] = [new for new in more.pop(name) if new not in force.get(name, ())]
    if "leave_out" in more:
        more["leave_out"].sort()
    return {name: value for name, value in more.items() if name not in MORE or value}


def allowing(command: Sequence[str], config: Mapping[str, Any], names: Iterable[str]) -> str:
    """The command that makes a config's fields those of a run that goes on; empty if none does.

    >>> allowing(["train.py", "--workdir=w"], {"seed": 5, "batches": {}}, ["seed"])
    'python train.py --workdir=w \\'--change={"seed": 5}\\''

    Args:
        command: the words of the one that was given.
        config: as JSON.
        names: the fields that differ from those of the run, with dots.
    """
    asked = {}
    for name in names:
        section, _, field = name.rpartition(".")
        if section not in ("", "batches") or (not section and field not in ("seed", "schedule")):
            return ""
        asked[field] = (config["batches"] if section else config).get(field)
    return "" if None in asked.values() else with_change(command, asked)


def with_change(command: Sequence[str], asked: Mapping[str, Any]) -> str:
    """The command with another `--change`."""
    given = [word for word in command if not word.startswith("--change")]
    return shlex.join(["python", *given, f"--change={json.dumps(asked)}"])
