"""How others make batches: Grain's packers, read-ahead batches, Tunix's rows of rollouts."""

from collections.abc import Sequence

import grain
import numpy as np

from benchmarks import simulations
from benchmarks.simulations import Simulation

# Elements in memory need no threads: with them, each element costs twice as much.
READ = grain.ReadOptions(num_threads=0, prefetch_buffer_size=16)

PACKERS = {
    "first fit": grain.experimental.FirstFitPackIterDataset,
    "best fit": grain.experimental.BestFitPackIterDataset,
}


def grain_packed(
    examples: Sequence[np.ndarray], length: int, *, packer: str = "best fit", bins: int = 32
) -> grain.IterDataset:
    """Grain's packed rows of causal examples, shuffled: inputs, targets, segment ids, positions."""
    causal = grain.MapDataset.source(examples).shuffle(seed=0).map(_shifted)
    rows = causal.to_iter_dataset(READ)
    lengths = {"inputs": length, "targets": length}
    return PACKERS[packer](rows, length_struct=lengths, num_packing_bins=bins)


def _shifted(example: np.ndarray) -> dict[str, np.ndarray]:
    return {"inputs": example[:-1], "targets": example[1:]}


def grain_fill(lengths: np.ndarray, length: int, *, packer: str, bins: int) -> float:
    """The share of positions that are real when Grain packs examples of these lengths."""
    blank = np.zeros(length + 1, np.int32)
    rows = grain_packed([blank[: size + 1] for size in lengths], length, packer=packer, bins=bins)
    return int(lengths.sum()) / (sum(1 for _ in rows) * length)


def read_ahead(lengths: np.ndarray, budget: int, window: int = 10_000) -> tuple[Simulation, str]:
    """Batches of like lengths, in a random order of examples, and who made them.

    infinibatch if it is installed (`pip install infinibatch`); otherwise `benchmarks.simulations`.
    """
    items = np.random.default_rng(0).permutation(lengths)
    try:
        from infinibatch import iterators
    except ImportError:
        return simulations.token_budget(items, budget=budget, window=window), "simulated"
    batches = list(
        iterators.BucketedReadaheadBatchIterator(
            iterators.NativeCheckpointableIterator(items.tolist()),
            read_ahead=window,
            key=int,
            batch_size=lambda longest: budget // longest,
            seed=0,
        )
    )
    simulation = Simulation(
        rows=np.array([len(batch) for batch in batches]),
        lengths=np.array([max(batch) for batch in batches]),
        tokens=int(lengths.sum()),
    )
    return simulation, "infinibatch"


def tunix(lengths: np.ndarray, length: int) -> tuple[np.ndarray, str]:
    """The row of each rollout in Tunix's packer, int64 [n], and who packed.

    Tunix if it is installed (`pip install google-tunix`); otherwise `benchmarks.simulations`.
    """
    try:
        from tunix.rl import common, utils
    except ImportError:
        return simulations.next_fit(lengths, length), "simulated"
    empty = np.zeros((1, 0), np.int32)

    def rollout(size: int) -> common.TrainExample:
        ids = np.ones((1, size), np.int32)
        logprobs = np.zeros((1, size), np.float32)
        return common.TrainExample(empty, empty, ids, ids, np.zeros(1), logprobs, logprobs)

    packed = utils.pack_sequences(([rollout(size)] for size in lengths.tolist()), length)
    each = [int(np.max(example.segment_ids)) for [example] in packed]
    return np.repeat(np.arange(len(each)), each), "itself"
