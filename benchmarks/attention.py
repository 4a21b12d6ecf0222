"""What attention costs when it skips other segments: run `python -m benchmarks.attention`.

On CPU (about a minute): forward and backward at L = 4,096 on a packed row and on one long document,
dense against blocked, time and temporary memory; then how blocked grows with L.

On a GPU (planned for under ten minutes): the same against `jax.nn.dot_product_attention` with XLA
and with cuDNN, causal bfloat16, L = 2,048 … 16,384; then the training step of a 125M and a 350M
decoder on lengths like WikiText's: padded to the longest, and packed with each attention.

All figures of one table come from one run; times are the best of several, taken in turn.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from models.attention import make_attention
from models.config import TransformerConfig
from models.decoder import Decoder
from models.flops import step_flops
from models.loss import cross_entropy
from models.parameters import decay_mask
from pipeline import Bucket, Plan
from trainer.stats import peak_of

REPEATS = 3


def main() -> None:
    """Print the tables that this machine's platform calls for."""
    device = jax.devices()[0]
    print(f"{device.device_kind}, jax {jax.__version__}")
    if device.platform == "cpu":
        attention_table([4096], ["dense", "blocked"], heads=8, dtype="float32")
        growth_table([2048, 4096, 8192, 16384], heads=8, dtype="float32")
    else:
        attention_table(
            [2048, 4096, 8192, 16384],
            ["XLA", "cuDNN", "blocked"],
            heads=16,
            dtype="bfloat16",
        )
        training_table(device.device_kind)


def attention_table(lengths: list[int], names: list[str], *, heads: int, dtype: str) -> None:
    """Print time and temporary memory, forward and backward, of each implementation."""
    rng = np.random.default_rng(0)
    print(f"\nforward and backward, causal, {heads} heads of 64, {dtype}")
    print(f"{'L':>6}  {'row':<22}{'':<10}{'ms':>9}{'temp MiB':>10}  {'speed':>7}{'memory':>8}")
    for length in lengths:
        rows = max(1, 16384 // length) if jax.default_backend() != "cpu" else 1
        packed = np.stack([packed_ids(length, rng, longest=256) for _ in range(rows)])
        for row, ids in ("segments up to 256", packed), ("one document", np.ones_like(packed)):
            inputs = attention_inputs(ids, heads, dtype)
            steps = {name: step for name in names if (step := compiled(name, inputs)) is not None}
            times = best_times({name: partial(step, *inputs) for name, step in steps.items()})
            base_time, base_memory = times[names[0]], temporary_mib(steps[names[0]])
            for name, step in steps.items():
                memory = temporary_mib(step)
                print(
                    f"{length:>6}  {row:<22}{name:<10}{times[name] * 1e3:>9.1f}{memory:>10.1f}"
                    f"  {base_time / times[name]:>6.1f}×{base_memory / max(memory, 1e-3):>7.0f}×"
                )


def growth_table(lengths: list[int], *, heads: int, dtype: str) -> None:
    """Print how the time of blocked attention grows with the row at a fixed segment length."""
    print("\nblocked, segments up to 256: time per position should not depend on L")
    for length in lengths:
        ids = packed_ids(length, np.random.default_rng(1), longest=256)[None]
        inputs = attention_inputs(ids, heads, dtype)
        step = compiled("blocked", inputs)
        assert step is not None
        seconds = best_times({"blocked": partial(step, *inputs)})["blocked"]
        print(
            f"{length:>6}  {seconds * 1e3:>8.1f} ms  {seconds / length * 1e6:>6.2f} µs/position  "
            f"{temporary_mib(step):>7.1f} MiB"
        )


def packed_ids(length: int, rng: np.random.Generator, *, longest: int) -> np.ndarray:
    """Return int32 [length]: a full row of segments of 8 to `longest` positions."""
    sizes = rng.integers(8, longest + 1, length // 8)
    return np.repeat(np.arange(1, len(sizes) + 1), sizes)[:length].astype(np.int32)


def attention_inputs(ids: np.ndarray, heads: int, dtype: str) -> tuple[jax.Array, ...]:
    """Return queries, keys, values, a cotangent, all [B, L, heads, 64], and the segment ids."""
    keys = jax.random.split(jax.random.key(0), 4)
    return *(jax.random.normal(key, (*ids.shape, heads, 64), dtype) for key in keys), ids


def compiled(name: str, inputs: tuple) -> jax.stages.Compiled | None:
    """Return the compiled forward and backward pass, or None where it cannot run here."""

    def attend(q, k, v, ids):
        if name in ("XLA", "cuDNN"):  # the mask is what keeps them inside segments
            mask = (ids[:, None, :, None] == ids[:, None, None, :]) & (ids > 0)[:, None, None]
            return jax.nn.dot_product_attention(
                q, k, v, mask=mask, is_causal=True, implementation=name.lower()
            )
        return make_attention(ids, implementation=name)(q, k, v)

    def step(q, k, v, g, ids):
        out, pull_back = jax.vjp(lambda q, k, v: attend(q, k, v, ids), q, k, v)
        return out, pull_back(g)

    try:
        program = jax.jit(step).lower(*inputs).compile()
        jax.block_until_ready(program(*inputs))
    except Exception as error:  # out of memory, or no such kernel: the others still count
        print(f"{name} did not run: {str(error).splitlines()[0][:90]}")
        return None
    return program


def best_times(calls: dict[str, Callable]) -> dict[str, float]:
    """Return the best seconds of each, in REPEATS turns, so that all share a machine's moods."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(REPEATS):
        for name, call in calls.items():
            for _ in range(2):  # the second without the other's memory in the way
                start = time.perf_counter()
                jax.block_until_ready(call())
                seconds[name].append(time.perf_counter() - start)
    return {name: min(values) for name, values in seconds.items()}


def temporary_mib(step: jax.stages.Compiled) -> float:
    """Return what the compiled step allocates besides its arguments and outputs."""
    return step.memory_analysis().temp_size_in_bytes / 2**20


def training_table(kind: str, *, sizes: dict[str, dict] | None = None, length: int = 2048) -> None:
    """Print real tokens per second and model FLOP utilisation of a decoder's training step."""
    sizes = sizes or {
        "125M": {"num_layers": 12, "width": 768, "num_heads": 12, "mlp_width": 2048},
        "350M": {"num_layers": 24, "width": 1024, "num_heads": 16, "mlp_width": 2816},
    }
    peak = peak_of(kind)
    print(f"\ntraining step, WikiText-like lengths (mean ≈ 103, at most 512), rows of {length}")
    print(f"{'model':<8}{'batches':<28}{'tokens/s':>12}{'TFLOP/s':>10}{'MFU':>8}")
    for name, size in sizes.items():
        for batches, attention, packed in (
            ("padded to the longest", "auto", False),
            ("packed, dense", "dense", True),
            ("packed, segments skipped", "blocked", True),
            ("packed, as auto chooses", "auto", True),
        ):
            config = TransformerConfig(
                vocab_size=32768, num_kv_heads=size["num_heads"], dtype="bfloat16",
                attention=attention, remat=True, scan_layers=True, **size,
            )  # fmt: skip
            tokens, flops = training_speed(config, batch_stream(length, packed))
            used = f"{flops / peak:>7.1%}" if peak else "      –"
            print(f"{name:<8}{batches:<28}{tokens:>12,.0f}{flops / 1e12:>10.1f} {used}")


def batch_stream(length: int, packed: bool) -> Iterator[np.ndarray]:
    """Yield segment ids [rows, row length] of 16 × `length` positions of lognormal documents."""
    lengths = np.random.default_rng(2).lognormal(4.2, 0.95, 1 << 16).clip(2, 512).astype(int)
    bucket = Bucket(16, length) if packed else Bucket(16 * length // 512, 512)
    plan = Plan(lengths, [bucket], packing="best_fit" if packed else "none")
    for number in itertools.count():
        ids = np.zeros(bucket.shape, np.int32)
        rows = itertools.groupby(plan.batch(number).segments, key=lambda segment: segment[0])
        for row, segments in rows:
            sizes = [size for *_, size in segments]
            ids[row, : sum(sizes)] = np.repeat(np.arange(1, len(sizes) + 1), sizes)
        yield ids


def training_speed(config: TransformerConfig, batches: Iterator[np.ndarray]) -> tuple[float, float]:
    """Return real tokens per second, and the model's FLOPs for those per second."""
    graph, state = nnx.split(Decoder(config, rngs=nnx.Rngs(0)))
    optimizer = optax.adamw(1e-4, mask=decay_mask)

    def loss(state, ids):
        model = nnx.merge(graph, state)
        tokens = (ids * 7919) % config.vocab_size
        logits = model(tokens, ids, jnp.arange(ids.shape[1]) + 0 * ids)
        sums = cross_entropy(logits, tokens, ids > 0)
        return sums.total / sums.weight

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(state, moments, ids):
        value, gradient = jax.value_and_grad(loss)(state, ids)
        updates, moments = optimizer.update(gradient, moments, state)
        return optax.apply_updates(state, updates), moments, value

    moments = optimizer.init(state)
    speeds = []
    for index, ids in zip(range(REPEATS + 4), batches, strict=False):
        start = time.perf_counter()
        state, moments, value = step(state, moments, ids)
        jax.block_until_ready(value)
        seconds = time.perf_counter() - start
        tokens = np.count_nonzero(ids)
        lengths = np.concatenate([np.bincount(row)[1:] for row in ids])
        flops = step_flops(config, lengths[:, None])
        if index >= 2:  # the first compiles, the second warms up
            speeds.append((tokens / seconds, flops / seconds))
    return tuple(statistics.median(column) for column in zip(*speeds, strict=True))


if __name__ == "__main__":
    main()
