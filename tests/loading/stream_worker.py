"""One of several processes: packs its shard of a data set as its JSON arguments ask.

What it got is a file for each job, with the tokens of each batch. Token `k` of element `e` of the
shard of process `p` is `p * OF_SHARD + e * OF_ELEMENT + k`, so that each tells where it is from.
"""

import json
import os
import pathlib
import sys
import time

import grain
import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import pipeline
from pipeline.steps import hosts
from tests.meshes import mesh_of

OF_SHARD, OF_ELEMENT = 10**8, 10**4


def sizes_of(kind, process, count):
    """The tokens of each element of a shard; 1 token is nothing to train on."""
    rng = np.random.default_rng([7, process, count])
    number = {"equal": 120, "unequal": 150 - 40 * process, "skewed": 120}.get(kind, 90)
    if kind == "empty" and process:
        return []
    if kind == "held":  # odd processes have read all theirs long before they have used it
        number = 80 if process % 2 else 400
    skewed = kind in ("skewed", "held")
    low, high = ((2, 24), (40, 60))[process % 2] if skewed else (1, 90)
    return rng.integers(low, high, number).tolist()


def shard_of(kind, process, count):
    """Token ids of each element of a shard."""
    first = process * OF_SHARD
    sizes = sizes_of(kind, process, count)
    return [first + e * OF_ELEMENT + np.arange(n) for e, n in enumerate(sizes)]


class Source:
    """A shard, of which one element raises an error, once."""

    def __init__(self, elements, fails=None):
        self.elements, self.fails = elements, fails

    def __len__(self):
        return len(self.elements)

    def __getitem__(self, number):
        if number == self.fails:
            self.fails = None
            raise OSError("no answer")
        return self.elements[number]


BUCKETS = [pipeline.Bucket(8, 32), pipeline.Bucket(4, 64)]


def stream_of(asked, buckets=BUCKETS, **options):
    me, count = jax.process_index(), jax.process_count()
    source = Source(shard_of(asked["kind"], me, count), asked.get("fails"))
    mesh = mesh_of(data=count)
    more = {name: asked[name] for name in ("window", "seed", "ending") if name in asked}
    given = {"window": 40, "sharding": mesh} | more | options
    return pipeline.PackedStream(grain.MapDataset.source(source), buckets, **given)


def local(batch):
    return {name: np.array(values) for name, values in batch.items()}


def whole(asked):
    """All batches; each restored from the state before it, and the ones after that."""
    stream = stream_of(asked)
    iterator, batches, states = iter(stream), [], []
    states.append(iterator.get_state())
    for batch in iterator:
        batches.append(local(batch))
        states.append(iterator.get_state())
    save(asked["file"], batches)
    for step in range(0, len(states), asked["every"]):
        iterator = iter(stream)
        iterator.set_state(json.loads(json.dumps(states[step])))
        assert iterator.get_state() == states[step]
        for batch, state in zip(batches[step:], states[step + 1 :], strict=True):
            np.testing.assert_equal(local(next(iterator)), batch)
            assert iterator.get_state() == state, (iterator.get_state(), state)
        assert next(iterator, None) is None
        assert next(iterator, None) is None
    return {"steps": len(batches), "state": max(len(json.dumps(state)) for state in states)}


def save(file, batches):
    fields = {
        f"{n} {name}": each for n, batch in enumerate(batches) for name, each in batch.items()
    }
    np.savez(f"{file}.{jax.process_index()}.npz", **fields)


def fail(asked):
    """What each process is told if one of them has an error, and whether all can go on."""
    me, said = jax.process_index(), []
    iterator, batches = iter(stream_of(asked | {"fails": 65 if me == 1 else None})), []
    while True:
        try:
            batches.append(local(next(iterator)))
        except StopIteration:
            break
        except (OSError, RuntimeError) as error:
            said.append(f"{type(error).__name__}: {error}")
    save(asked["file"], batches)
    return said


def refuse(asked):
    """What is said of seeds and states that are not the same."""
    me, said = jax.process_index(), {}
    stream = stream_of(asked)
    iterator, states = iter(stream), []
    for _ in range(4):
        states.append(iterator.get_state())
        next(iterator)
    for name, make in {
        "seeds": lambda: (stream_of(asked | {"seed": me}), None),
        "steps": lambda: (stream, states[1 + (me == 1)]),
        "seed of a state": lambda: (stream_of(asked | {"seed": 4}), states[2]),
        "host": lambda: (stream, states[2] | {"host": (me + 1) % jax.process_count()}),
        "hosts": lambda: (stream_of(asked, sharding=None), states[2]),
    }.items():
        other, state = make()
        iterator = iter(other)
        try:
            if state is not None:
                iterator.set_state(state)
            next(iterator)
        except ValueError as error:
            said[name] = str(error)
    # Process 0 alone has data, and windows of three examples fill no batch.
    small = stream_of(asked | {"kind": "empty", "window": 3}, [pipeline.Bucket(16, 64)])
    said["window"] = sum(int((batch["inputs_segment_ids"] > 0).sum()) for batch in small)
    if jax.process_count() > 1:
        mesh, one_row = mesh_of(data=jax.process_count()), [*BUCKETS, pipeline.Bucket(1, 128)]
        length = NamedSharding(mesh, PartitionSpec(None, "data"))
        dynamic = pipeline.DynamicContext(mesh)
        for name, buckets, sharding in (("rows", BUCKETS, length), ("row", one_row, dynamic)):
            try:
                stream_of(asked, buckets, sharding=sharding)
            except ValueError as error:
                said[name] = str(error)
    return said


def load(asked):
    """The shapes of global batches whose buckets are chosen for the first window of all."""
    me, count = jax.process_index(), jax.process_count()
    source = grain.MapDataset.source(shard_of(asked["kind"], me, count))
    options = {"tokens_per_batch": 512, "length_multiple": 16, "window": 40}
    total = jax.jit(lambda batch: batch["loss_weights"].sum())
    with pipeline.load(source, sharding=mesh_of(data=count), **options) as loader:
        found = [(*batch["inputs"].shape, int(total(batch))) for batch in loader]
        return {"buckets": sorted(map(str, loader.specs)), "batches": found}


def interrupt(asked):
    """Whether a stream goes on that is restored while a thread of process 0 waits for the others.

    They have not begun a window that process 0 reads ahead.
    """
    iterator = iter(stream_of(asked))
    begin = iterator.get_state()
    wanted = [local(batch) for batch in stream_of(asked)]
    if jax.process_index() == 0:
        iterator.start_prefetch()
        time.sleep(0.5)
    for _ in range(2):
        iterator.set_state(begin)
        np.testing.assert_equal(local(next(iterator)), wanted[0])
    np.testing.assert_equal([local(batch) for batch in iterator], wanted[1:])
    return len(wanted)


def restart(asked):
    """Goes on from the last states that all have, if there are any; saves each step and its state.

    Steps take a moment, so that the process can be killed between any two of them.
    """
    folder = pathlib.Path(asked["folder"])
    me, count = jax.process_index(), jax.process_count()
    iterator = iter(stream_of(asked))
    done = [
        {int(path.stem) for path in folder.glob(f"state{process}/*.json")}
        for process in range(count)
    ]
    if common := set.intersection(*done):
        state = json.loads((folder / f"state{me}" / f"{max(common)}.json").read_text())
        iterator.set_state(state)
    print("BEGUN", flush=True)
    for batch in iterator:
        step = iterator.get_state()["step"]
        np.savez(folder / f"batch{me}" / f"{step}.npz", **local(batch))
        part = folder / f"state{me}" / f"{step}.part"
        part.write_text(json.dumps(iterator.get_state()))
        os.replace(part, part.with_suffix(".json"))
        print("STEP", flush=True)
    return "done"


def several(asked):
    return [JOBS[job["do"]](job) for job in asked["jobs"]]


JOBS = {job.__name__: job for job in (whole, fail, refuse, load, interrupt, restart, several)}


def main():
    asked = json.loads(sys.argv[1])
    if asked["count"] > 1:
        hosts.connect(f"127.0.0.1:{asked['port']}", asked["count"], asked["index"], wait=20)
    with hosts.exit_together("stream_worker.py"):
        print("ANSWER", json.dumps(JOBS[asked["do"]](asked)), flush=True)


if __name__ == "__main__":
    main()
