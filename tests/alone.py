"""Packed examples, beside each of them alone."""

import jax
import numpy as np

from pipeline import Batches, Bucket, Plan


def require_same_alone(compute, examples, lengths, rows, align=1, error=1e-6):
    """Packed examples have the results and gradients that they have alone, up to an error.

    It is relative to the norm of what is alone.

    `compute` takes a batch. It gives the results of the side that carries the loss, and the
    gradients of the sum of losses. A batch of `rows` rows of these lengths holds all examples.
    """
    plan = Plan(examples, [Bucket(rows, lengths)], align=align, shuffle=False)
    (batch,) = Batches(examples, plan)
    planned, side = plan.batch(0), examples.side_names.index(examples.loss)
    assert len(planned.segments) == len(examples) > rows
    # NumPy does the rest, whose operations JAX would compile one by one.
    results, gradient = jax.device_get(compute(batch))
    total = jax.tree.map(np.zeros_like, gradient)
    columns = planned.columns.reshape(len(planned.segments), -1)
    for segment, column in zip(planned.segments, columns, strict=True):
        row, example, size = segment[0], segment[1], segment[3 + side]
        others = [number for number in range(len(examples)) if number != example]
        single = Plan(examples, [Bucket(1, lengths)], align=align, exclude=others)
        expected, more = jax.device_get(compute(Batches(examples, single)[0]))
        found = results[row, column[side] : column[side] + size]
        off = np.linalg.norm(found - expected[0, :size])
        assert off < error * np.linalg.norm(expected[0, :size])
        total = jax.tree.map(np.add, total, more)
    off = norm(jax.tree.map(np.subtract, gradient, total))
    assert off < error * norm(total)


def norm(tree):
    return np.sqrt(sum(np.square(leaf).sum() for leaf in jax.tree.leaves(tree)))
