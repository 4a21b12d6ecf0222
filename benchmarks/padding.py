"""Draws `padding.svg`: padding per strategy on the same lengths, as a bar chart for the README.

    python -m benchmarks.padding --lengths FILE

The first three strategies are those that infinibatch's documentation compares on WikiText-103
(1,164,464 lines of at most 512 subwords). Batches have 32 rows, or at most 16,384 positions.
"""

import argparse
import pathlib

import matplotlib
import numpy as np
from matplotlib.figure import Figure

import pipeline
from benchmarks import packers, simulations
from benchmarks.lengths import sample

PATH = pathlib.Path(__file__).with_name("padding.svg")
TOKENS = 16_384
LONGEST = 512
GRAIN_EXAMPLES = 100_000


def simulate(lengths: np.ndarray) -> list[tuple[str, int, float]]:
    """Strategy, number of shapes and share of padding, from most padding to least."""
    order = np.random.default_rng(0).permutation(lengths)
    total = int(lengths.sum())
    simulated = {
        "every row padded to 512": simulations.pad_batches(
            order, rows=32, window=32, length=LONGEST
        ),
        "batches of 32, padded to the longest": simulations.pad_batches(order, rows=32, window=32),
        "windows of 320 sorted, batches of 32": simulations.pad_batches(order, rows=32, window=320),
        "read-ahead, token budget": packers.read_ahead(lengths, TOKENS)[0],
    }
    buckets = pipeline.fit_buckets(
        lengths, tokens_per_batch=TOKENS, max_buckets=4, max_length=LONGEST
    )
    plan = pipeline.Plan(lengths, buckets)
    rows = simulations.next_fit(order, LONGEST)[-1] + 1
    grain = packers.grain_fill(lengths[:GRAIN_EXAMPLES], LONGEST, packer="best fit", bins=32)
    return sorted(
        [
            *((name, s.shapes, s.padding) for name, s in simulated.items()),
            ("contiguous next fit", 1, 1 - total / (rows * LONGEST)),
            ("Grain best fit, 32 bins", 1, 1 - grain),
            ("Lockstep", len(buckets), plan.padding),
        ],
        key=lambda each: -each[2],
    )


def draw(bars: list[tuple[str, int, float]]) -> None:
    """Writes the chart as SVG, in colours that are readable on light and on dark backgrounds."""
    grey, accent = "#768390", "#1f9d7a"
    names, shapes, shares = zip(*bars, strict=True)
    colours = [accent if name.startswith("Lockstep") else grey for name in names]
    plurals = [f"{number} shape{'s' * (number > 1)}" for number in shapes]
    # Text stays text, and the same figures give the same file.
    parameters = {"svg.fonttype": "none", "svg.hashsalt": "lockstep", "font.size": 11}
    with matplotlib.rc_context(parameters):
        drawing = Figure(figsize=(9, 0.45 * len(bars)), layout="constrained")
        axes = drawing.subplots()
        drawn = axes.barh(names, shares, color=colours)
        texts = [f"{share:.1%}" if share >= 0.01 else f"{share:.2%}" for share in shares]
        labels = [f"{text}, {plural}" for text, plural in zip(texts, plurals, strict=True)]
        for label, colour in zip(axes.bar_label(drawn, labels, padding=6), colours, strict=True):
            label.set_color(colour)
        for label, colour in zip(axes.get_yticklabels(), colours, strict=True):
            label.set_color(colour)
        axes.invert_yaxis()
        axes.xaxis.set_visible(False)
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        metadata = {"Date": None, "Title": "Share of positions that are padding, per strategy"}
        drawing.savefig(PATH, transparent=True, metadata=metadata)


def main() -> None:
    """Simulates, prints and draws."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.padding", description=__doc__)
    parser.add_argument("--lengths", metavar="FILE", help="as for python -m benchmarks")
    bars = simulate(sample(parser.parse_args().lengths, longest=LONGEST))
    for name, shapes, share in bars:
        print(f"{name:<40}{shapes:>6} shapes{share:>9.2%}")
    draw(bars)


if __name__ == "__main__":
    main()
