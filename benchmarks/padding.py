"""Draws `padding.svg`: padding per strategy on the same lengths, as a bar chart for the README.

    python -m benchmarks.padding --lengths FILE

The first three strategies are those that infinibatch's documentation compares on WikiText-103
(1,164,464 lines of at most 512 subwords). Batches have 32 rows, or at most 16,384 positions.
"""

import argparse
import pathlib

import numpy as np

import pipeline
from benchmarks import peers
from benchmarks.lengths import sample

PATH = pathlib.Path(__file__).with_name("padding.svg")
TOKENS = 16_384
LONGEST = 512
GRAIN_EXAMPLES = 100_000


def simulate(lengths: np.ndarray) -> list[tuple[str, str, float]]:
    """Strategy, number of shapes and share of padding, from most padding to least."""
    order = np.random.default_rng(0).permutation(lengths)
    total = int(lengths.sum())
    windows = np.concatenate([np.sort(order[at : at + 320]) for at in range(0, len(order), 320)])
    budgeted, _ = peers.read_ahead(lengths, TOKENS)
    cells = sum(len(batch) * max(batch) for batch in budgeted)
    shapes = len({(len(batch), max(batch)) for batch in budgeted})
    buckets = pipeline.fit_buckets(
        lengths, tokens_per_batch=TOKENS, max_buckets=4, max_length=LONGEST
    )
    plans = {
        f"Lockstep, {packing.replace('_', ' ')}": pipeline.Plan(lengths, buckets, packing=packing)
        for packing in ("best_fit", "optimal")
    }
    next_fit_rows = peers.next_fit(order, LONGEST)
    grain = peers.grain_fill(lengths[:GRAIN_EXAMPLES], LONGEST, packer="best fit", bins=32)
    return sorted(
        [
            ("every row padded to 512", "1 shape", 1 - total / (len(lengths) * LONGEST)),
            ("batches of 32, padded to the longest", *_of_32(order, total)),
            ("windows of 320 sorted, batches of 32", *_of_32(windows, total)),
            ("contiguous next fit", "1 shape", 1 - total / (next_fit_rows * LONGEST)),
            ("read-ahead, token budget", f"{shapes} shapes", 1 - total / cells),
            ("Grain best fit, 32 bins", "1 shape", 1 - grain),
            *((name, f"{len(buckets)} shapes", plan.padding) for name, plan in plans.items()),
        ],
        key=lambda each: -each[2],
    )


def _of_32(lengths: np.ndarray, total: int) -> tuple[str, float]:
    """Number of shapes and padding when each 32 in a row are padded to the longest of them."""
    starts = np.arange(0, len(lengths), 32)
    longest = np.maximum.reduceat(lengths, starts)
    rows = np.diff(starts, append=len(lengths))
    return f"{len(np.unique(longest))} shapes", 1 - total / int(longest @ rows)


def draw(bars: list[tuple[str, str, float]]) -> str:
    """The chart as SVG, in colours that can be read on light backgrounds and on dark ones."""
    left, width, step, top = 290, 300, 34, 12
    high = top + step * len(bars) + 4
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 {high}" width="760" '
        f'height="{high}" font-family="system-ui, sans-serif" font-size="14" role="img">',
        "<title>Share of positions that are padding, per strategy</title>",
        "<style>text{fill:#768390}.ours{fill:#1f9d7a;font-weight:600}</style>",
    ]
    for index, (name, shapes, share) in enumerate(bars):
        y = top + step * index
        ours = name.startswith("Lockstep")
        of = ' class="ours"' if ours else ""
        bar = max(share * width, 1.5)
        text = f"{share:.1%}" if share >= 0.01 else f"{share:.2%}"
        parts += [
            f'<text x="{left - 12}" y="{y + 16}" text-anchor="end"{of}>{name}</text>',
            f'<rect x="{left}" y="{y}" width="{bar:.1f}" height="22" rx="3" '
            f'fill="{"#1f9d7a" if ours else "#8c95a6"}"/>',
            f'<text x="{left + bar + 8:.1f}" y="{y + 16}"><tspan{of}>{text}</tspan>'
            f'<tspan dx="10">{shapes}</tspan></text>',
        ]
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    """Simulates, prints and draws."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.padding", description=__doc__)
    parser.add_argument("--lengths", metavar="FILE", help="as for python -m benchmarks")
    bars = simulate(sample(parser.parse_args().lengths, longest=LONGEST))
    for name, shapes, share in bars:
        print(f"{name:<40}{shapes:>12}{share:>9.2%}")
    PATH.write_text(draw(bars))


if __name__ == "__main__":
    main()
