"""Remote: batches of a corpus in a bucket that is far away, beside the same on local disk."""

import contextlib
import dataclasses
import json
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from unittest import mock

import jax
import numpy as np

import pipeline
from benchmarks.lengths import examples_of
from benchmarks.results import Line, Section

MILLISECONDS, MEGABYTES = 30, 200
TOKENS_PER_PART, PARTS, WINDOWS = 1 << 22, 64, 14  # of 16 MiB; `prepare` makes some of 64 MiB
BATCH = 1 << 17  # positions
SPEED = 30e6  # tokens that training takes in a second; the bandwidth is 50 M


@dataclasses.dataclass
class Run:
    """What some epochs took: tokens and seconds of each, and what the server sent."""

    tokens: list[int]
    seconds: list[float]
    first: float
    requests: int
    bytes: int
    stalls: int

    @property
    def speed(self) -> float:
        """Tokens a second, after the first epoch if there are others."""
        return sum(self.tokens[1:] or self.tokens) / sum(self.seconds[1:] or self.seconds)


def measure() -> Section:
    """Trains for two epochs from local disk and through a cache."""
    mean = 600
    drawn = np.random.default_rng(0).lognormal(6, 0.9, PARTS * TOKENS_PER_PART // mean)
    lengths = np.clip(drawn, 2, 4096).astype(np.int64)
    with contextlib.ExitStack() as stack:
        root = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        with mock.patch("pipeline.text.ragged.TOKENS_PER_PART", TOKENS_PER_PART):
            local = pipeline.Corpus.from_arrays(examples_of(lengths), root / "bucket" / "corpus")
        size = sum(path.stat().length for path in local.directory.glob("part-*"))
        window = len(lengths) // WINDOWS
        address = stack.enter_context(_serve(root))

        def cached(name: str) -> pipeline.Corpus:
            place = "s3://bucket/corpus"
            return pipeline.Corpus.open(place, cache=root / name, cache_bytes=size // 4)

        runs = {"local disk": _train(local, window, address, 3)}
        runs["local disk, no training"] = _train(local, window, address, 3, speed=np.inf)
        runs["a cache of a quarter"] = _train(cached("ahead"), window, address, 3)
        name = "a cache of a quarter, no training"
        runs[name] = _train(cached("fast"), window, address, 3, speed=np.inf)
    whole = runs["local disk"]
    per_epoch = sum(whole.tokens) / len(whole.tokens)
    lines = []
    for name, run in runs.items():
        beside = runs["local disk, no training"] if "no training" in name else whole
        told = f"{run.speed / beside.speed:.3f}× local disk"
        if "no training" in name and run.requests:
            told += f", {run.speed * 4e-6 / MEGABYTES:.3f}× what the bandwidth allows"
        if run.requests:
            epochs = sum(run.tokens) / per_epoch
            told += (
                f"; {run.bytes / size / epochs:.2f} of the corpus fetched in an epoch, "
                f"{run.requests / sum(run.tokens) * 1e6:.1f} requests for a million tokens, first "
                f"batch after {run.first:.1f} s, {run.stalls} batches waited after two windows"
            )
        lines.append(Line(name, f"{run.speed / 1e6:.1f} M tokens/s", told))
    about = (
        f"Real tokens per second of `load` after the first epoch, with training that takes up to "
        f"{SPEED / 1e6:.0f} M tokens/s, and without training. The corpus has {size / 1e6:.0f} MB "
        f"in {PARTS} parts, planned in {WINDOWS} windows. An S3-compatible server on this machine "
        f"answers after {MILLISECONDS} ms and sends {MEGABYTES} MB/s, which are "
        f"{MEGABYTES / 4:.0f} M tokens/s."
    )
    return Section("remote", about, lines)


def _train(
    corpus,
    window: int,
    address: str,
    epochs: int,
    speed: float = SPEED,
) -> Run:
    before = _statistics(address)
    caches = [cache for cache, _ in corpus.caches]
    begin = time.perf_counter()
    tokens, seconds, first, warm = [], [], 0.0, 0
    with pipeline.load(
        corpus, tokens_per_batch=BATCH, max_buckets=2, window=window, num_epochs=epochs
    ) as loader:
        steps = loader.plan.num_batches()
        for epoch in range(epochs):
            start, count = time.perf_counter(), 0
            for step in range(steps):
                batch = next(loader)
                jax.block_until_ready(batch)
                if epoch == step == 0:
                    first = time.perf_counter() - begin
                count += loader.planned.num_tokens
                ends = start + count / speed
                time.sleep(max(ends - time.perf_counter(), 0))
                if epoch == 0 and step == steps // WINDOWS * 2:
                    warm = sum(cache.traffic["stalls"] for cache in caches)
            tokens.append(count)
            seconds.append(time.perf_counter() - start)
    for thread in [each for each in threading.enumerate() if each.name == "part-cache"]:
        thread.join()  # it ends when it has fetched its part
    after = _statistics(address)
    stalls = sum(cache.traffic["stalls"] for cache in caches)
    return Run(
        tokens,
        seconds,
        first,
        after["requests"] - before["requests"],
        after["bytes"] - before["bytes"],
        stalls - warm,
    )


@contextlib.contextmanager
def _serve(root: pathlib.Path) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "benchmarks.object_store", os.fspath(root), str(port)]
    process = subprocess.Popen([*command, str(MILLISECONDS), str(MEGABYTES)])
    address = f"http://127.0.0.1:{port}"
    settings = {
        "AWS_ENDPOINT_URL": address,
        "AWS_ACCESS_KEY_ID": "nobody",
        "AWS_SECRET_ACCESS_KEY": "nothing",
        "AWS_REGION": "us-east-1",
    }
    try:
        with mock.patch.dict(os.environ, settings):
            for _ in range(200):
                with contextlib.suppress(OSError):
                    _statistics(address)
                    break
                time.sleep(0.05)
            yield address
    finally:
        process.kill()
        process.wait()


def _statistics(address: str) -> dict[str, int]:
    with urllib.request.urlopen(f"{address}/statistics") as answer:
        return json.load(answer)
