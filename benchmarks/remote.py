"""Remote: batches of a corpus in a bucket that is far away, beside the same on local disk.

Also four processes with caches of their own, each of which reads its share of the corpus.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import resource
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

# Of the processes that share a corpus: their number, its parts, and the shares of a window. Half of
# the bandwidth is left for those that read all of it.
HOSTS, SMALL_PARTS, SMALL_PART, FEW_WINDOWS, SHARES, EPOCHS = 4, 256, 1 << 20, 8, 64, 3
SLOWER = 6e6
PLANNED, OF_WINDOW = 1 << 22, 256  # examples of a window that is planned, and its shares


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
    about += (
        f" Below: {HOSTS} processes, each with a cache for what it needs of two of {FEW_WINDOWS} "
        f"windows of {SMALL_PARTS} parts of {SMALL_PART >> 18} MiB, build a quarter of the rows of "
        f"each batch; after the first epoch of {EPOCHS}. A part is needed if rows of the process "
        "have an example of it. Planning is CPU time of all processes, for one bucket."
    )
    return Section("remote", about, [*lines, *_measure_hosts(), *_measure_planning()])


def _measure_hosts() -> Iterator[Line]:
    """What several processes fetch, with and without shares of the files."""
    drawn = np.random.default_rng(0).lognormal(6, 0.9, SMALL_PARTS * SMALL_PART // 600)
    lengths = np.clip(drawn, 2, 4096).astype(np.int64)
    with contextlib.ExitStack() as stack:
        root = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        with mock.patch("pipeline.text.ragged.TOKENS_PER_PART", SMALL_PART):
            local = pipeline.Corpus.from_arrays(examples_of(lengths), root / "bucket" / "corpus")
        stack.enter_context(_serve(root))
        sizes = {path.name: path.stat().length for path in local.directory.glob("part-*")}
        size = sum(sizes.values())
        for buckets, shares in ((1, 1), (1, SHARES), (2, SHARES)):
            asked = {"buckets": buckets, "shares": shares, "window": len(lengths) // FEW_WINDOWS}
            # Room for two windows, or for what a process needs of them.
            asked |= {"bytes": 2 * size // FEW_WINDOWS // (1 if shares == 1 else HOSTS - 1)}
            found = _run_hosts(root / f"{buckets}-{shares}", asked)
            fetched = sum(sum(sizes[name] for name in host["fetched"]) for host in found)
            extra = sum(len({*host["fetched"]} - {*host["needed"]}) for host in found)
            epochs = EPOCHS - 1
            yield Line(
                f"{HOSTS} processes, {buckets} bucket{'s' * (buckets > 1)}, read_shares={shares}",
                f"{fetched / size / epochs:.2f} corpora",
                f"fetched in an epoch by all, {max(len(h['fetched']) for h in found) / epochs:.0f} "
                f"of {len(sizes)} parts by one; {extra} parts that its rows do not need; "
                f"{sum(host['stalls'] for host in found)} reads waited after two windows",
            )


def _run_hosts(folder: pathlib.Path, asked: dict) -> list[dict]:
    """What each of the processes says."""
    command = [sys.executable, "-m", "benchmarks.remote"]
    started = [
        subprocess.Popen(
            [*command, json.dumps({**asked, "host": host, "cache": os.fspath(folder / f"{host}")})],
            stdout=subprocess.PIPE,
        )
        for host in range(HOSTS)
    ]
    return [json.loads(process.communicate()[0].splitlines()[-1]) for process in started]


def read_share(asked: dict) -> dict:
    """The parts that a process fetches after the first epoch, and those that its rows need."""
    from pipeline.fs import objects

    fetched, download = list[str](), objects.download

    def note(path, *given, **options):
        fetched.append(path.name)
        return download(path, *given, **options)

    with mock.patch.object(objects, "download", note):
        place = "s3://bucket/corpus"
        corpus = pipeline.Corpus.open(place, cache=asked["cache"], cache_bytes=asked["bytes"])
        buckets = pipeline.fit_buckets(
            corpus.lengths, tokens_per_batch=BATCH, max_buckets=asked["buckets"], row_multiple=HOSTS
        )
        plan = pipeline.Plan(corpus, buckets, window=asked["window"], read_shares=asked["shares"])
        batches = pipeline.Batches(
            corpus, plan, process_index=asked["host"], process_count=HOSTS
        ).repeat(EPOCHS)
        (cache, _), steps = corpus.caches[0], plan.num_batches()
        names, ends = cache._names, np.cumsum(corpus.files)
        begin, tokens, needed, at_first, warm = time.perf_counter(), 0, set[int](), 0, 0
        for step in range(EPOCHS * steps):
            planned = plan.batch(step)
            batches[step]
            rows = batches.blocks[planned.bucket][0].rows
            mine = np.isin(planned.segments[:, 0], rows)
            needed |= {*ends.searchsorted(planned.segments[mine, 1], side="right").tolist()}
            tokens += planned.num_tokens
            time.sleep(max(begin + tokens / SLOWER - time.perf_counter(), 0))
            if step == steps // FEW_WINDOWS * 2:
                warm = cache.traffic["stalls"]
            if step == steps - 1:
                at_first = len(fetched)
        since = fetched[at_first:]
        batches.ahead.stop()
    return {
        "fetched": since,
        "needed": [names[number] for number in needed],
        "stalls": int(cache.traffic["stalls"] - warm),
    }


def _measure_planning() -> Iterator[Line]:
    """The time to plan a window, and to make its rows."""
    drawn = np.random.default_rng(0).lognormal(6, 0.9, PLANNED)
    lengths, bucket = np.clip(drawn, 2, 8192).astype(np.int32), pipeline.Bucket(256, 8192)
    figures = dict[int, tuple[float, float, float]]()
    for shares in (1, OF_WINDOW):
        begin = _cpu_seconds()
        plan = pipeline.Plan(lengths, [bucket], read_shares=shares)
        made = _cpu_seconds()
        plan.batch(0)
        rows = plan.count(0, plan.num_batches()).buckets[bucket][1]
        figures[shares] = made - begin, _cpu_seconds() - made, rows
        planning, layout, rows = np.divide(figures[shares], figures[1])
        yield Line(
            f"planning a window of {PLANNED:,}, read_shares={shares}",
            f"{made - begin:.2f} s",
            f"{planning:.1f}× planning with one share; to make its rows {layout:.1f}×; "
            f"{rows:.4f}× as many rows",
        )


def _cpu_seconds() -> float:
    """The CPU time of this process and of those that it started and that have ended."""
    kinds = resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN
    return sum(used.ru_utime + used.ru_stime for used in map(resource.getrusage, kinds))


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


if __name__ == "__main__":
    print(json.dumps(read_share(json.loads(sys.argv[1]))))
