"""Scenarios: which actors a history has, and which faults, all drawn from its seed."""

from tests.simulation.actors import SCENARIOS, shrink
from tests.simulation.history import History
from tests.simulation.scheduler import Wrong
from tests.simulation.seam import World


def play(seed: int, only: str | None = None) -> tuple[History, Wrong | None]:
    """The history of a seed, and what is wrong with it."""
    shrink()
    with World(f"{seed}") as world:
        history, chance = History(world), world.random
        history.scenario = only or chance.choice([*SCENARIOS])
        world.disk.strict = chance.random() < 0.5
        checks = SCENARIOS[history.scenario](history, f"{world.folder}/w")
        for _ in range(chance.choice([0, 0, 1, 2])):
            history.lose_power(chance.expovariate(1 / chance.choice([0.05, 0.5, 2])))
        if chance.random() < 0.15:
            history.fill_disk(chance.expovariate(2), chance.expovariate(2))
        if chance.random() < 0.3:
            history.stall(1.0)
        try:
            history.run(checks)
        except Wrong as error:
            return history, error
    return history, None
