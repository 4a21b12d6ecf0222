"""Speech: frames and letters, packed, beside batches that are sorted, or cut by a budget."""

import collections
import functools
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

from benchmarks.results import Section
from benchmarks.turns import best_seconds
from examples import speech
from pipeline import Batches, Bucket, Plan, fit_buckets
from pipeline.report.strategies import ROWS, WINDOW, pad_windows, read_ahead

UTTERANCES, TOKENS = 4_000, 4_096
MULTIPLE, COST = {"targets": 16, "frames": 64}, {"targets": 1.0, "frames": 0.5}


def measure() -> Section:
    """Times a step of each shape, in turns; an epoch is the sum over its batches."""
    corpus = speech.make_examples(UTTERANCES)
    rate = np.array([COST[name] for name in corpus.side_names])
    unit = np.array([MULTIPLE[name] for name in corpus.side_names])
    options: Any = {"cost": COST, "align": {"frames": 2}}
    fitted = fit_buckets(
        corpus, tokens_per_batch=TOKENS, max_buckets=2, length_multiple=MULTIPLE, **options
    )
    plan = Plan(corpus, fitted, **options)
    packed = plan.count(0, plan.num_batches()).batches
    ways = {"packed": {(b.rows, *b.lengths): number for b, number in packed.items()}}
    pieces = np.random.default_rng(0).permutation(corpus.lengths)
    costs = np.ceil(pieces * rate).astype(int)
    for name, (rows, lengths) in {
        f"sorted windows of {WINDOW}, {ROWS} a batch": pad_windows(pieces, ROWS, WINDOW),
        "budget, read-ahead": (lambda rows, cost: (rows, cost / rate))(*read_ahead(costs, TOKENS)),
    }.items():
        rounded = (-(-lengths // unit) * unit).astype(int)
        shapes = np.concatenate([-(-rows[:, None] // 8) * 8, rounded], axis=1)
        ways[name] = collections.Counter(map(tuple, shapes.tolist()))
    seconds = _time_steps(corpus, {shape for each in ways.values() for shape in each})
    tokens = corpus.lengths.sum(axis=0, dtype=np.int64)
    epochs = {
        name: sum(number * seconds[shape] for shape, number in each.items())
        for name, each in ways.items()
    }
    lines = []
    for name, each in ways.items():
        room = sum(number * shape[0] * np.array(shape[1:]) for shape, number in each.items())
        share = [f"{1 - n / m:.1%}" for n, m in zip(tokens, room, strict=True)]
        ratio = epochs["packed"] / epochs[name]
        lines.append((name, f"{ratio:.2f}", *share, f"{sum(each.values())}", f"{len(each)}"))
    about = (
        f"{len(corpus):,} utterances in the steps of examples/speech.py, {TOKENS:,} positions a "
        f"batch, of which a frame is a half. Lengths of others are multiples of {unit[1]} frames "
        f"and {unit[0]} letters, and rows of 8, so that few shapes are compiled. Utterances a "
        "second over packed ones; padding by side."
    )
    columns = ("", "rate", *corpus.side_names, "batches", "shapes")
    return Section("speech", about, lines, columns)


def _time_steps(corpus: Any, shapes: set[Any]) -> dict[Any, float]:
    """Seconds of a step for each shape: rows, and the length of each side."""
    model = speech.Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(2e-3), wrt=nnx.Param)
    work = {}
    for rows, *lengths in sorted(shapes):
        bucket = Bucket(rows, dict(zip(corpus.side_names, lengths, strict=True)))
        plan = Plan(corpus, [bucket], overflow="drop", cost=COST, align={"frames": 2})
        batch = jax.device_put(dict(Batches(corpus, plan)[0]))
        step = functools.partial(speech.train_step, model, optimizer, batch)
        work[rows, *lengths] = functools.partial(lambda step: jax.block_until_ready(step()), step)
        work[rows, *lengths]()  # compiles
    return best_seconds(work)
