"""Mixture: many corpora in one mixture, beside Grain's two, each in a process of its own.

The corpora of a mixture have ten different contents in turn, but files of their own.
"""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import grain
import numpy as np

import pipeline
from benchmarks.results import Section

EXAMPLES, CONTENTS = 20_000, 10
ROWS, LENGTH, STEPS, BINS = 8, 512, 1_000, 64
WAYS = {
    "Lockstep": "ours",
    "grain.MapDataset.mix": "map_mix",
    "grain.IterDataset.mix": "iter_mix",
}
ROOT = pathlib.Path(__file__).parents[1]

# A batch of numbers of corpora: how much of each it has, in the unit of weights.
Counts = np.ndarray


def measure(numbers: list[int]) -> Section:
    """Measures each way with each number of corpora."""
    lines = []
    with tempfile.TemporaryDirectory() as name:
        _write(pathlib.Path(name), max(numbers))
        for number in numbers:
            for way, function in WAYS.items():
                command = [sys.executable, "-m", "benchmarks.mixture", function, name, f"{number}"]
                paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
                environment = {**os.environ, "PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"}
                done = subprocess.run(command, env=environment, capture_output=True, text=True)
                if done.returncode:
                    raise RuntimeError(f"{way}, {number}: {done.stderr[-2000:]}")
                seen = json.loads(done.stdout.splitlines()[-1])
                if way == "Lockstep":
                    ours = seen
                lines.append(
                    (
                        f"{way}, {number}",
                        f"{seen['files']:,}",
                        f"{seen['threads']:,}",
                        f"{seen['memory'] / 2**20:,.0f} MiB",
                        f"{seen['first'] / ours['first']:.2f}×",
                        f"{ours['batches'] / seen['batches']:.2f}×",
                        f"{seen['off']:.3%}",
                    )
                )
    return Section(
        "mixture",
        f"Mixtures of corpora of {EXAMPLES:,} examples (lognormal, mean about 60 tokens), with "
        f"weights from 1 to 10, packed into batches of {ROWS} × {LENGTH}; for Grain ArrayRecord "
        f"files, `FirstFitPackIterDataset` with {BINS} bins, and its own ReadOptions. After "
        f"{STEPS:,} batches: files that are open or mapped, threads, and anonymous memory beyond "
        "that of the imports. The processor time to open, plan and make the first batch, over "
        "ours (0.5× is half of it); batches per second of processor time, over ours; and the "
        "largest difference of a corpus's share from its weight, in tokens, and for Grain in "
        "examples, as it weighs them. Each in a process of its own, one after another, while the "
        "machine was busy with other work: use the ratios.",
        lines,
        ("mixture", "files", "threads", "memory", "first batch", "batches/s", "share off"),
    )


def _write(folder: pathlib.Path, number: int) -> None:
    from array_record.python.array_record_module import ArrayRecordWriter

    rng = np.random.default_rng(0)
    for content in range(min(CONTENTS, number)):
        sizes = np.clip(rng.lognormal(3.7, 0.9, EXAMPLES), 2, LENGTH).astype(int)
        ids = rng.integers(1, 50_000, sizes.sum()).astype(np.uint16)
        examples = np.split(ids, np.cumsum(sizes)[:-1])
        pipeline.Corpus.from_arrays(examples, folder / f"{content}", vocab_size=50_000)
        writer = ArrayRecordWriter(f"{folder}/{content}/examples.array_record", "group_size:1")
        for example in examples:
            writer.write(example.tobytes())
        writer.close()
    for corpus in range(CONTENTS, number):
        shutil.copytree(
            folder / f"{corpus % CONTENTS}", folder / f"{corpus}", copy_function=os.link
        )


def _weights(number: int) -> np.ndarray:
    return np.random.default_rng(1).integers(1, 11, number).astype(float)


def ours(folder: pathlib.Path, number: int) -> Iterator[Counts]:
    """Batches of Lockstep; weights count tokens."""
    names = [f"{n}" for n in range(number)]
    corpora = pipeline.Corpora({name: pipeline.Corpus.open(folder / name) for name in names})
    weights = dict(zip(names, _weights(number).tolist(), strict=True))
    plan = pipeline.Plan(corpora, [pipeline.Bucket(ROWS, LENGTH)], weights=weights)
    batches = pipeline.Batches(corpora, plan)
    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)  # as `load` reads
    for step, _ in enumerate(batches.repeat().to_iter_dataset(options)):
        sources = plan.batch(step).sources
        yield np.array([sources.get(name, 0) for name in names])


def _source(folder: pathlib.Path, number: int) -> grain.MapDataset:
    """A corpus of Grain; its number is the first token of each example, so that it is counted."""

    def decode(record: bytes) -> dict[str, np.ndarray]:
        ids = np.frombuffer(record, np.uint16).astype(np.int32)
        ids[0] = number
        return {"inputs": ids}

    path = f"{folder}/{number}/examples.array_record"
    source = grain.MapDataset.source(grain.sources.ArrayRecordDataSource(path))
    return source.shuffle(seed=number).repeat().map(decode)


def _pack(mixed: grain.IterDataset, number: int) -> Iterator[Counts]:
    packer = grain.experimental.FirstFitPackIterDataset
    rows = packer(mixed, length_struct={"inputs": LENGTH}, num_packing_bins=BINS)
    for batch in rows.batch(ROWS):
        first = (batch["inputs_positions"] == 0) & (batch["inputs_segment_ids"] > 0)
        yield np.bincount(batch["inputs"][first], minlength=number)


def map_mix(folder: pathlib.Path, number: int) -> Iterator[Counts]:
    """Batches of Grain's mixture by index; weights count examples."""
    sources = [_source(folder, n) for n in range(number)]
    mixed = grain.MapDataset.mix(sources, weights=_weights(number).tolist())
    return _pack(mixed.to_iter_dataset(), number)


def iter_mix(folder: pathlib.Path, number: int) -> Iterator[Counts]:
    """Batches of Grain's mixture of iterators, each with threads of its own."""
    sources = [_source(folder, n).to_iter_dataset() for n in range(number)]
    return _pack(grain.IterDataset.mix(sources, weights=_weights(number).tolist()), number)


def _run(way: Callable[[pathlib.Path, int], Iterator[Counts]], folder: str, number: int) -> Any:
    np.empty(0)
    before, begin = _status("RssAnon"), time.process_time()
    batches = way(pathlib.Path(folder), number)
    counts = next(batches)
    first, begin = time.process_time() - begin, time.process_time()
    for _ in range(STEPS - 1):
        counts = counts + next(batches)
    each = (time.process_time() - begin) / (STEPS - 1)
    weights = _weights(number)
    off = np.abs(counts / counts.sum() - weights / weights.sum()).max()
    found = {os.readlink(f"/proc/self/fd/{fd}") for fd in _descriptors()}
    found |= {line.split()[-1] for line in pathlib.Path("/proc/self/maps").read_text().splitlines()}
    return {
        "files": sum(folder in path for path in found),
        "threads": _status("Threads"),
        "memory": 1024 * (_status("RssAnon") - before),
        "first": first,
        "batches": each,
        "off": float(off),
    }


def _descriptors() -> list[str]:
    return [name for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")]


def _status(name: str) -> int:
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(f"{name}:")))


if __name__ == "__main__":
    print(json.dumps(_run(globals()[sys.argv[1]], sys.argv[2], int(sys.argv[3]))))
    sys.stdout.flush()
    os._exit(0)  # without waiting for Grain's threads
