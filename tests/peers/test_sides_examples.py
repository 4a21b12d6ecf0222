"""Examples in NNX learn, and compute packed what they compute alone."""

import functools
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

ROWS = {
    "speech": ({"targets": 48, "frames": 512}, {"frames": 2}),
    "graphs": ({"nodes": 64, "edges": 192, "graphs": 6}, {}),
    "images": ({"patches": 160, "images": 6}, {}),
}
STEP = re.compile(r"^step \d+ .*loss (\S+)$", re.M)


def examples_of(name, program, folder):
    if name != "images":
        return program["make_examples"](8)
    program["draw_pictures"](folder, 8)
    return program["make_corpus"](folder)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name == "speech")) for name in ROWS]
)
def test_packed_examples_have_the_results_and_gradients_that_they_have_alone(name, tmp_path):
    program = runpy.run_path(ROOT / f"examples/{name}.py")
    examples = examples_of(name, program, tmp_path)
    lengths, align = ROWS[name]
    graph, state = nnx.split(program["Model"](nnx.Rngs(0)))

    @jax.jit
    def compute(state, batch):
        model = nnx.merge(graph, state)

        def loss(state):
            return program["loss_sum"](nnx.merge(graph, state), batch)

        return model(batch), jax.grad(loss)(state)

    require_same_alone(lambda batch: compute(state, batch), examples, lengths, 4, align)


def test_documents_of_recurrent_rows_have_the_logits_and_gradients_that_they_have_alone():
    program, rng = runpy.run_path(ROOT / "examples/recurrent.py"), np.random.default_rng(0)
    graph, state = nnx.split(program["Model"](40, nnx.Rngs(0)))

    @jax.jit
    def compute(state, batch):
        model = nnx.merge(graph, state)
        return model(batch), nnx.grad(program["total_loss"])(model, batch)

    documents = Examples([rng.integers(1, 40, size) for size in (20, 3, 45, 9, 31, 2, 64)])
    of_batch = functools.partial(compute, state)
    check = functools.partial(require_same_alone, of_batch, documents, 64, 4, error=1e-5)
    check(align=program["CHUNK"])
    # If documents begin inside chunks, the state that enters a chunk is not all that leaks.
    with pytest.raises(AssertionError):
        check(align=1, error=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("speech", ("--utterances=60", "--steps=12", "--tokens-per-batch=1024")),
        ("graphs", ()),
        ("recurrent", ("--steps=40",)),
        ("images", ("--folder=pictures", "--pictures=60", "--steps=12", "--tokens-per-batch=512")),
    ],
)
def test_an_example_learns(name, options, tmp_path):
    done = call(sys.executable, ROOT / f"examples/{name}.py", *options, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    losses = [float(each) for each in STEP.findall(done.stdout)]
    assert np.mean(losses[-4:]) < 0.95 * losses[0]
