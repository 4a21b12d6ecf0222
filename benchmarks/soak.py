"""Soak: many batches through a loader, in constant memory and with constant threads and files.

python -m benchmarks soak --batches 100000
"""

import tempfile

from benchmarks.results import Line, Section
from tests.soak import soak


def measure(batches: int) -> Section:
    """Loads so many batches, of plans that change, and takes the state now and then."""
    with tempfile.TemporaryDirectory() as directory:
        first, last, seconds = soak(directory, batches)
    lines = [
        Line(f"{batches:,} batches", f"{seconds:,.0f} s", f"{batches / seconds:,.0f} a second"),
        Line(
            "resident memory",
            f"{last.memory / 2**20:,.1f} MiB",
            f"{first.memory / 2**20:,.1f} MiB after a tenth of them",
        ),
        Line("threads", f"{last.threads}", f"{first.threads} after a tenth"),
        Line("open files", f"{last.files}", f"{first.files} after a tenth"),
    ]
    return Section("soak", "Small batches of a small corpus.", lines)
