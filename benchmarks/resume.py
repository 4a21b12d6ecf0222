"""Resume: the time to the first batch after a restore, and the size of the state."""

import functools
import json
import tempfile
import time

import numpy as np

import pipeline
from benchmarks import packers
from benchmarks.lengths import examples_of
from benchmarks.results import Line, Section

EXAMPLES = 200_000
STEPS = (10, 10_000, 10_000_000)
BINS = (32, 128, 512, 2048)
ROUNDS = 5


def measure(lengths: np.ndarray) -> Section:
    """Restores Lockstep at three steps, and Grain's packer with growing numbers of bins."""
    lengths = lengths[:EXAMPLES]
    longest = int(lengths.max())
    examples = examples_of(lengths)
    lines = []
    with tempfile.TemporaryDirectory() as directory:
        corpus = pipeline.Corpus.from_arrays(examples, directory)
        buckets = pipeline.fit_buckets(corpus, tokens_per_batch=32_768, max_buckets=4)

        def begin():
            batches = pipeline.Batches(corpus, pipeline.Plan(corpus, buckets)).repeat()
            return iter(batches.to_iter_dataset())

        begin().__next__()  # maps the corpus
        start = begin().get_state()
        ours = [_restore(begin, start | {"step": step}) for step in STEPS]
    for step, (seconds, size) in zip(STEPS, ours, strict=True):
        compared = f"{seconds / ours[0][0]:.2f}× the time at step {STEPS[0]}, state {size} bytes"
        lines.append(Line(f"Lockstep, step {step:,}", f"{seconds * 1e3:.1f} ms", compared))
    for bins in BINS:
        pack = functools.partial(packers.grain_packed, examples, longest, bins=bins)
        rows = iter(pack())
        for _ in range(STEPS[0]):
            next(rows)
        seconds, size = _restore(lambda pack=pack: iter(pack()), rows.get_state())
        compared = f"{seconds / ours[0][0]:.1f}× Lockstep's, state {size} bytes"
        lines.append(
            Line(
                f"Grain best fit, {bins:,} bins, row {STEPS[0]}",
                f"{seconds * 1e3:.1f} ms",
                compared,
            )
        )
    return Section(
        "resume",
        f"{len(lengths):,} examples. Lockstep: the time to plan, to restore, and to build the "
        "first batch. Grain: the time to restore and to pack the first row.",
        lines,
    )


def _restore(begin, state) -> tuple[float, int]:
    """The best seconds to the first element after `state` is restored, and the state's bytes."""
    text = json.dumps(state)
    seconds = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        elements = begin()
        elements.set_state(json.loads(text))
        next(elements)
        seconds.append(time.perf_counter() - start)
    return min(seconds), len(text)
