"""Tokens: batches from token files in place, beside a prepared corpus of the same tokens."""

import pathlib
import tempfile
import time
from collections.abc import Callable

import numpy as np
import pyarrow as pa
from pyarrow import feather

from benchmarks.results import Section
from benchmarks.turns import best_seconds
from pipeline import Batches, Bucket, Corpus, InPlace, Plan

EXAMPLES, END, ROUNDS = 30_000, 2, 9


def measure() -> Section:
    """Builds the batches of an epoch from each kind of files, in turns."""
    rng = np.random.default_rng(0)
    sizes = np.clip(rng.lognormal(5.5, 1, EXAMPLES), 2, 2048).astype(int)
    flat, ends = rng.integers(3, 50_000, sizes.sum()).astype(np.uint16), np.cumsum(sizes)
    flat[ends - 1] = END
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        batches = {name: build(corpus) for name, corpus in write(folder, flat, ends).items()}
        seconds = best_seconds(batches, ROUNDS, time.process_time)
        lines = [(name, f"{seconds['prepared'] / each:.2f}") for name, each in seconds.items()]
        search = {"search": lambda: InPlace.flat(folder / "train.bin", dtype="uint16", end=END)}
        found = flat.nbytes / best_seconds(search, ROUNDS, time.process_time)["search"] / 1e9
    about = (
        f"Batches a second of CPU time, over those of a prepared corpus: {EXAMPLES:,} documents of "
        f"{len(flat):,} tokens. A file of ids alone is opened, and searched for the id that ends "
        f"documents, at {found:.1f} GB a second."
    )
    return Section("tokens", about, lines, ("files", "batches"))


def write(folder: pathlib.Path, flat: np.ndarray, ends: np.ndarray) -> dict[str, Corpus | InPlace]:
    """The same documents in files of each kind."""
    examples = np.split(flat, ends[:-1])
    flat.tofile(folder / "train.bin")
    np.save(folder / "tokens.npy", flat)
    np.save(folder / "offsets.npy", np.append(0, ends))
    table = pa.table({"input_ids": pa.array(examples, pa.large_list(pa.uint16()))})
    feather.write_feather(table, str(folder / "0.arrow"), compression="uncompressed")
    return {
        "prepared": Corpus.from_arrays(examples, folder / "corpus", vocab_size=50_000),
        "flat, with an end id": InPlace.flat(folder / "train.bin", dtype="uint16", end=END),
        "npy": InPlace.npy(folder / "tokens.npy", folder / "offsets.npy"),
        "arrow": InPlace.arrow(folder / "0.arrow"),
    }


def build(corpus: Corpus | InPlace) -> Callable[[], object]:
    """A function that builds all batches of an epoch."""
    plan = Plan(corpus, [Bucket(rows=32, length=2048)])
    batches = Batches(corpus, plan)
    return lambda: [batches[step] for step in range(plan.num_batches())]
