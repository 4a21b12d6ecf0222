"""Recurrent layers on packed rows: examples/recurrent.py beside each document alone."""

import functools
import os
import re
import runpy
import sys

import jax
import numpy as np
import pytest
from flax import nnx

from pipeline import Examples
from tests.alone import require_same_alone
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


def test_each_document_of_a_row_has_the_logits_and_gradients_that_it_has_alone(program, compute):
    rng = np.random.default_rng(0)
    documents = Examples([rng.integers(1, 40, size) for size in (20, 3, 45, 9, 31, 2, 64)])
    check = functools.partial(require_same_alone, compute, documents, LENGTH, 4, error=1e-5)
    check(align=program["CHUNK"])
    # If documents begin inside chunks, the state that enters a chunk is not all that leaks.
    with pytest.raises(AssertionError):
        check(align=1, error=0.1)


@pytest.mark.slow
def test_the_program_learns():
    own = {name: os.environ[name] for name in ("XLA_FLAGS", "NPROC")}
    done = call(sys.executable, ROOT / "examples/recurrent.py", "--steps=40", **own)
    assert done.returncode == 0, done.stderr[-3000:]
    losses = [float(each) for each in re.findall(r" loss (\S+)$", done.stdout, re.M)]
    assert len(losses) == 40
    assert np.mean(losses[-5:]) < 0.7 * losses[0]
