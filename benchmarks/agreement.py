"""Agreement: the simulations beside Grain and infinibatch, which must be within 2%."""

import numpy as np

from benchmarks import packers, simulations
from benchmarks.results import Line, Section

TOKENS = 16_384
OPEN_ROWS = 64
READ_AHEAD = 10_000
TOLERANCE = 0.02

# Grain moves tokens to find out where they go, so it gets a sample of the examples.
GRAIN_EXAMPLES = 20_000


def measure(lengths: np.ndarray) -> Section:
    """Compares the positions that each simulation and its library need for the same examples.

    Raises:
        AssertionError: they differ by more than 2%.
    """
    longest = int(lengths.max())
    some = lengths[:GRAIN_EXAMPLES]
    lines = []
    for name, pack in (("first fit", simulations.first_fit), ("best fit", simulations.best_fit)):
        positions = longest * pack(some, length=longest, open_rows=OPEN_ROWS)
        fill = packers.grain_fill(some, longest, packer=name, bins=OPEN_ROWS)
        lines.append(_compare(f"Grain, {name}", positions, int(some.sum() / fill)))
    ahead, made_by = packers.read_ahead(lengths, TOKENS, READ_AHEAD)
    if made_by == "infinibatch":
        simulation = simulations.token_budget(lengths, budget=TOKENS, window=READ_AHEAD)
        lines.append(_compare("infinibatch, token budget", simulation.positions, ahead.positions))
    else:
        lines.append(Line("infinibatch, token budget", "–", "not installed"))
    return Section(
        "agreement",
        f"Positions that the simulations need, beside those of the libraries, which read "
        f"the examples in another random order; {len(some):,} examples for Grain, "
        f"{len(lengths):,} for infinibatch.",
        lines,
    )


def _compare(name: str, simulated: int, real: int) -> Line:
    difference = simulated / real - 1
    assert abs(difference) <= TOLERANCE, f"{name}: {simulated:,} positions, really {real:,}"
    return Line(name, f"{simulated:,}", f"{difference:+.2%} of {real:,} by the library")
