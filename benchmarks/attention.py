"""What attention costs on a CPU if it skips other segments: run `python -m benchmarks.attention`.

In about a minute: forward and backward at L = 4,096 on a packed row and on one long document, dense
against blocked, time and temporary memory; then how blocked grows with L. `accelerator.py` measures
GPUs and TPUs.

All figures of one table come from one run; times are the best of several, taken in turn.
"""

import time
from collections.abc import Callable
from functools import partial

import jax
import numpy as np

from models.attention import make_attention

REPEATS = 3


def main() -> None:
    """Print the tables."""
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}")
    attention_table([4096], ["dense", "blocked"], heads=8, dtype="float32")
    growth_table([2048, 4096, 8192, 16384], heads=8, dtype="float32")


def attention_table(lengths: list[int], names: list[str], *, heads: int, dtype: str) -> None:
    """Print time and temporary memory, forward and backward, of each implementation."""
    rng = np.random.default_rng(0)
    print(f"\nforward and backward, causal, {heads} heads of 64, {dtype}")
    print(f"{'L':>6}  {'row':<22}{'':<10}{'ms':>9}{'temp MiB':>10}  {'speed':>7}{'memory':>8}")
    for length in lengths:
        packed = packed_ids(length, rng, longest=256)[None]
        for row, ids in ("segments up to 256", packed), ("one document", np.ones_like(packed)):
            inputs = attention_inputs(ids, heads, dtype)
            steps = {name: compiled(name, inputs) for name in names}
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


def compiled(name: str, inputs: tuple) -> jax.stages.Compiled:
    """Return the compiled forward and backward pass."""

    def step(q, k, v, g, ids):
        out, pull_back = jax.vjp(make_attention(ids, implementation=name), q, k, v)
        return out, pull_back(g)

    return jax.jit(step).lower(*inputs).compile()


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


if __name__ == "__main__":
    main()
