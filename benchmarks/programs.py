"""Training steps compiled for TPUs that are not here: `python -m benchmarks programs`.

Needs `pip install libtpu`, which compiles for any slice on any machine of Linux. It shows what no
CPU does: whether kernels compile and are partitioned, the memory of a device, and what devices
send one another. Nothing runs, so it says nothing of speed or results.
"""

import os
import re
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.experimental import topologies

from benchmarks.results import Section
from models import parameters
from models.config import TransformerConfig
from models.decoder import Decoder
from models.loss import chunked_cross_entropy
from models.splash import splash_available
from pipeline.loading.sharding import batch_sharding
from pipeline.steps.train_step import make_train_step

TOPOLOGY = "v5e:2x4"  # 8 devices of 16 GiB
SHAPE = 16, 2048  # rows and positions
SIZES = {"num_layers": 24, "width": 1024, "num_heads": 16, "num_kv_heads": 8, "mlp_width": 2816}
INPUTS = "inputs", "inputs_segment_ids", "inputs_positions"
MESHES: tuple[tuple[str, dict[str, int]], ...] = (
    ("splash", {"data": 8}),
    ("splash", {"fsdp": 8}),
    ("splash", {"data": 2, "fsdp": 2, "tensor": 2}),
    ("blocked", {"fsdp": 4, "context": 2}),
    ("splash", {"fsdp": 4, "context": 2}),
)


def measure() -> Section:
    """Compiles a step of a 350M decoder for each of some meshes."""
    kernel = "tokamax" if splash_available() else "JAX's own"
    about = (
        f"A training step of a 350M decoder on {SHAPE[0]} rows of {SHAPE[1]:,}, compiled for "
        f"{TOPOLOGY} on this CPU by jax {jax.__version__}; splash is {kernel}."
    )
    columns = "attention and mesh", "GiB of the state", "of the step", "sent in a layer or a step"
    return Section("programs", about, [*compile_all()], columns)


def compile_all() -> Iterator[tuple[str, ...]]:
    """A line for each mesh: GiB on a device, and the operations between devices."""
    os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost"}
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-8")
    devices = topologies.get_topology_desc(TOPOLOGY, "tpu").devices
    for attention, axes in MESHES:
        step, state, batch, mesh = training_step(attention, axes, devices)
        # Kernels are for the backend that JAX would run on, and would be interpreted.
        with mock.patch.object(jax, "default_backend", return_value="tpu"), jax.set_mesh(mesh):
            shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
            jitted = jax.jit(step, donate_argnums=0, out_shardings=(shardings, jax.P()))
            program = jitted.lower(state, batch).compile()
        text, memory = program.as_text(), program.memory_analysis()
        if (attention == "splash") != ("tpu_custom_call" in text):
            raise RuntimeError(f"{attention} on {axes}: the program has another attention")
        sent = {
            kind: len(re.findall(rf" {kind}(?:-start)?\(", text))
            for kind in ("all-gather", "all-reduce", "reduce-scatter", "all-to-all")
        }
        yield (
            f"{attention}, {' × '.join(f'{name} {size}' for name, size in axes.items())}",
            f"{memory.argument_size_in_bytes / 2**30:.2f}",
            f"{memory.temp_size_in_bytes / 2**30:.2f}",
            ", ".join(f"{count} {kind}" for kind, count in sent.items() if count),
        )


def training_step(attention: str, axes: dict[str, int], devices: Any) -> tuple[Any, ...]:
    """A step, the shapes of its state and of a batch, and the mesh."""
    sizes = dict.fromkeys(("context", "data", "fsdp", "tensor"), 1) | axes
    auto = (jax.sharding.AxisType.Auto,) * len(sizes)
    mesh = jax.make_mesh((*sizes.values(),), (*sizes,), axis_types=auto, devices=devices)
    config = TransformerConfig(
        vocab_size=32_768,
        dtype="bfloat16",
        attention=attention,
        remat=True,
        scan_layers=True,
        **SIZES,
    )
    graph, _ = nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))

    def init(key: Any) -> Any:
        return nnx.to_pure_dict(nnx.state(Decoder(config, rngs=nnx.Rngs(key)), nnx.Param))

    def loss(params: Any, batch: Any) -> Any:
        model: Any = nnx.merge(graph, params)
        hidden = model.hidden(*(batch[name] for name in INPUTS))
        return chunked_cross_entropy(
            hidden, model.embedding.logits, batch["targets"], batch["loss_weights"]
        )

    sharding = batch_sharding(mesh)
    state_of, step = make_train_step(loss, optax.adamw(1e-4), sharding=sharding)
    key = jax.random.key(0)
    state = parameters.jit_init(lambda key: state_of(init(key)), mesh).eval_shape(key)
    spec = jax.ShapeDtypeStruct(SHAPE, jnp.int32, sharding=sharding)
    weights = jax.ShapeDtypeStruct(SHAPE, jnp.float32, sharding=sharding)
    batch = {**dict.fromkeys((*INPUTS, "targets"), spec), "loss_weights": weights}
    return step, state, batch, mesh
