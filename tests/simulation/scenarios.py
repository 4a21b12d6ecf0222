"""Scenarios: which actors a history has, and which faults, all drawn from its seed."""

import os

from pipeline.corpus.stored import cache
from tests.simulation.actors import SCENARIOS, shrink
from tests.simulation.history import History
from tests.simulation.scheduler import Wrong
from tests.simulation.seam import World


def play(seed: int, only: str | None = None) -> tuple[History, Wrong | None]:
    """The history of a seed, and what is wrong with it."""
    shrink()
    with World(f"{seed}") as world:
        history, chance = History(world), world.random
        os.environ["XDG_CACHE_HOME"] = f"{world.folder}/w/caches"
        cache.default_directory.cache_clear()
        history.scenario = only or chance.choice(["streams", *SCENARIOS])
        world.disk.strict = chance.random() < 0.5
        history.in_bucket = chance.random() < 0.3
        root = "s3://bucket" if history.in_bucket else f"{world.folder}/w"
        if history.in_bucket:
            world.storage.flaky = chance.choice([0, 0, 0.02, 0.1])
            world.storage.late = chance.choice([0, 0.02, 0.2])
        checks = SCENARIOS[history.scenario](history, root)
        for _ in range(0 if history.in_bucket else chance.choice([0, 0, 1, 2])):
            history.lose_power(chance.expovariate(1 / chance.choice([0.05, 0.5, 2])))
        if chance.random() < 0.15 and not history.in_bucket:
            history.fill_disk(chance.expovariate(2), chance.expovariate(2))
        if chance.random() < 0.3:
            history.stall(1.0)
        try:
            history.run(checks)
        except Wrong as error:
            return history, error
    return history, None
