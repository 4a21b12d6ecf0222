"""Recurrent layers on packed rows: examples/recurrent.py beside each document alone."""

import os
import re
import runpy
import sys

import jax
import numpy as np
import pytest
from flax import nnx

import pipeline
from pipeline import Bucket, Examples
from tests.processes import ROOT, call

LENGTH = 64


@pytest.fixture(scope="module")
def program():
    return runpy.run_path(ROOT / "examples/recurrent.py")


@pytest.fixture(scope="module")
def compute(program):
    return make(program)


def make(program):
    """A function of a batch: the logits, and the gradients of the sum of its losses."""
    graph, state = nnx.split(program["Model"](40, nnx.Rngs(0)))

    @jax.jit
    def compute(state, batch):
        model = nnx.merge(graph, state)
        return model(batch), nnx.grad(program["total_loss"])(model, batch)

    return lambda batch: jax.tree.map(np.asarray, compute(state, batch))


def measure(compute, align):
    """How far the logits of packed documents, and the gradients, are from those alone.

    Each is the largest norm of a difference over that of what is alone, of all documents, and of
    all parameters.
    """
    rng = np.random.default_rng(0)
    documents = [rng.integers(1, 40, size) for size in (20, 3, 150, 45, 9, 31, 2, 64)]
    ((planned, batch),) = pipeline.pack(
        Examples(documents), [Bucket(8, LENGTH)], overflow="split", align=align
    )
    assert np.bincount(planned.segments[:, 1])[2] == 3  # pieces, which have no state
    logits, gradients = compute(batch)
    packed, alone, column, last = [], [], 0, 0
    for row, example, start, size in planned.segments.tolist():
        column = column + -column % align if row == last else 0
        own = {name: np.zeros_like(each) for name, each in batch.items()}
        own["inputs"][0, :size] = documents[example][start : start + size]
        own["targets"][0, :size] = documents[example][start + 1 : start + size + 1]
        own["loss_weights"][0, :size] = own["inputs_segment_ids"][0, :size] = 1
        packed.append(logits[row, column : column + size])
        alone.append(compute(own))
        alone[-1] = alone[-1][0][0, :size], alone[-1][1]
        column, last = column + size, row
    expected, parts = zip(*alone, strict=True)
    total = jax.tree.map(lambda *each: sum(each), *parts)
    return [
        max(np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in zip(*each, strict=True))
        for each in ((packed, expected), (jax.tree.leaves(gradients), jax.tree.leaves(total)))
    ]


def test_each_document_of_a_row_has_the_logits_and_gradients_that_it_has_alone(program, compute):
    assert max(measure(compute, program["CHUNK"])) < 1e-5
    # If documents begin inside chunks, the state that enters a chunk is not all that leaks.
    assert min(measure(compute, align=1)) > 0.1


@pytest.mark.slow
def test_the_program_learns():
    own = {name: os.environ[name] for name in ("XLA_FLAGS", "NPROC")}
    done = call(sys.executable, ROOT / "examples/recurrent.py", "--steps=40", **own)
    assert done.returncode == 0, done.stderr[-3000:]
    losses = [float(each) for each in re.findall(r" loss (\S+)$", done.stdout, re.M)]
    assert len(losses) == 40
    assert np.mean(losses[-5:]) < 0.7 * losses[0]
