"""Tiers: time per step of real processes with one row each, joined over loopback.

    python -m benchmarks tiers --processes 2 4

Each process uses one thread, so a machine needs a core for each, and one to spare. Steps with and
without tiers take turns, block by block, so that a busy moment hits both.
"""

import functools
import json
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import time
from typing import Any

import jax
import numpy as np
from flax import nnx

import pipeline
from benchmarks.lengths import examples_of
from benchmarks.results import Line, Section
from models.config import TransformerConfig
from models.decoder import Decoder
from models.loss import cross_entropy
from pipeline.loading.sharding import batch_sharding
from pipeline.report.tiers import row_costs, time_over_ideal
from pipeline.steps import hosts

LENGTH, TIERS, BLOCKS = 2048, 16, 4
VOCABULARY = 256
ONE_THREAD = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
MODEL = TransformerConfig(
    vocab_size=VOCABULARY,
    num_layers=1,
    width=64,
    num_heads=2,
    num_kv_heads=2,
    mlp_width=128,
    attention="blocked",
)


def measure(processes: list[int]) -> Section:
    """Times the steps of groups of processes; each group trains in one run, with both plans."""
    lines = []
    with tempfile.TemporaryDirectory() as directory:
        folder = pathlib.Path(directory)
        lengths = np.random.default_rng(0).lognormal(5.5, 1.5, 6000).clip(1, LENGTH).astype(int)
        pipeline.Corpus.from_arrays(examples_of(lengths, VOCABULARY), folder / "corpus")
        for count in processes:
            lines.append(_line(count, _run(count, folder)))
    return Section(
        "tiers",
        f"Time of a step with tiers={TIERS} over that without, for a decoder of one layer of width "
        f"{MODEL.width} with blocked attention, in rows of {LENGTH:,} positions with documents of "
        "lognormal length. Each row has a process with one thread, and the processes are joined "
        f"over loopback. {BLOCKS * TIERS} steps with tiers and as many without take turns.",
        lines,
    )


def _run(count: int, folder: pathlib.Path) -> dict[str, dict[str, list[float]]]:
    """What process 0 of a run of `count` processes answers."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    asked = {"corpus": str(folder / "corpus"), "count": count, "port": port}
    others = [_start(asked | {"index": index}) for index in range(1, count)]
    try:
        answer, _ = _start(asked | {"index": 0}, stdout=subprocess.PIPE).communicate(timeout=1800)
    finally:
        for process in others:
            process.kill()
    return json.loads(answer.rpartition("ANSWER ")[2])


def _start(asked: dict, **options: Any) -> subprocess.Popen:
    command = [sys.executable, "-m", "benchmarks.tiers", json.dumps(asked)]
    return subprocess.Popen(
        command, env=os.environ | {"XLA_FLAGS": ONE_THREAD}, text=True, **options
    )


def _line(count: int, found: dict[str, dict[str, list[float]]]) -> Line:
    seconds = {name: sum(each["seconds"]) / len(each["seconds"]) for name, each in found.items()}
    ideal = {
        name: time_over_ideal(map(np.array, each["costs"]), count) for name, each in found.items()
    }
    plain, tiers = "1", f"{TIERS}"
    return Line(
        f"{count} processes, tiers={TIERS}",
        f"{seconds[tiers] / seconds[plain]:.2f}×",
        f"{seconds[tiers] * 1e3:,.0f} ms against {seconds[plain] * 1e3:,.0f} ms; over ideal "
        f"{ideal[tiers]:.2f} against {ideal[plain]:.2f}, as the plan counts it",
    )


def work(asked: dict) -> dict[str, dict[str, list]]:
    """Seconds of each step, and costs of its rows, with and without tiers."""
    hosts.connect(f"127.0.0.1:{asked['port']}", asked["count"], asked["index"], wait=120)
    mesh = hosts.make_mesh({"data": -1})
    jax.set_mesh(mesh)
    sharding = batch_sharding(mesh)
    graph, params = nnx.split(Decoder(MODEL, rngs=nnx.Rngs(0)))
    replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    params = jax.device_put(params, replicated)

    def mean_loss(params, batch):
        model = nnx.merge(graph, params)
        logits = model(batch["inputs"], batch["inputs_segment_ids"], batch["inputs_positions"])
        sums = cross_entropy(logits, batch["targets"], batch["loss_weights"])
        return sums.total / sums.weight

    @functools.partial(jax.jit, out_shardings=replicated)
    def step(params, batch):
        gradients = jax.grad(mean_loss)(params, batch)
        return jax.tree.map(lambda p, g: p - 1e-3 * g, params, gradients)

    buckets = [pipeline.Bucket(asked["count"], LENGTH)]
    options = {"sharding": sharding, "buckets": buckets}
    found: dict[str, dict[str, list]] = {}
    loaders = {k: pipeline.load(asked["corpus"], tiers=k, **options) for k in (1, TIERS)}
    for loader in loaders.values():
        jax.block_until_ready(step(params, next(loader)))  # compiles; not counted
        loader.set_state(loader.batches.origin.state(0))
    for block in range(BLOCKS):
        for tiers, loader in loaders.items():
            for number in range(block * TIERS, (block + 1) * TIERS):
                batch = next(loader)
                begin = time.perf_counter()
                params = jax.block_until_ready(step(params, batch))
                seconds = time.perf_counter() - begin
                planned = loader.plan.batch(number)
                each = found.setdefault(f"{tiers}", {"seconds": [], "costs": []})
                each["seconds"].append(seconds)
                costs = row_costs(planned.bucket, planned.segments, MODEL.width)
                each["costs"].append(costs.tolist())
    return found


if __name__ == "__main__":
    with hosts.exit_together("tiers"):
        print("ANSWER", json.dumps(work(json.loads(sys.argv[1]))), flush=True)
