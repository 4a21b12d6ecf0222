"""Messages along the edges of packed graphs, in Flax NNX: the energy of random graphs is learnt.

python examples/graphs.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import pipeline
from pipeline import Feature, follow

WIDTH, STEPS = 64, 200


def make_examples(count):
    """Graphs of 4 to 24 nodes; their energy is the sum of the absolute eigenvalues."""
    rng = np.random.default_rng(0)
    names = "degree", "graph", "sender", "receiver", "energy"
    columns: dict[str, list] = {name: [] for name in names}
    for nodes in rng.integers(4, 25, count):
        upper = np.triu(rng.random((nodes, nodes)) < 3 / nodes, 1)
        adjacent = upper | upper.T
        energy = [np.abs(np.linalg.eigvalsh(adjacent)).sum()]
        values = adjacent.sum(axis=1), [0] * nodes, *np.nonzero(adjacent), energy
        for name, value in zip(names, values, strict=True):
            columns[name].append(value)
    # Lockstep: three sides, each packed; pointers become columns of the row, and -1 on padding.
    features = {"degree": Feature("nodes"), "graph": Feature("nodes", to="graphs")}
    features |= {name: Feature("edges", to="nodes") for name in ("sender", "receiver")}
    features["energy"] = Feature("graphs", dtype="float32")
    return pipeline.Examples(columns, features=features, loss="graphs")


def add_up(values, pointer, length):
    """The sums of the values that point to each of `length` columns; -1 points to none."""
    to = jnp.where(pointer < 0, length, pointer)  # outside
    return jax.vmap(lambda v, p: jnp.zeros((length, v.shape[1])).at[p].add(v))(values, to)


class Model(nnx.Module):
    """Energies of graphs: `[rows, graphs]`."""

    def __init__(self, rngs):
        self.degrees = nnx.Embed(32, WIDTH, rngs=rngs)
        self.rounds = nnx.List([nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs) for _ in range(3)])
        self.head = nnx.Linear(WIDTH, 1, rngs=rngs)

    def __call__(self, batch):
        x = self.degrees(batch["degree"])
        for linear in self.rounds:
            messages = add_up(follow(x, batch["sender"]), batch["receiver"], x.shape[1])
            x += nnx.gelu(linear(jnp.concatenate([x, messages], axis=2)))
        return add_up(self.head(x), batch["graph"], batch["energy"].shape[1])[:, :, 0]


def loss_sum(model, batch):
    """The sum of squared errors; padding has weight 0."""
    return (batch["loss_weights"] * (model(batch) - batch["energy"]) ** 2).sum()


@nnx.jit
def train_step(model, optimizer, batch):
    """Updates model and optimizer in place; returns the mean loss of the batch."""
    weight = batch["loss_weights"].sum().clip(1)
    loss, gradients = nnx.value_and_grad(lambda model: loss_sum(model, batch) / weight)(model)
    optimizer.update(model, gradients)
    return loss


if __name__ == "__main__":
    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)
    # Lockstep: rows of one static shape, with almost no padding on any side; graphs cost nothing.
    graphs, cost = make_examples(2_000), {"nodes": 1.0, "edges": 1.0, "graphs": 0.0}
    with pipeline.load(graphs, tokens_per_batch=4096, max_buckets=1, cost=cost) as loader:
        for step, batch in zip(range(STEPS), loader, strict=False):
            print("step", step, "loss", float(train_step(model, optimizer, batch)))
