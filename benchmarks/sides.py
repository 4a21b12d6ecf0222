"""Sides: rows of examples with several lengths, beside the fewest that their totals allow."""

import time

import numpy as np

from benchmarks.results import Section
from pipeline import Bucket, Plan

EXAMPLES, LIMITED = 100_000, 50_000


def measure() -> Section:
    """Packs different examples of each kind into rows of one shape."""
    kinds = draw(EXAMPLES)
    lines, of_pairs = [], 0.0
    for name, (lengths, room) in kinds.items():
        names = [f"side {number}" for number in range(len(room))]
        room = np.maximum(room, lengths.max(axis=0)).astype(int)
        bucket = Bucket(1, dict(zip(names, room, strict=True)))
        start = time.process_time()
        rows = Plan(lengths, [bucket]).num_batches()
        seconds = time.process_time() - start
        of_pairs = of_pairs or seconds
        bound = np.ceil(lengths.sum(axis=0) / bucket.lengths).max()
        others = next_fit(lengths, room) / bound
        line = f"{rows / bound:.4f}", f"{others:.2f}", f"{seconds / of_pairs:.2f}"
        lines.append((f"{name}: {'/'.join(map(str, bucket.lengths))}", *line))
    rng = np.random.default_rng(0)
    text = np.clip(rng.lognormal(4.3, 1, LIMITED), 1, 2048).astype(int)
    for limit in (16, 20, 24, 32):
        start = time.process_time()
        rows = Plan(text, [Bucket(1, 2048)], max_segments=limit).num_batches()
        seconds = time.process_time() - start
        bound = np.ceil(max(text.sum() / 2048, len(text) / limit))
        line = f"{rows / bound:.4f}", "", f"{seconds / of_pairs:.2f}"
        lines.append((f"{LIMITED:,} texts of 122, max_segments={limit}: 2048", *line))
    about = (
        f"Rows over the bound, which is the fullest side's total over its length, for {EXAMPLES:,} "
        "examples of each kind; and CPU time over that of the pairs. Next-fit takes examples in a "
        "random order."
    )
    return Section("sides", about, lines, ("examples and row", "rows", "next-fit", "time"))


def draw(count: int) -> dict[str, tuple[np.ndarray, tuple[int, ...]]]:
    """The lengths of examples of each kind, int64 [count, sides], and those of a row."""
    rng = np.random.default_rng(0)

    def lognormal(mean: float, sigma: float, least: int, most: int) -> np.ndarray:
        return np.clip(rng.lognormal(mean, sigma, count), least, most)

    images = rng.choice([0, 1, 1, 1, 2, 3, 4, 8], count)
    patches = np.minimum(images * lognormal(5.3, 0.5, 16, 1024), 8192)
    pictures = np.stack([lognormal(5.5, 0.9, 8, 4096), patches, images], axis=1)
    share = pictures.mean(axis=0) / patches.mean()
    frames = lognormal(6.3, 0.6, 50, 3000)
    letters = np.clip(frames * 0.09 * np.exp(rng.normal(0, 0.3, count)), 2, 600)
    wide = np.exp(rng.uniform(np.log(20), np.log(4000), (count, 4)))
    nodes = lognormal(3, 0.6, 4, 200)
    edges = nodes * rng.uniform(2, 4.8, count)
    found = {
        "pairs": (rng.integers(1, 8192, (count, 2)), (16_384, 16_384)),
        "text, patches, images": (pictures, (4096, 8192, 16)),
        "the same, all full together": (pictures, tuple(np.ceil(share * 16_384).tolist())),
        "speech": (np.stack([frames, letters], axis=1), (6000, 600)),
        "four wide sides": (wide, (8000,) * 4),
        "the same, rows as the longest": (wide, (4000,) * 4),
        "graphs": (np.stack([nodes, edges, np.ones(count)], axis=1), (1024, 3600, 64)),
    }
    return {name: (lengths.astype(int), room) for name, (lengths, room) in found.items()}


def next_fit(lengths: np.ndarray, room: np.ndarray) -> int:
    """The rows, if an example that does not fit into the last row opens another."""
    rows, used = 1, 0 * room
    for example in lengths:
        used = used + example
        if (used > room).any():
            rows, used = rows + 1, example
    return rows
