"""One of several processes: loads batches whose weights change, as its JSON arguments ask.

Threads of the processes are ahead of one another, since each has its own number of batches ready
and its own pauses. While weights change, nothing but the loaders makes the processes meet.
"""

import hashlib
import json
import os
import pathlib
import sys
import time

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from pipeline import Batches, Bucket, Corpora, Examples, Plan
from pipeline.errors import InvalidState, InvalidValue
from pipeline.loading.loader import Loader
from pipeline.steps import hosts
from tests.meshes import mesh_of
from tests.pages import SNIPPETS

WEIGHTS = {"short": 1, "long": 1}
CHANGES = [(3, 5, 1), (4, 1, 3), (20, 1, 6), (21, 2, 1), (47, 9, 1), (48, 1, 2)]  # step, weights


def batches_of(**options):
    rng = np.random.default_rng(0)
    parts = {
        name: Examples([rng.integers(1, 90, size) for size in rng.integers(2, most, 90)])
        for name, most in (("short", 14), ("long", 60))
    }
    corpus, count = Corpora(parts), jax.process_count()
    plan = Plan(corpus, [Bucket(8, 16), Bucket(4, 64)], weights=WEIGHTS, **options)
    return Batches(corpus, plan, sharding=mesh_of(data=count))


def loader_of(asked):
    """A loader with more batches ready on later processes."""
    me, batches = jax.process_index(), batches_of(**asked.get("plan", {}))
    options = {"prefetch": 2 + 3 * me, "num_threads": 1 + me % 2}
    return Loader(batches.repeat(asked.get("epochs")), changes_every=asked["every"], **options)


def walk(asked):
    """Every batch, while process 0 changes weights; then from states on; and what was changed."""
    me, rng = jax.process_index(), np.random.default_rng(jax.process_index())
    digests, states, changed, wrong = [], [], {}, []
    with loader_of(asked) as loader:
        base = loader.plan
        for step in range(60):
            for at, short, long in CHANGES if me == 0 else ():
                if at == step:
                    weights = {"short": short, "long": long}
                    changed[loader.change(weights=weights)] = weights
            states.append(loader.get_state())
            if next(loader, None) is None:
                break
            digests.append(loader.planned.digest)
            time.sleep(rng.choice([0, 0, 0.02]))
        wanted = base
        for at, weights in changed.items():
            wanted = wanted.after(at, weights=weights)
        if me == 0:
            wrong += [n for n, each in enumerate(digests) if wanted.batch(n).digest != each]
        states = json.loads(multihost_utils.broadcast_one_to_all(encode(states)).tobytes())
        for step in asked.get("restore", ()):
            loader.start_prefetch()  # a thread may wait for a word of the others
            loader.set_state(states[step])
            same = loader.get_state() == states[step]
            for number in range(step, min(step + 9, len(digests))):
                next(loader)
                wrong += [number] if loader.planned.digest != digests[number] or not same else []
            hosts.require_agreement({"restored": step})  # each begins the next one after all
    return {"digests": digests, "changed": [*changed], "wrong": wrong}


def encode(value):
    """JSON as an array of the same length on all processes."""
    return np.frombuffer(json.dumps(value).ljust(400_000).encode(), np.uint8)


def refuse(asked):
    """What is said on each process to a change that it cannot make."""
    said = {}
    with Loader(batches_of().repeat()) as loader:
        try:
            loader.change(weights=WEIGHTS)
        except InvalidState as error:
            said["no word"] = str(error)
    with loader_of({"every": 8}) as loader:
        if jax.process_index():
            try:
                loader.change(weights=WEIGHTS)
            except InvalidState as error:
                said["other process"] = str(error)
        else:
            try:
                loader.change(weights={"short": 1})
            except InvalidValue as error:
                said["weights"] = str(error)
        for _ in range(20):
            next(loader)
        said["stages"] = len(loader.plan.stages)
    with loader_of({"every": 8, "epochs": 1}) as loader:
        over = next(n for n in range(99) if loader.plan.whole_epochs(n)["short"])
        for _ in range(over):
            next(loader)
        if jax.process_index() == 0:
            try:
                loader.change(weights={"short": 1, "long": 0})
            except InvalidValue as error:
                said["end"] = str(error)
        said["rest"] = over + sum(1 for _ in loader) - len(loader)
    return said


def train(asked):
    """The loop of docs/mixtures.md, which continues from the last step that it saved."""
    (snippet,) = (each for each in SNIPPETS if "reference=None" in each.content)
    page = {"__name__": "page"}
    exec(compile(snippet.content, "mixtures.md", "exec"), page)
    step_of_page, folder = page["train_step"], pathlib.Path(asked["folder"])
    everywhere = NamedSharding(mesh_of(data=jax.device_count()), PartitionSpec())

    def train_step(table, batch):
        # Each device computes the whole batch: sums over devices depend on their number.
        whole = jax.lax.with_sharding_constraint(batch, everywhere)
        return step_of_page(table, whole)

    page["train_step"] = jax.jit(train_step, out_shardings=everywhere)
    loader, run = page["begin"](sharding=everywhere.mesh, changes_every=8)
    reference = np.array(asked["reference"])
    last = max((int(path.stem) for path in folder.glob("*.json")), default=0)
    with loader:
        if last:
            saved = json.loads((folder / f"{last}.json").read_text())
            loader.set_state(saved["data"])
            with np.load(folder / f"{last}.npz") as arrays:
                run = arrays["table"], arrays["weights"], arrays["sums"], arrays["losses"]
        print("BEGUN", last, flush=True)
        for step in range(last + 10, asked["steps"] + 1, 10):
            run = page["train"](loader, run, step, reference)
            if jax.process_index() == 0:
                save(folder / f"{step}", run, loader.get_state())
            print("STEP", flush=True)
        digests = [loader.plan.batch(step).digest for step in range(asked["steps"])]
        changes = [start for start, _ in loader.plan.changes if start < asked["steps"]]
    table = np.asarray(run[0])
    sha = hashlib.sha256(table.tobytes()).hexdigest()
    return {"table": sha, "sum": float(table.sum()), "digests": digests, "changes": changes}


def save(path, run, state):
    """The arrays of a run, and then the state of its loader, which marks the step as saved."""
    table, weights, sums, losses = run
    arrays = {"table": np.asarray(table), "weights": weights, "sums": sums, "losses": losses}
    np.savez(path.with_suffix(".npz"), **arrays)
    part = path.with_suffix(".part")
    part.write_text(json.dumps({"data": state}))
    os.replace(part, path.with_suffix(".json"))


def several(asked):
    return [JOBS[job["do"]](job) for job in asked["jobs"]]


JOBS = {job.__name__: job for job in (walk, refuse, train, several)}


def main():
    asked = json.loads(sys.argv[1])
    if asked["count"] > 1:
        hosts.connect(f"127.0.0.1:{asked['port']}", asked["count"], asked["index"], wait=20)
    with hosts.exit_together("live_worker.py"):
        print("ANSWER", json.dumps(JOBS[asked["do"]](asked)), flush=True)


if __name__ == "__main__":
    main()
