"""Attention, training and tiers on one accelerator: run `python -m benchmarks.accelerator`.

It is planned for ten minutes on a GPU, and stops after `--seconds`. Every part is written to the
results as it ends, so that a run that is cut off keeps what it had:

1. equality: each implementation of attention against the dense one, forward and backward. The run
   ends at the first that is wrong.
2. attention: ms of forward and backward, for rows of several lengths and documents.
3. training: real tokens per second of decoders, padded and packed, with each implementation.
4. tiers: the time of steps whose devices have one row each, from the time of each row.

`--setting=tiny` runs all of it in a minute on a CPU, with figures that say nothing.
"""

import argparse
import dataclasses
import itertools
import pathlib
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from benchmarks import results
from benchmarks.attention import best_times, packed_ids, temporary_mib
from benchmarks.results import Line, Section
from models.attention import LONGEST_CUDNN, make_attention
from models.config import TransformerConfig
from models.decoder import Decoder
from models.flops import step_flops
from models.loss import chunked_cross_entropy
from models.nvidia import SKIPPING, find_flaw
from models.parameters import decay_mask
from pipeline import Bucket, Plan
from pipeline.loading.collate import find_offsets
from pipeline.planning.planned import PlannedBatch
from trainer.stats import peak_of

STEPS = 8  # of training, of which the first two do not count
WRONG = {"float32": 1e-4, "bfloat16": 0.03}  # errors over the largest number


@dataclasses.dataclass(frozen=True)
class Setting:
    """The sizes of all parts."""

    dtype: str
    heads: int
    width: int  # of a head
    positions: int  # of all rows of a batch together
    lengths: tuple[int, ...]  # of rows
    models: dict[str, dict[str, int]]
    row: int  # length of rows in training
    tiers_row: int  # length of rows of the long-tailed corpus
    devices: int  # rows of its batches, one on each
    tiers: int


SETTINGS = {
    "full": Setting(
        dtype="bfloat16",
        heads=16,
        width=64,
        positions=65_536,
        lengths=(16_384, 2048, 8192, 65_536),  # first what is asked for most
        models={
            "125M": {"num_layers": 12, "width": 768, "num_heads": 12, "mlp_width": 2048},
            "350M": {"num_layers": 24, "width": 1024, "num_heads": 16, "mlp_width": 2816},
        },
        row=2048,
        tiers_row=32_768,
        devices=32,
        tiers=16,
    ),
    "tiny": Setting(
        dtype="float32",
        heads=2,
        width=16,
        positions=512,
        lengths=(256, 512),
        models={"tiny": {"num_layers": 1, "width": 32, "num_heads": 2, "mlp_width": 32}},
        row=64,
        tiers_row=256,
        devices=4,
        tiers=2,
    ),
}


def main(arguments: list[str] | None = None) -> None:
    """Run the parts that the command line names, as far as time allows."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.accelerator",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}, all by default")
    parser.add_argument("--setting", choices=SETTINGS, default="full")
    parser.add_argument("--seconds", type=float, default=600, help="for all parts together (600)")
    parser.add_argument("--results", type=pathlib.Path, default=results.PATH)
    given = parser.parse_args(arguments)
    if strange := {*given.parts} - {*PARTS}:
        parser.error(f"no part {', '.join(strange)}; there are {', '.join(PARTS)}")
    device, begin = jax.devices()[0], time.perf_counter()
    about = (
        f"What `python -m benchmarks.accelerator --setting={given.setting}` measured on "
        f"{device.device_kind}, jax {jax.__version__}. Padding is not counted as tokens."
    )
    sections: list[Section] = []
    for part in given.parts or PARTS:
        lines: list[Line] = []
        section = Section(f"accelerator: {part}, {device.device_kind}", about, lines)
        sections.append(section)
        try:
            for line in PARTS[part](SETTINGS[given.setting]):
                lines.append(line)
                print(
                    f"{time.perf_counter() - begin:6.1f} s  {part}: {'  '.join(line)}", flush=True
                )
                results.write(sections, given.results)
                if time.perf_counter() - begin > given.seconds:
                    parser.exit(3, f"the {given.seconds:.0f} s are over; the rest is left out\n")
        except Wrong as error:
            lines.append(Line("wrong", f"{error}"))
            results.write(sections, given.results)
            parser.exit(1, f"{error}; nothing is measured, since its figures would not count\n")


class Wrong(Exception):
    """An implementation whose results are not those of dense attention."""


def implementations() -> dict[str, str]:
    """Each implementation for this platform, and why it cannot be used; "" if it can."""
    platform = jax.default_backend()
    if platform == "gpu":
        return {"cudnn": "", "blocked": "", **{name: find_flaw(name) for name in SKIPPING}}
    return {"splash": "", "blocked": ""} if platform == "tpu" else {"blocked": ""}


# ---- Equality.


def equality(setting: Setting) -> Iterator[Line]:
    """The largest errors of each implementation, forward and backward."""
    length = min(512, min(setting.lengths))
    rng = np.random.default_rng(0)
    packed = np.stack([packed_ids(length, rng, longest=length // 4) for _ in range(4)])
    padded = np.where(np.arange(length) < length * 3 // 4, packed, 0)
    padded[-1] = 0
    cases: dict[str, tuple[np.ndarray, dict[str, Any], int]] = {
        "packed": (packed, {}, setting.heads),
        "padding": (padded, {}, setting.heads),
        "both ways": (packed, {"causal": False}, setting.heads),
        "a window": (packed, {"window": 20}, setting.heads),
        "shared key heads": (padded, {}, setting.heads // 2),
    }
    for name, flaw in implementations().items():
        if flaw:
            yield Line(name, "not used", flaw)
            continue
        for case, (ids, options, kv_heads) in cases.items():
            inputs = attention_inputs(ids, setting, kv_heads)
            exact = [x.astype(jnp.float32) for x in inputs[:4]], *inputs[4:]
            expected = forward_backward("dense", **options)(*exact[0], *exact[1:])
            found = forward_backward(name, **options)(*inputs)
            errors = [
                float(np.abs(np.float32(a) - np.float32(b)).max() / np.abs(np.float32(b)).max())
                for a, b in zip(found, expected, strict=True)
            ]
            worst = max(errors) if np.isfinite(errors).all() else float("inf")
            if not worst < WRONG[setting.dtype]:
                raise Wrong(f"{name} is wrong for {case}: an error of {worst:.2g}")
            yield Line(f"{name}, {case}", f"{worst:.1e}", "largest error over the largest number")


# ---- Attention.


def attention(setting: Setting) -> Iterator[Line]:
    """Milliseconds and temporary memory, forward and backward, of each implementation."""
    usable = [name for name, flaw in implementations().items() if not flaw]
    for length in setting.lengths:
        compiled: dict[Any, Any] = {}  # by name and shapes, so for all kinds of documents
        for documents, ids in rows_of(length, max(1, setting.positions // length)).items():
            *arrays, offsets = attention_inputs(ids, setting, setting.heads)
            programs = {}
            for name in usable:
                if name == "cudnn" and length > LONGEST_CUDNN:
                    continue
                # The others take any offsets.
                inputs = *arrays, offsets if name == "cudnn_packed" else offsets[:, :2]
                try:
                    key = name, inputs[-1].shape
                    if key not in compiled:
                        compiled[key] = forward_backward(name).lower(*inputs).compile()
                    programs[name] = partial(compiled[key], *inputs)
                    jax.block_until_ready(programs[name]())
                except Exception as error:  # out of memory, or no such kernel: the others count
                    programs.pop(name, None)
                    said = str(error).splitlines()[0][:80]
                    yield Line(f"{length:,}, {documents}, {name}", "did not run", said)
            times = best_times(programs)
            first = next(iter(times.values()), 0.0)
            for name, seconds in times.items():
                memory = temporary_mib(programs[name].func)
                yield Line(
                    f"{length:,}, {documents}, {name}",
                    f"{seconds * 1e3:.2f} ms",
                    f"{first / seconds:.2f}× the first, {memory:,.0f} MiB",
                )


def rows_of(length: int, rows: int) -> dict[str, np.ndarray]:
    """Segment ids [rows, length] for each kind of documents."""
    rng = np.random.default_rng(0)
    short = np.stack([packed_ids(length, rng, longest=256) for _ in range(rows)])
    sizes = rng.lognormal(6, 1.3, (rows, length // 2)).clip(2, length).astype(int)
    lognormal = [np.repeat(np.arange(1, length // 2 + 1), each)[:length] for each in sizes]
    return {
        "segments up to 256": short,
        "lognormal": np.stack(lognormal).astype(np.int32),
        "one document": np.ones((rows, length), np.int32),
    }


def attention_inputs(ids: np.ndarray, setting: Setting, kv_heads: int) -> tuple[jax.Array, ...]:
    """Queries, keys, values, a cotangent, the segment ids and their offsets."""
    keys = jax.random.split(jax.random.key(0), 4)
    heads = setting.heads, kv_heads, kv_heads, setting.heads
    arrays = [
        jax.random.normal(key, (*ids.shape, number, setting.width), setting.dtype)
        for key, number in zip(keys, heads, strict=True)
    ]
    return *arrays, jnp.asarray(ids), jnp.asarray(offsets_of(ids))


def offsets_of(ids: np.ndarray) -> np.ndarray:
    """Where the segments 1, 2, … of rows begin, and the end: int32 [rows, most + 1]."""
    numbers = np.arange(1, ids.max(initial=1) + 2)
    places = np.where(ids == 0, ids.max() + 1, ids)
    return np.stack([np.searchsorted(row, numbers) for row in places]).astype(np.int32)


def forward_backward(name: str, **options: Any) -> Any:
    """A jitted function of `attention_inputs`: the outputs and three gradients."""

    def step(q: Any, k: Any, v: Any, g: Any, ids: Any, offsets: Any) -> Any:
        attend = make_attention(ids, segment_offsets=offsets, implementation=name, **options)
        out, pull_back = jax.vjp(attend, q, k, v)
        return out, *pull_back(g)

    return jax.jit(step)


# ---- Training.


def training(setting: Setting) -> Iterator[Line]:
    """Real tokens per second of training steps, and the share of the device's FLOP/s."""
    peak = peak_of(jax.devices()[0].device_kind)
    usable = {name: flaw for name, flaw in implementations().items() if not flaw}
    kinds = [("padded to the longest", next(iter(usable)), "none")]
    kinds += [(f"packed, {name}", name, "best_fit") for name in usable]
    for model, sizes in setting.models.items():
        base = 0.0
        for label, name, packing in kinds:
            config = TransformerConfig(
                vocab_size=32_768 if setting.row > 64 else 64,
                num_kv_heads=sizes["num_heads"],
                dtype=setting.dtype,
                attention=name,
                remat=True,
                scan_layers=True,
                **sizes,
            )
            tokens, flops = training_speed(config, batch_stream(setting.row, packing))
            base = base or tokens
            used = f", {flops / peak:.1%} of its FLOP/s" if peak else ""
            figure = f"{tokens:,.0f} tokens/s"
            yield Line(f"{model}, {label}", figure, f"{tokens / base:.2f}× padded{used}")


def batch_stream(length: int, packing: Any) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Segment ids and offsets of 16 × `length` positions of documents like WikiText's lines."""
    longest = length // 4
    lengths = np.random.default_rng(2).lognormal(4.2, 0.95, 1 << 14).clip(2, longest).astype(int)
    bucket = Bucket(16, length) if packing != "none" else Bucket(16 * length // longest, longest)
    plan = Plan(lengths, [bucket], packing=packing)
    most = plan.most_segments()[bucket]
    for number in itertools.count():
        yield lay_out(plan.batch(number), most)


def lay_out(planned: PlannedBatch, most: int) -> tuple[np.ndarray, np.ndarray]:
    """The segment ids and the offsets of a planned batch."""
    offsets = find_offsets(planned, 0, np.arange(planned.bucket.rows), most)
    columns = np.arange(planned.bucket.length)
    ids = (columns[None, :, None] >= offsets[:, None, :]).sum(axis=-1)
    return np.where(columns < offsets[:, -1:], ids, 0).astype(np.int32), offsets


def training_step(config: TransformerConfig) -> tuple[Callable, Any]:
    """A step of a decoder's training, and its state."""
    graph, params = nnx.split(Decoder(config, rngs=nnx.Rngs(0)))
    optimizer = optax.adamw(1e-4, mask=decay_mask)

    def loss(params: Any, ids: jax.Array, offsets: jax.Array) -> jax.Array:
        model = nnx.merge(graph, params)
        tokens = (ids * 7919) % config.vocab_size
        begins = jnp.take_along_axis(offsets, jnp.maximum(ids - 1, 0), axis=1)
        positions = jnp.where(ids > 0, jnp.arange(ids.shape[1]) - begins, 0)
        hidden = model.hidden(tokens, ids, positions, segment_offsets=offsets)
        sums = chunked_cross_entropy(hidden, model.embedding.logits, tokens, ids > 0)
        return sums.total / jnp.maximum(sums.weight, 1)

    @partial(jax.jit, donate_argnums=0)
    def step(state: Any, ids: jax.Array, offsets: jax.Array) -> Any:
        value, gradient = jax.value_and_grad(loss)(state[0], ids, offsets)
        updates, moments = optimizer.update(gradient, state[1], state[0])
        return (optax.apply_updates(state[0], updates), moments), value

    return step, (params, optimizer.init(params))


def training_speed(
    config: TransformerConfig, batches: Iterator[tuple[np.ndarray, np.ndarray]]
) -> tuple[float, float]:
    """Real tokens per second, and the model's FLOPs for those per second: medians of steps."""
    step, state = training_step(config)
    speeds = []
    for number, (ids, offsets) in zip(range(STEPS), batches, strict=False):
        begin = time.perf_counter()
        state, value = step(state, ids, offsets)
        jax.block_until_ready(value)
        seconds = time.perf_counter() - begin
        lengths = np.concatenate([np.bincount(row)[1:] for row in ids])
        flops = step_flops(config, lengths[:, None])
        speeds.append((np.count_nonzero(ids) / seconds, flops / seconds))
        assert np.isfinite(float(value)), number
    tokens, flops_used = (statistics.median(column) for column in zip(*speeds[2:], strict=True))
    return float(tokens), float(flops_used)


# ---- Tiers.


def tiers(setting: Setting) -> Iterator[Line]:
    """The time of steps with one row on each device, over the time if work were even."""
    length, devices = setting.tiers_row, setting.devices
    lengths = np.random.default_rng(3).lognormal(6.5, 1.5, 1 << 13).clip(2, length).astype(int)
    bucket = Bucket(devices, length)
    plans = {number: Plan(lengths, [bucket], tiers=number) for number in (1, setting.tiers)}
    batches = {
        number: [plan.batch(step) for step in range(setting.tiers)]
        for number, plan in plans.items()
    }
    most = max(plan.most_segments()[bucket] for plan in plans.values())
    (small, *_) = setting.models.values()
    for name, flaw in implementations().items():
        if flaw or (name == "cudnn" and length > LONGEST_CUDNN):
            continue
        config = TransformerConfig(
            vocab_size=64,
            num_kv_heads=small["num_heads"],
            dtype=setting.dtype,
            attention=name,
            **{**small, "num_layers": 1},
        )
        step, state = training_step(config)
        seconds: dict[bytes, float] = {}  # of each row, which the batches of both plans share
        steps: dict[int, list[np.ndarray]] = {}
        for number, block in batches.items():
            for planned in block:
                ids, offsets = lay_out(planned, most)
                times = []
                for row in range(devices):
                    key = planned.segments[planned.segments[:, 0] == row, 1:].tobytes()
                    if key not in seconds:
                        inputs = ids[row : row + 1], offsets[row : row + 1]
                        for _ in range(2 if seconds else 3):  # the first of all compiles
                            begin = time.perf_counter()
                            state, value = step(state, *inputs)
                            jax.block_until_ready(value)
                            seconds[key] = time.perf_counter() - begin
                    times.append(seconds[key])
                steps.setdefault(number, []).append(np.array(times))
        ratios = {
            number: sum(each.max() for each in block) / sum(each.mean() for each in block)
            for number, block in steps.items()
        }
        first, last = ratios[1], ratios[setting.tiers]
        yield Line(
            f"{name}, {devices} × {length:,}, tiers={setting.tiers}",
            f"{last:.2f}",
            f"over even work; without tiers {first:.2f}, so steps take {last / first:.2f}×",
        )


PARTS: dict[str, Callable[[Setting], Iterator[Line]]] = {
    "equality": equality,
    "attention": attention,
    "training": training,
    "tiers": tiers,
}

if __name__ == "__main__":
    main()
