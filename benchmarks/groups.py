"""Groups: a step on rows that share prefixes, against separate rows, and packed without sharing.

The speed is predicted before it is measured: of the step on separate rows, attention takes a share
`s`, which falls with the pairs of queries and keys, and the rest falls with the columns, so the
step is `1 / (s / r_pairs + (1 − s) / r_tokens)` times as fast.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

import pipeline
from benchmarks.results import Section
from benchmarks.turns import best_seconds
from models.attention import make_attention
from models.config import TransformerConfig
from models.decoder import Decoder
from models.loss import cross_entropy

LAYERS, HEAD, VOCABULARY, ROUNDS = 2, 64, 1_024, 2


class Case(NamedTuple):
    """Some groups of one kind, and the lengths of rows for each way to lay them out."""

    name: str
    sizes: Any  # of a group: a number of tokens, or that and the sizes of what continues it
    count: int
    shared: int
    separate: int
    packed: int


CASES = (
    Case("8 answers of 512 to a prompt of 2,048", (2_048, [512] * 8), 1, 6_144, 2_560, 5_120),
    Case("16 pairs of 128 and 64 to a prompt of 256", (256, [128, 64]), 16, 2_048, 384, 2_048),
    Case("tree: 1,024, 2 × 512, 8 × 256", (1_024, [(512, [256] * 4)] * 2), 1, 4_096, 1_792, 3_584),
)  # fmt: skip


def measure(widths: list[int]) -> Section:
    """Measures steps of a decoder of each width on each case."""
    lines = []
    for width in widths:
        for case in CASES:
            lines += _compare(case, width)
    about = (
        f"Loss and gradients of a decoder of {LAYERS} layers, in float32 and with attention in "
        f"blocks, on one batch; the best of {ROUNDS} rounds. Memory is what a step allocates "
        "beside its arguments. Speeds are against separate rows."
    )
    columns = ("groups", "layout", "s of a step", "MiB", "columns", "speed", "predicted")
    return Section("groups", about, lines, columns)


def _compare(case: Case, width: int) -> list[tuple[str, ...]]:
    rng = np.random.default_rng(0)
    groups = [_draw(case.sizes, rng) for _ in range(case.count)]
    paths = pipeline.Examples([path for group in groups for path in _paths(group)])
    batches = {
        "separate rows": _batch(paths, case.separate, "none"),
        "packed": _batch(paths, case.packed, "best_fit"),
        "shared prefix": _batch(pipeline.Examples.from_groups(groups), case.shared, "best_fit"),
    }
    config = TransformerConfig(
        vocab_size=VOCABULARY, num_layers=LAYERS, width=width, num_heads=width // HEAD,
        num_kv_heads=width // HEAD, mlp_width=3 * width, attention="blocked",
    )  # fmt: skip
    graph, params = nnx.split(Decoder(config, rngs=nnx.Rngs(0)))

    def loss(params, batch):
        fields = ("inputs", "inputs_segment_ids", "inputs_positions", "visible_until")
        logits = nnx.merge(graph, params)(*(batch[name] for name in fields if name in batch))
        sums = cross_entropy(logits, batch["targets"], batch["loss_weights"])
        return sums.total / sums.weight

    step = jax.jit(jax.value_and_grad(loss))
    steps = {name: step.lower(params, batch).compile() for name, batch in batches.items()}
    values = [float(steps[name](params, batch)[0]) for name, batch in batches.items()]
    np.testing.assert_allclose(values, values[0], rtol=1e-4)  # they compute the same

    attend = _attention(batches["separate rows"], config)
    contenders = {
        name: lambda name=name: jax.block_until_ready(steps[name](params, batches[name]))
        for name in steps
    }
    seconds = best_seconds({**contenders, "attention": attend}, ROUNDS)
    share = LAYERS * seconds["attention"] / seconds["separate rows"]
    pairs = {name: _pairs(batch) for name, batch in batches.items()}
    lines = []
    for name, batch in batches.items():
        of_pairs = pairs["separate rows"] / pairs[name]
        of_tokens = batches["separate rows"]["inputs"].size / batch["inputs"].size
        memory = steps[name].memory_analysis().temp_size_in_bytes / 2**20
        lines.append(
            (
                f"{case.name}, width {width:,}",
                name,
                f"{seconds[name]:.2f}",
                f"{memory:,.0f}",
                f"{batch['inputs'].size:,}",
                f"{seconds['separate rows'] / seconds[name]:.2f}×",
                f"{1 / (share / of_pairs + (1 - share) / of_tokens):.2f}×",
            )
        )
    return lines


def _draw(sizes: Any, rng: np.random.Generator) -> Any:
    """A group of random tokens."""
    if isinstance(sizes, int):
        return rng.integers(1, VOCABULARY, sizes)
    first, others = sizes
    return _draw(first, rng), [_draw(each, rng) for each in others]


def _paths(group: Any) -> list[np.ndarray]:
    """The tokens from the prefix to the end of each continuation."""
    if not isinstance(group, tuple):
        return [group]
    return [np.append(group[0], path) for each in group[1] for path in _paths(each)]


def _batch(examples: pipeline.Examples, length: int, packing: Any) -> dict[str, np.ndarray]:
    """All examples, in as few rows of that length as they need."""
    rows = pipeline.Plan(examples, [pipeline.Bucket(1, length)], packing=packing).num_batches()
    plan = pipeline.Plan(examples, [pipeline.Bucket(rows, length)], packing=packing)
    return pipeline.Batches(examples, plan)[0]


def _pairs(batch: dict[str, np.ndarray]) -> int:
    """How many keys the queries of a batch see in all; padding sees itself."""
    return int(pipeline.attention_mask(batch).sum() - (batch["inputs_segment_ids"] == 0).sum())


def _attention(batch: dict[str, np.ndarray], config: TransformerConfig) -> Callable[[], Any]:
    """A call that runs the attention of one layer, forward and backward."""
    shape = (*batch["inputs"].shape, config.num_heads, HEAD)
    arrays = [jax.random.normal(key, shape) for key in jax.random.split(jax.random.key(0), 4)]

    def run(q, k, v, g, ids):
        out, pull_back = jax.vjp(make_attention(ids, implementation=config.attention), q, k, v)
        return out, pull_back(g)

    program = jax.jit(run).lower(*arrays, batch["inputs_segment_ids"]).compile()
    return lambda: jax.block_until_ready(program(*arrays, batch["inputs_segment_ids"]))
